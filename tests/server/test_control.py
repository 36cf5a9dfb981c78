"""What a trainer tells the server: pause, sleep, forget; and what is refused by name."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from onestem.server.objects.tenants import Tenant
from tests.server.harness import running
from tests.server.test_batches import create, ended, lines

BODY = {"prompt": "a b c", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    engine = {"logprobs_mode": "processed_logprobs"}
    with running(tmp_path_factory.mktemp("control"), model=tiny_model, engine=engine) as server:
        yield server
        server.check()


def told(http, path, **query):
    answer = http.post(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_paused_requests_go_on_or_end(server):
    with server.http() as http, ThreadPoolExecutor(2) as pool:
        want = http.post("/v1/completions", json=BODY).json()["choices"]
        running = pool.submit(http.post, "/v1/completions", json=BODY)
        server.until(lambda: server.service.client.num_running == 1)
        assert told(http, "/pause", mode="keep") == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        late = pool.submit(http.post, "/v1/completions", json={**BODY, "max_tokens": 2})
        server.until(lambda: len(server.service.client.requests) == 2)
        assert told(http, "/reset_prefix_cache") == {"success": False}
        assert told(http, "/reset_prefix_cache", reset_running_requests=True) == {"success": True}
        assert not running.done()
        assert told(http, "/resume") == {"status": "resumed"}
        assert running.result().json()["choices"] == want
        assert late.result().status_code == 200
        running = pool.submit(http.post, "/v1/completions", json=BODY)
        server.until(lambda: server.service.client.num_running == 1)
        told(http, "/pause")
        assert running.result().status_code == 503
        assert "the server was paused" in running.result().json()["error"]["message"]
        told(http, "/resume")
        assert http.get("/is_paused").json() == {"is_paused": False}


def test_a_server_that_sleeps_refuses_requests(server):
    with server.http() as http:
        body = {**BODY, "max_tokens": 5}
        want = http.post("/v1/completions", json=body).json()["choices"]
        assert told(http, "/sleep", level=1) == {"status": "asleep"}
        answer = http.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "engine_asleep")
        assert error["message"] == "the engine is asleep: its operator wakes it with POST /wake_up"
        assert told(http, "/wake_up", tags="weights") == {"status": "asleep"}
        assert http.post("/v1/completions", json=body).status_code == 503
        assert http.put("/v1/prefixes/p", json={"text": "a"}).json()["error"]["code"] == (
            "engine_asleep"
        )
        schema = {"pml": '<schema name="s"><module name="m">a</module></schema>'}
        encoded = http.put("/v1/schemas/s", json={**schema, "encode": True})
        assert (encoded.status_code, encoded.json()["error"]["code"]) == (503, "engine_asleep")
        assert http.get("/v1/schemas/s").status_code == 404
        assert http.put("/v1/schemas/s", json=schema).status_code == 200  # nothing is computed
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert told(http, "/wake_up") == {"status": "awake"}
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/v1/completions", json=body).json()["choices"] == want


def test_requests_beside_the_order_to_sleep_are_answered_or_refused(server):
    body = {**BODY, "max_tokens": 2}
    with server.http() as http, ThreadPoolExecutor(8) as pool:
        found = set()
        for _ in range(5):
            sent = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(8)]
            told(http, "/sleep")
            sent += [pool.submit(http.post, "/v1/completions", json=body) for _ in range(8)]
            told(http, "/wake_up")
            found |= {one.result().status_code for one in sent}
    assert found <= {200, 503}
    assert 503 in found


@pytest.mark.parametrize(
    ("asleep", "other"),
    [(True, ("wake_up", None)), (False, ("wake_up", ["no tag"])), (False, ("no order", None))],
)
def test_an_order_to_sleep_holds_whatever_it_crosses(server, asleep, other):
    """Be it that the other one fails after this one was given."""
    control = server.service.client.control

    async def cross() -> None:
        await asyncio.gather(control(*other), control("sleep", 1), return_exceptions=True)

    with server.http() as http:
        if asleep:
            told(http, "/sleep")
        server.on_loop(cross)
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/v1/completions", json=BODY).json()["error"]["code"] == "engine_asleep"
        assert told(http, "/wake_up") == {"status": "awake"}
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_a_prefix_that_is_put_beside_the_order_to_sleep_is_no_mistake(server):
    async def cross() -> list[object]:
        put = server.service.prefixes.put(Tenant(""), "p", {"text": "a b"})
        sleep = server.service.client.control("sleep", 1)
        return await asyncio.gather(put, sleep, return_exceptions=True)

    refused, _ = server.on_loop(cross)
    assert (refused.status, refused.code) == (503, "engine_asleep")
    with server.http() as http:
        told(http, "/wake_up")
        assert http.get("/v1/prefixes").json()["data"] == []


def test_a_batch_waits_while_the_server_sleeps(server):
    with server.http() as http:
        told(http, "/sleep")
        batch = create(http, lines(6, temperature=0))
        server.until(lambda: bool(len(server.service.client.jobs)))
        told(http, "/wake_up")
        # One line asks for no token, and one is no JSON.
        counts = ended(http, batch["id"])["request_counts"]
    assert counts == {"total": 7, "completed": 5, "failed": 2}


def test_what_a_trainer_asks_and_what_is_refused(server):
    with server.http() as http:
        info = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
        assert info["model_config"]["dtype"] == "float32"
        assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert info["weight_transfer_config"] is None
        assert http.get("/get_world_size").json() == {"world_size": 1}
        assert told(http, "/reset_prefix_cache") == {"success": True}
        for path in ("init_weight_transfer_engine", "start_weight_update", "update_weights",
                     "finish_weight_update", "v1/load_lora_adapter"):  # fmt: skip
            answer = http.post(f"/{path}", json={})
            assert answer.status_code == 501
            assert answer.json()["error"]["code"] == "unsupported"
            assert "weights cannot be sent to this server" in answer.text
        for path, status in [
            ("/sleep?level=2", 501), ("/sleep?level=3", 400), ("/pause?mode=wait", 400),
            ("/wake_up?tags=all", 400), ("/pause?how=keep", 400),
            ("/pause?mode=keep&mode=keep", 400), ("/wake_up?tags=weights&tags=kv_cache", 200),
        ]:  # fmt: skip
            assert http.post(path).status_code == status, path
        assert http.post("/wake_up?tags=all").json()["error"]["param"] == "tags"
        answer = http.post("/pause", json={"mode": "keep"})
        assert answer.status_code == 400
        assert "give fields in the query, /pause?name=value" in answer.text
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert http.post("/resume", json={}).status_code == 200


def test_the_next_engine_is_told_too(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        told(http, "/sleep")
        told(http, "/pause", mode="keep")
        server.launcher.kill()
        life = server.service.client.supervisor
        server.until(lambda: life.state != "running" or life.restarts == 1)
        assert http.post("/v1/completions", json=BODY).status_code == 503  # down, or asleep again
        server.until(lambda: life.restarts == 1 and life.state == "running")
        server.on_loop(asyncio.sleep, 0)
        engine = server.launcher.llms[-1].engine
        server.until(lambda: engine.is_paused)
        assert engine.weights.level == 1
        told(http, "/wake_up")
        told(http, "/resume")
        assert http.post("/v1/completions", json={**BODY, "max_tokens": 2}).status_code == 200
