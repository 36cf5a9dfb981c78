"""How many requests are handed to an engine ahead of its admitting them."""

from __future__ import annotations

import pytest

from onestem.request import Request, SamplingParams
from onestem.server.link.client import LOOKAHEAD, EngineClient
from onestem.server.link.messages import Add, Report


class Silent:
    """Neither starts an engine nor hears of tokens."""

    async def launch(self):
        raise OSError

    def on_token(self, index, token_id, text):
        raise AssertionError

    on_delta = on_error = on_token


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Add]:
    messages: list[Add] = []
    monkeypatch.setattr(EngineClient, "_send", lambda self, message: messages.append(message))
    return messages


def asked(count: int) -> EngineClient:
    client = EngineClient(Silent(), queue_limit=1000)
    client.state = "running"
    for number in range(count):
        params = SamplingParams(max_tokens=4)
        request = Request(request_id=str(number), prompt_token_ids=[1], params=params)
        client.submit(request, "key", 1.0, Silent())
    return client


def test_few_go_ahead(sent) -> None:
    client = asked(300)
    assert len(sent) == LOOKAHEAD
    client._take(Report(num_received=10, num_waiting=0, num_running=10))
    assert len(sent) == 10 + LOOKAHEAD
    assert [add.number for add in sent] == list(range(len(sent)))


def test_few_wait_in_the_engine_however_many_run(sent) -> None:
    client = asked(300)
    client._take(Report(num_received=32, num_waiting=5, num_running=400))
    assert len(sent) == 32 + LOOKAHEAD - 5
    client._take(Report(num_received=59, num_waiting=LOOKAHEAD, num_running=400))
    assert len(sent) == 32 + LOOKAHEAD - 5
