"""Random answers in each family's form: what streams say, joined, is what a whole answer says.

    python -m onestem_lab.serve.forms [--sequences 100000] [--seed 0] [--processes 1]

In the root of a clone. A sequence has up to 30 texts, each a token: a form's own marks and calls,
halves of them, and others. It is read as a whole, and in pieces of up to 1, 4 or 30 characters;
both must say the same text, reasoning and calls. Each twentieth also goes through what writes
streams, in chunks of up to four tokens, for chats, `/v1/messages` and `/v1/responses`. These
events, put together as a client does, must be the whole answer. The first sequence that is read
otherwise ends the run. Written to lab/results/serve-forms.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from onestem.adapters.messages_write import Messages
from onestem.adapters.responses_write import Responses
from onestem.openai.forms import FORMS, GENERIC, Form, ReadAnswer, Reading
from onestem.openai.write import Chunks, ResponseFormat, answer_body, reasoning_tokens
from onestem.request import CompletionOutput, RequestOutput
from onestem_lab.results import RESULTS, machine, write
from tests.adapters.events import events_of, folded_message, folded_response
from tests.openai.test_forms import THINKING, read_in_pieces, sequences

ALL: list[Form] = [*FORMS, GENERIC, THINKING]
BLOCK = 1000  # sequences of one task
WRITTEN = 20  # of so many one is written by all APIs
USAGE = {
    "prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=100_000, help="of each form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    tasks = [
        (place, options.seed, first, min(BLOCK, options.sequences - first))
        for first in range(0, options.sequences, BLOCK)
        for place in range(len(ALL))
    ]
    found = [Counter[str]() for _ in ALL]
    with ProcessPoolExecutor(options.processes) as pool:
        for (place, *_), counts in zip(
            tasks, pool.map(read, *zip(*tasks, strict=True)), strict=True
        ):
            found[place].update(counts)
    result = {
        "command": " ".join(["python -m onestem_lab.serve.forms", *sys.argv[1:]]),
        "machine": machine(),
        "seconds": time.monotonic() - began,
        "differences": 0,
        "forms": [
            {"form": form.name, "thinks": form.has_reasoning, **counts}
            for form, counts in zip(ALL, found, strict=True)
        ],
    }
    print(json.dumps(result, indent=1))
    write(RESULTS / "serve-forms.json", result)


def read(place: int, seed: int, first: int, count: int) -> Counter[str]:
    """Read a block of a form's sequences, and count what is in them."""
    rng = random.Random(f"{seed} {place} {first}")
    counts: Counter[str] = Counter(sequences=count, calls=0, reasoning=0, written=0)
    for number, (parts, reading) in enumerate(sequences(ALL[place], rng, count)):
        text = "".join(parts)
        whole = ReadAnswer.of(text, reading)
        counts["calls"] += bool(whole.calls)
        counts["reasoning"] += bool(whole.reasoning)
        _same(read_in_pieces(text, reading, rng, rng.choice((1, 4, 30))), whole, parts, reading)
        if number % WRITTEN == 0:
            counts["written"] += 1
            for told, made in _by_each_api(parts, reading, rng):
                _same(told, made, parts, reading)
    return counts


def _same(told: Any, whole: Any, parts: Sequence[str], reading: Reading) -> None:
    if told != whole:
        raise AssertionError(f"{parts!r}, {reading}: {told} in pieces, {whole} as a whole")


def _by_each_api(
    parts: Sequence[str], reading: Reading, rng: random.Random
) -> Iterable[tuple[Any, Any]]:
    """Of each API what the events of a stream say, and the whole answer."""
    spelled = [part.encode() for part in parts]
    form = ResponseFormat(
        kind="chat", model="m", logprobs=None, return_token_ids=False, reading=reading,
        token_bytes=spelled.__getitem__,
    )  # fmt: skip
    text, ids = "".join(parts), list(range(len(parts)))
    reasoning_tokens(form, [], [(ids, text)])
    out = CompletionOutput(index=0, text=text, token_ids=ids, finish_reason="stop")
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[], outputs=[out], finished=True
    )
    (choice,) = answer_body("r", output, form)["choices"]
    chat = _streamed(Chunks("r", 0, form, prompts=[[]], n=1, include_usage=False), parts, rng)
    yield _folded_chat(chat), (choice["message"], choice["finish_reason"])
    for dialect, fold in (
        (Messages(99), folded_message),
        (Responses({}, None), folded_response),
    ):
        name = dialect.id_prefix + "1"
        writer = dialect.writer(name, 0, form, lambda: USAGE)
        raw = _streamed(writer, parts, rng) + writer.usage(USAGE)
        made = dialect.writer(name, 0, form, lambda: USAGE).whole(out, USAGE)
        yield _comparable(fold, events_of(raw), made)


def _comparable(fold: Any, events: list[dict[str, Any]], made: Any) -> tuple[Any, Any]:
    """A stream's message beside the whole one. What is no JSON stands in a whole message under one
    name, and in a stream as it is."""
    odd = [
        place
        for place, block in enumerate(made.get("content", ()))
        if list(block.get("input", ())) == ["arguments"]
    ]
    try:
        told = fold(events)
    except ValueError:
        if odd:
            return None, None
        raise
    for place in odd:
        told["content"][place]["input"] = made["content"][place]["input"]
    return told, made


def _streamed(writer: Any, parts: Sequence[str], rng: random.Random) -> bytes:
    """The frames of a stream, in chunks of up to four tokens."""
    raw, at = b"", 0
    while at < len(parts):
        size = rng.randint(1, 4)
        some = parts[at : at + size]
        if len(some) == 1 and at and rng.random() < 0.7:
            raw += writer.token(at, some[0])
        else:
            ids = list(range(at, at + len(some)))
            out = CompletionOutput(index=0, text="".join(some), token_ids=ids)
            raw += writer.events({(0, 0): out})
        at += size
    last = CompletionOutput(index=0, text="", token_ids=[], finish_reason="stop")
    return raw + writer.events({(0, 0): last})


def _folded_chat(raw: bytes) -> tuple[dict[str, Any], str | None]:
    """A chat's message and the reason for its end, of the frames of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    reason = None
    for frame in filter(None, raw.decode().split("\n\n")):
        for choice in json.loads(frame.removeprefix("data: "))["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            message["content"] += delta.get("content") or ""
            for name in ("reasoning_content", "reasoning"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if call["index"] < len(calls):
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    made = {"id": call["id"], "type": "function"}
                    calls.append({**made, "function": dict(call["function"])})
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message, reason


if __name__ == "__main__":
    main()
