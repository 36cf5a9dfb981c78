"""What becomes of batches is told: lines that are lost, doubled, wrong, or of another seed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence

import pytest

from onestem.batch.results import derived_seed, result_id
from onestem.engine.grammar.schema import check_schema
from onestem_lab.serve.hostile_answers import Reply, choices_of
from onestem_lab.serve.hostile_batches import (
    ATTACKS,
    Batch,
    Line,
    is_whole,
    judge,
    ordinary,
)
from onestem_lab.serve.hostile_bodies import BOMBS, DOORS, bomb, long_text
from onestem_lab.serve.hostile_pool import COMPLETIONS, Case, cases
from onestem_lab.serve.hostile_schemas import COSTLY_SCHEMAS
from onestem_lab.serve.hostile_setting import MAX_BODY

JOB = "0123456789abcdef"
BODY = {"prompt": "x", "temperature": 1.0}


def body_of(text: str) -> dict:
    choice = {"index": 0, "text": text, "finish_reason": "stop", "token_ids": [len(text)]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    return {"choices": [{**choice, "logprobs": None}], "usage": usage}


def case_of(number: int, text: str | None) -> Case:
    case = Case(number=number, kind="short", names=(), path=COMPLETIONS, body=BODY)
    if text is None:
        return case
    choices = choices_of(body_of(text)["choices"])
    return dataclasses.replace(case, expected=Reply(status=200, choices=choices, usage=(1, 1)))


def line(number: int, text: str, job: str = JOB) -> dict:
    response = {"status_code": 200, "request_id": "", "body": body_of(text)}
    name = f"n{number}"
    return {
        "id": result_id(job, number + 1),
        "custom_id": name,
        "response": response,
        "error": None,
    }


def answered(asked: Sequence[Case]) -> list[Case]:
    """Alone, an engine answers with the seed."""
    return [dataclasses.replace(case_of(0, str(one.body["seed"])), body=one.body) for one in asked]


def seed_of(number: int) -> str:
    return str(derived_seed(JOB, f"n{number}"))


def batch_of(output: Sequence[dict], status: str = "completed") -> Batch:
    """Two lines with a seed, and four without."""
    lines = [Line(f"n{i}", COMPLETIONS, BODY, case_of(i, "ab"[i])) for i in range(2)]
    unseeded = [
        Line(f"n{i}", COMPLETIONS, BODY, case_of(i, None), is_seeded=False) for i in range(2, 6)
    ]
    return Batch("peggy", "ordinary", [*lines, *unseeded], {"status": status}, list(output))


GOOD = [line(0, "a"), line(1, "b"), *(line(i, seed_of(i)) for i in range(2, 6))]


def changed(at: int, other: dict) -> list[dict]:
    return [*GOOD[:at], other, *GOOD[at + 1 :]]


FAILED = {**GOOD[1], "response": None, "error": {"code": "engine_error", "message": "m"}}
MISTAKES: list[tuple[Batch, dict[str, int]]] = [
    (batch_of(GOOD[:-1]), {"lost": 1}),
    (batch_of([*GOOD, GOOD[0]]), {}),
    (batch_of([GOOD[1], GOOD[0], *GOOD[2:]]), {}),
    (batch_of(changed(0, line(0, "b"))), {"wrong": 1, "drawn otherwise": 0}),
    (batch_of(changed(1, FAILED)), {"wrong": 1}),
    (batch_of([*GOOD[:3], *(line(i, "another seed's") for i in range(3, 6))]), {"wrong": 3}),
    (batch_of(changed(0, line(0, "a", job="another"))), {}),
    (batch_of(GOOD[:3], "failed"), {"failed": 1, "lost": 3}),
    (batch_of([], "in_progress"), {"unfinished": 1, "lost": 6}),
]


def test_a_batch_that_is_whole():
    told = judge([batch_of(GOOD)], answered)
    assert is_whole(told)
    assert (told["begun"], told["whole"], told["lines"]) == (1, 1, 6)
    assert told["lost"] == told["wrong"] == told["drawn otherwise"] == 0


@pytest.mark.parametrize(("batch", "counts"), MISTAKES)
def test_a_batch_that_is_not(batch, counts):
    told = judge([batch_of(GOOD), batch], answered)
    assert not is_whole(told)
    assert (told["begun"], told["whole"]) == (2, 1)
    assert {name: told[name] for name in counts} == counts
    assert told["shown"][0]["wrong"]


@pytest.mark.parametrize("make", [ordinary, *ATTACKS.values()])
def test_lines_of_batches(make: Callable):
    """Drawn alike for a seed, each with a name of its own, and good ones among them."""
    pool = cases(0, 80, 256)
    made = make(random.Random("1"), pool)
    assert [one.custom_id for one in made] == [
        one.custom_id for one in make(random.Random("1"), pool)
    ]
    assert len({one.custom_id for one in made}) == len(made)
    assert any(one.case is not None for one in made)
    assert all(json.loads(one.raw())["url"] == COMPLETIONS for one in made)


# ----------------------------------------------------------------------------- attacks


@pytest.mark.parametrize("name", COSTLY_SCHEMAS)
def test_costly_schemas_keep_to_the_limits(name):
    for seed in range(12):
        check_schema(COSTLY_SCHEMAS[name](random.Random(seed)), strict=True)


def test_bodies_fit():
    """What is too long for the server would be refused before it is read."""
    rng = random.Random(0)
    assert all(len(make()) < MAX_BODY for make in BOMBS.values())
    assert {bomb(rng)[0] for _ in range(200)} == set(BOMBS)
    for text in [long_text(rng) for _ in range(12)]:
        assert max(len(json.dumps(make(text))) for _, make in DOORS) < MAX_BODY
