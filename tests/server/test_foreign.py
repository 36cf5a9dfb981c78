"""What pages of other sites can have a browser send is refused."""

from __future__ import annotations

import json

import pytest

from onestem.errors import ConfigError
from onestem.server.api.foreign import hosts_of
from tests.server.harness import running

BODY = {"prompt": "a", "max_tokens": 1}
JSON = "application/json"


@pytest.fixture(scope="module")
def bound_to(tmp_path_factory, tiny_model):
    """(host, allowed hosts) -> a server told that; what it listens on stays the loopback."""
    servers = {}

    def make(host: str, *allowed: str):
        if (host, allowed) not in servers:
            state = tmp_path_factory.mktemp("state")
            one = running(state, model=tiny_model, host=host, allowed_hosts=allowed)
            servers[host, allowed] = (one, one.__enter__())
        return servers[host, allowed][1]

    yield make
    for one, _ in servers.values():
        one.__exit__(None, None, None)


LOOPBACK = ("127.0.0.1",)
NAMED = ("127.0.0.1", "llm.example.org", ".example.com", "[fd00::1]")


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        *[(LOOPBACK, host, 200) for host in (
            "localhost", "localhost:8000", "127.0.0.1:9", "[::1]", "[::1]:8000", "LOCALHOST",
        )],
        *[(LOOPBACK, host, 403) for host in (
            "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
            "notlocalhost", "[::2]", "[::1", "",
        )],
        *[(("0.0.0.0",), host, 200) for host in ("evil.example", "10.0.0.1:8000", "localhost")],
        *[(("0.0.0.0", "llm.example.org"), host, status) for host, status in (
            ("llm.example.org:443", 200), ("localhost", 403),
        )],
        *[(NAMED, host, 200) for host in (
            "llm.example.org", "LLM.example.org:1", "a.example.com", "a.b.example.com", "[FD00::1]",
        )],
        *[(NAMED, host, 403) for host in (
            "localhost", "127.0.0.1", "example.com", "evilexample.com", "x.llm.example.org",
        )],
        (("127.0.0.1", "*"), "evil.example", 200),
    ],
)  # fmt: skip
def test_hosts(bound_to, bound, host, status):
    with bound_to(*bound).http() as http:
        http.headers["Host"] = host
        for path in ("/health", "/v1/models", "/", "/openapi.json"):
            assert http.get(path).status_code == status
        assert http.post("/v1/completions", json=BODY).status_code == status
        assert http.get("/none").status_code == (404 if status == 200 else 403)


def test_a_host_that_is_refused_is_named_with_the_way_out(bound_to):
    with bound_to(*LOOPBACK).http() as http:
        answer = http.get("/health", headers={"Host": "evil.example:8000"})
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.json()["error"] == {
        "message": "host 'evil.example:8000' is not allowed: start the server with "
        "--allowed-hosts to allow it",
        "type": "permission_error",
        "param": None,
        "code": "host_not_allowed",
    }


def test_hosts_of_addresses():
    local = ["localhost", "127.0.0.1", "::1"]
    for bound in ("127.0.0.1", "localhost", "::1", "127.0.0.5", "LocalHost"):
        assert hosts_of(bound, ()) == [*local, bound.lower()]
    for bound in ("0.0.0.0", "::", "10.0.0.1", "myhost"):
        assert hosts_of(bound, ()) == ["*"]
    for bound in ("127.0.0.1", "0.0.0.0"):
        assert hosts_of(bound, ["A.b", ".c", "*.d", "[::1]"]) == ["a.b", "*.c", "*.d", "::1"]


@pytest.mark.parametrize(
    "host", ["", ".", "*.", "http://a", "a:8000", "[::1]:8000", "a b", "a.*", "*a", "a..b"]
)
def test_what_is_no_host(host):
    with pytest.raises(ConfigError, match="allowed_hosts has"):
        hosts_of("127.0.0.1", [host])


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://{host}", 200),
        ("HTTPS://{host}", 200),
        ("http://evil.example", 403),
        ("http://localhost", 403),
        ("http://{host}.evil.example", 403),
        ("ftp://{host}", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_origins(bound_to, origin, status):
    server = bound_to(*LOOPBACK)
    with server.http() as http:
        http.headers["Origin"] = origin.format(host=server.url.removeprefix("http://"))
        answer = http.post("/v1/completions", json=BODY)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "origin_not_allowed"
        changed = (http.put("/v1/prefixes/a", json={"text": "a"}), http.delete("/v1/prefixes/a"))
        assert [answer.status_code for answer in changed] == [status] * 2
        # A browser shows these to pages of the server alone: none says otherwise.
        for method, path, found in (("GET", "/v1/models", 200), ("OPTIONS", "/v1/models", 405)):
            read = http.request(method, path)
            assert read.status_code == found
            assert "access-control-allow-origin" not in read.headers


@pytest.mark.parametrize("path", ["completions", "chat/completions", "batches", "prefixes/a"])
@pytest.mark.parametrize(
    ("given", "right"),
    [
        (JSON, True),
        ("application/json; charset=utf-8", True),
        ("Application/JSON", True),
        ("text/plain", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=x", False),
        ("text/plain; application/json", False),
        (None, False),
    ],
)
def test_types_of_bodies(embedded, path, given, right):
    headers = {} if given is None else {"Content-Type": given}
    method = "PUT" if path.startswith("prefixes") else "POST"
    with embedded.http() as http:
        answer = http.request(method, f"/v1/{path}", content=b'{"x": 1}', headers=headers)
    error = answer.json()["error"]
    if right:
        assert (answer.status_code, error["param"]) == (400, "x")
    else:
        assert answer.status_code == 415
        assert error["message"] == f"content-type is {given or ''!r}, expected application/json"
        assert error["code"] == "unsupported_media_type"


@pytest.mark.parametrize("given", [JSON, "text/plain", "multipart/form-dataX", None])
def test_types_of_uploads(embedded, given):
    headers = {} if given is None else {"Content-Type": given}
    with embedded.http() as http:
        answer = http.post("/v1/files", content=json.dumps({}), headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"].endswith("expected multipart/form-data")
