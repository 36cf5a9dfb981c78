"""Right answers of a trained model in free text and under formats, in every form of each.

    python -m onestem_lab.structured MODELDIR [TASK ...] [--dtype float32]

MODELDIR is an instruct model's directory; SmolLM2-135M-Instruct was measured. Prompts are drawn
from lists below with a fixed seed, answers are greedy, and one is right if it is equal, not
similar.
Results: lab/results/structured.json, in which each task replaces its own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem.llm import LLM
from onestem.request import RequestOutput, SamplingParams
from onestem_lab.results import RESULTS, device_name, machine, write

NAMES = (
    "Marie", "John", "Ahmed", "Yuki", "Olga", "Pedro", "Fatima", "Lars", "Chen", "Amara",
    "Nina", "Tom", "Ravi", "Elena", "Kofi", "Sara", "Anna", "Paul", "Omar", "Hana", "Ivan",
    "Rosa", "Leila", "Nils", "Ling", "Zola", "Eva", "Sam", "Arjun", "Sofia", "Kwame", "Julia",
)  # fmt: skip
CITIES = (
    "Lyon", "Boston", "Cairo", "Osaka", "Moscow", "Lima", "Rabat", "Oslo", "Beijing", "Lagos",
    "Berlin", "Leeds", "Delhi", "Rome", "Accra", "Madrid",
)  # fmt: skip
JOBS = ["baker", "teacher", "doctor", "engineer"]
THINGS = ["lamp", "chair", "kettle", "radio", "mirror", "carpet", "clock", "basket"]
PETS = ["Tom", "Leo", "Max", "Bella", "Luna", "Milo"]
LINES = (
    "Buy milk.\nCall Ann.", "Wash the car.\nPay the rent.", "Close the door.\nLock it.",
    "Feed the cat.\nWater the roses.", "Write to Tom.\nRead the news.", "Sing a song.\nGo home.",
    "Bake bread.\nMake tea.", "Clean the room.\nCook rice.", "Ann runs.\nTom swims.",
    "The sun rose.\nBirds sang.", "Sell the boat.\nBuy a bike.", "Fix the roof.\nPaint the wall.",
)  # fmt: skip
LETTERS = (
    "The train to the coast leaves at nine.", "Read and/or write access is needed.",
    "The café in São Paulo opens at 8:00.", "Zoë ordered crème brûlée for two.",
    "It costs 5 € in the Müller shop.", "Rain is likely on Monday.",
    "Open the folder src/main first.", "The naïve plan failed in Malmö.",
)  # fmt: skip
REVIEWS = (
    ("I loved every minute of it.", "positive"), ("A complete waste of time.", "negative"),
    ("The food was cold and bland.", "negative"), ("Great service and a lovely view.", "positive"),
    ("It broke after two days.", "negative"), ("Best purchase I made this year.", "positive"),
    ("The plot was dull and slow.", "negative"), ("A warm and funny film.", "positive"),
    ("The staff were rude to us.", "negative"), ("Wonderful music, I was happy.", "positive"),
    ("The room was dirty and loud.", "negative"), ("It works perfectly, thank you.", "positive"),
    ("I want my money back.", "negative"), ("An excellent book, well written.", "positive"),
    ("Terrible battery, do not buy.", "negative"), ("The kids enjoyed it a lot.", "positive"),
)  # fmt: skip

TEXT = {"type": "string"}
AFTER = "after"  # of a form: what stands after each prompt

Settings = Mapping[str, Any]
Asked = str | list[dict[str, str]]
Judge = Callable[[str, Any], int]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts with what is right, and the forms in which they are answered.

    Attributes:
        judge: how many parts of an answer are right; parts: of how many.
        forms: sampling parameters by the form's name.
    """

    prompts: Sequence[Asked]
    wanted: Sequence[Any]
    judge: Judge
    forms: Mapping[str, Settings]
    parts: int = 1
    max_tokens: int = 60


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def of_schema(schema: Settings, **more: object) -> Settings:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}, **more}}


def an_object(**properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def regex(pattern: str) -> Settings:
    return {"response_format": {"type": "regex", "regex": pattern}}


def in_json(*schemas: Settings) -> dict[str, Settings]:
    """Free text, and a schema in all forms of whitespace."""
    (schema,) = schemas
    forms = ("spaced", "compact", "any")
    return {"free": {}, **{form: of_schema(schema, whitespace=form) for form in forms}}


# ------------------------------------------------------------------------------------- judges


def parsed(text: str) -> Any:
    """The first object of a text; None: there is none."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    except ValueError:
        return None
    return {name.lower(): value for name, value in found.items()}


def fields(text: str, wanted: Mapping[str, Any]) -> int:
    got = parsed(text) or {}
    return sum(_same(got.get(name), value) for name, value in wanted.items())


def _same(got: Any, wanted: Any) -> bool:
    """Numbers may be texts: free answers often quote them."""
    if isinstance(wanted, (int, float)) and isinstance(got, str):
        try:
            return float(got) == wanted
        except ValueError:
            return False
    return bool(got == wanted)


def label(text: str, wanted: str) -> int:
    found = re.search("positive|negative", text.lower())
    return found is not None and found[0] == wanted


def number(text: str, wanted: int) -> int:
    found = re.search(r"\d+", text)
    return found is not None and int(found[0]) == wanted


# -------------------------------------------------------------------------------------- tasks


def people() -> Task:
    draw = random.Random(1)
    rows = [
        {"name": name, "age": draw.randint(18, 80), "city": CITIES[i % len(CITIES)]}
        for i, name in enumerate(NAMES)
    ]
    kinds = {"name": TEXT, "age": {"type": "integer"}, "city": TEXT}
    named, turned = an_object(**kinds), an_object(**dict(reversed(kinds.items())))
    text = '"[^"]{1,30}"'
    limited = an_object(**{**kinds, "name": {"type": "string", "maxLength": 30}})
    return Task(
        prompts=[
            chat(
                f"{row['name']} is {row['age']} years old, works as a {JOBS[i % 4]} and lives in "
                f"{row['city']}. Extract name, age and city as JSON."
            )
            for i, row in enumerate(rows)
        ],
        wanted=rows,
        judge=fields,
        parts=3,
        forms={
            **in_json(named),
            "regex, spaced": regex(rf'\{{"name": {text}, "age": [0-9]{{1,3}}, "city": {text}\}}'),
            "spaced, other order of keys": of_schema(turned),
            "any, other order of keys": of_schema(turned, whitespace="any"),
            "spaced, maxLength": of_schema(limited),
            **{
                f"json_object, {form}": {
                    "response_format": {"type": "json_object", "whitespace": form}
                }
                for form in ("spaced", "compact", "any")
            },
        },
    )


def prices() -> Task:
    """Numbers with decimals, booleans."""
    draw = random.Random(2)
    rows = [
        {
            "item": THINGS[i % len(THINGS)],
            "price": draw.randint(100, 9999) / 100,
            "in_stock": draw.random() < 0.5,
        }
        for i in range(24)
    ]
    kinds = {"item": TEXT, "price": {"type": "number"}, "in_stock": {"type": "boolean"}}
    bounded = {**kinds, "price": {"type": "number", "minimum": 0, "maximum": 1000}}
    return Task(
        prompts=[
            chat(
                f"The {row['item']} costs {row['price']:.2f} dollars and is "
                f"{'' if row['in_stock'] else 'not '}in stock. Extract item, price and in_stock "
                "(true or false) as JSON."
            )
            for row in rows
        ],
        wanted=rows,
        judge=fields,
        parts=3,
        forms={**in_json(an_object(**kinds)), "spaced, bounds": of_schema(an_object(**bounded))},
    )


def lists() -> Task:
    """Lists of names, some empty."""
    draw = random.Random(3)
    rows = [{"name": name, "cats": draw.sample(PETS, i % 3)} for i, name in enumerate(NAMES[:24])]
    texts = {"type": "array", "items": TEXT}
    return Task(
        prompts=[
            chat(
                f"{row['name']} has {_cats(row['cats'])}. "
                "Write JSON with the owner's name and cats, a list of the cats' names."
            )
            for row in rows
        ],
        wanted=rows,
        judge=fields,
        parts=2,
        forms=in_json(an_object(name=TEXT, cats=texts)),
    )


def _cats(names: Sequence[str]) -> str:
    return " and ".join(f"a cat named {name}" for name in names) or "no cats"


def entries() -> Task:
    """A value of an enum that is an object."""
    places = [{"city": city, "code": 10 + i} for i, city in enumerate(CITIES[:8])]
    listed = json.dumps(places)
    return Task(
        prompts=[
            chat(
                f"Places: {listed}\n{name} lives in {CITIES[i % 8]}. Write the entry of that place."
            )
            for i, name in enumerate(NAMES[:24])
        ],
        wanted=[places[i % 8] for i in range(24)],
        judge=fields,
        parts=2,
        forms=in_json({"enum": places}),
    )


def _copies(sentences: Sequence[str], shown: Sequence[str]) -> Task:
    before = []
    for one in shown:
        written = json.dumps({"text": one}, ensure_ascii=False)
        before += [*chat(f"As JSON: {one}"), {"role": "assistant", "content": written}]
    return Task(
        prompts=[[*before, *chat(f"As JSON: {one}")] for one in sentences],
        wanted=[{"text": one} for one in sentences],
        judge=fields,
        forms={
            **in_json(an_object(text=TEXT)),
            **{
                f"spaced, {name}": of_schema(an_object(text={**TEXT, **limits}))
                for name, limits in {
                    "maxLength 100": {"maxLength": 100},
                    "minLength 1": {"minLength": 1},
                    "minLength 1, maxLength 100": {"minLength": 1, "maxLength": 100},
                }.items()
            },
        },
    )


def lines() -> Task:
    """Texts with a line break, which JSON has to escape."""
    return _copies(LINES, ["Push the door.\nPull it back.", "Ann sleeps.\nTom reads."])


def letters() -> Task:
    """Texts beyond ASCII and with slashes."""
    return _copies(LETTERS, ["The façade is new.", "Yes and/or no."])


def reviews() -> Task:
    labels = ["positive", "negative"]
    return Task(
        prompts=[
            chat(f"Is this review positive or negative? Answer with one word.\nReview: {text}")
            for text, _ in REVIEWS
        ],
        wanted=[label for _, label in REVIEWS],
        judge=label,
        forms={
            "free": {},
            "choice": {"response_format": {"type": "choice", "choice": labels}},
            "choice, any case": {
                "response_format": {"type": "choice", "choice": [*labels, *map(str.title, labels)]}
            },
            "choices": {"choices": labels},
            "regex": regex("positive|negative"),
            "enum": of_schema({"enum": labels}),
        },
    )


def reviews_continued() -> Task:
    """The same as a text that goes on after a colon, where a word begins with a space."""
    shown = "".join(f"Review: {text}\nSentiment: {label}\n\n" for text, label in REVIEWS[:4])
    labels = ["positive", "negative"]
    spaced = [f" {label}" for label in labels]
    return Task(
        prompts=[f"{shown}Review: {text}\nSentiment:" for text, _ in REVIEWS[4:]],
        wanted=[label for _, label in REVIEWS[4:]],
        judge=label,
        max_tokens=8,
        forms={
            "free": {},
            **{
                f"{name}, {where}": settings
                for where, texts in (("no space", labels), ("leading space", spaced))
                for name, settings in (
                    ("choice", {"response_format": {"type": "choice", "choice": texts}}),
                    ("choices", {"choices": texts}),
                    ("regex", regex("|".join(texts))),
                )
            },
        },
    )


def sums_continued() -> Task:
    """Numbers after an equals sign."""
    draw = random.Random(4)
    shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in ((3, 4), (11, 5), (8, 9), (20, 6)))
    pairs = [(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(32)]
    return Task(
        prompts=[f"{shown}{a} + {b} =" for a, b in pairs],
        wanted=[a + b for a, b in pairs],
        judge=number,
        max_tokens=6,
        forms={
            "free": {},
            "regex, no space": regex("[0-9]{1,3}"),
            "regex, leading space": regex(" [0-9]{1,3}"),
            "integer": of_schema({"type": "integer"}),
            "integer, prompt ends in a space": {**of_schema({"type": "integer"}), AFTER: " "},
        },
    )


def people_continued() -> Task:
    """Objects after a colon."""
    task = people()
    texts = [str(asked[0]["content"]).partition(" Extract")[0] for asked in task.prompts]
    shown = "".join(
        f"Text: {text}\nJSON: {json.dumps(row)}\n\n"
        for text, row in zip(texts[:2], task.wanted[:2], strict=True)
    )
    named = in_json(an_object(name=TEXT, age={"type": "integer"}, city=TEXT))
    return Task(
        prompts=[f"{shown}Text: {text}\nJSON:" for text in texts[2:]],
        wanted=task.wanted[2:],
        judge=fields,
        parts=3,
        max_tokens=40,
        forms={
            **named,
            "spaced, prompt ends in a space": {**named["spaced"], AFTER: " "},
        },
    )


def ends(llm: LLM) -> Task:
    """Which of the tokenizer's and the configs' ids end an answer."""
    task = people()
    assert llm.tokenizer is not None
    named = {text: llm.tokenizer.control_token(text) for text in ("<|im_end|>", "<|endoftext|>")}
    return Task(
        prompts=task.prompts,
        wanted=task.wanted,
        judge=task.judge,
        parts=task.parts,
        max_tokens=200,
        forms={
            "all": {},
            **{
                f"{text} alone": {"ignore_eos": True, "stop_token_ids": [token]}
                for text, token in named.items()
                if token is not None
            },
        },
    )


TASKS: Mapping[str, Callable[[], Task]] = {
    task.__name__.replace("_", " "): task
    for task in (
        people, prices, lists, entries, lines, letters, reviews, reviews_continued,
        sums_continued, people_continued,
    )
}  # fmt: skip


# ------------------------------------------------------------------------------------ measured


def measure(llm: LLM, task: Task) -> dict[str, dict[str, int]]:
    found = {}
    for form, settings in task.forms.items():
        given = {name: value for name, value in settings.items() if name != AFTER}
        params = SamplingParams(max_tokens=task.max_tokens, temperature=0, **given)
        if isinstance(task.prompts[0], str):
            outputs = llm.generate([one + settings.get(AFTER, "") for one in task.prompts], params)
        else:
            outputs = llm.chat(task.prompts, params)
        found[form] = tally(task, outputs)
    return found


def tally(task: Task, outputs: Sequence[RequestOutput]) -> dict[str, int]:
    answers = [output.outputs[0] for output in outputs]
    return {
        "right": sum(
            task.judge(one.text, wanted) for one, wanted in zip(answers, task.wanted, strict=True)
        ),
        "of": task.parts * len(answers),
        "tokens": sum(len(one.token_ids) for one in answers),
        "ended": sum(one.finish_reason == "stop" for one in answers),
    }


def show(name: str, forms: Mapping[str, Mapping[str, int]]) -> None:
    print(name)
    for form, found in forms.items():
        right = f"{found['right']} of {found['of']}"
        print(
            f"  {form:34}{right:>12}{found['tokens']:8} tokens, {found['ended']} ended", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODELDIR", type=Path)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join([*TASKS, "ends"]))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS / "structured.json")
    options = parser.parse_args()
    llm = LLM(options.model, dtype=options.dtype, kv_memory="1GiB")
    makers = {**TASKS, "ends": lambda: ends(llm)}
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
    for name in options.tasks or makers:
        results[name] = measure(llm, makers[name]())
        show(name, results[name])
        report = {
            "command": f"python -m onestem_lab.structured MODELDIR --dtype {options.dtype}",
            "machine": machine() | {"device": device_name(llm.device)},
            "model": options.model.name,
            "results": results,
        }
        write(options.out, report)


if __name__ == "__main__":
    main()
