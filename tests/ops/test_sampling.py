"""Every way to sample against the float64 reference, and against itself in other batches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from onestem.errors import ConfigError
from onestem.ops.cpu import CpuSampling, is_built
from onestem.ops.sampling import (
    IDLE,
    ROW,
    STATUS_MASKED,
    STATUS_NOT_FINITE,
    STATUS_OK,
    RowTable,
    Sampling,
)
from onestem.ops.triton.sampling import TritonSampling
from tests.ops.cpu_isas import EVERY_ISA
from tests.ops.reference_sampling import draw, noise_bits, waiting_times
from tests.soak import one_in, soaked

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY_CPU = {str(isa): isa.sampling() for isa in EVERY_ISA}
EVERY = {"torch": Sampling(), **EVERY_CPU}

every = pytest.mark.parametrize("name", EVERY)

SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 20.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
]


def table_of(rows: int, settings: list[dict] = SETTINGS, device=CPU, **fields) -> RowTable:
    """All settings in turn; other seeds, sequences and tokens for each row."""
    draw = np.random.default_rng(rows)
    records = np.full(rows, IDLE)
    records["temperature"] = 1
    for name in ("seed_low", "seed_high"):
        records[name] = draw.integers(0, 2**32, rows)
    records["sequence"], records["token"] = draw.integers(0, 16, rows), draw.integers(0, 999, rows)
    for i in range(rows):
        for name, value in {**settings[i % len(settings)], **fields}.items():
            records[name][i] = value
    return RowTable(records, device)


def reference(logits: torch.Tensor, table: RowTable) -> list[int]:
    return [
        draw(
            values.numpy(),
            seed=int(row["seed_low"]) | int(row["seed_high"]) << 32,
            sequence=int(row["sequence"]),
            token=int(row["token"]) + table.steps,
            temperature=float(row["temperature"]),
            top_k=int(row["top_k"]),
            top_p=float(row["top_p"]),
            min_p=float(row["min_p"]),
        )
        for values, row in zip(logits, table.rows, strict=True)
    ]


def logits_of(rows: int, vocab: int, spread: float) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits[::2] = logits[::2].bfloat16().float()  # many equal ones
    if vocab > 2:
        logits[1::5, : vocab // 2] = -torch.inf  # masked
        logits[3::7] = 1.25  # all alike
        logits[4::7, ::2] = 0.0
        logits[4::7, 1::2] = -0.0  # equal too
    return logits


@pytest.mark.parametrize(
    ("name", "vocab", "spread"), one_in(3, sorted(EVERY), (1, 2, 17, 1000, 5003), (0.1, 3.0, 30.0))
)
def test_tokens_are_those_of_the_reference(name, vocab, spread):
    rows = 91
    logits, table = logits_of(rows, vocab, spread), table_of(rows)
    found = EVERY[name].draw(logits.clone(), table)
    assert found.ids.tolist() == reference(logits, table)
    assert found.status.tolist() == [STATUS_OK] * rows


KERNEL_SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"top_k": 290, "top_p": 0.5},
]


@pytest.mark.parametrize(("rows", "vocab"), [(7, 2), (21, 300), (4, 2600)])
def test_tokens_of_the_kernels_are_those_of_the_reference(rows, vocab):
    """In Triton's interpreter where there is no GPU."""
    logits, table = logits_of(rows, vocab, 3.0), table_of(rows, KERNEL_SETTINGS, device=DEVICE)
    found = TritonSampling().draw(logits.to(DEVICE), table)
    assert found.ids.tolist() == reference(logits, table)
    assert found.status.tolist() == [STATUS_OK] * rows


@every
def test_steps_of_a_table_are_those_of_later_tokens(name):
    logits, table = logits_of(26, 700, 3.0), table_of(26)
    table.steps = 5
    later = table.rows.copy()
    later["token"] += 5
    moved = EVERY[name].draw(logits, table).ids
    assert torch.equal(moved, EVERY[name].draw(logits, RowTable(later, CPU)).ids)
    table.steps = 0
    assert not torch.equal(moved, EVERY[name].draw(logits, table).ids)


@every
def test_a_row_does_not_depend_on_its_neighbours(name):
    logits, table = logits_of(39, 3000, 3.0), table_of(39)
    together = EVERY[name].draw(logits, table).ids
    for i in range(39):
        alone = RowTable(table.rows[i : i + 1], CPU)
        assert EVERY[name].draw(logits[i : i + 1].clone(), alone).ids.tolist() == [together[i]]


BAD = [
    ([float("nan"), 1.0, 2.0], STATUS_NOT_FINITE),
    ([1.0, float("inf"), 2.0], STATUS_NOT_FINITE),
    ([-float("inf")] * 3, STATUS_MASKED),
    ([-float("inf"), 1.0, -float("inf")], STATUS_OK),
]


@pytest.mark.parametrize("name", [*EVERY, "triton"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}])
def test_what_rows_cannot_be_sampled_from(name, settings):
    impl = TritonSampling() if name == "triton" else EVERY[name]
    device = DEVICE if name == "triton" else CPU
    logits = torch.tensor([values for values, _ in BAD], device=device)
    found = impl.draw(logits, table_of(len(BAD), [settings], device=device))
    assert found.status.tolist() == [status for _, status in BAD]
    assert found.ids[3] == 1


# ------------------------------------------------------------------------------- distributions


def chi_square(seen: np.ndarray, probability: np.ndarray) -> float:
    """In deviations from what it should be; tokens that are seldom expected are one."""
    expected = probability * seen.sum()
    common = expected >= 5
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    used = expected > 0
    degrees = used.sum() - 1
    value = ((seen[used] - expected[used]) ** 2 / expected[used]).sum()
    return float((value - degrees) / np.sqrt(2 * max(degrees, 1)))


FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("axis", ["seed_low", "sequence", "token"])
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_how_often_each_token_comes(settings, axis):
    """Over seeds, sequences and tokens, also after each filter."""
    draws, vocab = 20_000, 60
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    records = table_of(draws, [settings]).rows
    records[["seed_low", "seed_high", "sequence", "token"]] = (3, 4, 5, 6)
    records[axis] = np.arange(draws)
    ids = CpuSampling().draw(logits.repeat(draws, 1), RowTable(records, CPU)).ids
    heat = settings.get("temperature", 1.0)
    order = np.argsort(-logits.numpy(), kind="stable")
    weight = np.exp((logits.double().numpy()[order] - float(logits.max())) / heat)
    weight[settings.get("top_k", vocab) :] = 0
    before = np.cumsum(weight) - weight
    weight *= before < settings.get("top_p", 2) * weight.sum()
    weight *= weight >= settings.get("min_p", 0)
    probability = np.zeros(vocab)
    probability[order] = weight / weight.sum()
    seen = np.bincount(ids.numpy(), minlength=vocab)
    assert seen[probability == 0].sum() == 0
    assert abs(chi_square(seen, probability)) < 4.5


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
def test_flat_winners_have_the_noise_of_64_bits():
    """Of a large vocabulary the shortest wait is near 1e-5: float32 near 1 would know some 130
    different ones."""
    vocab = 128_256
    records = table_of(64, [{}]).rows
    ids = CpuSampling().draw(torch.zeros(64, vocab), RowTable(records, CPU)).ids.numpy()
    waits = [
        waiting_times(
            noise_bits(
                int(row["seed_low"]) | int(row["seed_high"]) << 32, int(row["sequence"]),
                int(row["token"]), np.array([token]),
            )
        )[0]
        for row, token in zip(records, ids, strict=True)
    ]  # fmt: skip
    mean = np.mean(waits) * vocab  # exponential with mean 1
    assert abs(mean - 1) < 4 / np.sqrt(64)


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("noise", [1e-6, 1e-2])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_other_bits_change_a_token_seldom(noise, spread):
    """With probability at most three times the total variation between the two distributions, at
    128,256 ids; counted over draws, with four deviations of room."""
    rows, vocab = 400, 128_256
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, vocab, generator=generator) * spread
    changed = logits + torch.randn(1, vocab, generator=generator) * noise
    table = table_of(rows, [{}])
    first, second = (
        CpuSampling().draw(values.repeat(rows, 1), table).ids for values in (logits, changed)
    )
    distributions = [values.double().softmax(-1) for values in (logits, changed)]
    variation = float((distributions[0] - distributions[1]).abs().sum()) / 2
    expected = 3 * variation * rows
    assert int((first != second).sum()) <= expected + 4 * np.sqrt(expected)


# ------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("name", "vocab"),
    [*product(EVERY, (1, 2500)), ("triton", 1), soaked("triton", 2500)],
)
def test_log_probabilities_leading_tokens_and_ranks(name, vocab):
    impl, device = (TritonSampling(), DEVICE) if name == "triton" else (EVERY[name], CPU)
    rows = 3 if name == "triton" else 20
    logits = logits_of(rows, vocab, 3.0)
    there = logits.to(device)
    index = torch.arange(rows - 1, -1, -2, device=device)
    values = logits.numpy().astype(np.float64)[index.cpu().numpy()]
    top = values.max(axis=1, keepdims=True)
    sums = np.log(np.exp(values - top).sum(axis=1)) + top[:, 0]
    np.testing.assert_allclose(
        impl.log_sums(there, index).cpu().numpy(), sums, atol=3e-6, rtol=1e-6
    )
    order = np.lexsort((np.broadcast_to(np.arange(vocab), values.shape), -values))
    for count in (0, 1, min(vocab, 64)):
        found, ids = impl.leading(there, index, count)
        assert ids.cpu().numpy().tolist() == order[:, :count].tolist()
        expected = np.take_along_axis(values, order[:, :count], axis=1)
        assert found.cpu().double().numpy().tolist() == expected.tolist()
    tokens = torch.from_numpy(np.ascontiguousarray(order[:, vocab // 2])).to(device)
    assert impl.ranks(there, index, tokens).tolist() == [vocab // 2] * len(index)


def penalised(logits, prompts, outputs, table: RowTable) -> np.ndarray:
    """In float32, one row after the other."""
    out = logits.numpy().copy()
    for i, row in enumerate(table.rows):
        if row["penalty"] < 0:
            continue
        if row["repetition"] != 1:
            for token in {*prompts[i], *outputs[i]}:
                x, p = out[i, token], row["repetition"]
                out[i, token] = x / p if x > 0 else x * p
        for token in set(outputs[i]):
            times = np.float32(outputs[i].count(token))
            out[i, token] -= row["frequency"] * times + row["presence"]
    return out


PENALTIES = [
    {},
    {"repetition": 1.3},
    {"presence": 0.7},
    {"frequency": -0.4, "presence": 0.1},
    {"repetition": 0.8, "frequency": 1.5},
]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_penalties_follow_what_is_sampled(name):
    impl, device = (TritonSampling(), DEVICE) if name == "triton" else (Sampling(), CPU)
    rows, vocab = 10, 90
    draw = np.random.default_rng(0)
    table = table_of(rows, PENALTIES, device=device)
    table.rows["penalty"] = [2, 0, -1, 5, 1, 3, 9, 4, -1, 40]
    state = impl.penalties(vocab, device)
    prompts = [draw.integers(0, vocab, 6).tolist() for _ in range(rows)]
    outputs = [draw.integers(0, vocab, i % 4).tolist() for i in range(rows)]

    def assign(i: int) -> None:
        row = table.rows[i]
        prompt = np.array([*prompts[i], vocab + 3]) if row["repetition"] != 1 else None
        state.assign(int(row["penalty"]), prompt, np.array(outputs[i], np.int64))

    for i in range(rows):
        if table.rows["penalty"][i] >= 0:
            assign(i)
    for step in range(12):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(step))
        there = logits.clone().to(device)
        state.apply(there, table)
        expected = penalised(logits, prompts, outputs, table)
        np.testing.assert_array_equal(there.cpu().numpy(), expected)
        sampled = draw.integers(0, 12, rows)
        state.note(table, torch.from_numpy(sampled).to(device))
        for i, token in enumerate(sampled.tolist()):
            outputs[i].append(token)
        if step == 6:  # a sequence that was computed again, and another one in its place
            outputs[3], outputs[9] = outputs[3][:2], []
            assign(3)
            assign(9)


def test_penalties_of_many_rows_and_long_outputs():
    """More places and more ids than there is room for at first; some are let go and come again."""
    rows, vocab = 40, 2000
    table = table_of(rows, [{"frequency": 0.5}], device=DEVICE)
    table.rows["penalty"] = np.arange(rows)
    few = RowTable(table.rows[::2].copy(), DEVICE)
    states = [TritonSampling().penalties(vocab, DEVICE), Sampling().penalties(vocab, CPU)]
    for state in states:
        for i in range(rows):
            state.assign(i, None, np.arange(254 + i % 3 if i % 4 == 0 else i))

    def step(table: RowTable, number: int) -> None:
        found = []
        for state, device in zip(states, (DEVICE, CPU), strict=True):
            logits = torch.zeros(len(table), vocab, device=device)
            state.apply(logits, table)
            found.append(logits.cpu())
            state.note(table, torch.arange(len(table), device=device) * 7 + 300 + number)
        assert torch.equal(*found)

    for number in range(4):
        step(table, number)
    for state in states:
        for place in range(1, rows, 2):
            state.release(place)
        state.assign(2, None, np.arange(900))  # lists are laid out anew
    for number in range(4):
        step(few, number)
    for state in states:
        for place in range(1, rows, 2):
            state.assign(place, None, np.arange(place))
    for number in range(4):
        step(table, number)


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
def test_arguments_that_do_not_fit_are_refused():
    impl, logits = CpuSampling(), torch.zeros(2, 8)
    with pytest.raises(ConfigError, match=r"logits are torch\.float64 \[2, 8\]"):
        impl.draw(logits.double(), table_of(2))
    with pytest.raises(ConfigError, match="got 3 rows, expected 2"):
        impl.draw(logits, table_of(3))
    for bad in ([2], [-1]):
        with pytest.raises(ConfigError, match=r"index must be int64 .* below 2"):
            impl.log_sums(logits, torch.tensor(bad))
    with pytest.raises(ConfigError, match=r"ids must be int64 .* below 8"):
        impl.ranks(logits, torch.tensor([0]), torch.tensor([8]))
    with pytest.raises(ConfigError, match="count is 9, expected at most 8"):
        impl.leading(logits, torch.tensor([0]), 9)


def test_a_row_is_what_kernels_take_it_for():
    assert ROW.itemsize == 64
    assert [ROW.fields[name][1] for name in ROW.names] == list(range(0, 64, 4))
