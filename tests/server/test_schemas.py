"""PML over HTTP: schemas as objects, prompts of modules; answers are those of `generate_pml`."""

from __future__ import annotations

import pytest

from onestem.llm import LLM
from onestem.request import SamplingParams
from tests.server.harness import running

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
    ],
)
def test_bad_schemas(embedded, name, body, reason):
    with embedded.http() as http:
        answer = http.put(f"/v1/schemas/{name}", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_modules_outlive_the_server(tmp_path, tiny_model):
    """With a folder for them, a second server reads what the first has computed."""
    engine = {"module_disk": tmp_path / "modules", "module_host_memory": "1MiB"}
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
            server.launcher.llms[0].engine.tiers.flush()
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
