"""One streamed request to an OpenAI server, and its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx2

from onestem.errors import ConfigError
from onestem.openai.schema import URL_OF_KIND
from onestem_lab.load.figures import Outcome
from onestem_lab.load.stream import Answer
from onestem_lab.load.workload import Ask

__all__ = ["Target", "open_client"]


@dataclass(frozen=True)
class Target:
    """The model to ask, and the form of requests.

    Attributes:
        model: the name that requests carry.
        chat: ask `/v1/chat/completions` (text prompts) instead of `/v1/completions`.
        plain: send only OpenAI's own fields. Otherwise also `ignore_eos` and `return_token_ids`,
            which vLLM and Onestem have, so that answers have the asked length and can be counted.
        extra: more fields of the body.
    """

    model: str
    chat: bool = False
    plain: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return URL_OF_KIND["chat" if self.chat else "completion"]

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {
            "model": self.model,
            **self._prompt(ask),
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.plain:
            body |= {"ignore_eos": True, "return_token_ids": True}
        return body | self.extra

    def _prompt(self, ask: Ask) -> dict[str, Any]:
        if not self.chat:
            return {"prompt": ask.prompt}
        if not isinstance(ask.question, str):
            raise ConfigError("chat wants prompts of text: add --prompts text")
        return {
            "messages": [
                {"role": "system", "content": ask.system},
                {"role": "user", "content": ask.question},
            ]
        }

    async def send(
        self, client: httpx2.AsyncClient, ask: Ask, outcome: Outcome, began: float
    ) -> Outcome:
        """Ask, read the answer to its end, and record what came when.

        Times are those of the running loop, less `began`. If cancelled, it closes the connection
        and leaves in `outcome` what came until then.
        """
        clock = asyncio.get_running_loop().time
        answer = Answer(None if self.plain else ask.output_tokens)
        outcome.token_times = answer.token_times
        outcome.sent = clock() - began
        try:
            await self._receive(client, ask, answer, began)
            answer.end()
            outcome.faults = answer.faults
        except (httpx2.HTTPError, OSError) as error:
            outcome.failure = f"{type(error).__name__}: {error}"[:200]
        outcome.ended = clock() - began
        outcome.output_tokens, outcome.cached_tokens = answer.output_tokens, answer.cached_tokens
        outcome.prompt_tokens = int((answer.usage or {}).get("prompt_tokens") or 0)
        return outcome

    async def _receive(
        self, client: httpx2.AsyncClient, ask: Ask, answer: Answer, began: float
    ) -> None:
        clock = asyncio.get_running_loop().time
        async with client.stream("POST", self.path, json=self.body(ask)) as response:
            if response.status_code != 200:
                text = (await response.aread())[:200].decode(errors="replace")
                raise httpx2.HTTPError(f"{response.status_code} {text}")
            async for received in response.aiter_raw():
                answer.feed(received, clock() - began)


def open_client(base_url: str, api_key: str | None, timeout: float) -> httpx2.AsyncClient:
    """A client without a limit of connections: arrivals never wait for one another.

    `timeout` bounds the seconds between two reads of a stream.
    """
    headers = {"accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return httpx2.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx2.Timeout(timeout, connect=60.0, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        trust_env=False,
        # Reading the certificates takes half a second of a core, so only if they are needed.
        verify=base_url.startswith("https:"),
    )
