"""`Sampling` in Triton: an exponential race over rows of logits, without waiting for the device.

Rows that draw from the whole vocabulary, and greedy ones, are read once, by several programs each
if rows are few. A row with a small top-k is read three times and drawn from its leading tokens. A
row with only top-p or min-p races all tokens. If the winner is outside the nucleus, it bounds the
tokens of the next race, so the vocabulary is never sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from onestem.ops.sampling import Drawn, Sampling
from onestem.ops.sampling.rows import STATUS_MASKED, STATUS_NOT_FINITE, RowTable
from onestem.ops.sampling.torch_impl import WEIGHT_BITS
from onestem.ops.triton.penalties import TritonPenalties
from onestem.ops.triton.sizes import cdiv, power_of_2
from onestem.ops.triton.words import ROW_WORDS, R

MOST_LEADING = 256  # a larger top-k is found by bisection

# Tuned on an H200 (`onestem_lab.sampling`): approximate programs over all rows. Then tokens that a
# program reads at a time, and its warps: for rows with several programs, for rows with one, and for
# its search for leading tokens.
_PROGRAMS = 2048
_BLOCK, _WARPS = 1024, 8
_ROW_BLOCK, _ROW_WARPS = 4096, 16
_LEADING_BLOCK, _LEADING_WARPS = 2048, 8
_SUM_PART = 2048  # tokens of a part of a sum of exponentials

_NOT_FINITE, _MASKED = tl.constexpr(STATUS_NOT_FINITE), tl.constexpr(STATUS_MASKED)
_NOBODY = tl.constexpr(2**31 - 1)  # above all ids
_UNIT = tl.constexpr(2.0**WEIGHT_BITS)
_INFINITY = tl.constexpr(math.inf)
_LN_2_HIGH, _LN_2_LOW = tl.constexpr(0.693145751953125), tl.constexpr(1.42860682030941723e-6)


# ------------------------------------------------------------------------------- noise


@triton.jit
def _log1p(f):
    """Natural log of 1 + f, exact to two units in the last place, for f from -0.293 to 0.415: a fit
    of least relative error."""
    p = -0.0763431042432785 * f + 0.12761501967906952
    p = p * f - 0.1316021829843521
    p = p * f + 0.14201770722866058
    p = p * f - 0.16623355448246002
    p = p * f + 0.20001226663589478
    p = p * f - 0.250008225440979
    p = p * f + 0.3333333134651184
    return f + f * f * (p * f - 0.5)


@triton.jit
def _log(x):
    """Natural log of a normal float32 above 0: x = 2^e m with m around 1."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    whole = e.to(tl.float32)
    return whole * _LN_2_HIGH + (_log1p(m - 1.0) + whole * _LN_2_LOW)


@triton.jit
def _unit(high, low):
    """A number in (0, 1) of 64 bits, float32."""
    part = low.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return (high.to(tl.float32) + part) * 2.3283064365386963e-10


@triton.jit
def _log_wait(high, low):
    """log(-log u) of 64 random bits; u is near 1 if the upper bits are small."""
    near, far = _unit(high, low), _unit(~high, ~low)  # 1 - u and u
    wait = tl.where(near < 0.29, -_log1p(-tl.minimum(near, 0.29)), -_log(far))
    return _log(wait)


@triton.jit
def _seed(row):
    low = tl.load(row + R.seed_low).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(row + R.seed_high).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def _in_order(w0, w1, w2, w3, BLOCK: tl.constexpr):
    """Four words of each counter, `[BLOCK]` in the order of their ids."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def _log_waits(seed, token, sequence, start, BLOCK: tl.constexpr):
    """log(-log u) of tokens start..start+BLOCK-1; `start` is a multiple of 4."""
    blocks = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    same = tl.zeros_like(blocks)
    h0, h1, h2, h3 = tl.philox(seed, blocks, same + token, same + sequence, same)
    l0, l1, l2, l3 = tl.philox(seed, blocks, same + token, same + sequence, same + 1)
    high, low = _in_order(h0, h1, h2, h3, BLOCK), _in_order(l0, l1, l2, l3, BLOCK)
    return _log_wait(high, low)


@triton.jit
def _log_waits_of(seed, token, sequence, ids):
    """log(-log u) of tokens `ids`, in any order."""
    blocks = (ids // 4).to(tl.uint32)
    same = tl.zeros_like(blocks)
    h0, h1, h2, h3 = tl.philox(seed, blocks, same + token, same + sequence, same)
    l0, l1, l2, l3 = tl.philox(seed, blocks, same + token, same + sequence, same + 1)
    word = ids % 4
    high = tl.where(word == 0, h0, tl.where(word == 1, h1, tl.where(word == 2, h2, h3)))
    low = tl.where(word == 0, l0, tl.where(word == 1, l1, tl.where(word == 2, l2, l3)))
    return _log_wait(high, low)


@triton.jit
def _first_of_best(scores, ids):
    """The highest score and its id, of equal ones the lowest."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, ids, _NOBODY), 0)


# ------------------------------------------------------------------------------- whole rows


@triton.jit(do_not_specialize=["steps"])
def _race(logits, stride, rows, steps, scores, winners, faults, vocab, split, BLOCK: tl.constexpr):
    """Program (row, part): the winner of a part of a row; rows with a filter are left out."""
    row, part = tl.program_id(0), tl.program_id(1)
    asked = rows + row * ROW_WORDS
    base = logits + row.to(tl.int64) * stride
    temperature = tl.load(asked + R.temperature).to(tl.float32, bitcast=True)
    draws = temperature > 0
    cut = (
        (tl.load(asked + R.top_k) > 0)
        | (tl.load(asked + R.top_p).to(tl.float32, bitcast=True) < 1)
        | (tl.load(asked + R.min_p).to(tl.float32, bitcast=True) > 0)
    )
    seed, sequence = _seed(asked), tl.load(asked + R.sequence)
    token, heat = tl.load(asked + R.token) + steps, 1.0 / tl.where(draws, temperature, 1.0)
    begin = part * split
    stop = tl.where(draws & cut, begin, tl.minimum(begin + split, vocab))
    best = tl.full([BLOCK], -_INFINITY, tl.float32)
    winner = tl.full([BLOCK], _NOBODY, tl.int32)
    fault = tl.zeros([BLOCK], tl.int32)
    if draws:
        for start in range(begin, stop, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(base + ids, mask=ids < stop, other=-_INFINITY)
            score = x * heat - _log_waits(seed, token, sequence, start, BLOCK)
            fault |= ((x != x) | (x == _INFINITY)).to(tl.int32)
            ahead = score > best
            best, winner = tl.where(ahead, score, best), tl.where(ahead, ids, winner)
    else:
        for start in range(begin, stop, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(base + ids, mask=ids < stop, other=-_INFINITY)
            fault |= ((x != x) | (x == _INFINITY)).to(tl.int32)
            ahead = x > best
            best, winner = tl.where(ahead, x, best), tl.where(ahead, ids, winner)
    score, first = _first_of_best(best, winner)
    at = row * tl.num_programs(1) + part
    tl.store(scores + at, score)
    tl.store(winners + at, first)
    tl.store(faults + at, tl.max(fault, 0))


@triton.jit(do_not_specialize=["parts"])
def _settle(scores, winners, faults, parts, ids, status, PARTS: tl.constexpr):
    """Program (row): the winner of its parts."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    at, there = row * parts + part, part < parts
    score = tl.load(scores + at, mask=there, other=-_INFINITY)
    _, winner = _first_of_best(score, tl.load(winners + at, mask=there, other=_NOBODY))
    fault = tl.max(tl.load(faults + at, mask=there, other=0), 0)
    _store_drawn(ids, status, row, winner, fault > 0)


@triton.jit
def _store_drawn(ids, status, row, winner, wrong):
    masked = winner == _NOBODY
    tl.store(ids + row, tl.where(masked | wrong, 0, winner).to(tl.int64))
    tl.store(status + row, tl.where(wrong, _NOT_FINITE, tl.where(masked, _MASKED, 0)))


# ------------------------------------------------------------------------------- leading tokens


@triton.jit
def _ordered(x):
    """Logits as int32 of the same order; both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _group_tops(base, vocab, GROUPS: tl.constexpr):
    """The highest logit of each group of ids that are equal modulo GROUPS, and whether any logit is
    NaN or +inf (-inf is allowed: it is never drawn)."""
    tops = tl.full([GROUPS], -_INFINITY, tl.float32)
    fault = tl.zeros([GROUPS], tl.int32)
    for start in range(0, vocab, GROUPS):
        at = start + tl.arange(0, GROUPS)
        x = tl.load(base + at, mask=at < vocab, other=-_INFINITY)
        fault |= ((x != x) | (x == _INFINITY)).to(tl.int32)
        tops = tl.maximum(tops, x)
    return tops, tl.max(fault, 0) > 0


@triton.jit
def _count_from(base, vocab, least, BLOCK: tl.constexpr):
    """Number of tokens whose ordered logit is at least `least`."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < vocab, other=-_INFINITY)
        found += ((_ordered(x) >= least) & (ids < vocab)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _count_ties(base, vocab, value, end, BLOCK: tl.constexpr):
    """Number of tokens with ordered logit `value` and an id below `end`."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < vocab, other=-_INFINITY)
        found += ((_ordered(x) == value) & (ids < tl.minimum(end, vocab))).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _nth(base, vocab, count, low, high, BLOCK: tl.constexpr):
    """The ordered logit and the id of the `count`-th token in the order, by bisection. At least
    `count` tokens have an ordered logit of `low` or more, and fewer than `count` have `high` or
    more."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        enough = _count_from(base, vocab, middle.to(tl.int32), BLOCK) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    value = low.to(tl.int32)
    above = _count_from(base, vocab, high.to(tl.int32), BLOCK)
    ties = count - above  # tokens of equal logit that count, the lowest ids
    # Fewer than `ties` have ids below `first`, enough have ids below `last`.
    first, last = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + vocab
    while last - first > 1:
        middle = (first + last) // 2
        enough = _count_ties(base, vocab, value, middle, BLOCK) >= ties
        first, last = tl.where(enough, first, middle), tl.where(enough, middle, last)
    return value, last - 1


@triton.jit(do_not_specialize=["most", "steps"])
def _leading(
    logits, stride, index, asked_rows, most, rows, steps, scratch, values, tokens, ids, status,
    vocab, GROUPS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Program (i): the leading tokens of row index[i], in order. Stores `most` of them, or draws a
    token from its top-k."""
    i = tl.program_id(0)
    row = tl.load(index + i)
    asked = rows + row * ROW_WORDS
    base = logits + row * stride
    count = tl.load(asked + R.top_k) if DRAW else most
    count = tl.minimum(count, vocab)
    # The count-th highest group top is a lower bound of the count-th logit, and rarely far below.
    tops, wrong = _group_tops(base, vocab, GROUPS)
    highest = tl.max(tops, 0)
    order = tl.sort(tops, descending=True)
    bound = tl.max(tl.where(tl.arange(0, GROUPS) == count - 1, order, -_INFINITY), 0)
    least, last = _ordered(bound), tl.full([], _NOBODY, tl.int32)
    if _count_from(base, vocab, least, BLOCK) > CAP:
        least, last = _nth(base, vocab, count, least, _ordered(highest).to(tl.int64) + 1, BLOCK)
    place = 0
    room = scratch + i.to(tl.int64) * CAP
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocab, other=-_INFINITY)
        key = _ordered(x)
        chosen = (at < vocab) & ((key > least) | ((key == least) & (at <= last)))
        one = chosen.to(tl.int32)
        packed = (key.to(tl.int64) << 32) | (at ^ 0x7FFFFFFF).to(tl.int64)
        tl.store(room + place + tl.cumsum(one, 0) - 1, packed, mask=chosen)
        place += tl.sum(one, 0)
    tl.debug_barrier()  # wait for other threads' stores
    rank = tl.arange(0, CAP)
    lowest = tl.full([CAP], -(2**63), tl.int64)
    packed = tl.sort(tl.where(rank < place, tl.load(room + rank), lowest), descending=True)
    there = rank < tl.minimum(count, place)
    key = (packed >> 32).to(tl.int32)
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    x = tl.where(there, bits.to(tl.float32, bitcast=True), -_INFINITY)
    token_ids = tl.where(there, packed.to(tl.int32) ^ 0x7FFFFFFF, 0)
    if DRAW:
        x = tl.where(wrong, 0.0, x)
        highest = tl.where(wrong | (highest == -_INFINITY), 0.0, highest)
        winner = _draw_leading(asked, steps, x, token_ids, highest, there, rank)
        _store_drawn(ids, status, row, winner, wrong)
    else:
        out = i.to(tl.int64) * most + rank
        tl.store(values + out, x, mask=rank < most)
        tl.store(tokens + out, token_ids.to(tl.int64), mask=rank < most)


@triton.jit
def _draw_leading(asked, steps, x, ids, highest, there, rank):
    """The winner among a row's leading tokens, in order, that top-p and min-p keep."""
    temperature = tl.load(asked + R.temperature).to(tl.float32, bitcast=True)
    top_p = tl.load(asked + R.top_p).to(tl.float32, bitcast=True)
    heat = 1.0 / temperature
    weight = tl.where(there, (tl.exp((x - highest) * heat) * _UNIT).to(tl.int64), 0)
    before = (tl.cumsum(weight, 0) - weight).to(tl.float64)
    limit = top_p.to(tl.float64) * tl.sum(weight, 0).to(tl.float64)
    kept = there & (x > -_INFINITY) & (before < tl.where(top_p < 1, limit, _INFINITY))
    kept &= x >= _least(asked, highest, temperature)
    token = tl.load(asked + R.token) + steps
    waits = _log_waits_of(_seed(asked), token, tl.load(asked + R.sequence), ids)
    score = tl.where(kept, x * heat - waits, -_INFINITY)
    best = tl.max(score, 0)
    return tl.min(tl.where(kept & (score == best), ids, _NOBODY), 0)


@triton.jit
def _least(asked, highest, temperature):
    """The lowest logit that min-p keeps."""
    min_p = tl.load(asked + R.min_p).to(tl.float32, bitcast=True)
    cut = highest + temperature * _log(tl.maximum(min_p, 1e-37))
    return tl.where(min_p > 0, cut, -_INFINITY)


# ------------------------------------------------------------------------------- the nucleus


@triton.jit(do_not_specialize=["steps"])
def _nucleus(logits, stride, index, rows, steps, ids, status, vocab, BLOCK: tl.constexpr):
    """Program (i): a token of row index[i], which has top-p, min-p or a large top-k."""
    row = tl.load(index + tl.program_id(0))
    asked = rows + row * ROW_WORDS
    base = logits + row * stride
    temperature = tl.load(asked + R.temperature).to(tl.float32, bitcast=True)
    top_p = tl.load(asked + R.top_p).to(tl.float32, bitcast=True)
    top_k, heat = tl.load(asked + R.top_k), 1.0 / temperature
    seed, sequence = _seed(asked), tl.load(asked + R.sequence)
    token = tl.load(asked + R.token) + steps
    tops, wrong = _group_tops(base, vocab, BLOCK)
    highest = tl.max(tops, 0)
    vocab = tl.where(wrong | (highest == -_INFINITY), 0, vocab)  # no token may win
    highest = tl.where(vocab > 0, highest, 0.0)
    least = _least(asked, highest, temperature)
    # Tokens before (value, end) in the order may win: at first those of the top-k.
    value, end = tl.full([], -(2**31), tl.int32), tl.full([], 0, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        value, end = _nth(base, vocab, top_k, value + 1, _ordered(highest).to(tl.int64) + 1, BLOCK)
        end += 1
    winner = tl.full([], _NOBODY, tl.int32)
    weighed = tl.where(top_p < 1, vocab, 0)  # tokens whose mass is summed
    mass = _mass_before(base, weighed, value, end, highest, heat, BLOCK)
    limit = top_p.to(tl.float64) * mass.to(tl.float64)
    runs = vocab > 0
    while runs:
        best = tl.full([BLOCK], -_INFINITY, tl.float32)
        won = tl.full([BLOCK], _NOBODY, tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(base + at, mask=at < vocab, other=-_INFINITY)
            key = _ordered(x)
            allowed = (key > value) | ((key == value) & (at < end))
            allowed &= (x >= least) & (x > -_INFINITY)
            score = x * heat - _log_waits(seed, token, sequence, start, BLOCK)
            ahead = allowed & (score > best)
            best, won = tl.where(ahead, score, best), tl.where(ahead, at, won)
        _, winner = _first_of_best(best, won)
        value, end = _ordered(tl.load(base + tl.minimum(winner, vocab - 1))), winner
        mass = _mass_before(base, weighed, value, end, highest, heat, BLOCK)
        runs = (top_p < 1) & (mass.to(tl.float64) >= limit)
    _store_drawn(ids, status, row, winner, wrong)


@triton.jit
def _mass_before(base, vocab, value, end, highest, heat, BLOCK: tl.constexpr):
    """Weight of the tokens before a place in the order; int64, so the order of the sum is free."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocab, other=-_INFINITY)
        key = _ordered(x)
        before = (key > value) | ((key == value) & (at < end))
        weight = (tl.exp((x - highest) * heat) * _UNIT).to(tl.int64)
        total += tl.where(before, weight, 0)
    return tl.sum(total, 0)


# ------------------------------------------------------------------------------- log-probabilities


@triton.jit
def _sum_parts(logits, stride, index, tops, sums, vocab, split, BLOCK: tl.constexpr):
    """Program (i, part): the highest logit of a part of row index[i], and the sum of exponentials
    relative to it."""
    i, part = tl.program_id(0), tl.program_id(1)
    base = logits + tl.load(index + i) * stride
    begin = part * split
    stop = tl.minimum(begin + split, vocab)
    top = tl.full([BLOCK], -_INFINITY, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < stop, other=-_INFINITY)
        new = tl.maximum(top, x)
        shift = tl.where(new > -_INFINITY, new, 0.0)
        total = total * tl.exp(top - shift) + tl.exp(x - shift)
        top = new
    highest = tl.max(top, 0)
    scale = tl.exp(top - tl.where(highest > -_INFINITY, highest, 0.0))
    at = i * tl.num_programs(1) + part
    tl.store(tops + at, highest)
    tl.store(sums + at, tl.sum(total * scale, 0))


@triton.jit(do_not_specialize=["parts"])
def _log_sum(tops, sums, parts, out, PARTS: tl.constexpr):
    """Program (i): the log-sum-exp of a row's parts."""
    i = tl.program_id(0)
    part = tl.arange(0, PARTS)
    top = tl.load(tops + i * parts + part, mask=part < parts, other=-_INFINITY)
    total = tl.load(sums + i * parts + part, mask=part < parts, other=0.0)
    highest = tl.max(top, 0)
    shift = tl.where(highest > -_INFINITY, highest, 0.0)
    tl.store(out + i, highest + tl.log(tl.sum(total * tl.exp(top - shift), 0)))


@triton.jit
def _rank_parts(logits, stride, index, ids, ranks, vocab, split, BLOCK: tl.constexpr):
    """Program (i, part): number of tokens in a part of row index[i] that are before ids[i]."""
    i, part = tl.program_id(0), tl.program_id(1)
    base = logits + tl.load(index + i) * stride
    own = tl.load(ids + i)
    value = tl.load(base + own)
    begin = part * split
    stop = tl.minimum(begin + split, vocab)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < stop, other=-_INFINITY)
        before = (x > value) | ((x == value) & (at < own))
        found += (before & (at < stop)).to(tl.int32)
    tl.store(ranks + i * tl.num_programs(1) + part, tl.sum(found, 0))


# ------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class TritonSampling(Sampling):
    """`Sampling` in Triton; never waits for the device."""

    name: str = "triton"

    def draw(self, logits: Tensor, rows: RowTable) -> Drawn:
        count, vocab = logits.shape
        ids = torch.empty(count, dtype=torch.int64, device=logits.device)
        status = torch.empty(count, dtype=torch.int32, device=logits.device)
        plan = _plan_of(rows, vocab)
        if plan.num_whole:
            self._draw_whole(logits, rows, ids, status)
        if len(plan.few):
            self._lead(logits, plan.few_there, plan.most, rows, Drawn(ids, status))
        if len(plan.cut):
            _nucleus[(len(plan.cut),)](
                logits, logits.stride(0), plan.cut_there, rows.words, rows.steps, ids, status,
                vocab, BLOCK=_ROW_BLOCK, num_warps=_ROW_WARPS,
            )  # fmt: skip
        return Drawn(ids, status)

    def _draw_whole(self, logits: Tensor, rows: RowTable, ids: Tensor, status: Tensor) -> None:
        count, vocab = logits.shape
        parts, split = _split(count, vocab)
        scores = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
        winners, faults = torch.empty(2, count, parts, dtype=torch.int32, device=logits.device)
        _race[(count, parts)](
            logits, logits.stride(0), rows.words, rows.steps, scores, winners, faults, vocab, split,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        most_parts = power_of_2(min(_PROGRAMS, cdiv(vocab, _BLOCK)))
        _settle[(count,)](scores, winners, faults, parts, ids, status, PARTS=most_parts)

    def _lead(
        self, logits: Tensor, index: Tensor, most: int, rows: RowTable | None, out: Drawn
    ) -> None:
        """Draw from leading tokens, or, without `rows`, store them in place of ids and status."""
        vocab, cap = logits.shape[1], power_of_2(max(256, 4 * most))
        scratch = torch.empty(len(index), cap, dtype=torch.int64, device=logits.device)
        words = logits if rows is None else rows.words
        _leading[(len(index),)](
            logits, logits.stride(0), index, words, most, words, 0 if rows is None else rows.steps,
            scratch, *out, *out, vocab,
            GROUPS=min(1024, power_of_2(vocab)), CAP=cap, BLOCK=_LEADING_BLOCK,
            DRAW=rows is not None, num_warps=_LEADING_WARPS,
        )  # fmt: skip

    def log_sums(self, logits: Tensor, index: Tensor) -> Tensor:
        """See `Sampling`; the result is float32. The parts of a row are the same at any number of
        rows, and so are its bits."""
        count, vocab = len(index), logits.shape[1]
        parts = cdiv(vocab, _SUM_PART)
        tops, sums = torch.empty(2, count, parts, dtype=torch.float32, device=logits.device)
        out = torch.empty(count, dtype=torch.float32, device=logits.device)
        if count:
            _sum_parts[(count, parts)](
                logits, logits.stride(0), index, tops, sums, vocab, _SUM_PART,
                BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
            _log_sum[(count,)](tops, sums, parts, out, PARTS=power_of_2(parts))
        return out

    def leading(self, logits: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values = logits.new_empty(len(index), count)
        ids = torch.empty(len(index), count, dtype=torch.int64, device=logits.device)
        if count > MOST_LEADING:
            values, ids = logits[index].sort(dim=-1, descending=True, stable=True)
            return values[:, :count], ids[:, :count]
        if count and len(index):
            self._lead(logits, index, count, None, Drawn(values, ids))
        return values, ids

    def ranks(self, logits: Tensor, index: Tensor, ids: Tensor) -> Tensor:
        parts, split = _split(len(index), logits.shape[1])
        ranks = torch.empty(len(index), parts, dtype=torch.int32, device=logits.device)
        _rank_parts[(len(index), parts)](
            logits, logits.stride(0), index, ids, ranks, logits.shape[1], split,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return ranks.sum(dim=-1)

    def penalties(self, vocab_size: int, device: torch.device) -> TritonPenalties:
        return TritonPenalties(vocab_size, device)


def _split(rows: int, vocab: int) -> tuple[int, int]:
    """Number of parts of a row, and tokens of a part."""
    parts = max(1, min(_PROGRAMS // max(1, rows), cdiv(vocab, _BLOCK)))
    split = cdiv(cdiv(vocab, parts), _BLOCK) * _BLOCK
    return cdiv(vocab, split), split


class _Plan:
    """The kernel that samples each row of a table."""

    def __init__(self, rows: RowTable, vocab: int) -> None:
        top_k = rows.rows["top_k"]
        small = (top_k > 0) & (top_k <= MOST_LEADING) & rows.filtered
        self.few: NDArray[np.int64] = np.flatnonzero(small)
        self.cut: NDArray[np.int64] = np.flatnonzero(rows.filtered & ~small)
        self.num_whole = len(rows) - len(self.few) - len(self.cut)
        self.most = min(vocab, int(top_k[self.few].max(initial=0)))
        self._rows = rows

    @cached_property
    def few_there(self) -> Tensor:
        return self._rows.index(self.few)

    @cached_property
    def cut_there(self) -> Tensor:
        return self._rows.index(self.cut)


def _plan_of(rows: RowTable, vocab: int) -> _Plan:
    plan = rows.prepared.get("triton")
    if not isinstance(plan, _Plan):
        plan = rows.prepared["triton"] = _Plan(rows, vocab)
    return plan
