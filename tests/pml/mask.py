"""Which token sees which in a compiled prompt: the definition."""

from __future__ import annotations

import numpy as np

from onestem.pml import CompiledPrompt


def visible(compiled: CompiledPrompt) -> np.ndarray:
    """Which tokens each token sees; the definition of the three isolations.

    Cached use equals a full pass over all tokens with this mask, at `compiled.positions`.

    Returns:
        bool `[num_tokens, num_tokens]`, rows see columns; tokens in the order of the segments.
    """
    segment = segment_of(compiled)
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
    computed_rows &= shown_to_all(compiled)
    if compiled.isolation == "isolated":
        computed_rows = np.where(encoded[None, :], kinds[None, :] == "cached", computed_rows)
    return np.where(encoded[:, None], encoded_rows, computed_rows)


def shown_to_all(compiled: CompiledPrompt) -> np.ndarray:
    """bool `[num_tokens]`: tokens that computed ones at higher positions see."""
    shown = [np.full(one.in_use, one.kind != "placeholder") for one in compiled.segments]
    for one, part in zip(compiled.segments, shown, strict=True):
        for first, end in one.hidden:
            part[first:end] = False
    return np.concatenate(shown)


def segment_of(compiled: CompiledPrompt) -> np.ndarray:
    """int64 `[num_tokens]`: index of each token's segment."""
    counts = [segment.in_use for segment in compiled.segments]
    return np.repeat(np.arange(len(counts)), counts)
