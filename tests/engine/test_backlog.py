"""Who is admitted next of a backlog: what the order saves, and what it may cost anybody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onestem.engine.schedule.backlog import MIN_AHEAD, Turns
from onestem.engine.schedule.queue import InteractiveQueue
from onestem.engine.sequence import stretches_of
from onestem.planner import plan_job
from onestem.request import Request
from onestem.tree import Node, RadixTree, cut
from tests.engine.test_scheduler import Simulation, fifo, job, reorder, requests


def tree() -> RadixTree[Node]:
    return RadixTree(Node((), None, 0))


def store(cached: RadixTree[Node], request: Request) -> None:
    """Put a prompt into what is cached."""
    ids = np.array(request.prompt_token_ids, np.int32)
    stretches = stretches_of(request)
    node, known = cached.match(ids, len(ids), stretches)
    for first, end, label in cut(stretches, len(ids), known):
        node = Node(ids[first:end].tolist(), node, first, label)
        cached.insert(node)


def prompt(name: str, group: int, own: int, **fields) -> Request:
    """`MIN_AHEAD` tokens that the group shares, and one that nobody else has."""
    return Request(request_id=name, prompt_token_ids=[group] * MIN_AHEAD + [1000 + own], **fields)


def run(simulation: Simulation, max_passed: int, items: list[Request]) -> int:
    """Answer a backlog; by how many later ones anybody was passed at most."""
    queue = simulation.scheduler.waiting.queue = InteractiveQueue(simulation.cache.tree, max_passed)
    for item in items:
        queue.push(item)
    simulation.run()
    taken = [int(name) for name in simulation.order]
    assert sorted(taken) == list(range(len(items)))
    return max(sum(before > one for before in taken[:at]) for at, one in enumerate(taken))


@pytest.mark.parametrize("max_passed", [0, 7, 40, 1000])
def test_a_backlog_larger_than_the_cache_is_computed_as_if_it_was_planned(max_passed):
    """20 prefixes of 10 requests in random order, KV for 4 prefixes."""
    prompts = reorder(job(20, 10, 500, 20), "shuffled", 20)
    simulation = Simulation(fifo([]), kv_tokens=2000, page_size=4, max_step_tokens=256)
    assert run(simulation, max_passed, requests(prompts, 8)) <= max_passed
    plan = plan_job(prompts, output_lengths=8, kv_budget_tokens=2000)
    planned = plan.report.processed_tokens_all_levels
    assert simulation.processed == planned if max_passed == 1000 else simulation.processed > planned
    assert max_passed or simulation.order == [str(i) for i in range(200)]


@pytest.mark.parametrize("common", [0, 500])
def test_requests_without_company_are_served_as_they_come(common):
    rng = np.random.default_rng(0)
    head = rng.integers(0, 30_000, common).tolist()
    prompts = [head + rng.integers(0, 30_000, 90).tolist() for _ in range(40)]
    simulation = Simulation(fifo([]), kv_tokens=2000, max_step_tokens=256)
    assert run(simulation, 1000, requests(prompts, 8)) == 0


def test_preempted_requests_go_before_all_that_wait():
    simulation = Simulation(fifo([]), kv_tokens=1024, page_size=4)
    queue = simulation.scheduler.waiting.queue = InteractiveQueue(simulation.cache.tree, 1000)
    for item in requests(reorder(job(4, 20, 100, 10), "shuffled", 4), 150):
        queue.push(item)
    scheduler = simulation.scheduler
    while not scheduler.idle():
        preempted = {one for one in scheduler.waiting if one.order >= 0}
        assert simulation.step()
        assert not simulation.draft.opened or not preempted & set(scheduler.waiting)
    assert scheduler.room.num_preempted > 10


def begun(cached: RadixTree[Node], items: list[Request]) -> Turns:
    """A backlog whose oldest, which shares nothing, was just taken: the others may pass."""
    turns = Turns(cached, 1000)
    for item in [Request(request_id="first", prompt_token_ids=[0]), *items]:
        turns.push(item, "", 1.0)
    assert turns.pop().request_id == "first"
    return turns


def names(turns: Turns) -> list[str]:
    return [turns.pop().request_id for _ in range(len(turns))]


LONG = [7] * 500


def beginning(*lengths: int) -> list[Request]:
    """Prompts that begin with so many tokens of `LONG`."""
    return [
        Request(request_id=str(length), prompt_token_ids=[*LONG[:length], 1]) for length in lengths
    ]


def test_the_longest_prefix_goes_first():
    cached = tree()
    turns = begun(cached, beginning(0, 100, 300, 200))
    store(cached, Request(request_id="", prompt_token_ids=LONG))
    assert names(turns) == ["300", "200", "100", "0"]


def test_nobody_is_passed_for_a_little():
    cached = tree()
    turns = begun(cached, beginning(100, 99 + MIN_AHEAD, 100 + MIN_AHEAD))
    store(cached, Request(request_id="", prompt_token_ids=LONG))
    assert names(turns) == ["164", "100", "163"]


def test_who_comes_later_than_the_oldest_before_passes_nobody():
    cached = tree()
    turns = begun(cached, beginning(0, 1))
    store(cached, Request(request_id="", prompt_token_ids=LONG))
    turns.push(beginning(400)[0], "", 1.0)
    assert [turns.pop().request_id for _ in range(2)] == ["0", "400"]


def test_arrivals_that_never_end_let_everybody_through():
    """A lone request, and twice as many as are taken whose prefix is cached."""
    cached = tree()
    turns = Turns(cached, 10**9)
    taken = []
    for i in range(40):
        for own in (2 * i, 2 * i + 1):
            turns.push(prompt("lone" if own == 5 else str(own), int(own == 5), own), "", 1.0)
        taken.append(turns.pop())
        store(cached, taken[-1])
    assert "lone" in {request.request_id for request in taken[:12]}


@pytest.mark.parametrize("whose", ["", "mine", "other"])
@pytest.mark.parametrize("common", [0, MIN_AHEAD])
def test_only_what_its_salt_has_cached_lets_a_request_pass(whose, common):
    """And what the operator has said is common."""
    cached = tree()
    store(cached, prompt("", 2, 0, cache_salt=whose, common_prefix_tokens=common))
    ours = {"cache_salt": "mine", "common_prefix_tokens": common}
    turns = begun(cached, [prompt("1", 1, 1, **ours), prompt("2", 2, 2, **ours)])
    assert names(turns) == (["2", "1"] if common or whose == "mine" else ["1", "2"])


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "pop", "remove", "evict"]),
        st.integers(0, 3),  # a prefix
        st.sampled_from("abc"),  # a key
    )
)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@given(ACTIONS, st.sampled_from([0, 1, 3, 1000]))
def test_none_is_lost_nobody_is_passed_too_often_and_keys_keep_their_turns(actions, max_passed):
    cached = tree()
    turns, plain = Turns(cached, max_passed), Turns(tree(), 0)
    waiting: dict[str, dict[str, int]] = {key: {} for key in WEIGHTS}  # name -> times passed
    behind: dict[str, list[str]] = {key: [] for key in WEIGHTS}  # in `plain`, which passes nobody
    for number, (action, group, key) in enumerate(actions):
        if action == "push":
            one = prompt(f"{key}{number}", group, number)
            turns.push(one, key, WEIGHTS[key])
            plain.push(one, key, WEIGHTS[key])
            waiting[key][one.request_id] = 0
            behind[key].append(one.request_id)
        elif action == "pop" and len(turns):
            peeked = turns.peek()
            taken = turns.pop()
            assert taken is peeked
            line = waiting[taken.request_id[0]]
            for name in [name for name in line if int(name[1:]) < int(taken.request_id[1:])]:
                line[name] += 1
                assert line[name] <= max_passed
            del line[taken.request_id]
            store(cached, taken)
            first = plain.pop().request_id
            assert first[0] == taken.request_id[0]
            assert behind[first[0]].pop(0) == first
        elif action == "remove" and waiting[key]:
            name = next(reversed(waiting[key]))
            assert turns.remove(name).request_id == name
            del waiting[key][name]
            assert plain.remove(behind[key].pop()) is not None
        elif action == "evict":
            for node in [node for node in cached if not node.children]:
                cached.remove(node)
        assert len(turns) == sum(map(len, waiting.values()))
    assert {turns.pop().request_id for _ in range(len(turns))} == {
        name for line in waiting.values() for name in line
    }
    assert turns.peek() is None
    assert turns.remove("a0") is None


def order(turns: Turns, count: int) -> str:
    return "".join(turns.pop().request_id[0] for _ in range(count))


def filled(**lines: tuple[int, float]) -> Turns:
    turns = Turns(tree(), 0)
    for key, (count, weight) in lines.items():
        for i in range(count):
            turns.push(prompt(f"{key}{i}", 0, i), key, weight)
    return turns


def test_a_key_with_many_requests_does_not_go_before_others():
    assert order(filled(a=(5, 1), b=(2, 1), c=(1, 1)), 8) == "abcabaaa"


def test_weights_are_shares():
    assert order(filled(a=(40, 3), b=(40, 1)), 40).count("a") == 30


def test_a_pause_gives_no_credit():
    turns = filled(a=(20, 1), b=(1, 1))
    order(turns, 11)
    for i in range(10):
        turns.push(prompt(f"b-{i}", 0, i), "b", 1)
    assert order(turns, 8).count("b") == 4
