"""What of a session's prompts an engine has to compute, and what it need not have computed.

A token is known where the engine has computed it, in a prompt or in an answer, behind the same
tokens. The last token of an answer has never been computed. A request computes at least the last
token of its prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onestem.request import Request, Rerendered
from onestem.server.records.rerendered import kind_of
from onestem_lab.serve.sessions_server import Told

__all__ = ["Asked", "Form", "figures", "total"]

Ids = NDArray[np.int32]
SHOWN = 16  # tokens that a cause is read from


@dataclass(kw_only=True)
class Asked:
    """A request.

    Attributes:
        before: the request whose answer it goes on from; None: it begins a conversation.
        told: what the engine said of it.
        prompt_tokens, cached: as its `usage` says.
    """

    before: Asked | None
    told: Told
    prompt_tokens: int
    cached: int
    prompt: Ids = field(init=False)
    stored: Ids = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.told.prompt, np.int32)
        self.stored = np.concatenate([self.prompt, np.asarray(self.told.answer[:-1], np.int32)])

    def origin(self, at: int) -> Asked | None:
        """The request of its conversation in whose answer token `at` of `stored` is."""
        one: Asked | None = self
        while one is not None:
            prefilled = len(one.prompt) - one.told.prefilled
            if one.before is None or at >= len(one.before.stored):
                return one if at >= prefilled else None
            one = one.before
        return None


@dataclass(frozen=True)
class Form:
    """How prompts are written.

    Attributes:
        header: ids of what begins an answer, in a prompt's end and in its history.
        end: id of what ends it.
        decode: the text of token ids.
    """

    header: tuple[int, ...]
    end: int
    decode: Callable[[Sequence[int]], str]

    def answered(self, prompt: Ids) -> int:
        """Index of the token that ends the last answer in a prompt: what follows is new."""
        first = self.header[0]
        places = np.flatnonzero(prompt == first)
        size = len(self.header)
        heads = [at for at in places.tolist() if tuple(prompt[at : at + size]) == self.header]
        ends = np.flatnonzero(prompt[heads[-2] :] == self.end)
        return heads[-2] + int(ends[0])


def figures(asked: Sequence[Asked], form: Form) -> dict[str, Any]:
    """Of requests that share what they can, and nothing with others:

    `tree`: distinct tokens of all prompts. `distinct`: those that the engine has not sampled
    itself. `least`: with the last token of each prompt that was known as a whole. `computed`, and
    `rerendered`: of `distinct`, by cause, tokens that were in a conversation before and are there
    again, behind others. `usage_differs`: requests whose cached tokens are not what the tree says.
    """
    known: list[tuple[Ids, bool]] = []
    tree = distinct = least = differs = 0
    causes: Counter[str] = Counter()
    events = [(one.told.begun, False, one) for one in asked]
    events += [(one.told.ended, True, one) for one in asked]
    for _, has_ended, one in sorted(events, key=lambda event: event[:2]):
        if has_ended:
            known.append((one.stored, True))
            continue
        each = [(_common(other, one.prompt), is_end) for other, is_end in known]
        prompts = max((size for size, is_end in each if not is_end), default=0)
        common = max((size for size, _ in each), default=0)
        cached = min(common, len(one.prompt) - 1)
        tree += len(one.prompt) - prompts
        distinct += len(one.prompt) - common
        least += len(one.prompt) - cached
        differs += (one.prompt_tokens, one.cached) != (len(one.prompt), cached)
        if one.before is not None:
            lost = form.answered(one.prompt) - common
            if lost > 0:
                causes[_cause(one, form)] += lost
        known.append((one.prompt, False))
    computed = sum(one.told.computed for one in asked)
    return {
        "requests": len(asked),
        "prompt_tokens": sum(len(one.prompt) for one in asked),
        "longest": max(len(one.prompt) for one in asked),
        "tree": tree,
        "distinct": distinct,
        "least": least,
        "computed": computed,
        "cached": sum(one.told.cached for one in asked),
        "rerendered": dict(causes.most_common()),
        "usage_differs": differs,
        "ratio": computed / distinct,
        "ratio_as_written": computed / (distinct - causes.total()),
    }


def _common(a: Ids, b: Ids) -> int:
    """How many leading tokens are the same."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def _cause(one: Asked, form: Form) -> str:
    """Why a prompt departs from what its conversation was."""
    assert one.before is not None
    before = one.before
    at = _common(before.stored, one.prompt)
    origin = before.origin(at)
    if origin is None:
        return "prompt"
    earlier, now = before.stored[at : at + SHOWN], one.prompt[at : at + SHOWN]
    prefilled = origin.told.prefilled
    begins = len(origin.prompt) - prefilled
    rerendered = Rerendered(at=at, num_tokens=0, offset=at - begins, earlier=())
    request = Request(request_id="", prompt_token_ids=[0], prefilled_tokens=prefilled)
    return kind_of(rerendered, request, form.decode(earlier.tolist()), form.decode(now.tolist()))


def total(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of several parts that share nothing."""
    names = ("requests", "prompt_tokens", "tree", "distinct", "least", "computed", "cached",
             "usage_differs")  # fmt: skip
    sums = {name: sum(one[name] for one in each) for name in names}
    lost = sum(sum(one["rerendered"].values()) for one in each)
    return {**sums, "ratio": sums["computed"] / sums["distinct"],
            "ratio_as_written": sums["computed"] / (sums["distinct"] - lost)}  # fmt: skip
