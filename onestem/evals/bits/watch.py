"""What an engine computes, as digests of rows: of logits, and of each layer's operations. An engine
that is watched is so until it is closed."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from onestem.engine.engine import Engine
from onestem.engine.sequence import StepChanges
from onestem.engine.step.batch_rows import BatchRows
from onestem.engine.step.runner import Logits, Runner
from onestem.ops.rounding import BothRows

Rows = dict[tuple[str, int], dict[int, bytes]]
"""(id of a request, which of its answers) -> index of a token -> digest of its logits."""

Operations = dict[tuple[int, str], dict[int, set[bytes]]]
"""(place in a step, name) -> index of a token -> digests of its row, which should be one."""


def _digests(rows: Tensor) -> list[bytes]:
    array = rows.flatten(1).contiguous().view(torch.uint8).cpu().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in array]


def watch_logits(engine: Engine) -> Rows:
    """What each token of an answer is sampled from, from now on."""
    found: Rows = defaultdict(dict)
    plain = engine.launcher.sample

    def sample(batch_rows: BatchRows, changes: StepChanges, logits: Logits) -> None:
        table, sids = batch_rows.table, batch_rows.sampled
        at = (table.computed - table.num_prompt)[sids].tolist()
        places = iter(zip(map(table.sequences.__getitem__, sids.tolist()), at, strict=True))

        def seen(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
            for block in blocks:
                for digest, (one, index) in zip(_digests(block), places, strict=False):
                    if one is not None:
                        found[one.state.request.request_id, one.index][index] = digest
                yield block

        plain(batch_rows, changes, replace(logits, samples=seen(logits.samples)))

    vars(engine.launcher)["sample"] = sample
    return found


def watch_operations(engine: Engine, tokens: list[int]) -> Operations:
    """Rows of these tokens, in whatever sequence begins with them, from now on. Steps are launched
    call by call, one at a time. The engine must hold the whole model, and prompts no modules.
    """
    found: Operations = {}
    decoder, runner = engine.weights.decoder, engine.launcher.runner
    forward, normed = decoder.forward, decoder.normed
    keys: list[int] = []  # index of each row's token; -1: of others
    place = layer = norms = 0  # `norms`: since the layer's attention, or its delta rule
    mixer = ""  # which of both

    def note(name: str, rows: Any) -> None:
        nonlocal place
        at = [row for row, key in enumerate(keys) if key >= 0]
        digests = found.setdefault((place, f"layer {layer}: {name}"), defaultdict(set))
        for row, digest in zip(at, _digests(rows[at]), strict=True):
            digests[keys[row]].add(digest)
        place += 1

    def watched_forward(
        ids: Tensor,
        positions: Tensor,
        attend: Any,
        read: Any = None,
        states: Any = None,
        *last: int,
    ) -> Any:
        nonlocal place, layer, norms
        keys[:], place, layer, norms = _keys(engine, tokens), 0, 0, 2

        def begin(index: int, name: str) -> None:
            nonlocal layer, norms, mixer
            layer, norms, mixer = index, 0, name

        def end(index: int) -> None:
            if read is not None and index == len(decoder.layers) - 1:  # others end here
                keys[:] = [keys[row] if row < len(keys) else -1 for row in read.tolist()]

        def watched_attend(index: int, qkv: Tensor, *rest: Any) -> Tensor:
            begin(index, "attention")
            note("product of queries, keys and values", qkv)
            out: Tensor = attend(index, qkv, *rest)
            note("attention", out)
            end(index)
            return out

        def watched_states(index: int) -> Any:
            begin(index, "the delta rule")
            end(index)
            return states(index)

        return forward(ids, positions, watched_attend, read, states and watched_states, *last)

    def watched_normed(hidden: Tensor, delta: Tensor | None, *rest: Any, **more: Any) -> Any:
        nonlocal layer, norms
        if delta is not None:
            note("MLP" if norms else f"product after {mixer}", delta)
        elif not place:
            note("embedding", hidden)
        layer, norms = layer + (norms == 1), norms + 1
        out = normed(hidden, delta, *rest, **more)
        plain = out.plain if isinstance(out, BothRows) else out
        if isinstance(plain, Tensor):
            note("norm", plain)
        return out

    vars(decoder).update(forward=watched_forward, normed=watched_normed)
    plain = {name: MethodType(vars(Runner)[name], runner) for name in ("prepare", "hidden")}
    vars(runner).update(plain, depth=1)
    return found


def _keys(engine: Engine, tokens: list[int]) -> list[int]:
    """Of each row of a step which of `tokens` it is; -1: it has others before it."""
    batch_rows, inputs = engine.batch_rows, engine.batch_rows.inputs
    found = [-1] * len(inputs.positions)

    def alike(other: Iterable[int]) -> int:
        pairs = zip(tokens, other, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    for row, sid in enumerate(batch_rows.rows.sid.tolist()):
        batch_rows.table.flush(sid)
        sequence, at = batch_rows.table.sequences[sid], int(inputs.positions[row])
        found[row] = at if sequence is not None and at < alike(sequence.tokens) else -1
    row_of = {slot: row for row, slot in enumerate(inputs.slots.tolist())}
    for chunk in batch_rows.chunks:
        known = min(chunk.end, alike(chunk.sequence.tokens))
        new = chunk.start + (chunk.state.again if chunk.state else 0)  # others write nowhere
        for run in chunk.sequence.path(engine.cache.tree.num_splits):
            first, end = max(run.start, new), min(run.end, known)
            if first < end:
                slots = run.slots(first - run.start, end - run.start).tolist()
                for at, slot in enumerate(slots, first):
                    found[row_of[slot]] = at
    return found


def first_change(ours: Operations, others: Operations) -> tuple[str, int] | None:
    """The first operation that gives other bits, and the first token for which it does; None: those
    of all rows that both have are equal."""
    for key, mine in sorted(ours.items()):
        theirs = others.get(key, {})
        if changed := [at for at in mine.keys() & theirs if len(mine[at] | theirs[at]) > 1]:
            return key[1], min(changed)
    return None
