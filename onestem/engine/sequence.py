"""Sequences, each one continuation of a request, and what a step changes of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol

import numpy as np

from onestem.cache import ModuleRun, Run, StateSlot
from onestem.engine.modules.prompt import ImportedRun, PmlPrompt, SequenceModules
from onestem.pml import DocumentsPrompt
from onestem.request import FinishReason, Request, RequestMetrics, Reuse, TokenLogprobs
from onestem.scores import PathScores, ScoreTree
from onestem.tree import PLAIN, Label, Stretch, cut

# The count of splits that a path was found at, and the path.
_NO_PATH: tuple[int, list[Run]] = (-1, [])


class SamplingTable(Protocol):
    """Where sequences that sample are known to steps (`onestem.engine.step.sequence_table`)."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence, which gets all that was committed for it."""
        ...

    def num_launched(self, sid: int) -> int:
        """Tokens of a sequence whose rows were launched."""
        ...


@dataclass(eq=False)
class RequestState:
    """A request in the engine and its sequences.

    Attributes:
        pml: its prompt if it imports modules.
        choices: the tree of its choices, of which its sequences are paths.
        most_tokens: maximum tokens of a sequence.
    """

    request: Request
    seed: int
    metrics: RequestMetrics
    pml: PmlPrompt | None = None
    choices: ScoreTree | None = None
    most_tokens: int = 2**31
    sequences: list[Sequence] = field(default_factory=list)
    forked: bool = False
    reuse: Reuse | None = None
    _num_ended: int = 0  # of the first sequences

    @property
    def own_prompt(self) -> Seq[int]:
        """Ids of the prompt that its sequences compute (or match) as their own tokens."""
        return self.pml.tokens if self.pml is not None else self.request.prompt_token_ids

    @property
    def finished(self) -> bool:
        """Whether each of its sequences has ended."""
        # Asked when each of n sequences ends, and per token of a stream: none is checked twice.
        sequences, ended = self.sequences, self._num_ended
        while ended < len(sequences) and sequences[ended].finish_reason is not None:
            ended += 1
        self._num_ended = ended
        return ended == len(sequences)

    def let_go(self) -> None:
        """Drop the sequences of a request that has ended, once its output is made. Each refers to
        its request: as a cycle they would stay until Python's collector comes, which is late."""
        self.sequences, self._num_ended = [], 0


@dataclass(slots=True, eq=False)
class Scoring:
    """Given tokens whose log-probabilities a sequence wants.

    Attributes:
        rows: int64 `[n]`, ascending: the index of the token after which each is scored.
        targets: int64 `[n]`, their ids.
        num_alternatives: number of most probable tokens wanted beside each; None: not even the
            entries of the tokens themselves.
        is_all: nothing is sampled; the sequence ends once all of these are known.
        num_known: of the first ones the results are there: `logprobs`, `is_greedy` `[n]`, as in
            `PathScores`, and `entries`, log-probabilities with those of the alternatives.
    """

    rows: np.ndarray
    targets: np.ndarray
    num_alternatives: int | None = None
    is_all: bool = False
    num_known: int = 0
    logprobs: np.ndarray = field(init=False)
    is_greedy: np.ndarray = field(init=False)
    entries: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logprobs = np.zeros(len(self.rows))
        self.is_greedy = np.zeros(len(self.rows), bool)

    @property
    def is_complete(self) -> bool:
        """Whether all are known."""
        return self.num_known == len(self.rows)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Which of its tokens rows start..end-1 score, of those that are not known."""
        first, stop = np.searchsorted(self.rows, (start, end)).tolist()
        return max(first, self.num_known), stop

    def forget(self) -> None:
        """Score all again."""
        self.num_known = 0
        self.entries.clear()

    @property
    def known(self) -> PathScores:
        """The results, all of them once `is_complete`."""
        return PathScores(self.logprobs, self.is_greedy)


@dataclass(slots=True, eq=False)
class Choosing:
    """What a question attends to, until that says which tokens of its documents are repaired.

    Attributes:
        prompt: with the documents.
        first: index of the question's first token among those that the sequence computes; sees: of
            the first one that sees documents. Rows from there on are for nothing but to choose.
        attended: float64 `[n]`, sums of weights for each of the prompt's tokens, of the question's
            rows so far.
    """

    prompt: DocumentsPrompt
    first: int
    sees: int
    attended: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.attended = np.zeros(len(self.prompt.ids))


@dataclass(slots=True, eq=False)
class AnswerSoFar:
    """What is made of a sequence's sampled tokens as they come.

    Attributes:
        text: their text, as far as `detokenizer` was given them; without one it is made at the end.
        grammar: which tokens may follow; None: any.
        logprobs: their log-probabilities, where these are wanted, and `cumulative_logprob`: the sum
            of their own.
        weights: (index among the sampled tokens, version of the weights that sample from it on).
    """

    weights: list[tuple[int, int]]
    text: str = ""
    detokenizer: Any = None
    grammar: Any = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    def note_logprobs(self, token: int, entry: TokenLogprobs) -> None:
        """Log-probabilities of a sampled token, and of others in its place."""
        self.logprobs.append(entry)
        self.cumulative_logprob += entry[token]

    def note_weights(self, first: int, version: int) -> None:
        """Note other weights from a token on."""
        self.weights = [*(one for one in self.weights if one[0] < first), (first, version)]

    def weight_versions(self, num_output: int) -> list[int]:
        """Version of the weights that each of the tokens was sampled (or scored) with."""
        ends = [*(first for first, _ in self.weights[1:]), num_output]
        versions: list[int] = []
        for (first, version), end in zip(self.weights, ends, strict=True):
            versions += [version] * (end - first)
        return versions


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Sequence:
    """Tokens of one continuation.

    Attributes:
        index: which of its request's it is.
        tokens: prompt and sampled ids; of a prompt in PML those that it computes itself.
        num_prompt: how many of them are the prompt.
        stretches: which runs its tokens may match, and their positions.
        scoring: given tokens whose log-probabilities are wanted.
        choosing: its prompt is computed to see what is to be repaired, and not for an answer yet.
        answer: what its sampled tokens give.
        run: the deepest run of its path, which it writes; None while it is not admitted.
        modules: what it imports, while it is admitted.
        state_slot: its recurrent state, while it is admitted; None: the model's layers keep none.
        order: number of admission; the newest is preempted first.
        table, sid: where it is known to steps that sample for it (-1: nowhere).
        sampling: the sampler's row, made with its first `sid`.
    """

    state: RequestState
    index: int
    tokens: array[int]
    weights_version: InitVar[int] = 0
    num_prompt: int = field(init=False)
    stretches: tuple[Stretch, ...] = field(init=False)
    scoring: Scoring | None = None
    choosing: Choosing | None = None
    answer: AnswerSoFar = field(init=False)
    run: Run | None = None
    modules: SequenceModules | None = None
    state_slot: StateSlot | None = None
    order: int = -1
    table: SamplingTable | None = None
    sid: int = -1
    sampling: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _known_path: tuple[int, list[Run]] = field(default=_NO_PATH, init=False)

    def __post_init__(self, weights_version: int) -> None:
        state = self.state
        self.num_prompt = len(self.tokens)
        self.stretches = state.pml.stretches if state.pml else stretches_of(state.request)
        self.answer = AnswerSoFar([(0, weights_version)])

    @property
    def is_job(self) -> bool:
        """Whether it runs in what interactive requests leave free."""
        return self.state.request.priority == "job"

    @property
    def score_only(self) -> bool:
        """Whether nothing is sampled."""
        return self.scoring is not None and self.scoring.is_all

    @property
    def num_output(self) -> int:
        """Tokens that it has sampled."""
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> array[int]:
        """The ids that it has sampled, a copy."""
        return self.tokens[self.num_prompt :]

    def note_weights(self, version: int) -> None:
        """Note other weights from here on. What is scored in part is scored again as a whole."""
        if self.scoring is not None and self.wants_scores:
            self.scoring.forget()
        self.answer.note_weights(0 if self.score_only else self.num_output, version)

    @property
    def last_label(self) -> Label:
        """Label of sampled tokens."""
        return self.stretches[-1].label

    @property
    def imports(self) -> tuple[ImportedRun, ...]:
        """Module runs that its tokens see."""
        return self.modules.seen if self.modules is not None else ()

    def positions(self, first: int, end: int) -> np.ndarray:
        """int64 `[end - first]`: position ids of tokens first..end-1."""
        parts = cut(self.stretches, end, first)
        return np.concatenate([label.positions(a, b) for a, b, label in parts])

    @property
    def num_stretches(self) -> int:
        """The fewest runs that its path can have."""
        return sum(stretch.start < len(self.tokens) for stretch in self.stretches)

    @property
    def match_limit(self) -> int:
        """Maximum leading tokens whose KV may come from others: the last token's row is always
        computed, and so are rows that score or choose."""
        last, scoring = len(self.tokens) - 1, self.scoring
        if self.choosing is not None:
            return min(last, self.choosing.first)
        if scoring is None or scoring.is_complete:
            return last
        return min(last, int(scoring.rows[scoring.num_known]))

    @property
    def wants_scores(self) -> bool:
        """Whether tokens' log-probabilities are still wanted: their rows must be computed."""
        return self.scoring is not None and not self.scoring.is_complete

    @property
    def frontier(self) -> int:
        """Index of the first token on its path whose KV is neither there nor scheduled, or that is
        not in its state."""
        if self.state_slot is not None:
            return self.state_slot.at
        node = self.run
        assert node is not None
        while node.computed == 0 and node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return node.start + node.computed

    @property
    def num_launched(self) -> int:
        """Of one that decodes: its tokens whose rows were launched."""
        if self.table is None:
            return len(self.tokens) - 1
        return self.table.num_launched(self.sid)

    @property
    def next_place(self) -> int:
        """Of one that decodes: where its next token goes in the pages of the run it writes."""
        run = self.run
        assert run is not None
        return run.offset + self.num_launched - run.start

    @property
    def num_left(self) -> int:
        """Tokens that it may still sample."""
        room = self.state.most_tokens - len(self.tokens)
        most = self.state.request.params.max_tokens
        return room if most is None else min(room, most - self.num_output)

    @property
    def known_left(self) -> int | None:
        """Tokens that it will still store, if nothing can end it sooner; else None."""
        if self.state.request.params.may_end_early:
            return None
        return max(0, self.num_left - (self.num_launched - (len(self.tokens) - 1)))

    @property
    def num_forks(self) -> int:
        """Sequences that will fork from it at its prompt's end."""
        state = self.state
        waits = state.forked or self.score_only or self.choosing is not None
        return 0 if waits else state.request.params.n - 1

    def extend(self, token_ids: Seq[int], entries: Iterable[TokenLogprobs] = ()) -> None:
        """Take sampled tokens, with their log-probabilities where they are wanted. All but the last
        have keys and values, in the run that the sequence alone writes."""
        run = self.run
        if not token_ids:
            return
        assert run is not None
        self.tokens.extend(token_ids)
        run.tokens.extend(token_ids)
        run.computed = len(run.tokens) - 1
        self.state.metrics.num_output_tokens += len(token_ids)
        for token, entry in zip(token_ids, entries, strict=False):
            self.answer.note_logprobs(token, entry)

    def leave_table(self) -> None:
        """Leave the table: no step samples for it any more. It has all that was committed."""
        if self.table is not None:
            self.table.release(self)

    def path(self, version: int) -> list[Run]:
        """Its runs from the root's child down; `version` is the tree's count of splits."""
        if self._known_path[0] != version:
            assert self.run is not None
            self._known_path = version, self.run.path()
        return self._known_path[1]

    def forget_path(self) -> None:
        """Look for its runs again when its path is asked for next."""
        self._known_path = _NO_PATH

    def stand_alone(self) -> None:
        """Share no common prefix from here on: one run takes fewer pages than two."""
        if self.state.pml is None:
            self.stretches = (Stretch(0, self.last_label),)

    def begin_again(self, prompt: PmlPrompt) -> None:
        """Have another prompt, before there are sampled tokens; it is not admitted."""
        self.tokens, self.stretches = prompt.tokens[:], prompt.stretches
        self.num_prompt = len(self.tokens)
        self.choosing = None

    def ids(self) -> np.ndarray:
        """int32 `[len(tokens)]`, a view: drop it before the sequence grows."""
        return np.frombuffer(self.tokens, dtype=np.int32)


def stretches_of(request: Request) -> tuple[Stretch, ...]:
    """A salted prompt that begins with a prefix meant for all begins in the common space; one that
    shares only with its group, in the group's."""
    if request.group_only:
        salt, prefix = request.cache_salt, request.group_prefix_tokens
        own = Stretch(prefix, Label((salt, "request", request.request_id)))
        return (Stretch(0, Label((salt, "group", request.group))), own) if prefix else (own,)
    if not request.cache_salt:
        return PLAIN
    own = Stretch(request.common_prefix_tokens, Label(request.cache_salt))
    return (*PLAIN, own) if own.start else (own,)


@dataclass(slots=True, eq=False)
class StateRun:
    """What a chunk's rows do to the sequence's state, which is in slot `target` after them.

    Attributes:
        source: slot of the state before them; -1: zeros.
        again: how many of them, the first ones, have keys and values already.
        copies: slots that the state is copied to, after the step's rows.
        runs: whose snapshots some of these are.
    """

    source: int
    target: int
    again: int
    copies: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start..end-1 of a sequence, or of a module that it imports, as rows of this step.
    A module's see the runs that it `attends` to, each with the positions by which it is shifted.
    `samples`: sequences that sample after them."""

    sequence: Sequence
    start: int
    end: int
    module: ModuleRun | None = None
    attends: Seq[tuple[ModuleRun, int]] = ()
    samples: Seq[Sequence] = ()
    state: StateRun | None = None

    @property
    def fresh(self) -> int:
        """Its first token that has no keys and values before it."""
        return self.start if self.state is None else self.start + self.state.again

    @property
    def num_prompt_rows(self) -> int:
        """Rows of the prompt and of modules: the others compute sampled tokens again."""
        if self.module is not None:
            return self.end - self.start
        return max(0, min(self.end, self.sequence.num_prompt) - self.start)

    @property
    def module_path(self) -> list[ModuleRun]:
        """What a module attends to, then the module."""
        return [] if self.module is None else [*(run for run, _ in self.attends), self.module]


@dataclass(eq=False)
class StepChanges:
    """How the next step differs from the one before it. All other rows decode one token more,
    except those of sequences that have ended, were preempted, or sample no more.

    Attributes:
        leave: jobs that pause.
        enter: sequences that decode from this step on.
        chunks: of prompts, rows of this step alone.
        unfit: sequences that do not fit in KV memory alone, and why; they have left.
        decodes: rows of interactive requests that decode.
        jobs: rows of jobs, those of prompts too.
    """

    leave: list[Sequence] = field(default_factory=list)
    enter: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    unfit: list[tuple[Sequence, str]] = field(default_factory=list)
    decodes: int = 0
    jobs: int = 0

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts."""
        return sum(chunk.end - chunk.start for chunk in self.chunks if chunk.num_prompt_rows > 0)

    @property
    def has_interactive_prompts(self) -> bool:
        """Whether an interactive request computes a part of its prompt."""
        return any(chunk.num_prompt_rows and not chunk.sequence.is_job for chunk in self.chunks)


@dataclass(slots=True, eq=False)
class ScoreSpan:
    """Tokens first..end-1 of a sequence's `Scoring` are scored in a step. `at`: int64 `[n]`, by
    which of the step's rows that score."""

    sequence: Sequence
    first: int
    end: int
    at: np.ndarray

    @property
    def targets(self) -> np.ndarray:
        """int64 `[n]`: ids of the tokens."""
        assert self.sequence.scoring is not None
        return self.sequence.scoring.targets[self.first : self.end]
