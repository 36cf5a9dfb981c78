"""What the scripts of lab/onestem_lab/serve compute from their measurements."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from onestem_lab.serve.agents import Turn, measured, summary
from onestem_lab.serve.compare import _against
from onestem_lab.serve.jobs import _verdict
from onestem_lab.serve.plot import curves, draw, read
from onestem_lab.serve.tenants import auc, classified


def test_auc_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 9, 12).tolist(), rng.integers(0, 9, 7).tolist()
        pairs = list(itertools.product(a, b))
        share = sum((x < y) + (x == y) / 2 for x, y in pairs) / len(pairs)
        assert auc(a, b) == pytest.approx(share)
    assert auc([1, 2], [3, 4]) == 1
    assert auc([3, 4], [1, 2]) == 0


def test_a_leak_is_seen_and_noise_is_not():
    rng = np.random.default_rng(1)
    primed = rng.integers(0, 2, 500).astype(bool)
    noise = rng.normal(1.0, 0.2, 500)
    blind = classified([(bool(p), float(t), 0) for p, t in zip(primed, noise)])
    leaky = classified([(bool(p), float(t - 0.1 * p), 5) for p, t in zip(primed, noise)])
    assert abs(blind["auc"] - 0.5) < 3 * blind["standard_error"]
    assert leaky["auc"] > 0.6
    assert (blind["cached_tokens"], leaky["cached_tokens"]) == (0, 2500)


def search(server, tokens, repeat, rate):
    runs = [
        {"rate": rate * factor, "normalised": {"mean": 0.1 * factor}, "given_up": factor > 1}
        for factor in (2, 1, 0.5)
    ]
    return {
        "server": server,
        "system_tokens": tokens,
        "repeat": repeat,
        "sustainable_rate": rate,
        "runs": runs,
    }


SEARCHES = [
    search("full", 2048, 0, 4.0),
    search("storage", 2048, 0, 2.0),
    search("full", 2048, 1, 6.0),
    search("storage", 2048, 1, 2.0),
    search("vllm-eager", 2048, 1, 1.5),
    search("full", 64, 0, 9.0),
]


def test_ratios_are_of_the_same_repeat():
    found = _against(SEARCHES)
    storage = found["2048"]["storage"]
    assert storage["full_against"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert storage["asked"] == 1.8
    assert found["2048"]["full"] == {"sustainable_rate": 5.0}
    assert found["2048"]["vllm-eager"]["full_against"]["median"] == 4.0
    assert found["2048"]["vllm-eager"]["asked"] == 1.8
    assert found["64"]["full"] == {"sustainable_rate": 9.0}


def test_a_job_is_judged_by_pairs():
    def run(per_token, ttft, **more):
        p99 = {"per_token": per_token, "ttft": ttft, "between_chunks": per_token * 2}
        return {name: {"p99": value} for name, value in p99.items()} | {
            "failed": 0, "torn": 0, **more
        }  # fmt: skip

    def pair(slower, later, job_step=0.05):
        return {
            "alone": run(0.1, 0.5),
            "with_job": run(
                0.1 * slower, 0.5 + later, job_requests_per_s=3.0, job_step_max_s=job_step
            ),
        }

    good = _verdict([pair(1.2, 0.1), pair(1.1, 0.2), pair(9.0, 0.0)], 5.0)
    assert good["per_token_p99_ratio"]["median"] == pytest.approx(1.2)
    assert good["ttft_p99_later_s"]["max"] == pytest.approx(0.2)
    assert good["step_p99_s"] == pytest.approx(0.24)
    assert good["good"]
    assert not _verdict([pair(1.3, 0.1)] * 3, 5.0)["good"]
    assert not _verdict([pair(1.1, 0.3)] * 3, 5.0)["good"]
    waits = _verdict([pair(1.1, 0.3, job_step=0.31)] * 3, 5.0)
    assert (waits["good"], waits["job_step_max_s"]) == (True, 0.31)


def test_the_picture_has_a_line_for_each_server(tmp_path):
    comparison = tmp_path / "serve.json"
    comparison.write_text(json.dumps({"limit": 0.5, "searches": SEARCHES}, indent=1))
    lines = tmp_path / "lines.json"
    line = {
        "server": {"share": "off"},
        "case": {"system_tokens": 64, "limit": 0.5},
        "runs": SEARCHES[0]["runs"],
    }
    lines.write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    entries = [*read(comparison), *read(lines)]
    found = curves(entries)
    # A run that was cut off is no point; the others stand in order of their rates.
    assert found[2048]["storage"] == [(1.0, 0.05), (1.0, 0.05), (2.0, 0.1), (2.0, 0.1)]
    assert found[64]["off"] == [(2.0, 0.05), (2.0, 0.05), (4.0, 0.1), (4.0, 0.1)]
    out = tmp_path / "serving.svg"
    draw(found, 0.5, out)
    first = out.read_bytes()
    assert b"<svg" in first
    draw(found, 0.5, out)
    assert out.read_bytes() == first


def longest_common(prompt, known):
    """By comparison with each."""
    pairs = (zip(prompt, one, strict=False) for one in known)
    lengths = (sum(itertools.takewhile(bool, (a == b for a, b in pair))) for pair in pairs)
    return min(max(lengths, default=0), len(prompt) - 1)


def test_the_oracle_of_agents_finds_what_was_there():
    rng = np.random.default_rng(3)
    events, known, expected, waiting = [], [], [], []
    for _ in range(120):
        if waiting and rng.random() < 0.5:
            turn = waiting.pop(int(rng.integers(len(waiting))))
            events.append(("done", turn))
            known.append([*turn.prompt, *turn.answer[:-1]])
        prompt, tokens = rng.integers(0, 2, 9).tolist(), rng.integers(0, 2, 4).tolist()
        if known and rng.random() < 0.7:
            prompt = [*known[int(rng.integers(len(known)))], *prompt]
        turn = Turn(number=0, prompt=prompt, answer=tokens)
        expected.append(longest_common(prompt, known))
        events.append(("sent", turn))
        known.append(prompt)
        waiting.append(turn)
    assert [turn.exact for turn in measured(events)] == expected
    assert max(expected) > 30


def test_shares_of_agents_turns():
    first = Turn(number=0, system_tokens=20, prompt=range(32), answer=[1] * 5)
    second = Turn(number=1, before=first, system_tokens=20, prompt=range(60), cached=24, exact=30)
    assert (first.as_written, second.as_written) == (0, 36)
    found = summary([first, second])
    assert (found["of_exact"], found["good"]) == (0.8, False)
    last = found["by_turn"][1]
    assert (last["pages"], last["of_pages"], last["own_of_exact"]) == (16, 1.5, 0.4)
    assert (last["own_of_as_written"], last["share"]) == (0.25, 0.4)
