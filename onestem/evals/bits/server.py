"""Requests to a server of OpenAI's completions: alone and cold, again, and beside others."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import count
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from onestem.errors import OnestemError, first_line
from onestem.evals.bits.pairs import Kind, Reply
from onestem.evals.bits.texts import SHARED, texts

CHARACTERS = 3  # of a token, about
TOP = 5  # log-probabilities of each token: what OpenAI allows
TIMEOUT = 600.0  # seconds of an answer
HITS = re.compile(r"^vllm:prefix_cache_hits(?:_total)?(?:{.*})? (\S+)$", re.M)


class ServerBits:
    """Asks a server. It may hold anything: each prompt begins with a number that is drawn, so that
    nothing of it is cached when it comes first.

    Args:
        url: up to `/v1`.
        model: as the server calls it; None: its first.
        prompts, tokens, sampled: how many prompts, of about how many tokens, and how many to
            sample.

    Raises:
        OnestemError: the server does not answer as it should.
    """

    def __init__(
        self, url: str, model: str | None, *, prompts: int, tokens: int, sampled: int
    ) -> None:
        self._url, self._sampled = url.rstrip("/"), sampled
        self.model = model or str(_in(self._answer("models"), "data", 0, "id"))
        shared, rest = int(SHARED * CHARACTERS * tokens), int((1 - SHARED) * CHARACTERS * tokens)
        made = texts(prompts, shared)
        heads = [f"{secrets.token_hex(8)} {beginning[:shared]}" for beginning, _ in made]
        ends = [end[:rest] for _, end in made]
        self._prompts = [head + end for head, end in zip(heads, ends, strict=True)]
        self._beside = [head + ends[i - 1] for i, head in enumerate(heads)]

    def kinds(self) -> Iterator[Kind]:
        """Each change, tried."""
        alone = list(self._one_by_one())
        yield self._compared(Kind("cached prefix", "cached"), alone, self._one_by_one())
        yield self._compared(Kind("neighbours, cached", "cached"), alone, self._together())

    def _one_by_one(self) -> Iterator[Reply]:
        return map(self._ask, count(), self._prompts)

    def _together(self) -> Iterator[Reply]:
        both = [*self._prompts, *self._beside]
        with ThreadPoolExecutor(len(both)) as pool:
            yield from list(pool.map(self._ask, count(), both))[: len(self._prompts)]

    def _compared(self, kind: Kind, alone: list[Reply], others: Iterator[Reply]) -> Kind:
        before = self._hits()
        for i, reply in enumerate(others):
            kind.compare(i, alone[i], reply)
        if kind.cached is None and before is not None:
            kind.cached = (self._hits() or before) - before
        return kind

    def _ask(self, number: int, prompt: str) -> Reply:
        """The reply to a prompt: greedy of an even number, of an odd one sampled with a seed."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": self._sampled,
            "temperature": number % 2, "seed": number, "logprobs": TOP,
        }  # fmt: skip
        answer = self._answer("completions", body)
        try:
            return self._read(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {first_line(error)}"
            raise OnestemError(f"the server's answer is not one of completions ({told})") from None

    def _read(self, answer: Any) -> Reply:
        found = _in(answer, "choices", 0, "logprobs")
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        if isinstance(found, dict) and "content" in found:  # llama.cpp's, as of chats
            entries = [(one, *one.get("top_logprobs", ())) for one in found["content"]]
            leading = [{e["token"]: e["logprob"] for e in reversed(entry)} for entry in entries]
            tokens = [own["token"] for own, *_ in entries]
        else:
            tokens, own = _in(found, "tokens"), _in(found, "token_logprobs")
            tops = found.get("top_logprobs") or [{}] * len(tokens)
            leading = [{**top, t: p} for t, p, top in zip(tokens, own, tops, strict=True)]
        return Reply(tokens, leading, cached=details.get("cached_tokens"))

    def _hits(self) -> int | None:
        """Tokens of prompts that vLLM's metrics call cached; None: there are no such metrics."""
        try:
            with urlopen(self._url.removesuffix("/v1") + "/metrics", timeout=TIMEOUT) as page:
                hits = HITS.findall(page.read().decode())
        except (OSError, HTTPException, UnicodeDecodeError):
            return None
        return int(sum(map(float, hits))) if hits else None

    def _answer(self, path: str, body: Any = None) -> Any:
        url, key = f"{self._url}/{path}", os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        try:
            data = None if body is None else json.dumps(body).encode()
            with urlopen(Request(url, data, headers), timeout=TIMEOUT) as answer:
                return json.load(answer)
        except HTTPError as error:
            told = " ".join(error.read(500).decode(errors="replace").split())
            raise OnestemError(f"{url} answers {error.code}: {told}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise OnestemError(f"{url} does not answer: {first_line(error)}") from None


def _in(answer: Any, *path: str | int) -> Any:
    """A value inside an answer."""
    for at in path:
        try:
            answer = answer[at]
        except (KeyError, IndexError, TypeError):
            raise OnestemError(
                f"the server's answer has no {at!r}: it must give logprobs"
            ) from None
    return answer
