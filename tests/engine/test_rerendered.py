"""Conversations that are written differently than before: what the cache says of them."""

from __future__ import annotations

import dataclasses

import pytest

from onestem.engine.engine import Engine
from onestem.request import Rerendered
from tests.engine.harness import answer, make_engine, requests_for

HISTORY = list(range(40, 63))
RESULT = [5, 6, 7, 8]


@pytest.fixture
def engine(tiny) -> Engine:
    return make_engine(tiny("llama"), page_size=4)


def ask(engine: Engine, prompt, max_tokens=9, prefilled_tokens=0, **params):
    (request,) = requests_for([prompt], max_tokens=max_tokens, **params)
    request = dataclasses.replace(request, prefilled_tokens=prefilled_tokens)
    return answer(engine, [request])["0"]


def said(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def other(token: int) -> int:
    return token - 1 if token else 1


@pytest.mark.parametrize("offset", [0, 1, 5, 7])
def test_what_is_lost_of_an_answer(engine, offset):
    """The answer's last token has no KV: of 9 there are 8."""
    first = said(ask(engine, HISTORY))
    written = [*first[:offset], other(first[offset]), *first[offset + 1 :], *RESULT]
    then = ask(engine, HISTORY + written)
    assert then.metrics.num_cached_tokens == len(HISTORY) + offset
    assert then.reuse.rerendered == Rerendered(
        at=len(HISTORY) + offset,
        num_tokens=8 - offset,
        offset=offset,
        earlier=tuple(first[offset:8]),
    )
    # Once it is there in its new form, nothing is lost any more.
    again = [*HISTORY, *written, *said(then), *RESULT]
    assert ask(engine, again).reuse.rerendered is None


def test_all_that_followed_the_answer_is_lost(engine):
    """Reasoning that is dropped as soon as the user speaks again, two turns later."""
    first = said(ask(engine, HISTORY))
    second = [*HISTORY, *first, *RESULT]
    last = said(ask(engine, second))
    assert ask(engine, [*second, *last]).reuse.rerendered is None
    stripped = [*HISTORY, other(first[0]), *first[4:], *RESULT, *last, 9, 9, 9]
    lost = ask(engine, stripped).reuse.rerendered
    assert lost is not None
    # To the end of the second answer as it was sent once more, and what was answered to that.
    assert lost.num_tokens == len(second) + len(last) + 8 - len(HISTORY)
    assert lost.earlier == (*first, *RESULT, *last)[:16]


def test_other_conversations_are_not_this_one(engine):
    """They part before an answer, or behind one."""
    first = said(ask(engine, HISTORY))
    ask(engine, [*HISTORY, *first, *RESULT])
    for prompt in (
        [*HISTORY[:-4], 1, 2, 3],
        HISTORY[:10],
        HISTORY,
        [*HISTORY, *first],
        [*HISTORY, *first, 1, 2, 3],
        [*HISTORY, *first[:8], other(first[8]), 1, 2],
        [*HISTORY, *first, *RESULT[:2], 1, 2, 3],
        [1, 2, 3],
    ):
        assert ask(engine, prompt, max_tokens=1).reuse.rerendered is None, prompt


def test_what_a_template_writes_before_an_answer(engine):
    """The prompt's last three tokens do not stand before the answer later."""
    first = said(ask(engine, HISTORY, prefilled_tokens=3))
    then = ask(engine, [*HISTORY[:-3], *first, *RESULT], prefilled_tokens=3)
    assert then.reuse.rerendered == Rerendered(
        at=len(HISTORY) - 3,
        num_tokens=3 + 8,
        offset=0,
        earlier=(*HISTORY[-3:], *first[:8]),
    )


def test_another_salt_learns_nothing(engine):
    first = said(ask(engine, HISTORY))

    def salted(prompt, salt):
        (request,) = requests_for([prompt], max_tokens=1)
        request = dataclasses.replace(request, cache_salt=salt, common_prefix_tokens=len(HISTORY))
        return answer(engine, [request])["0"].reuse

    prompt = [*HISTORY, other(first[0]), *RESULT]
    for salt, lost in (("bob", None), ("", 8)):
        reuse = salted(prompt, salt)
        assert reuse.matched_tokens == len(HISTORY)
        assert (reuse.rerendered and reuse.rerendered.num_tokens) == lost


def test_an_answer_under_way_is_not_lost(engine):
    """Whoever asks the same and goes on otherwise meets an answer that is not there yet."""
    requests = requests_for([HISTORY, [*HISTORY, 1, 2]], max_tokens=20)
    engine.add_request(requests[0])
    outputs = [output for _ in range(8) for output in engine.step()]
    assert not outputs
    engine.add_request(requests[1])
    while engine.has_unfinished():
        outputs += engine.step()
    (output,) = (output for output in outputs if output.request_id == "1")
    assert output.reuse.matched_tokens == len(HISTORY)
    assert output.reuse.rerendered is None
