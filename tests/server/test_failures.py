"""Whatever fails in a route is OpenAI's error object, and the server goes on."""

from __future__ import annotations

import pytest

from onestem.engine.text.backend import Backend
from onestem.server.api import app
from tests.server.test_refusals import ask

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


class Odd(BaseException):
    """Of no library that is known."""


@pytest.mark.parametrize("kind", [PANIC, Odd, ValueError, BaseExceptionGroup])
def test_a_500_is_json(embedded, monkeypatch, kind):
    def fail(*_):
        raise BaseExceptionGroup("two", [Odd()]) if kind is BaseExceptionGroup else kind("bug")

    monkeypatch.setattr(app, "tokenize_body", fail)
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


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_text_on_which_the_library_panics(embedded, monkeypatch, path):
    """Costs its request alone."""
    library = embedded.service.tokenizer._text.library

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

    monkeypatch.setattr(embedded.service.tokenizer, "_text", wrapped := Backend(library))
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
