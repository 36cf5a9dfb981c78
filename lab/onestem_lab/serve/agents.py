"""Does a conversation of an agent find what was computed of it before?

    python -m onestem_lab.serve.agents [--conversations 200] [--scale 1] [--short]

Agents of a few applications talk to a server over HTTP. An application has about 3,000 tokens of
system prompt and tools. A conversation has six turns: two calls of tools and an answer, then a
further question, two calls and an answer. Each turn sends back what the server has answered, as the
client dumps it, and the tools' results. Conversations run 16 at a time and nobody thinks.

What could be cached is computed by an oracle that knows the token ids of all prompts and answers: a
prefix cache with unlimited memory finds the longest common prefix with any prompt that was sent
before, or any prompt with its answer that was complete. A prompt's last token and an answer's last
token have no keys and values yet. `exact` counts tokens, `pages` whole pages of 16. Asked: cached
tokens are at least 95% of the exact ones. `as_written`: what an oracle finds if each answer's
tokens stand in the next prompt as they were sampled. Written to
lab/results/serve-agents.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from onestem.engine.text.tokenizer import Tokenizer
from onestem.models.find import find_model
from onestem_lab.load.run import model_name
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.load.workload import WORDS
from onestem_lab.results import RESULTS, machine, write

__all__ = ["Oracle", "Turn", "measured", "summary"]

ASKED = 0.95
PAGE = 16
# A turn's `tool_choice`; "none" is an answer to the user, who asks again afterwards.
CHOICES = ("required", "required", "none")
Message = dict[str, Any]


def main() -> None:
    options = _options()
    path = find_model(options.model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        log = folder / "server.log" if options.log is None else options.log
        port = free_port()
        flags = [f"--model={options.model}", f"--kv-memory={options.kv_memory}"]
        flags += ["--random-weights"] * options.random_weights
        url = stack.enter_context(serving(onestem_command(port, folder, flags), port, log=log))
        agents = Agents(options, Tokenizer.from_directory(path))
        began = time.monotonic()
        asyncio.run(agents.talk(url))
        seconds = time.monotonic() - began
    result = {
        "command": " ".join(["python -m onestem_lab.serve.agents", *sys.argv[1:]]),
        "machine": machine(),
        "system_tokens": agents.system_tokens,
        "seconds": seconds,
        "requests_per_s": len(agents.turns) / seconds,
        **summary(agents.turns),
    }
    print(json.dumps(result, indent=1))
    if not options.short:
        path = RESULTS / f"serve-agents{options.suffix}.json"
        write(path, result)
    sys.exit(not result["good"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded", help="'embedded' or a directory")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--apps", type=int, default=3, help="applications")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=16, help="conversations that run")
    parser.add_argument("--alike", type=int, default=1, help="conversations that ask the same")
    parser.add_argument("--system-tokens", type=int, default=3000, help="with tools")
    parser.add_argument("--scale", type=float, default=1.0, help="of questions and results")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="the server's log (default: thrown away)")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")
    parser.add_argument("--short", action="store_true", help="20 conversations, no result file")
    options = parser.parse_args()
    if options.short:
        options.conversations = 20
    return options


# ----------------------------------------------------------------------------- the oracle


@dataclass(kw_only=True)
class Turn:
    """One request. `number`: its place in its conversation, from 0.

    Attributes:
        prompt, answer: token ids; the answer's as they were sampled.
        before: the turn before it, if there is one.
        system_tokens: of its application, which other conversations have too.
        cached, rerendered: tokens, as `usage` says.
        exact: tokens that the oracle finds.
        seconds: to the whole answer.
    """

    number: int
    before: Turn | None = None
    system_tokens: int = 0
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    cached: int = 0
    rerendered: int = 0
    exact: int = 0
    seconds: float = 0.0

    @property
    def as_written(self) -> int:
        """What is cached at least if the turn before stands in the prompt as it was sampled."""
        if self.before is None:
            return self.exact
        before = len(self.before.prompt) + max(0, len(self.before.answer) - 1)
        return max(self.exact, min(before, len(self.prompt) - 1))


class Oracle:
    """The longest common prefix with anything that was known before."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def know(self, tokens: Iterable[int]) -> None:
        self._known.update(_prefixes(tokens))

    def common(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of these some known sequence has."""
        count = 0
        for prefix in _prefixes(tokens):
            if prefix not in self._known:
                break
            count += 1
        return count


def _prefixes(tokens: Iterable[int]) -> Iterable[int]:
    """A hash (64 bits) of each prefix."""
    prefix = 0
    for token in tokens:
        prefix = hash((prefix, token))
        yield prefix


def measured(events: Iterable[tuple[str, Turn]]) -> list[Turn]:
    """Turns with what the oracle finds.

    Args:
        events: in order, ("sent", turn) and ("done", turn) of each.
    """
    oracle, turns = Oracle(), []
    for what, turn in events:
        if what == "sent":
            turn.exact = min(oracle.common(turn.prompt), len(turn.prompt) - 1)
            oracle.know(turn.prompt)
            turns.append(turn)
        else:
            oracle.know([*turn.prompt, *turn.answer[:-1]])
    return turns


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Shares of all turns, and by a turn's place in its conversation."""
    numbers = sorted({turn.number for turn in turns})
    whole = _shares(turns)
    return {
        **whole,
        "by_turn": [_shares([turn for turn in turns if turn.number == n]) for n in numbers],
        "asked": ASKED,
        "good": whole["of_exact"] >= ASKED,
    }


def _shares(turns: Sequence[Turn]) -> dict[str, Any]:
    def total(of: Callable[[Turn], int]) -> int:
        return sum(map(of, turns))

    tokens, cached = total(lambda t: len(t.prompt)), total(lambda t: t.cached)
    exact, written = total(lambda t: t.exact), total(lambda t: t.as_written)
    pages = total(lambda t: t.exact - t.exact % PAGE)
    # Of what is no application's: the system prompt would hide what a conversation loses.
    own = total(lambda t: max(0, t.exact - t.system_tokens))
    own_cached = total(lambda t: max(0, t.cached - t.system_tokens))
    own_written = total(lambda t: max(0, t.as_written - t.system_tokens))
    return {
        "requests": len(turns),
        "prompt_tokens": tokens,
        "answer_tokens": total(lambda t: len(t.answer)),
        "cached": cached,
        "exact": exact,
        "pages": pages,
        "as_written": written,
        "rerendered": total(lambda t: t.rerendered),
        "share": cached / tokens,
        "of_exact": cached / exact if exact else 1.0,
        "of_pages": cached / pages if pages else 1.0,
        "own_of_exact": own_cached / own if own else 1.0,
        "own_of_as_written": own_cached / own_written if own_written else 1.0,
        "mean_seconds": sum(t.seconds for t in turns) / len(turns),
    }


# ----------------------------------------------------------------------------- conversations


@dataclass
class Agents:
    """Conversations with a server.

    Attributes:
        turns: all requests, once `talk` has ended.
        system_tokens: of each application, with tools.
    """

    options: argparse.Namespace
    tokenizer: Tokenizer | None
    turns: list[Turn] = field(default_factory=list)
    system_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise SystemExit("the model has no tokenizer, expected one with a chat template")
        self._apps = [self._app(number) for number in range(self.options.apps)]
        self._events: list[tuple[str, Turn]] = []

    def _app(self, number: int) -> dict[str, Any]:
        """System prompt and tools of about as many tokens as asked."""
        assert self.tokenizer is not None
        rng = random.Random(f"{self.options.seed}-app-{number}")
        tools = [_tool(rng, index) for index in range(10)]
        system = f"You are assistant {number} of a shop. Be exact. Call a tool before you answer."
        count = 0
        while True:
            messages = [{"role": "system", "content": system}]
            ids = self.tokenizer.apply_chat_template(messages, False, fields={"tools": tools})
            if len(ids) >= self.options.system_tokens:
                break
            count += 1
            system += f"\n{count}. {_sentence(rng, 16)}"
        self.system_tokens.append(len(ids))
        return {"system": system, "tools": tools}

    async def talk(self, url: str) -> None:
        """Have all conversations, so many at a time."""
        waiting = iter(range(self.options.conversations))
        name = model_name(url)
        limits = httpx2.Limits(max_connections=self.options.at_once)

        async def one_by_one(client: httpx2.AsyncClient) -> None:
            for number in waiting:
                await self._conversation(client, name, number)

        async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            await asyncio.gather(*(one_by_one(client) for _ in range(self.options.at_once)))
        self.turns = measured(self._events)

    async def _conversation(self, client: httpx2.AsyncClient, model: str, number: int) -> None:
        # Those that ask the same are of one application; their answers may differ.
        same = number // self.options.alike
        rng = random.Random(f"{self.options.seed}-conversation-{same}")
        which = same % self.options.apps
        app, before = self._apps[which], None
        messages: list[Message] = [{"role": "system", "content": app["system"]}]
        for place in range(self.options.turns):
            choice = CHOICES[place % len(CHOICES)]
            if place % len(CHOICES) == 0:
                messages.append({"role": "user", "content": self._text(rng, 60)})
            body = {
                "model": model,
                "messages": messages,
                "tools": app["tools"],
                "tool_choice": choice,
                "parallel_tool_calls": number % 2 == 0,
                "max_tokens": 160 if choice == "required" else 80,
                "temperature": self.options.temperature,
                "seed": number * 1000 + place,
                "return_token_ids": True,
            }
            before = Turn(number=place, before=before, system_tokens=self.system_tokens[which])
            message = await self._turn(client, body, before)
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": self._result(rng)}
                for call in message.get("tool_calls") or ()
            ]

    async def _turn(self, client: httpx2.AsyncClient, body: dict[str, Any], turn: Turn) -> Message:
        """Send a request and note what it has come to; the message that it is answered with."""
        self._events.append(("sent", turn))
        began = time.monotonic()
        answer = await client.post("/v1/chat/completions", json=body)
        turn.seconds = time.monotonic() - began
        if answer.status_code != 200:
            raise SystemExit(f"a turn was answered with {answer.status_code}: {answer.text[:300]}")
        found = answer.json()
        (choice,) = found["choices"]
        turn.prompt, turn.answer = found["prompt_token_ids"], choice["token_ids"]
        details = found["usage"]["prompt_tokens_details"]
        turn.cached = details["cached_tokens"]
        turn.rerendered = details.get("rerendered_tokens", 0)
        self._events.append(("done", turn))
        message: Message = choice["message"]
        return message

    def _text(self, rng: random.Random, words: int) -> str:
        return _sentence(rng, max(4, round(words * self.options.scale)))

    def _result(self, rng: random.Random) -> str:
        """What a tool gives back: JSON with some text."""
        rows = [
            {"id": rng.randrange(10_000), "state": rng.choice(STATES), "note": self._text(rng, 12)}
            for _ in range(max(1, round(4 * self.options.scale)))
        ]
        return json.dumps({"rows": rows})


STATES = ("open", "paid", "sent", "back")


def _tool(rng: random.Random, index: int) -> Message:
    verb = rng.choice(("find", "list", "count", "change"))
    thing = rng.choice(("order", "map", "price", "customer"))
    return {
        "type": "function",
        "function": {
            "name": f"{verb}_{thing}_{index}",
            "description": _sentence(rng, 20),
            "parameters": {
                "type": "object",
                "properties": {
                    "state": {"enum": list(STATES), "description": _sentence(rng, 6)},
                    "number": {"type": "integer", "minimum": 0, "maximum": 9999},
                    "words": {"type": "array", "items": {"enum": list(WORDS[:8])}, "maxItems": 3},
                },
                "required": ["state", "number", "words"],
                "additionalProperties": False,
            },
        },
    }


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


if __name__ == "__main__":
    main()
