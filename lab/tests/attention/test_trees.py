"""Attention on the trees of PAT and FastTree against float64: many levels, runs below a page."""

from __future__ import annotations

import pytest
import torch

from onestem.ops import available, resolve
from onestem.ops.triton import TritonAttention
from onestem.ops.work import make_work
from onestem_lab.attention.cases import TREES, Heads, Step, decode_step, make_tensors
from onestem_lab.attention_trees import scaled
from tests.ops.attend import attention
from tests.ops.test_triton_attention import CONFIG, DEVICE, NEEDS_HOPPER, assert_matches

NAMES = [name for trees in TREES.values() for name in trees]


def check(made, step: Step, heads: Heads, device: torch.device, share: bool = True) -> None:
    q, k, v = make_tensors(step, heads, device)
    want = attention(q, k, v, step.plan, impl="reference")
    assert_matches(made.prepare(step.plan, share=share).attend(q, k, v), want, heads.dtype)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("impl", [name for name in ("cpu", "torch") if name in available()])
def test_trees_on_a_cpu(impl, share):
    """A sixteenth of their nodes and tokens: the reference visits rows one by one."""
    heads = Heads(4, 1, 16, torch.float32)
    for name in NAMES:
        step, _ = scaled(name, 1 / 16).step(heads)
        check(resolve(impl), step, heads, torch.device("cpu"), share)


@pytest.mark.parametrize("group", [1, 4])
def test_a_tree_whose_items_walk_several_levels_in_triton(group):
    step = decode_step((1, 2, 4, 12), (20, 17, 8, 5))
    work = make_work(step.plan, CONFIG.cost(2), num_kv_heads=1, group=group)
    assert ((work.records[:, 1] > 1) & (work.records[:, 3] > 1)).any()
    heads = Heads(group, 1, 16, torch.float32)
    check(TritonAttention(config=CONFIG), step, heads, DEVICE)


@NEEDS_HOPPER
@pytest.mark.parametrize("heads", [(32, 32), (16, 8), (32, 8), (64, 8), (16, 1)], ids=str)
@pytest.mark.parametrize("name", NAMES[2::4])
def test_trees_on_hopper(name, heads):
    step, shape = scaled(name, 1 / 4).step(Heads(*heads))
    check(TritonAttention(), step, shape, DEVICE)
