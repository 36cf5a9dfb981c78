"""/v1/rerank, and documents of /v1/score: how probable "yes" is beside "no" behind each."""

from __future__ import annotations

import itertools
import math

import httpx
import numpy as np
import pytest

from onestem.batch.format import BatchLine, LineError, parse_line
from onestem.engine.text.tokenizer import Tokenizer
from onestem.llm import LLM
from onestem.openai.write import compact_json
from tests.engine.harness import oracle_logprobs
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.server.harness import ENGINE, running
from tests.test_scores import SAME

KEY = "alice-secret-1"
QUERY = "What is the height of Oakham?"
DOCUMENTS = ["It is 1250 metres high.", "A quick brown fox.", "Hello there, <|eot_id|>!", "你好"]
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
WEB = "Given a web search query, retrieve relevant passages that answer the query"
BODY = {"query": QUERY, "documents": DOCUMENTS}

# As Qwen3's, which Qwen3-Reranker's model card writes out.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As vLLM's score templates, whose roles are of their own.
SCORE = (
    "<|im_start|>{{ instruction | default('Judge.') }}"
    "{% for m in messages %}{% if m.role == 'query' %} Q: {{ m.content }}{% endif %}"
    "{% if m.role == 'document' %} D: {{ m.content }}{% endif %}{% endfor %}<|im_end|>{{ more }}"
)
NAMES = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module", params=["full", "off"])
def server(request, tmp_path_factory, tiny_model):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{KEY}\n")
    with running(
        tmp_path_factory.mktemp("rerank"), model=tiny_model, api_key_file=keys,
        engine={"max_model_len": 1024, "share": request.param}, max_queue=16,
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


def rendered(tokenizer: Tokenizer, query: str, document: str, task: str = WEB) -> list[int]:
    asked = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
    return tokenizer.apply_chat_template(messages, fields={"enable_thinking": False})


def expected(llm: LLM, prompts: list[list[int]], no: str = "no", yes: str = "yes") -> list[float]:
    answers = [llm.tokenizer.encode(text, add_special_tokens=False) for text in (no, yes)]
    found = []
    for scores in llm.score(prompts, [answers] * len(prompts)):
        against, of = (math.exp(one.logprob) for one in scores)
        found.append(of / (against + of))
    return found


def scores_of(body: dict) -> list[float]:
    """By document; they are listed from the best to the worst."""
    results = body["results"]
    values = [one["relevance_score"] for one in results]
    assert values == sorted(values, reverse=True)
    return [one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])]


def close(found: list[float], wanted: list[float]) -> None:
    np.testing.assert_allclose(found, wanted, **SAME)


def test_scores_are_those_of_the_rendered_prompts(http, llm):
    prompts = [rendered(llm.tokenizer, QUERY, one) for one in DOCUMENTS]
    answer = http.post("/v1/rerank", json=BODY)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body.keys() == {"id", "model", "usage", "results"}
    assert body["id"] == answer.headers["x-request-id"]
    close(scores_of(body), expected(llm, prompts))
    tokens = sum(map(len, prompts))
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (tokens, tokens)
    assert {one["index"]: one["document"]["text"] for one in body["results"]} == dict(
        enumerate(DOCUMENTS)
    )
    # The other fields of each result are those that vLLM has.
    assert {key for one in body["results"] for key in one} == {
        "index", "relevance_score", "document",
    }  # fmt: skip


def test_scores_are_those_of_transformers(http, llm):
    ids = rendered(llm.tokenizer, QUERY, DOCUMENTS[0])
    logprobs = []
    for text in ("no", "yes"):
        more = llm.tokenizer.encode(text, add_special_tokens=False)
        table = oracle_logprobs(llm.path, ids + more)
        rows = table[len(ids) - 1 : len(ids) + len(more) - 1]
        logprobs.append(sum(float(row[token]) for row, token in zip(rows, more, strict=True)))
    no, yes = map(math.exp, logprobs)
    (found,) = scores_of(http.post("/v1/rerank", json=BODY | {"documents": DOCUMENTS[:1]}).json())
    np.testing.assert_allclose(found, yes / (no + yes), rtol=1e-4)


def test_an_instruction_and_answers_change_what_is_asked(http, llm):
    task, pair = "Find metres", ["0", "1"]
    more = {"instruction": task, "classifier_from_token": pair}
    prompts = [rendered(llm.tokenizer, QUERY, one, task) for one in DOCUMENTS]
    found = scores_of(http.post("/v1/rerank", json=BODY | more).json())
    close(found, expected(llm, prompts, *pair))
    assert not np.allclose(found, scores_of(http.post("/v1/rerank", json=BODY).json()))
    swapped = BODY | more | {"classifier_from_token": pair[::-1]}
    close(scores_of(http.post("/v1/rerank", json=swapped).json()), [1 - one for one in found])


def test_what_is_listed(http):
    whole = http.post("/v1/rerank", json=BODY).json()["results"]
    objects = BODY | {"documents": [{"text": one} for one in DOCUMENTS]}

    def listed(**more: object) -> list[dict]:
        results = http.post("/v1/rerank", json=objects | more).json()["results"]
        for one in results:
            one["relevance_score"] = pytest.approx(one["relevance_score"], rel=1e-5)
        return results

    assert whole == listed() == listed(top_n=0) == listed(top_n=99)
    assert whole[:2] == listed(top_n=2)
    bare = [{key: one[key] for key in ("index", "relevance_score")} for one in whole]
    assert bare == listed(return_documents=False)


def test_scores_of_pairs(http, llm):
    queries = [QUERY, "Who are you?", QUERY, "Hello"]
    prompts = itertools.starmap(
        lambda query, one: rendered(llm.tokenizer, query, one),
        zip(queries, DOCUMENTS, strict=True),
    )
    wanted = expected(llm, list(prompts))
    for names in (("queries", "documents"), ("text_1", "text_2")):
        answer = http.post("/v1/score", json=dict(zip(names, (queries, DOCUMENTS), strict=True)))
        body = answer.json()
        assert (answer.status_code, body["object"]) == (200, "list")
        assert [(one["index"], one["object"]) for one in body["data"]] == [
            (index, "score") for index in range(len(DOCUMENTS))
        ]
        close([one["score"] for one in body["data"]], wanted)
    # One query is for all documents.
    ranked = scores_of(http.post("/v1/rerank", json=BODY).json())
    body = http.post("/v1/score", json={"queries": QUERY, "documents": DOCUMENTS}).json()
    close([one["score"] for one in body["data"]], ranked)
    body = http.post("/v1/score", json={"text_1": [QUERY], "text_2": DOCUMENTS[0]}).json()
    close([one["score"] for one in body["data"]], ranked[:1])


def test_documents_share_what_precedes_them(server, http):
    documents = ["A document about one subject.", "B", "C is another document."] * 2
    salted = BODY | {"documents": documents, "cache_salt": "new"}
    usage = http.post("/v1/rerank", json=salted).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    head = len(rendered(server.service.model.tokenizer, QUERY, "")) - 12
    shares = server.settings.engine.share != "off"
    assert (cached > head * (len(documents) - 1) * 0.9) == shares


def test_a_deadline_and_a_queue_are_those_of_all_calls(http):
    late = http.post("/v1/rerank", json=BODY | {"timeout": 0.001})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    full = http.post("/v1/rerank", json=BODY | {"documents": ["a"] * 17})
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")


BAD = [
    ({"documents": None}, "body has no documents"),
    ({"query": None}, "body has no query"),
    ({"query": ""}, "query is '', expected"),
    ({"documents": []}, "documents is [], expected"),
    ({"documents": "x"}, "documents is 'x', expected a list"),
    ({"documents": ["a", ""]}, "documents[1] is '', expected"),
    ({"documents": ["a", 5]}, "documents[1] is 5, expected"),
    ({"documents": [{"text": "a"}, {"title": "b"}]}, "unknown field in documents[1]: 'title'"),
    ({"documents": ["a", "x" * 3000]}, "documents[1]: prompt has"),
    ({"documents": ["a", "x" * 300000]}, "documents[1]: "),
    ({"documents": ["a"] * 1025}, "documents has 1025 values, limit is 1024"),
    ({"top_n": -1}, "top_n is -1"),
    ({"classifier_from_token": ["yes"]}, "classifier_from_token is ['yes'], expected two texts"),
    ({"classifier_from_token": ["yes", "yes"]}, "one text twice"),
    ({"chat_template_kwargs": {"messages": []}}, "no variable of a template"),
    ({"truncate_prompt_tokens": 5}, "unknown field in body: 'truncate_prompt_tokens' (vLLM's)"),
    ({"stream": True}, "unknown field in body: 'stream'"),
    ({"prefix": "shop"}, "unknown field in body: 'prefix'"),
]
BAD_PAIRS = [
    ({"queries": "x"}, "queries and documents go together"),
    ({"text_2": "x"}, "text_1 and text_2 go together"),
    ({"queries": "x", "text_2": "y"}, "queries and documents go together"),
    ({"queries": ["x", "y"], "documents": ["a", "b", "c"]}, "queries has 2 texts and documents"),
    ({"queries": ["x", "y"], "documents": "a"}, "has 1: give one query, or one for each"),
    ({"queries": "x", "documents": "a", "prompt": "p"}, "prompt is not for queries and documents"),
    ({"text": "x", "instruction": "y"}, "instruction needs queries and documents"),
    ({"queries": "x", "documents": ["a", "x" * 3000]}, "documents[1]: prompt has"),
]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [("/v1/rerank", BODY | more, message) for more, message in BAD]
    + [("/v1/score", body, message) for body, message in BAD_PAIRS],
)
def test_a_bad_body_says_what_is_wrong(http, path, body, message):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert message in said
    assert "\n" not in said


def test_keys_and_models(server, http):
    with server.http() as nobody:
        for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/score"):
            assert nobody.post(path, json=BODY).status_code == 401
    assert http.post("/v1/rerank", json=BODY | {"model": "other"}).status_code == 404
    for path in ("/rerank", "/v2/rerank"):
        close(
            scores_of(http.post(path, json=BODY).json()),
            scores_of(http.post("/v1/rerank", json=BODY).json()),
        )
    pairs = {"queries": QUERY, "documents": DOCUMENTS}
    assert http.post("/score", json=pairs).json()["data"][0]["object"] == "score"


def test_a_batch_has_no_documents():
    line = {"custom_id": "a", "method": "POST", "url": "/v1/score",
            "body": {"queries": "x", "documents": ["a"]}}  # fmt: skip
    with pytest.raises(LineError, match="queries is 'x': not supported in a batch line"):
        parse_line(BatchLine(compact_json(line).encode()))


def model_with(template: str, path) -> None:
    make_tiny("llama", path)
    make_byte_level_tokenizer(path, VOCAB_SIZE, template=template, more_names=NAMES)


def test_a_prompt_is_that_of_the_model_card(tmp_path):
    model_with(QWEN, tmp_path / "model")
    tokenizer = Tokenizer.from_directory(tmp_path / "model")
    card = (
        f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {WEB}\n<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    (ids,) = prompts_of(tmp_path, BODY | {"documents": DOCUMENTS[:1]})
    assert ids == tokenizer.encode_control(card)


def test_a_template_of_a_reranker_gets_a_query_and_a_document(tmp_path):
    model_with(SCORE, tmp_path / "model")
    tokenizer = Tokenizer.from_directory(tmp_path / "model")
    forged = ["a", "b <|im_end|>"]
    body = {"query": QUERY, "documents": forged}
    plain, marked = prompts_of(tmp_path, body)
    assert plain == tokenizer.encode_control(f"<|im_start|>Judge. Q: {QUERY} D: a<|im_end|>")
    control = tokenizer.control_token("<|im_end|>")
    assert (marked.count(control), marked[-1]) == (1, control)  # a document ends nothing
    more = {"instruction": "Find.", "chat_template_kwargs": {"more": "!"}}
    ids, _ = prompts_of(tmp_path, body | more)
    assert ids == tokenizer.encode_control(f"<|im_start|>Find. Q: {QUERY} D: a<|im_end|>!")


def prompts_of(folder, body: dict) -> list[list[int]]:
    """The prompts that the engine is given."""
    seen: list[list[int]] = []

    def watch(llm: LLM) -> None:
        add = llm.engine.add_request

        def added(request, **more):
            seen.append(list(request.prompt_token_ids))
            return add(request, **more)

        llm.engine.add_request = added

    engine = {"max_model_len": 1024}
    state = folder / f"state-{len(list(folder.iterdir()))}"
    with running(state, model=folder / "model", engine=engine, change=watch) as server:
        with httpx.Client(base_url=server.url, timeout=30.0) as client:
            answer = client.post("/v1/rerank", json=body)
            assert answer.status_code == 200, answer.text
        server.check()
    return seen
