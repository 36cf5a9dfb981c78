"""Drawing without waiting for a device gives the tokens of drawing with all means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onestem.engine import draw as module
from onestem.engine.draw import Draw, draw_at_once, draw_tokens
from onestem.ops.triton import leading as kernels

VOCAB = 3000


@pytest.fixture(autouse=True, params=["topk", "kernels"])
def way(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a GPU: with PyTorch's operations, or with the kernels, here in Triton's interpreter."""
    monkeypatch.setattr(module, "_is_native", lambda work: False)
    monkeypatch.setattr(module, "_has_kernels", lambda logits: request.param == "kernels")
    monkeypatch.setattr(kernels, "MOST", 256)
    return request.param


def draws(count: int, *, seed: int, top_k: list[int], top_p: list[float], min_p: float) -> Draw:
    rng = np.random.default_rng(seed)
    return Draw(
        temperature=torch.from_numpy(rng.uniform(0.5, 5.0, count)),
        top_k=torch.from_numpy(rng.choice(top_k, count)),
        top_p=torch.from_numpy(rng.choice(top_p, count)),
        min_p=torch.full((count,), min_p, dtype=torch.float64),
        uniform=torch.from_numpy(rng.uniform(size=count)),
    )


def logits_of(count: int, seed: int, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.round() if ties else logits


def at_once(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    weighed = (draw.top_k >= VOCAB).nonzero().flatten()
    return draw_at_once(logits, torch.arange(len(logits)), logits.amax(dim=-1), draw, weighed)


def from_all(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The tokens by the whole order of each row."""
    top = logits.amax(dim=-1)
    totals = module._sum_weights(logits, top, draw, torch.arange(len(logits)))
    totals = totals.where(draw.top_k >= VOCAB, 0)
    ids, resolved = module._draw_among(module.leading(logits, VOCAB), top, totals, draw, VOCAB)
    assert bool(resolved.all())
    return ids


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_with_all_means(ties: bool, min_p: float) -> None:
    """Every row has the whole order's token, with any cut."""
    logits = logits_of(30, 9, ties=ties)
    draw = draws(30, seed=3, top_k=[3, 256, 1000, VOCAB], top_p=[1.0, 0.9, 0.2], min_p=min_p)
    assert torch.equal(draw_tokens(logits, draw), from_all(logits, draw))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (8, 0.5), (20, 0.1), (20, 0.5)])
def test_few_rows_are_drawn_from_the_whole_order(
    monkeypatch: pytest.MonkeyPatch, count: int, share: float, ties: bool
) -> None:
    """As many as are to be, and all rows that are sure have the token of `draw_tokens`."""
    logits = logits_of(count, count, ties=ties)
    draw = draws(count, seed=1, top_k=[VOCAB], top_p=[1.0, 0.99], min_p=0.0)
    want = from_all(logits, draw)
    monkeypatch.setattr(module, "WHOLE_ORDER_SHARE", share)
    limit = min(count, max(8, int(count * share)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WHOLE_ORDER_ROWS", 0)
        patch.setattr(module, "WHOLE_ORDER_SHARE", 0)
        _, before = at_once(logits, draw)
    found, resolved = at_once(logits, draw)
    assert torch.equal(found[resolved], want[resolved])
    missing = int((~before).sum())
    assert int((~resolved).sum()) == max(0, missing - limit)
    assert missing > limit or count <= 8


@pytest.mark.parametrize("ties", [False, True])
def test_mixed_cuts(ties: bool) -> None:
    """Rows with and without top-k, top-p and min-p, few of which need the whole order."""
    logits = logits_of(24, 5, ties=ties)
    logits[:, 100:110] += 12.0  # most of the mass stands among few tokens
    draw = draws(24, seed=2, top_k=[5, 64, VOCAB], top_p=[1.0, 0.9], min_p=0.0)
    draw.temperature.fill_(0.6)
    found, resolved = at_once(logits, draw)
    assert torch.equal(found[resolved], from_all(logits, draw)[resolved])
    assert bool(resolved.all()) or ties


def test_rows_with_bad_logits_spoil_no_others() -> None:
    logits = logits_of(8, 3)
    logits[2] = float("nan")
    draw = draws(8, seed=4, top_k=[VOCAB], top_p=[1.0], min_p=0.0)
    with np.errstate(invalid="ignore"):  # the interpreter's
        found, resolved = at_once(logits, draw)
    good = torch.arange(8) != 2
    want = from_all(logits[good], draw.rows(good.nonzero().flatten()))
    assert bool(resolved[good].all())
    assert torch.equal(found[good], want)


def test_no_row_is_sorted_where_top_k_cuts_all(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    leading = module.leading
    monkeypatch.setattr(
        module, "leading", lambda work, count: counts.append(count) or leading(work, count)
    )
    logits = logits_of(20, 6)
    draw = draws(20, seed=7, top_k=[1, 40], top_p=[1.0, 0.9], min_p=0.0)
    _, resolved = at_once(logits, draw)
    assert counts == ([256] if way == "topk" else [])
    assert bool(resolved.all())
