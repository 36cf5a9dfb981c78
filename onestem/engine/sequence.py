"""A sequence: one continuation of a request, and where its tokens stand in the cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onestem.cache import Run
from onestem.request import FinishReason, Request, RequestMetrics, TokenLogprobs

__all__ = ["RequestState", "Sequence"]


@dataclass(eq=False)
class RequestState:
    """A request in the engine and its sequences."""

    request: Request
    seed: int
    metrics: RequestMetrics
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    forked: bool = False

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)


class Sequence:
    """Tokens of one continuation.

    Attributes:
        tokens: prompt and sampled ids.
        num_prompt: how many of them are the prompt.
        score_from: log-probabilities of tokens from this index on are wanted (None: of none).
        score_only: nothing is sampled; done once the last token but one is computed (`choices`).
        scores: log-probability of each token that was scored, by its index.
        run: the deepest run of its path, which it writes; None while it is not admitted.
        order: number of admission; the newest is set back first.
    """

    __slots__ = (
        "_path",
        "_path_version",
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "grammar",
        "index",
        "logprobs",
        "num_prompt",
        "order",
        "run",
        "sampling",
        "scheduled_step",
        "score_from",
        "score_only",
        "scores",
        "state",
        "stop_reason",
        "text",
        "tokens",
    )

    def __init__(self, state: RequestState, index: int, tokens: array[int]) -> None:
        self.state = state
        self.index = index
        self.tokens = tokens
        self.num_prompt = len(tokens)
        self.score_from: int | None = None
        self.score_only = False
        self.scores: dict[int, float] = {}
        self.run: Run | None = None
        self.order = -1
        self.scheduled_step = -1
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[TokenLogprobs] = []
        self.detokenizer: Any = None
        self.grammar: Any = None
        self.sampling: Any = None
        self.text = ""
        self._path: list[Run] = []
        self._path_version = -1

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> array[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is needed before the next sample (all), or before the score is known."""
        return len(self.tokens) - 1 if self.score_only else len(self.tokens)

    @property
    def match_limit(self) -> int:
        """Most leading tokens whose KV may come from others: the last token's row is always
        computed, and so are the rows that score the tokens that follow them."""
        last = self.num_to_compute - 1
        if self.score_from is None or self._all_scored():
            return last
        return min(last, self.score_from - 1)

    def _all_scored(self) -> bool:
        """Whether a prompt's log-probabilities are known, so that its KV may come from others."""
        assert self.score_from is not None
        return not self.score_only and len(self.scores) >= self.num_prompt - self.score_from

    @property
    def frontier(self) -> int:
        """Index of the first token on its path whose KV is neither there nor scheduled."""
        node = self.run
        assert node is not None
        while node.computed == 0 and node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return node.start + node.computed

    @property
    def decoding(self) -> bool:
        """Whether one row more gives its next sample."""
        run = self.run
        if len(self.tokens) == self.num_prompt or run is None:
            return False
        if run.computed:
            return len(run.tokens) - run.computed <= 1
        return self.num_to_compute - self.frontier <= 1

    def path(self, version: int) -> list[Run]:
        """Its runs from the root's child down; `version` is the tree's count of splits."""
        if self._path_version != version:
            assert self.run is not None
            self._path = self.run.path()
            self._path_version = version
        return self._path

    def forget_path(self) -> None:
        self._path_version = -1

    def ids(self) -> np.ndarray:
        """int32 `[len(tokens)]`, a view: drop it before the sequence grows."""
        return np.frombuffer(self.tokens, dtype=np.int32)
