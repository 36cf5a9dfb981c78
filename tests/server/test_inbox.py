"""What waits for a stream's reader, and when it is news."""

from __future__ import annotations

import asyncio

import pytest

from onestem.request import CompletionOutput, RequestMetrics
from onestem.server.errors import ApiError
from onestem.server.link.chunk_size import ChunkSize
from onestem.server.link.inbox import Inbox
from onestem.server.link.messages import Delta


def is_news(inbox: Inbox) -> bool:
    return inbox.has_news


def take(inbox: Inbox) -> dict[tuple[int, int], CompletionOutput]:
    if inbox.has_news:
        asyncio.run(inbox.wait())
    return inbox.take()


def last(index: int = 0, ids: list[int] | None = None, text: str = "") -> Delta:
    piece = CompletionOutput(index=index, text=text, token_ids=ids or [], finish_reason="length")
    return Delta("r", [piece], finished=True, metrics=RequestMetrics())


def test_tokens_and_pieces_that_meet_are_one_in_order():
    inbox = Inbox(1)
    part = inbox.part(0)
    for token, text in ((1, "a"), (2, ""), (3, "c")):
        part.on_token(0, token, text)
    part.on_token(1, 9, "z")
    part.on_delta(
        Delta(
            "r",
            [
                CompletionOutput(
                    index=0, text="de", token_ids=[4, 5], logprobs=[{4: -1.0}, {5: -2.0}]
                )
            ],
        )
    )
    part.on_token(1, 8, "y")
    part.on_delta(last(ids=[6], text="f"))
    pieces = inbox.take()
    assert (pieces[0, 0].text, pieces[0, 0].token_ids) == ("acdef", [1, 2, 3, 4, 5, 6])
    assert pieces[0, 0].logprobs == [{4: -1.0}, {5: -2.0}]
    assert pieces[0, 0].finish_reason == "length"
    assert (pieces[0, 1].text, pieces[0, 1].token_ids) == ("zy", [9, 8])
    assert inbox.drained


def test_each_token_is_news_where_chunks_are_of_one():
    inbox = Inbox(1)
    for token in range(3):
        inbox.add_token((0, 0), token, "x")
        assert is_news(inbox)
        assert take(inbox)[0, 0].token_ids == [token]


def test_chunks_hold_tokens_together_but_neither_the_first_nor_the_last():
    inbox = Inbox(1, ChunkSize(4))
    inbox.add_token((0, 0), 0, "a")
    assert is_news(inbox)
    take(inbox)
    for token in (1, 2, 3):
        inbox.add_token((0, 0), token, "b")
        assert not is_news(inbox)
    inbox.add_token((0, 1), 7, "q")  # another sequence's first
    assert is_news(inbox)
    assert take(inbox)[0, 0].token_ids == [1, 2, 3]
    for token in (4, 5, 6, 7):
        assert not is_news(inbox)
        inbox.add_token((0, 0), token, "c")
    assert is_news(inbox)
    take(inbox)
    inbox.add_token((0, 0), 8, "d")
    assert not is_news(inbox)
    inbox.add(0, last())
    assert is_news(inbox)
    assert take(inbox)[0, 0].token_ids == [8]


def test_an_error_ends_the_wait_and_comes_too_late_for_a_whole_answer():
    inbox = Inbox(1, ChunkSize(100))
    inbox.fail(ApiError(503, "gone"))
    with pytest.raises(ApiError, match="gone"):
        asyncio.run(inbox.wait())
    whole = Inbox(1)
    whole.add(0, last(ids=[1], text="a"))
    whole.fail(ApiError(503, "gone"))
    assert asyncio.run(whole.whole())[0, 0].text == "a"


class Reader:
    """Takes tokens at once while it is free; what it did not take stands in `later`."""

    def __init__(self, inbox: Inbox) -> None:
        self.at_once: list[int] = []
        self.later: list[int] = []
        self.is_free = True
        self.inbox = inbox
        inbox.direct = self.direct

    def direct(self, token_id: int, text: str) -> bool:
        if self.is_free:
            self.at_once.append(token_id)
        return self.is_free

    async def wait(self) -> None:
        await self.inbox.wait()
        self.later += self.inbox.take()[0, 0].token_ids


def test_a_token_goes_past_who_waits_only_while_nothing_stands_before_it():
    async def check() -> None:
        inbox = Inbox(1)
        reader = Reader(inbox)
        inbox.add_token((0, 0), 0, "a")  # nobody waits yet: something may still be unsent
        await reader.wait()
        waiting = asyncio.create_task(reader.wait())
        await asyncio.sleep(0)
        inbox.add_token((0, 0), 1, "b")
        assert reader.at_once == [1]
        reader.is_free = False
        inbox.add_token((0, 0), 2, "c")
        reader.is_free = True
        inbox.add_token((0, 0), 3, "d")  # behind one that is still to be taken
        await waiting
        assert (reader.at_once, reader.later) == ([1], [0, 2, 3])
        inbox.add_token((0, 0), 4, "e")  # what was taken may not be sent yet
        assert reader.at_once == [1]

    asyncio.run(check())


def test_a_chunk_of_several_tokens_waits_for_them():
    async def check() -> None:
        size = ChunkSize()
        inbox = Inbox(1, size)
        reader = Reader(inbox)
        inbox.add_token((0, 0), 0, "a")
        await reader.wait()
        waiting = asyncio.create_task(reader.wait())
        await asyncio.sleep(0)
        size.tokens = 2
        inbox.add_token((0, 0), 1, "b")
        assert not is_news(inbox)
        size.tokens = 1
        inbox.add_token((0, 0), 2, "c")
        await waiting
        assert (reader.at_once, reader.later) == ([], [0, 1, 2])

    asyncio.run(check())


def test_what_went_past_is_not_handed_out_again_when_the_engine_begins_anew():
    async def check() -> None:
        inbox = Inbox(1)
        reader = Reader(inbox)
        inbox.add_token((0, 0), 5, "a")
        await reader.wait()
        waiting = asyncio.create_task(reader.wait())
        await asyncio.sleep(0)
        inbox.add_token((0, 0), 6, "b")
        inbox.restart(0)
        for token, text in ((5, "a"), (6, "b")):
            inbox.add_token((0, 0), token, text)
        assert (reader.at_once, inbox.take()) == ([6], {})
        inbox.add_token((0, 0), 7, "c")
        await asyncio.sleep(0)
        assert reader.at_once == [6, 7]
        waiting.cancel()

    asyncio.run(check())
