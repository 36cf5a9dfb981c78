"""/v1/files and /v1/batches: results as `onestem batch` writes them, whatever happens."""

from __future__ import annotations

import json
import math
import time
from contextlib import contextmanager

import openai
import pytest

from onestem.jobs import run_file
from onestem.llm import LLM
from onestem.server.objects import jobs
from tests.server.harness import Held, running

DOCUMENT = "The mill of Oakham stands by the river and grinds the corn of nine villages. " * 3


def lines(count: int, **body) -> bytes:
    """Requests behind three documents; two lines that cannot be answered."""
    made = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{DOCUMENT[i % 3 * 9 :]} {i}?", "max_tokens": 4, **body},
        }
        for i in range(count)
    ]
    made[1]["body"] = {"prompt": "x", "max_tokens": 0}
    return b"".join(json.dumps(line).encode() + b"\n" for line in made) + b"not JSON\n"


def upload(http, raw: bytes) -> str:
    files = {"file": ("in.jsonl", raw)}
    return http.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]


def create(http, raw: bytes, **changes) -> dict:
    body = {"input_file_id": upload(http, raw), "endpoint": "/v1/completions"}
    return http.post("/v1/batches", json={**body, "completion_window": "24h", **changes}).json()


def ended(http, batch_id: str) -> dict:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        batch = http.get(f"/v1/batches/{batch_id}").json()
        if batch["status"] in ("completed", "failed", "cancelled"):
            return batch
        time.sleep(0.02)
    raise AssertionError(f"the batch did not end: {batch}")


def output(http, batch: dict) -> bytes:
    return http.get(f"/v1/files/{batch['output_file_id']}/content").content


@pytest.fixture(scope="module")
def expected(tiny_model, tmp_path_factory):
    """What `onestem batch` writes for `lines(count)`."""
    folder = tmp_path_factory.mktemp("expected")
    llm = LLM(tiny_model, kv_memory="256MiB", device="cpu", dtype="float32")

    def of(count: int) -> bytes:
        source, target = folder / f"{count}.jsonl", folder / f"{count}.out"
        if not target.exists():
            source.write_bytes(lines(count, temperature=0))
            run_file(llm, source, target)
        return target.read_bytes()

    return of


def test_with_the_openai_client(embedded):
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="x", max_retries=0) as client:
        file = client.files.create(file=("a.jsonl", lines(5)), purpose="batch")
        assert client.files.retrieve(file.id).bytes == len(lines(5))
        assert client.files.content(file.id).read() == lines(5)
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h",
            metadata={"a": "b"},
        )  # fmt: skip
        embedded.until(lambda: client_done(embedded, batch.id))
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.request_counts.total == 6
        assert batch.request_counts.failed == 2
        assert batch.metadata == {"a": "b"}
        results = [
            json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()
        ]
        assert [result["custom_id"] for result in results[:5]] == [f"line-{i}" for i in range(5)]
        errors = client.files.content(batch.error_file_id).text.splitlines()
        assert [json.loads(line)["error"]["line"] for line in errors] == [2, 6]
        assert batch.id in [item.id for item in client.batches.list()]
        assert file.id in [item.id for item in client.files.list(limit=1)]
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)


def client_done(server, batch_id: str) -> bool:
    record = server.service.store.batch("", batch_id)
    return record["status"] == "completed"


def test_results_are_those_of_onestem_batch(tmp_path, tiny_model, expected):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        batch = ended(http, create(http, lines(60, temperature=0))["id"])
        assert output(http, batch) == expected(60)
        server.check()


def test_lines_without_a_name_are_answered_under_the_served_one(tmp_path, tiny_model):
    how = {"served_model_name": ["shown", "also"]}
    with running(tmp_path, model=tiny_model, **how) as server, server.http() as http:
        bodies = [
            {"prompt": "a", "max_tokens": 1},
            {"prompt": "a", "max_tokens": 1, "model": "also"},
        ]
        raw = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": b})
            for i, b in enumerate(bodies)
        ]
        batch = ended(http, create(http, "\n".join(raw).encode())["id"])
        results = map(json.loads, output(http, batch).splitlines())
        assert [one["response"]["body"]["model"] for one in results] == ["shown", "also"]


def test_a_line_that_names_another_model_gets_an_error(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        names = [server.service.model.names[0], "gpt"]
        raw = [
            json.dumps({
                "custom_id": name, "method": "POST", "url": "/v1/completions",
                "body": {"prompt": "a", "max_tokens": 2, "model": name},
            })
            for name in names
        ]  # fmt: skip
        batch = ended(http, create(http, "\n".join(raw).encode())["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        (error,) = map(
            json.loads, http.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
        )
        assert error["error"]["code"] == "model_not_found"


def test_a_batch_of_bad_lines_alone_is_completed(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        batch = ended(http, create(http, b'{"id": 1, "prompt": "a"}\n' * 300)["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 300, "completed": 0, "failed": 300}


def test_a_server_that_died_while_it_put_the_output_away(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        batch = ended(http, create(http, lines(9))["id"])
        first = output(http, batch)
        torn = {**batch, "status": "finalizing", "completed_at": None, "output_file_id": None}
        server.service.store.save_batch(batch["id"], "", torn)
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        again = ended(http, batch["id"])
        assert output(http, again) == first
        for name in ("output_file_id", "error_file_id", "request_counts"):
            assert again[name] == batch[name]
        assert server.service.client.stats.get("steps", 0) == 0


def test_a_batch_across_a_restart_and_deaths_of_the_engine(tmp_path, tiny_model, expected):
    """The engine dies twice and the server stops once, each time in the middle of the job."""
    few = {"max_model_len": 512, "kv_memory": "256KiB"}
    held = Held()
    with (
        running(tmp_path, model=tiny_model, engine=few, change=held) as server,
        server.http() as http,
    ):
        batch_id = create(http, lines(60, temperature=0))["id"]
        for deaths in (1, 2):
            answers = 8 * deaths
            held.let(answers)
            wait_for(server, batch_id, answers)
            server.launcher.kill()
            held.forget()
            wait_for_restart(server, deaths)
        held.let(24)
        wait_for(server, batch_id, 24)
        assert done(server, batch_id) < 60
        server.on_loop(server.service.jobs.stop)
        assert http.get(f"/v1/batches/{batch_id}").json()["status"] == "in_progress"
        held.let(math.inf)
    with running(tmp_path, model=tiny_model, engine=few) as server, server.http() as http:
        made = [json.loads(line) for line in output(http, ended(http, batch_id)).splitlines()]
        whole = [json.loads(line) for line in expected(60).splitlines()]
        assert [one["custom_id"] for one in made] == [one["custom_id"] for one in whole]
        for one, other in zip(made, whole, strict=True):
            if one["response"] is not None:
                body, known = one["response"]["body"], other["response"]["body"]
                assert body["choices"] == known["choices"]


def wait_for(server, batch_id: str, answers: int) -> None:
    server.until(lambda: done(server, batch_id) >= answers)


def wait_for_restart(server, deaths: int) -> None:
    engine = server.service.client.supervisor
    server.until(lambda: engine.restarts == deaths and engine.state == "running")


def done(server, batch_id: str) -> int:
    """Answers in the journal."""
    journal = server.service.store.work / batch_id / "output.jsonl.partial"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@contextmanager
def three_of_thirty_answered(tmp_path, tiny_model):
    """A server, its client, what holds it, and a batch of which three lines are answered."""
    few, held = {"max_model_len": 512, "kv_memory": "256KiB"}, Held()
    with (
        running(tmp_path, model=tiny_model, engine=few, change=held) as server,
        server.http() as http,
    ):
        batch_id = create(http, lines(30))["id"]
        held.let(3)
        wait_for(server, batch_id, 3)
        yield server, http, held, batch_id


def test_cancelled_batches_keep_what_is_answered(tmp_path, tiny_model):
    with three_of_thirty_answered(tmp_path, tiny_model) as (server, http, held, batch_id):
        assert http.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
        held.let(math.inf)
        batch = ended(http, batch_id)
        assert batch["status"] == "cancelled"
        answered = [json.loads(line)["custom_id"] for line in output(http, batch).splitlines()]
        assert 3 <= len(answered) < 30
        assert len(set(answered)) == len(answered)
        errors = http.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
        assert [json.loads(line)["error"]["line"] for line in errors] == [2, 31]
        counts = {"total": 31, "completed": len(answered) - 2, "failed": 2}
        assert batch["request_counts"] == counts
        assert http.post(f"/v1/batches/{batch_id}/cancel").status_code == 409
        server.check()


def test_a_lines_usage_is_that_of_the_request_over_http(tmp_path, tiny_model):
    """Also of choices, for which nothing is sampled."""
    bodies = [
        {"prompt": DOCUMENT, "max_tokens": 4, "temperature": 0, **more}
        for more in ({}, {"n": 3, "temperature": 1, "seed": 1}, {"choices": ["yes", "neither"]})
    ]
    asked = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    raw = b"".join(json.dumps(line).encode() + b"\n" for line in asked)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        batch = ended(http, create(http, raw)["id"])
        made = [json.loads(line)["response"]["body"] for line in output(http, batch).splitlines()]
        for body, line in zip(bodies, made, strict=True):
            usage = http.post("/v1/completions", json=body).json()["usage"]
            assert [line["usage"][name] for name in names] == [usage[name] for name in names]


def test_a_batch_that_has_not_begun_is_cancelled_at_once(tmp_path, tiny_model):
    with three_of_thirty_answered(tmp_path, tiny_model) as (server, http, held, batch_id):
        waiting = create(http, lines(5))
        assert waiting["status"] == "validating"
        batch = http.post(f"/v1/batches/{waiting['id']}/cancel").json()
        assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
        assert http.post(f"/v1/batches/{waiting['id']}/cancel").status_code == 409
        assert http.delete(f"/v1/files/{waiting['input_file_id']}").status_code == 200
        assert http.get(f"/v1/batches/{batch_id}").json()["status"] == "in_progress"
        last = create(http, lines(5))
        held.let(math.inf)
        assert ended(http, batch_id)["status"] == "completed"
        assert ended(http, last["id"])["status"] == "completed"
        server.check()


def test_files_in_use_stay(tmp_path, tiny_model):
    held = Held()
    with running(tmp_path, model=tiny_model, change=held) as server, server.http() as http:
        batch = create(http, lines(5))
        busy = http.delete(f"/v1/files/{batch['input_file_id']}")
        assert busy.status_code == 409
        assert batch["id"] in busy.json()["error"]["message"]
        held.let(math.inf)
        ended(http, batch["id"])
        assert http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


def test_a_line_in_pml(tmp_path, tiny_model):
    """A job keeps the schema that was there when it was made."""
    schema = '<schema name="s"><module name="m">Oakham lies by the river.</module></schema>'
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"pml": '<prompt schema="s"><m/>Where?</prompt>', "max_tokens": 3}
    held = Held()
    with running(tmp_path, model=tiny_model, change=held) as server, server.http() as http:
        assert http.put("/v1/schemas/s", json={"pml": schema}).status_code == 200
        batch = create(http, json.dumps(line).encode() + b"\n")
        assert http.delete("/v1/schemas/s").status_code == 200
        held.let(math.inf)
        batch = ended(http, batch["id"])
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        server.check()


def test_lists_heed_their_query(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:

        def listed(path: str, **query) -> list[str]:
            answer = http.get(f"/v1/{path}", params=query)
            assert answer.status_code == 200
            return [item["id"] for item in answer.json()["data"]]

        batch = ended(http, create(http, lines(3))["id"])
        second = upload(http, lines(2))
        made = {batch["output_file_id"], batch["error_file_id"]}
        sent = [second, batch["input_file_id"]]
        assert listed("files", purpose="batch") == sent
        assert set(listed("files", purpose="batch_output")) == made
        assert listed("files", purpose="fine-tune") == []
        assert listed("files", order="asc") == listed("files")[::-1]
        assert listed("files", purpose="batch", order="asc", limit=1) == sent[1:]
        assert listed("files", purpose="batch", after=second) == sent[1:]
        assert listed("batches", limit=5) == [batch["id"]]


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "files?order=up", "order"),
        ("GET", "files?limit=0", "limit"),
        ("GET", "files?limit=1&limit=2", "limit"),
        ("GET", "files?after=file-0", "after"),
        ("GET", "files?color=red", "color"),
        ("GET", "batches?order=asc", "order"),
        ("GET", "models?limit=1", "limit"),
        ("POST", "completions?stream=true", "stream"),
    ],
)
def test_a_query_that_is_not_read_is_refused(embedded, method, path, param):
    with embedded.http() as http:
        answer = http.request(method, f"/v1/{path}", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_bad_batches(embedded):
    with embedded.http() as http:
        good = upload(http, lines(3))
        for changes, param in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"input_file_id": 3}, "input_file_id"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"output_expires_after": {}}, "output_expires_after"),
        ):
            body = {
                "input_file_id": good,
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            answer = http.post("/v1/batches", json={**body, **changes})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
        mixed = ended(http, create(http, lines(3), endpoint="/v1/chat/completions")["id"])
        assert mixed["status"] == "failed"
        assert "url is /v1/completions" in mixed["errors"]["data"][0]["message"]


def test_bad_uploads(tmp_path, tiny_model):
    with (
        running(tmp_path, model=tiny_model, max_file=20_000) as server,
        server.http() as http,
    ):
        file = {"file": ("a", b"x")}
        for answer, param in (
            (http.post("/v1/files", files=file), "purpose"),
            (http.post("/v1/files", files=file, data={"purpose": "fine-tune"}), "purpose"),
            (http.post("/v1/files", files={"purpose": (None, "batch")}), "file"),
            (http.post("/v1/files", files=file, data={"purpose": "batch", "x": "y"}), "x"),
        ):
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
        large = {"file": ("a", b"x" * 30_000)}
        answer = http.post("/v1/files", files=large, data={"purpose": "batch"})
        assert answer.status_code == 413
        assert http.get("/v1/files").json()["data"] == []
        assert list(server.service.store.files.iterdir()) == []


def test_files_of_a_key_are_bounded_together(tmp_path, tiny_model, monkeypatch):
    """What a batch has answered counts too, and stays; what is deleted counts no more."""
    monkeypatch.setattr(jobs, "PROGRESS_SECONDS", 0.0)
    raw = lines(12, user="somebody" * 30)
    most = 2 * len(raw) + 1500
    with (
        running(tmp_path, model=tiny_model, max_key_files=most) as server,
        server.http() as http,
    ):
        first, second = upload(http, raw), upload(http, raw)
        file = {"file": ("lines.jsonl", raw), "purpose": (None, "batch")}
        answer = http.post("/v1/files", files=file)
        assert answer.status_code == 409
        error = answer.json()["error"]
        assert error["code"] == "files_full"
        told = f"files of this key have {3 * len(raw)} bytes, limit is {most}: delete some"
        assert error["message"].startswith(told)
        body = {"input_file_id": first, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = ended(http, http.post("/v1/batches", json=body).json()["id"])
        assert batch["status"] == "failed"
        assert f"limit is {most}: delete some" in batch["errors"]["data"][0]["message"]
        assert len(output(http, batch).splitlines()) == sum(
            batch["request_counts"][name] for name in ("completed", "failed")
        )
        assert http.post("/v1/batches", json=body).json()["error"]["code"] == "files_full"
        for name in (second, batch["output_file_id"], batch["error_file_id"]):
            assert http.delete(f"/v1/files/{name}").status_code == 200
        again = ended(http, http.post("/v1/batches", json=body).json()["id"])
        assert again["status"] == "completed"
        assert [row["bytes"] for row in http.get("/v1/files").json()["data"]][-1] == len(raw)
        upload(http, b"x")
