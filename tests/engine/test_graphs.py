"""The runner of a GPU without one: a graph's replay is the forward pass that would be captured,
with Triton's kernels under their interpreter. Tested is what the host does: which steps take the
fixed buffers, and what stands in them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from onestem.engine import engine as engines
from onestem.engine.engine import Engine
from onestem.engine.step import graphs
from onestem.engine.step.inputs import StepInputs
from onestem.engine.step.runner import Runner
from onestem.models.weights import load_decoder
from onestem.ops.triton import Kernels, TritonAttention, Workspace
from tests.engine.harness import (
    TOLERANCE,
    answer,
    engine_with,
    make_engine,
    oracle_logprobs,
    record_logprobs,
    requests_for,
)
from tests.engine.test_repair import prompt_of, request_of
from tests.ops.in_order import add_in_order
from tests.soak import soaked

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py has true graphs")

OPTIONS = {"num_pages": 64, "page_size": 4}


class Replayed(graphs.GraphRunner):
    """`replays`: the shape of each graph that was replayed; `words`: of the lists that fitted;
    `joined`: how many of those walk short runs as one."""

    def __init__(self, *args, **options) -> None:
        self.replays: list[graphs.GraphShape] = []
        self.words: list[int] = []
        self.joined = 0
        super().__init__(*args, **options)
        self.depth = 1

    def write_lists(self, inputs: StepInputs) -> bool:
        fits = super().write_lists(inputs)
        if fits:
            plan = next(iter(inputs.plans.values()))
            lists = [space.work for space in self.workspaces[plan.page_size].values()]
            self.words.extend(work.num_words for work in lists)
            self.joined += sum(len(work.pages) > len(work.plan.run_pages) for work in lists)
        return fits

    def capture(self, shape: graphs.GraphShape):
        hidden = torch.empty(shape.rows, self.decoder.config.hidden_size)

        @torch.inference_mode()
        def replay() -> None:
            self.replays.append(shape)
            made = self.fixed_forward(shape)  # of rows that all choose none are read
            hidden[: len(made)].copy_(made)

        return SimpleNamespace(graph=SimpleNamespace(replay=replay), hidden=hidden)


@pytest.fixture
def with_graphs(tiny, monkeypatch: pytest.MonkeyPatch):
    """Makes engines whose work lists may take so many words."""

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "BATCH_SIZES", (1, 2, 4))
    monkeypatch.setattr(engines, "make_runner", Replayed)

    def make(
        max_words: int, family: str = "llama", sizes: dict[str, int] = OPTIONS, **more: bool
    ) -> Engine:
        def workspace(*made, **options) -> Workspace:
            return Workspace(*made, **{**options, "max_words": max_words})

        monkeypatch.setattr(graphs, "Workspace", workspace)
        decoder = load_decoder(tiny(family), dtype=torch.float32, device="cpu", **more)
        return engine_with(decoder, impl="triton", **sizes, **more)

    return make


HEAD = list(range(5, 14))
PROMPTS = ([*HEAD, 20], [*HEAD, 30, 31], [*HEAD, *range(40, 52)])

LONG = (list(range(5, 45)), [*range(5, 45), 50])


def tokens(engine: Engine, prompts: tuple[list[int], ...] = PROMPTS) -> list[list[int]]:
    """Of requests that end one after the other."""
    for i, ids in enumerate(prompts):
        (request,) = requests_for([ids], max_tokens=3 + i)
        engine.add_request(dataclasses.replace(request, request_id=str(i)))
    found = {}
    while engine.has_unfinished():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return [found[str(i)] for i in range(len(prompts))]


def test_a_work_list_that_the_fixed_buffers_do_not_hold(with_graphs, tiny) -> None:
    """Some steps' do not fit, some do: the tokens are the same."""
    want = tokens(make_engine(tiny("llama"), impl="torch", **OPTIONS))
    roomy = with_graphs(1 << 16)
    assert tokens(roomy) == want
    small = with_graphs(max(roomy.launcher.runner.words) - 1)
    assert tokens(small) == want
    assert 0 < len(small.launcher.runner.replays) < len(roomy.launcher.runner.replays)


def test_states_of_rows_are_in_the_fixed_buffers(with_graphs, tiny) -> None:
    """Decodes of forks too, and steps with few rows of a prompt; others have no graph."""
    want = make_engine(tiny("qwen3_5"), impl="torch", **OPTIONS)
    found = with_graphs(1 << 16, "qwen3_5")
    requests = requests_for(PROMPTS[:2], max_tokens=6, n=2, temperature=1.0, seed=3)
    outputs = [answer(engine, requests) for engine in (want, found)]
    for name, output in outputs[0].items():
        for one, other in zip(output.outputs, outputs[1][name].outputs, strict=True):
            assert one.token_ids == other.token_ids
    steps = found.stats.steps
    assert 0 < len(found.launcher.runner.replays) < steps


def test_steps_with_the_widest_tiles_have_graphs_of_their_own(
    with_graphs, tiny, monkeypatch
) -> None:
    """A step of 40 rows of a prompt has such items, decodes have none. Sleep takes lists back."""
    want = tokens(make_engine(tiny("llama"), impl="torch", **OPTIONS), LONG)
    monkeypatch.setattr(graphs, "BATCH_SIZES", (1, 2, 4, 64))
    attend, launches = Kernels._attend, []

    def recorded(self, wide, tensors, scores):
        launches.append((len(tensors[1]), bool(wide)))
        attend(self, wide, tensors, scores)

    monkeypatch.setattr(Kernels, "_attend", recorded)
    engine = with_graphs(1 << 16)
    assert tokens(engine, LONG) == want
    runner, wide = engine.launcher.runner, graphs.GraphShape(64, True, page_size=4)
    assert {shape for shape in runner.replays if shape.rows == 64} == {wide}
    assert {shape.wide for shape in runner.replays if shape.rows < 64} == {False}
    # A kernel without the widest tiles, and one with them where a graph is for both.
    assert set(launches) == {(64, True), (64, False), (2, False), (1, False)}
    launches.clear()
    runner.fixed_forward(graphs.GraphShape(64, False, page_size=4))
    assert set(launches) == {(64, False)}
    replays = len(runner.replays)
    runner.release_pages()
    runner.restore_pages()
    runner.warm_up()
    sizes = {graphs.GraphShape(size, False, page_size=4) for size in (1, 2, 4, 64)}
    assert set(runner.graphs) == sizes | {wide}
    assert len(runner.replays) == replays
    for space in runner.workspaces[OPTIONS["page_size"]].values():
        assert torch.count_nonzero(space.control) == 1  # the place of the records


@pytest.mark.parametrize("lengths", [(5, 2, 3), soaked((4, 4, 8))], ids=str)
def test_a_tree_of_short_runs(with_graphs, tiny, lengths) -> None:
    """Whole pages, and pages that the parts of a cut run share: decodes walk such runs as one."""
    a, b, c = (list(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths, 2))
    prompts = ([*a, *b, *c, 90, 91], [*a, *b, *c, 92], [*a, *b, 93], [*a, 94])
    want = tokens(make_engine(tiny("llama"), impl="torch", **OPTIONS), prompts)
    engine = with_graphs(1 << 16)
    assert tokens(engine, prompts) == want
    assert engine.launcher.runner.joined > 0


@pytest.mark.parametrize(
    ("family", "repair", "page_size"),
    [("llama", 0.5, 16), soaked("gemma3", 0.0, 4), soaked("llama", 0.0, 4)],
)
def test_moved_rows_are_in_the_fixed_buffers(
    with_graphs, tiny, monkeypatch, family, repair, page_size
) -> None:
    """Each distance at which a row sees modules is one more query. Prompts have graphs, also over
    parts of pages, and few rows that choose, which choose the same by fewer layers."""
    monkeypatch.setattr(graphs, "BATCH_SIZES", (1, 2, 4, 16, 80))
    monkeypatch.setattr(graphs, "OFTEN", 0)
    monkeypatch.setattr(TritonAttention, "head_major", lambda *_: False)  # its pages have no parts
    attended = graphs.GraphRunner.attended

    def compared(self, inputs) -> torch.Tensor:
        found, inputs = attended(self, inputs), dataclasses.replace(inputs, all_choose=False)
        launched = Runner.run(self, inputs, Runner.prepare(self, inputs, None), None)
        torch.testing.assert_close(found, launched.attended, atol=1e-5, rtol=1e-5)
        return found

    monkeypatch.setattr(graphs.GraphRunner, "attended", compared)
    orders = ((0, 4, 2), (0, 2, 4), (4, 2, 0), (2, 4, 4))
    requests = [
        request_of(str(i), prompt_of(order, repair), max_tokens=3 + i)
        for i, order in enumerate(orders)
    ]
    sizes = {"num_pages": 1024 // page_size, "page_size": page_size}
    want = make_engine(tiny(family), impl="torch", **sizes)
    found = with_graphs(1 << 16, family, sizes)
    outputs = []
    for engine in (want, found):
        alone = answer(engine, requests[:1]) | answer(engine, requests[1:2])
        outputs.append(alone | answer(engine, requests[1:]))
    for name, output in outputs[0].items():
        assert outputs[1][name].outputs[0].token_ids == output.outputs[0].token_ids
    shapes = set(found.launcher.runner.replays)
    assert any(shape.queries and shape.rows == 4 and not shape.chooses for shape in shapes)
    prompts = {one.page_size for one in shapes if one.queries and one.rows > 4 and not one.chooses}
    assert min(prompts) == min(page_size, 8)
    assert any(shape.queries and shape.chooses for shape in shapes) == (repair > 0)
    assert any(shape.chooses and shape.all_choose for shape in shapes) == (repair > 0)


def test_what_is_done_to_scores_reaches_the_kernels(with_graphs, tiny) -> None:
    """A scale of its own and a softcap, against transformers."""
    engine = with_graphs(1 << 16, "gemma2")
    found = record_logprobs(engine)
    output = answer(engine, requests_for([[7, 8, 9]], max_tokens=2))["0"].outputs[0]
    assert engine.launcher.runner.replays
    want = oracle_logprobs(tiny("gemma2"), [7, 8, 9, *output.token_ids])
    assert len(found) == 2
    for (_, _, index), values in found.items():
        assert (values - want[index]).abs().max() < TOLERANCE


def test_lists_on_the_grid_change_no_bit(with_graphs, tiny, monkeypatch) -> None:
    """Decodes that go on behind a segment's end, by lists that grow and by lists made each time,
    beside others and alone."""
    add_in_order(monkeypatch)
    prompts = [list(range(3, 130 - i)) for i in range(2)]
    advance, advanced = Workspace.advance, []

    def counted(self, *given) -> None:
        advanced.append(self.work.room)
        advance(self, *given)

    monkeypatch.setattr(Workspace, "advance", counted)
    found = []
    for asked in (prompts, prompts[:1]):
        engine = with_graphs(1 << 16, deterministic=True)
        seen = record_logprobs(engine)
        answer(engine, requests_for(asked, max_tokens=4))
        found.append({key: values.view(torch.int32) for key, values in seen.items()})
    assert advanced
    assert all(room > 0 for room in advanced)
    beside, alone = found
    assert len(alone) == 4
    assert all(torch.equal(values, beside[key]) for key, values in alone.items())
