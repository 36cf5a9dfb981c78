"""The order of rows, edited in place, is what it is when made anew, in every step."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
import torch

from onestem.engine.engine import Engine
from onestem.engine.sampling.pending import Pending
from onestem.engine.step.batch_rows import BatchRows
from onestem.request import Request
from tests.engine.harness import answer, assert_idle, make_engine, requests_for, shared_prompts
from tests.engine.symbolic import VOCAB, drain, make_symbolic, request, run_all
from tests.soak import seeds


def at_depth(engine: Engine, depth: int) -> Engine:
    engine.launcher.runner.depth = depth
    return engine


def made_anew(engine: Engine) -> Engine:
    """The same with all rows laid out from their sequences at every step."""
    apply = engine.batch_rows.apply

    def rebuilt(changes):
        engine.batch_rows.rebuild()
        apply(changes)

    engine.batch_rows.apply = rebuilt
    return engine


class Watch:
    """Counts what happens to orders."""

    def __init__(self) -> None:
        self.rebuilds = self.inserted = 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    rebuild, insert = BatchRows.rebuild, BatchRows._insert

    def rebuilt(self, newcomers=()):
        watch.rebuilds += 1
        rebuild(self, newcomers)

    def inserted(self, group):
        found = insert(self, group)
        watch.inserted += len(group) * found
        return found

    monkeypatch.setattr(BatchRows, "rebuild", rebuilt)
    monkeypatch.setattr(BatchRows, "_insert", inserted)
    return watch


PARAMS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_p": 0.7, "seed": 9, "n": 3},
    {"temperature": 0.9, "top_k": 5, "seed": 2},
]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("share", ["full", "storage", "off"])
def test_answers_are_those_of_rows_made_anew(tiny, share: str, depth: int) -> None:
    requests = [
        one
        for k, fields in enumerate(PARAMS)
        for one in requests_for(shared_prompts(k), max_tokens=9 + 4 * k, **fields)
    ]
    requests = [replace(one, request_id=str(i)) for i, one in enumerate(requests)]
    plain = answer(made_anew(make_engine(tiny("llama"), share=share)), requests)
    found = answer(at_depth(make_engine(tiny("llama"), share=share), depth), requests)
    for name, output in plain.items():
        assert [o.token_ids for o in found[name].outputs] == [o.token_ids for o in output.outputs]
        assert [o.finish_reason for o in found[name].outputs] == [
            o.finish_reason for o in output.outputs
        ]


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_random_traffic_at_depth_two(seed: int) -> None:
    """Requests that come, end and are aborted while a step is in flight."""
    rng = random.Random(seed)
    engine = at_depth(make_symbolic(num_pages=rng.choice([24, 60, 200]), page_size=2), 2)
    shared = [rng.randrange(VOCAB) for _ in range(8)]
    requests = [
        request(
            i,
            shared[: rng.randrange(9)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))],
            max_tokens=rng.choice([1, 4, 15, 25]),
            temperature=rng.choice([0, 1.0]),
            seed=i,
            stop_token_ids=rng.choice([[], [3]]),
        )
        for i in range(12)
    ]
    outputs, aborted = under_traffic(engine, requests, rng, first=6, comes=0.2, upsets=0.05)
    assert sorted({**outputs, **aborted}) == sorted(one.request_id for one in requests)
    assert_as_alone(requests, outputs, aborted)


def under_traffic(
    engine: Engine, requests: list[Request], rng: random.Random, *, first: int, **odds: float
) -> tuple[dict, dict]:
    """Outputs of requests that finished, and of those that were aborted. All but the first come
    while others run; now and then one is aborted, or a step fails."""
    late, aborted = requests[first:], {}
    for one in requests[:first]:
        engine.add_request(one)

    def disturb(outputs: dict) -> None:
        while late and rng.random() < odds["comes"]:
            engine.add_request(late.pop())
        name = str(rng.randrange(len(requests)))
        if rng.random() < odds["upsets"] and name not in outputs:
            output = engine.abort(name)
            aborted.update({name: output} if output is not None else {})
        if rng.random() < odds["upsets"] and engine.has_unfinished():
            engine.launcher.runner.fail = KeyboardInterrupt()
            # A step that only takes what is in flight computes nothing that could fail.
            with contextlib.suppress(KeyboardInterrupt):
                outputs.update((o.request_id, o) for o in engine.step() if o.finished)
            engine.launcher.runner.fail = None

    outputs = drain(engine, each_step=disturb)
    while late:
        engine.add_request(late.pop())
        outputs |= drain(engine)
    assert_idle(engine)
    return outputs, aborted


def assert_as_alone(requests: list[Request], outputs: dict, aborted: dict) -> None:
    for one in requests:
        if one.request_id not in aborted:
            alone = made_anew(make_symbolic(num_pages=120, page_size=1, share="off"))
            want = run_all(alone, [one])[one.request_id].outputs
            assert outputs[one.request_id].outputs == want


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("share", ["full", "storage", "off"])
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_traffic_of_applications(watch: Watch, seed: int, share: str, depth: int) -> None:
    """Requests of several applications come, end and are aborted, in turn and within a step."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    engine = make_symbolic(
        num_pages=rng.choice([80, 200, 800]) // size,
        page_size=size,
        share=share,
        max_step_tokens=rng.choice([3, 16, 512]),
    )
    at_depth(engine, depth)
    heads = [[rng.randrange(VOCAB) for _ in range(n)] for n in (4, 9, 13)]
    heads.append([*heads[0], 1, 2, 3])
    requests = [_of_an_application(i, heads, rng) for i in range(30)]
    outputs, aborted = under_traffic(engine, requests, rng, first=5, comes=0.3, upsets=0.03)
    assert watch.inserted > 0
    assert_as_alone(requests, outputs, aborted)


def _of_an_application(number: int, heads: list[list[int]], rng: random.Random) -> Request:
    head = rng.choice(heads)
    shared = head[: rng.choice([len(head), rng.randrange(len(head) + 1)])]
    more = rng.choice([{}] * 20 + [{"n": 2}, {"presence_penalty": 0.5}])
    return request(
        number,
        shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))],
        max_tokens=rng.choice([1, 2, 4, 15, 25, 40]),
        temperature=rng.choice([0, 1.0]),
        seed=number,
        stop_token_ids=rng.choice([[], [], [3]]),
        stream=rng.random() < 0.5,
        **more,
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("model", "share"),
    [("llama", "full"), ("llama", "storage"), ("llama", "off"), ("qwen2_windows", "full")],
)
def test_who_joins_answers_as_alone(tiny, watch: Watch, model: str, share: str, depth: int) -> None:
    """Newcomers at every other step, with a real model."""
    requests = [
        replace(one, request_id=f"{k}-{one.request_id}")
        for k, fields in enumerate(PARAMS[:2] + PARAMS[3:])
        for one in requests_for(shared_prompts(k), max_tokens=30 + k, **fields)
    ]
    plain = answer(made_anew(make_engine(tiny(model), share=share)), requests)
    engine = at_depth(make_engine(tiny(model), share=share), depth)
    found, late = {}, requests[2:]
    for one in requests[:2]:
        engine.add_request(one)
    while engine.has_unfinished() or late:
        found |= {output.request_id: output for output in engine.step() if output.finished}
        if late and engine.scheduler.step % 2:
            engine.add_request(late.pop(0))
        engine.check()
    assert_idle(engine)
    assert watch.inserted > 5
    for name, output in plain.items():
        assert found[name].outputs[0].token_ids == output.outputs[0].token_ids


def shared_spans(engine: Engine) -> list[list[int]]:
    """First row and number of rows of each span that several rows see."""
    spans = engine.batch_rows.inputs.plans[None].spans
    return sorted(spans[spans[:, 1] > 1][:, :2].tolist())


def test_who_leaves_leaves_no_gap_and_who_comes_stands_with_its_like(watch: Watch) -> None:
    engine = make_symbolic(num_pages=400, page_size=2)
    head = [1, 2, 3, 4, 5]
    lengths = {0: 60, 1: 60, 2: 60, 3: 60, 4: 60, 5: 8}
    for number, most in lengths.items():
        engine.add_request(request(number, [*head, number], max_tokens=most))
    engine.add_request(request("other", [7, 7, 7], max_tokens=60))
    ended = []
    while not ended:
        ended = engine.step()
    assert [output.request_id for output in ended] == ["5"]
    engine.step()
    assert len(engine.batch_rows) == 6
    assert shared_spans(engine) == [[0, 5]]
    rebuilds = watch.rebuilds
    engine.add_request(request(6, [*head, 7, 0], max_tokens=20))
    for _ in range(4):
        engine.step()
    assert watch.rebuilds == rebuilds
    assert len(engine.batch_rows) == 7
    names = [s.state.request.request_id for s in engine.batch_rows.sequences]
    assert set(names[:6]) == set("012346")
    # All of them see the head through one span.
    assert shared_spans(engine) == [[0, 6]]
    drain(engine)


def test_newcomers_behind_several_prefixes_stand_with_their_like() -> None:
    """They come in turn, and each goes on with a token of an answer that is stored: those of a
    prefix read it through one span all the same."""
    engine = make_symbolic(num_pages=800, page_size=2)
    heads = [[one] * 80 for one in (1, 2)]
    stored = [[*head, i, i] for i in range(3, 7) for head in heads]
    run_all(engine, [request(f"s{i}", ids, max_tokens=2) for i, ids in enumerate(stored)])
    engine.add_request(request("long", [0], max_tokens=60))
    for _ in range(4):
        engine.step()
    requests = [request(i, [*ids[:-1], 0], max_tokens=30) for i, ids in enumerate(stored)]
    for one in requests:
        engine.add_request(one)
        engine.step()
    for _ in range(3):
        engine.step()
    spans = engine.batch_rows.inputs.plans[None].spans
    assert sorted(spans[spans[:, 4] == 80][:, 1].tolist()) == [4, 4]
    assert_as_alone(requests, drain(engine), {})


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_that_is_split_is_read_once(depth: int) -> None:
    """The first request alone holds what turns out to be a prefix of many: rows are made anew, so
    that the first reads it with them."""
    engine = at_depth(make_symbolic(num_pages=800, page_size=2), depth)
    head = [1, 2, 3, 4] * 25
    requests = [request(i, [*head, i, 5], max_tokens=14) for i in range(4)]
    for one in requests:
        engine.add_request(one)
        for _ in range(3):
            engine.step()
    assert shared_spans(engine) == [[0, 4]]
    assert_as_alone(requests, drain(engine), {})


def test_answers_longer_than_their_lists_of_pages() -> None:
    """Lists of page ids get more room now and then."""
    engine = make_symbolic(num_pages=800, page_size=1)
    requests = [request(i, [1, 2, i], max_tokens=60 + 7 * i) for i in range(5)]
    outputs = run_all(engine, requests)
    assert [len(outputs[str(i)].outputs[0].token_ids) for i in range(5)] == [60, 67, 74, 81, 88]
    assert_as_alone(requests, outputs, {})


def test_a_match_inside_a_running_answer_leaves_it_whole() -> None:
    """A newcomer splits a run that a row writes, and the row goes on."""
    want = run_all(make_symbolic(page_size=2), [request(0, [1, 2, 3, 4, 5, 6], max_tokens=40)])
    engine = at_depth(make_symbolic(num_pages=400, page_size=2), 2)
    engine.add_request(request(0, [1, 2, 3, 4, 5, 6], max_tokens=40))
    for _ in range(5):
        engine.step()
    splits = engine.scheduler.version
    engine.add_request(request(1, [1, 2, 3, 7], max_tokens=3))
    outputs = drain(engine)
    assert engine.scheduler.version > splits
    assert outputs["0"].outputs == want["0"].outputs


@pytest.mark.parametrize("depth", [1, 2])
def test_who_goes_on_from_a_running_answer_reads_it(depth: int) -> None:
    """What is computed of the answer is split off, and its sequence writes on behind."""
    first = request(0, [1, 2, 3], max_tokens=30)
    sampled = run_all(make_symbolic(), [first])["0"].outputs[0].token_ids
    engine = at_depth(make_symbolic(num_pages=400, page_size=2), depth)
    engine.add_request(replace(first, stream=True))
    count = 0
    while count < 6:
        count = sum(len(output.outputs[0].token_ids) for output in engine.step())
    second = request(1, [1, 2, 3, *sampled[: count + 1], 5], max_tokens=5)
    engine.add_request(second)
    outputs = drain(engine)
    # Of what the two have in common, the second computed what the first had not yet, and a token.
    assert outputs["1"].metrics.num_cached_tokens >= 3 + count - 1
    assert outputs["0"].outputs[0].token_ids == sampled
    assert outputs["1"].outputs == run_all(make_symbolic(), [second])["1"].outputs


def test_an_abort_leaves_the_others_running() -> None:
    engine = at_depth(make_symbolic(num_pages=400, page_size=8), 2)
    requests = [request(i, [1, 2, i], max_tokens=30) for i in range(8)]
    for one in requests:
        engine.add_request(one)
    for _ in range(6):
        engine.step()
    output = engine.abort("3")
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"
    sampled = output.outputs[0].token_ids
    outputs = drain(engine)
    whole = run_all(make_symbolic(num_pages=400), requests)
    assert sampled == whole["3"].outputs[0].token_ids[: len(sampled)]
    assert 3 <= len(sampled) <= 6
    assert all(outputs[n].outputs == whole[n].outputs for n in whole if n != "3")


def test_ends_and_pages(watch: Watch) -> None:
    """Rows that end are cut out; runs take pages on the way."""
    engine = make_symbolic(num_pages=400, page_size=2)
    lengths = [15] * 12 + [4, 6]
    requests = [request(i, [i % 5, 1, 2], max_tokens=n) for i, n in enumerate(lengths)]
    outputs = run_all(engine, requests)
    assert [len(outputs[str(i)].outputs[0].token_ids) for i in range(14)] == lengths
    assert watch.rebuilds == 1


def test_a_newcomer_is_admitted_at_once() -> None:
    engine = make_symbolic(num_pages=400, page_size=2)
    engine.add_request(request(0, [1, 2, 3], max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.add_request(request(1, [1, 2, 4], max_tokens=2))
    engine.step()
    assert len(engine.scheduler.running) == 2
    drain(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_all_sampling_options_in_one_step(depth: int) -> None:
    engine = at_depth(make_symbolic(num_pages=400, page_size=2), depth)
    options = [
        {"logprobs": 1},
        {"logprobs": 0, "temperature": 3.0},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 3},
        {"repetition_penalty": 1.7, "temperature": 1.0, "top_k": 3},
        {"logit_bias": {3: 1.0}, "temperature": 1.0, "top_p": 0.7},
        {"min_tokens": 7, "stop_token_ids": [0, 1, 2, 3]},
        {"temperature": 2.0, "min_p": 0.1},
        {},
    ]
    requests = [
        request(i, [i, 1, 2], max_tokens=12, seed=i, **fields) for i, fields in enumerate(options)
    ]
    outputs = run_all(engine, requests)
    assert_as_alone(requests, outputs, {})


def test_streamed_text_comes_with_each_step() -> None:
    engine = make_symbolic(num_pages=400, page_size=2)
    one = replace(request(0, [1, 2, 3], max_tokens=8), stream=True)
    engine.add_request(one)
    seen = []
    while engine.has_unfinished():
        seen += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert seen == list(range(1, 9))
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("at", range(1, 6))
def test_an_interrupt_while_waiting_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Ctrl-C while steps are in flight, and a newcomer waits."""
    want = run_all(make_symbolic(), [request(0, [1, 2, 3], max_tokens=20)])["0"].outputs
    engine = at_depth(make_symbolic(), 2)
    engine.add_request(request(0, [1, 2, 3], max_tokens=20))
    for _ in range(4 + at):
        engine.step()
    engine.add_request(request(1, [4], max_tokens=2))
    take, calls = Pending.take, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return take(self)

    monkeypatch.setattr(Pending, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert drain(engine)["0"].outputs == want


@pytest.mark.parametrize(("share", "spared"), [("full", 1), ("storage", 0), ("off", 0)])
@pytest.mark.parametrize("anew", [True, False])
def test_keys_that_one_read_spares_are_counted(share: str, spared: int, anew: bool) -> None:
    engine = make_symbolic(share=share, page_size=4)
    if anew:
        made_anew(engine)
    prefix = [1, 2, 3, 1, 2, 3, 1]
    # Its pages hold the prefix; the others begin with it, and part at once.
    run_all(engine, [request("first", [*prefix, 0], max_tokens=1)])
    engine.reset_stats()
    lengths = {4: 2, 5: 5, 6: 5, 7: 9}
    run_all(engine, [request(i, [*prefix, i], max_tokens=n) for i, n in lengths.items()])
    # Each step but the last few: all who run see the prefix, and one of them reads it.
    readers = [sum(n > step for n in lengths.values()) for step in range(9)]
    assert readers == [4, 4, 3, 3, 3, 1, 1, 1, 1]
    expected = len(prefix) * sum(count - 1 for count in readers)
    assert engine.stats.shared_read_tokens == spared * expected


@pytest.mark.parametrize("stream", [False, True])
def test_sampled_tokens_are_counted_as_they_come(tiny, stream):
    """Also those of requests that nobody watches, which are handed over many at a time."""
    engine = make_engine(tiny("llama"))
    prompts = shared_prompts()[:3]
    for one in requests_for(prompts, max_tokens=20):
        engine.add_request(replace(one, stream=stream))
    before = 0
    while engine.has_unfinished():
        engine.step()
        after = engine.stats.output_tokens
        assert after - before <= len(prompts)
        before = after
    assert before == 20 * len(prompts)
