"""Prefixes as objects."""

from __future__ import annotations

import pytest

from onestem.errors import ConfigError
from onestem.server.objects.prefixes import read_app
from tests.server.harness import running

TEXT = "You are the assistant of a library. Answer in one sentence, in English, and be kind. "


def complete(http, **body) -> dict:
    answer = http.post("/v1/completions", json={"max_tokens": 3, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(http, **body) -> dict:
    body = {"messages": [{"role": "user", "content": "Hello"}], **body}
    answer = http.post(
        "/v1/chat/completions", json={"max_tokens": 3, "temperature": 0, "return_token_ids": True}
        | body,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_stands_before_prompts_and_chats(embedded):
    with embedded.http() as http:
        made = http.put("/v1/prefixes/library", json={"text": TEXT}).json()
        assert made["ready"]
        assert made["version"] == 1
        assert made["computed_tokens"] == made["tokens"] > 0
        assert made["bytes"] > 0
        ids = embedded.service.model.tokenizer.encode(TEXT + "Where is the door?")
        named = complete(http, prefix="library", prompt="Where is the door?", return_token_ids=True)
        assert named["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(
            embedded.service.model.tokenizer.encode(TEXT)
        )
        whole = complete(http, prompt=named["prompt_token_ids"])
        assert whole["choices"][0]["text"] == named["choices"][0]["text"]
        assert len(named["prompt_token_ids"]) >= len(ids)
        system = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hello"}]
        by_name, in_full = chat(http, prefix="library"), chat(http, messages=system)
        assert by_name["prompt_token_ids"] == in_full["prompt_token_ids"]
        shown = http.get("/v1/prefixes/library").json()
        assert shown["hits"] >= 3
        assert shown["last_used"] > 0
        assert http.delete("/v1/prefixes/library").json()["deleted"]
        assert http.get("/v1/prefixes/library").status_code == 404
    embedded.check()


def test_versions_replace_each_other(embedded):
    with embedded.http() as http:
        for version, text in enumerate((TEXT, TEXT + "Again. ", TEXT), 1):
            made = http.put("/v1/prefixes/news", json={"text": text}).json()
            assert made["version"] == version
        assert [p["name"] for p in http.get("/v1/prefixes").json()["data"]] == ["news"]
        held = embedded.check()["held"]
        assert http.delete("/v1/prefixes/news").status_code == 200
    assert embedded.check()["held"] < held
    assert embedded.check()["held"] == 0


def test_messages_are_for_chats_and_ids_for_prompts(embedded):
    with embedded.http() as http:
        messages = [{"role": "system", "content": TEXT}]
        assert http.put("/v1/prefixes/m", json={"messages": messages}).status_code == 200
        assert http.put("/v1/prefixes/t", json={"token_ids": [1, 7, 8, 9]}).status_code == 200
        assert chat(http, prefix="m")["usage"]["prompt_tokens_details"]["cached_tokens"] > 10
        assert complete(http, prefix="t", prompt=[5, 6], return_token_ids=True)[
            "prompt_token_ids"
        ] == [1, 7, 8, 9, 5, 6]
        wrong = http.post("/v1/completions", json={"prompt": "x", "prefix": "m"})
        assert wrong.status_code == 400
        assert "stand before a chat's" in wrong.json()["error"]["message"]
        wrong = http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "prefix": "t"},
        )
        assert wrong.status_code == 400
        for name in ("m", "t"):
            http.delete(f"/v1/prefixes/{name}")


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("a", {}, "exactly one"),
        ("a", {"text": "x", "token_ids": [1]}, "exactly one"),
        ("a", {"text": ""}, "text is"),
        ("a", {"token_ids": []}, "token_ids is"),
        ("a", {"token_ids": [[1]]}, "token_ids[0] is"),
        ("a", {"token_ids": [99999]}, "below"),
        ("a", {"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ("a", {"file": "x"}, "unknown field"),
        ("a", {"token_ids": [5] * 9000}, "expected from 1 to"),
        ("a%20b", {"text": "x"}, "name is"),
        ("a" * 65, {"text": "x"}, "name is"),
    ],
)
def test_bad_prefixes(embedded, name, body, reason):
    with embedded.http() as http:
        answer = http.put(f"/v1/prefixes/{name}", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_a_refused_prefix_has_its_users_name(tmp_path, tiny_model):
    engine = {"max_model_len": 64, "kv_memory": "64KiB"}
    with running(tmp_path, model=tiny_model, engine=engine) as server, server.http() as http:
        most = server.service.client.facts.kv_tokens
        for i in range(most):
            answer = http.put(f"/v1/prefixes/p{i}", json={"token_ids": [5, i + 6] * 20})
            if answer.status_code != 200:
                break
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"prefix 'p{i}' has 40 tokens; KV memory of {most} tokens holds ")


def test_a_keys_prefix_that_does_not_fit_any_more_keeps_nobody_from_being_served(
    tmp_path, tiny_model
):
    engine = {"max_model_len": 64, "kv_memory": "256KiB"}
    bodies = [{"token_ids": [5, i + 6] * 20} for i in range(6)]
    with running(tmp_path, model=tiny_model, engine=engine) as server, server.http() as http:
        for i, body in enumerate(bodies):
            assert http.put(f"/v1/prefixes/p{i}", json=body).status_code == 200
    little = {**engine, "kv_memory": "64KiB"}
    with running(tmp_path, model=tiny_model, engine=little) as server, server.http() as http:
        shown = {one["name"]: one["ready"] for one in http.get("/v1/prefixes").json()["data"]}
        assert len(shown) == len(bodies)
        assert False in shown.values()
        for name in shown:
            usage = complete(http, prefix=name, prompt="x")["usage"]
            assert usage["prompt_tokens"] > 40


def test_prefixes_outlive_the_server_and_the_engine(tmp_path, tiny_model):
    apps = {"app": {"text": TEXT}}
    with running(tmp_path, model=tiny_model, apps=apps) as server, server.http() as http:
        assert http.put("/v1/prefixes/own", json={"text": "Only mine. " * 9}).status_code == 200
        server.launcher.kill()
        server.until(lambda: server.service.client.supervisor.restarts == 1)
        server.until(lambda: server.service.client.supervisor.state == "running")
        server.on_loop(server.service.prefixes.until_ready)
        shown = {prefix["name"]: prefix for prefix in http.get("/v1/prefixes").json()["data"]}
        assert all(prefix["ready"] for prefix in shown.values())
        assert set(shown) == {"app", "own"}
    with running(tmp_path, model=tiny_model, apps=apps) as server, server.http() as http:
        before = shown["own"]["tokens"]
        shown = {prefix["name"]: prefix for prefix in http.get("/v1/prefixes").json()["data"]}
        assert shown["own"]["ready"]
        assert shown["own"]["tokens"] == before
        named = complete(http, prefix="own", prompt="x")
        assert named["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("argument", ["a", "=x", "a=", "a b=x", "a=/no/such/file"])
def test_bad_apps(argument):
    with pytest.raises(ConfigError, match="--app"):
        read_app(argument)


def test_apps_are_texts_or_messages(tmp_path):
    text, chat = tmp_path / "a.txt", tmp_path / "b.json"
    text.write_text("Be kind.")
    chat.write_text('{"messages": [{"role": "system", "content": "Be kind."}]}')
    assert read_app(f"a={text}") == ("a", {"text": "Be kind."})
    assert read_app(f"b={chat}")[1]["messages"][0]["role"] == "system"
    chat.write_text('{"messages": []}')
    with pytest.raises(ConfigError, match="messages"):
        read_app(f"b={chat}")
