"""PML over HTTP: schemas as objects, prompts of modules; answers are those of `generate_pml`."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from onestem.errors import ConfigError
from onestem.llm import LLM
from onestem.request import SamplingParams
from onestem.server.objects import schemas
from onestem.server.objects.tenants import EVERYBODY, Tenant
from onestem.server.settings import Settings
from tests.server.harness import Held, running

SCHEMA = (
    '<schema name="places">You know places.'
    '<module name="oakham">Oakham lies by the river and has 1250 people.</module>'
    '<module name="ashford">Ashford lies on a hill and has 300 people.</module></schema>'
)
PROMPT = '<prompt schema="places"><{}/>How many people live there?</prompt>'


def ask(http, **body):
    body = {"max_tokens": 8, "temperature": 0, **body}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return http.post(path, json=body)


def test_answers_are_those_of_generate_pml(embedded):
    llm = LLM(kv_memory="256MiB", device="cpu", dtype="float32")
    llm.add_schema(SCHEMA)
    params = SamplingParams(max_tokens=8, temperature=0)
    with embedded.http() as http:
        made = http.put("/v1/schemas/places", json={"pml": SCHEMA}).json()
        assert (made["version"], made["modules"]) == (1, 2)
        assert http.get("/v1/schemas/places").json()["pml"] == SCHEMA
        for module in ("oakham", "ashford", "oakham"):
            for isolation in ("anchored", "isolated", "off"):
                prompt = PROMPT.format(module)
                expected = llm.generate_pml(prompt, params, isolation=isolation)[0].outputs[0].text
                whole = ask(http, pml=prompt, isolation=isolation).json()
                assert whole["choices"][0]["text"] == expected
        again = ask(http, pml=PROMPT.format("oakham")).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 10
        streamed = ask(http, pml=PROMPT.format("oakham"), stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        changed = SCHEMA.replace("1250", "77")
        assert http.put("/v1/schemas/places", json={"pml": changed}).json()["version"] == 2
        assert [s["name"] for s in http.get("/v1/schemas").json()["data"]] == ["places"]
        assert http.delete("/v1/schemas/places").json()["deleted"]
        assert ask(http, pml=PROMPT.format("oakham")).status_code == 404
    embedded.check()


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("places", {}, "body has no pml"),
        ("places", {"pml": "/etc/hostname"}, "begins with <"),
        ("places", {"pml": "<schema"}, "1:"),
        ("other", {"pml": SCHEMA}, "expected 'other'"),
        ("places", {"markup": SCHEMA}, "unknown field"),
        ("places", {"pml": SCHEMA, "encode": "yes"}, "encode is 'yes'"),
    ],
)
def test_bad_schemas(embedded, name, body, reason):
    with embedded.http() as http:
        answer = http.put(f"/v1/schemas/{name}", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_a_key_has_so_many_schemas_at_most(embedded, monkeypatch):
    """All of them are in memory. One that is there may have a next version."""
    monkeypatch.setattr(schemas, "MOST_SCHEMAS", 2)
    with embedded.http() as http:
        for name in ("one", "two"):
            put = http.put(f"/v1/schemas/{name}", json={"pml": SCHEMA.replace("places", name)})
            assert put.status_code == 200
        body = {"pml": SCHEMA.replace("places", "three")}
        refused = http.put("/v1/schemas/three", json=body)
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert error["code"] == "too_many_schemas"
        assert error["message"] == (
            "this key has 2 schemas, limit is 2: delete one that is not used"
        )
        again = http.put("/v1/schemas/one", json={"pml": SCHEMA.replace("places", "one")})
        assert again.json()["version"] == 2
        assert http.delete("/v1/schemas/two").status_code == 200
        assert http.put("/v1/schemas/three", json=body).status_code == 200
        for name in ("one", "three"):
            http.delete(f"/v1/schemas/{name}")


def test_modules_outlive_the_server(tmp_path, tiny_model):
    """With a folder for them, a second server reads what the first has computed."""
    engine = {"disk_kv": tmp_path / "modules", "host_kv": "1MiB"}
    file = tmp_path / "places.xml"
    file.write_text(SCHEMA)
    texts = []
    for state in ("first", "second"):
        with (
            running(tmp_path / state, model=tiny_model, engine=engine, schemas=[file]) as server,
            server.http() as http,
        ):
            texts += [ask(http, pml=PROMPT.format(m)).json() for m in ("oakham", "ashford")]
            server.check()
            server.launcher.llms[0].engine.tiers.stores.flush()
    assert [t["choices"] for t in texts[:2]] == [t["choices"] for t in texts[2:]]
    assert any((tmp_path / "modules").rglob("*.safetensors"))


def test_bad_prompts(tmp_path, tiny_model):
    file = tmp_path / "places.xml"
    file.write_text(SCHEMA)
    with (
        running(tmp_path / "state", model=tiny_model, schemas=[file]) as server,
        server.http() as http,
    ):
        good = PROMPT.format("oakham")
        assert ask(http, pml=good).status_code == 200
        for changes, reason in (
            ({"pml": PROMPT.format("bath")}, "bath"),
            ({"pml": good, "prompt": "x"}, "give one of them"),
            ({"pml": good, "prefix": "x"}, None),
            ({"pml": good, "isolation": "none"}, "isolation"),
            ({"pml": good, "prompt_logprobs": 1}, "prompt_logprobs"),
        ):
            answer = ask(http, **changes)
            assert answer.status_code in (400, 404)
            assert reason is None or reason in answer.json()["error"]["message"]
        assert http.put("/v1/schemas/places", json={"pml": SCHEMA}).status_code == 409
        assert http.delete("/v1/schemas/places").status_code == 403
        server.check()


def test_keys_share_the_modules_of_the_operators_schemas_alone(tmp_path, tiny_model):
    keys, file = tmp_path / "keys", tmp_path / "places.xml"
    keys.write_text("alice:alice-secret-1\nbob:bob-secret-12\n")
    file.write_text(SCHEMA)
    own = SCHEMA.replace('"places"', '"mine"').replace("1250", "77")

    def cached(http, schema: str, **body) -> int:
        prompt = PROMPT.format("oakham").replace('"places"', f'"{schema}"')
        answer = ask(http, pml=prompt, **body)
        assert answer.status_code == 200, answer.text
        texts.setdefault(schema, set()).add(answer.json()["choices"][0]["text"])
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    texts: dict[str, set[str]] = {}
    with (
        running(tmp_path / "s", model=tiny_model, schemas=[file], api_key_file=keys) as server,
        server.http("alice-secret-1") as alice,
        server.http("bob-secret-12") as bob,
    ):
        assert cached(alice, "places") == 0
        modules = cached(bob, "places")
        assert modules > 10
        # His own text he finds again, and nobody else's.
        assert cached(bob, "places") > modules
        assert cached(bob, "places", cache_salt="x") == modules
        for http in (alice, bob):
            assert http.put("/v1/schemas/mine", json={"pml": own}).status_code == 200
            assert cached(http, "mine") == 0
        assert cached(alice, "mine") > 10
        assert {len(answers) for answers in texts.values()} == {1}
        server.check()


# --- encoding ------------------------------------------------------------------------------------


def cached_and_text(http, prompt: str, **body) -> tuple[int, str]:
    answer = ask(http, pml=prompt, **body).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer["choices"][0]["text"]


def test_an_encoded_schema_is_cached_when_the_first_request_comes(tmp_path, tiny_model):
    prompts = [PROMPT.format(module) for module in ("oakham", "ashford")]
    with running(tmp_path / "s", model=tiny_model) as server, server.http() as http:
        made = http.put("/v1/schemas/places", json={"pml": SCHEMA, "encode": True}).json()
        assert made["version"] == 1
        for prompt in prompts:
            modules = server.service.schemas.compile(EVERYBODY, prompt, "anchored")
            cached, text = cached_and_text(http, prompt)
            assert cached == modules.num_cached_tokens
            # A salt of its own computes it all with the request.
            assert cached_and_text(http, prompt, cache_salt=prompt) == (0, text)
        assert http.put("/v1/schemas/places", json={"pml": SCHEMA}).json()["version"] == 2
        server.check()


def test_the_operators_are_encoded_for_all_keys(tmp_path, tiny_model):
    keys, file = tmp_path / "keys", tmp_path / "places.xml"
    keys.write_text("alice:alice-secret-1\nbob:bob-secret-12\n")
    file.write_text(SCHEMA)
    settings = {"schemas": [file], "encode_schemas": True, "api_key_file": keys}
    with (
        running(tmp_path / "s", model=tiny_model, **settings) as server,
        server.http("alice-secret-1") as alice,
        server.http("bob-secret-12") as bob,
    ):
        modules = server.service.schemas.compile(
            Tenant("alice"), PROMPT.format("oakham"), "anchored"
        )
        for http in (alice, bob):
            cached, _ = cached_and_text(http, PROMPT.format("oakham"))
            assert cached == modules.num_cached_tokens
        server.check()
    with pytest.raises(ConfigError, match="encode_schemas is set and there is no schema"):
        Settings(encode_schemas=True)


def many_modules(count: int) -> str:
    modules = "".join(f'<module name="m{i}">Town {i} lies there.</module>' for i in range(count))
    return f'<schema name="many">{modules}</schema>'


def test_requests_pass_an_encoding_and_the_engines_end_ends_it(tmp_path, tiny_model):
    held, engine = Held(), {"max_step_tokens": 24}
    with (
        running(tmp_path / "s", model=tiny_model, change=held, engine=engine) as server,
        server.http() as http,
        ThreadPoolExecutor() as pool,
    ):
        body = {"pml": many_modules(100), "encode": True}
        put = pool.submit(http.put, "/v1/schemas/many", json=body)
        held.let(1)  # one module is there
        server.until(lambda: held.finished >= 1)
        answer = pool.submit(ask, http, prompt="Hello", max_tokens=2)
        server.until(lambda: len(server.service.client.requests))
        held.let(50)
        assert answer.result().status_code == 200
        assert not put.done()
        server.launcher.kill()
        held.forget()
        held.let(math.inf)
        assert put.result().status_code == 503
        assert http.get("/v1/schemas/many").status_code == 404
        server.until(lambda: server.service.client.supervisor.state == "running")
        assert http.put("/v1/schemas/many", json=body).json()["version"] == 1
        server.check()


def test_an_encoding_ends_in_time(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(schemas, "ENCODE_SECONDS", 0.1)
    held = Held()
    with running(tmp_path, model=tiny_model, change=held) as server, server.http() as http:
        answer = http.put("/v1/schemas/places", json={"pml": SCHEMA, "encode": True})
        assert answer.status_code == 504
        assert http.get("/v1/schemas/places").status_code == 404
        held.let(math.inf)
        server.check()


def test_without_sharing_nothing_can_be_encoded(tmp_path, tiny_model):
    engine = {"share": "off"}
    with running(tmp_path, model=tiny_model, engine=engine) as server, server.http() as http:
        answer = http.put("/v1/schemas/places", json={"pml": SCHEMA, "encode": True})
        assert answer.status_code == 400
        assert "share is off" in answer.json()["error"]["message"]


def test_a_module_that_never_fits_is_refused(tmp_path, tiny_model):
    engine = {"kv_memory": "64KiB"}
    with (
        running(tmp_path / "s", model=tiny_model, engine=engine) as server,
        server.http() as http,
    ):
        room = server.service.client.facts.kv_tokens
        schema = f'<schema name="big"><module name="m">{"a" * room}</module></schema>'
        answer = http.put("/v1/schemas/big", json={"pml": schema, "encode": True})
        assert answer.status_code == 400
        assert "schema 'big': " in answer.json()["error"]["message"]
        assert http.get("/v1/schemas/big").status_code == 404
        server.check()
