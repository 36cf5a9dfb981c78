"""The benchmark of formats: what it counts as right."""

from __future__ import annotations

import json

import pytest

from onestem.request import SamplingParams
from onestem_lab.structured import TASKS, fields, label, number


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_is_right_and_every_form_is_one(name: str) -> None:
    task = TASKS[name]()
    assert len(task.prompts) == len(task.wanted)
    for wanted in task.wanted:
        text = json.dumps(wanted) if isinstance(wanted, dict) else str(wanted)
        assert task.judge(f" {text} and so on", wanted) == task.parts
    for settings in task.forms.values():
        SamplingParams(**{name: value for name, value in settings.items() if name != "after"})


def test_what_is_not_right() -> None:
    wanted = {"name": "Ann", "age": 5}
    assert fields("none", wanted) == 0
    assert fields('```json\n{"Name": "Ann", "age": "5"}', wanted) == 2
    assert fields('{"name": "ann", "age": 5.5}', wanted) == 0
    assert not label("It is negative, not positive.", "positive")
    assert not number("17 or 18", 18)
