"""`lab/onestem_lab/attention_trees.py`, a hundredth of its trees on a CPU."""

from __future__ import annotations

import json

from onestem.cost import timing
from onestem_lab.attention import measure
from onestem_lab.attention.cases import Heads
from onestem_lab.attention.rates import Rates
from onestem_lab.attention_trees import asked, main, scaled


def test_every_tree_is_measured_and_summed_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "measure_rates", lambda *args: Rates(1e11, 1e10))
    out = tmp_path / "trees.json"
    small = ["--scale", "0.01", "--heads", "4/2", "--head-dim", "16", "--dtype", "float32"]
    main([*small, "--trees", "fasttree", "--repeat", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert len(result["cases"]) == 15
    for entry in result["cases"]:
        assert entry["errors_of_others"]["sdpa"] <= 1e-5
        assert entry["error"] <= 1e-5
        assert entry["reached"] == (entry["speedup"] >= entry["asked"])
    assert [line["cases"] for line in result["summary"]] == [15, 15]
    assert capsys.readouterr().out.count("| 4/2 |") == 15


def test_more_is_asked_where_bytes_take_longer_than_launches():
    assert asked({"byte_floor_ms": 0.016, "speedup": 1.2}) == {"asked": 1.3, "reached": False}
    assert asked({"byte_floor_ms": 0.014, "speedup": 1.2}) == {"asked": 1.0, "reached": True}
    assert asked({"byte_floor_ms": 0.014}) == {}  # no other can do it


def test_a_scaled_tree_keeps_its_levels():
    step, _ = scaled("pat 2,8,16,256_256,256,32,32", 0.1).step(Heads())
    assert step.plan.run_len.tolist() == [26, 26, 3, 3, *[3] * 26]
