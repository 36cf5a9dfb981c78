"""Documents of chats, at every door."""

from __future__ import annotations

import json
import re
from math import nan

import pytest
from typer.testing import CliRunner

from onestem import LLM, SamplingParams
from onestem.adapters.messages_read import read_messages
from onestem.adapters.responses_read import read_responses
from onestem.cli.app import app
from onestem.cli.pml_check_model import Asked, ask_all, written
from onestem.cli.pml_questions import summary
from onestem.errors import OnestemError, RequestError
from onestem.jobs import run_file
from onestem.openai.read import read_body
from tests.server.harness import running

ASK = [{"role": "user", "content": "Who lives in Ostby?"}]
OTHER = [{"role": "user", "content": "Where is Ben?"}]
ANNA = {"title": "Anna", "text": "Anna lives in Ostby, in a red house. " * 4}
BEN = {"title": "Ben", "text": "Ben lives in Westby, in a grey house. " * 4}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", kv_memory="64MiB")


def told(chat, *documents):
    """The chat as it would be written by hand."""
    before = "".join(f"Document: {one['title']}\n{one['text']}\n\n" for one in documents)
    return [{"role": "user", "content": before + chat[0]["content"]}]


def answers(outputs):
    return [(one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs]


def test_whole_prompts_are_those_written_by_hand(llm):
    by_hand = llm.chat([told(ASK, ANNA, BEN), told(OTHER, BEN, ANNA)], GREEDY)
    each = [[ANNA, BEN], [BEN, ANNA]]
    assert answers(llm.chat([ASK, OTHER], GREEDY, documents=each)) == answers(by_hand)
    assert answers(llm.chat([ASK, OTHER], GREEDY, documents=each, repair=1)) == answers(by_hand)
    unread = llm.chat([ASK, OTHER], GREEDY, documents=each, repair=1, lead_in="Dora")
    assert answers(unread) == answers(by_hand)
    (one,) = llm.chat(ASK, GREEDY, documents=(ANNA, BEN))
    assert answers([one]) == answers(by_hand[:1])
    streamed = [*llm.stream_chat(ASK, GREEDY, documents=[[ANNA, BEN]])]
    assert answers(streamed[-1:]) == answers(by_hand[:1])


def test_one_list_for_all_is_computed_once(llm):
    llm.reset_prefix_cache()
    first, second = llm.chat([ASK, OTHER], GREEDY, documents=[ANNA, BEN])
    assert answers([first, second]) == answers(
        llm.chat([told(ASK, ANNA, BEN), told(OTHER, ANNA, BEN)], GREEDY)
    )
    texts = len(llm.tokenize([ANNA["text"] + BEN["text"]])[0])
    assert max(first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) > 0.9 * texts


def test_none_of_some_conversations(llm):
    mixed = llm.chat([ASK, OTHER], GREEDY, documents=[[], [BEN]], repair=1.0)
    assert answers(mixed) == answers(llm.chat([ASK, told(OTHER, BEN)], GREEDY))
    assert answers(llm.chat(ASK, GREEDY, documents=[])) == answers(llm.chat(ASK, GREEDY))


def test_repaired_documents_are_found_in_another_order(llm):
    llm.reset_prefix_cache()
    third = {"title": "Carl", "text": "Carl has no house, and sleeps in a tent. " * 4}
    llm.chat([ASK, ASK], GREEDY, documents=[[ANNA, BEN, third], [BEN, ANNA]], repair=0.2)
    (again,) = llm.chat(OTHER, GREEDY, documents=[ANNA, third, BEN], repair=0.2)
    count = len(again.prompt_token_ids)
    assert again.metrics.num_cached_tokens > count / 2
    whole = llm.chat(OTHER, GREEDY, documents=[ANNA, third, BEN])[0]
    assert llm.tokenizer.decode(again.prompt_token_ids) == llm.tokenizer.decode(
        whole.prompt_token_ids
    )


def test_documents_are_stored_after_what_the_caller_gives(llm):
    """They are found by prompts with the same one alone."""
    llm.reset_prefix_cache()
    third = {"title": "Carl", "text": "Carl has no house, and sleeps in a tent. " * 4}
    given = [ANNA, BEN, third], [ANNA, third, BEN]
    after = {"title": "Dora", "text": "Dora lives in Midby. " * 4}
    computed = {}
    for name, lead_in in (("own", after), ("same", dict(after)), ("text", after["text"])):
        computed[name] = 0
        for documents in given:
            (one,) = llm.chat(ASK, GREEDY, documents=documents, repair=0.0, lead_in=lead_in)
            computed[name] += one.metrics.num_computed_tokens
    assert computed["same"] == len(given) < computed["own"]
    assert computed["text"] > len(given)


@pytest.mark.parametrize("order", [(ANNA, BEN), (BEN, ANNA)], ids=("anna", "ben"))
def test_choices(llm, order):
    """Where all is repaired that can be, those of whole prompts, and nearer than with nothing."""
    params = SamplingParams(choices=["Ostby", "Westby", "West", "a tent"], logprobs=0)
    (whole,), (found,), (stored,) = (
        llm.chat(ASK, params, documents=list(order), repair=share) for share in (1, 0.999, 0)
    )
    mine, its, far = (one.outputs[0] for one in (found, whole, stored))
    assert found.metrics.num_computed_tokens > 0
    assert (mine.text, mine.choice, mine.token_ids) == (its.text, its.choice, its.token_ids)
    least, off = (abs(one.cumulative_logprob - its.cumulative_logprob) for one in (mine, far))
    assert 2 * least < off
    if order[0] is ANNA:  # in the other order a block is left that counts for more
        assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=0.05)
    assert len(mine.logprobs) == len(mine.token_ids)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"documents": "a"}, "documents is 'a', expected a list"),
        ({"documents": [5]}, r"documents\[0\] is 5, expected text that is not blank, or an obj"),
        ({"documents": ["a", " \n"]}, r"documents\[1\] is ' \\n', expected text that is not blank"),
        ({"documents": [{"title": "a"}]}, r"documents\[0\] is \{'title': 'a'\}, expected text"),
        (
            {"documents": [{"text": "a", "title": 5}]},
            r"documents\[0\] is .*, expected an object whose title is text",
        ),
        (
            {"lead_in": {"text": "a", "title": 5}, "repair": 0.5},
            "^lead_in is .*, expected an object whose title is text",
        ),
        ({"documents": [["a"], ["b"]]}, "2 lists of documents for 1 conversations"),
        ({"documents": ["a"] * 1025}, "documents has 1025 .*, limit is 1024"),
        ({"repair": 0.5}, "repair needs documents: leave it out"),
        ({"documents": ["a"], "repair": 1.5}, "repair is 1.5, expected a number from 0 to 1"),
        ({"documents": ["a"], "lead_in": "b"}, "lead_in needs repair: leave it out"),
        (
            {"documents": ["a"], "repair": 0.5, "lead_in": {}},
            r"lead_in is \{\}, expected text that",
        ),
        (
            {"documents": ["a"], "repair": 0.5, "lead_in": {"text": "b", "doc_id": 1}},
            r"lead_in, written twice as documents: documents\[0\] has 'doc_id'",
        ),
        (
            {"documents": ["a"], "repair": 0.5, "lead_in": "b " * 300_000},
            "lead_in has 6[0-9]{5} characters, limit is",
        ),
        ({"documents": ["a"], "repair": -0.1}, "repair is -0.1, expected a number from 0 to 1"),
        ({"documents": ["a"], "repair": nan}, "repair is nan, expected a number from 0 to 1"),
        ({"documents": ["a"], "repair": True}, "repair is True, expected a number from 0 to 1"),
        (
            {"documents": ["a"], "chat_template_kwargs": {"documents": []}},
            "documents and chat_template_kwargs.documents: give one of them",
        ),
    ],
)
def test_what_is_refused(llm, how, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        llm.chat(ASK, GREEDY, **how)
    assert "\n" not in str(caught.value)


def test_other_bodies_have_none():
    read = (
        lambda fields: read_body("completion", {"prompt": "a", **fields}),
        lambda fields: read_messages({"messages": ASK, "max_tokens": 4, **fields}),
        lambda fields: read_responses({"input": "a", **fields}, None, None),
    )
    for one in read:
        for name, value in (("documents", ["a"]), ("repair", 0.5), ("lead_in", "a")):
            with pytest.raises(RequestError, match=f"unknown field in body: '{name}'"):
                one({name: value})
        pml = {"pml": "<prompt schema='a'/>", "documents": ["a"]}
    with pytest.raises(RequestError, match="documents and pml: a prompt in PML"):
        read_body("chat", pml)


BODIES = [
    {"messages": ASK, "documents": [ANNA, BEN]},
    {"messages": OTHER, "documents": ["A text."], "repair": 1},
    {"messages": OTHER, "documents": [ANNA, BEN, ANNA], "repair": 0.25},
    {"messages": OTHER, "documents": [BEN, ANNA, BEN], "repair": 0.25, "lead_in": "Cy. " * 9},
]
PARAMS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def contents(llm):
    """Answers to the bodies."""
    how = ("documents", "repair", "lead_in")
    return [
        llm.chat(one["messages"], GREEDY, **{name: one.get(name) for name in how})[0]
        .outputs[0]
        .text
        for one in BODIES
    ]


def test_lines_of_a_job(llm, tmp_path):
    line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        json.dumps({"custom_id": str(i), **line, "body": {**body, **PARAMS}})
        for i, body in enumerate([*BODIES, {"messages": ASK, "documents": [""]}])
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    job = run_file(llm, source, output)
    assert job.failed == 1
    *good, bad = map(json.loads, output.read_text().splitlines())
    found = [one["response"]["body"]["choices"][0]["message"]["content"] for one in good]
    assert found == contents(llm)
    assert "documents[0] is ''" in json.dumps(bad)


@pytest.mark.parametrize("tiers", [{}, {"disk_kv": "kv"}])
def test_over_http(llm, tmp_path, tiers):
    engine = {"kv_memory": "64MiB"} | {name: tmp_path / place for name, place in tiers.items()}
    with running(tmp_path / "state", engine=engine) as server, server.http() as http:
        found = [
            http.post("/v1/chat/completions", json={**body, **PARAMS}).json() for body in BODIES
        ]
        assert [one["choices"][0]["message"]["content"] for one in found] == contents(llm)
        (ids,) = (one.prompt_token_ids for one in llm.chat(ASK, GREEDY, documents=[ANNA, BEN]))
        counted = http.post("/tokenize", json=BODIES[0]).json()
        assert counted["tokens"] == ids
        refused = http.post("/v1/chat/completions", json={"messages": ASK, "repair": 0.5})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "repair needs documents: leave it out"
        server.check()


# --- the canary --------------------------------------------------------------------------------


def test_a_model_is_checked_with_written_chats(llm):
    asked = [*written(3)]
    assert asked == [*written(3)]
    for one in asked:
        assert any(f" {one.answer}." in document["text"] for document in one.documents)
    facts = ask_all(llm, asked, [0.5, 0.0], 6)
    params = SamplingParams(max_tokens=6, temperature=0)
    for name, share in (("whole", None), ("repair 0", 0.0), ("repair 0.5", 0.5)):
        outputs = llm.chat(
            [one.messages for one in asked],
            params,
            documents=[one.documents for one in asked],
            repair=share,
        )
        assert [one["texts"][name] for one in facts] == [one.outputs[0].text for one in outputs]
    assert list(facts[0]["texts"]) == ["whole", "repair 0", "repair 0.5"]
    assert {one["logprobs"]["whole"] for one in facts} == {0.0}
    assert any(one["logprobs"]["repair 0"] for one in facts)
    assert list(summary(facts)["modes"]["whole"]) == [
        "computed_tokens", "equal_to_whole", "logprob", "right", "lost", "won", "chance",
    ]  # fmt: skip


def test_a_model_is_checked_with_own_chats(llm, tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"messages": ASK, "documents": [ANNA, BEN], "answer": "Anna"},
             {"messages": OTHER, "documents": [ANNA, BEN, "A text."]}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["pml", "check-model", "embedded", str(path), "--repair", "0.5"]
    options = ["--max-tokens", "6", "--dtype", "float32", "--kv-memory", "64MiB"]
    result = CliRunner().invoke(app, [*arguments, "--json", *options])
    assert result.exit_code == 0, result.output
    *each, told = map(json.loads, result.stdout.splitlines())
    asked = [Asked(f"{path}:{i + 1}", one["messages"], one["documents"], one.get("answer"))
             for i, one in enumerate(lines)]  # fmt: skip
    assert each == ask_all(llm, asked, [0.5], 6)
    assert told == {"model": told["model"], **summary(each)}
    shown = CliRunner().invoke(app, [*arguments, *options]).stdout.splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["whole", "repair"]
    assert shown[-1] == told["verdict"]


def test_an_answer_that_ends_with_an_error_is_no_text(llm, monkeypatch):
    logits = llm.decoder.logits
    monkeypatch.setattr(llm.decoder, "logits", lambda hidden: logits(hidden) * nan)
    with pytest.raises(OnestemError, match=r"^here:1: the logits are not finite"):
        ask_all(llm, [Asked("here:1", ASK, [ANNA, BEN], "Anna")], [0.5], 6)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "chats.jsonl:1 is not JSON"),
        ('{"messages": [], "documents": ["a"]}', "jsonl:1: documents are 1, expected 2 at least"),
        ('{"messages": [], "documents": [], "n": 2}', "unknown field in .*chats.jsonl:1: 'n'"),
        ("", "chats.jsonl holds no chat"),
    ],
)
def test_a_bad_chat_is_named_before_a_model_is_loaded(tmp_path, line, reason):
    path = tmp_path / "chats.jsonl"
    path.write_text(line)
    result = CliRunner().invoke(app, ["pml", "check-model", "nowhere", str(path)])
    assert isinstance(result.exception, OnestemError)
    assert re.search(reason, str(result.exception)), result.exception
