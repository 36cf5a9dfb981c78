"""Every layout of a weight gives the product, and `choose_layout` keeps its rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.models import linear
from onestem.models.linear import Activation, Head, Layout, Linear, choose_layout
from onestem.models.mlp import Mlp

CPU = torch.device("cpu")
ROWS = (0, 1, 2, 3, 16, 65)


def _weights(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    return weight, torch.randn(80, generator=generator).to(dtype) if bias else None


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


def _tolerance(dtype: torch.dtype) -> float:
    """One rounding of values up to some 30, and float32 sums of 48 terms of size 1."""
    return 30 * torch.finfo(dtype).eps + 100 * torch.finfo(torch.float32).eps


def _layouts(dtype: torch.dtype) -> list[Layout]:
    if dtype == torch.float32:
        return [Layout.PLAIN, Layout.PACKED, Layout.PACKED_AND_PLAIN]
    return [Layout.PLAIN, Layout.PACKED_FLOAT32]


CASES = [
    (dtype, layout)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for layout in _layouts(dtype)
]


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_the_product(dtype: torch.dtype, layout: Layout, bias: bool) -> None:
    weight, offset = _weights(dtype, bias)
    layer = Linear(weight, offset, layout)
    for rows in ROWS:
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
        y = layer(x)
        assert y.dtype == dtype
        assert y.shape == (rows, 80)
        tolerance = _tolerance(dtype)
        torch.testing.assert_close(
            y.double(), _exact(x, weight, offset), atol=tolerance, rtol=0, msg=f"{rows} rows"
        )


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_head_gives_float32(dtype: torch.dtype, layout: Layout, bias: bool) -> None:
    weight, offset = _weights(dtype, bias)
    head = Head(weight, layout, offset)
    for rows in ROWS:
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
        y = head(x)
        assert y.dtype == torch.float32
        tolerance = _tolerance(dtype)
        torch.testing.assert_close(y.double(), _exact(x, weight, offset), atol=tolerance, rtol=0)


def test_packed_float32_copy_keeps_the_bits_of_logits() -> None:
    weight, _ = _weights(torch.bfloat16, False)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = Head(weight, Layout.PACKED_FLOAT32)(x)
    torch.testing.assert_close(y.double(), _exact(x, weight, None), atol=1e-5, rtol=0)


def test_logits_that_somebody_holds_are_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is used again when a view of them is gone, too."""
    monkeypatch.setattr(linear, "MAPPED_BYTES", 0)
    weight, _ = _weights(torch.bfloat16, False)
    head = Head(weight, Layout.PLAIN)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    first = head(x)
    row, address, values = first[1], first.data_ptr(), first.clone()
    del first
    other = head(-x)
    assert other.data_ptr() != address
    assert torch.equal(row, values[1])
    del row
    for rows in (3, 2):
        assert head(x[:rows]).data_ptr() == address
        assert torch.equal(head(x[:rows]), values[:rows])


@pytest.mark.skipif(
    choose_layout(torch.float32, CPU) is Layout.PLAIN, reason="torch without oneDNN"
)
def test_a_shape_gives_the_same_bits_twice() -> None:
    weight, bias = _weights(torch.float32, True)
    layer = Linear(weight, bias)
    x = torch.randn(33, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), layer(x.clone()))


@pytest.mark.skipif(
    choose_layout(torch.float32, CPU) is Layout.PLAIN, reason="torch without oneDNN"
)
@pytest.mark.parametrize("rows", [linear.WHOLE_TO_ROWS + 1, 1024, linear.WHOLE_FROM_ROWS - 1])
def test_pieces_are_the_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = _weights(torch.float32, True)
    layer = Linear(weight, bias, Layout.PACKED)
    assert not layer.amx  # float32
    layer.amx, sizes = True, []
    whole = linear.packed_product
    monkeypatch.setattr(
        linear, "packed_product", lambda x, *rest: sizes.append(len(x)) or whole(x, *rest)
    )
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows))
    tolerance = _tolerance(torch.float32)
    torch.testing.assert_close(layer(x).double(), _exact(x, weight, bias), atol=tolerance, rtol=0)
    assert sum(sizes) == rows
    assert len(sizes) > 1
    assert max(sizes) <= linear.PIECE_ROWS


def test_results_that_are_used_up_at_once_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(torch.randn(1024, 32), layout=Layout.PLAIN)
    x = torch.randn(600, 32)
    monkeypatch.setattr(linear, "MAPPED_BYTES", 600 * 1024 * 4 - 1)
    assert len(layer.pieces(x)) == 1  # only with AMX
    layer.amx = True
    assert [len(piece) for piece in layer.pieces(x)] == [256, 256, 88]
    assert torch.equal(torch.cat(layer.pieces(x)), x)
    assert len(layer.pieces(x[:599])) == 1

    def gated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=1)
        return torch.sigmoid(gate) * up

    down = Linear(torch.randn(32, 512), layout=Layout.PLAIN)
    whole = torch.cat([gated(layer(piece)) for piece in layer.pieces(x)])
    assert torch.equal(Mlp(layer, down)(x, Activation("silu", gated)), down(whole))


def test_steps_are_padded_and_longer_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    def padded(*rows: int) -> list[int]:
        return [linear.padded_rows(n, Layout.PACKED, torch.bfloat16) for n in rows]

    others = (Layout.PACKED, torch.float32), (Layout.PLAIN, torch.bfloat16)
    monkeypatch.setattr(linear, "_has_amx", lambda: True)
    assert padded(0, 1, 2, 3, 9, 16, 17, 64, 65, 256) == [0, 1, 2, 4, 16, 16, 48, 64, 80, 256]
    assert padded(257, 288, 512, 513, 1024, 1025) == [288, 288, 512, 576, 1024, 1088]
    assert linear.step_rows(Layout.PACKED, torch.bfloat16) == 2048
    assert {(linear.padded_rows(9, *one), linear.step_rows(*one)) for one in others} == {(9, 1024)}
    monkeypatch.setattr(linear, "_has_amx", lambda: False)
    assert padded(1, 3, 257) == [1, 3, 257]
    assert linear.step_rows(Layout.PACKED, torch.bfloat16) == 1024


def test_layouts_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(native: bool, memory: int) -> None:
        monkeypatch.setattr(linear, "_can_pack", lambda _: True)
        is_native = (lambda _: True) if native else (lambda dtype: dtype == torch.float32)
        monkeypatch.setattr(linear, "_has_native_products", is_native)
        monkeypatch.setattr(linear, "ram_bytes", lambda: memory)

    machine(native=True, memory=1 << 30)
    assert choose_layout(torch.bfloat16, CPU) is Layout.PACKED
    machine(native=False, memory=1000)
    assert choose_layout(torch.float32, CPU, 10**9) is Layout.PACKED
    assert choose_layout(torch.float32, CPU, 300) is Layout.PACKED_AND_PLAIN
    assert choose_layout(torch.float32, CPU, 301) is Layout.PACKED
    assert choose_layout(torch.bfloat16, CPU, 200) is Layout.PACKED_FLOAT32
    # 201 + 402 bytes are more than 0.6 of 1000.
    assert choose_layout(torch.bfloat16, CPU, 201) is Layout.PLAIN
    assert choose_layout(torch.bfloat16, torch.device("cuda")) is Layout.PLAIN
    # With equal bits memory may refuse a layout, and not choose one.
    packed = choose_layout(torch.bfloat16, CPU, 200, deterministic=True)
    assert packed is Layout.PACKED_FLOAT32
    with pytest.raises(ConfigError, match=r"takes 603 bytes .* use float32$"):
        choose_layout(torch.bfloat16, CPU, 201, deterministic=True)
    assert choose_layout(torch.float32, CPU, 300, deterministic=True) is Layout.PACKED


def test_without_onednn_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_can_pack", lambda _: False)
    assert choose_layout(torch.float32, CPU) is Layout.PLAIN
