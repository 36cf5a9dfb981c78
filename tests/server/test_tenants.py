"""Keys: who is let in, what belongs to whom, and what of the cache each sees."""

from __future__ import annotations

import base64
import json
import time

import pytest

from onestem.errors import ConfigError
from onestem.server.objects.tenants import Tenant, read_key_file
from tests.server.harness import running

ALICE, BOB, BOSS = "alice-secret-1", "bob-secret-12", "operator-secret"
TEXT = "The quick brown fox jumps over the lazy dog and goes on. " * 4


@pytest.fixture(scope="module")
def keyed(tmp_path_factory, tiny_model):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# who may ask\nalice:{ALICE}\n\nbob:{BOB}:2\noperator:{BOSS}\n")
    apps = {"support": {"text": "You are a kind assistant of a shop that sells old maps. " * 3}}
    with running(
        tmp_path_factory.mktemp("keyed"), model=tiny_model, api_key_file=path, apps=apps
    ) as server:
        yield server
        server.check()


def cached(server, key, **body) -> int:
    """How much of a prompt's KV was there."""
    with server.http(key) as http:
        answer = http.post("/v1/completions", json={"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_tokens(server, text: str) -> int:
    return len(server.service.model.tokenizer.encode(text))


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer x", f"Bearer {ALICE}x", f"Token {ALICE}", "Basic %"],
)
def test_nobody_else_is_let_in(keyed, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    with keyed.http() as http:
        for method, path in (
            ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/files"),
            ("PUT", "/v1/prefixes/a"), ("GET", "/v1/batches"), ("GET", "/internal/state"),
            ("GET", "/metrics"), ("GET", "/"),
        ):  # fmt: skip
            answer = http.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/health").status_code == 200


def test_the_document_names_each_way_to_send_a_key(keyed):
    with keyed.http(ALICE) as http:
        made = http.get("/openapi.json").json()
    schemes = made["components"]["securitySchemes"]
    for ways in made["security"]:  # any of them will do
        (way,) = (schemes[name] for name in ways)
        name = way.get("name", "authorization")
        value = ALICE if way["type"] == "apiKey" else f"{way['scheme'].title()} {ALICE}"
        with keyed.http() as http:
            assert http.get("/v1/models", headers={name: value}).status_code == 200
    assert {way["type"] for way in schemes.values()} == {"apiKey", "http"}


def test_the_page_is_the_operators(keyed):
    with keyed.http(ALICE) as http:
        for path in ("/", "/metrics", "/internal/state"):
            assert http.get(path).status_code == 403
    password = base64.b64encode(f"me:{BOSS}".encode()).decode()
    with keyed.http(BOSS) as http:
        assert http.get("/internal/state").status_code == 200
        basic = http.get("/internal/state", headers={"Authorization": f"Basic {password}"})
        assert basic.status_code == 200
        metrics = http.get("/metrics", headers={"Authorization": f"Basic {password}"})
        assert metrics.status_code == 200
    with keyed.http() as http:
        assert http.get("/").headers["www-authenticate"].startswith("Basic")


def test_what_a_browser_sends_along_with_any_request_opens_no_route_of_the_api(keyed):
    password = base64.b64encode(f"me:{BOSS}".encode()).decode()
    with keyed.http() as http:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            headers = {"Authorization": f"Basic {password}"}
            answer = http.request(method, path, headers=headers, json={"prompt": "a"})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]


def test_neither_keys_prompts_ever_match_the_others_runs(keyed):
    whole = num_tokens(keyed, TEXT) - 1
    assert cached(keyed, ALICE, prompt=TEXT) == 0
    assert cached(keyed, BOB, prompt=TEXT) == 0
    assert cached(keyed, ALICE, prompt=TEXT) == whole
    assert cached(keyed, BOB, prompt=TEXT) == whole


def test_a_salt_of_its_own_separates_a_keys_users(keyed):
    whole = num_tokens(keyed, TEXT) - 1
    for salt in ("ann", "ben"):
        assert cached(keyed, ALICE, prompt=TEXT, cache_salt=salt) == 0
        assert cached(keyed, ALICE, prompt=TEXT, cache_salt=salt) == whole
    assert cached(keyed, BOB, prompt=TEXT, cache_salt="ann") == 0


def test_salts_of_different_keys_are_never_equal():
    names = ["", "a", "b", 'a", "b', "a/b"]
    salts = {Tenant(name).salt(own) for name in names for own in names}
    assert len(salts) == len(names) ** 2
    assert Tenant("").salt() == ""


def test_an_operators_prefix_is_shared_by_all(keyed):
    app = keyed.service.prefixes.find(Tenant("x"), "support")
    size = len(app.forms["completion"])
    own = " And what is the weather in Oakham?"
    assert cached(keyed, ALICE, prompt=own, prefix="support") == size
    assert cached(keyed, BOB, prompt=own, prefix="support") == size
    # Who simply begins with it shares it too; what comes behind it is the key's own again.
    text = app.source["text"] + own
    assert cached(keyed, BOB, prompt=text) >= size
    assert cached(keyed, ALICE, prompt=text, cache_salt="new") == size


def test_prefixes_files_and_batches_belong_to_a_key(keyed):
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
    )
    with keyed.http(ALICE) as alice, keyed.http(BOB) as bob:
        assert alice.put("/v1/prefixes/mine", json={"text": TEXT}).status_code == 200
        file = alice.post(
            "/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"}
        ).json()["id"]
        batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        made = alice.post("/v1/batches", json=batch).json()["id"]
        for path in (f"files/{file}", f"files/{file}/content", f"batches/{made}", "prefixes/mine"):
            assert alice.get(f"/v1/{path}").status_code == 200
            assert bob.get(f"/v1/{path}").status_code == 404
        assert bob.post("/v1/batches", json=batch).status_code == 404
        assert bob.post(f"/v1/batches/{made}/cancel").status_code == 404
        for path in (f"files/{file}", "prefixes/mine"):
            assert bob.delete(f"/v1/{path}").status_code == 404
        for path in ("files", "batches"):
            assert bob.get(f"/v1/{path}").json()["data"] == []
        shown = {prefix["name"] for prefix in bob.get("/v1/prefixes").json()["data"]}
        assert shown == {"support"}
        assert bob.put("/v1/prefixes/support", json={"text": TEXT}).status_code == 409
        assert bob.delete("/v1/prefixes/support").status_code == 403
        # A key's own prefix of the same name is another one.
        assert bob.put("/v1/prefixes/mine", json={"text": "bob's"}).json()["version"] == 1
        keyed.until(lambda: keyed.service.jobs.active is None)
        for http in (alice, bob):
            assert http.delete("/v1/prefixes/mine").status_code == 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no keys"),
        ("alice", "at least 8"),
        ("al ice:12345678", "letters, digits"),
        ("a:12345678:0", "weight"),
        ("a:12345678:x", "weight"),
        ("a:12345678\na:87654321", "twice"),
        ("a:12345678\nb:12345678", "twice"),
    ],
)
def test_bad_key_files(tmp_path, text, reason):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_key_file(path)


def test_memory_is_shown_under_its_owners_names(keyed):
    """A stream of alice's, a batch of bob's, a prefix of alice's and the operator's."""
    line = {"prompt": "Of a batch of bob's. " * 9, "max_tokens": 1500, "ignore_eos": True}
    raw = json.dumps(
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": line}
    ).encode()
    with keyed.http(ALICE) as alice, keyed.http(BOB) as bob, keyed.http(BOSS) as boss:
        rest = {"cache", "requests", "prefix support"}
        until = time.monotonic() + 20
        while time.monotonic() < until:  # what other tests have left, and the state's age
            kv = boss.get("/internal/state").json()["kv"]
            if {owner["owner"] for owner in kv["owners"]} <= rest:
                break
        alice.put("/v1/prefixes/maps", json={"text": "All maps are drawn to scale. " * 4})
        files = {"file": ("in.jsonl", raw)}
        file = bob.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
        body = {"prompt": "Alice's. " * 9, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with alice.stream("POST", "/v1/completions", json=body):
            job = bob.post(
                "/v1/batches",
                json={
                    "input_file_id": file,
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                },
            ).json()["id"]
            wanted = {"key alice", f"job {job}", "prefix support", "prefix maps of alice"}
            seen: set[str] = set()
            until = time.monotonic() + 20
            while not seen >= wanted and time.monotonic() < until:
                kv = boss.get("/internal/state").json()["kv"]
                seen |= {owner["owner"] for owner in kv["owners"]}
        bob.post(f"/v1/batches/{job}/cancel")
        alice.delete("/v1/prefixes/maps")
    assert seen - {"cache", "requests"} == wanted


def test_batches_have_the_weight_of_their_key(keyed):
    """Their grammars take turns as the key's requests do; a key that is gone has the usual one."""
    jobs = keyed.service.jobs
    assert [jobs.tenant(name).weight for name in ("alice", "bob", "gone", "")] == [1, 2, 1, 1]
