"""What the engine process reports of its requests (`Deltas`) and its memory (`snapshot_of`)."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onestem.cache import Run
from onestem.engine.outputs import request_output
from onestem.engine.sequence import RequestState, Sequence
from onestem.request import CompletionOutput, RequestOutput, Told
from onestem.server.link.messages import Delta, Tokens

if TYPE_CHECKING:
    from onestem.engine.engine import Engine
    from onestem.engine.sequence import Sequence

__all__ = ["Deltas", "last_delta", "snapshot_of"]


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
        self._numbers[request_id], self._sent[request_id] = number, {}

    def forget(self, request_id: str) -> None:
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
        unusual = self._note_tokens(going_on, tokens)
        deltas = []
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

    def _note_tokens(self, going_on: Iterable[RequestState], tokens: Tokens) -> list[RequestState]:
        """Note news that is one token with its text, of requests of one sequence; returns the other
        requests. Most news is like that, so no output is made for it."""
        unusual: list[RequestState] = []
        numbers: list[int] = []
        ids: list[int] = []
        for state in going_on:
            one = self._single.get(state.request.request_id) or self._begin_single(state)
            if one is None:
                unusual.append(state)
                continue
            sequence, sent = one.sequence, one.sent
            sampled, text = sequence.tokens, sequence.text
            first, version = sequence.weights[-1]
            count = len(sampled) - sequence.num_prompt
            is_new = count > first and version == tokens.weights_version
            if count != sent.tokens + 1 or not is_new:
                unusual.append(state)
                continue
            numbers.append(one.number)
            ids.append(sampled[-1])
            tokens.texts.append(text[sent.text :])
            sent.tokens, sent.text = sent.tokens + 1, len(text)
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


# ----------------------------------------------------------------------------- snapshot
# An engine's state in plain values: the tree of runs, what holds KV memory, what runs and waits.

MOST_RUNS = 400
MOST_MODULES = 200
FIRST_TOKENS = 12


def snapshot_of(engine: Engine) -> dict[str, Any]:
    """Plain values, for JSON.

    `runs`: the largest by tokens, each after its parent: id, parent (None at the top), start,
    tokens, computed, readers (running sequences), owner (`prefix`, `interactive`, `job`, `cached`),
    pinned (the prefix's name, or None) and first token ids. `num_runs` counts all. `modules` are
    the runs of PML modules, alike, with `start` their position.
    `pages` by owner: a page that several hold is counted for the first of prefix, interactive, job,
    cached. `holders` have {owner, name, pages}, where the name is the prefix's, or the id of a
    request that reads it.
    """
    scheduler, pool = engine.scheduler, engine.cache.pool
    reading = _reading(engine)
    readers = _readers(reading)
    pinned = engine.pins.runs
    owners = {run: _owner(run, readers, pinned) for run in engine.cache.runs()}
    holders = _pages_by_holder(owners, {**_names(reading), **pinned})
    modules = set(engine.cache.modules)
    tree = {run: owner for run, owner in owners.items() if run not in modules}
    return {
        "pages": {
            "size": pool.page_size,
            "total": pool.num_pages,
            "free": pool.num_free,
            "held": pool.num_held,
            "cached": pool.num_pages - pool.num_free - pool.num_held,
            **_pages_by_owner(holders),
        },
        "holders": [
            {"owner": owner, "name": name, "pages": count}
            for (owner, name), count in holders.items()
        ],
        "running": len(scheduler.interactive.running),
        "running_jobs": len(scheduler.jobs.running),
        "paused_jobs": scheduler.jobs.num_paused,
        "waiting": engine.num_waiting,
        "jobs": engine.job_ids,
        "prefixes": [dataclasses.asdict(info) for info in engine.prefixes()],
        "stats": engine.stats.to_dict(),
        "num_runs": len(tree),
        "runs": [_run(run, readers, owners, pinned) for run in _largest(tree)],
        "num_modules": len(modules),
        "modules": [_run(run, readers, owners, {}) for run in _by_size(modules, MOST_MODULES)],
    }


def _reading(engine: Engine) -> list[tuple[Sequence, list[Run]]]:
    """Running sequences, those of interactive requests first, with the runs that each reads."""
    version = engine.scheduler.version
    running = sorted(engine.scheduler.running, key=lambda sequence: sequence.is_job)
    return [(s, [*s.path(version), *{one.run: None for one in s.imports}]) for s in running]


def _readers(reading: list[tuple[Sequence, list[Run]]]) -> dict[Run, list[int]]:
    """By run, how many interactive sequences and how many sequences of jobs read it."""
    readers: dict[Run, list[int]] = {}
    for sequence, runs in reading:
        for run in runs:
            readers.setdefault(run, [0, 0])[sequence.is_job] += 1
    return readers


def _names(reading: list[tuple[Sequence, list[Run]]]) -> dict[Run, str]:
    """By run, the id of a request that reads it; of an interactive one, if there is one."""
    names: dict[Run, str] = {}
    for sequence, runs in reading:
        for run in runs:
            names.setdefault(run, sequence.state.request.request_id)
    return names


def _owner(run: Run, readers: dict[Run, list[int]], pinned: Container[Run]) -> str:
    if run in pinned:
        return "prefix"
    interactive, jobs = readers.get(run, (0, 0))
    return "interactive" if interactive else "job" if jobs else "cached"


def _pages_by_holder(owners: dict[Run, str], names: dict[Run, str]) -> Counter[tuple[str, str]]:
    """(owner, name) -> pages."""
    held = [(run, owner) for run, owner in owners.items() if owner != "cached"]
    pages: dict[int, tuple[str, str]] = {}
    for kind in ("job", "interactive", "prefix"):
        for run, owner in held:
            if owner == kind:
                pages.update(dict.fromkeys(run.pages, (kind, names[run])))
    return Counter(pages.values())


def _pages_by_owner(holders: Mapping[tuple[str, str], int]) -> dict[str, int]:
    counts = dict.fromkeys(("prefix", "interactive", "job"), 0)
    for (owner, _), count in holders.items():
        counts[owner] += count
    return counts


def _largest(owners: dict[Run, str]) -> list[Run]:
    """The largest runs with their ancestors, from the top down."""
    chosen: dict[Run, None] = {}
    for run in _by_size(owners, MOST_RUNS):
        path = [node for node in run.path() if node not in chosen]
        if len(chosen) + len(path) <= MOST_RUNS:
            chosen.update(dict.fromkeys(path))
    return sorted(chosen, key=lambda run: (run.start, run.uid))


def _by_size(runs: Iterable[Run], most: int) -> list[Run]:
    return heapq.nlargest(most, runs, key=lambda run: len(run.tokens))


def _run(
    run: Run,
    readers: dict[Run, list[int]],
    owners: dict[Run, str],
    pinned: Mapping[Run, str],
) -> dict[str, Any]:
    parent = run.parent
    return {
        "id": run.uid,
        "parent": parent.uid if parent is not None and parent.parent is not None else None,
        "start": run.position if parent is None else run.start,
        "tokens": len(run.tokens),
        "computed": run.computed,
        "readers": sum(readers.get(run, (0, 0))),
        "owner": owners.get(run, "cached"),
        "pinned": pinned.get(run),
        "salted": run.label.space != "",
        "first": run.tokens[:FIRST_TOKENS].tolist(),
    }
