"""A client's hand: what it needs to ask something, and where it notes what became of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from onestem.server.objects.tenants import OPERATOR
from onestem_lab.serve.hostile_answers import Reply, differences, is_a_draw, reply_of
from onestem_lab.serve.hostile_pool import COMPLETIONS, Case
from onestem_lab.serve.hostile_server import Outages

__all__ = ["Hand", "Site", "Tally", "asked", "bad_outcome", "judged", "varied"]

Json = dict[str, Any]

MOST_SHOWN = 20  # wrong answers and errors that are written down in full
BAD = ("wrong", "drawn otherwise", "error", "engine down", "hung")


@dataclass(frozen=True)
class Site:
    """A server that is asked.

    Attributes:
        keys: name -> key, the operator's among them.
        clients: name of a key -> a client that sends it.
        max_body: bytes of the longest body it takes.
        outages: when the benchmark itself had ended it.
    """

    url: str
    keys: Mapping[str, str]
    clients: Mapping[str, httpx2.AsyncClient]
    max_body: int
    outages: Outages = field(default_factory=Outages)

    @property
    def operator(self) -> httpx2.AsyncClient:
        return self.clients[OPERATOR]


@dataclass
class Tally:
    """What was asked, and what became of it.

    Attributes:
        counts: kind -> outcome -> how often.
        shown: outcome -> the first of those that are bad, with all that it takes to ask again.
        short_seconds: of short good requests.
        recent: what was begun last.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    shown: dict[str, list[Json]] = field(default_factory=dict)
    short_seconds: list[float] = field(default_factory=list)
    recent: deque[Json] = field(default_factory=lambda: deque(maxlen=200))

    def note(self, kind: str, outcome: str, detail: Json) -> None:
        self.counts.setdefault(kind, Counter())[outcome] += 1
        shown = self.shown.setdefault(outcome, []) if outcome in BAD else []
        if len(shown) < MOST_SHOWN:
            shown.append(detail)

    def count(self, outcome: str) -> int:
        """How often that came of anything."""
        return sum(counts[outcome] for counts in self.counts.values())

    @property
    def requests(self) -> int:
        return sum(counts.total() for counts in self.counts.values())


@dataclass(frozen=True)
class Hand:
    """One thing that a client does.

    Attributes:
        place: seed, client and step, which say all that is drawn.
        key: name of the key that it has.
        pace: how long it pauses, where 1 is usual.
        began: when, in seconds of `time.monotonic`.
    """

    site: Site
    pool: Sequence[Case]
    tally: Tally
    rng: random.Random
    place: Mapping[str, int]
    kind: str
    key: str
    pace: float
    began: float = field(default_factory=time.monotonic)

    @property
    def http(self) -> httpx2.AsyncClient:
        return self.site.clients[self.key]

    @property
    def secret(self) -> str:
        return self.site.keys[self.key]

    def case(self) -> Case:
        """Any of the pool."""
        return self.rng.choice(self.pool)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.pace)

    def note(self, outcome: str, **detail: Any) -> None:
        """Write down how it ended; `cut` is what an outage of the benchmark's own has ended."""
        outcome = "cut" if self.site.outages.excuses(outcome, self.began) else outcome
        self.tally.note(self.kind, outcome, {**self.place, "action": self.kind, **detail})

    def judge(self, case: Case, reply: Reply, body: Json | None = None) -> str:
        """Write down whether an answer is right; returns what it is."""
        outcome, why = judged(case, reply)
        detail = {} if outcome not in BAD else _told(case, reply, body or case.body)
        self.note(outcome, why=why, **detail)
        return outcome

    def expect(self, answer: httpx2.Response, *allowed: int) -> bool:
        """Write down a status, which must be one of some; whether it is 200."""
        good = answer.status_code in allowed
        told = {} if good else {"status": answer.status_code, "answer": answer.text[:500]}
        bad = bad_outcome(answer.status_code, "engine_down" in answer.text)
        self.note(str(answer.status_code) if good else bad, **told)
        return good and answer.status_code == 200


def bad_outcome(status: int, is_down: bool) -> str:
    """What a status is that should have been another. `is_down`: it says that the engine is."""
    if status in (429, 504):
        return "busy" if status == 429 else "late"
    return "engine down" if is_down else "error"


def _told(case: Case, reply: Reply, body: Json) -> Json:
    told = {"case": case.number, "kind": case.kind, "names": case.names, "path": case.path}
    return {**told, "body": body, "expected": case.expected.plain(), "found": reply.plain()}


def judged(case: Case, reply: Reply) -> tuple[str, list[str]]:
    """What an answer to a good request is, and why if it is bad."""
    if reply.fault is not None:
        return "error", [reply.fault]
    if reply.status >= 500 or reply.status == 429:
        return bad_outcome(reply.status, reply.code == "engine_down"), [str(reply.error)]
    if case.expected.status != reply.status:
        return "wrong", [f"status is {reply.status}, expected {case.expected.status}"]
    if reply.status != 200:
        return "refused", []
    told = differences(case.expected, reply)
    if not told:
        return "right", []
    drawn = case.sampled and is_a_draw(case.expected, reply)
    return ("drawn otherwise" if drawn else "wrong"), told


def varied(case: Case, rng: random.Random) -> Json:
    """A case's body with what changes nothing of the answer: a stream, a salt, labels."""
    body = dict(case.body)
    if rng.random() < 0.5 and "prompt_logprobs" not in body:
        body |= {"stream": True, "stream_options": {"include_usage": rng.random() < 0.5}}
    if rng.random() < 0.15:
        body["cache_salt"] = f"salt {rng.randrange(6)}"
    if rng.random() < 0.1:
        body |= {"user": "somebody", "model": "embedded", "timeout": 600}
    return body


async def asked(http: httpx2.AsyncClient, path: str, body: Json) -> Reply:
    """What a good client gets."""
    answer = await http.post(path, json=body)
    return reply_of(answer.status_code, answer.content)


def plain_case(number: int, prompt: str) -> Case:
    """A short greedy request."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return Case(number=number, kind="short", names=(), path=COMPLETIONS, body=body)


def dumped(body: Json) -> bytes:
    return json.dumps(body).encode()
