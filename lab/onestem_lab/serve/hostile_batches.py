"""Batches that must end whole, whatever happens to the server meanwhile.

Lines are cases of the pool, sampled lines without a seed, and lines that attack. A line without a
seed gets one from the name of its job and its `custom_id`, so it must be answered as an engine that
is alone answers it with that seed, however often the job was taken up again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from onestem.batch.results import derived_seed, split_result_id
from onestem_lab.serve.hostile_answers import Reply, choices_of
from onestem_lab.serve.hostile_bodies import RUNS, run_of
from onestem_lab.serve.hostile_hand import Site, dumped, judged
from onestem_lab.serve.hostile_pool import COMPLETIONS, Case, text
from onestem_lab.serve.hostile_schemas import costly_schema, format_of

__all__ = ["ENDED", "Batch", "Batches", "Line", "is_whole", "judge", "line_of", "reply_of_line"]

Json = dict[str, Any]

ENDED = ("completed", "failed", "cancelled", "expired")
MOST_OPEN = 3
STILL_SECONDS = 120.0  # without news of any batch, after which those that go on are given up
MOST_SHOWN = 20
# Rounding may turn a token of few sampled lines; another seed turns most of them.
MOST_DRAWN_OTHERWISE = 0.25


@dataclass(frozen=True)
class Line:
    """A line of a batch. `case`: what must be answered; None: anything, since it attacks.

    Attributes:
        is_seeded: False: `case` has no seed and no answer yet.
    """

    custom_id: str
    path: str
    body: Json
    case: Case | None = None
    is_seeded: bool = True

    def raw(self) -> bytes:
        named = {"custom_id": self.custom_id, "method": "POST", "url": self.path}
        return dumped({**named, "body": self.body}) + b"\n"


@dataclass
class Batch:
    """One that the server has taken.

    Attributes:
        record: what it last said of it; output: the lines that came.
        outages: how many came while it was open.
    """

    owner: str
    kind: str
    lines: Sequence[Line]
    record: Json
    output: list[Json] = field(default_factory=list)
    outages: int = 0

    @property
    def has_ended(self) -> bool:
        return self.record["status"] in ENDED

    @property
    def is_midway(self) -> bool:
        """Whether some of its lines are answered, and some not."""
        counts = self.record["request_counts"]
        return not self.has_ended and 0 < counts["completed"] < counts["total"]


# ----------------------------------------------------------------------------- what is begun


def line_of(case: Case, before: str = "") -> Line:
    """One whose `custom_id` ends with the case's number."""
    return Line(f"{before}{case.number}", case.path, case.body, case)


def _unseeded(rng: random.Random, name: str) -> Line:
    body = {"prompt": text(rng, 1, 9), "max_tokens": 8, "temperature": 1.0}
    body |= {"return_token_ids": True, "logprobs": 2}
    case = Case(number=-1, kind="unseeded", names=(), path=COMPLETIONS, body=body)
    return Line(name, COMPLETIONS, body, case, is_seeded=False)


def _attacked(rng: random.Random, good: Sequence[Line], attacks: Sequence[Line]) -> list[Line]:
    lines = [*good, *attacks]
    rng.shuffle(lines)
    return lines


def ordinary(rng: random.Random, pool: Sequence[Case]) -> list[Line]:
    """Tens of lines, a fifth of them without a seed."""
    count = rng.randint(30, 80)
    cases = [line_of(case, f"{i} ") for i, case in enumerate(rng.choices(_fitting(pool), k=count))]
    return _attacked(rng, cases, [_unseeded(rng, f"unseeded {i}") for i in range(count // 4)])


def with_costly_schemas(rng: random.Random, pool: Sequence[Case]) -> list[Line]:
    """A few lines with schemas that take long, among good ones."""
    cases = [line_of(case, f"{i} ") for i, case in enumerate(rng.choices(_fitting(pool), k=6))]
    bodies = [
        {"prompt": text(rng, 1, 9), "max_tokens": 4, "response_format": format_of(schema)}
        for schema in (costly_schema(rng) for _ in range(rng.randint(1, 5)))
    ]
    attacks = [Line(f"schema {i}", COMPLETIONS, body) for i, body in enumerate(bodies)]
    return _attacked(rng, cases, attacks)


def with_blanks(rng: random.Random, pool: Sequence[Case]) -> list[Line]:
    """One line of millions of blanks, among good ones."""
    return _with_run(rng, pool, " ")


def with_long_runs(rng: random.Random, pool: Sequence[Case]) -> list[Line]:
    """The same with any characters."""
    return _with_run(rng, pool, rng.choice(RUNS))


def _with_run(rng: random.Random, pool: Sequence[Case], piece: str) -> list[Line]:
    cases = [line_of(case, f"{i} ") for i, case in enumerate(rng.choices(_fitting(pool), k=6))]
    body = {"prompt": run_of(piece, rng), "max_tokens": 4}
    return _attacked(rng, cases, [Line("run", COMPLETIONS, body)])


def _fitting(pool: Sequence[Case]) -> list[Case]:
    """Those that the lines of one batch, whose path is of completions, may have."""
    return [case for case in pool if case.fits_a_line and case.path == COMPLETIONS]


Maker = Callable[[random.Random, Sequence[Case]], list[Line]]
ATTACKS: Mapping[str, Maker] = {
    "blanks": with_blanks,
    "costly schemas": with_costly_schemas,
    "long runs": with_long_runs,
}


# ----------------------------------------------------------------------------- their life


class Batches:
    """All that a run has begun.

    Args:
        owner: name of the key of ordinary batches.
        attacker: of those with lines that attack; None: there are none.
    """

    def __init__(
        self, site: Site, pool: Sequence[Case], seed: int, owner: str, attacker: str | None
    ) -> None:
        self._site, self._pool, self._seed = site, pool, seed
        self._owner, self._attacker = owner, attacker
        self._number = 0
        self.all: list[Batch] = []

    @property
    def open(self) -> list[Batch]:
        return [batch for batch in self.all if not batch.has_ended]

    @property
    def is_midway(self) -> bool:
        """Whether an ordinary one is."""
        return any(batch.is_midway for batch in self.all if batch.owner == self._owner)

    async def go_on(self, over: asyncio.Event) -> None:
        """Begin batches, a few at a time, and follow them, until the traffic is over."""
        while not over.is_set():
            try:
                await self.look()
                await self._begin_some()
            except (httpx2.HTTPError, OSError):
                pass  # an outage; whether others are in one, the clients find out
            await asyncio.sleep(0.5)

    async def _begin_some(self) -> None:
        ordinary_ones = [batch for batch in self.open if batch.owner == self._owner]
        if len(ordinary_ones) < MOST_OPEN:
            await self._begin(self._owner, "ordinary", ordinary)
        if self._attacker is not None and len(self.open) - len(ordinary_ones) < len(ATTACKS):
            begun = sum(batch.owner == self._attacker for batch in self.all)
            kind = list(ATTACKS)[begun % len(ATTACKS)]
            await self._begin(self._attacker, kind, ATTACKS[kind])

    async def _begin(self, owner: str, kind: str, make: Maker) -> None:
        rng = random.Random(f"{self._seed} batch {self._number}")
        self._number += 1
        lines = make(rng, self._pool)
        http = self._site.clients[owner]
        files = {"file": ("in.jsonl", b"".join(line.raw() for line in lines))}
        uploaded = await http.post("/v1/files", files=files, data={"purpose": "batch"})
        if uploaded.status_code != 200:
            return
        body = {"input_file_id": uploaded.json()["id"], "endpoint": lines[0].path}
        posted = await http.post("/v1/batches", json={**body, "completion_window": "24h"})
        if posted.status_code == 200:
            # Some bodies have megabytes.
            kept = [dataclasses.replace(line, body={}) for line in lines]
            self.all.append(Batch(owner, kind, kept, posted.json()))

    async def look(self) -> bool:
        """Ask how the open ones are, and fetch what has ended; whether there is news."""
        news = False
        for batch in self.open:
            http = self._site.clients[batch.owner]
            answer = await http.get(f"/v1/batches/{batch.record['id']}")
            if answer.status_code != 200:
                continue
            record = answer.json()
            if record["status"] in ENDED:
                batch.output = await _fetched(http, record)
                await http.delete(f"/v1/files/{record['input_file_id']}")
            news |= record != batch.record
            batch.record = record
        return news

    def note_outage(self) -> None:
        """One is on."""
        for batch in self.open:
            batch.outages += 1

    async def rest(self) -> None:
        """Until all have ended, or none goes on any more."""
        last = time.monotonic()
        while self.open and time.monotonic() < last + STILL_SECONDS:
            if await self.look():
                last = time.monotonic()
            await asyncio.sleep(0.5)


async def _fetched(http: httpx2.AsyncClient, record: Json) -> list[Json]:
    """The lines of its output, which has also those that failed."""
    if not record["output_file_id"]:
        return []
    answer = await http.get(f"/v1/files/{record['output_file_id']}/content")
    answer.raise_for_status()
    return [json.loads(line) for line in answer.text.splitlines()]


# ----------------------------------------------------------------------------- what became of them


def reply_of_line(line: Json) -> Reply:
    if line["error"] is not None:
        status = 400 if line["error"]["code"] in ("invalid_request", "unsupported") else 500
        return Reply(status=status, error=line["error"]["message"], code=line["error"]["code"])
    body = line["response"]["body"]
    usage = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    return Reply(status=200, choices=choices_of(body["choices"]), usage=usage)


def judge(batches: Sequence[Batch], answered: Callable[[Sequence[Case]], list[Case]]) -> Json:
    """What became of all of them.

    Args:
        answered: gives cases the answers that they get alone.
    """
    counts: Counter[str] = Counter()
    shown: list[Json] = []
    for batch, cases in zip(batches, _answered(batches, answered), strict=True):
        told = _judged(batch, cases)
        counts.update(told["counts"])
        if told["wrong"]:
            shown.append({"batch": batch.record, "kind": batch.kind, **told})
    names = ("begun", "whole", "failed", "unfinished", "cut", "lines", "lost", "wrong")
    return {
        **{name: counts[name] for name in (*names, "drawn otherwise")},
        "by_kind": Counter(batch.kind for batch in batches),
        "shown": shown[:MOST_SHOWN],
    }


def _answered(
    batches: Sequence[Batch], answered: Callable[[Sequence[Case]], list[Case]]
) -> list[dict[str, Case]]:
    """For each batch, the cases of its lines that came and are none that attack, by name."""
    found: list[dict[str, Case]] = []
    unseeded: list[tuple[dict[str, Case], str, Case]] = []
    for batch in batches:
        came = {line["custom_id"]: line for line in batch.output}
        found.append({})
        for line in batch.lines:
            if line.case is None or line.custom_id not in came:
                continue
            found[-1][line.custom_id] = line.case
            if not line.is_seeded:
                case = _seeded(line.case, came[line.custom_id])
                unseeded.append((found[-1], line.custom_id, case))
    answers = answered([case for _, _, case in unseeded]) if unseeded else []
    for (cases, name, _), case in zip(unseeded, answers, strict=True):
        cases[name] = case
    return found


def _seeded(case: Case, answer: Json) -> Case:
    """The case with the seed that its job gives it."""
    named = split_result_id(answer["id"])
    seed = derived_seed(named[0] if named else "", answer["custom_id"])
    return dataclasses.replace(case, body={**case.body, "seed": seed})


def _judged(batch: Batch, cases: Mapping[str, Case]) -> Json:
    """Counts of one batch, and what is wrong with it."""
    ids = [line.custom_id for line in batch.lines]
    found = [line["custom_id"] for line in batch.output]
    outcomes, why = _outcomes(batch, cases)
    counts = Counter(begun=1, lines=len(ids), lost=len(set(ids) - set(found)))
    counts["cut"] = int(batch.outages > 0)
    counts["wrong"] = outcomes["wrong"]
    counts["drawn otherwise"] = outcomes["drawn otherwise"]
    jobs = {(split_result_id(line["id"]) or ("none", 0))[0] for line in batch.output}
    if not batch.has_ended:
        counts["unfinished"], why = 1, [*why, "it did not end"]
    elif batch.record["status"] != "completed":
        counts["failed"], why = 1, [*why, f"it is {batch.record['status']}"]
    elif found != ids:
        why = [*why, "its lines are not those of the input, in their order"]
    elif len(jobs) > 1:
        why = [*why, f"its lines name {len(jobs)} jobs"]
    counts["whole"] = int(not why)
    return {"counts": counts, "wrong": why[:MOST_SHOWN]}


def _outcomes(batch: Batch, cases: Mapping[str, Case]) -> tuple[Counter[str], list[str]]:
    """What the answers are, and why those that are wrong are so."""
    outcomes: Counter[str] = Counter()
    unseeded: Counter[str] = Counter()
    why: list[str] = []
    seeded = {line.custom_id for line in batch.lines if line.is_seeded}
    for line in batch.output:
        name = line["custom_id"]
        if name not in cases:
            continue
        outcome, told = judged(cases[name], reply_of_line(line))
        outcome = outcome if outcome in ("right", "refused", "drawn otherwise") else "wrong"
        outcomes[outcome] += 1
        unseeded[outcome] += name not in seeded
        if outcome == "wrong":
            why.append(f"{name}: {'; '.join(told)[:500]}")
    if unseeded["drawn otherwise"] > MOST_DRAWN_OTHERWISE * unseeded.total():
        outcomes["wrong"] += unseeded["drawn otherwise"]
        why.append(f"{unseeded['drawn otherwise']} lines without a seed have another")
    return outcomes, why


def is_whole(told: Mapping[str, Any]) -> bool:
    """Whether all batches have ended as they should."""
    return bool(told["whole"] == told["begun"] and not told["lost"] and not told["wrong"])
