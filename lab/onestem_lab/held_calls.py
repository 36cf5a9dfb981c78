"""Right arguments of a trained model, where tools are held to more of their schemas than once.

    python -m onestem_lab.held_calls [--model smollm2] [--of-each 4]

Schemas that have something that is not enforced are held without it; once, any object fitted such a
tool. Asked are BFCL's questions (`bfcl-eval`) whose first right call is of such a function: each
with that one tool, which must be called, held as it is now and as it was. Of the first call,
arguments are right that BFCL's answers name, and one that is left out where they allow it. Written
to lab/results/held-calls.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import onestem.prompts
from onestem import LLM, SamplingParams
from onestem.engine.grammar.held import held_schema
from onestem.engine.grammar.schema import check_schema
from onestem.errors import UnsupportedError
from onestem.openai.forms.grammar import ANY_OBJECT
from onestem_lab.results import RESULTS, machine, write
from onestem_lab.serve.bfcl import Question, questions
from onestem_lab.serve.bfcl_data import data_folder

Json = dict[str, Any]
MAX_TOKENS = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--of-each", type=int, default=4, help="questions of one function, at most")
    options = parser.parse_args()
    ways = {"now": held_schema, "before": lambda *_: ANY_OBJECT}
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    found = {way: Counter[str]() for way in ways}
    better: Counter[str] = Counter()
    with LLM(options.model, device="cpu", dtype=options.dtype, kv_memory="256MiB") as llm:
        for question, tool, wanted in asked(options.of_each):
            tools = [{"type": "function", "function": tool}]
            right = {}
            for way, held in ways.items():
                onestem.prompts.held_schema = held  # type: ignore[assignment]
                (answer,) = llm.chat(
                    question.messages, params, tools=tools, tool_choice="required", use_tqdm=False
                )
                message = llm.assistant_message(answer, tools=tools)
                counts = counted(message["tool_calls"][0]["function"]["arguments"], wanted)
                found[way].update(counts)
                right[way] = counts["right"]
            best = [way for way in ways if right[way] == max(right.values())]
            better[" and ".join(best)] += 1
            print(question.id, right, flush=True)
    result = {
        "command": " ".join(["python -m onestem_lab.held_calls", *sys.argv[1:]]),
        "machine": machine(),
        "model": options.model,
        "dtype": options.dtype,
        "max_tokens": MAX_TOKENS,
        "found": found,
        "most_right": better,
    }
    print(json.dumps(result, indent=1))
    write(RESULTS / "held-calls.json", result)


def asked(of_each: int) -> Iterator[tuple[Question, Json, Mapping[str, list[Any]]]]:
    """Questions, their tools, and the values that are right by the argument's name."""
    truths = {}
    for file in sorted((data_folder() / "possible_answer").glob("BFCL_v4_*.json")):
        for one in map(json.loads, file.read_text().splitlines()):
            truths[one["id"]] = one.get("ground_truth")
    times: Counter[str] = Counter()
    for question in questions():
        truth = truths.get(question.id)
        if not truth or not isinstance(truth[0], dict):
            continue
        ((name, wanted),) = truth[0].items()
        tool = next((one for one in question.functions if one["name"] == name), None)
        if tool is None or not is_held_further(tool["parameters"]):
            continue
        times[json.dumps(tool)] += 1
        if times[json.dumps(tool)] <= of_each:
            yield question, tool, wanted


def is_held_further(schema: Json) -> bool:
    """Whether something in a schema is not enforced, and the rest of it is."""
    try:
        check_schema(schema, strict=True)
    except UnsupportedError:
        return held_schema(schema, False, "") is not ANY_OBJECT
    return False


def counted(text: str, wanted: Mapping[str, list[Any]]) -> dict[str, int]:
    """Arguments that are right, asked for, given of these, and others; and whole calls."""
    try:
        given = json.loads(text)
    except ValueError:  # cut
        given = {}
    right = [
        given[name] in values if name in given else "" in values for name, values in wanted.items()
    ]
    others = len(given.keys() - wanted.keys())
    return {
        "calls": 1,
        "whole": all(right) and not others,
        "right": sum(right),
        "of": len(right),
        "given": len(given.keys() & wanted.keys()),
        "others": others,
    }


if __name__ == "__main__":
    main()
