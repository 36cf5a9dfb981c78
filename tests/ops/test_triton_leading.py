"""Leading tokens and weights from the kernels: those of a stable sort of all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onestem.ops.triton.leading import MOST, leading_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = 45


def logits_of(rows: int, vocab: int, spread: float, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    return (logits.round() if ties else logits).to(DEVICE)


def found_and_wanted(logits: torch.Tensor, rows: list[int], temperature: float):
    index = torch.tensor(rows, device=DEVICE)
    heat = torch.full((len(rows),), temperature, dtype=torch.float64, device=DEVICE)
    top = logits.amax(dim=-1)[index]
    found = leading_tokens(logits, index, top, heat, weight_bits=BITS)
    values, ids = logits[index].sort(dim=-1, descending=True, stable=True)
    scaled = (logits[index].double() - top.double()[:, None]) / heat[:, None]
    weights = (scaled.exp() * 2.0**BITS).long()
    return found, values, ids, weights


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 40.0])
@pytest.mark.parametrize(
    ("vocab", "rows"), [(7, [0]), (1000, [2, 0]), (1024, [1]), (5003, [0, 1, 2]), (20000, [2])]
)
def test_they_are_the_sorted_ones(vocab: int, rows: list[int], spread: float, ties: bool) -> None:
    logits = logits_of(3, vocab, spread, ties=ties)
    found, values, ids, weights = found_and_wanted(logits, rows, 0.8)
    # A weight is rounded down: another exponential's last bit moves it by one.
    assert bool(((found.totals - weights.sum(dim=-1)).abs() <= vocab).all())
    for row, count in enumerate(found.count.tolist()):
        assert count <= min(MOST, vocab)
        assert torch.equal(found.values[row, :count], values[row, :count])
        assert torch.equal(found.ids[row, :count], ids[row, :count])
        assert bool((found.values[row, count:] == -torch.inf).all())
        beyond = values[row, count:]
        assert not (count and len(beyond)) or beyond[0] < values[row, count - 1]
        if vocab <= MOST and spread <= 5.0:
            assert count == vocab
        elif not ties:
            assert count >= 256 or spread > 5.0


def test_all_logits_equal_are_too_many() -> None:
    found, *_ = found_and_wanted(torch.ones(2, 3000, device=DEVICE), [0, 1], 1.0)
    assert found.count.tolist() == [0, 0]
    assert found.totals.tolist() == [3000 << BITS] * 2


def test_bad_logits_are_no_harm() -> None:
    """Rows of NaN or infinity have no leading tokens that mean anything, and spoil no other's."""
    logits = logits_of(5, 3000, 3.0)
    want, *_ = found_and_wanted(logits, [0, 4], 1.0)
    logits[1, 5], logits[2], logits[3, 9] = float("nan"), float("nan"), float("inf")
    never = int(want.ids[1, 10])
    logits[4, never] = -float("inf")
    with np.errstate(invalid="ignore"):  # the interpreter's
        found, *_ = found_and_wanted(logits, [0, 1, 2, 3, 4], 1.0)
    assert torch.equal(found.ids[0], want.ids[0])
    assert torch.equal(found.totals[0], want.totals[0])
    count = int(found.count[4])
    kept = want.ids[1][want.ids[1] != never]
    assert torch.equal(found.ids[4, : count - 1], kept[: count - 1])
    assert never not in found.ids[4, :count].tolist()
