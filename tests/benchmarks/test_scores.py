"""The benchmark of scores: what it counts, at a tiny size."""

from __future__ import annotations

import json

from benchmarks import scores


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
