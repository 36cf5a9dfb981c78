"""What rank 0 sends the others: calls, and steps, whole or as the change to the one before.

From step to step a decoding row goes one token further, and now and then takes a page. So most
messages hold only these pages, and on a CPU the tokens. Other ranks edit the same arrays alike.
They know no requests.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from onestem.engine.step.inputs import NewPages, StepInputs
from onestem.ops import AttentionPlan, StateRows, windowed
from onestem.ops.plan import MOVED_FIELDS, RUN_FIELDS, SPAN_FIELDS

# Tokens that are on the device (-1: no step, but a call), page size (0: an advance), and the
# lengths of the arrays, in their order.
HEAD = struct.Struct("=14q")
CALL = HEAD.pack(-1, *[0] * 13)


@dataclass(frozen=True)
class CallMessage:
    """A method to call: of `Follower`, without its underscore, or else of its `Runner`."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def call(name: str, *arguments: Any, **options: Any) -> bytes:
    """The message for a `CallMessage`."""
    return CALL + pickle.dumps((name, arguments, options), pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, eq=False)
class StepMessage:
    """A step, as a runner takes it.

    Attributes:
        num_device_ids: number of first rows whose tokens only rank 0 has, on its device.
    """

    inputs: StepInputs
    new_pages: NewPages | None
    num_device_ids: int


def whole(inputs: StepInputs, ids: Tensor | None) -> bytes:
    """The message for a whole step. `ids`: as `Runner.run` takes them."""
    plan, states = next(iter(inputs.plans.values())), inputs.states
    rows = [inputs.token_ids, inputs.positions, inputs.slots, inputs.logit_rows, inputs.score_rows]
    parts = np.zeros((0, 5), np.int32) if states is None else states.table()
    return _message(
        ids,
        plan.page_size,
        [*rows, np.array(inputs.copies, np.int64)],
        [plan.run_pages, plan.runs, plan.spans, plan.row_position, plan.moved, parts],
    )


def advance(inputs: StepInputs, new_pages: NewPages, ids: Tensor | None) -> bytes:
    """The message for a step as the change to the one before."""
    tokens = inputs.token_ids if ids is None else inputs.token_ids[:0]
    return _message(ids, 0, [tokens, new_pages.runs, new_pages.page_index, new_pages.pages], [])


def _message(
    ids: Tensor | None, page_size: int, long: list[np.ndarray], short: list[np.ndarray]
) -> bytes:
    """Pack arrays. Those of int64 come before those of int32, so that each is aligned."""
    arrays = [*long, *short]
    sizes = [array.size for array in arrays] + [0] * (12 - len(arrays))
    head = HEAD.pack(0 if ids is None else len(ids), page_size, *sizes)
    return b"".join((head, *(array.tobytes() for array in arrays)))


class Reader:
    """The receiving end: keeps the arrays of the step before.

    Args:
        windows: of the model's layers.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._windows = set(windows)
        self._inputs: StepInputs

    def read(self, message: bytes) -> StepMessage | CallMessage:
        """The step or call of a message."""
        num_ids, page_size, *sizes = HEAD.unpack_from(message)
        if num_ids < 0:
            return CallMessage(*pickle.loads(message[HEAD.size :]))
        body, at = bytearray(message), HEAD.size

        def take(size: int, dtype: type) -> np.ndarray:
            nonlocal at
            array: np.ndarray = np.frombuffer(body, dtype, size, at)
            at += array.nbytes
            return array

        if not page_size:
            tokens, *taken = (take(size, np.int64) for size in sizes[:4])
            new_pages = NewPages(*taken)
            self._inputs.token_ids[: len(tokens)] = tokens
            self._inputs.advance(new_pages)
            return StepMessage(self._inputs, new_pages, num_ids)
        ids, positions, slots, logit_rows, score_rows, copies = (
            take(n, np.int64) for n in sizes[:6]
        )
        run_pages, runs, spans, row_position, moved, parts = (take(n, np.int32) for n in sizes[6:])
        plan = AttentionPlan(
            page_size=page_size,
            run_pages=run_pages,
            runs=runs.reshape(-1, len(RUN_FIELDS)),
            spans=spans.reshape(-1, len(SPAN_FIELDS)),
            row_position=row_position,
            moved=moved.reshape(-1, len(MOVED_FIELDS)),
        )
        plans = {window: windowed(plan, window) for window in self._windows}
        self._inputs = StepInputs(
            ids,
            positions,
            slots,
            plans,
            logit_rows,
            [],
            score_rows,
            [],
            shared_read_tokens=0,
            states=StateRows(*parts.reshape(-1, 5).T) if len(parts) else None,
            copies=[(taken, given) for taken, given in copies.reshape(-1, 2).tolist()],
        )
        return StepMessage(self._inputs, None, num_ids)
