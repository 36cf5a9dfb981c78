"""What does not hold is refused by every implementation alike, before anything is read."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from onestem.errors import ConfigError
from onestem.ops import PlanBuilder, Scores, available, resolve, windowed
from onestem.ops.cpu import is_built
from tests.ops.attend import attention

every_impl = pytest.mark.parametrize("impl", available())


def three_rows():
    """Each row behind a run of its own in three pages; q and pages for four query heads on two."""
    builder = PlanBuilder(4)
    for row in range(3):
        run = builder.add_run(np.arange(3 * row, 3 * row + 3, dtype=np.int32), 0, 10, 0)
        builder.add_span(row, 1, run, 10)
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 4, 16), (9, 4, 2, 16), (9, 4, 2, 16)
    tensors = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    return builder.build(np.full(3, 9)), tensors


@every_impl
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": torch.rand(3)}, r"alibi_slopes are torch.float32 \[3\].*\[4\] on cpu"),
        ({"alibi_slopes": torch.rand(8)}, r"float32 \[8\]"),
        ({"alibi_slopes": torch.rand(())}, r"float32 \[\] on cpu"),
        ({"alibi_slopes": torch.rand(4, dtype=torch.float64)}, "are torch.float64"),
        ({"alibi_slopes": torch.rand(4, device="meta")}, "on meta, expected torch.float32"),
        ({"softcap": 0.0}, "softcap is 0.0, expected a positive number"),
        ({"softcap": -5.0}, "softcap is -5.0"),
        ({"softcap": math.nan}, "softcap is nan"),
        ({"scale": math.nan}, "scale is nan, expected a finite number"),
        ({"scale": math.inf}, "scale is inf"),
    ],
)
def test_options_that_mean_nothing(impl, options, message):
    plan, tensors = three_rows()
    attention(*tensors, plan, impl=impl)
    with pytest.raises(ConfigError, match=message):
        attention(*tensors, plan, impl=impl, **options)


@pytest.mark.parametrize("impl", [name for name in available() if name in ("cpu", "triton")])
def test_what_kernels_would_read_out_of_bounds_is_refused_at_every_layer(impl):
    plan, tensors = three_rows()
    prepared = resolve(impl).prepare(plan)
    prepared.attend(*tensors)
    with pytest.raises(ConfigError, match="alibi_slopes are"):
        prepared.attend(*tensors, Scores(alibi_slopes=torch.rand(3)))


@every_impl
def test_slopes_may_have_gaps(impl):
    plan, tensors = three_rows()
    slopes = torch.rand(8)[::2]
    got = attention(*tensors, plan, impl=impl, alibi_slopes=slopes).out
    want = attention(*tensors, plan, impl=impl, alibi_slopes=slopes.clone()).out
    assert torch.equal(got, want)


@every_impl
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 4, 16), (8, 4, 2, 16)), "a run has page 8, the pages given are 8"),
        (((3, 4, 16), (0, 4, 2, 16)), "a run has page 8, the pages given are 0"),
    ],
)
def test_shapes_that_do_not_fit(impl, shapes, message):
    plan, _ = three_rows()
    q, pages = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ConfigError, match=message):
        attention(q, pages, pages, plan, impl=impl)


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
def test_heads_that_are_none_are_refused_where_a_plan_is_used_again():
    plan, (q, k, v) = three_rows()
    prepared = resolve("cpu").prepare(plan)
    for heads, kv_heads in ((0, 2), (4, 0), (0, 0)):
        with pytest.raises(ConfigError, match="does not fit pages"):
            prepared.attend(q[:, :heads], k[:, :, :kv_heads], v[:, :, :kv_heads])
    with pytest.raises(ConfigError, match="got tensors on cpu, meta"):
        prepared.attend(q, k, v.to("meta"))


@pytest.mark.parametrize("window", [0, -3, 2**31, 2**40])
def test_windows_that_are_none_or_too_large(window):
    plan, _ = three_rows()
    with pytest.raises(ConfigError, match=f"the window is {window}, expected 1 to 2147483647"):
        windowed(plan, window)
    with pytest.raises(ConfigError, match="the window is"):
        dataclasses.replace(plan, window=window)


@every_impl
def test_the_largest_window_hides_nothing(impl):
    plan, tensors = three_rows()
    got = attention(*tensors, windowed(plan, 2**31 - 1), impl=impl)
    assert torch.equal(got.lse, attention(*tensors, plan, impl=impl).lse)


@every_impl
def test_results_stand_where_queries_do_whatever_the_default_device(impl):
    plan, tensors = three_rows()
    want = attention(*tensors, plan, impl=impl).out
    with torch.device("meta"):
        assert torch.equal(attention(*tensors, plan, impl=impl).out, want)


@every_impl
def test_any_strides_are_taken_or_refused(impl):
    """Also where a head's elements are not side by side: in no implementation a wrong answer."""
    plan, (q, k, v) = three_rows()
    want = attention(q, k, v, plan, impl="reference").out
    by_element = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in (q, k, v)]
    got = attention(by_element[0], k, v, plan, impl=impl).out
    assert float((got - want).abs().max()) <= 1e-5
    if impl in ("cpu", "triton"):
        with pytest.raises(ConfigError, match="not contiguous"):
            attention(*by_element, plan, impl=impl)
    else:
        got = attention(*by_element, plan, impl=impl).out
        assert float((got - want).abs().max()) <= 1e-5
