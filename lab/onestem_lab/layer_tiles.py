"""Tiles of `onestem.ops.triton.tiled`, timed and checked: `python -m onestem_lab.layer --sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from onestem.models.config import ModelConfig
from onestem.models.formats.held import Channels, rounded_weight
from onestem.models.formats.products import Target, projection
from onestem.models.linear import Layout, Projection
from onestem.ops.dispatch import resolve_rounding
from onestem.ops.rounding import RoundedRows, Rows
from onestem.ops.triton.tiled import TiledChannels, Tiles, divided, num_sms
from onestem.ops.triton.tiled_groups import TiledGroups
from onestem.options import Quantize
from onestem_lab.attention.rates import Rates
from onestem_lab.layer import BYTES, DTYPE, LAYERS, microseconds

__all__ = ["swept"]

# (outputs, rows, warps, stages, columns) of tiles by the rows up to which they are tried, and how
# many programs a multiprocessor should have.
FEW = ((64, 16, 4, 3), (64, 16, 4, 5), (128, 16, 4, 3), (128, 16, 8, 4))
SOME = ((64, 32, 4, 4), (64, 64, 4, 3), (128, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3))
MORE = ((64, 128, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 4))
MANY = ((128, 128, 8, 4), (128, 256, 8, 3), (128, 256, 8, 4), (256, 128, 8, 3), (256, 128, 8, 4))
OF_4_BITS = (
    *((64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 3), (128, 32, 8, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3)),
)
OF_8_BITS = (
    (16, (*FEW, (64, 16, 4, 7), (64, 16, 4, 4, 256)), (2, 4, 8)),
    (64, (*SOME, (128, 64, 4, 5)), (1, 2, 4)),
    (256, (*MORE, (128, 256, 8, 3)), (1, 2)),
    (8192, (*MANY, (128, 256, 8, 6, 64)), (1,)),
)
SWEPT: dict[str, tuple[tuple[int, tuple[tuple[int, ...], ...], tuple[int, ...]], ...]] = {
    "int4": (
        (8, ((64, 8, 4, 3), (64, 8, 4, 5), (128, 8, 4, 3), *FEW), (2, 4, 8)),
        (16, FEW, (2, 4, 8)),
        (64, OF_4_BITS, (1, 2, 4)),
        (8192, OF_4_BITS, (1,)),
    ),
    "fp8": OF_8_BITS,
    "int8": OF_8_BITS,
}


def candidates(form: str, rows: int) -> Iterator[Tiles]:
    _, tried, splits = next(entry for entry in SWEPT[form] if rows <= entry[0])
    for (out, high, *others), split in product(tried, splits):
        yield Tiles(out, high, split, *others)


def swept(
    form: str, config: ModelConfig, rows_of: Sequence[int], device: torch.device, rates: Rates
) -> Iterator[dict[str, Any]]:
    """Each tile's microseconds for each product, the fastest first."""
    heads = config.num_q_heads + 2 * config.num_kv_heads
    inner = config.intermediate_size
    shapes = {
        "qkv": (heads * config.head_dim, config.hidden_size),
        "output": (config.hidden_size, config.num_q_heads * config.head_dim),
        "up": (2 * inner, config.hidden_size),
        "down": (config.hidden_size, inner),
    }
    for name, (out, size) in shapes.items():
        made = [_made(form, out, size, device) for _ in range(LAYERS)]
        standing, layers = [one[0] for one in made], [one[1] for one in made]
        floor = 1e6 * BYTES[form] * out * size / rates.bytes
        for rows in rows_of:
            x = torch.randn(rows, size, device=device).to(DTYPE)
            given = x if form == "int4" else resolve_rounding(device)(x, layers[0].codes.dtype)
            own = layers[0].tiles(rows, num_sms(device))
            calls = {own: partial(_multiply, x=given, tiles=own)}
            for tiles in candidates(form, rows):
                cut = divided(layers[0], tiles, rows, num_sms(device))
                calls[cut] = partial(_multiply, x=given, tiles=cut)
            fit = _compiled(calls, layers[0])
            truth, bound = _truth(given, made[0][2])
            wrong = []
            for cut, call in fit.items():
                off = (call(layers[0]).double() - truth).abs()
                if not bool((off <= bound).all()):
                    wrong.append(astuple(cut))
            found = {cut: microseconds(call, layers, device) for cut, call in fit.items()}
            taken = x if standing[0].rounds is None else given
            before = microseconds(lambda layer, taken=taken: layer(taken), standing, device)
            best = sorted(found, key=found.__getitem__)
            shown = "; ".join(f"{found[cut]:.1f} {astuple(cut)}" for cut in best[:5])
            print(
                f"{form} {name} {rows}: floor {floor:.1f}, standing {before:.1f}, own "
                f"{found[own]:.1f} {astuple(own)}; {shown}; {len(calls) - len(fit)} did not fit, "
                f"wrong: {wrong or 'none'}",
                flush=True,
            )
            yield {
                "format": form,
                "product": name,
                "rows": rows,
                "floor_us": floor,
                "standing_us": before,
                "own": astuple(own),
                "us": [[found[cut], *astuple(cut)] for cut in best],
                "wrong": wrong,
            }


def _multiply(layer: Any, x: Rows, tiles: Tiles) -> Tensor:
    if isinstance(layer, TiledChannels):
        assert isinstance(x, RoundedRows)
        return layer.product(x, None, DTYPE, tiles)
    product: Tensor = layer.product(x, None, tiles)
    return product


def _made(
    form: str, out: int, size: int, device: torch.device
) -> tuple[Projection, TiledChannels | TiledGroups, Tensor]:
    """A random weight as it stands and tiled, and what it stands for in float64."""
    weight = rounded_weight(torch.randn(out, size, device=device), cast("Quantize", form))
    standing = projection([weight], None, None, Target(DTYPE, device, Layout.PLAIN))
    exact = weight.dense().double()
    if isinstance(weight, Channels):
        return standing, TiledChannels(weight.codes, weight.scales), exact
    parts = weight.codes, weight.scales, weight.zeros, weight.minimums, weight.group, weight.bits
    return standing, TiledGroups.of(*parts), exact


def _truth(x: Rows, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A product in float64, and how far one may be off: by the rounding of the result, and by sums
    in float32 or, of float8, in the tensor cores' own."""
    wide = x.double() if isinstance(x, Tensor) else x.codes.double() * x.scales.double()
    truth = wide @ weight.t()
    narrow = isinstance(x, RoundedRows) and x.codes.dtype == torch.float8_e4m3fn
    sums = (wide.abs() @ weight.abs().t()) * 2 ** (-11 if narrow else -20)
    return truth, truth.abs() * 2**-8 + sums


def _compiled(
    calls: dict[Tiles, Callable[[Any], Tensor]], layer: Any
) -> dict[Tiles, Callable[[Any], Tensor]]:
    """Those that fit the device, compiled side by side."""

    def fits(cut: Tiles) -> bool:
        try:
            calls[cut](layer)
        except OutOfResources:
            return False
        return True

    # Triton's interpreter takes one call at a time.
    with ThreadPoolExecutor(16 if layer.codes.is_cuda else 1) as pool:
        kept = list(pool.map(fits, calls))
    return {cut: call for (cut, call), fit in zip(calls.items(), kept, strict=True) if fit}
