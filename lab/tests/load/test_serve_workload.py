"""The load is a function of its seed."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from onestem.errors import ConfigError
from onestem_lab.lengths import Uniform
from onestem_lab.load.workload import FIRST_ID, Workload


def test_the_load_without_options_stays_the_same():
    """Figures of different versions are compared."""
    load = Workload(seed=5, apps=3, system_tokens=16, scale=0.25, text=True)
    asks = [(a.app, a.system, a.question, a.output_tokens) for a in map(load.ask, range(1000))]
    digest = hashlib.sha256(json.dumps(asks).encode()).hexdigest()
    assert digest == "70ceacfa49771c9e04b5a760c54d46d03768d931a7f48a2a70e0bf2aa406f156"


def test_questions_and_answers_have_the_lengths_that_are_asked_for():
    fixed = Workload(system_tokens=8, question=7, answer=Uniform(3, 5))
    asks = [fixed.ask(i) for i in range(50)]
    assert {len(ask.question) for ask in asks} == {7}
    assert {ask.output_tokens for ask in asks} == {3, 4, 5}
    assert asks == [fixed.ask(i) for i in range(50)]


def test_arrivals_are_the_seeds_poisson_process():
    load = Workload(seed=7)
    gaps = np.random.default_rng((7, 0)).exponential(size=1000)
    np.testing.assert_array_equal(load.arrivals(1.0, 1000), np.cumsum(gaps))
    # Another rate stretches the same schedule; a longer run begins with the shorter one.
    np.testing.assert_allclose(load.arrivals(4.0, 1000), np.cumsum(gaps) / 4, rtol=1e-15)
    np.testing.assert_array_equal(load.arrivals(1.0, 100), load.arrivals(1.0, 1000)[:100])
    assert not np.array_equal(load.arrivals(1.0, 10), Workload(seed=8).arrivals(1.0, 10))


def test_a_duration_holds_the_arrivals_before_its_end():
    load = Workload(seed=3)
    count = load.count_within(5.0, 40.0)
    times = load.arrivals(5.0, count + 1)
    assert times[count - 1] <= 40.0 < times[count]
    assert load.count_within(1e-6, 1.0) == 1


def test_requests_begin_with_their_applications_prompt():
    load = Workload(seed=1, apps=3, system_tokens=64, vocab_size=1000)
    asks = [load.ask(i) for i in range(60)]
    systems = {ask.app: tuple(ask.prompt[:64]) for ask in asks}
    assert len(set(systems.values())) == 3
    for ask in asks:
        assert tuple(ask.prompt[:64]) == systems[ask.app]
        assert all(FIRST_ID <= token < 1000 for token in ask.prompt)
        assert 1 <= len(ask.question) <= load.question.most
    assert len({tuple(ask.question) for ask in asks}) == 60
    assert load.ask(17) == Workload(seed=1, apps=3, system_tokens=64, vocab_size=1000).ask(17)


def test_runs_differ_in_the_words_of_questions_alone():
    load = Workload(seed=4, apps=2, system_tokens=32)
    for i in range(20):
        first, second = load.ask(i, 0), load.ask(i, 1)
        assert first.question != second.question
        assert (first.app, first.system, len(first.question), first.output_tokens) == (
            second.app, second.system, len(second.question), second.output_tokens
        )  # fmt: skip


def test_warm_up_shares_the_system_prompt_alone():
    load = Workload(seed=1, apps=2, system_tokens=64)
    measured = [tuple(load.ask(i).question[:4]) for i in range(200)]
    for app in (0, 1):
        warm = load.warm_up(app)
        assert warm.system == next(a.system for a in map(load.ask, range(50)) if a.app == app)
        assert tuple(warm.question[:4]) not in measured


def test_scale_shortens_questions_and_answers_alone():
    full, tenth = (Workload(seed=2, system_tokens=500, scale=scale) for scale in (1.0, 0.1))
    for i in range(30):
        assert tenth.ask(i).output_tokens == max(1, round(full.ask(i).output_tokens * 0.1))
        assert len(tenth.ask(i).system) == 500


def test_text_prompts_have_a_word_a_token():
    ask = Workload(system_tokens=50, text=True).ask(0)
    assert len(ask.system.split()) == 50
    assert ask.prompt == f"{ask.system} {ask.question}"
    given = Workload(apps=2, text=True, systems=("One.", "Two."))
    assert {given.ask(i).system for i in range(20)} == {"One.", "Two."}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"apps": 0}, "apps is 0"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"vocab_size": 300}, "vocab-size is 300"),
        ({"system_tokens": -1}, "system-tokens is -1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        Workload(**options)
