"""Jobs beside interactive requests, pinned prefixes, salts: on the symbolic model."""

from __future__ import annotations

import itertools
import random
import signal

import pytest
import torch

from onestem.engine.schedule import waiting
from onestem.engine.schedule.pins import prefix_id
from onestem.engine.step.runner import Logits
from onestem.errors import RequestError
from onestem.request import Reuse
from onestem.server.link.snapshot import snapshot_of
from tests.engine.harness import assert_idle
from tests.engine.symbolic import VOCAB, drain, make_symbolic, request, run_all
from tests.engine.test_symbolic import grouped, interrupted_step, random_requests, same_as_alone
from tests.soak import seeds


def fast(engine):
    """An engine whose steps all take a second, so that its decisions do not depend on the clock."""
    note, numbers = engine.scheduler.note_step, itertools.count()

    def noted(changes, began, ended):
        second = next(numbers)
        return note(changes, second, second + 1)

    engine.scheduler.note_step = noted
    return engine


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_random_traffic_of_both_kinds(seed):
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    pages = max(3, rng.choice([12, 16, 24, 40]) // page_size) if rng.random() < 0.7 else 400
    limit = min(60, pages * page_size)
    most = (None, 5)[seed % 2]  # of its requests' n
    engine = fast(
        make_symbolic(
            num_pages=pages, page_size=page_size, max_model_len=limit,
            share=rng.choice(["full", "full", "storage"]),
            max_step_tokens=rng.choice([2, 3, 7, 16, 64]), max_num_seqs=most,
        )
    )  # fmt: skip
    interactive = random_requests(rng, limit)
    jobs = [random_requests(rng, limit) for _ in range(2)]
    everything = {one.request_id: one for one in interactive}
    for number, job in enumerate(jobs):
        job[:] = [
            request(f"job{number}-{one.request_id}", one.prompt_token_ids, **fields_of(one))
            for one in job
        ]
        everything |= {one.request_id: one for one in job}
        engine.requests.add_job(str(number), grouped(rng, job))
    left = list(interactive)

    def arrive(outputs: dict) -> None:
        if left and rng.random() < 0.3:
            engine.add_request(left.pop(0))
        if rng.random() < 0.05 and engine.has_unfinished():
            ended = interrupted_step(engine, late=rng.random() < 0.5)
            outputs.update({one.request_id: one for one in ended if one.finished})

    outputs: dict = {}
    while left or engine.has_unfinished():
        arrive(outputs)
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        engine.check()
        assert most is None or engine.num_running <= most
    assert_idle(engine)
    assert outputs.keys() == everything.keys()
    assert engine.requests.job_ids == []
    for name, one in everything.items():
        same_as_alone(one, outputs[name], limit)


def fields_of(one) -> dict:
    params = one.params
    names = ("max_tokens", "n", "seed", "temperature", "logprobs", "prompt_logprobs", "logit_bias")
    return {name: getattr(params, name) for name in names} | {"score_from": one.score_from}


def test_a_job_gives_way_before_an_interactive_request_waits():
    engine = fast(make_symbolic(num_pages=16, page_size=4, max_step_tokens=64))
    engine.requests.add_job("j", [request(f"j{i}", [i] * 8, max_tokens=8) for i in range(8)])
    for _ in range(3):
        engine.step()
    assert engine.cache.pool.num_available < 8
    engine.add_request(request("a", [7, 6, 5] * 9, max_tokens=3, stream=True))
    engine.step()
    assert [s.state.request.request_id for s in engine.scheduler.running if not s.is_job] == ["a"]
    assert engine.stats.num_preempted > 0
    assert engine.num_waiting == 0  # jobs that wait keep no interactive request out
    outputs = drain(engine)
    assert len(outputs) == 9
    assert outputs["a"].metrics.num_preempted == 0


def test_a_job_gives_its_place_to_an_interactive_request():
    engine = fast(make_symbolic(num_pages=64, max_num_seqs=3))
    engine.requests.add_job("j", [request(f"j{i}", [i] * 8, max_tokens=8) for i in range(8)])
    for _ in range(3):
        engine.step()
    assert engine.num_running == 3
    engine.add_request(request("a", [7, 6], max_tokens=3, n=2))
    engine.step()
    assert [s.is_job for s in engine.scheduler.running] == [False, False, True]
    assert len(drain(engine)) == 9
    with pytest.raises(RequestError, match="n is 4, and at most 3 sequences run at once"):
        engine.add_request(request("b", [7, 6], n=4))


def test_a_job_may_go_before_what_others_have_not_begun():
    engine = fast(make_symbolic(num_pages=200, page_size=4, max_step_tokens=8))
    engine.requests.add_job(
        "long", [request(f"long{i}", [i, 1] * 4, max_tokens=2) for i in range(7)]
    )
    engine.step()
    short = [request(f"short{i}", [i, 2] * 4, max_tokens=2) for i in range(2)]
    engine.requests.add_job("short", short, first=True)
    engine.requests.add_job("last", [request("last", [1, 3] * 4, max_tokens=2)])
    names = list(drain(engine))
    assert names[0] == "long0"
    assert max(names.index("short0"), names.index("short1")) <= 3
    assert names[-1] == "last"


def test_a_job_computes_what_an_interactive_request_waits_for():
    engine = fast(make_symbolic(num_pages=200, page_size=4, max_step_tokens=8))
    shared = [1, 2, 3] * 20
    engine.requests.add_job("j", [request("j", shared, max_tokens=2)])
    engine.step()
    engine.add_request(request("other", [4, 5], max_tokens=40))
    engine.step()
    engine.add_request(request("a", [*shared, 7], max_tokens=1))
    outputs = drain(engine)
    assert outputs["a"].metrics.num_computed_tokens == 1
    assert outputs["a"].metrics.finished_time < outputs["other"].metrics.finished_time
    assert engine.stats.processed_prompt_tokens == len(shared) + 2 + 1


def test_a_job_computes_no_more_than_an_interactive_request_waits_for():
    engine = fast(make_symbolic(num_pages=200, page_size=4, max_step_tokens=8))
    shared = [1, 2, 3, 4] * 5
    engine.requests.add_job("j", [request("j", [*shared, *[6] * 40], max_tokens=2)])
    engine.step()
    (job,) = engine.scheduler.running
    assert job.frontier == 8
    engine.add_request(request("a", [*shared, 7, 5], max_tokens=1))
    engine.step()
    assert job.frontier == 16
    (output,) = engine.step()
    assert (output.request_id, output.finished, job.frontier) == ("a", True, len(shared))
    assert len(drain(engine)) == 1


@pytest.mark.parametrize("room", [4, 64])  # with and without room for the job's next prompts
def test_a_newcomers_first_step_is_its_own(room: int):
    """Who arrives while a job has the engine to itself waits for one step of it, not for two."""
    engine = fast(make_symbolic(num_pages=400, page_size=4, max_step_tokens=room))
    engine.requests.add_job("j", [request(f"j{i}", [i % 7] * 9, max_tokens=30) for i in range(40)])
    for _ in range(12):
        engine.step()
    assert len(engine.batch_rows) > 0
    engine.add_request(request("a", [7, 6, 5], max_tokens=3, stream=True))
    engine.step()
    chunks = engine.batch_rows.chunks
    assert "a" in {chunk.sequence.state.request.request_id for chunk in chunks}
    job_rows = sum(chunk.end - chunk.start for chunk in chunks if chunk.sequence.is_job)
    job_rows += sum(sequence.is_job for sequence in engine.batch_rows.sequences)
    assert job_rows <= engine.scheduler.jobs.share.limit == 1
    assert len(drain(engine)) == 41


def test_one_that_pauses_and_loses_its_memory_does_not_come_back_as_it_was():
    """It may be admitted again in the same step, as a prompt; it has no row then."""
    engine = make_symbolic(num_pages=200, page_size=4, share="off", max_step_tokens=6)
    engine.requests.add_job("j", [request(f"j{i}", [i, 2, 3] * 4, max_tokens=30) for i in range(3)])
    while len(engine.batch_rows) < 3:
        engine.step()
    scheduler = engine.scheduler
    newest = scheduler.running[-1]
    choose = scheduler.jobs.choose_rows

    def pausing(draft):
        choose(draft)
        draft.changes.leave = [newest]
        scheduler.room.preempt(newest)
        draft.forget(newest)

    scheduler.jobs.choose_rows = pausing
    engine.step()
    scheduler.jobs.choose_rows = choose
    outputs = drain(engine)
    assert_idle(engine)
    for i in range(3):
        same_as_alone(request(f"j{i}", [i, 2, 3] * 4, max_tokens=30), outputs[f"j{i}"], 400)


def test_a_request_named_like_a_prefix_is_one_like_any_other():
    engine = make_symbolic(num_pages=200, page_size=4, max_model_len=100)
    engine.requests.pin_prefix("p", [1, 2, 3, 4, 5])
    assert drain(engine) == {}
    name = prefix_id("p")
    engine.add_request(request(name, [1, 2, 3, 4, 5, 6], max_tokens=3))
    engine.step()
    engine.requests.unpin_prefix("p")
    assert len(drain(engine)[name].outputs[0].token_ids) == 3


def test_a_job_goes_on_beside_prompts_that_never_decode():
    engine = fast(make_symbolic(num_pages=400, page_size=4, max_step_tokens=16))
    engine.requests.add_job("j", [request("j", [1, 2, 3], max_tokens=20)])
    for i in range(40):
        engine.add_request(request(i, [i % 8, 5], max_tokens=1))
        engine.step()
    assert engine.requests.job_ids == []


def test_jobs_run_one_after_the_other_and_can_be_removed():
    engine = make_symbolic(num_pages=8, page_size=4)
    engine.requests.add_job("x", [request(f"x{i}", [i] * 4, max_tokens=9) for i in range(6)])
    engine.requests.add_job("y", [request("y", [1] * 4, max_tokens=2)])
    with pytest.raises(RequestError, match="'x' is in use"):
        engine.requests.add_job("x", [])
    engine.step()
    assert engine.requests.job_ids == ["x", "y"]
    removed = engine.requests.remove_job("x")
    assert 0 < len(removed) < 6
    assert {o.outputs[0].finish_reason for o in removed} == {"abort"}
    assert list(drain(engine)) == ["y"]
    assert engine.requests.job_ids == []
    assert_idle(engine)


def test_a_request_of_a_job_that_can_never_be_answered():
    engine = make_symbolic()
    engine.requests.add_job("j", [request("bad", [99]), request("good", [1], max_tokens=1)])
    outputs = drain(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "token id 99" in outputs["bad"].outputs[0].stop_reason
    assert outputs["good"].outputs[0].finish_reason == "length"


# ----------------------------------------------------------------------------- prefixes


def test_a_pinned_prefix_is_computed_ahead_and_stays():
    engine = make_symbolic(num_pages=24, page_size=4, max_model_len=40)
    prefix = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    engine.requests.pin_prefix("support", prefix)
    (before,) = engine.requests.prefixes()
    assert (before.ready, before.num_computed_tokens, before.readers) == (False, 0, 0)
    assert drain(engine) == {}
    (info,) = engine.requests.prefixes()
    assert (info.ready, info.num_tokens, info.hits, info.bytes) == (True, 10, 0, 80)
    for i in range(6):  # as much as KV memory holds, several times
        run_all(engine, [request(i, [i, 7] * 17, max_tokens=5)])
    output = run_all(engine, [request("a", [*prefix, 3, 3], max_tokens=2)])["a"]
    assert output.metrics.num_cached_tokens == 10
    assert output.reuse == Reuse(matched_tokens=10, prefix="support", ended="new", here=3, there=())
    assert engine.requests.prefixes()[0].hits == 1
    engine.check()
    engine.requests.unpin_prefix("support")
    engine.cache.clear()
    assert_idle(engine)
    assert engine.cache.pool.num_free == engine.cache.pool.num_pages


def test_prefixes_that_cannot_be_pinned():
    engine = make_symbolic(num_pages=24, page_size=4, max_model_len=40)
    with pytest.raises(RequestError, match="'long' has 60 tokens; KV memory of 96 tokens holds"):
        engine.requests.pin_prefix("long", [1] * 60)
    engine.requests.pin_prefix("a", [1, 2, 3])
    with pytest.raises(RequestError, match="'a' is pinned already"):
        engine.requests.pin_prefix("a", [1])
    with pytest.raises(RequestError, match="'b' is not pinned"):
        engine.requests.unpin_prefix("b")
    with pytest.raises(RequestError, match="share off"):
        make_symbolic(share="off").requests.pin_prefix("a", [1])
    engine.requests.unpin_prefix("a")
    assert drain(engine) == {}
    assert_idle(engine)


def test_the_longest_request_fits_beside_pinned_prefixes():
    engine = make_symbolic(num_pages=20, page_size=4, max_model_len=40)
    engine.requests.pin_prefix("a", [1, 2, 3, 4, 5, 6])
    engine.requests.pin_prefix("b", [1, 2, 3, 7])
    drain(engine)
    longest = [[1, 2, 3, 4, 5, 6, *[i] * 30] for i in range(3)] + [[7 - i] * 36 for i in range(3)]
    outputs = run_all(engine, [request(i, ids, max_tokens=None) for i, ids in enumerate(longest)])
    assert [len(outputs[str(i)].outputs[0].token_ids) for i in range(6)] == [4] * 6
    assert [info.ready for info in engine.requests.prefixes()] == [True, True]


def test_a_common_prefix_serves_all_salts_and_nothing_else_is_shared():
    engine = make_symbolic(num_pages=100, max_model_len=50)
    prefix, own = [1, 2, 3, 4, 5], [6, 6, 6, 6]
    engine.requests.pin_prefix("app", prefix)
    drain(engine)
    cached = []
    for i, salt in enumerate(["x", "y", "x"]):
        one = request(
            i, [*prefix, *own], max_tokens=1, cache_salt=salt, common_prefix_tokens=len(prefix)
        )
        output = run_all(engine, [one])[str(i)]
        cached.append(output.metrics.num_cached_tokens)
        assert output.reuse.prefix == "app"
        assert output.reuse.there == ()
    assert cached == [5, 5, 8]


# ----------------------------------------------------------------------------- what is told


def test_reuse_says_where_a_match_ended():
    engine = make_symbolic(num_pages=100)
    run_all(engine, [request("a", [1, 2, 3, 4], max_tokens=1)])
    reuse = {
        name: run_all(engine, [request(name, ids, max_tokens=1)])[name].reuse
        for name, ids in {"differs": [1, 2, 5, 5], "prompt": [1, 2, 3, 4], "new": [0, 0]}.items()
    }
    assert reuse["differs"] == Reuse(
        matched_tokens=2, prefix=None, ended="differs", here=5, there=(3,)
    )
    assert reuse["prompt"] == Reuse(matched_tokens=3, prefix=None, ended="prompt", here=4, there=())
    assert (reuse["new"].matched_tokens, reuse["new"].ended) == (0, "differs")
    assert run_all(make_symbolic(share="off"), [request("x", [1, 2])])["x"].reuse is None


def test_a_snapshot_adds_up():
    engine = make_symbolic(num_pages=100, page_size=4, max_model_len=50)
    engine.requests.pin_prefix("p", [1, 2, 3, 4, 5])
    drain(engine)
    run_all(engine, [request("gone", [7, 7, 7, 7, 7], max_tokens=1)])
    engine.add_request(request("a", [1, 2, 3, 4, 5, 6], max_tokens=9))
    engine.requests.add_job("j", [request("b", [2, 2, 2], max_tokens=9)])
    engine.step()
    state = snapshot_of(engine)
    pages = state["pages"]
    assert pages["free"] + pages["held"] + pages["cached"] == pages["total"] == 100
    assert pages["prefix"] + pages["interactive"] + pages["job"] == pages["held"]
    assert min(pages["prefix"], pages["interactive"], pages["cached"]) > 0
    holders = {(holder["owner"], holder["name"]): holder["pages"] for holder in state["holders"]}
    assert set(holders) <= {("prefix", "p"), ("interactive", "a"), ("job", "b")}
    for owner in ("prefix", "interactive", "job"):
        assert pages[owner] == sum(n for (kind, _), n in holders.items() if kind == owner)
    runs = {run["id"]: run for run in state["runs"]}
    assert len(runs) == state["num_runs"]
    for run in runs.values():
        above = runs.get(run["parent"])
        assert run["start"] == (above["start"] + above["tokens"] if above else 0)
    assert {run["owner"] for run in runs.values()} >= {"prefix", "interactive", "cached"}
    assert [prefix["readers"] for prefix in state["prefixes"]] == [1]


# ----------------------------------------------------------------------------- what once failed


def test_a_job_may_come_again_once_it_has_ended():
    engine = make_symbolic()
    for _ in range(2):
        engine.requests.add_job("x", [request("a", [1], max_tokens=1)])
        assert list(drain(engine)) == ["a"]


def test_an_id_that_a_job_has_read_is_in_use():
    engine = fast(make_symbolic(num_pages=8))
    prompts = {"b": ([1] * 4, 28), "c": ([2] * 28, 3), "a": ([2] * 28, 3)}
    engine.requests.add_job(
        "j", [request(n, ids, max_tokens=most) for n, (ids, most) in prompts.items()]
    )
    engine.step()
    engine.step()
    assert "a" in engine.requests.factory.arrivals  # read, and not open
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request(request("a", [3, 4]))
    assert sorted(drain(engine)) == ["a", "b", "c"]


def test_groups_close_though_another_job_waits():
    """A group that has ended holds no memory until a later job is read."""
    engine = make_symbolic(num_pages=64, page_size=4, max_step_tokens=64)
    prefixes = [[g % 8, g // 8, *[1] * 10] for g in range(40)]
    requests = [
        request(f"{g}.{i}", [*prefixes[g], i], max_tokens=2, group=g, group_prefix_tokens=12)
        for g in range(40)
        for i in range(4)
    ]
    engine.requests.add_job("x", requests)
    engine.requests.add_job("y", [request("y", [1], max_tokens=1)])
    pinned = []
    while engine.has_unfinished():
        engine.step()
        pinned.append(engine.scheduler.waiting.groups.num_pinned)
    assert max(pinned) <= 6


@pytest.mark.parametrize("at", range(60, 80))
def test_a_job_does_not_wait_for_a_long_answer_to_end(at):
    """Also where it comes while the share of jobs is measured."""
    engine = fast(make_symbolic(num_pages=600, page_size=16))
    engine.add_request(request("long", [1, 2], max_tokens=1000))
    for _ in range(at):
        engine.step()
    engine.requests.add_job("j", [request("j", [3, 4], max_tokens=3)])
    assert any(engine.step() for _ in range(40))


def test_pinned_prefixes_in_many_short_runs_make_room():
    """Their pages are more than their tokens need; the longest request fits all the same."""
    engine = make_symbolic(num_pages=40, page_size=16, max_model_len=256)
    prefix = [(i * i + i // 3) % 8 for i in range(20)]
    for n in range(1, 21):
        run_all(engine, [request(n, prefix[:n], max_tokens=1)])
    engine.requests.pin_prefix("many", prefix)
    engine.requests.pin_prefix("other", [7] * 200)
    drain(engine)
    assert engine.cache.pool.num_held == 33
    output = run_all(engine, [request("long", [5, 6, 7] * 84, max_tokens=None)])["long"]
    assert len(output.outputs[0].token_ids) == 4
    assert [info.ready for info in engine.requests.prefixes()] == [True, True]
    assert engine.cache.pool.num_held < 33


def test_a_common_prefix_costs_no_page_that_memory_lacks():
    engine = make_symbolic(num_pages=4, page_size=4, max_model_len=16)
    one = request("a", [1] * 10, max_tokens=None, cache_salt="s", common_prefix_tokens=5)
    same_as_alone(one, run_all(engine, [one])["a"], 16)
    assert_idle(engine)


@pytest.mark.steps_fail
@pytest.mark.parametrize("fails", [False, True])
def test_what_cannot_fit_ends_and_others_go_on(fails):
    """Also where the step that finds it out fails."""
    engine = make_symbolic(num_pages=4, page_size=4, max_model_len=16)
    decide = engine.scheduler.decide

    def failing(draft, rows):
        decide(draft, rows)
        if fails and draft.changes.unfit:
            raise ZeroDivisionError("a fault of ours")

    engine.scheduler.decide = failing
    engine.cache.pool.hold(engine.cache.pool.allocate(1))  # as if something kept it
    engine.add_request(request("a", [1] * 10, max_tokens=None))
    engine.add_request(request("b", [2] * 4, max_tokens=2))
    outputs, steps = {}, 0
    while len(outputs) < 2 and steps < 100:
        outputs |= {output.request_id: output for output in engine.step()}
        steps += 1
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert "does not fit in KV memory of 4 pages of 4" in outputs["a"].outputs[0].stop_reason
    assert outputs["b"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("call", ["reserve", "attach"])
def test_interrupted_while_it_schedules(call, number):
    """Nothing counts as computed that is not, whichever call Ctrl-C falls into."""
    engine = make_symbolic(num_pages=200, page_size=4)
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 6], [1, 7], [4, 4]]
    salted = {"cache_salt": "s", "common_prefix_tokens": 1}  # a path of two runs
    requests = [request(i, ids, max_tokens=6, **salted) for i, ids in enumerate(prompts)]
    for one in requests:
        engine.add_request(one)
    whole, calls = getattr(engine.cache, call), []

    def failing(*args):
        calls.append(call)
        if len(calls) == number:
            raise KeyboardInterrupt
        return whole(*args)

    setattr(engine.cache, call, failing)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = drain(engine)
    for one in requests:
        same_as_alone(one, outputs[one.request_id], 40)
    assert_idle(engine)


# ----------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("moment", ["schedule", "commit"])
def test_ctrl_c_waits_until_the_books_are_written(moment):
    """A signal in the middle of host work is seen behind it: nothing is half done."""
    engine = make_symbolic(num_pages=100)
    for i in range(4):
        engine.add_request(request(i, [1, 2, i], max_tokens=9))
    owner, name = {
        "schedule": (engine.scheduler.room, "admit"), "commit": (engine.results, "_take"),
    }[moment]  # fmt: skip
    method, armed = getattr(owner, name), [True]

    def signalled(*args):
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        return method(*args)

    setattr(owner, name, signalled)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    outputs = drain(engine)
    assert_idle(engine)
    for i in range(4):
        same_as_alone(request(i, [1, 2, i], max_tokens=9), outputs[str(i)], 100)


def test_sequences_that_have_not_parted_fail_together():
    engine = make_symbolic()
    engine.add_request(request("a", [1, 2], max_tokens=3, n=3))
    damaged = Logits([torch.full((3, VOCAB), float("nan"))])
    engine.launcher.runner.compute = lambda inputs, ids: damaged
    output = drain(engine)["a"]
    assert [one.finish_reason for one in output.outputs] == ["error"] * 3


class Unreliable:
    """Requests of a job, of which some cannot be read at the first attempt."""

    def __init__(self, requests: list, failing: set[int]) -> None:
        self._requests, self._failing = requests, failing
        self._at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._at in self._failing:
            self._failing.remove(self._at)
            raise OSError("the file cannot be read now")
        if self._at == len(self._requests):
            raise StopIteration
        self._at += 1
        return self._requests[self._at - 1]


def test_a_job_whose_iterator_raises_goes_on_where_that_can():
    engine = make_symbolic(num_pages=40, page_size=4)
    job = [request(f"j{i}", [i % 8] * 5, max_tokens=4) for i in range(12)]
    engine.requests.add_job("j", Unreliable(grouped(random.Random(0), job), {0, 3, 4, 11}))
    engine.add_request(request("a", [1, 2, 3], max_tokens=9))
    outputs: dict = {}
    errors = 0
    unfinished = True
    while unfinished:
        try:
            outputs |= {o.request_id: o for o in engine.step() if o.finished}
            unfinished = engine.has_unfinished()
        except OSError:
            errors += 1
        engine.check()
    assert len(outputs) == 13
    assert errors == 4
    assert engine.requests.job_ids == []
    assert_idle(engine)
    for one in [*job, request("a", [1, 2, 3], max_tokens=9)]:
        same_as_alone(one, outputs[one.request_id], engine.max_model_len)


def test_many_choices_wait_in_order_without_a_look_at_each(monkeypatch):
    """A place in the line is found by halving it."""
    looks = 0

    def counted(sequence):
        nonlocal looks
        looks += 1
        return place(sequence)

    place = waiting._place
    monkeypatch.setattr(waiting, "_place", counted)
    engine = make_symbolic(num_pages=400, page_size=4)
    sequences = [
        engine.requests.factory.open(request(str(i), [i % 8], max_tokens=2)).sequences[0]
        for i in range(1024)
    ]
    for sequence in sequences:
        engine.scheduler.waiting.put(sequence)
    assert list(engine.scheduler.waiting) == sequences
    assert looks <= 1024 * 12
