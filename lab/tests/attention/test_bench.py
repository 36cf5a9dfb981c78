"""`onestem bench attention` and `tune`: cases, floors, errors, files of configurations."""

from __future__ import annotations

import dataclasses
import json
import types
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops import State, available, resolve
from onestem_lab.attention import measure, peers, rates
from onestem_lab.attention.cases import CASES, TREES, Case, Heads, decode_step, decodes, mixed_step
from onestem_lab.attention.measure import bench_attention, summary
from onestem_lab.attention.peers import absent_peers
from onestem_lab.attention.rates import Rates
from onestem_lab.cli.attention import _cases as cli_cases
from onestem_lab.cli.attention import head_counts
from tests.ops.attend import check_plan

CPU = torch.device("cpu")
SMALL = Heads(4, 2, 16, torch.float32)


@pytest.fixture
def quick(monkeypatch):
    """Without measuring rates, and with a small cache to flush."""
    from onestem.cost import timing

    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "measure_rates", lambda *args: Rates(1e11, 1e10))


def test_a_tree_of_two_levels():
    step, _ = decodes(2, (2, 3), (40, 20), 5).step(SMALL)
    assert step.plan.num_rows == 12
    check_plan(step.plan)
    assert step.attended().tolist() == [65] * 12
    assert step.plan.run_len.sum() == 2 * 40 + 4 * 20 + 12 * 5
    assert step.flops(SMALL) == 4 * 4 * 16 * 12 * 65
    assert step.shared_flops(SMALL) == 4 * 4 * 16 * 12 * 60
    assert step.own_bytes(SMALL) == SMALL.token_bytes * 12 * 5
    assert len(np.unique(step.plan.run_pages)) == len(step.plan.run_pages) == step.num_pages


@pytest.mark.parametrize(
    ("counts", "lengths"), [((2, 5, 7), (3, 8, 1)), ((1, 3, 3, 10), (17, 0, 16, 5)), ((4,), (9,))]
)
def test_children_are_spread_evenly(counts, lengths):
    step = decode_step(counts, lengths)
    check_plan(step.plan, num_pages=step.num_pages)
    seen: list[list[tuple[int, int]]] = []
    for leaf in range(counts[-1]):
        node, path = leaf, []
        for level in range(len(counts) - 1, -1, -1):
            path.append((level, node))
            node = node * counts[level - 1] // counts[level] if level else 0
        seen.append([(level, node) for level, node in reversed(path) if lengths[level]])
    nodes = sorted({node for path in seen for node in path})
    assert step.row_runs == [[nodes.index(node) for node in path] for path in seen]
    assert step.plan.run_len.tolist() == [lengths[level] for level, _ in nodes]
    assert step.attended().tolist() == [sum(lengths)] * counts[-1]


def test_a_mixed_step_sees_causally():
    step = mixed_step(chunk_rows=4, contexts=(0, 8, 16), shared=1, decodes=2, suffix=3)
    check_plan(step.plan)
    decodes_and_shared = [19, 19, 17, 18, 19, 20]
    assert step.attended().tolist() == [*decodes_and_shared, 1, 2, 3, 4, 9, 10, 11, 12]


def test_every_named_case_is_a_well_formed_plan():
    assert [len(trees) for trees in TREES.values()] == [20, 15]
    for case in (*CASES.values(), *TREES["pat"].values(), *TREES["fasttree"].values()):
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
    told: list[dict[str, Any]] = []
    shapes = SMALL, dataclasses.replace(SMALL, num_q_heads=2)
    facts = bench_attention(cases, shapes, CPU, ("sdpa",), impl, progress=told.append)
    assert [found["cases"][-1]["case"] for found in told] == 2 * list(cases)
    assert told[-1] == facts  # here rates are the same at the end
    assert [entry["heads"] for entry in facts["cases"]] == ["4/2", "4/2", "2/2", "2/2"]
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["matrix_flops_per_s"] == 1e11
    for entry in facts["cases"]:
        assert entry["right"]
        assert entry["errors_of_others"]["sdpa"] <= 2 * entry["plain_error"]
        assert entry["ms"] > 0
        assert entry["flop_floor_ms"] == pytest.approx(entry["flops"] / 1e8)
        assert entry["others_warm_ms"]["sdpa"] > 0
        assert entry["over_unshared"] == entry["unshared_ms"] / entry["ms"]
        assert entry["refused"] == {}
        json.dumps(entry)


def test_the_summary_is_the_mean_and_the_worst_of_each_heads():
    speedups = {"32/8": (4.0, 1.0), "16/1": (0.5,)}
    entries = [
        {"case": f"case {i}", "heads": heads, "over_unshared": 2.0, "speedup": speedup}
        for heads, values in speedups.items()
        for i, speedup in enumerate(values)
    ]
    del entries[1]["speedup"]  # others could not do it
    facts = [tuple(line.values()) for line in summary(entries)]
    assert facts == [
        ("32/8", "the fastest other", 1, pytest.approx(4.0), 4.0, "case 0"),
        ("32/8", "unshared", 2, pytest.approx(2.0), 2.0, "case 0"),
        ("16/1", "the fastest other", 1, pytest.approx(0.5), 0.5, "case 0"),
        ("16/1", "unshared", 1, pytest.approx(2.0), 2.0, "case 0"),
    ]


@pytest.mark.parametrize("wrong_if", [True, False])
def test_a_wrong_answer_is_told(wrong_if, monkeypatch, quick):
    """With sharing or without."""

    class Wrong:
        name = "wrong"

        def head_major(self, head_dim, dtype):
            return False

        def prepare(self, plan, *, share):
            return self if share == wrong_if else resolve("torch").prepare(plan)

        def attend(self, q, k, v):
            return State(torch.zeros_like(q), q[..., 0])

    monkeypatch.setattr(measure, "resolve", lambda *args, **kwargs: Wrong())
    (entry,) = bench_attention({"x": decodes(1, (2,), (20,), 5)}, (SMALL,), CPU)["cases"]
    assert not entry["right"]


def test_the_better_rates_before_and_after_count(monkeypatch, quick):
    measured = [Rates(1e11, 3e10), Rates(2e11, 1e10)]
    monkeypatch.setattr(measure, "measure_rates", lambda *args: measured.pop(0))
    facts = bench_attention({"x": decodes(1, (2,), (20,), 5)}, (SMALL,), CPU)
    assert (facts["matrix_flops_per_s"], facts["bytes_per_s"]) == (2e11, 3e10)
    (entry,) = facts["cases"]
    assert entry["flop_floor_ms"] == pytest.approx(entry["flops"] / 2e8)
    assert entry["matrix_share"] == pytest.approx(entry["flop_floor_ms"] / entry["ms"])
    assert measured == []


@pytest.mark.parametrize(
    ("dtype", "support"),
    [(torch.float16, "_is_mkldnn_fp16_supported"), (torch.bfloat16, "_is_mkldnn_bf16_supported")],
)
def test_no_product_is_timed_in_a_dtype_that_is_emulated(dtype, support, monkeypatch):
    """One of 2048^3 would take a minute and more."""
    asked: list[torch.dtype] = []
    for kind in ("_square_rate", "_packed_rate"):
        monkeypatch.setattr(rates, kind, lambda dtype: asked.append(dtype) or 1.0)
    for supported, kinds in ((False, {torch.float32}), (True, {torch.float32, dtype})):
        asked.clear()
        ask = types.SimpleNamespace(**{support: lambda supported=supported: supported})
        monkeypatch.setattr(torch.ops, "mkldnn", ask)
        rates.product_rate(dtype)
        assert set(asked) == kinds


def test_products_and_packed_products_have_a_rate(monkeypatch):
    monkeypatch.setattr(rates, "SQUARES", (32, 64))
    monkeypatch.setattr(rates, "PACKED_SIZE", 128)
    found = [rates._square_rate(torch.float32), rates._packed_rate(torch.float32)]
    assert min(found) > 0
    assert rates.product_rate(torch.float32) > 0


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="peer is 'x', expected one of: sdpa, cudnn"):
        absent_peers(("x",), CPU)
    with pytest.raises(UnsupportedError, match="'cudnn' runs on cuda only"):
        absent_peers(("cudnn",), CPU)
    with pytest.raises(ConfigError, match="is 'nope', expected auto or one of: reference, torch"):
        bench_attention({}, (SMALL,), CPU, impl="nope")
    large = {"large": decodes(1, (2,), (1 << 20,), 1)}
    with pytest.raises(ConfigError, match=r"'large' takes \d+ GiB of keys, values and queries"):
        bench_attention(large, (Heads(1 << 20, 1 << 20, 1 << 10),), CPU)


@pytest.mark.parametrize(
    ("counts", "lengths", "message"),
    [
        ((0, 2), (1, 1), "a level of 0 nodes is below one of 1: expected at least as many"),
        ((4, 2), (1, 1), "a level of 2 nodes is below one of 4: expected at least as many"),
        ((1, 2), (-5, 1), "a node has -5 tokens, expected at least 0"),
        ((1, 2), (1, 0), "a node has 0 tokens, expected at least 1"),
        ((1, 2), (1,), "expected as many counts as lengths"),
        ((1, 2), (99_999_999_999, 1), "stores 100000000001 tokens, expected at most"),
        ((10**8, 10**13), (0, 1), "has 10000000000000 decodes"),
    ],
)
def test_sizes_of_which_no_step_can_be_made(counts, lengths, message):
    with pytest.raises(ConfigError, match=message):
        decode_step(counts, lengths)


def test_words_of_which_no_case_can_be_made():
    with pytest.raises(ConfigError, match="expected as many degrees as prefixes"):
        decodes(1, (2, 2), (3,), 1)
    with pytest.raises(ConfigError, match="case is '1x2', expected all, pat, fasttree or one of"):
        cli_cases("1x2", 1, "32", "2048", 128)
    with pytest.raises(ConfigError, match="heads are '32/8,16', expected query heads/KV heads"):
        head_counts("32/8,16")
    assert len(cli_cases("pat; 1x1 2048/128", 1, "32", "2048", 128)) == 21
    assert list(cli_cases(None, 2, "3", "16", 1)) == ["2x3 16/1"]


def test_what_can_be_used_is_named():
    with pytest.raises(ConfigError, match=f"expected auto or one of: {', '.join(available())}$"):
        resolve("nope")


def without(monkeypatch, *packages: str) -> None:
    """As if none of them were installed."""
    monkeypatch.setattr(
        peers, "find_spec", lambda name: None if name in packages else find_spec(name)
    )


def test_a_peer_that_is_absent_is_told_and_the_others_are_timed(monkeypatch, quick):
    without(monkeypatch, "vllm")
    cases = {"tree": decodes(1, (2,), (20,), 5)}
    (entry,) = bench_attention(cases, (SMALL,), CPU, ("vllm", "sdpa"))["cases"]
    assert entry["refused"] == {"vllm": "needs the package vllm, not installed"}
    assert list(entry["others_ms"]) == ["sdpa"]


def test_either_version_of_flash_attention_will_do(monkeypatch):
    cuda = torch.device("cuda")
    without(monkeypatch, "flash_attn", "flash_attn_interface")
    needs = "needs the package flash_attn_interface or flash_attn, not installed"
    assert absent_peers(("flash_attn", "sdpa"), cuda) == {"flash_attn": needs}
    installed = {"flash_attn_interface": None, "flash_attn": "2"}

    def import_module(name: str) -> str:
        if installed[name] is None:
            raise ImportError(name)
        return installed[name]

    monkeypatch.setattr(peers, "find_spec", installed.__contains__)
    monkeypatch.setattr(peers, "import_module", import_module)
    assert absent_peers(("flash_attn",), cuda) == {}
    assert peers._flash_attention() == "2"
    installed["flash_attn_interface"] = "3"
    assert peers._flash_attention() == "3"


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "hopper"),
    [(128, 8, True), (80, 8, True), (72, 8, True), (20, 8, False), (128, 128, False)],
)
def test_on_hopper_the_kernel_that_runs_is_tuned(head_dim, kv_heads, hopper, monkeypatch):
    """A pretended GPU: what is timed on which steps, not the times."""
    pytest.importorskip("triton")
    from onestem.ops.triton import launch
    from onestem_lab.attention import tune

    timed = []

    def mean_log_ms(config, names, heads, device):
        Kernels.make(
            num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim, page_size=heads.page_size, dtype=heads.dtype, device=device,
            windowed=False, config=config,
        )  # fmt: skip
        timed.append((config.hopper_registers is not None, names))
        return 1.0

    Kernels = launch.Kernels
    monkeypatch.setattr(launch, "_device", lambda device: ("NVIDIA H100 80GB HBM3", 132, True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(tune, "_mean_log_ms", mean_log_ms)
    monkeypatch.setattr(tune, "measure_rates", lambda *args: Rates(flops=8e14, bytes=4e12))
    heads = Heads(kv_heads, kv_heads, head_dim)
    entry = tune.tune(heads, torch.device("cuda"))
    assert (entry["hopper_registers"] is not None) == hopper
    assert entry["memory_ns"] == head_dim / 1000  # measured
    assert set(timed) == {(hopper, tune.STEPS)}


def test_a_file_that_cannot_hold_configurations_is_refused(tmp_path):
    pytest.importorskip("triton")
    from onestem_lab.attention.tune import check_file

    check_file("a GPU", tmp_path / "new" / "file.json")
    assert not (tmp_path / "new").exists()
    bad = tmp_path / "bad.json"
    for text in ("[", "[1]", "{}x", '[{"dtype": "bfloat16"}]', '{"a": 1}'):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=r"bad.json is not a file of configurations"):
            check_file("a GPU", bad)
    with pytest.raises(ConfigError, match="is not a file"):
        check_file("a GPU", tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_file("a GPU", bad / "below.json")


def test_configurations_are_stored_and_found(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from onestem.ops.triton import config
    from onestem_lab.attention.tune import store, tune

    monkeypatch.setattr(config, "DIRECTORY", tmp_path)
    shape = {"dtype": "bfloat16", "head_dim": 128}
    tuned = config.default_config(torch.bfloat16, 128, hopper=True)
    twin = config.default_config(torch.bfloat16, 128)
    store({**shape, "group": 4, **tuned.to_json()}, "GPU of a Kind")
    path = store({**shape, "group": 8, **twin.to_json()}, "GPU of a Kind")
    assert path == tmp_path / "gpu-of-a-kind.json"
    assert len(json.loads(path.read_text())) == 2
    for each in (tuned, twin):
        store({**shape, "head_dim": 64, "group": 4, **each.to_json()}, "GPU of a Kind")
    find = partial(config.load_config, "GPU of a Kind", torch.bfloat16, 128)
    assert find(4, hopper=True) == (tuned, True)
    assert find(16, hopper=True)[0].merge_tokens == 4 * tuned.merge_tokens  # of larger states
    assert find(16, hopper=True)[0].tiles[0].block_m == 16  # holds the queries of a row
    assert find(8) == (twin, True)
    # Falcon's 71 queries of a row: 64 rows and 7 columns, in longer tiles.
    tiles = {
        (size, group): config.load_config("another", torch.bfloat16, size, group, True)[0].tiles
        for size, group in ((64, 64), (64, 71), (64, 81), (128, 71))
    }
    assert [[tile.block_n for tile in each] for each in tiles.values()] == [
        [64, 64],
        [128],
        [64],
        [64],
    ]
    # Only Hopper's kernel divides them: the twin takes the entry of any group.
    for hopper, group in ((True, 71), (False, 71), (True, 64)):
        _, found = config.load_config("GPU of a Kind", torch.bfloat16, 64, group, hopper)
        assert found == (not hopper or group == 64)
    assert config.load_config("another", torch.bfloat16, 128, 2) == (twin, False)
    assert config.load_config("GPU of a Kind", torch.float16, 128, 4) == (
        config.default_config(torch.float16, 128),
        False,
    )
    # Keys and values of a head are 512 bytes.
    untuned, _ = config.load_config("another", torch.bfloat16, 128, 5, memory_rate=4e12)
    assert untuned.memory_ns == 0.128
    with pytest.raises(ConfigError, match="onestem bench tune needs a GPU"):
        tune(Heads(), CPU)
