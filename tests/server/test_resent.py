"""Requests of an engine that died are sent again once, and nothing is heard twice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable

import pytest

from onestem.llm import LLM
from onestem.request import CompletionOutput
from onestem.server.errors import ApiError, EngineDownError
from onestem.server.link.inbox import Inbox
from onestem.server.link.messages import Delta
from tests.server.harness import WAIT, running
from tests.server.test_inbox import last, take

BODY = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "return_token_ids": True}
SEED = {"seed": 7}


class Dies:
    """Has the first engines die after some steps (pass it as `change`), once all have come."""

    def __init__(self, *steps: int) -> None:
        self._steps = list(steps)
        self.deaths = 0
        self.all_there = threading.Event()

    def __call__(self, llm: LLM) -> None:
        if not self._steps:
            return
        step, left = llm.engine.step_news, self._steps.pop(0)

        def dying() -> tuple:
            nonlocal left
            assert self.all_there.wait(WAIT)
            left -= 1
            news = step()
            if left < 0:  # nobody hears of it
                self.deaths += 1
                raise OSError("as if the device had failed")
            return news

        llm.engine.step_news = dying


def bodies() -> list[dict]:
    kinds = [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True, "logprobs": 1}]
    return [{**BODY, "prompt": f"number {i}", "seed": i, **kind} for i, kind in enumerate(kinds)]


def choices_of(answer) -> dict[int, tuple[str, list[int], str]]:
    """Index -> (text, token ids, finish reason), whole or streamed."""
    if answer.headers["content-type"] == "application/json":
        events = [answer.json()]
    else:
        data = [event.removeprefix("data: ") for event in answer.text.split("\n\n")]
        assert data[-2:] == ["[DONE]", ""]
        events = [json.loads(one) for one in data[:-2]]
    found: dict[int, tuple[str, list[int], str]] = {}
    for event in events:
        for choice in event["choices"]:
            text, ids, _ = found.get(choice["index"], ("", [], ""))
            ids = ids + choice["token_ids"]
            found[choice["index"]] = (text + choice["text"], ids, choice["finish_reason"])
    return found


def ask_all(server, there: threading.Event, asked: list[dict] | None = None) -> list:
    asked = bodies() if asked is None else asked
    answers: list = [None] * len(asked)

    def ask(i: int, body: dict) -> None:
        with server.http() as http:
            answers[i] = http.post("/v1/completions", json=body)

    threads = [threading.Thread(target=ask, args=each) for each in enumerate(asked)]
    for thread in threads:
        thread.start()
    server.until(lambda: len(server.service.client.requests) == len(answers))
    there.set()
    for thread in threads:
        thread.join(WAIT)
    return answers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_model) -> list:
    held = Dies(10**9)
    state = tmp_path_factory.mktemp("whole")
    with running(state, model=tiny_model, engine=SEED, change=held) as server:
        return [choices_of(answer) for answer in ask_all(server, held.all_there)]


@pytest.mark.parametrize("steps", [0, 1, 6, 15])
def test_whoever_an_engine_was_answering_gets_the_whole_answer(
    tmp_path, tiny_model, undisturbed, steps
):
    dies = Dies(steps)
    with running(tmp_path, model=tiny_model, engine=SEED, change=dies) as server:
        answers = ask_all(server, dies.all_there)
        assert dies.deaths == 1
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert [choices_of(answer) for answer in answers] == undisturbed
        assert [{reason for _, _, reason in one.values()} for one in undisturbed] == [
            {"length"}
        ] * len(undisturbed)
        server.check()


def test_who_was_there_twice_is_told(tmp_path, tiny_model):
    dies = Dies(0, 0)
    dies.all_there.set()
    with running(tmp_path, model=tiny_model, change=dies) as server, server.http() as http:
        answer = http.post("/v1/completions", json={**BODY, "prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_down"
        assert "died twice" in answer.json()["error"]["message"]
        server.until(lambda: server.service.client.supervisor.state == "running")
        assert http.post("/v1/completions", json={**BODY, "prompt": "a"}).status_code == 200
        server.check()


def test_who_waited_each_time_is_none_of_them(tmp_path, tiny_model):
    """The step has room for one prompt."""
    dies = Dies(0, 0)
    asked = [{**BODY, "prompt": [7 + i] * 20} for i in range(4)]
    engine = {"max_step_tokens": 8}
    with running(tmp_path, model=tiny_model, engine=engine, change=dies) as server:
        answers = ask_all(server, dies.all_there, asked)
        assert dies.deaths == 2
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503]
        assert server.service.client.requests.num_waiting == 0
        server.check()


def piece(ids: list[int], text: str) -> Delta:
    return Delta(
        "r",
        [CompletionOutput(index=0, text=text, token_ids=ids, logprobs=[{i: -1.0} for i in ids])],
    )


def heard(change: Callable[[Inbox], None]) -> Inbox:
    """An inbox whose reader has tokens 1, 2 and 3, and whose engine then died."""
    inbox = Inbox(1)
    inbox.add(0, piece([1, 2], "ab"))
    inbox.add(0, piece([3], "c"))
    assert take(inbox)[0, 0].token_ids == [1, 2, 3]
    inbox.add(0, piece([4], "d"))  # which nobody has taken
    inbox.restart(0)
    assert take(inbox) == {}
    change(inbox)
    return inbox


def test_what_was_heard_is_not_heard_again():
    def again(inbox: Inbox) -> None:
        inbox.add_token((0, 0), 1, "")
        inbox.add(0, piece([2], "ab"))
        assert take(inbox) == {}
        inbox.add(0, piece([3, 4, 5], "cde"))

    found = take(heard(again))[0, 0]
    assert (found.token_ids, found.text) == ([4, 5], "de")
    assert found.logprobs == [{4: -1.0}, {5: -1.0}]


@pytest.mark.parametrize(
    "other",
    [
        lambda inbox: inbox.add(0, piece([1, 9], "ab")),
        lambda inbox: inbox.add(0, piece([1, 2], "az")),
        lambda inbox: inbox.add(0, last(ids=[1, 2], text="ab")),
        lambda inbox: inbox.add_token((0, 0), 9, "a"),
    ],
)
def test_an_answer_that_does_not_go_on_as_it_began_is_an_error(other):
    with pytest.raises(EngineDownError, match="its new answer differs"):
        asyncio.run(heard(other).wait())


def test_an_error_before_stays_the_error():
    inbox = heard(lambda inbox: None)
    inbox.fail(ApiError(504, "too late"))
    inbox.add(0, piece([9], "z"))
    with pytest.raises(ApiError, match="too late"):
        asyncio.run(inbox.wait())
