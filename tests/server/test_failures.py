"""Whatever fails in a route is OpenAI's error object, and the server goes on."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import sqlite3
from functools import partial

import pytest
from starlette.responses import Response

from onestem.engine.text.backend import Backend
from onestem.server.api import reply, routes
from onestem.server.api.app import Contained
from onestem.server.errors import BUG
from tests.server.test_batches import upload
from tests.server.test_refusals import ask

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


class Odd(BaseException):
    """Of no library that is known."""


@pytest.mark.parametrize("kind", [PANIC, Odd, ValueError, BaseExceptionGroup])
def test_a_500_is_json(embedded, monkeypatch, kind):
    def fail(*_):
        raise BaseExceptionGroup("two", [Odd()]) if kind is BaseExceptionGroup else kind("bug")

    monkeypatch.setattr(routes, "tokenize_body", fail)
    with embedded.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json() == {
            "error": {
                "message": "an error in the server: its log says which",
                "type": "server_error",
                "param": None,
                "code": None,
            }
        }
        assert ask(http, "completions").status_code == 200


def test_a_full_disk_is_said(embedded, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedded.service.jobs, "_keep_new", fail)
    with embedded.http() as http:
        name = upload(http, b"x")
        body = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = http.post("/v1/batches", json=body)
        assert answer.status_code == 507
        assert answer.json()["error"]["message"].startswith("the server's disk is full")
        http.delete(f"/v1/files/{name}")


def test_a_full_database_is_said(embedded, monkeypatch):
    def fail(*_):
        database = sqlite3.connect(":memory:")
        database.execute("CREATE TABLE rows (value)")
        database.execute("PRAGMA max_page_count = 2")
        database.execute("INSERT INTO rows VALUES (zeroblob(100000))")

    monkeypatch.setattr(embedded.service.store, "save_named", fail)
    with embedded.http() as http:
        answer = http.put("/v1/prefixes/long", json={"text": "long"})
        assert answer.status_code == 507
        assert answer.json()["error"]["message"].startswith("the server's disk is full")
        assert http.get("/v1/prefixes").json()["data"] == []


@pytest.mark.parametrize("kind", [PANIC, ValueError])
def test_a_stream_that_fails_ends_with_an_error(embedded, monkeypatch, kind):
    def fail(*_):
        raise kind("bug")

    monkeypatch.setattr(reply, "events", fail)
    with embedded.http() as http:
        *_, last, done, end = ask(http, "completions", stream=True).text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["message"], error["type"]) == (BUG, "server_error")


@pytest.mark.parametrize(
    ("asked", "status"), [("bytes=90-", 416), ("bytes=0-a", 400), ("lines=1-2", 400)]
)
def test_a_part_that_a_file_does_not_have(embedded, asked, status):
    with embedded.http() as http:
        file = f"/v1/files/{upload(http, b'x' * 90)}"
        path = f"{file}/content"
        answer = http.get(path, headers={"Range": asked})
        assert answer.status_code == status
        assert "it has 90 bytes" in answer.json()["error"]["message"]
        part = http.get(path, headers={"Range": "bytes=80-"})
        assert (part.status_code, part.content) == (206, b"x" * 10)
        http.delete(file)


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"\x16\x03\x01\x02\r\n\r\n"]
)
def test_what_is_no_http(embedded, sent):
    address = embedded.service.settings.host, int(embedded.url.rpartition(":")[2])
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        head, _, body = b"".join(iter(partial(connection.recv, 1 << 16), b"")).partition(
            b"\r\n\r\n"
        )
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"].startswith("the request cannot be read: ")


def test_a_call_that_the_end_of_the_server_cuts_gets_an_error():
    """uvicorn cancels calls that run on after `--grace`."""
    sent = []

    async def forever(scope, receive, send):
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def call() -> None:
        contained = Contained(forever, answer=lambda request, error: Response(repr(error), 503))
        task = asyncio.create_task(contained({"type": "http"}, None, send))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(call())
    assert (sent[0]["status"], sent[1]["body"]) == (503, b"CancelledError()")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_text_on_which_the_library_panics(embedded, monkeypatch, path):
    """Costs its request alone."""
    library = embedded.service.model.tokenizer._control.library

    class Panics:
        def __getattr__(self, name):
            return getattr(library, name)

        def encode(self, text, **how):
            if "panic" in text:
                raise PANIC("retry-limit-in-match over\nbacktrace")
            return library.encode(text, **how)

        def encode_batch_fast(self, texts, **how):
            for text in texts:
                self.encode(text, **how)
            return library.encode_batch_fast(texts, **how)

    monkeypatch.setattr(embedded.service.model.tokenizer, "_control", wrapped := Backend(library))
    monkeypatch.setattr(wrapped, "library", Panics())
    with embedded.http() as http:
        answer = http.post(path, json={"prompt": "panic"})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message == (
            "a text of 5 characters cannot be tokenised: its library fails "
            "(retry-limit-in-match over)"
        )
        assert http.post(path, json={"prompt": "calm"}).status_code == 200
