"""Lengths: what is read, what is drawn, and what the papers publish of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import numpy as np
import pytest

from onestem.bench import BatchCase, draw_length, named
from onestem.errors import ConfigError
from onestem_lab.cases import prompts_of
from onestem_lab.lengths import (
    DATA_SETS,
    Listed,
    LogNormal,
    Pareto,
    Poisson,
    Uniform,
    parse_lengths,
)

COUNT = 4000


def drawn(lengths, count: int = COUNT, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([draw_length(lengths, rng) for _ in range(count)])


def mean_is(counts: np.ndarray, mean: float) -> bool:
    """Within four standard errors."""
    return abs(counts.mean() - mean) < 4 * counts.std() / len(counts) ** 0.5


def share_is(share: float, expected: float, count: int = COUNT) -> bool:
    return abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


def truncated_mean(lengths: LogNormal) -> float:
    """By quadrature over the normal density, not by drawing."""
    edges = np.log(np.array([lengths.least, lengths.most]) / lengths.median) / lengths.sigma
    z = np.linspace(*edges, 100001)
    weights = np.exp(-z * z / 2)
    return float((lengths.median * np.exp(lengths.sigma * z) * weights).sum() / weights.sum())


def test_uniform_and_listed_draw_each_as_often():
    assert Counter(drawn(Uniform(3, 5))).keys() == {3, 4, 5}
    assert mean_is(drawn(Uniform(3, 90)), 46.5)
    counts = drawn(Listed("x", (7, 7, 9)))
    assert set(counts) == {7, 9}
    assert share_is((counts == 7).mean(), 2 / 3)


@pytest.mark.parametrize("mean", [1, 200])
def test_poisson_has_no_empty_draws(mean):
    counts = drawn(Poisson(mean))
    assert counts.min() >= 1
    assert mean_is(counts, mean / (1 - np.exp(-mean)))


def test_pareto_is_that_of_its_quantiles():
    tail = Pareto(alpha=1.5, median=25, least=10, most=512)
    counts = drawn(tail)
    scale = 15 / (2 ** (2 / 3) - 1)
    for length in (10, 20, 50, 200):  # of a rounded draw
        above = (1 + (length + 0.5 - 10) / scale) ** -1.5
        assert share_is((counts > length).mean(), above)
    assert counts.max() == 512
    # The textbook's: half are above 10 * 2 ** (1 / 1.5), which is 15.9.
    counts = drawn(parse_lengths("output", "pareto:1.5:10..512", "answer"))
    for length in (10, 15, 100):
        assert share_is((counts > length).mean(), ((length + 0.5) / 10) ** -1.5)


def test_pareto_has_batchllms_figures():
    """Mean 51.2, median 25, 99th percentile 509 of 320 draws (section 4.2.3); its bounds of chance
    are those of such samples."""
    tail = parse_lengths("output", "pareto:1.5:25:10..512", "answer")
    samples = drawn(tail, 320 * 200).reshape(200, 320)
    for published, figures in (
        (51.2, samples.mean(axis=1)),
        (25, np.median(samples, axis=1)),
        (509, np.percentile(samples, 99, axis=1)),
    ):
        low, high = np.percentile(figures, [5, 95])
        assert low <= published <= high


@pytest.mark.parametrize(
    ("name", "part", "mean"),
    [
        ("sharegpt", "question", 161),
        ("sharegpt", "answer", 338),
        ("longbench", "prefix", 5000),
    ],
)
def test_data_sets_have_the_published_means(name, part, mean):
    lengths = DATA_SETS[name][part]
    assert abs(truncated_mean(lengths) / mean - 1) < 0.01
    counts = drawn(lengths)
    assert lengths.least <= counts.min() <= counts.max() <= lengths.most
    assert mean_is(counts, truncated_mean(lengths))


def test_bounds_of_mmlu_are_two_sigmas_from_the_median():
    for lengths, bounds in (
        (DATA_SETS["mmlu"]["prefix"], (379, 2895)),
        (DATA_SETS["mmlu"]["question"], (55, 1219)),
    ):
        assert (lengths.least, lengths.most) == bounds
        scores = np.log(np.array(bounds) / lengths.median) / lengths.sigma
        np.testing.assert_allclose(scores, [-2, 2], atol=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "12", "uniform:1..9", "poisson:2000", "poisson:1.5", "pareto:1.5:25:10..512",
        "lognormal:85:1.6:4..1024", "poisson:1234567", "pareto:1.5:15.8740105197:10..512",
    ],
)  # fmt: skip
def test_what_results_say_can_be_asked_for_again(text):
    lengths = parse_lengths("distinct", text, "question")
    assert str(named(lengths)) == text
    assert (named(lengths) == 12) == (text == "12")
    np.testing.assert_array_equal(drawn(lengths, 50), drawn(lengths, 50))


@pytest.mark.parametrize(
    ("part", "text", "says"),
    [
        ("question", "0", "expected at least 1"),
        ("question", "uniform:0..4", "expected at least 1"),
        ("question", "9" * 12, "expected at most 10000000"),
        ("question", "-3", "expected at least 1"),
        ("question", "uniform:3", "expected a number, uniform:A..B, poisson"),
        ("question", "normal:3:4", "or file:PATH"),
        ("question", "uniform:9..3", "the lower one first"),
        ("answer", "poisson:0.5", "its mean is 0.5, expected from 1"),
        ("answer", "poisson:1e9", "its mean is 1e+09, expected from 1 to 1e+07"),
        ("answer", "poisson:1000000000", "its mean is 1e+09, expected from 1 to 1e+07"),
        ("answer", "pareto:0:1..9", "its alpha is 0, expected from 0.1"),
        ("answer", "pareto:1.5:9:10..20", "its median is 9, expected between 10 and 20"),
        ("answer", "lognormal:9:0:1..20", "its sigma is 0, expected from 0.001"),
        ("answer", "lognormal:9:0.1:900..1000", "less than one in a hundred draws lies in 900"),
        ("prefix", "sharegpt", "nothing is published of these lengths"),
        ("question", "file:/no/such", "it cannot be read: No such file"),
    ],
)
def test_what_makes_no_sense_names_the_option(part, text, says):
    with pytest.raises(ConfigError) as told:
        parse_lengths("distinct", text, part)
    assert str(told.value).startswith(f"distinct is {text!r}: ")
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_files_have_counts_or_objects(tmp_path):
    file = tmp_path / "lengths"
    file.write_text("5\n7\n")
    assert parse_lengths("distinct", f"file:{file}", "question").counts == (5, 7)
    file.write_text('{"prompt_tokens": 4, "text": "\u2028"}\n', "utf-8")
    assert parse_lengths("distinct", f"file:{file}", "question").counts == (4,)
    file.write_text('{"prompt_tokens": 4, "output_tokens": 0}\n{"prompt_tokens": 6}\n')
    assert parse_lengths("distinct", f"file:{file}", "question").counts == (4, 6)
    for text, part, says in (
        (file.read_text(), "answer", "line 2 is "),
        ('{"output_tokens": 0}', "answer", "expected at least 1"),
        ("", "question", "it is empty"),
        ("5\n\n", "question", "line 2 is '', expected a number of tokens"),
        ("true", "question", "line 1 is"),
        ("1.5", "question", "or an object with prompt_tokens"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            parse_lengths("distinct", f"file:{file}", part)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        parse_lengths("distinct", f"file:{file}", "question")


# ---------------------------------------------------------------------------- onestem bench batch


def test_jobs_of_numbers_stay_the_same():
    """Figures of different versions are compared."""
    digests = {
        "shuffled": "8ff962f136e19e57f9bb402e9e76c756b29ec28cab0e129b916bdd166560f220",
        "sorted": "23fbca1a8a22d795ebc916e297ecdfabc4c6ef7182d7c538c514b84659f82fad",
        "round-robin": "3f3c43de82b7ad590a6d1343ea5dc6842f9d3ca5608b42590fb1b453c843ac36",
    }
    for order, digest in digests.items():
        prompts = prompts_of(BatchCase(3, (2, 4), (30, 11), 5, 7, order, 9), 1000)
        assert hashlib.sha256(json.dumps(prompts).encode()).hexdigest() == digest


def case(**changes) -> BatchCase:
    told = {
        "groups": 3, "degree": "2,4", "prefix": "uniform:0..30,poisson:5",
        "distinct": "uniform:1..9", "output": "pareto:1.5:25:10..512",
        "input_order": "sorted", "seed": 4, "lengths": parse_lengths,
    }  # fmt: skip
    return BatchCase.parse(**{**told, **changes})


def test_a_job_of_distributions_is_the_seeds():
    requests = case().requests(10**9)
    assert requests == case().requests(10**9)
    assert len(requests) == 24
    shuffled = case(input_order="shuffled").requests(10**9)
    assert shuffled != requests
    assert sorted(shuffled) == sorted(requests)
    # Prompts do not depend on what is sampled.
    assert prompts_of(case(output="9"), 10**9) == [ids for ids, _ in requests]
    assert case(seed=5).requests(10**9) != requests


def test_totals_are_those_of_the_requests():
    """Tokens of 30 bits hardly ever repeat, so distinct beginnings count the tree's tokens."""
    told = case().describe()
    requests = case().requests(10**9)
    assert told["prefixes"] == ["uniform:0..30", "poisson:5"]
    assert told["output"] == "pareto:1.5:25:10..512"
    tree = {tuple(ids[:end]) for ids, _ in requests for end in range(1, len(ids) + 1)}
    totals = told["drawn"]
    assert totals["prefix_tokens"] + totals["distinct_tokens"] == len(tree)
    assert totals["output_tokens"] == sum(count for _, count in requests)
    assert len({count for _, count in requests}) > 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"degree": "2"}, "degree has 1 levels, prefix 2: give as many of each"),
        ({"degree": "2,0"}, "degree is '2,0', expected numbers of at least 1"),
        ({"prefix": "4,x"}, "prefix is 'x': expected a number"),
        ({"output": "0"}, "output is '0': expected at least 1"),
        ({"groups": 0}, "groups is 0, expected at least 1"),
    ],
)
def test_cases_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        case(**changes)
