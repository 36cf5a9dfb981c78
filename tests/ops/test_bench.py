"""`onestem bench attention` and `onestem tune`: cases, floors, errors, files of configurations."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.bench.cases import CASES, Case, Heads, decode_step, decodes, mixed_step
from onestem.ops.bench.measure import bench_attention
from onestem.ops.bench.peers import check_peers

CPU = torch.device("cpu")
SMALL = Heads(4, 2, 16, torch.float32)


@pytest.fixture
def quick(monkeypatch):
    """Without measuring rates, and with a small cache to flush."""
    from onestem.ops.bench import measure, timing

    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "measure_rates", lambda *args: timing.Rates(1e11, 1e10))


def test_a_tree_of_two_levels():
    step = decode_step(groups=2, degrees=(2, 3), prefixes=(40, 20), suffix=5)
    assert step.plan.num_rows == 12
    step.plan.check()
    assert step.attended().tolist() == [65] * 12
    assert step.plan.run_len.sum() == 2 * 40 + 4 * 20 + 12 * 5
    assert step.flops(SMALL) == 4 * 4 * 16 * 12 * 65
    assert step.shared_flops(SMALL) == 4 * 4 * 16 * 12 * 60
    assert step.own_bytes(SMALL) == SMALL.token_bytes * 12 * 5
    assert len(np.unique(step.plan.run_pages)) == len(step.plan.run_pages) == step.num_pages


def test_a_mixed_step_sees_causally():
    step = mixed_step(chunk_rows=4, contexts=(0, 8, 16), shared=1, decodes=2, suffix=3)
    step.plan.check()
    decodes_and_shared = [19, 19, 17, 18, 19, 20]
    assert step.attended().tolist() == [*decodes_and_shared, 1, 2, 3, 4, 9, 10, 11, 12]


def test_every_named_case_is_a_well_formed_plan():
    for case in CASES.values():
        step, heads = case.step(Heads())
        assert step.plan.num_rows == sum(step.row_counts)
        assert step.flops(heads) > 0
    assert CASES["8/1 heads 1x512 8192/128"].step(Heads())[1].num_kv_heads == 1


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_an_entry_is_right_and_complete(impl, quick):
    cases = {
        "tree": decodes(1, (2, 2), (20, 7), 5),
        "mixed": Case(partial(mixed_step, chunk_rows=8, contexts=(0, 16), shared=1, decodes=2)),
    }
    facts, *entries = bench_attention(cases, SMALL, CPU, ("sdpa",), impl)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["matrix_flops_per_s"] == 1e11
    for entry in entries:
        assert entry["right"]
        assert entry["errors_of_others"]["sdpa"] <= 2 * entry["plain_error"]
        assert entry["ms"] > 0
        assert entry["flop_floor_ms"] == pytest.approx(entry["flops"] / 1e8)
        assert entry["others_warm_ms"]["sdpa"] > 0
        assert entry["refused"] == {}
        json.dumps(entry)


def test_a_wrong_answer_is_told(monkeypatch, quick):
    from onestem.ops.bench import measure

    class Wrong:
        name = "wrong"
        head_major = False

        def prepare(self, plan):
            return self

        def attend(self, q, k, v):
            from onestem.ops.state import State

            return State(torch.zeros_like(q), q[..., 0])

    monkeypatch.setattr(measure, "resolve", lambda *args, **kwargs: Wrong())
    _, entry = bench_attention({"x": decodes(1, (2,), (20,), 5)}, SMALL, CPU)
    assert not entry["right"]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="peer is 'x', expected one of: sdpa, cudnn"):
        check_peers(("x",), CPU)
    with pytest.raises(UnsupportedError, match="'cudnn' runs on cuda only"):
        check_peers(("cudnn",), CPU)
    with pytest.raises(UnsupportedError, match="needs the package flash_attn"):
        check_peers(("flash_attn",), CPU)
    with pytest.raises(UnsupportedError, match="needs the package vllm"):
        check_peers(("vllm",), CPU)
    with pytest.raises(ConfigError, match="expected as many degrees as prefixes"):
        decode_step(groups=1, degrees=(2, 2), prefixes=(4,), suffix=1)


def test_configurations_are_stored_and_found(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from onestem.ops.bench.tune import store, tune
    from onestem.ops.triton import config

    monkeypatch.setattr(config, "DIRECTORY", tmp_path)
    shape = {"dtype": "bfloat16", "head_dim": 128}
    tuned = config.default_config(torch.bfloat16, 128, hopper=True)
    twin = config.default_config(torch.bfloat16, 128)
    store([{**shape, "group": 4, **tuned.to_json()}], "GPU of a Kind")
    path = store([{**shape, "group": 8, **twin.to_json()}], "GPU of a Kind")
    assert path == tmp_path / "gpu-of-a-kind.json"
    assert len(json.loads(path.read_text())) == 2
    find = partial(config.load_config, "GPU of a Kind", torch.bfloat16, 128)
    assert find(5, hopper=True) == (tuned, True)
    assert find(16, hopper=True)[0].tiles[0].block_m == 16  # holds the queries of a row
    assert find(5) == (twin, True)
    assert config.load_config("another", torch.bfloat16, 128, 5) == (twin, False)
    assert config.load_config("GPU of a Kind", torch.float16, 128, 5) == (
        config.default_config(torch.float16, 128),
        False,
    )
    with pytest.raises(ConfigError, match="onestem tune needs a GPU"):
        next(tune(Heads(), CPU))
