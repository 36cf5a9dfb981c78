"""Other ranks know a step by rank 0's message alone: a symbolic model that reads messages sees
every key that the engine's own sees."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from onestem.engine.step.inputs import NewPages, StepInputs
from onestem.ops import PlanBuilder, StateRows
from onestem.parallel.lead import LeadRunner
from onestem.parallel.messages import HEAD, CallMessage, Reader, StepMessage, advance, call, whole
from tests.engine.harness import assert_idle
from tests.engine.symbolic import SymbolicRunner, alone, make_symbolic, request
from tests.soak import seeds


class LedTeam:
    """A rank in the same thread, which knows messages alone."""

    def __init__(self, num_slots: int) -> None:
        self.runner = SymbolicRunner(num_slots)
        self.reader = Reader(self.runner.windows)
        self.sizes: dict[bool, list[int]] = {True: [], False: []}  # of messages: whole, or not
        self.blocks: list[np.ndarray] = []

    def send(self, message: bytes) -> None:
        step = self.reader.read(message)
        assert isinstance(step, StepMessage)
        self.sizes[step.new_pages is None].append(len(message))
        assert not self.blocks, "logits that rank 0 has not made"
        logits = self.runner.run(step.inputs, None, None)
        self.blocks = [block.numpy() for block in [*logits.samples, *logits.scored]]

    def failed(self, error: Exception) -> Exception:
        return error

    def check(self) -> None:
        pass


class LedRunner(LeadRunner):
    """Compares each block of logits with that of the other rank."""

    def each(self, blocks):
        for block in super().each(blocks):
            np.testing.assert_array_equal(block.numpy(), self._team.blocks.pop(0))
            yield block


def led_engine(rng: random.Random, depth: int, page_size: int | None = None):
    num_pages, page_size = rng.choice([40, 150]), page_size or rng.choice([1, 2, 4])
    engine = make_symbolic(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=40,
        max_step_tokens=rng.choice([3, 16, 512]),
    )
    own = engine.launcher.runner
    own.decoder = engine.weights.decoder
    own.depth = depth
    team = LedTeam(num_pages * page_size)
    engine.launcher.runner = LedRunner(own, team)
    return engine, team


@pytest.mark.steps_fail
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_random_traffic(seed: int, depth: int) -> None:
    """With aborts, memory for few, and samplers that fail before all logits are made."""
    rng = random.Random(seed)
    engine, team = led_engine(rng, depth)
    shared = [rng.randrange(8) for _ in range(12)]
    waiting = [
        request(
            name,
            shared[: rng.randrange(13)] + [rng.randrange(8) for _ in range(rng.randrange(1, 8))],
            max_tokens=rng.randrange(1, 20),
            n=rng.choice([1, 1, 3]),
            **({"prompt_logprobs": 1} if rng.random() < 0.2 else {}),
        )
        for name in range(24)
    ]
    asked, outputs, aborted = list(waiting), {}, set()
    launch = engine.launcher.sampler.launch

    def failing(logits, step):
        if rng.random() < 0.02:
            raise RuntimeError("a sampler that fails")
        return launch(logits, step)

    engine.launcher.sampler.launch = failing
    while waiting or engine.has_unfinished():
        while waiting and rng.random() < 0.4:
            engine.add_request(waiting.pop())
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
        name = str(rng.randrange(24))
        if rng.random() < 0.02 and name not in outputs and engine.abort(name) is not None:
            aborted.add(name)
    assert_idle(engine)
    assert outputs.keys() | aborted == {one.request_id for one in asked}
    for one in asked:
        if one.request_id not in aborted:
            assert outputs[one.request_id].outputs == alone(one, 40)[0]
    assert all(team.sizes.values()), "both kinds of messages were there"


def test_a_message_of_decodes_has_their_tokens_and_pages_alone():
    engine, team = led_engine(random.Random(0), 1, page_size=16)
    for i in range(8):
        engine.add_request(request(i, [1, 2, 3, i], max_tokens=30))
    while engine.has_unfinished():
        engine.step()
    small, large = team.sizes[False], team.sizes[True]
    assert len(small) > len(large)
    # The head, a token for each row; no more than three numbers for each that takes a page.
    assert max(small) <= HEAD.size + 8 * 8 + 3 * 8 * 8
    assert min(small) == HEAD.size + 8 * 8


def test_states_and_their_copies():
    """Of decodes they go further with each step."""
    table = np.array([[0, 1, 9, 4, 4], [1, 1, 7, 2, 2], [2, 30, 0, -1, 5]], np.int32)
    builder, rows = PlanBuilder(4), np.zeros(32, np.int64)
    plans = {None: builder.build(rows)}
    inputs = StepInputs(rows, rows, rows, plans, rows[:3], [], rows[:0], [], 0)
    reader = Reader([None])
    assert reader.read(whole(inputs, None)).inputs.states is None
    inputs = replace(inputs, states=StateRows(*table.T), copies=[(5, 3), (5, 0)])
    found = reader.read(whole(inputs, None)).inputs
    np.testing.assert_array_equal(found.states.table(), table)
    assert found.copies == [(5, 3), (5, 0)]
    found.states.check(32, 6)
    inputs = replace(inputs, states=StateRows(*table[:2].T.copy()), copies=())
    reader.read(whole(inputs, None))
    none = NewPages(*np.zeros((3, 0), np.int64))
    for further in (1, 2):
        found = reader.read(advance(inputs, none, None)).inputs
        assert found.states.position.tolist() == [9 + further, 7 + further]
        assert not found.copies


def test_calls():
    assert Reader(()).read(call("load", "path", {"a": 1})) == CallMessage(
        "load", ("path", {"a": 1}), {}
    )
    options = Reader(()).read(call("release_weights", keep=True))
    assert options == CallMessage("release_weights", (), {"keep": True})
