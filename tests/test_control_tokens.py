"""Names of control tokens in texts of a caller's, and where they stay characters."""

from __future__ import annotations

import asyncio
import json

import pytest
from transformers import AutoTokenizer

from onestem import LLM, AsyncLLM, SamplingParams
from onestem.errors import RequestError
from onestem.jobs import plan_file, run_file
from onestem.options import EngineOptions

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "device": "cpu", "seed": 0}
ONE = SamplingParams(max_tokens=1, temperature=0)
CHAT = [{"role": "user", "content": "the fox"}]
FIM = "<|start_header_id|>def f(x):\n<|end_header_id|>\n<|eot_id|>"


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def rendered(oracle):
    text = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith(oracle.bos_token)
    return text


def test_a_rendered_prompt_is_the_chat(llm, oracle, rendered):
    ids = oracle(rendered, add_special_tokens=False)["input_ids"]
    assert llm.tokenize([rendered]) == [ids]
    (chat,) = llm.chat(CHAT, ONE)
    for prompt in (rendered, {"prompt": rendered}):
        (answer,) = llm.generate(prompt, ONE)
        assert list(answer.prompt_token_ids) == ids == list(chat.prompt_token_ids)
        assert answer.outputs[0].token_ids == chat.outputs[0].token_ids
        *_, last = llm.stream(prompt, ONE)
        assert list(last.prompt_token_ids) == ids
    assert llm.tokenize([FIM]) == [oracle(FIM)["input_ids"]]


def test_characters_where_they_are_asked_for(llm, rendered):
    characters = llm.tokenizer.encode(rendered)
    for made in (
        llm.generate(rendered, ONE, parse_special=False),
        list(llm.stream([rendered], ONE, parse_special=False)),
    ):
        assert list(made[-1].prompt_token_ids) == characters
    assert llm.tokenize([rendered], parse_special=False) == [characters]
    for wrong in (None, 0, "no"):
        with pytest.raises(RequestError, match=r"parse_special is .*, expected true or false"):
            llm.generate("a", ONE, parse_special=wrong)
        with pytest.raises(RequestError, match=r"parse_special is .*, expected true or false"):
            llm.score(["a"], parse_special=wrong)


def test_scores(llm, oracle, rendered):
    eot = llm.tokenizer.control_token("<|eot_id|>")
    text = rendered.rstrip()  # what follows belongs to completions
    ((score,),) = llm.score([text], [["a<|eot_id|>"]])
    prompt = oracle(text, add_special_tokens=False)["input_ids"]
    letter = llm.tokenizer.encode("a", add_special_tokens=False)
    ((by_ids,),) = llm.score([prompt], [[[*letter, eot]]])
    assert score == by_ids
    ((quoted,),) = llm.score([text], [["a<|eot_id|>"]], parse_special=False)
    assert eot not in quoted.token_ids
    assert llm.score([text]) == llm.score([prompt])
    (whole,) = llm.score([rendered], parse_special=False)
    assert list(whole.token_ids) == llm.tokenizer.encode(rendered)[1:]


def test_stop_by_name(llm, oracle):
    eot = llm.tokenizer.control_token("<|eot_id|>")
    for stop, text in (("<|eot_id|>", "aa"), ("a<|eot_id|>", "a"), ("<|eot_id|>a", "aa")):
        params = SamplingParams(max_tokens=8, temperature=0, stop=stop, ignore_eos=True)
        letter = llm.tokenizer.encode("a", add_special_tokens=False)[0]
        forced = params.replace(allowed_token_ids=[letter, eot], logit_bias={letter: 100})
        (free,) = llm.generate("x", forced)
        assert free.outputs[0].text == "a" * 8  # nothing but a is sampled
        held = forced.replace(bad_words=["aaa"])
        (one,) = llm.generate("x", held)
        assert one.outputs[0].text == text
        assert one.outputs[0].stop_reason == stop
        assert one.outputs[0].finish_reason == "stop"
        assert one.outputs[0].token_ids[:3] == [letter, letter, eot]


def test_bad_words_by_name(llm):
    eot = llm.tokenizer.control_token("<|eot_id|>")
    letter = llm.tokenizer.encode("a", add_special_tokens=False)[0]
    params = SamplingParams(
        max_tokens=4, temperature=0, allowed_token_ids=[letter, eot], logit_bias={eot: 100},
        ignore_eos=True,
    )  # fmt: skip
    assert llm.generate("x", params)[0].outputs[0].token_ids == [eot] * 4
    held = params.replace(bad_words=["<|eot_id|>"])
    assert llm.generate("x", held)[0].outputs[0].token_ids == [letter] * 4


def test_async(model, oracle, rendered):
    async def answers():
        async with AsyncLLM(model, **OPTIONS) as llm:
            for parse_special in (True, False):
                async for one in llm.generate(rendered, ONE, parse_special=parse_special):
                    last = one
                yield list(last.prompt_token_ids)

    async def told():
        return [ids async for ids in answers()]

    tokens, characters = asyncio.run(told())
    assert tokens == oracle(rendered, add_special_tokens=False)["input_ids"]
    assert len(characters) > len(tokens)


def test_jobs_and_plans(llm, model, tmp_path, oracle, rendered):
    ids = oracle(rendered, add_special_tokens=False)["input_ids"]
    source = tmp_path / "in.jsonl"
    body = {"prompt": rendered, "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line) + "\n")
    run_file(llm, source, tmp_path / "out.jsonl")
    made = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert made["usage"]["prompt_tokens"] == len(ids)
    options = EngineOptions(model=model, **OPTIONS)
    (tmp_path / "plan").mkdir()
    report = plan_file(source, tmp_path / "plan", options=options, predicts=False, advises=False)
    assert report["logical_prompt_tokens"] == len(ids)
