"""What an operator sees: health, metrics, logs, the page's state; how the end looks to clients."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from onestem.options import EngineOptions
from onestem.request import Request
from onestem.server import snapshots
from onestem.server.api.calls import Call
from onestem.server.link.worker import CPU_STEP_MS, load
from onestem.server.logs import set_up
from onestem.server.objects.tenants import EVERYBODY
from onestem.server.records.metrics import MOST_APPS, Metrics
from tests.server.harness import Held, running

APP = {"support": {"text": "You are the kind assistant of a shop that sells maps. " * 2}}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    with running(tmp_path_factory.mktemp("ops"), model=tiny_model, apps=APP) as server:
        yield server
        server.check()


def complete(http, **body) -> dict:
    body = {"max_tokens": 4, "ignore_eos": True, **body}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def metrics(http) -> dict[tuple[str, str], float]:
    """(name, app or state or outcome) -> value, summed."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = sample.labels
            kinds = ("app", "state", "status", "process")
            label = next((labels[kind] for kind in kinds if labels.get(kind)), "")
            key = (sample.name, label)
            found[key] = found.get(key, 0) + sample.value
    return found


def test_metrics_by_application(server, monkeypatch):
    with server.http() as http:
        before = metrics(http)
        used = [complete(http, prompt="a", prefix="support")["usage"] for _ in range(3)]
        complete(http, prompt="something else")
        complete(http, prompt="of a grammar", guided_choice=["yes", "no"], ignore_eos=False)
        assert http.post("/v1/completions", json={"prompt": 3}).status_code == 400
        monkeypatch.setattr(snapshots, "FRESH_SECONDS", 0.0)  # asked for at most twice a second
        after = metrics(http)

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - before.get((name, label), 0)

    assert grown("onestem_requests_total", "support") == 3
    assert grown("onestem_requests_total") == 2
    assert grown("onestem_grammar_bytes") > 0
    assert grown("onestem_time_to_first_token_seconds_count", "support") == 3
    assert grown("onestem_time_per_output_token_seconds_count", "support") == 3
    assert grown("onestem_output_tokens_total", "support") == 12
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in used)
    assert grown("onestem_cached_prompt_tokens_total", "support") == cached > 0
    assert grown("onestem_http_errors_total", "400") == 1
    assert after["onestem_engine_up", ""] == 1
    assert after["onestem_kv_tokens", "prefix"] > 0
    facts = server.service.client.facts
    assert after["onestem_kv_bytes", ""] == facts.kv_tokens * facts.kv_bytes_per_token
    assert after["onestem_resident_bytes", "server"] > 1 << 20
    assert after["onestem_resident_bytes", "engine"] > 1 << 20
    whole = facts.kv_tokens
    assert sum(after["onestem_kv_tokens", state] for state in ("free", "held", "cached")) == whole


def test_names_that_keys_make_up_do_not_fill_the_metrics(server):
    counted = Metrics(server.service.client)
    for number in range(MOST_APPS + 5):
        request = Request(request_id="x", prompt_token_ids=[1])
        call = Call(
            id="x", kind="chat", model="m", tenant=EVERYBODY, requests=[request],
            app=f"app-{number}", arrived=0.0, seconds=1.0,
        )  # fmt: skip
        counted.note(call)
    text = counted.text({}).decode()
    assert f'app="app-{MOST_APPS - 1}"' in text
    assert f'app="app-{MOST_APPS}"' not in text
    (line,) = (one for one in text.splitlines() if "requests_total" in one and '"other"' in one)
    assert line.endswith(" 5.0")


def test_every_requests_reuse_is_explained(server):
    ids = [50, 51, 52, 53, 54, 55, 56, 57, 58]
    with server.http() as http:
        for prompt in (ids, [*ids[:6], 99, 100], ids):
            complete(http, prompt=prompt)
        complete(http, prompt="a", prefix="support")
        calls = http.get("/internal/state").json()["requests"][:4]
    named, whole, differs, new = (call["reuse"] for call in calls)
    text = server.service.model.token_text
    assert new["matched_tokens"] == 0
    assert new["source"] == "none"
    assert (differs["matched_tokens"], differs["ended"], differs["at"]) == (6, "differs", 6)
    assert (differs["expected"], differs["got"]) == (text(56), text(99))
    assert (whole["matched_tokens"], whole["ended"]) == (8, "prompt")
    assert named["source"] == "prefix support"
    assert calls[0]["app"] == "support"


def test_the_pages_state_adds_up(server):
    with server.http() as http:
        complete(http, prompt="x" * 40)
        state = http.get("/internal/state").json()
    kv = state["kv"]
    assert kv["free_tokens"] + kv["cached_tokens"] + kv["held_tokens"] == kv["total_tokens"]
    owned = sum(owner["tokens"] for owner in kv["owners"])
    assert owned == kv["total_tokens"] - kv["free_tokens"]
    known = {run["id"] for run in state["runs"]}
    assert all(run["parent"] is None or run["parent"] in known for run in state["runs"])
    assert [prefix["name"] for prefix in state["prefixes"]] == ["support"]
    assert state["engine"]["state"] == "running"
    assert state["totals"]["requests"] >= 1


def test_what_one_read_served_for_several_is_counted(server):
    with server.http() as http:
        before = metrics(http)["onestem_engine_shared_read_tokens_total", ""]
        complete(http, prompt="x" * 40, max_tokens=1)
        alone = metrics(http)["onestem_engine_shared_read_tokens_total", ""]
        complete(http, prompt="y" * 60, n=4, max_tokens=8)
        after = metrics(http)["onestem_engine_shared_read_tokens_total", ""]
        shown = http.get("/internal/state").json()["totals"]["shared_read_tokens"]
    assert before == alone
    # Behind the prompt each of seven steps reads it once for four; its last token each computes.
    assert after - alone >= 7 * 3 * 50
    assert shown == after


def test_the_pages_events(server):
    with server.http() as http, http.stream("GET", "/internal/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.iter_text()
        text = ""
        while "\n\n" not in text:
            text += next(parts)
    name, data = text.split("\n\n")[0].split("\n")
    assert name == "event: state"
    state = json.loads(data.removeprefix("data: "))
    assert len({len(series) for series in state["history"].values()}) == 1


@pytest.mark.parametrize(("asked", "seconds"), [(None, CPU_STEP_MS / 1000), (0, None), (50, 0.05)])
def test_steps_of_a_server_are_bounded(tiny_model, asked, seconds):
    options = EngineOptions(model=tiny_model, device="cpu", kv_memory="1MiB", max_step_ms=asked)
    assert load(options).limits.step_seconds == seconds


def test_the_page_has_a_strict_policy(server):
    with server.http() as http:
        page = http.get("/")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in ("../app.py", "%2e%2e%2fapp.py", "app.py", "none.js"):
            assert http.get(f"/page/{name}").status_code == 404


def test_while_the_engine_is_down(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        loading = threading.Event()
        launch = server.launcher.launch

        async def slow():
            await asyncio.to_thread(loading.wait, 30)
            return await launch()

        server.launcher.launch = slow
        server.launcher.kill()
        server.until(lambda: server.service.client.supervisor.state == "down")
        assert http.get("/health").status_code == 503
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "engine_down"
        assert http.get("/v1/models").status_code == 200
        assert http.get("/internal/state").json()["engine"]["state"] == "down"
        assert metrics(http)["onestem_engine_up", ""] == 0
        loading.set()
        server.until(lambda: server.service.client.supervisor.state == "running")
        assert http.get("/health").status_code == 200
        complete(http, prompt="a")


def test_the_server_ends_while_the_engine_starts(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server:
        launch, begun, go = server.launcher.launch, threading.Event(), threading.Event()

        async def slow():
            begun.set()
            await asyncio.to_thread(go.wait, 30)
            return await launch()

        server.launcher.launch = slow
        server.launcher.kill()
        assert begun.wait(30)
        server.loop.call_soon_threadsafe(server.server.begin_to_stop)
        server.until(lambda: server.service.client.supervisor.is_stopping)
        go.set()


@pytest.mark.parametrize("stream", [True, False])
def test_who_has_no_more_time_when_the_server_stops_is_told(tmp_path, tiny_model, stream):
    held = Held()
    with running(tmp_path, model=tiny_model, change=held, grace=0.05) as server:
        answers = []

        def ask() -> None:
            with server.http() as http:
                body = {"prompt": "a", "max_tokens": 5, "stream": stream}
                answers.append(http.post("/v1/completions", json=body))

        asking = threading.Thread(target=ask)
        asking.start()
        server.until(lambda: len(server.service.client.requests))
        server.loop.call_soon_threadsafe(server.server.begin_to_stop)
        asking.join(30)
        held.let(math.inf)
    (answer,) = answers
    assert answer.status_code == (200 if stream else 503)
    raw = answer.text.split("\n\n")[0].removeprefix("data: ")
    assert json.loads(raw)["error"]["message"] == "the server is stopping: try again later"


def test_logs_are_json_lines_without_texts(server, capsys):
    root, own = logging.getLogger(), logging.getLogger("onestem")
    before = root.handlers[:], root.level, own.level
    try:
        set_up("info")
        with server.http() as http:
            made = complete(http, prompt="a word that stays unseen", user="me")
            http.post("/v1/completions", json={"prompt": "unseen too", "bad": 1})
        server.until(lambda: not len(server.service.client.requests))
    finally:
        root.handlers[:], root.level, own.level = before
    told = capsys.readouterr().err
    events = [json.loads(line) for line in told.splitlines()]
    assert "unseen" not in told
    requests = [event for event in events if event["event"] == "request"]
    assert [event["id"] for event in requests] == [made["id"]]
    assert requests[0]["output_tokens"] == 4
    assert [e["param"] for e in events if e["event"] == "refused"] == ["bad"]
