"""A job dealt to replicas that die: nothing is lost, nothing doubled, the file is one engine's."""

from __future__ import annotations

import random

import pytest

from onestem.engine.outputs import EngineStats
from onestem.errors import JobError
from onestem.planner import RunningOrder, plan_job, planned
from onestem.replicas.dealer import Dealer
from onestem.replicas.worker import Facts, Failure, Report
from onestem.request import Request, SamplingParams
from tests.batch.fakes import answer, completion, mixed_job, results, run_fake, write_lines
from tests.replicas.fakes import OPTIONS, TARGET, FakeCrew
from tests.soak import seeds


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dealt")
    source = mixed_job(folder / "in.jsonl", 120)
    run_fake(source, folder / "whole.jsonl")
    return source, (folder / "whole.jsonl").read_bytes()


def deal(job, output, crew):
    """Run a job on a crew; what the dealer told."""
    told: list[str] = []
    dealer = Dealer(crew, len(crew.speeds), told.append)
    dealer.first()
    summary = run_fake(job, output, run=dealer.run)
    return summary, told


@pytest.mark.parametrize("speeds", [[1], [2, 2], [1, 8, 3], [3] * 40])
def test_the_file_is_that_of_one_engine(job, tmp_path, speeds):
    source, whole = job
    crew = FakeCrew(speeds)
    deal(source, tmp_path / "out.jsonl", crew)
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert set(crew.answered.values()) == {1}
    assert all(len(replicas) == 1 for replicas in crew.handed.values())


@pytest.mark.parametrize("seed", seeds(10, 25))
def test_kills_lose_nothing_and_double_nothing(job, tmp_path, seed):
    """Replicas are killed at random; of what each had, nothing was written before. One with a
    single line is spared: a second death would be that line's fault."""
    source, whole = job
    draw = random.Random(seed)

    def dies(replica, has):
        return len(has) > 1 and draw.random() < 0.08

    crew = FakeCrew([2, 3, 1], seed=seed, dies=dies)
    deal(source, tmp_path / "out.jsonl", crew)
    assert crew.num_deaths > 3
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("at", [1, 2, 7, 30, 80])
def test_a_node_dies_with_half_of_the_replicas(job, tmp_path, at):
    source, whole = job
    seen = []

    def dies(replica, has):
        seen.append(replica)
        # All of the node's replicas die once, at the same time.
        return replica < 3 and len(seen) >= at and replica not in dead and not dead.add(replica)

    dead: set[int] = set()
    crew = FakeCrew([2] * 6, dies=dies)
    _, told = deal(source, tmp_path / "out.jsonl", crew)
    assert dead == {0, 1, 2}
    assert crew.num_deaths == 3
    assert len(told) == 3
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("room", [1, 4, 100])
def test_lines_that_kill_engines_are_errors_and_the_others_answered(job, tmp_path, room):
    source, whole = job
    poison = [[ord(c) + 3 for c in f"question {i}"] for i in (7, 23)]

    def dies(replica, has):
        return any(list(one.prompt_token_ids)[-len(ids) :] == ids for one in has for ids in poison)

    crew = FakeCrew([2, 2, 2], room=room, dies=dies)
    _, told = deal(source, tmp_path / "out.jsonl", crew)
    found = results(tmp_path / "out.jsonl")
    died = [one for one in found if one["error"] and one["error"]["code"] == "engine_died"]
    assert [one["custom_id"] for one in died] == ["c7", "c23"]
    assert "died twice while it answered this line: it was killed" in died[0]["error"]["message"]
    kept = {one["custom_id"]: one for one in found if one not in died}
    (tmp_path / "whole.jsonl").write_bytes(whole)
    for one in results(tmp_path / "whole.jsonl"):
        if one["custom_id"] not in ("c7", "c23") or one["error"]:
            assert one in found
    assert kept
    # Halves: few replicas die for each of them.
    assert crew.num_deaths < 40
    assert "replica" in told[0]
    assert "it is started again" in told[0]


def test_the_last_replica_takes_it_all(job, tmp_path):
    source, whole = job

    def dies(replica, has):
        return replica < 2

    crew = FakeCrew([2, 2, 2], dies=dies)
    _, told = deal(source, tmp_path / "out.jsonl", crew)
    assert sum("it is not started again" in line for line in told) == 2
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_job_without_replicas_ends_and_goes_on(job, tmp_path):
    source, whole = job
    answers = []

    def dies(replica, has):
        answers.append(replica)
        return len(answers) > 40

    crew = FakeCrew([2, 2], dies=dies)
    with pytest.raises(JobError, match=r"no replica is left.*the same command goes on"):
        deal(source, tmp_path / "out.jsonl", crew)
    summary, _ = deal(source, tmp_path / "out.jsonl", FakeCrew([1, 2, 3]))
    assert summary.resumed >= 40
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_who_cannot_start_is_named_once_with_its_reason(job, tmp_path):
    source, whole = job

    def starts(replica):
        if replica in (1, 2):
            return Failure("the model needs 9 GiB", is_final=True)
        return Facts("a", replica, OPTIONS, TARGET)

    _, told = deal(source, tmp_path / "out.jsonl", FakeCrew([1] * 4, starts=starts))
    assert told == ["replica 1 cannot start: the model needs 9 GiB: it is not started again"]
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_nobody_can_start():
    crew = FakeCrew([1, 1], starts=lambda replica: Failure("no such model", is_final=True))
    told: list[str] = []
    with pytest.raises(JobError, match=r"no replica can start, see above$"):
        Dealer(crew, 2, told.append).first()
    assert told == ["replica 0 cannot start: no such model: it is not started again"]


@pytest.mark.parametrize(
    ("first", "other", "told_of_it"),
    [
        ({}, {"max_model_len": 100}, "max_model_len is 100, that of others is 400: give it to all"),
        ({"bits": "avx2"}, {"bits": "avx512"}, "bits is avx512, that of others is avx2"),
    ],
)
def test_a_replica_of_other_options_is_left_out(job, tmp_path, first, other, told_of_it):
    """Its answers would not be those of the others."""
    source, whole = job

    def starts(replica):
        return Facts("a", replica, OPTIONS.replace(**(other if replica else first)), TARGET)

    crew = FakeCrew([1, 1], starts=starts)
    _, told = deal(source, tmp_path / "out.jsonl", crew)
    assert told == [f"replica 1 cannot start: its {told_of_it}: it is not started again"]
    assert {replica for those in crew.handed.values() for replica in those} == {0}
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_the_first_ones_options_hold_when_it_is_gone(job, tmp_path):
    source, whole = job
    starts = []

    def start(replica):
        starts.append(replica)
        other = OPTIONS.replace(max_model_len=100) if replica else OPTIONS
        return Facts("a", replica, other, TARGET)

    crew = FakeCrew([1, 1], starts=start, dies=lambda replica, has: len(starts) == 1)
    _, told = deal(source, tmp_path / "out.jsonl", crew)
    assert sum("its max_model_len is 100" in line for line in told) == 1
    assert (tmp_path / "out.jsonl").read_bytes() == whole


class ErrorCrew(FakeCrew):
    """Engines fail with an exception: both calls that are on their way say so at once."""

    def wait(self):
        events = super().wait()
        replica, event = events[0]
        if not isinstance(event, Failure) or event.is_final:
            return events
        died = Report(1, [], 0, 0.0, EngineStats(), "RuntimeError: CUDA error")
        return [(replica, died), (replica, died)]


def test_an_engine_that_fails_fails_once(job, tmp_path):
    source, whole = job
    draw = random.Random(3)
    crew = ErrorCrew([2, 3], dies=lambda replica, has: draw.random() < 0.05)
    _, told = deal(source, tmp_path / "out.jsonl", crew)
    assert len(told) == crew.num_deaths > 2
    assert "died: RuntimeError: CUDA error: it is started again" in told[0]
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_run_that_is_left_is_forgotten_by_the_next():
    crew = FakeCrew([1, 1])
    dealer = Dealer(crew, 2, lambda line: None)
    requests = [
        Request(request_id=f"r{i}", prompt_token_ids=[5, 6, i + 7], params=SamplingParams())
        for i in range(20)
    ]
    first = dealer.run(requests)
    assert next(first).finished
    first.close()
    again = [output.request_id for output in dealer.run(requests[:6])]
    assert sorted(again) == [f"r{i}" for i in range(6)]


def test_the_slow_give_to_the_fast(tmp_path):
    """20 groups over replicas of which one is 10 times as fast: it has most of the answers."""
    lines = [completion(str(i), f"document {i % 20} {'x' * 60} question {i}") for i in range(600)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    crew = FakeCrew([1, 10, 1])
    deal(source, tmp_path / "out.jsonl", crew)
    counts = [sum(those == [replica] for those in crew.handed.values()) for replica in range(3)]
    assert counts[1] > 3 * max(counts[0], counts[2])
    assert sum(counts) == 600


def test_what_answers_longer_is_handed_out_first():
    """40 documents, two by two of two kinds of task: one kind's answers turn out longer."""
    prompts = [
        [*[kind] * 8, *range(1000 * document, 1000 * document + 300), question]
        for document in range(40)
        for question in range(3)
        for kind in [1 + document // 2 % 2]
    ]
    params = SamplingParams(max_tokens=64)
    requests = [
        Request(request_id=str(i), prompt_token_ids=ids, params=params)
        for i, ids in enumerate(prompts)
    ]

    def long_or_short(request):
        output = answer(request)
        output.metrics.num_output_tokens = 60 if request.prompt_token_ids[0] == 2 else 5
        return output

    crew = FakeCrew([3, 3], answers=long_or_short)
    listed = planned(requests, RunningOrder(plan_job(prompts, output_lengths=64)))
    for output in Dealer(crew, 2, lambda line: None).run(listed):
        listed.order.note(int(output.request_id), output.metrics.num_output_tokens)
    assert {len(those) for those in crew.handed.values()} == {1}
    for replica in range(2):
        mine = [int(name) for name, those in crew.handed.items() if those == [replica]]
        kinds = [prompts[i][0] for i in mine]
        late = kinds[24:]  # of those before, some were handed out when nothing was known
        assert late == sorted(late, reverse=True)
        assert set(late) == {1, 2}


def test_who_waits_for_the_first_replica_is_told_once(monkeypatch):
    crew = FakeCrew([1])
    events = [[], [], crew.wait]
    monkeypatch.setattr(
        crew, "wait", lambda: found() if callable(found := events.pop(0)) else found
    )
    told: list[str] = []
    crew.starting.clear()
    assert Dealer(crew, 1, told.append).first().node == "node 0"
    assert told == ["no replica runs yet: Ray has no room for one, or they are loading"]
