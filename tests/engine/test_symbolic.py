"""Random traffic on a symbolic model, and faults that were found with it."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest

from onestem.engine.schedule.queue import PlannedQueue
from onestem.errors import RequestError
from tests.engine.harness import assert_idle
from tests.engine.symbolic import VOCAB, alone, drain, make_symbolic, request, run_all
from tests.soak import seeds


def random_requests(rng: random.Random, limit: int) -> list:
    bases = [[rng.randrange(2) for _ in range(limit)] for _ in range(2)]
    requests = []
    for i in range(rng.randrange(1, 11)):
        size = rng.randrange(1, max(2, min(limit - 1, rng.choice([3, limit]))))
        shared = rng.choice(bases)[: rng.randrange(0, size + 1)]
        ids = shared + [rng.randrange(VOCAB) for _ in range(size - len(shared))]
        fields = {
            "max_tokens": rng.choice([1, 2, 5, 20, None]),
            "n": rng.choice([1, 1, 1, 2, 3, 5]),
            "seed": i,
            "temperature": rng.choice([0, 0, 1.0]),
            "logprobs": rng.choice([None, None, 1]),
            "prompt_logprobs": rng.choice([None, None, None, 0, 2]),
        }
        if rng.random() < 0.2:
            fields["score_from"] = rng.randrange(0, size + 1)
        if rng.random() < 0.2:
            fields["logit_bias"] = {3: 5.0}
        requests.append(request(i, ids, **fields))
    return requests


def continuation(rng: random.Random, requests: list, limit: int) -> list:
    """A prompt that is another's prompt and answer, and may come while that one still grows."""
    chosen = rng.choice(requests)
    answer = alone(chosen, limit)[0][0].token_ids
    ids = [*chosen.prompt_token_ids, *answer][: limit - 2]
    return [request(len(requests), ids, max_tokens=3)]


def grouped(rng: random.Random, requests: list) -> list:
    """The requests as a plan would hand them on."""
    out, left, group = [], sorted(requests, key=lambda r: list(r.prompt_token_ids)), 0
    while left:
        members, left = left[: rng.randrange(1, 4)], left[rng.randrange(1, 4) :]
        members = [m for m in members if m.request_id not in {o.request_id for o in out}]
        if not members:
            continue
        group += 1
        common = _common([list(m.prompt_token_ids) for m in members])
        planned = {"group": group, "group_prefix_tokens": common, "group_only": group % 3 == 0}
        out += [dataclasses.replace(m, **planned) for m in members]
    seen = {one.request_id for one in out}
    return out + [one for one in requests if one.request_id not in seen]


def _common(prompts: list[list[int]]) -> int:
    most = min(map(len, prompts)) - 1
    return next((i for i in range(most) if len({p[i] for p in prompts}) > 1), max(most, 0))


@pytest.mark.parametrize("seed", seeds(12, 60))
def test_random_traffic(seed):
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 2, 3, 4, 8])
    pages = max(2, rng.choice([8, 12, 16, 24, 40]) // page_size) if rng.random() < 0.7 else 400
    limit = min(60, pages * page_size)
    share = rng.choice(["full", "full", "full", "storage", "off"])
    engine = make_symbolic(
        num_pages=pages, page_size=page_size, share=share, max_model_len=limit,
        max_step_tokens=rng.choice([1, 1, 2, 3, 7, 16, 64]),
    )  # fmt: skip
    requests = random_requests(rng, limit)
    if limit > 6 and rng.random() < 0.5:
        requests += continuation(rng, requests, limit)
    if rng.random() < 0.4:
        engine.scheduler.waiting.queue = PlannedQueue(iter(grouped(rng, requests)))
    else:
        for one in requests:
            engine.add_request(one)
    aborted: dict = {}
    aborts, interrupts = rng.random() < 0.4, rng.random() < 0.3

    def disturb(outputs: dict) -> None:
        name = str(rng.randrange(len(requests)))
        if aborts and rng.random() < 0.08 and name not in outputs:
            output = engine.abort(name)
            if output is not None:
                aborted[name] = output
                assert all(o.finish_reason for o in output.outputs)
                assert len(output.outputs) == requests[int(name)].params.n
        if interrupts and rng.random() < 0.1 and engine.has_unfinished():
            ended = interrupted_step(engine, late=rng.random() < 0.5)
            outputs.update({one.request_id: one for one in ended if one.finished})

    outputs = drain(engine, each_step=disturb)
    assert_idle(engine)
    assert not engine.requests.states
    assert engine.scheduler.waiting.groups.num_pinned == 0
    assert sorted({**outputs, **aborted}) == sorted(one.request_id for one in requests)
    for one in requests:
        if one.request_id not in aborted:
            same_as_alone(one, outputs[one.request_id], limit)


def interrupted_step(engine, *, late: bool) -> list:
    """Ctrl-C while a step is computed, or (`late`) while its results are taken, if the scheduler
    makes it; the outputs of a step that was not interrupted."""
    if not late:
        engine.launcher.runner.fail = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        return []
    launch, outputs = engine.launcher.sampler.launch, []

    def fail(*args):
        raise KeyboardInterrupt

    engine.launcher.sampler.launch = fail
    with contextlib.suppress(KeyboardInterrupt):  # a step of prompts alone samples nothing
        outputs = engine.step()
    engine.launcher.sampler.launch = launch
    return outputs


def same_as_alone(one, output, limit: int) -> None:
    outputs, prompt_logprobs = alone(one, limit)
    for got, expected in zip(output.outputs, outputs, strict=True):
        assert got == expected
    assert output.prompt_logprobs == prompt_logprobs
    metrics = output.metrics
    if one.params.n == 1 and metrics.num_preempted == 0:
        assert metrics.num_cached_tokens + metrics.num_computed_tokens >= metrics.num_prompt_tokens


def test_a_step_that_was_not_computed_leaves_no_kv_behind():
    engine = make_symbolic()
    engine.launcher.runner.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(engine.run([request("a", [1, 2, 3, 4, 5, 6], max_tokens=2)]))
    assert_idle(engine)
    assert engine.cache.cached_tokens() == 0
    assert len(list(engine.run([request("b", [1, 2, 3, 4, 5, 6], max_tokens=2)]))) == 1


def test_an_interrupt_while_results_are_taken_costs_one_step():
    engine = make_symbolic(num_pages=400)
    for i in range(8):
        engine.add_request(request(i, [1, 2, i], max_tokens=20))
    for _ in range(3):
        engine.step()
    interrupted_step(engine, late=True)
    before = engine.scheduler.step
    assert len(drain(engine)) == 8
    assert engine.scheduler.step - before == 17


def test_a_bad_request_in_a_job_does_not_spoil_the_cache():
    engine = make_symbolic()
    good = request("a", [1, 2, 3, 4, 5, 6], max_tokens=4)
    with pytest.raises(RequestError, match="token id 99"):
        list(engine.run([good, request("b", [99])]))
    assert_idle(engine)
    assert [o.request_id for o in engine.run([good])] == ["a"]
    with pytest.raises(RequestError, match="'a' is in use"):
        list(engine.run([good, good]))
    assert not engine.requests.states


@pytest.mark.parametrize("prefix", range(1, 7))
def test_a_planned_request_that_fills_the_pool_fits(prefix):
    engine = make_symbolic(num_pages=2, page_size=4)
    one = request("a", [1, *[2] * 6], max_tokens=None, group=0, group_prefix_tokens=prefix)
    assert [len(o.outputs[0].token_ids) for o in engine.run([one])] == [1]
    assert_idle(engine)


def test_forks_that_fill_the_pool_take_turns():
    engine = make_symbolic(num_pages=2, page_size=4, max_step_tokens=3)
    outputs = run_all(
        engine,
        [
            request("0", [1], max_tokens=1),
            request("1", [1, 1, 0, 1, 0, 0], max_tokens=None, n=2, seed=1, temperature=1.0),
        ],
    )
    assert [len(o.token_ids) for o in outputs["1"].outputs] == [2, 2]


def test_one_job_at_a_time():
    engine = make_symbolic()
    engine.add_request(request("mine", [1, 2], max_tokens=3))
    with pytest.raises(RequestError, match="unfinished requests"):
        next(engine.run([request("other", [1])]))
    assert drain(engine)["mine"].outputs[0].finish_reason == "length"
    job = engine.run([request(i, [i], max_tokens=i + 1) for i in range(3)])
    next(job)
    with pytest.raises(RequestError, match="unfinished requests"):
        next(engine.run([request("other", [1])]))
    job.close()
    assert_idle(engine)
    assert not engine.has_unfinished()


def test_streamed_outputs_are_snapshots():
    engine = make_symbolic()
    engine.add_request(request("a", [1, 2], max_tokens=4, logprobs=0, stream=True))
    seen = []
    while engine.has_unfinished():
        seen += engine.step()
    assert [len(o.outputs[0].logprobs) for o in seen] == [1, 2, 3, 4]
    assert [o.metrics.num_output_tokens for o in seen] == [1, 2, 3, 4]


def test_seeds_of_an_engine_do_not_depend_on_order():
    requests = [request(i, [i, 2], max_tokens=5, temperature=1.0) for i in range(3)]
    first = run_all(make_symbolic(seed=4), requests)
    second = run_all(make_symbolic(seed=4), requests[::-1])
    other = run_all(make_symbolic(seed=5), requests)
    tokens = [[r[str(i)].outputs[0].token_ids for i in range(3)] for r in (first, second, other)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("bad", [[1.5, 2.0], [[1, 2], [3, 4]], [[1], [2, 3]], ["x"], None, 3, []])
def test_prompts_that_are_none(bad):
    with pytest.raises(RequestError, match="prompt"):
        make_symbolic().add_request(request("a", bad))


def test_queueing_counts_as_waiting():
    engine = make_symbolic(num_pages=4)
    for i in range(4):
        engine.add_request(request(i, [i] * 12, max_tokens=2))
    outputs = drain(engine)
    for output in outputs.values():
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
        assert metrics.first_token_time <= metrics.finished_time
    arrivals = [outputs[str(i)].metrics.arrival_time for i in range(4)]
    starts = [outputs[str(i)].metrics.first_scheduled_time for i in range(4)]
    assert arrivals == sorted(arrivals)
    assert max(arrivals) <= min(starts)
    assert engine.stats.peak_kv_tokens >= 12
