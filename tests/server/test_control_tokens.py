"""Names of control tokens in texts that come over HTTP."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.server.harness import running

TEXT = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nthe fox<|eot_id|>"


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    with running(tmp_path_factory.mktemp("state"), model=tiny_model) as made:
        yield made
        made.check()


@pytest.fixture
def http(server):
    with server.http() as made:
        yield made


@pytest.fixture(scope="module")
def forms(server):
    """The text's ids with control tokens, and as characters."""
    tokenizer = server.service.model.tokenizer
    tokens, characters = tokenizer.encode_control(TEXT), tokenizer.encode(TEXT)
    assert len(tokens) < len(characters)
    assert tokens.count(tokens[0]) == 1
    return {None: tokens, True: tokens, False: characters}


@pytest.mark.parametrize("said", [None, True, False])
def test_each_route(http, forms, said):
    how = {} if said is None else {"parse_special": said}
    ids = forms[said]
    assert http.post("/tokenize", json={"prompt": TEXT, **how}).json()["tokens"] == ids
    asked = {"max_tokens": 1, "return_token_ids": True, **how}
    made = http.post("/v1/completions", json={"prompt": TEXT, **asked}).json()
    assert made["prompt_token_ids"] == ids
    several = http.post("/v1/completions", json={"prompt": [TEXT, "a"], **asked}).json()
    assert several["choices"][0]["prompt_token_ids"] == ids
    scored = http.post("/v1/score", json={"text": TEXT, **how}).json()
    assert scored["data"][0]["scores"][0]["token_ids"] == ids[1:]
    name = f"p{said}".lower()
    put = http.put(f"/v1/prefixes/{name}", json={"text": TEXT, **how})
    assert put.status_code == 200, put.text
    begun = http.post("/v1/completions", json={"prompt": "a", "prefix": name, **asked}).json()
    assert begun["prompt_token_ids"][: len(ids)] == ids


@pytest.mark.parametrize("said", [None, False])
def test_echo(http, forms, said):
    how = {} if said is None else {"parse_special": said}
    asked = {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 2, **how}
    choice = http.post("/v1/completions", json=asked).json()["choices"][0]
    assert choice["text"].startswith(TEXT)
    told = choice["logprobs"]
    num, length = len(forms[said]), len(TEXT)
    places = [*told["text_offset"][:num], length]
    if said is False:  # BOS is put before
        assert places[:2] == [0, 0]
        assert told["tokens"][0] == "<|begin_of_text|>"
        places, tokens = places[1:], told["tokens"][1:num]
    else:
        tokens = told["tokens"][:num]
    spelled = [TEXT[a:b] for a, b in pairwise(places)]
    assert spelled == tokens
    assert told["text_offset"][num] == length


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("POST", "/v1/completions", {"prompt": "a", "parse_special": "yes"}, "parse_special"),
        ("POST", "/v1/completions", {"pml": "<x/>", "parse_special": True},
         "parse_special and pml"),
        ("POST", "/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "parse_special": True}, "parse_special"),
        ("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}],
                               "parse_special": True}, "parse_special and messages"),
        ("PUT", "/v1/prefixes/x", {"token_ids": [5], "parse_special": True},
         "parse_special and token_ids"),
    ],
)  # fmt: skip
def test_where_it_would_do_nothing_it_is_refused(http, method, path, body, told):
    answer = http.request(method, path, json=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
