"""What the engine process reports of its requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onestem.engine.outputs import metrics_of, request_output
from onestem.engine.sequence import RequestState, Sequence
from onestem.request import CompletionOutput, RequestOutput, Told
from onestem.server.link.messages import Delta, Tokens


@dataclass(slots=True)
class _Single:
    """A request of one sequence, whose news are mostly plain: the sequence, the request's number,
    and what was sent."""

    sequence: Sequence
    number: int
    sent: Told


class Deltas:
    """Remembers what was sent of the requests that are being answered."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._single: dict[str, _Single] = {}
        self._sent: dict[str, dict[int, Told]] = {}

    def __len__(self) -> int:
        """Number of requests that are being answered."""
        return len(self._sent)

    def begin(self, request_id: str, number: int) -> None:
        """Report what comes of a request from now on; `number`: see `Add`."""
        self._numbers[request_id], self._sent[request_id] = number, {}

    def forget(self, request_id: str) -> None:
        """Report nothing more of a request; an unknown one is ignored."""
        self._numbers.pop(request_id, None)
        self._single.pop(request_id, None)
        self._sent.pop(request_id, None)

    def of(
        self,
        outputs: Iterable[RequestOutput],
        going_on: Iterable[RequestState] = (),
        weights_version: int = 0,
    ) -> tuple[Tokens, list[Delta]]:
        """What is new in requests: in `outputs`, and in others that stream and go on.
        `weights_version`: of the weights that the model has now."""
        tokens = Tokens(weights_version)
        deltas: list[Delta] = []
        unusual = self._note_tokens(going_on, tokens, deltas)
        for output in [*outputs, *map(request_output, unusual)]:
            if output.request_id not in self._sent:
                continue  # it was forgotten: it has no listener
            pieces = self._pieces(output, tokens)
            if output.finished:
                deltas.append(last_delta(output, pieces))
                self.forget(output.request_id)
            elif pieces:
                deltas.append(Delta(output.request_id, pieces))
        return tokens, deltas

    def _note_tokens(
        self, going_on: Iterable[RequestState], tokens: Tokens, deltas: list[Delta]
    ) -> list[RequestState]:
        """Note news that is one token with its text, of requests of one sequence; returns the other
        requests. Most news is like that, so no output is made for it. The first of a request's has
        what the prompt has cost beside it."""
        unusual: list[RequestState] = []
        numbers: list[int] = []
        ids: list[int] = []
        for state in going_on:
            one = self._single.get(state.request.request_id)
            if one is None:
                one = self._begin_single(state)
                if one is None:
                    unusual.append(state)
                    continue
                deltas.append(Delta(state.request.request_id, [], metrics=metrics_of(state)))
            sequence, answer, sent = one.sequence, one.sequence.answer, one.sent
            first, version = answer.weights[-1]
            count = len(sequence.tokens) - sequence.num_prompt
            is_new = count > first and version == tokens.weights_version
            if count != sent.tokens + 1 or not is_new:
                unusual.append(state)
                continue
            numbers.append(one.number)
            ids.append(sequence.tokens[-1])
            tokens.texts.append(answer.text[sent.text :])
            sent.tokens, sent.text = sent.tokens + 1, len(answer.text)
        tokens.requests.extend(numbers)
        tokens.indices.extend([0] * len(numbers))
        tokens.token_ids.extend(ids)
        return unusual

    def _begin_single(self, state: RequestState) -> _Single | None:
        """Note a request of one sequence; None if it has several, or is not answered here."""
        request_id = state.request.request_id
        if request_id not in self._sent or not _is_single(state):
            return None
        sent = self._sent[request_id].setdefault(0, Told())
        one = _Single(state.sequences[0], self._numbers[request_id], sent)
        self._single[request_id] = one
        return one

    def _pieces(self, output: RequestOutput, tokens: Tokens) -> list[CompletionOutput]:
        """Note plain news in `tokens`; returns the rest."""
        pieces = []
        sent = self._sent[output.request_id]
        for sequence in output.outputs:
            before = sent.get(sequence.index)
            if before is None:
                before = sent[sequence.index] = Told()
            if _is_plain(sequence, before, tokens.weights_version):
                tokens.requests.append(self._numbers[output.request_id])
                tokens.indices.append(sequence.index)
                tokens.token_ids.append(sequence.token_ids[-1])
                tokens.texts.append(sequence.text[before.text :])
                before.tokens, before.text = before.tokens + 1, len(sequence.text)
            elif (piece := before.news(sequence)) is not None:
                pieces.append(piece)
        return pieces


def _is_single(state: RequestState) -> bool:
    params = state.request.params
    return len(state.sequences) == 1 == params.n and params.logprobs is None and not params.choices


def _is_plain(sequence: CompletionOutput, sent: Told, weights_version: int) -> bool:
    """Whether its news is a token with nothing but a text."""
    return (
        sequence.finish_reason is None
        and sequence.logprobs is None
        and len(sequence.token_ids) == sent.tokens + 1
        and sequence.weight_versions[-1:] == [weights_version]
    )


def last_delta(output: RequestOutput, pieces: list[CompletionOutput]) -> Delta:
    """The end of a request, with what it cost and reused."""
    return Delta(
        output.request_id,
        pieces,
        finished=True,
        metrics=output.metrics,
        prompt_logprobs=output.prompt_logprobs,
        scores=output.scores,
        reuse=output.reuse,
    )
