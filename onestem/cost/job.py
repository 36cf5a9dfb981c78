"""A planned job's seconds, rows and KV memory, from its tokens and the rates of a device.

    seconds = sum over steps of    linear(rows) + attention + sampling(rows that sample) + host

Tokens give the rows. Each prompt is computed once, without what an earlier one has; each answer
decodes a row a step after its first token. Which steps these are needs two assumptions: a request
starts, in planned order, when KV memory has room for what a request holds on average
(`_prompt_times`), and prompts have the rows of a step that decodes leave. Preemptions, and what
they compute again, are not predicted.

Attention is what is read: the run of a prefix once in each step while a request below it decodes,
each sequence's own run once for each of its rows, and the prompts' chunks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

import numpy as np

from onestem.cost.step import FIRST_MERGED, UNMERGED, StepCost
from onestem.cost.work import FloatArray, IntArray, Limits, Work

LOOKAHEAD_TOKENS = 32  # decodes that the scheduler keeps free for each sequence
ROUNDING = 1e-6  # of a sum of parts of steps
MOST_PARTS = 10_000  # in which a job's steps are priced; in longer jobs a part is several steps


@dataclass
class Forecast:
    """The totals of a job.

    Attributes:
        seconds: of all steps.
        linear_seconds, attention_seconds, sampling_seconds, host_seconds: their parts; they add up
            to more if the host works while the device does.
        steps: launches of the model. rows: prompt tokens and decodes that they compute.
        computed_prompt_tokens: prompt tokens among the rows.
        peak_kv_tokens: maximum tokens in KV memory.
    """

    seconds: float = 0.0
    linear_seconds: float = 0.0
    attention_seconds: float = 0.0
    sampling_seconds: float = 0.0
    host_seconds: float = 0.0
    steps: int = 0
    rows: int = 0
    computed_prompt_tokens: int = 0
    peak_kv_tokens: int = 0


def forecast(cost: StepCost, work: Work, limits: Limits) -> Forecast:
    """What a job takes; 100,000 requests take a second."""
    if not len(work.outputs):
        return Forecast()
    shape, rates, answers = cost.shape, cost.rates, work.answers
    prompts = work.own() + work.opened()
    begun, done, first = _prompt_times(work, prompts, limits)
    last = first + work.outputs - 1
    num_steps = int(last.max())
    times = np.linspace(0, num_steps, min(num_steps, MOST_PARTS) + 1)
    steps = np.diff(times)  # of each part
    decodes = _while(times, first, last, answers)
    computed = np.cumsum(prompts)
    ends = np.stack((computed - prompts, computed), axis=1).ravel()
    tokens = np.diff(np.interp(times, np.stack((begun, done), axis=1).ravel(), ends))
    # Shares of the job's prompt tokens and decodes that each part has.
    prompts_share, decodes_share = tokens / computed[-1], decodes / max(1.0, decodes.sum())

    linear = _each(cost.linear, (decodes + shape.prompt_share * tokens) / steps)
    sampling = _each(cost.sampling, (decodes + answers.sum() * prompts_share) / steps)
    host = cost.host(decodes / steps, tokens / steps, len(prompts) * prompts_share / steps)
    attention = prompts_share * _chunk_seconds(cost, work, prompts, limits.step_tokens)
    attention += decodes_share * _decode_seconds(cost, work, first, last)
    attention = attention / steps + shape.num_layers * rates.call_seconds
    device = linear + attention + sampling
    seconds = np.maximum(device, host) if rates.overlaps else device + host

    since = begun.astype(np.int64)  # a step's prompts are held for all of it
    held = _while(times, since, last, work.own() + work.slack(limits.page_size))
    held += _while(times, *_spans(work, since, last), work.tree.edge)
    sampled = np.cumsum(decodes) - _until(times, last, answers * (work.outputs - 1))[:-1]
    return Forecast(
        seconds=float((steps * seconds).sum()),
        linear_seconds=float((steps * linear).sum()),
        attention_seconds=float((steps * attention).sum()),
        sampling_seconds=float((steps * sampling).sum()),
        host_seconds=float((steps * host).sum()),
        steps=num_steps,
        rows=int(computed[-1] + (answers * (work.outputs - 1)).sum()),
        computed_prompt_tokens=int(computed[-1]),
        peak_kv_tokens=int(min(limits.kv_tokens, (held / steps + sampled).max())),
    )


def _prompt_times(
    work: Work, prompts: IntArray, limits: Limits
) -> tuple[FloatArray, FloatArray, IntArray]:
    """When each request's prompt is begun and when it is computed, in steps, and the step that
    ends with its first token.

    A request takes memory for its prompt's new tokens, for its answers at half their length, and
    for the decodes that are kept free. It begins when that fits beside those that run.

    Args:
        prompts: `[num_requests]` prompt tokens that each request computes.
    """
    answers, outputs = work.answers, work.outputs
    kept_free = np.minimum(outputs, LOOKAHEAD_TOKENS)
    needs = prompts + work.slack(limits.page_size) + answers * (outputs / 2 + kept_free)
    room = limits.kv_tokens - float((work.tree.lengths - work.own()).mean())
    size, most = limits.step_tokens, limits.num_seqs or inf
    ends: list[tuple[float, float, float]] = []  # (step, need, answers) of those that run: a heap
    begun, done, first = array("d"), array("d"), array("q")
    at = held = rows = 0.0
    columns = (array("d", each.astype(np.float64)) for each in (prompts, needs, answers, outputs))
    for tokens, need, count, output in zip(*columns, strict=True):
        while ends and (ends[0][0] <= at or held + need > room or rows + count > most):
            end, freed, left = heappop(ends)
            at, held, rows = max(at, end), held - freed, rows - left
        begun.append(at)
        at += tokens / max(size - rows, size / 2)
        done.append(at)
        first.append(max(1, ceil(at - ROUNDING)))
        heappush(ends, (first[-1] + output - 1, need, count))
        held, rows = held + need, rows + count
    return np.array(begun), np.array(done), np.array(first)


def _chunk_seconds(cost: StepCost, work: Work, prompts: IntArray, step_tokens: int) -> float:
    """Seconds of attention of all prompts. What is computed already is walked once for all chunks
    of a step below one node."""
    tree, seen, walk, seconds = work.tree, cost.shape.seen, cost.walk, 0.0
    together = np.minimum(tree.at_home(work.own())[tree.home], step_tokens)
    columns = (array("q", each) for each in (prompts, tree.lengths - prompts, tree.home, together))
    for tokens, context, home, beside in zip(*columns, strict=True):
        rows = min(tokens, step_tokens)
        # A chunk's row has half of the chunk below what is computed already, on average.
        above = seen(context, tokens / 2)
        before = above / rows * walk(rows)
        if home > 0 and cost.shared:
            before = min(before, above / beside * walk(beside) + cost.passes(FIRST_MERGED))
        own = seen(tokens / 2) / rows * walk(rows) + cost.passes(UNMERGED)
        seconds += tokens * (before + own)
    return seconds


def _decode_seconds(cost: StepCost, work: Work, first: IntArray, last: IntArray) -> float:
    """Seconds of attention of all decodes: each sequence's own run, and those of prefixes."""
    tree, steps, seconds = work.tree, last - first, 0.0
    columns = (array("q", each) for each in (work.answers, work.own(), steps, work.outputs))
    for count, own, decoded, output in zip(*columns, strict=True):
        runs, alone = ([(own, count)], output / 2) if count > 1 else ([], own + output / 2)
        seconds += decoded * cost.attention(runs, alone, count)
    begun, ended = _spans(work, first, last)
    rows = tree.below(tree.at_home(work.answers * steps))
    walks = np.minimum(rows, np.maximum(1, ended - begun))
    # A row has as many tokens below a node's run as the mean of the node's rows.
    twice = tree.below(tree.at_home(work.answers * (2 * tree.lengths + work.outputs)))
    below = twice / 2 / np.maximum(1, tree.below(tree.at_home(work.answers))) - tree.depth
    for node in np.flatnonzero(rows[1:]) + 1:
        run = cost.run(
            float(tree.edge[node]), rows[node] / walks[node],
            first=tree.parent[node] == 0, below=below[node],
        )  # fmt: skip
        seconds += float(walks[node]) * run
    return seconds


def _spans(work: Work, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """`[num_nodes]` when the first request of each node begins, and when its last one ends."""
    begun, ended = work.tree.smallest(first), -work.tree.smallest(-last)
    return np.minimum(begun, ended), ended


def _each(function: Callable[[float], float], values: FloatArray) -> FloatArray:
    return np.array([function(value) for value in values.tolist()])


def _until(times: FloatArray, events: IntArray, weights: IntArray) -> FloatArray:
    """`[num_times]` sum of the weights of events until each time."""
    order = np.argsort(events)
    sums: FloatArray = np.concatenate(([0], np.cumsum(weights[order]))).astype(np.float64)
    return sums[np.searchsorted(events[order], times, side="right")]


def _while(times: FloatArray, begun: IntArray, ended: IntArray, weights: IntArray) -> FloatArray:
    """`[num_times - 1]` integral, between two times each, of the weights that are present."""

    def since(events: IntArray) -> FloatArray:
        return _until(times, events, weights) * times - _until(times, events, weights * events)

    return np.diff(since(begun) - since(ended))
