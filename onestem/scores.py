"""Log-probabilities of given tokens: which rows have to be computed for them, each once.

A token is scored by the logits of the row before it. Items that begin alike (options of a prompt,
prompts with the same examples, texts with one header) are paths of one tree. A row that several of
them need is computed and scored by one of them, for all. Options of one token take no rows of their
own: all of them are read off the prompt's last row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onestem.checked import show
from onestem.errors import RequestError
from onestem.rawtext import RawText
from onestem.tree import num_common

EncodeBatch = Callable[[list[RawText]], list[list[int]]]
IntArray = NDArray[np.int64]
Ids = Sequence[int] | IntArray
Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True)
class Score:
    """How probable given tokens are.

    Attributes:
        logprob: natural logarithm of the probability of all of them.
        token_ids: the tokens.
        token_logprobs: of each, given those before it.
        is_greedy: whether each of them is the most probable one in its place.
    """

    logprob: float
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    is_greedy: bool

    @staticmethod
    def of(token_ids: ArrayLike, logprobs: NDArray[np.float64], greedy: NDArray[np.bool_]) -> Score:
        """The score of tokens, from their log-probabilities and whether each is the top one."""
        ids, values = np.asarray(token_ids), logprobs.tolist()
        return Score(sum(values), tuple(ids.tolist()), tuple(values), bool(greedy.all()))

    @staticmethod
    def joined(parts: Sequence[Score]) -> Score:
        """The score of several parts that follow each other."""
        return Score(
            sum(part.logprob for part in parts),
            tuple(token for part in parts for token in part.token_ids),
            tuple(value for part in parts for value in part.token_logprobs),
            all(part.is_greedy for part in parts),
        )


class ScorePath(NamedTuple):
    """Tokens that are computed after a prompt, and what rows score.

    Attributes:
        tokens: int64 `[n]`, after the prompt.
        rows: int64 `[m]`, ascending; 0 is the row of the prompt's last token, 1 that of the first
            of `tokens`, and -1 that of the prompt's last token but one.
        targets: int64 `[m]`, the token that each row scores. A row may score several.
    """

    tokens: IntArray
    rows: IntArray
    targets: IntArray


class PathScores(NamedTuple):
    """Scores of a path's targets.

    Attributes:
        logprobs: float64 `[m]`, natural logarithms.
        is_greedy: bool `[m]`, whether a target is the most probable token; of equal ones the lowest
            id is.
    """

    logprobs: NDArray[np.float64]
    is_greedy: NDArray[np.bool_]


class _Piece(NamedTuple):
    """Where some of an item's tokens are scored: targets `first` to `end` - 1 of a leaf."""

    leaf: int
    first: int
    end: int


class ScoreTree:
    """Items that are scored together.

    Args:
        items: token ids of each.
        starts: the index of each item's first token that is scored, 1 at least. Some are scored.

    Attributes:
        items: int64 `[n]` each.
        leaves: int64 `[n]` each: what has to be computed, in no order; none begins with another.
        leaf_of: of each item, the leaf that begins with its tokens but the last.
    """

    def __init__(self, items: Sequence[ArrayLike], starts: Sequence[int]) -> None:
        self.items = [np.asarray(ids, np.int64) for ids in items]
        self._starts = starts
        keys = [ids[:-1].astype(">u4").tobytes() for ids in self.items]
        self._keys: list[bytes] = []
        self.leaf_of = [0] * len(keys)
        for item in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
            # In this order a key that begins with another one comes just before it.
            if not self._keys or not self._keys[-1].startswith(keys[item]):
                self._keys.append(keys[item])
            self.leaf_of[item] = len(self._keys) - 1
        self.leaves = [np.frombuffer(key, ">u4").astype(np.int64) for key in self._keys]
        self._pieces: list[list[_Piece]] = []
        self._places: list[IntArray] = []  # by leaf: each asked target's index among distinct ones

    def paths(self, order: Iterable[int], prompt_tokens: int | None = None) -> list[ScorePath]:
        """What each leaf computes after its first `prompt_tokens` (None: all are the prompt), and
        what it scores. Leaves run in `order`: the first that computes a row scores it."""
        owners = self._owners(order)
        asked: list[list[tuple[IntArray, IntArray]]] = [[] for _ in self.leaves]
        counts = [0] * len(self.leaves)
        self._pieces = []
        for ids, start, leaf in zip(self.items, self._starts, self.leaf_of, strict=True):
            pieces = []
            for owner, first, end in _cut(owners[leaf], start - 1, len(ids) - 1):
                asked[owner].append((np.arange(first, end), ids[first + 1 : end + 1]))
                pieces.append(_Piece(owner, counts[owner], counts[owner] + end - first))
                counts[owner] += end - first
            self._pieces.append(pieces)
        self._places, paths = [], []
        for tokens, some in zip(self.leaves, asked, strict=True):
            rows, targets = map(np.concatenate, zip(*some, strict=True))
            _, first_at, places = np.unique(
                rows << 32 | targets, return_index=True, return_inverse=True
            )
            self._places.append(places)
            prompt = len(tokens) if prompt_tokens is None else prompt_tokens
            path = ScorePath(tokens[prompt:], rows[first_at] - prompt + 1, targets[first_at])
            paths.append(path)
        return paths

    def _owners(self, order: Iterable[int]) -> list[list[tuple[int, int]]]:
        """The leaves that compute the rows on each leaf's path: (first row, leaf), root first."""
        owners: list[list[tuple[int, int]]] = [[] for _ in self.leaves]
        known: list[tuple[bytes, int]] = []
        for leaf in order:
            key = (self._keys[leaf], leaf)
            at, common, above = bisect_left(known, key), 0, owners[leaf]
            for _, other in known[max(0, at - 1) : at + 1]:
                shared = num_common(self.leaves[leaf], self.leaves[other])
                if shared > common:
                    common, above = shared, owners[other]
            owners[leaf] = [*((row, who) for row, who in above if row < common), (common, leaf)]
            known.insert(at, key)
        return owners

    def take(self, values: Sequence[NDArray[Value]]) -> list[NDArray[Value]]:
        """The values of each item's tokens; `values[i]` belong to the targets of path i."""
        return [
            np.concatenate(
                [values[leaf][self._places[leaf][first:end]] for leaf, first, end in pieces]
            )
            for pieces in self._pieces
        ]

    def scores(self, of_paths: Sequence[PathScores]) -> list[Score]:
        """The score of each item."""
        logprobs = self.take([one.logprobs for one in of_paths])
        greedy = self.take([one.is_greedy for one in of_paths])
        given = [ids[start:] for ids, start in zip(self.items, self._starts, strict=True)]
        return list(map(Score.of, given, logprobs, greedy))


def completion_tree(completions: Iterable[Ids]) -> tuple[ScoreTree, list[ScorePath]]:
    """The tree and the paths of texts (token ids) that may follow one prompt; none is empty."""
    items = [[0, *ids] for ids in completions]  # the first stands for the prompt
    tree = ScoreTree(items, [1] * len(items))
    return tree, tree.paths(range(len(tree.leaves)), prompt_tokens=1)


@dataclass(frozen=True)
class ScoreTask:
    """What one request scores.

    Attributes:
        prompt: its token ids, one at least.
        completions: token ids of texts that may follow it, none of them empty.
        whole: the prompt is scored too, from its second token on; its last one is the completion.
    """

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    whole: bool = False

    @staticmethod
    def read(
        prompt: RawText | Sequence[int],
        completions: Sequence[RawText | Sequence[int]] | None,
        tokenizer: Encoder | None,
    ) -> ScoreTask:
        """The task for a prompt and its completions, or for a text that is scored whole (None).
        Raises `RequestError`."""
        if completions is not None:
            ids, given = pair_ids(prompt, completions, tokenizer)
            return ScoreTask(_listed(ids), list(map(_listed, given)))
        ids = _listed(whole_ids(prompt, tokenizer))
        return ScoreTask(ids[:-1], [ids[-1:]], whole=True)

    @cached_property
    def _tree(self) -> tuple[ScoreTree, list[ScorePath]]:
        if not self.whole:
            return completion_tree(self.completions)
        (last,) = self.completions
        tree = ScoreTree([np.concatenate((self.prompt, last))], [1])
        return tree, tree.paths((0,))

    @property
    def paths(self) -> tuple[ScorePath, ...]:
        """The request's paths."""
        return tuple(self._tree[1])

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and its completions."""
        return len(self.prompt) + sum(map(len, self.completions))

    def scores(self, of_paths: Sequence[PathScores]) -> list[Score]:
        """The score of each completion, or of the text."""
        return self._tree[0].scores(of_paths)


class Encoder(Protocol):
    """What is needed of a tokenizer. Texts that it refuses raise `RequestError`."""

    def encode_batch(
        self, texts: list[RawText], /, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, BOS included once where the model wants it."""
        ...

    @property
    def first_id(self) -> int | None:
        """The token that stands for the beginning of a text; None: there is none."""
        ...


def _listed(ids: Ids) -> list[int]:
    listed: list[int] = np.asarray(ids, np.int64).tolist()
    return listed


def pair_ids(
    prompt: RawText | Ids, completions: Sequence[RawText | Ids], tokenizer: Encoder | None
) -> tuple[Ids, list[Ids]]:
    """Token ids of a prompt and of its completions, all of them text or all of them ids."""
    if not len(completions):
        raise RequestError("completions is empty: give at least one")
    texts = [one for one in completions if isinstance(one, RawText)]
    pair: tuple[Ids, list[Ids]]
    if isinstance(prompt, RawText) and len(texts) == len(completions):
        encoder = _needed(tokenizer)
        ids, given = encode_pairs(prompt, texts, encoder.encode_batch, encoder.first_id)
        pair = ids, [*given]
    elif isinstance(prompt, RawText) or texts:
        raise RequestError("a prompt and its completions are text and ids mixed: give one of both")
    else:
        pair = prompt, [one for one in completions if not isinstance(one, RawText)]
    if not len(pair[0]):
        raise RequestError("prompt is empty: expected at least one token")
    if not all(map(len, pair[1])):
        raise RequestError("a completion is empty: expected at least one token")
    return pair


def whole_ids(text: RawText | Ids, tokenizer: Encoder | None) -> IntArray:
    """The ids of a text after the token that stands for its beginning, int64 `[n]`."""
    if isinstance(text, RawText):
        (text,) = _needed(tokenizer).encode_batch([text], add_special_tokens=False)
    ids = np.asarray(text, np.int64)
    first = None if tokenizer is None else tokenizer.first_id
    if first is not None and (not len(ids) or ids[0] != first):
        ids = np.concatenate(([first], ids))
    if len(ids) < 2:
        raise RequestError("text is empty: expected at least one token after its first")
    return ids


def _needed(tokenizer: Encoder | None) -> Encoder:
    if tokenizer is None:
        raise RequestError("text needs a tokenizer, and the model has none: give token ids")
    return tokenizer


def encode_pairs(
    prompt: RawText,
    completions: Sequence[RawText],
    encode_batch: EncodeBatch,
    first_id: int | None,
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a prompt and of texts that follow it, cut as lm-eval does. The whole is encoded
    and cut where the prompt's own ids end; spaces at the prompt's end belong to the completions.

    Args:
        first_id: what stands for a prompt without tokens; None: such a prompt stays empty.
    """
    context = prompt.text.rstrip()
    spaces = prompt.text[len(context) :]
    texts = [RawText.joined((prompt, text)) for text in completions]
    ids, *wholes = encode_batch([RawText(context, prompt.quoted), *texts])
    given = [whole[len(ids) :] for whole in wholes]
    for text, some in zip(completions, given, strict=True):
        if not some:
            raise RequestError(
                f"completion {show(spaces + text.text)} has no tokens of its own after its prompt: "
                "lengthen it, begin it with a space, or give token ids"
            )
    return ids or [one for one in (first_id,) if one is not None], given


def rolling_windows(num_tokens: int, max_len: int) -> Iterator[tuple[int, int, int]]:
    """Windows of a text as lm-eval cuts it, each of at most `max_len` computed tokens: (first,
    start, end). Tokens start..end-1 are scored, given those from `first` on. Each but the text's
    first is scored once, the last ones with as much context as fits."""
    for start in range(1, num_tokens, max_len):
        end = min(start + max_len, num_tokens)
        yield max(0, end - 1 - max_len), start, end


def _cut(owners: list[tuple[int, int]], first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Parts of rows first..end-1 by the leaf that computes them: (leaf, first row, end)."""
    until = [row for row, _ in owners[1:]] + [end]
    for (row, leaf), stop in zip(owners, until, strict=True):
        if max(row, first) < min(stop, end):
            yield leaf, max(row, first), min(stop, end)
