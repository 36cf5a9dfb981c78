"""/v1/score: what `LLM.score` says, for the keys that may ask."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from onestem.llm import LLM
from tests.server.harness import ENGINE, running
from tests.test_scores import SAME, exam

KEY = "alice-secret-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{KEY}\n")
    with running(
        tmp_path_factory.mktemp("score"), model=tiny_model, api_key_file=keys,
        engine={"max_model_len": 256},
    ) as server:  # fmt: skip
        yield server
        server.check()


@pytest.fixture(scope="module")
def http(server):
    with server.http(KEY) as client:
        yield client


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model, **ENGINE | {"kv_memory": "8MiB"}) as made:
        yield made


def same(body: dict, expected) -> None:
    assert [data["index"] for data in body["data"]] == list(range(len(expected)))
    for data, scores in zip(body["data"], expected, strict=True):
        for found, score in zip(data["scores"], scores, strict=True):
            assert tuple(found["token_ids"]) == score.token_ids
            assert found["is_greedy"] == score.is_greedy
            np.testing.assert_allclose(found["token_logprobs"], score.token_logprobs, **SAME)
            assert found["logprob"] == sum(found["token_logprobs"])


def test_completions_of_prompts(http, llm):
    prompts, completions = exam()
    expected = llm.score(prompts, completions)
    answer = http.post("/v1/score", json={"prompt": prompts, "completions": completions})
    assert answer.status_code == 200, answer.text
    same(answer.json(), expected)
    assert answer.json()["id"] == answer.headers["x-request-id"]
    one = {"prompt": prompts[1], "completions": completions[1], "cache_salt": "mine"}
    body = http.post("/v1/score", json=one).json()
    same(body, expected[1:2])
    spelled = sum(len(score.token_ids) for score in expected[1])
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(llm.tokenizer.encode(prompts[1].rstrip())) + spelled
    assert (usage["completion_tokens"], body["object"]) == (0, "score")


def test_whole_texts_and_ids(http, llm):
    texts = ["A text.", "A text that is longer."]
    same(http.post("/v1/score", json={"text": texts}).json(), [[s] for s in llm.score(texts)])
    body = http.post("/v1/score", json={"text": [5, 6, 7]}).json()
    same(body, [llm.score([[5, 6, 7]])])
    body = http.post("/v1/score", json={"prompt": [5, 6], "completions": [[7], [7, 8]]}).json()
    same(body, llm.score([[5, 6]], [[[7], [7, 8]]]))


def test_what_is_cached_is_used_by_one_key_and_salt(http):
    body = {"prompt": "A prompt that is asked about twice. " * 4, "completions": [" A", " B"]}
    cached = [
        http.post("/v1/score", json=body | more).json()["usage"]["prompt_tokens_details"]
        for more in ({}, {}, {"cache_salt": "other"})
    ]
    first, second, other = (details["cached_tokens"] for details in cached)
    assert second > 100 > max(first, other)


BAD = [
    ({}, "not exactly one of prompt and text"),
    ({"prompt": "x"}, "prompt and completions go together"),
    ({"prompt": ["x", "y"], "completions": ["a", "b"]}, "completions of a prompt are 'a'"),
    ({"prompt": ["x", "y"], "completions": [["a"]]}, "a list for each of the 2 prompts"),
    ({"prompt": ["x"], "completions": [None]}, "completions of a prompt are None"),
    ({"prompt": "x", "completions": ["a"] * 257}, "limit is 256"),
    ({"prompt": "x", "completions": [""]}, "has no tokens of its own"),
    ({"prompt": [5], "completions": [[6] * 300]}, "prompt and completion have 300 tokens"),
    ({"text": "x" * 5000}, "limit is"),
    ({"prompt": "x", "completions": ["a"], "stream": True}, "stream"),
    ({"prompt": "x" * 300000, "completions": ["a"] * 256}, "each counted again"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_a_bad_body_says_what_is_wrong(http, body, message):
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_keys_and_models(server, http):
    body = {"text": "x"}
    with server.http() as nobody:
        assert nobody.post("/v1/score", json=body).status_code == 401
    assert http.post("/v1/score", json=body | {"model": "other"}).status_code == 404


def test_a_batch(http, llm):
    prompts, completions = exam(6)
    lines = [
        {"custom_id": str(i), "prompt": prompt, "completions": some}
        for i, (prompt, some) in enumerate(zip(prompts, completions, strict=True))
    ]
    raw = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = http.post(
        "/v1/files", files={"file": ("in.jsonl", raw)}, data={"purpose": "batch"}
    ).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/score", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=asked).json()
    while batch["status"] not in ("completed", "failed"):
        time.sleep(0.01)
        batch = http.get(f"/v1/batches/{batch['id']}").json()
    text = http.get(f"/v1/files/{batch['output_file_id']}/content").text
    data = [json.loads(line)["response"]["body"]["data"][0] for line in text.splitlines()]
    same(
        {"data": [one | {"index": i} for i, one in enumerate(data)]},
        llm.score(prompts, completions),
    )
    wrong = http.post("/v1/batches", json=asked | {"endpoint": "/v1/completions"}).json()
    while wrong["status"] not in ("completed", "failed"):
        time.sleep(0.01)
        wrong = http.get(f"/v1/batches/{wrong['id']}").json()
    assert "url is /v1/score" in wrong["errors"]["data"][0]["message"]
