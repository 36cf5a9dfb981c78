"""A server of the page alone: its files under its own policy, and states that a test says."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "onestem" / "server" / "page" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class Stub:
    """What the server says now. `events` off: the stream is refused; `up` off: everything is.
    `pages` are others, with their policies. Chats need `key`, if there is one; the bodies that came
    are in `bodies`. `answers` are what a chat's stream sends: values of events, bytes as they are;
    None ends it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.events, self.up = True, True
        self.streams: list[queue.Queue[bytes | None]] = []
        self.asked: list[str] = []
        self.pages: dict[str, tuple[str, str]] = {}
        self.key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.answers: queue.Queue[dict[str, Any] | bytes | None] = queue.Queue()

    def say(self, state: dict[str, Any]) -> None:
        """Set the state and send it to all who listen."""
        self.state = state
        for stream in list(self.streams):
            stream.put(b"event: state\ndata: " + json.dumps(state).encode() + b"\n\n")

    def hang_up(self) -> None:
        for stream in list(self.streams):
            stream.put(None)


class Handler(BaseHTTPRequestHandler):
    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        stub: Stub = self.server.stub  # type: ignore[attr-defined]
        stub.asked.append(self.path)
        name = "index.html" if self.path == "/" else self.path.removeprefix("/page/")
        if self.path in stub.pages:
            html, policy = stub.pages[self.path]
            self.answer(200, "text/html; charset=utf-8", html.encode(), policy)
        elif self.path.startswith("/internal/") and not stub.up:
            self.answer(500, "text/plain", b"no")
        elif self.path == "/internal/state":
            self.answer(200, "application/json", json.dumps(stub.state).encode())
        elif self.path == "/internal/events" and stub.events:
            self.stream(stub)
        elif (PAGE / name).is_file():
            path = PAGE / name
            self.answer(200, TYPES[path.suffix], path.read_bytes())
        else:
            self.answer(404, "text/plain", b"not here")

    def do_POST(self) -> None:
        stub: Stub = self.server.stub  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if stub.key is not None and self.headers["Authorization"] != f"Bearer {stub.key}":
            error = {"error": {"message": "no valid API key"}}
            self.answer(401, "application/json", json.dumps(error).encode())
            return
        stub.bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with suppress(OSError):
            while (value := stub.answers.get()) is not None:
                if not isinstance(value, bytes):
                    value = b"data: " + json.dumps(value).encode() + b"\n\n"
                self.wfile.write(value)

    def answer(self, status: int, kind: str, body: bytes, policy: str = POLICY) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, stub: Stub) -> None:
        mine: queue.Queue[bytes | None] = queue.Queue()
        mine.put(b"event: state\ndata: " + json.dumps(stub.state).encode() + b"\n\n")
        stub.streams.append(mine)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            while (event := mine.get()) is not None:
                self.wfile.write(event)
        except OSError:
            pass
        stub.streams.remove(mine)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.stub = stub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stub.hang_up()
        stub.answers.put(None)
        server.shutdown()
        thread.join()
        server.server_close()
