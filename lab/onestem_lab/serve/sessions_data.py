"""Agents' sessions from BFCL's multi-turn data (the package `bfcl-eval`): what is asked, which
calls answer it, and results of drawn lengths. Everything comes from a seed.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onestem_lab.serve.bfcl_data import as_schema, data_folder

__all__ = [
    "Answer",
    "Call",
    "Conversation",
    "Plan",
    "Sizes",
    "Source",
    "Turn",
    "coding",
    "research",
    "users",
]

Json = dict[str, Any]
DOCS = ("gorilla_file_system", "math_api", "message_api", "ticket_api", "posting_api",
        "trading_bot", "travel_booking", "vehicle_control")  # fmt: skip
QUESTIONS = "BFCL_v4_multi_turn_long_context.json"
SHORTEST = 20  # tokens of a tool's result


@dataclass(frozen=True)
class Call:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """What the model is made to write."""

    thought: str
    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Turn:
    """What is sent, the user's words or a result for each call before it, and what is answered.

    Attributes:
        number: of all turns, from 0.
    """

    number: int
    user: str
    results: tuple[str, ...]
    answer: Answer


@dataclass(frozen=True)
class Conversation:
    """How a conversation begins: with a system prompt and tools, or as another one's first turns.

    Attributes:
        of, after: it branches from that conversation, after so many turns of its.
    """

    name: str
    system: str
    tools: tuple[Json, ...]
    of: str = ""
    after: int = 0


@dataclass
class Plan:
    """Conversations, and who says what when.

    Attributes:
        lanes: of each user, the turns one after the other: (conversation, turn).
    """

    conversations: dict[str, Conversation] = field(default_factory=dict)
    lanes: list[list[tuple[str, Turn]]] = field(default_factory=list)

    @property
    def turns(self) -> Iterator[Turn]:
        return (turn for lane in self.lanes for _, turn in lane)


@dataclass(frozen=True)
class Sizes:
    """How large sessions are.

    Attributes:
        turns: of the coding agent; others have a part of them.
        system_tokens: of its system prompt and tools together.
        result_tokens: of the longest result; lengths are log-uniform.
    """

    turns: int = 60
    system_tokens: int = 30_000
    result_tokens: int = 8000


class Source:
    """BFCL's texts and tasks.

    Args:
        count: tokens of a text.
    """

    def __init__(self, count: Callable[[str], int], seed: int = 0) -> None:
        data = data_folder()
        self._count, self._rng = count, random.Random(seed)
        self._docs = [doc for name in DOCS for doc in _lines(data / "multi_turn_func_doc", name)]
        questions = (data / QUESTIONS).read_text().splitlines()
        truths = (data / "possible_answer" / QUESTIONS).read_text().splitlines()
        self._tasks = [
            (json.loads(question), json.loads(truth)["ground_truth"])
            for question, truth in zip(questions, truths, strict=True)
        ]
        # What tools give back: the files, mails and orders that the tasks are about.
        self._text = "\n".join(json.dumps(task["initial_config"]) for task, _ in self._tasks)
        self._per_token = 20_000 / count(self._text[:20_000])
        self._at = 0
        self._number = 0

    def tools(self, tokens: int) -> tuple[Json, ...]:
        """The first tools that have so many tokens, at least one."""
        kept: list[Json] = []
        for doc in self._docs:
            tool = {name: doc[name] for name in ("name", "description")}
            tool["parameters"] = as_schema(doc["parameters"])
            tokens -= self._count(json.dumps(tool))
            if kept and tokens < 0:
                break
            kept.append(tool)
        return tuple(kept)

    def text(self, tokens: int) -> str:
        """About so many tokens that no other text of this source has in the same order."""
        size = max(1, round(tokens * self._per_token))
        self._number += 1
        made = f"{self._number}: "
        while len(made) < size:
            self._at = (self._at + 7919) % len(self._text)
            made += self._text[self._at : self._at + min(size - len(made), 4000)]
        return made

    def result(self, longest: int) -> str:
        """What a tool gives back."""
        return self.text(round(SHORTEST * (longest / SHORTEST) ** self._rng.random()))

    def tasks(self, tools: Sequence[Json]) -> Iterator[tuple[str, list[Call]]]:
        """Questions and the calls that answer each, without end; only of these tools."""
        known = {tool["name"]: tool for tool in tools}
        mine = [
            (question[-1]["content"], calls)
            for task, truths in self._tasks
            for question, truth in zip(task["question"], truths, strict=True)
            if (calls := _calls(truth, known))
        ]
        while True:
            yield self._rng.choice(mine)

    def turns(self, tools: Sequence[Json], count: int, longest: int) -> list[Turn]:
        """So many turns: a question, calls one or two at a time, each with its result, an answer,
        and the next question."""
        made: list[Turn] = []
        for question, calls in self.tasks(tools):
            user, results, left = question, (), list(calls)
            while user or results:
                size = self._rng.choice((1, 1, 2))
                few = [] if len(made) + 1 == count else left[:size]
                left = left[size:]
                made.append(Turn(self._next(), user, results, self.answer(question, few)))
                if len(made) == count:
                    return made
                user, results = "", tuple(self.result(longest) for _ in few)
        raise AssertionError("tasks end")

    def again(self, turn: Turn) -> Turn:
        """A turn that is answered in another way, without calls."""
        return replace(turn, number=self._next(), answer=self.answer(f"Again: {turn.number}", []))

    def answer(self, question: str, calls: Sequence[Call]) -> Answer:
        words = question.split()
        some = " ".join(self._rng.choices(words, k=min(8, len(words))))
        thought = f"The user wants this:\n{some}."
        if not calls:
            return Answer(thought, f"That is done.\n\n* {some}")
        text = f"I call {calls[0].name} now." if self._rng.random() < 0.5 else ""
        return Answer(thought, text, tuple(calls))

    def _next(self) -> int:
        self._number += 1
        return self._number


# ----------------------------------------------------------------------------- shapes


def coding(source: Source, sizes: Sizes) -> Plan:
    """A coding agent, of whose turns two hand work to a sub-agent: the first has its system prompt
    and fewer tools, the second its tools and another system prompt."""
    tools = source.tools(sizes.system_tokens // 2)
    system = source.text(sizes.system_tokens - sum(map(_size_of(source), tools)))
    plan = Plan()
    own = source.turns(tools, sizes.turns, sizes.result_tokens)
    few = max(2, sizes.turns // 6)
    subs = [
        Conversation("sub-1", system, tools[: max(1, len(tools) // 2)]),
        Conversation("sub-2", source.text(sizes.system_tokens // 20), tools),
    ]
    lane = [("main", turn) for turn in own]
    for place, sub in enumerate(subs):
        at = (place + 1) * len(lane) // 3
        turns = source.turns(sub.tools, few, sizes.result_tokens)
        lane[at:at] = [(sub.name, turn) for turn in turns]
    for one in (Conversation("main", system, tools), *subs):
        plan.conversations[one.name] = one
    plan.lanes.append(lane)
    return plan


def research(source: Source, sizes: Sizes) -> Plan:
    """A research agent. Two branches leave the middle of a conversation: one asks something else,
    the other has a turn answered again. The first is branched once more, and all go on in turns."""
    tools = source.tools(sizes.system_tokens // 10)
    system = source.text(sizes.system_tokens // 10)
    half, longest = max(2, sizes.turns // 6), sizes.result_tokens // 2
    plan = Plan(lanes=[[]])
    said: dict[str, list[Turn]] = {}

    def begin(name: str, of: str = "", after: int = 0) -> None:
        plan.conversations[name] = Conversation(name, system, tools, of, after)
        said[name] = said[of][:after] if of else []

    def say(name: str, turn: Turn) -> None:
        plan.lanes[0].append((name, turn))
        said[name].append(turn)

    def talk(*names: str) -> None:
        each = [source.turns(tools, half, longest) for _ in names]
        for turns in zip(*each, strict=True):
            for name, turn in zip(names, turns, strict=True):
                say(name, turn)

    begin("trunk")
    talk("trunk")
    begin("asks", "trunk", _answered(said["trunk"], half // 2))
    begin("again", "trunk", half // 2)
    say("again", source.again(said["trunk"][half // 2]))
    talk("trunk", "asks", "again")
    begin("twig", "asks", _answered(said["asks"], len(said["asks"]) - half // 2))
    talk("asks", "twig")
    return plan


def _answered(turns: Sequence[Turn], near: int) -> int:
    """The number of turns after which nothing is called, nearest to `near`."""
    ends = [place + 1 for place, turn in enumerate(turns) if not turn.answer.calls]
    return min(ends, key=lambda end: abs(end - near))


def users(source: Source, sizes: Sizes, count: int = 4) -> Plan:
    """Users of one application, all at the same time."""
    tools = source.tools(sizes.system_tokens // 10)
    system = source.text(sizes.system_tokens // 10)
    plan = Plan()
    for number in range(count):
        name = f"user-{number}"
        plan.conversations[name] = Conversation(name, system, tools)
        turns = source.turns(tools, max(2, sizes.turns // 5), sizes.result_tokens // 4)
        plan.lanes.append([(name, turn) for turn in turns])
    return plan


# ----------------------------------------------------------------------------- BFCL's forms


def _lines(folder: Path, name: str) -> list[Json]:
    return [json.loads(line) for line in (folder / f"{name}.json").read_text().splitlines()]


def _size_of(source: Source) -> Callable[[Json], int]:
    return lambda tool: source._count(json.dumps(tool))


def _calls(truth: Sequence[str], tools: dict[str, Json]) -> list[Call]:
    """BFCL's calls, written as in Python; none if one of them is of no tool here."""
    made = []
    for text in truth:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        tool = tools.get(call.func.id)
        if tool is None:
            return []
        names = list(tool["parameters"]["properties"])
        given = dict(zip(names, map(ast.literal_eval, call.args)))
        given |= {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
        made.append(Call(call.func.id, json.dumps(given, ensure_ascii=False)))
    return made
