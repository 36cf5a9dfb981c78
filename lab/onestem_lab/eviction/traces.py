"""Traces: requests with their prompts and answers, and when they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["TRACES", "Ask", "Ids", "Trace", "ids", "zipf"]

Ids = np.ndarray
VOCAB = 1 << 30  # two draws are never alike


@dataclass(eq=False)
class Ask:
    """A request.

    Attributes:
        prompt, answer: int32 ids. With modules, what the prompt computes itself.
        seconds: when it comes; with `after`, how long after that one's answer.
        modules: (name, tokens) of what it imports.
        marked: it says that it begins a conversation.
        group, group_prefix: of a planned job, and its prefix's tokens.
    """

    prompt: Ids
    answer: Ids
    seconds: float = 0.0
    after: Ask | None = None
    modules: tuple[tuple[str, int], ...] = ()
    marked: bool = False
    group: int | None = None
    group_prefix: int = 0


@dataclass(frozen=True)
class Trace:
    """Attributes:
    make: its requests; those of a job in planned order.
    memories: tokens of KV memory to try.
    """

    make: Callable[[np.random.Generator], list[Ask]]
    memories: tuple[int, ...]


def ids(rng: np.random.Generator, count: float) -> Ids:
    return rng.integers(0, VOCAB, max(1, int(count)), dtype=np.int32)


def zipf(count: int, exponent: float = 1.0) -> np.ndarray:
    """float64 `[count]`: probabilities that fall with the rank."""
    weights = np.arange(1, count + 1) ** -exponent
    return weights / weights.sum()


def _conversation(
    rng: np.random.Generator, system: Ids, first: Ask, turns: int, thinks: tuple[float, float]
) -> list[Ask]:
    """Turns of an agent: two calls of tools, an answer, a further question, and so on. Tools take
    `thinks[0]` seconds, users `thinks[1]`, on average."""
    asks, history = [], system
    for turn in range(turns):
        is_question = turn % 3 == 0
        history = np.concatenate((history, ids(rng, 95 if is_question else rng.integers(100, 380))))
        answer = ids(rng, rng.integers(6, 20))
        if turn == 0:
            ask = Ask(history, answer, first.seconds, first.after)
        else:
            pause = thinks[1] if is_question else thinks[0]
            ask = Ask(history, answer, rng.exponential(pause), asks[-1])
        asks.append(ask)
        history = np.concatenate((history, answer))
    return asks


def agents_at_once(rng: np.random.Generator) -> list[Ask]:
    """As `onestem_lab.serve.agents`: 16 conversations at a time, and nobody thinks."""
    systems = [ids(rng, 3060) for _ in range(3)]
    lanes: list[Ask | None] = [None] * 16
    asks: list[Ask] = []
    for number in range(100):
        lane = number % len(lanes)
        first = Ask(systems[0], systems[0], 0.0, lanes[lane])
        found = _conversation(rng, systems[number % 3], first, 6, (0.0, 0.0))
        lanes[lane] = found[-1]
        asks += found
    return asks


def agents(rng: np.random.Generator) -> list[Ask]:
    """Conversations begin at random; users think."""
    systems = [ids(rng, tokens) for tokens in (1000, 2000, 3000, 4000, 6000)]
    asks: list[Ask] = []
    for start in np.cumsum(rng.exponential(3.0, 100)):
        first = Ask(systems[0], systems[0], float(start))
        system = systems[rng.choice(5, p=zipf(5))]
        turns = int(rng.integers(3, 13))
        asks += _conversation(rng, system, first, turns, (2.0, 30.0))
    return asks


def drift(rng: np.random.Generator) -> list[Ask]:
    """The same, and every 20 conversations each application's system prompt is replaced."""
    asks: list[Ask] = []
    systems: list[Ids] = []
    for number, start in enumerate(np.cumsum(rng.exponential(3.0, 100))):
        if number % 20 == 0:
            systems = [ids(rng, tokens) for tokens in (1000, 2000, 3000, 4000, 6000)]
        first = Ask(systems[0], systems[0], float(start))
        asks += _conversation(rng, systems[rng.choice(5, p=zipf(5))], first, 6, (2.0, 30.0))
    return asks


def documents(rng: np.random.Generator) -> list[Ask]:
    """Long documents that are read once, between few-shot headers that come again."""
    headers = [ids(rng, 2000) for _ in range(12)]
    asks, chances = [], zipf(len(headers))
    for start in np.cumsum(rng.exponential(0.5, 600)):
        if rng.random() < 0.3:
            prompt = ids(rng, rng.integers(3000, 16000))
        else:
            header = headers[rng.choice(len(headers), p=chances)]
            prompt = np.concatenate((header, ids(rng, rng.integers(40, 200))))
        asks.append(Ask(prompt, ids(rng, 8), float(start)))
    return asks


def prefixes(rng: np.random.Generator) -> list[Ask]:
    """Zipf over 500 prefixes of 200 to 8,000 tokens."""
    found = [ids(rng, tokens) for tokens in rng.integers(200, 8001, 500)]
    asks, chances = [], zipf(len(found))
    for start in np.cumsum(rng.exponential(0.2, 1500)):
        prefix = found[rng.choice(len(found), p=chances)]
        asks.append(Ask(np.concatenate((prefix, ids(rng, 64))), ids(rng, 8), float(start)))
    return asks


def modules(rng: np.random.Generator) -> list[Ask]:
    """Prompts in PML, of five modules each out of 300 of 50 to 4,000 tokens."""
    sizes = np.exp(rng.uniform(np.log(50), np.log(4000), 300)).astype(int)
    asks, chances = [], zipf(len(sizes))
    for start in np.cumsum(rng.exponential(0.3, 1000)):
        chosen = sorted(rng.choice(len(sizes), 5, replace=False, p=chances).tolist())
        imports = tuple((f"m{index}", int(sizes[index])) for index in chosen)
        asks.append(Ask(ids(rng, 60), ids(rng, 8), float(start), modules=imports))
    return asks


def job(rng: np.random.Generator) -> list[Ask]:
    """A planned job of two levels: 8 instructions, 12 documents below each, 16 questions each."""
    asks: list[Ask] = []
    for _ in range(8):
        instruction = ids(rng, 1500)
        for _ in range(12):
            document = np.concatenate((instruction, ids(rng, rng.integers(300, 3000))))
            for _ in range(16):
                prompt = np.concatenate((document, ids(rng, 50)))
                group = len(asks) // 16
                asks.append(Ask(prompt, ids(rng, 8), group=group, group_prefix=len(document)))
    return asks


TRACES = {
    "agents-at-once": Trace(agents_at_once, (16384, 20480, 32768)),
    "agents": Trace(agents, (24576, 32768, 65536)),
    "drift": Trace(drift, (24576, 32768, 65536)),
    "documents": Trace(documents, (24576, 49152, 98304)),
    "prefixes": Trace(prefixes, (65536, 262144, 524288)),
    "modules": Trace(modules, (32768, 65536, 131072)),
    "job": Trace(job, (8192, 16384)),
}
