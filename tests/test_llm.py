"""`LLM` as its users hold it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import pickle
import shutil
import signal
import weakref
from typing import get_args

import numpy as np
import pytest
import torch
import transformers

import onestem
from onestem import LLM, SamplingParams
from onestem.build import kv_identity, largest_decode, pick_device
from onestem.errors import ConfigError, RequestError
from onestem.models.find import find_model
from onestem.options import EngineOptions, Levels, parse_memory
from tests.engine.harness import oracle_greedy, oracle_logprobs, shared_prompts
from tests.models.tiny import VOCAB_SIZE, make_tiny

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "seed": 0}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory.mktemp("llm") / "qwen3")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, **OPTIONS)


def test_names_of_the_package():
    for name in onestem.__all__:
        assert getattr(onestem, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        onestem.nothing  # noqa: B018


def test_generate_keeps_the_order_and_shares(llm):
    head = "The quick brown fox jumps over the lazy dog, again and again. " * 3
    prompts = [head + question for question in ("Who?", "Where?", "Why?")]
    llm.engine.reset_stats()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert [output.prompt for output in outputs] == prompts
    assert llm.engine.stats.saving > 0.5
    for output in outputs:
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
        want = oracle_greedy(llm.path, output.prompt_token_ids, 5)
        assert output.outputs[0].token_ids == want
        assert output.metrics.num_output_tokens == 5
        assert output.metrics.num_cached_tokens + output.metrics.num_computed_tokens == len(
            output.prompt_token_ids
        )


class LeftError(BaseException):
    """No `Exception`, as `SystemExit` is none."""


@pytest.mark.parametrize("place", ["forward", "decide"])
@pytest.mark.parametrize("error", [TimeoutError, LeftError])
def test_what_a_signals_handler_raises_ends_the_call(llm, monkeypatch, place, error):
    """A caller's own limit, in a computation or while a step's books are half done."""
    engine = llm.engine
    held = {"forward": engine.launcher, "decide": engine.scheduler}[place]
    run, calls = getattr(held, place), itertools.count()

    def interrupted(*args, **kwargs):
        if next(calls) == 3:
            signal.raise_signal(signal.SIGALRM)
        return run(*args, **kwargs)

    def stop(number, frame):
        raise error("it takes too long")

    prompts = ["The fox", "The fox jumps"]
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    want = [one.outputs for one in llm.generate(prompts, params)]
    before = signal.signal(signal.SIGALRM, stop)
    monkeypatch.setattr(held, place, interrupted)
    try:
        with pytest.raises(error, match="too long"):
            llm.generate(prompts, params)
    finally:
        signal.signal(signal.SIGALRM, before)
        monkeypatch.undo()
    assert next(calls) >= 4
    assert not engine.has_unfinished()
    assert [one.outputs for one in llm.generate(prompts, params)] == want
    engine.check()


def test_one_prompt_and_token_ids_and_params_each(llm, bare):
    assert len(llm.generate("one", SamplingParams(max_tokens=2))) == 1
    ids_only = LLM(bare, **OPTIONS)
    prompts = shared_prompts()[:3]
    params = [SamplingParams(max_tokens=i + 1, temperature=0, ignore_eos=True) for i in range(3)]
    outputs = ids_only.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    assert [o.outputs[0].text for o in outputs] == ["", "", ""]
    assert len(ids_only.generate(prompts[0], params[0])) == 1
    assert ids_only.generate([]) == []
    with pytest.raises(RequestError, match="text needs a tokenizer"):
        ids_only.generate("text")
    with pytest.raises(RequestError, match="3 sampling parameters for 2 prompts"):
        ids_only.generate(prompts[:2], sampling_params=params)
    first = params[0]
    kinds = [list, tuple, np.array, torch.tensor, lambda ids: [np.int32(token) for token in ids]]
    for make in kinds:
        one = ids_only.generate(make(prompts[0]), sampling_params=first)
        several = ids_only.generate([make(ids) for ids in prompts], sampling_params=params)
        assert [o.prompt_token_ids for o in one] == [list(prompts[0])]
        assert one[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        assert several[2].outputs[0].token_ids == outputs[2].outputs[0].token_ids
        assert {type(token) for o in several for token in o.prompt_token_ids} == {int}


def test_levels_change_what_is_computed_and_no_answer(model):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    answers, computed = {}, {}
    for levels in get_args(Levels):
        with LLM(model, levels=levels, **OPTIONS) as llm:
            plan = llm.plan(shared_prompts(), [params] * len(shared_prompts()))
            outputs = llm.generate(shared_prompts(), params)
            answers[levels] = [output.outputs[0].token_ids for output in outputs]
            computed[levels] = llm.engine.stats.processed_prompt_tokens
            if plan.group_only:
                assert computed[levels] == plan.report.processed_tokens
            else:  # the cache finds answers too
                assert computed[levels] <= plan.report.processed_tokens
    assert all(found == answers["all"] for found in answers.values())
    assert computed["all"] < computed["one"]


def test_a_model_is_looked_for_once(model, tmp_path, monkeypatch):
    """If it is one of a hub, the hub is asked each time."""
    found = []

    def noted(name):
        found.append(name)
        return find_model(name)

    for module in ("llm", "build"):
        monkeypatch.setattr(f"onestem.{module}.find_model", noted)
    with LLM(model, disk_kv=tmp_path, **OPTIONS):
        assert found == [str(model)]


def test_a_trace_tells_each_step(model, tmp_path):
    prompts = shared_prompts()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    file = tmp_path / "trace.jsonl"
    file.write_text("of before\n")
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(model, trace=file, max_model_len=10**9, **OPTIONS)
    assert file.read_text() == "of before\n"
    limits = {"max_num_seqs": 4, "max_step_tokens": 32}
    with LLM(model, trace=file, levels="one", **limits, **OPTIONS) as llm:
        llm.generate(prompts[:2], params)
        llm.engine.reset_stats()
        shared = sum(g.prefix_tokens for g in llm.plan(prompts, [params] * len(prompts)).groups)
        llm.engine.cache.clear()
        llm.generate(prompts, params)
        lines, stats = list(map(json.loads, file.read_text().splitlines())), llm.engine.stats
    assert [line["step"] for line in lines] == list(range(1, stats.steps + 1))
    assert sum(line["prefix"] for line in lines) == shared
    rows = sum(line["prefix"] + line["distinct"] for line in lines)
    assert rows == stats.processed_prompt_tokens
    # The first token of each answer is sampled behind its prompt.
    assert sum(line["decodes"] for line in lines) == stats.output_tokens - len(prompts)
    assert max(line["running"] for line in lines) == 4
    assert all(line["free_pages"] > 0 for line in lines)
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_a_trace_has_each_step_at_once(model, tmp_path):
    """A process that is killed between two steps loses none."""
    file = tmp_path / "trace.jsonl"
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(model, trace=file, **OPTIONS) as llm:
        for _ in llm.stream([3, 4, 5], params):
            steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
            assert steps == list(range(1, llm.engine.stats.steps + 1))


def test_a_full_disk_ends_the_trace_alone(model, caplog):
    with LLM(model, trace="/dev/full", **OPTIONS) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        for _ in range(2):
            (output,) = llm.generate([3, 4, 5], params)
            assert len(output.outputs[0].token_ids) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the trace /dev/full ends: No space left on device"
    ]
    with pytest.raises(ConfigError, match="trace /: Is a directory: choose another file"):
        LLM(model, trace="/", **OPTIONS)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            {"prompt_token_ids": [3], "prompt": "x"},
            "expected an object with prompt .* or prompt_tok",
        ),
        ([{"prompt": "x", "multi_modal_data": {}}], "prompt is .*multi_modal_data.* nothing else"),
        ([[3], {"text": "x"}], "prompt 1: prompt is .*text.* nothing else"),
        (b"text", "prompt is bytes .* expected text or token ids"),
        ([[3], bytearray(b"x")], "prompt 1: prompt is bytearray .* expected text or token ids"),
        ([[3], [1.5]], r"prompt 1: prompt holds '1.5' \(float\), expected token ids"),
        ([3, True], r"prompt holds 'True' \(bool\), expected token ids"),
        ([np.True_, 3], r"prompt holds 'True' \(bool\w*\), expected token ids"),
        ([3, "x"], r"prompt holds 'x' \(str\), expected token ids"),
        ([[3], np.ones(3)], "prompt 1: .* array of float64 .* expected integers"),
        ([[3], np.ones(3, bool)], "prompt 1: .* array of bool .* expected integers"),
        ([[3], torch.ones(3)], "prompt 1: .* array of torch.float32 .* expected integers"),
        ([[3], torch.ones(2, 2, dtype=torch.int64)], r"prompt 1: .* shape \[2, 2\]"),
        ([[torch.tensor(5), torch.tensor(7)]], r"prompt holds 'tensor\(5\)' \(Tensor\)"),
        ([np.array([2**64 - 1], np.uint64)], f"prompt holds '{2**64 - 1}'"),
        (5, "prompts is 5, expected a prompt or a list"),
        (None, "prompts is None, expected a prompt or a list"),
        (np.array(5), r"prompts is array\(5\), expected a prompt or a list"),
    ],
)
def test_what_is_no_prompt(llm, bad, reason):
    with pytest.raises(RequestError, match=reason):
        llm.generate(bad)


def test_chat(llm):
    question = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    one = llm.chat(question, params)
    two = llm.chat([question, [{"role": "system", "content": "be brief"}, *question]], params)
    assert len(one) == 1
    assert len(two) == 2
    assert one[0].outputs[0].token_ids == two[0].outputs[0].token_ids
    assert one[0].prompt_token_ids == llm.tokenizer.apply_chat_template(question)
    assert llm.chat([], params) == llm.chat([], [params]) == []


def test_chats_tell_where_the_system_message_ends(llm, monkeypatch):
    seen, run = [], llm.engine.run
    monkeypatch.setattr(llm.engine, "run", lambda some: run(seen.append(x) or x for x in some))
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}
    llm.chat([[system, question], [question]], SamplingParams(max_tokens=1))
    alone = llm.tokenizer.apply_chat_template([system], add_generation_prompt=False)
    assert {one.system_tokens for one in seen} == {len(alone), 0}


def test_chat_that_goes_on_and_variables_of_the_template(llm):
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(messages, params, **options)
    assert llm.tokenizer.decode(output.prompt_token_ids).endswith("I am")
    (same,) = llm.chat(messages, params, **options, chat_template_kwargs={"unused": 1})
    assert same.outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(RequestError, match="both set"):
        llm.chat(messages, params, continue_final_message=True)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], [None], 5, {}])
def test_what_are_no_sampling_parameters(llm, params):
    with pytest.raises(RequestError, match=r"sampling_params is .*, expected SamplingParams"):
        llm.generate(["a"], params)


@pytest.mark.parametrize("messages", [None, 5, "a", {"role": "user", "content": "x"}, {}, [None]])
def test_what_are_no_messages(llm, messages):
    with pytest.raises(RequestError, match=r"messages is .*, expected a list of messages"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ignore_eos": "false"}, "ignore_eos is 'false', expected true or false"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None, expected true or false"),
        (
            {"include_stop_str_in_output": 2},
            "include_stop_str_in_output is 2, expected true or false",
        ),
        ({"repetition_penalty": 1e-7}, "repetition_penalty is 1e-07, expected .* from 1e-6 to 100"),
        ({"temperature": np.zeros((3, 3))}, r"temperature is array\(\[\[0., 0., 0.\], \[0."),
    ],
)
def test_fields_that_are_refused(fields, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        SamplingParams(**fields)
    assert "\n" not in str(caught.value)


def test_the_cpu_has_one_name():
    assert pick_device("cpu:0") == pick_device("cpu")


def test_parameters_cannot_be_set():
    params = SamplingParams(max_tokens=2)
    with pytest.raises(RequestError) as told:
        params.max_tokens = 3
    assert str(told.value) == (
        "max_tokens of SamplingParams cannot be changed: "
        "replace(max_tokens=...) gives a changed copy"
    )
    assert params.replace(max_tokens=3) == SamplingParams(max_tokens=3)
    assert params.max_tokens == 2


def test_parameters_do_not_change_with_what_they_were_made_of(llm):
    bias = {5: 100.0}
    params = SamplingParams(logit_bias=bias, max_tokens=2, temperature=0)
    bias["a"] = bias[5] = -100.0
    assert llm.generate("x", params)[0].outputs[0].token_ids == [5, 5]


def schema_of(values: list) -> dict:
    return {"type": "json_schema", "json_schema": {"schema": {"enum": values}}}


def test_a_format_does_not_change_with_what_it_was_made_of():
    values, tag = ["a"], {"type": "const_string", "value": "a"}
    formatted = SamplingParams(response_format=schema_of(values))
    structured = SamplingParams(structured_outputs={"json": {"enum": values}})
    tagged = SamplingParams(structured_outputs={"structural_tag": {"format": tag}})
    values.append("b")
    tag["value"] = "b"
    assert formatted.response_format == structured.response_format == schema_of(["a"])
    assert tagged.response_format["format"]["value"] == "a"
    deep: dict = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="response_format nests too deeply"):
        SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": deep}})


def test_parameters_with_a_format_are_replaced():
    params = SamplingParams(response_format=schema_of(["a"]), seed=3)
    replaced = params.replace(structured_outputs={"json": {"enum": ["b"]}})
    assert replaced == SamplingParams(response_format=schema_of(["b"]), seed=3)
    assert replaced.replace(response_format=schema_of(["a"])) == params
    assert params.replace(structured_outputs=None, seed=3) == params
    assert params.replace(response_format=None).response_format is None
    with pytest.raises(RequestError, match="give one of them"):
        params.replace(response_format=schema_of(["a"]), structured_outputs={"regex": "a"})


def test_parameters_are_keys():
    fields = {"response_format": schema_of([[1], {"a": 2}]), "logit_bias": {5: 1.0, 6: 2.0}}
    params = SamplingParams(**fields)
    turned = SamplingParams(**{**fields, "logit_bias": {6: 2, 5: 1}})
    assert params == turned
    assert {params: 1, SamplingParams(): 2}[turned] == 1
    assert len({params, turned, params.replace(seed=1), params.replace(logit_bias=None)}) == 3


def test_an_eos_that_the_model_does_not_have(model, tmp_path, caplog):
    shutil.copytree(model, tmp_path / "model")
    settings = {"eos_token_id": [2, VOCAB_SIZE + 5, -1]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    with LLM(tmp_path / "model", **OPTIONS) as llm:
        (output,) = llm.generate("a", SamplingParams(max_tokens=4, min_tokens=3, temperature=0))
    assert len(output.outputs[0].token_ids) >= 3
    assert f"eos_token_id has {VOCAB_SIZE + 5}, -1, and the model has" in caplog.text


def test_of_several_prompts_the_bad_one_is_named(llm):
    """And nothing is computed."""
    steps = llm.engine.stats.steps
    good, limit = "a word", llm.engine.max_model_len
    for bad, reason in (
        ("x" * 9 * limit, f"prompt 1: prompt has .* tokens, limit is {limit - 1}"),
        (" " * 1000 * limit, f"prompt 1: prompt has {1000 * limit} characters, limit is"),
        ("a\ud800", "prompt 1: a text has .* half a character"),
        ([], "prompt 1: prompt is empty"),
        ([VOCAB_SIZE], f"prompt 1: prompt has token id {VOCAB_SIZE}"),
        ([1.5], "prompt 1: prompt holds '1.5' .float., expected token ids"),
    ):
        with pytest.raises(RequestError, match=reason):
            llm.generate([good, bad, good])
    with pytest.raises(RequestError, match=r"conversation 1: messages\[0\] is 'b'"):
        llm.chat([[{"role": "user", "content": "a"}], ["b"]])
    with pytest.raises(RequestError, match=r"messages has .* characters, limit is"):
        llm.chat([{"role": "user", "content": " " * 1000 * limit}])
    with pytest.raises(RequestError, match=r"choices has .* characters, limit is"):
        llm.generate("a", SamplingParams(choices=["yes", " " * 1_000_000]))
    with pytest.raises(RequestError, match=r"^prompt is empty"):
        llm.generate([[]])
    with pytest.raises(RequestError, match="half a character"):
        llm.generate("a", SamplingParams(choices=["yes", "\ud800"]))
    assert llm.engine.stats.steps == steps


def test_a_closed_llm(model):
    with LLM(model, **OPTIONS) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=1))[0].finished
    llm.close()
    with pytest.raises(ConfigError, match="is closed: make another"):
        llm.generate("a")
    for seed in (1.5, "x", True):
        with pytest.raises(ConfigError, match=r"seed is .*, expected a 64-bit integer"):
            LLM(model, **{**OPTIONS, "seed": seed})


def test_a_stream_of_an_llm_that_was_closed(model):
    """Whoever reads on is told, and what it held is free."""
    for count in (0, 1, 3):
        llm = LLM(model, **OPTIONS)
        engine = weakref.ref(llm.engine)
        stream = llm.stream([[5, 6], [5, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
        for _ in range(count):
            next(stream)
        llm.close()
        assert engine() is None
        with pytest.raises(ConfigError, match="was closed before all was answered"):
            next(stream)
    llm = LLM(model, **OPTIONS)
    last = SamplingParams(max_tokens=1)
    for answer in llm.stream([5], last):
        assert answer.finished
        llm.close()


def test_answers_do_not_depend_on_company_or_order(llm):
    """Random numbers are a function of (seed, sequence, token index)."""
    prompts = ["a b c d", "a b c e", "z"]
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=i, n=2) for i in range(3)]
    together = llm.generate(prompts, params)
    alone = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    backwards = llm.generate(prompts[::-1], params[::-1])[::-1]
    for a, b, c in zip(together, alone, backwards, strict=True):
        assert (
            [o.token_ids for o in a.outputs]
            == [o.token_ids for o in b.outputs]
            == [o.token_ids for o in c.outputs]
        )


def check_entry(entry, want, token, count, oracle):
    """A token's `Logprob`s against all log-probabilities, `[vocab]`, and a tokenizer."""
    order = want.sort(descending=True, stable=True).indices.tolist()
    leading = order[:count]
    assert sorted(entry) == sorted({*leading, token})
    for other, told in entry.items():
        assert isinstance(told, onestem.Logprob)
        assert told.logprob == pytest.approx(float(want[other]), abs=1e-4)
        assert told.rank == order.index(other) + 1
        assert told.decoded_token == oracle.decode([other])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 3.0, "seed": 4, "n": 2}])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_and_prompt_logprobs(llm, sampling, count):
    params = SamplingParams(
        max_tokens=5, logprobs=count, prompt_logprobs=count, ignore_eos=True, **sampling
    )
    llm.generate("the same words before", params)  # fills the cache, which must not matter
    output = llm.generate("the same words before", params)[0]
    oracle = transformers.AutoTokenizer.from_pretrained(llm.path)
    ids = list(output.prompt_token_ids)
    outside = 0
    for one in output.outputs:
        want = oracle_logprobs(llm.path, ids + one.token_ids)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ids)
        entries = [*output.prompt_logprobs[1:], *one.logprobs]
        for i, token, entry in zip(itertools.count(), [*ids[1:], *one.token_ids], entries):
            check_entry(entry, want[i], token, count, oracle)
            outside += entry[token].rank > count
        total = sum(e[t].logprob for t, e in zip(one.token_ids, one.logprobs, strict=True))
        assert one.cumulative_logprob == pytest.approx(total)
    assert outside


def test_answers_with_logprobs_are_plain_values(llm):
    """They are made when they are read, which no user need know."""
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=1, prompt_logprobs=0)
    answers = [llm.generate("some words", params)[0] for _ in range(2)]
    for answer in answers:
        answer.request_id, answer.metrics = "", None
    unread, kept = answers
    copied = pickle.loads(pickle.dumps(unread))
    assert copied == unread == kept == copy.deepcopy(kept)
    assert isinstance(copied, onestem.RequestOutput)
    assert type(copied.outputs[0].logprobs) is type(copied.prompt_logprobs) is list
    assert copied.outputs[0].logprobs[:1] == kept.outputs[0].logprobs[:1]
    replaced = dataclasses.replace(kept.outputs[0], text="")
    assert replaced.logprobs == kept.outputs[0].logprobs
    assert dataclasses.asdict(kept.outputs[0])["logprobs"] == kept.outputs[0].logprobs
    assert repr(kept) == repr(copied)
    (plain,) = llm.generate("some words", SamplingParams(max_tokens=1))
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is None


def test_logprobs_without_a_tokenizer(bare):
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=2)
    with LLM(bare, **OPTIONS) as llm:
        (output,) = llm.generate([5, 6], params)
    assert [
        [(one.rank, one.decoded_token) for one in entry.values()]
        for entry in output.outputs[0].logprobs
    ] == [[(1, None), (2, None)]] * 2


def test_choices_pick_the_most_probable(llm):
    choices = ("yes", "no way", "perhaps")
    prompt = "Is it raining? "
    output = llm.generate(prompt, SamplingParams(choices=choices, logprobs=0))[0]
    ids = llm.tokenizer.encode(prompt)
    totals = []
    for choice in choices:
        more = llm.tokenizer.encode(choice, add_special_tokens=False)
        want = oracle_logprobs(llm.path, ids + more)
        totals.append(sum(float(want[len(ids) - 1 + i, token]) for i, token in enumerate(more)))
    best = max(range(3), key=lambda i: totals[i])
    answer = output.outputs[0]
    assert (answer.choice, answer.text) == (best, choices[best])
    assert answer.cumulative_logprob == pytest.approx(totals[best], abs=1e-3)
    assert answer.finish_reason == "stop"
    total = sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True))
    assert total == pytest.approx(totals[best], abs=1e-3)


def test_stop_strings(llm):
    free = llm.generate(
        "go on", SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    )[0].outputs[0]
    stop = free.text[2:4]
    cut = llm.generate(
        "go on",
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, stop=[stop]),
    )[0]
    answer = cut.outputs[0]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == stop
    assert answer.text == free.text[: free.text.index(stop)]


def test_json_schema(llm):
    import json

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        max_tokens=60,
        temperature=1.0,
        seed=5,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    for output in llm.generate(["json", "json please"], params):
        assert set(json.loads(output.outputs[0].text)) == {"ok"}
        assert output.outputs[0].finish_reason == "stop"


def test_random_weights_need_only_a_config(model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    made = LLM(tmp_path, random_weights=True, **OPTIONS)
    assert (
        len(
            made.generate([[3, 4, 5]], SamplingParams(max_tokens=2, ignore_eos=True))[0]
            .outputs[0]
            .token_ids
        )
        == 2
    )


def test_bad_options_are_one_line_each(model, tmp_path):
    for options, message in (
        ({"model": "no/such/place"}, "no directory, no hub name"),
        ({"model": model, "device": "cuda:0"}, "sees no GPU"),
        ({"model": model, "device": "abacus"}, "device is 'abacus'"),
        ({"model": model, "dtype": "int3"}, "dtype is 'int3'"),
        (
            {"model": model, "kv_memory": "lots"},
            "kv_memory is 'lots', expected bytes, or",
        ),
        ({"model": model, "kv_memory": 10}, "raise kv_memory"),
        ({"model": model, "kv_memory": 2e9}, "kv_memory is 2000000000.0"),
        ({"model": model, "page_size": 0}, "page_size is 0"),
        ({"model": model, "page_size": 1.5}, r"page_size is 1\.5, expected an integer"),
        ({"model": model, "max_step_tokens": "8"}, "max_step_tokens is '8'"),
        ({"model": model, "max_model_len": 2.5}, r"max_model_len is 2\.5"),
        ({"model": model, "kv_memory": "999TiB"}, "kv_memory is 999TiB, cpu has .* GiB: lower it"),
        ({"model": model, "device": "meta"}, "device is 'meta'"),
        ({"model": model, "impl": "magic"}, "'magic'"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            LLM(**options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("2GiB", 2**31),
        ("1.5G", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("4 MiB", 2**22),
        (7, 7),
    ],
)
def test_memory_sizes(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "n", "max_tokens", "logit_bias", "stop", "seed"]
)
def test_bad_sampling_parameters(field):
    bad = {
        "temperature": -1,
        "top_p": 0,
        "n": 0,
        "max_tokens": 0,
        "logit_bias": {1: math.inf},
        "stop": [""],
        "seed": "x",
    }
    with pytest.raises(RequestError, match=field.split("[")[0]):
        SamplingParams(**{field: bad[field]})


def test_memory_is_left_for_the_logits_of_the_largest_graph():
    graphs = pytest.importorskip("onestem.engine.step.graphs")
    assert largest_decode(128256, 24 << 30) == graphs.BATCH_SIZES[-1]
    assert largest_decode(128256, 140 << 30) == 4096


def test_weights_rounded_at_load_are_another_model(model):
    options = {"model": model, "device": "cpu", "dtype": "bfloat16", "kv_memory": "1MiB"}
    with LLM(**options) as plain, LLM(**options, quantization="int8") as rounded:
        assert rounded.options.quantization == "int8"
        assert rounded.decoder.layers[0].mlp.down.kind.startswith(
            ("int8", "bfloat16, packed, from")
        )
        assert rounded.decoder.weight_bytes <= plain.decoder.weight_bytes
        assert rounded.options.identity() != plain.options.identity()
        # What a module's keys and values are kept under.
        assert kv_identity(rounded.options, model) != kv_identity(plain.options, model)
        prompts = [[5, 6, 7, 8], [5, 6, 7, 9]]
        answers = rounded.generate(prompts, SamplingParams(max_tokens=4, temperature=0))
        again = rounded.generate(prompts[1:], SamplingParams(max_tokens=4, temperature=0))
        assert answers[1].outputs[0].token_ids == again[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match=r"quantization is 'fp4', expected fp8, int8"):
        LLM(**options, quantization="fp4")


def test_without_a_folder_no_weights_are_hashed(model, monkeypatch):
    """What keys and values depend on is asked for files alone: it reads the model's."""
    monkeypatch.setattr("onestem.build.model_identity", lambda path: pytest.fail("it was read"))
    with LLM(model, host_kv="1MiB", **OPTIONS):
        pass


def test_host_memory_holds_a_piece_at_least(model):
    with pytest.raises(ConfigError, match="host_kv is 4KiB, and 512 tokens"):
        LLM(model, host_kv="4KiB", **OPTIONS)


def test_a_folder_has_room_for_a_piece_at_least(model, tmp_path):
    with pytest.raises(ConfigError, match="disk_kv_size is 4KiB, and 512 tokens"):
        LLM(model, disk_kv=tmp_path / "kv", disk_kv_size="4KiB", **OPTIONS)


def test_host_memory_that_is_not_there_is_refused(model):
    with pytest.raises(ConfigError, match=r"host_kv is 9999999GiB, this machine has \d.* lower it"):
        LLM(model, host_kv="9999999GiB", **OPTIONS)


def test_an_older_file_in_place_of_weights_is_another_model(model, tmp_path, monkeypatch):
    """Where the files are too large to be read whole, and differ between what is read."""
    monkeypatch.setattr("onestem.batch.identity.WHOLE_BYTES", 0)
    monkeypatch.setattr("onestem.batch.identity.SAMPLE_BYTES", 1)
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    options = EngineOptions(model=folder, device="cpu", dtype="float32")
    weights, before = folder / "model.safetensors", kv_identity(options, folder)
    assert kv_identity(options, folder) == before
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    os.utime(weights, (1e9, 1e9))
    assert kv_identity(options, folder) != before


def test_a_broken_link_beside_the_weights_is_no_weight(model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "notes.md").symlink_to(tmp_path / "gone")
    with LLM(folder, disk_kv=tmp_path / "kv", **OPTIONS) as llm:
        assert llm.engine.tiers is not None
