"""Names of pieces: those that a chain takes from another are those that it would make."""

from __future__ import annotations

import numpy as np

from onestem.cache.pieces import Chain, Piece, PieceIndex, piece_ends
from onestem.tree import Label, Stretch


def test_digests_of_a_common_beginning_are_taken():
    rng = np.random.default_rng(0)
    labels = [(Stretch(0, Label()), Stretch(30, Label("own"))), (Stretch(0, Label("salt")),)]
    chain = None
    for _ in range(300):
        tokens = rng.integers(0, 9, 90).astype(np.int32)
        stretches = labels[rng.integers(2)]
        if chain is not None:  # it goes on otherwise, from somewhere
            same = rng.integers(len(chain.tokens) + 1)
            tokens[:same] = chain.tokens[:same]
        tokens = tokens[: rng.integers(40, 91)]
        chain, alone = Chain("root", tokens, stretches, chain), Chain("root", tokens, stretches)
        for end in rng.integers(0, len(tokens) + 1, 5).tolist():
            assert chain.key(end) == alone.key(end)
            assert chain.parent(end) == alone.parent(end)


def test_what_reaches_furthest_is_found():
    """Of two that reach the end, the one that begins last; else the one that reaches further."""
    chain = Chain("root", np.arange(1500, dtype=np.int32), (Stretch(0, Label()),))
    index = PieceIndex(lambda piece: None)
    pieces = [chain.piece(a, b) for a, b in piece_ends(0, 1500)]
    for piece in pieces:
        index.add(piece, np.zeros(0, np.int32))
    assert [one.piece for one in index.find(chain, [0], 1500)] == pieces
    assert [one.piece for one in index.find(chain, [0, 1024], 1500)] == pieces[2:]
    index.discard(pieces[2])
    assert [one.piece for one in index.find(chain, [0, 1024], 1500)] == pieces[:2]
    assert Piece.from_name(pieces[0].name) == pieces[0]
