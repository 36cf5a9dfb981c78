"""How long a key that attacks nobody waits, while others attack and while they do not."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from onestem_lab.load.figures import distribution
from onestem_lab.serve.hostile_answers import Reply
from onestem_lab.serve.hostile_hand import Hand, asked, bad_outcome
from onestem_lab.serve.hostile_pool import COMPLETIONS
from onestem_lab.serve.hostile_schemas import format_of, small_schema

__all__ = ["Probes", "Windows", "fits"]

Json = dict[str, Any]

PHASES = ("before attacks", "under attack", "between attacks")
REST_SECONDS = 0.3  # between two probes


@dataclass(frozen=True)
class Windows:
    """Attacks come and go: none for so many seconds, then attacks for as long, and so on.

    Attributes:
        began: in seconds of `time.monotonic`.
        seconds: of a window; 0: there are no attacks.
    """

    began: float
    seconds: float

    def phase(self, at: float) -> str:
        """Which of `PHASES` a moment is in."""
        number = int((at - self.began) / self.seconds) if self.seconds else 0
        return PHASES[number if number < 2 else 2 - number % 2]

    async def wait(self, over: asyncio.Event) -> bool:
        """Until attacks are on; False: the traffic is over."""
        while not over.is_set():
            if self.phase(time.monotonic()) == "under attack":
                return True
            await asyncio.sleep(0.1)
        return False


@dataclass
class Probes:
    """Plain requests and small schemas of one key, one after the other.

    Attributes:
        seconds: kind of probe -> phase -> how long each took that was answered.
    """

    windows: Windows
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    async def plain(self, hand: Hand) -> None:
        """A short greedy case."""
        short = [case for case in hand.pool if case.kind == "short" and not case.sampled]
        case = hand.rng.choice([case for case in short if not case.names] or short)
        reply = await self._timed("plain", hand, case.path, case.body)
        hand.judge(case, reply)

    async def small(self, hand: Hand) -> None:
        """A schema that is new, and compiled in milliseconds."""
        schema = small_schema(next(self._numbers))
        body = {"prompt": "x", "max_tokens": 30, "temperature": 0}
        body["response_format"] = format_of(schema)
        reply = await self._timed("small schema", hand, COMPLETIONS, body)
        if reply.status != 200 or reply.fault is not None:
            outcome = bad_outcome(reply.status, reply.code == "engine_down")
        else:
            outcome = "right" if fits(reply, schema) else "wrong"
        hand.note(outcome, body=body, found=reply.plain())

    async def _timed(self, kind: str, hand: Hand, path: str, body: Json) -> Reply:
        began = time.monotonic()
        reply = await asked(hand.http, path, body)
        if reply.status == 200:
            phase = self.windows.phase(began)
            found = self.seconds.setdefault(kind, {}).setdefault(phase, [])
            found.append(time.monotonic() - began)
        return reply

    async def pause(self) -> None:
        await asyncio.sleep(REST_SECONDS)

    def told(self) -> Json:
        """For the result: by kind and phase, figures in seconds."""
        return {
            kind: {
                phase: {"count": len(phases[phase]), **distribution(phases[phase])}
                for phase in PHASES
                if phase in phases
            }
            for kind, phases in self.seconds.items()
        }


def fits(reply: Reply, schema: Json) -> bool:
    """Whether the answer is a value of a small schema."""
    ((name, value),) = schema["properties"].items()
    (choice,) = reply.choices
    try:
        found = json.loads(choice.exact["text"])
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == {name} and found[name] in value["enum"]
