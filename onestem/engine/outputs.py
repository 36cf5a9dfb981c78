"""Results of a request's sequences, as its user sees them."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, fields

import numpy as np

from onestem.engine.sequence import RequestState, Sequence
from onestem.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from onestem.scores import PathScores

log = logging.getLogger(__name__)


def broken(error: BaseException) -> str:
    """The `stop_reason` of an answer that an error of the engine has cost."""
    return f"the engine failed at this answer: {type(error).__name__}: {error}"


def request_output(state: RequestState) -> RequestOutput:
    """The request's answers as they stand; an error if they cannot be put together."""
    try:
        return _output(state)
    except Exception as error:
        log.error("request %s: no output", state.request.request_id, exc_info=error)
        return refused_output(state.request, broken(error))


def _output(state: RequestState) -> RequestOutput:
    request = state.request
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=_completions(state),
        finished=state.finished,
        prompt_logprobs=_prompt_logprobs(state),
        scores=_path_scores(state),
        metrics=metrics_of(state),
        reuse=state.reuse,
    )


def metrics_of(state: RequestState) -> RequestMetrics:
    """What a request has cost so far. Copied in a tenth of the time of `dataclasses.replace`: each
    token of a stream may have an output."""
    metrics = state.metrics
    metrics.num_cached_tokens = max(0, metrics.num_prompt_tokens - metrics.num_computed_tokens)
    copied = object.__new__(RequestMetrics)
    copied.__dict__.update(metrics.__dict__)
    # What is copied back after a preemption was computed before, or is no prompt's.
    copied.num_disk_tokens = min(metrics.num_disk_tokens, metrics.num_cached_tokens)
    in_memory = metrics.num_cached_tokens - copied.num_disk_tokens
    copied.num_host_tokens = min(metrics.num_host_tokens, in_memory)
    return copied


def refused_output(request: Request, reason: str) -> RequestOutput:
    """A request that can never be answered."""
    return unbegun_output(request, "error", reason)


def unbegun_output(
    request: Request, finish: FinishReason, reason: str | None = None
) -> RequestOutput:
    """A request that ended before anything was computed for it."""
    outputs = [
        CompletionOutput(index=i, text="", token_ids=[], finish_reason=finish, stop_reason=reason)
        for i in range(request.params.n)
    ]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=outputs,
        finished=True,
        metrics=RequestMetrics(num_prompt_tokens=len(request.prompt_token_ids)),
    )


def _completions(state: RequestState) -> list[CompletionOutput]:
    if state.request.params.choices:
        return [_best_choice(state)]
    if len(state.sequences) == 1:
        return [_completion(state.sequences[0])]
    return [_completion(s) for s in sorted(state.sequences, key=lambda s: s.index)]


def _completion(sequence: Sequence) -> CompletionOutput:
    answer, asked = sequence.answer, sequence.state.request.params.logprobs is not None
    return CompletionOutput(
        index=sequence.index,
        text=answer.text,
        token_ids=sequence.output_ids.tolist(),
        cumulative_logprob=answer.cumulative_logprob if asked else None,
        logprobs=list(answer.logprobs) if asked else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        weight_versions=answer.weight_versions(sequence.num_output),
    )


def _best_choice(state: RequestState) -> CompletionOutput:
    """The choice whose tokens are most probable together; the first of equals."""
    params = state.request.params
    failed = [s for s in state.sequences if s.finish_reason != "stop"]
    if failed:
        worst = max(failed, key=lambda s: s.finish_reason == "error")
        return CompletionOutput(
            index=0,
            text="",
            token_ids=[],
            finish_reason=worst.finish_reason,
            stop_reason=worst.stop_reason,
        )
    pairs = [(s.scoring, s.answer.weights[-1]) for s in state.sequences if s.scoring is not None]
    tree, scorings = state.choices, [scoring for scoring, _ in pairs]
    assert params.choices is not None
    assert tree is not None
    scores = tree.scores([scoring.known for scoring in scorings])
    best = max(range(len(scores)), key=lambda i: scores[i].logprob)
    versions = [np.full(len(scoring.rows), version) for scoring, (_, version) in pairs]
    entries: list[TokenLogprobs] | None = None
    if params.logprobs is not None:
        entries = tree.take([np.array(s.entries, object) for s in scorings])[best].tolist()
    return CompletionOutput(
        index=0,
        text=params.choices[best],
        token_ids=list(scores[best].token_ids),
        cumulative_logprob=scores[best].logprob,
        logprobs=entries,
        finish_reason="stop",
        choice=best,
        weight_versions=tree.take(versions)[best].tolist(),
    )


def _prompt_logprobs(state: RequestState) -> list[TokenLogprobs | None] | None:
    request = state.request
    if request.params.prompt_logprobs is None and request.score_from is None:
        return None
    scoring = state.sequences[0].scoring
    assert scoring is not None
    unscored = len(request.prompt_token_ids) - len(scoring.rows)  # the first ones
    known: list[TokenLogprobs | None] = [None] * unscored
    known += scoring.entries
    return known + [None] * (len(request.prompt_token_ids) - len(known))


def _path_scores(state: RequestState) -> list[PathScores] | None:
    if not state.request.paths:
        return None
    scorings = [s.scoring for s in state.sequences if s.scoring is not None]
    complete = scorings and all(s.is_complete for s in scorings)
    return [s.known for s in scorings] if complete else None


@dataclass
class EngineStats:
    """Counts since the engine was made (or `reset_stats`).

    `logical_prompt_tokens` counts each sequence's prompt, `processed_prompt_tokens` the prompt rows
    computed (also those computed again after a preemption). `shared_read_tokens` counts the keys,
    over all steps, that sequences saw and did not read, since one read of a run served several.
    `peak_kv_tokens` is the maximum KV memory in use by running requests, in tokens. Times are in
    seconds.
    """

    requests: int = 0
    steps: int = 0
    logical_prompt_tokens: int = 0
    processed_prompt_tokens: int = 0
    output_tokens: int = 0
    shared_read_tokens: int = 0
    num_preempted: int = 0
    peak_kv_tokens: int = 0
    host_seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0

    @property
    def saving(self) -> float:
        """BatchLLM, eq. 1."""
        if self.logical_prompt_tokens == 0:
            return 0.0
        return 1 - self.processed_prompt_tokens / self.logical_prompt_tokens

    def reset(self) -> None:
        """Count from 0 again."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def to_dict(self) -> dict[str, float]:
        """The counts and the saving, by name."""
        return {**asdict(self), "saving": self.saving}
