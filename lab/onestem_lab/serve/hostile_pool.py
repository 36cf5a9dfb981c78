"""Good requests of every kind. What an engine answers to each, `hostile_alone` finds out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onestem_lab.serve.hostile_answers import Reply
from tests.pairs.options import SAMPLING

__all__ = [
    "APP",
    "CHATS",
    "COMPLETIONS",
    "OWN",
    "PREFIXES",
    "SCHEMAS",
    "VOCAB",
    "Case",
    "cases",
    "text",
]

Json = dict[str, Any]

VOCAB = 2560  # of the embedded model
FIRST_ID = 7  # those below are special
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# Names of the operator's prefix and schema, and of those that each key makes at first.
APP, OWN = "app", "own"
TEXT_OF_WORDS = (
    "the a of in and is was by near old mill bridge tower river market museum town bell miller "
    "corn garden north 1842 17 first opened built who when where did much how many list JSON "
    "Document: Question: Answer: yes no naïve Zürich 橋 🙂 Oakham Lund Vellick Broxham"
)
WORDS = TEXT_OF_WORDS.split()
MODULES = """
<module name="mill">A mill is in <parameter name="town" length="8" default="Oakham"/>.</module>
<union><module name="bridge">The bridge is of 1842. Two carts may cross at a time.</module>
<module name="tower">The tower is 40 m high and has a bell of bronze.</module></union>
<module name="market">The market opens at seven. Fish is sold in the hall.</module>
"""
SCHEMAS = {
    APP: f'<schema name="app">Places of the valley. {MODULES}</schema>',
    OWN: f'<schema name="own"><system>Be brief.</system><user>{MODULES}</user></schema>',
}
PREFIXES = {
    APP: "You answer questions about the town of Oakham, in one sentence. The mill stands by the "
    "river. Its miller is called Ada Broxham, and she grinds the corn of nine villages.",
    OWN: "You are brief and kind.",
}


UNKNOWN = Reply(status=0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A good request. `names`: what was asked for beside the prompt."""

    number: int
    kind: str
    names: tuple[str, ...]
    path: str
    body: Json
    expected: Reply = UNKNOWN

    @property
    def sampled(self) -> bool:
        """Whether random numbers say what is answered."""
        return self.body["temperature"] > 0 and "choices" not in self.body

    @property
    def fits_a_line(self) -> bool:
        """Whether a batch may have it."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return "prefix" not in self.body and not several


def text(rng: random.Random, least: int, most: int) -> str:
    """So many words."""
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


# ----------------------------------------------------------------------------- prompts

# Each of these gives a path and the fields that are the prompt.
Asks = tuple[str, Json]


class Prompts:
    """Prompts of all kinds, some of which begin alike."""

    def __init__(self, seed: int, max_model_len: int) -> None:
        self._most = max_model_len
        rng = random.Random(f"documents {seed}")
        self._documents = [text(rng, 40, 160) for _ in range(6)]
        self._long = [rng.choices(range(FIRST_ID, VOCAB), k=max_model_len + 8) for _ in range(3)]

    def short(self, rng: random.Random) -> Asks:
        return COMPLETIONS, {"prompt": text(rng, 1, 12)}

    def ids(self, rng: random.Random) -> Asks:
        return COMPLETIONS, {"prompt": self._some_ids(rng, 40)}

    def _some_ids(self, rng: random.Random, most: int) -> list[int]:
        ids = rng.choices(range(FIRST_ID, VOCAB), k=rng.randint(1, most))
        return [rng.randrange(FIRST_ID), *ids] if rng.random() < 0.2 else ids

    def texts(self, rng: random.Random) -> Asks:
        return COMPLETIONS, {"prompt": [text(rng, 1, 9) for _ in range(rng.randint(1, 6))]}

    def lists_of_ids(self, rng: random.Random) -> Asks:
        prompts = [self._some_ids(rng, 20) for _ in range(rng.randint(1, 6))]
        return COMPLETIONS, {"prompt": prompts}

    def document(self, rng: random.Random) -> Asks:
        return COMPLETIONS, {"prompt": f"{rng.choice(self._documents)}\n{text(rng, 1, 9)}"}

    def document_of_chat(self, rng: random.Random) -> Asks:
        system = {"role": "system", "content": rng.choice(self._documents)}
        return CHATS, {"messages": [system, *self._turns(rng)]}

    def chat(self, rng: random.Random) -> Asks:
        return CHATS, {"messages": self._turns(rng)}

    def _turns(self, rng: random.Random) -> list[Json]:
        roles = ["user", "assistant"] * rng.randint(0, 2) + ["user"]
        return [{"role": role, "content": self._content(rng)} for role in roles]

    def _content(self, rng: random.Random) -> str | list[Json]:
        parts = [{"type": "text", "text": text(rng, 1, 9)} for _ in range(rng.randint(1, 3))]
        return parts if rng.random() < 0.2 else parts[0]["text"]

    def named_prefix(self, rng: random.Random) -> Asks:
        path, fields = rng.choice([self.short, self.ids, self.texts, self.chat])(rng)
        return path, {**fields, "prefix": rng.choice([APP, OWN])}

    def begins_like_a_prefix(self, rng: random.Random) -> Asks:
        return COMPLETIONS, {"prompt": f"{PREFIXES[rng.choice([APP, OWN])]} {text(rng, 1, 9)}"}

    def pml(self, rng: random.Random) -> Asks:
        town = rng.choice(["", f' town="{rng.choice(["Lund", "Vellick", "Zürich"])}"'])
        parts = [f"<mill{town}/>", rng.choice(["<bridge/>", "<tower/>", ""]), "<market/>"]
        body = "".join(part for part in parts if rng.random() < 0.6)
        prompt = f'<prompt schema="{rng.choice([APP, OWN])}">{body}{text(rng, 1, 9)}</prompt>'
        isolation = rng.choice(["anchored", "isolated", "off"])
        return rng.choice([COMPLETIONS, CHATS]), {"pml": prompt, "isolation": isolation}

    def near_limit(self, rng: random.Random) -> Asks:
        """As long as may be, with room for some tokens of an answer, for one, or for none."""
        own = self._some_ids(rng, 200)
        length = self._most - rng.choice([0, 1, 2, 3, 17, 30])
        ids = [*rng.choice(self._long)[: max(0, length - len(own))], *own]
        return COMPLETIONS, {"prompt": ids[:length]}

    def half_of_limit(self, rng: random.Random) -> Asks:
        own = self._some_ids(rng, 40)
        shared = rng.randint(self._most // 4, self._most // 2)
        return COMPLETIONS, {"prompt": rng.choice(self._long)[:shared] + own}


# Kind -> how often, and the method that makes its prompts.
KINDS: Mapping[str, tuple[int, Callable[[Prompts, random.Random], Asks]]] = {
    "short": (18, Prompts.short),
    "ids": (12, Prompts.ids),
    "texts": (6, Prompts.texts),
    "lists_of_ids": (4, Prompts.lists_of_ids),
    "document": (14, Prompts.document),
    "document_of_chat": (6, Prompts.document_of_chat),
    "chat": (12, Prompts.chat),
    "named_prefix": (8, Prompts.named_prefix),
    "begins_like_a_prefix": (3, Prompts.begins_like_a_prefix),
    "pml": (10, Prompts.pml),
    "near_limit": (3, Prompts.near_limit),
    "half_of_limit": (4, Prompts.half_of_limit),
}


# ----------------------------------------------------------------------------- what is asked


def _schema(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}


ENDLESS = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}
# What is allowed and hardly ever asked; the costly ones are rare.
EXTREMES: Mapping[str, Json] = {
    "stops_at_once": {"stop": list("etaoin shrdlu\n.DT"), "max_tokens": 20},
    "all_stops": {"stop": [f"{i} " for i in range(64)], "max_tokens": 30},
    "ends_at_once": {"response_format": _schema({"enum": [""]})},
    "null": {"response_format": _schema({"type": "null"}), "max_tokens": 30},
    "never_ends": {"response_format": _schema({**ENDLESS, "$ref": "#/$defs/a"}), "max_tokens": 30},
    "long_array": {
        "response_format": _schema({"type": "array", "items": {"type": "number"}, "minItems": 99}),
        "max_tokens": 40,
    },
    "pattern": {"response_format": _schema({"type": "string", "pattern": "(ab?c){3,9}[0-9]+"})},
    "too_short_a_grammar": {"response_format": _schema({"const": 1}), "min_tokens": 5},
    "none_may_follow": {"stop_token_ids": list(range(VOCAB)), "min_tokens": 3},
    "most_may_not_follow": {"stop_token_ids": list(range(0, VOCAB, 2)), "min_tokens": 6},
    "stops_at_any": {"stop_token_ids": list(range(VOCAB))},
    "min_is_max": {"min_tokens": 12, "max_tokens": 12, "stop": ["e"]},
    "bias": {"logit_bias": {str(i): (-1) ** i * 100.0 for i in range(60)}},
    "one_bias": {"logit_bias": {"300": 100.0}},
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 40},
    "rewards": {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    "much_repetition": {"repetition_penalty": 0.01},
    "no_repetition": {"repetition_penalty": 100.0},
    "flat": {"temperature": 100.0},
    "steep": {"temperature": 0.001},
    "tiny_top_p": {"top_p": 1e-9, "temperature": 1.0},
    "whole_min_p": {"min_p": 1.0, "temperature": 1.0},
    "wide_top_k": {"top_k": 2000, "temperature": 1.0},
    "all_logprobs": {"logprobs": 100, "prompt_logprobs": 100},
    "least_seed": {"seed": -(2**63), "temperature": 1.0},
    "greatest_seed": {"seed": 2**64 - 1, "temperature": 1.0},
    "as_long_as_may_be": {"max_tokens": 10**9, "stop": ["\n", ". "]},
    "forever": {"max_tokens": 120, "ignore_eos": True},
    "choices_that_begin_alike": {"choices": ["a", "aa", "aaa", "aaaa b", "aaaa c"]},
}
COSTLY: Mapping[str, Json] = {
    "n_64": {"n": 64, "max_tokens": 4, "temperature": 1.0},
    "n_200": {"n": 200, "max_tokens": 2, "temperature": 1.0},
    "choices_1024": {"choices": [f"{i}" for i in range(1024)]},
    "long_choices": {"choices": [" ".join(["corn"] * i) for i in range(1, 60)]},
}


def _options(rng: random.Random) -> tuple[tuple[str, ...], Json]:
    """Names of options, and their fields: one, two or three, something extreme, or nothing."""
    draw = rng.random()
    if draw < 0.02:
        names = (rng.choice(list(COSTLY)),)
    elif draw < 0.17:
        names = tuple(rng.sample(list(EXTREMES), rng.choice([1, 1, 2])))
    else:
        names = tuple(rng.sample(list(SAMPLING), rng.choice([0, 1, 1, 2, 2, 3])))
    fields: Json = {}
    for name in names:
        fields |= {**SAMPLING, **EXTREMES, **COSTLY}[name]
    return names, fields


def _base(rng: random.Random) -> Json:
    """Greedy mostly."""
    temperature = 0.0 if rng.random() < 0.7 else round(rng.uniform(0.3, 1.0), 3)
    seed = rng.randrange(2**32)
    return {"max_tokens": rng.randint(1, 16), "temperature": temperature, "seed": seed}


def cases(seed: int, count: int, max_model_len: int) -> list[Case]:
    """Distinct requests, without answers yet."""
    rng, prompts = random.Random(f"pool {seed}"), Prompts(seed, max_model_len)
    kinds, weights = list(KINDS), [often for often, _ in KINDS.values()]
    made: dict[str, Case] = {}
    while len(made) < count:
        kind = rng.choices(kinds, weights)[0]
        path, prompt = KINDS[kind][1](prompts, rng)
        names, fields = _options(rng)
        asked = {**_base(rng), "return_token_ids": rng.random() < 0.9, **fields}
        asked = _of_chat(asked) if path == CHATS else asked
        # As a server reads it: keys of objects are texts.
        body = json.loads(json.dumps({**prompt, **asked}))
        case = Case(number=len(made), kind=kind, names=names, path=path, body=body)
        made.setdefault(json.dumps([path, body]), case)
    return list(made.values())


def _of_chat(fields: Json) -> Json:
    """The same in a chat's words."""
    count = fields.get("logprobs")
    told = {} if count is None else {"logprobs": True, "top_logprobs": count}
    return {**fields, **told}
