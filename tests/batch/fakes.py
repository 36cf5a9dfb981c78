"""A tokenizer of bytes and an engine that answers by arithmetic, in an order of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from onestem.batch import JobSummary, Rules, run_job
from onestem.engine.text.tokenizer import ChatIds
from onestem.errors import RequestError
from onestem.openai.read import Asked
from onestem.planner import plan_job
from onestem.rawtext import RawText
from onestem.request import CompletionOutput, Request, RequestOutput
from onestem.scores import PathScores, ScorePath

BOS = 1
FIRST_BYTE = 3
VOCAB = 256 + FIRST_BYTE
MAX_LEN = 400


class FakeTokenizer:
    """One token per byte; `<s>` is BOS. Refuses texts with "refuse me" in them."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    first_id = BOS

    def encode_batch(
        self, texts: list[RawText], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        self.batches.append(len(texts))
        if any("refuse me" in raw.text for raw in texts):
            raise RequestError("the tokenizer refuses this text")
        return [self._ids(raw, [BOS] * add_special_tokens) for raw in texts]

    def _ids(self, raw: RawText, ids: list[int]) -> list[int]:
        start = 0
        for found in re.finditer("<s>|$", raw.text):
            if not raw.quotes(*found.span()):
                ids += [byte + FIRST_BYTE for byte in raw.text[start : found.start()].encode()]
                ids += [BOS] * bool(found.group())
                start = found.end()
        return ids

    def chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **how: Any
    ) -> ChatIds:
        text = "".join(f"[{m['role']}]{json.dumps(m['content'])}" for m in messages)
        ids = self.encode_batch([RawText(text + "[assistant]" * add_generation_prompt)])[0]
        return ChatIds(ids, None)

    special_ids = frozenset({BOS})

    def held(self, asked: Asked, hold_schema: Any, chat: Any) -> tuple[Asked, None]:
        return asked.held(None, lambda name: None, hold_schema), None

    def reading(self, prompt: Sequence[int], texts: Any, *, is_free: bool) -> None:
        return None


def token_bytes(token: int) -> bytes:
    return bytes([token - FIRST_BYTE]) if token >= FIRST_BYTE else b"<s>"


def validate(request: Request) -> None:
    if len(request.prompt_token_ids) >= MAX_LEN:
        raise RequestError(
            f"prompt has {len(request.prompt_token_ids)} tokens, limit is {MAX_LEN - 1}"
        )


def _answer(request: Request, index: int) -> CompletionOutput:
    """An answer that depends on all that may change it, and on nothing else."""
    known = (list(request.prompt_token_ids), repr(request.params), index)
    digest = hashlib.sha256(repr(known).encode()).digest()
    length = min(request.params.max_tokens or 20, 1 + digest[0] % 20)
    ids = [FIRST_BYTE + 97 + byte % 26 for byte in digest[:length]]
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = [{token: -0.5, token - 1: -1.5, 200: float("-inf")} for token in ids]
    return CompletionOutput(
        index=index,
        text=b"".join(map(token_bytes, ids)).decode(),
        token_ids=ids,
        logprobs=logprobs,
        finish_reason="length" if request.params.max_tokens == length else "stop",
    )


def _path_scores(request: Request, path: ScorePath) -> PathScores:
    """Of what stands before each target, and of it."""
    ids = [*request.prompt_token_ids, *path.tokens.tolist()]
    ends = (path.rows + len(request.prompt_token_ids)).tolist()
    digests = [
        hashlib.sha256(repr((ids[:end], target)).encode()).digest()
        for end, target in zip(ends, path.targets.tolist(), strict=True)
    ]
    return PathScores(
        np.array([-1 - digest[0] / 7 for digest in digests]),
        np.array([digest[1] % 2 == 0 for digest in digests]),
    )


def answer(request: Request) -> RequestOutput:
    if request.paths:
        sequences = [CompletionOutput(index=i, text="", token_ids=[], finish_reason="stop")
                     for i in range(len(request.paths))]  # fmt: skip
        return RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=sequences,
            finished=True,
            scores=[_path_scores(request, path) for path in request.paths],
        )
    outputs = [_answer(request, i) for i in range(request.params.n)]
    output = RequestOutput(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=request.prompt_token_ids,
        outputs=outputs[::-1],
        finished=True,
    )
    if request.params.prompt_logprobs is not None:
        tail = [{token: -2.0} for token in request.prompt_token_ids[1:]]
        output.prompt_logprobs = [None, *tail]
    output.metrics.num_computed_tokens = len(request.prompt_token_ids)
    output.metrics.num_output_tokens = sum(len(one.token_ids) for one in outputs)
    return output


class FakeEngine:
    """Holds up to `room` requests, finishes them in an order that looks random.

    `seen` are the requests it pulled, `most_held` how many it held at once.
    """

    def __init__(self, room: int = 5) -> None:
        self.room = room
        self.seen: list[Request] = []
        self.most_held = 0
        self.closed = False

    def run(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        source = iter(requests)
        held: list[Request] = []
        try:
            while True:
                while len(held) < self.room and (request := next(source, None)) is not None:
                    self.seen.append(request)
                    held.append(request)
                self.most_held = max(self.most_held, len(held))
                if not held:
                    return
                held.sort(key=lambda r: hashlib.sha256(r.request_id.encode()).digest())
                yield self.finish(held.pop(0))
        finally:
            self.closed = True

    def finish(self, request: Request) -> RequestOutput:
        return answer(request)


def run_fake(
    source: Path, output: Path, engine: FakeEngine | None = None, **changes: Any
) -> JobSummary:
    """`run_job` with fakes for all that is not given."""
    arguments: dict[str, Any] = {
        "tokenizer": FakeTokenizer(),
        "validate": validate,
        "run": (engine or FakeEngine()).run,
        "planner": plan_job,
        "model_identity": "model-1",
        "model_name": "tiny",
        "options": {"dtype": "float32"},
        "token_bytes": token_bytes,
        **changes,
    }
    rules = {one.name for one in fields(Rules)} & arguments.keys()
    return run_job(
        source, output, Rules(**{name: arguments.pop(name) for name in rules}), **arguments
    )


def completion(custom_id: str, prompt: Any = "abc", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, **body},
    }


def chat(custom_id: str, content: Any = "hello", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}], **body},
    }


def write_lines(path: Path, lines: Iterable[dict[str, Any] | bytes]) -> Path:
    raw = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def mixed_job(path: Path, count: int = 40) -> Path:
    """Groups, a few bad lines, chats, several answers."""
    lines: list[dict[str, Any] | bytes] = []
    for i in range(count):
        document = f"document {i % 4} says what it says. "
        lines.append(completion(f"c{i}", f"{document} question {i}", n=1 + i % 3, temperature=1.0))
        if i % 5 == 0:
            lines.append(
                chat(f"chat{i}", document, max_tokens=5 + i, logprobs=True, top_logprobs=1)
            )
        if i % 7 == 0:
            lines += [b"not json", b"", completion(f"c{i}"), completion(f"long{i}", "x" * MAX_LEN)]
    return write_lines(path, lines)
