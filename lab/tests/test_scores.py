"""The benchmark of scores: what it counts, at a tiny size."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from onestem_lab import scores


def test_rows_are_those_of_different_beginnings(monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    arguments = [
        "scores", "--model", "shape:nothing", "--device", "cpu", "--dtype", "float32",
        "--kv-memory", "8MiB", "--questions", "12", "--subjects", "3", "--prefix", "20",
        "--question", "uniform:3..9", "--option-tokens", "2", "--out", str(out),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", arguments)
    scores.main()
    found = json.loads(out.read_text())
    pairs = scores.exam(scores.parse(), vocab_size=1000)
    paths = [tuple(prompt + one[:-1]) for prompt, some in pairs for one in some]
    distinct = {path[:i] for path in paths for i in range(1, len(path) + 1)}
    assert scores.distinct_rows(pairs) == len(distinct)
    # Each different token is computed, and once.
    assert found["computed_rows"] == found["distinct_rows"]


@pytest.mark.parametrize("option_tokens", [1, 2])
def test_peers_make_the_same_passes(monkeypatch, tmp_path, option_tokens):
    found = {}
    for peer in ("transformers", "hf"):
        if peer == "hf" and find_spec("lm_eval") is None:
            pytest.skip("lm-eval is not installed")
        out = tmp_path / f"{peer}.json"
        arguments = [
            "scores", "--model", "shape:nothing", "--device", "cpu", "--dtype", "float32",
            "--kv-memory", "8MiB", "--questions", "6", "--subjects", "2", "--prefix", "20",
            "--question", "uniform:3..9", "--option-tokens", str(option_tokens), "--peer", peer,
            "--batch-size", "2", "--out", str(out),
        ]  # fmt: skip
        monkeypatch.setattr("sys.argv", arguments)
        scores.main()
        found[peer] = json.loads(out.read_text())
    ours, theirs = found["transformers"], found["hf"]
    assert ours["peer"]["computed_rows"] == theirs["peer"]["computed_rows"] > 6 * 20
    assert ours["peer"]["rows_of_all"] == ours["peer"]["computed_rows"]
    for one in (ours["peer"], theirs["peer"]):
        # The engine has the peer's weights.
        assert one["mean_logprob"] == pytest.approx(ours["mean_logprob"], abs=1e-4)
