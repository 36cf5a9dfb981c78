"""Whether pauses pay: prompt tokens computed with and without what is learned of them.

    python -m onestem_lab.eviction.sessions [--traces beside,scans] [--seeds 3]

As `onestem_lab.eviction`, with traces of sessions beside other prompts. Which tokens are evicted
decides when requests are admitted, and so what is evicted next: one more request may change a
result by 2%. So each trace is made with several seeds, and the tokens are added up.

before: what several sequences continued is kept longer.
after: as `onestem.cache.idle` has it.
marked: the same, and the first prompts of sessions say that they are (`prompt_cache_key`).
oracle: what is wanted last goes first.

Written to lab/results/eviction-sessions.json, where rows of other traces stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from onestem.cache.idle import IdleRuns
from onestem_lab.eviction.policies import Kinds, run_oracle
from onestem_lab.eviction.simulate import Simulation
from onestem_lab.eviction.traces import Ask, Ids, Trace, ids, zipf
from onestem_lab.results import RESULTS, write

RESULT = RESULTS / "eviction-sessions.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    names = options.traces.split(",")
    rows = [row for name in names for row in _measure(name, TRACES[name], options.seeds)]
    before = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = [row for row in before if row["trace"] not in names] + rows
    command = " ".join(["python -m onestem_lab.eviction.sessions", *sys.argv[1:]])
    write(RESULT, {"command": command, "rows": rows})


def _measure(name: str, trace: Trace, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for memory in trace.memories:
        tokens, worst = Counter[str](), 0.0
        for seed in range(seeds):
            asks = trace.make(np.random.default_rng(seed))
            before = Simulation(asks, memory, Kinds).run()
            marked = Simulation(asks, memory, IdleRuns).run()
            for ask in asks:
                ask.marked = False
            after = Simulation(asks, memory, IdleRuns).run()
            tokens["prompts"] += before.prompt_tokens
            tokens["before"] += before.computed
            tokens["after"] += after.computed
            tokens["marked"] += marked.computed
            tokens["oracle"] += run_oracle(asks, memory, before.admitted).computed
            worst = max(worst, after.computed / before.computed)
        row = {"trace": name, "memory": memory, "seeds": seeds, **tokens, "worst_seed": worst}
        print(row, flush=True)
        rows.append(row)
    return rows


def _talk(
    rng: np.random.Generator, start: float, system: Ids, turns: int, pause: Callable[[], float]
) -> list[Ask]:
    """A conversation whose turns add 100 to 1,200 tokens, with `pause()` seconds between them."""
    asks: list[Ask] = []
    history = system
    for _ in range(turns):
        history = np.concatenate((history, ids(rng, rng.integers(100, 1200))))
        after = asks[-1] if asks else None
        ask = Ask(history, ids(rng, 8), pause() if asks else start, after, marked=not asks)
        asks.append(ask)
        history = np.concatenate((history, ask.answer))
    return asks


def alone(rng: np.random.Generator) -> list[Ask]:
    """Agents' sessions, whose pauses are 8 seconds in the middle and minutes at times."""
    systems = [ids(rng, tokens) for tokens in (1000, 2000, 3000)]
    asks: list[Ask] = []
    for start in np.cumsum(rng.exponential(5.0, 60)):
        system, turns = systems[rng.integers(3)], int(rng.geometric(0.12))
        asks += _talk(rng, float(start), system, turns, lambda: float(rng.lognormal(2.1, 1.5)))
    return asks


def beside(rng: np.random.Generator) -> list[Ask]:
    """The same, beside prompts that come once, one each second."""
    asks = alone(rng)
    for start in np.cumsum(rng.exponential(1.0, 400)):
        asks.append(Ask(ids(rng, rng.integers(500, 4000)), ids(rng, 8), float(start)))
    return asks


def scans(rng: np.random.Generator) -> list[Ask]:
    """The same sessions; each minute 12 documents are read at once, every third minute the same."""
    asks = alone(rng)
    known = [ids(rng, rng.integers(3000, 9000)) for _ in range(12)]
    for minute in range(8):
        for number in range(12):
            read = known[number] if minute % 3 == 0 else ids(rng, rng.integers(3000, 9000))
            prompt = np.concatenate((read, ids(rng, 40)))
            asks.append(Ask(prompt, ids(rng, 8), 60.0 * minute + 20))
    return asks


def rounds(rng: np.random.Generator) -> list[Ask]:
    """40 sessions that take turns."""
    histories = [ids(rng, 3000) for _ in range(40)]
    asks: list[Ask] = []
    for _ in range(8):
        for number, history in enumerate(histories):
            prompt = np.concatenate((history, ids(rng, 100)))
            ask = Ask(prompt, ids(rng, 8), 0.0, asks[-1] if asks else None)
            histories[number] = np.concatenate((prompt, ask.answer))
            asks.append(ask)
    return asks


def questions(rng: np.random.Generator) -> list[Ask]:
    """60 documents and 8 questions, not planned: the first question of all of them comes first."""
    documents = [ids(rng, rng.integers(1000, 3000)) for _ in range(60)]
    return [
        Ask(np.concatenate((document, ids(rng, 40))), ids(rng, 8))
        for _ in range(8)
        for document in documents
    ]


def systems(rng: np.random.Generator) -> list[Ask]:
    """Sessions below 40 system prompts of 500 to 6,000 tokens, half of them of one turn."""
    found = [ids(rng, tokens) for tokens in rng.integers(500, 6001, 40)]
    asks, chances = [], zipf(len(found))
    for start in np.cumsum(rng.exponential(1.5, 300)):
        system = found[rng.choice(len(found), p=chances)]
        turns = 1 if rng.random() < 0.5 else int(rng.geometric(0.2))
        asks += _talk(rng, float(start), system, turns, lambda: float(rng.lognormal(2.5, 1.0)))
    return asks


MEMORIES = (32768, 65536, 131072)
TRACES = {
    "beside": Trace(beside, MEMORIES),
    "alone": Trace(alone, MEMORIES),
    "scans": Trace(scans, MEMORIES),
    "systems": Trace(systems, MEMORIES),
    "rounds": Trace(rounds, (65536,)),
    "questions": Trace(questions, (65536,)),
}


if __name__ == "__main__":
    main()
