"""Which token sees which in a compiled prompt: the definition, and an attention plan's spans."""

from __future__ import annotations

import numpy as np

from onestem.pml.segments import CompiledPrompt

__all__ = ["computed_spans", "visible"]


def visible(compiled: CompiledPrompt) -> np.ndarray:
    """Which tokens each token sees; the definition of the three isolations.

    Cached use equals a full pass over all tokens with this mask, at `compiled.positions`.

    Returns:
        bool `[num_tokens, num_tokens]`, rows see columns; tokens in the order of the segments.
    """
    segment = compiled.segment_of
    position = compiled.positions
    index = np.arange(len(segment))
    kinds = np.array([s.kind for s in compiled.segments])[segment]
    encoded = (kinds == "cached") | (kinds == "placeholder")
    attends = np.zeros((len(compiled.segments),) * 2, dtype=bool)
    for number, one in enumerate(compiled.segments):
        attends[number, list(one.attends)] = True

    causal = index[None, :] <= index[:, None]
    itself = (segment[:, None] == segment[None, :]) & causal
    encoded_rows = attends[segment[:, None], segment[None, :]] | itself

    computed_rows = position[None, :] <= position[:, None]
    if compiled.isolation == "isolated":
        computed_rows = np.where(encoded[None, :], kinds[None, :] == "cached", computed_rows)
    return np.where(encoded[:, None], encoded_rows, computed_rows)


def computed_spans(compiled: CompiledPrompt) -> np.ndarray:
    """What the computed tokens see, as spans of an attention plan.

    Returns:
        int32 `[num_spans, 6]`: row, rows, segment, first, end, step, as in `AttentionPlan.spans`
        with segments in place of runs. Rows number the computed tokens in order.
    """
    computed = [s for s in compiled.segments if not s.is_encoded]
    rows = np.concatenate([np.arange(s.position, s.end) for s in computed])
    spans: list[tuple[int, int, int, int, int, int]] = []
    row = 0
    for number, one in enumerate(compiled.segments):
        if one.kind == "placeholder":
            continue
        if one.is_encoded:
            isolated = compiled.isolation == "isolated"
            first = 0 if isolated else int(np.searchsorted(rows, one.position))
            spans.append((first, len(rows) - first, number, 0, one.in_use, 0))
            continue
        spans.append((row, one.in_use, number, 0, 1, 1))
        row += one.in_use
        spans.append((row, len(rows) - row, number, 0, one.in_use, 0))
    shown = [span for span in spans if span[1] > 0]
    return np.array(shown, dtype=np.int32).reshape(-1, 6)
