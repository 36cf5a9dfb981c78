"""Answers as they grow, other weights in place, sleep, and search from outputs: by equality."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random

import pytest
import torch

from onestem import LLM, SamplingParams
from onestem.errors import ConfigError, RequestError, UnsupportedError, WeightsError
from onestem.models import sizes
from onestem.models.linear import Layout
from tests.engine.harness import TOLERANCE, oracle_logprobs, shared_prompts
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.changed import changed_model, tensors_of
from tests.models.test_models_update import LAYOUTS
from tests.models.tiny import VOCAB_SIZE, make_tiny

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "seed": 0}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = shared_prompts()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny("qwen2", tmp_path_factory.mktemp("rollouts") / "before")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """The same model with other weights."""
    return changed_model(model, tmp_path_factory.mktemp("rollouts") / "after")


@pytest.fixture
def llm(model):
    with LLM(model, **OPTIONS) as llm:
        yield llm
        llm.engine.check()


@pytest.fixture(scope="module")
def fresh(other):
    """From the changed checkpoint."""
    with LLM(other, **OPTIONS) as llm:
        yield llm


def told(answers):
    """All that a sequence says, exactly."""
    return [
        (one.token_ids, one.text, one.finish_reason, [p[t].logprob for t, p in pairs(one)])
        for answer in answers
        for one in answer.outputs
    ]


def pairs(completion):
    return zip(completion.token_ids, completion.logprobs, strict=True)


def rows(llm):
    """Rows that were computed: of prompts, and one for each sampled token but the last."""
    return llm.engine.stats.processed_prompt_tokens


# ----------------------------------------------------------------------------- streams


def test_streams_grow_to_what_generate_gives(llm):
    params = [
        SamplingParams(max_tokens=5, temperature=0.8, seed=i, n=i % 3 + 1, logprobs=2)
        for i in range(len(PROMPTS))
    ]
    want = llm.generate(PROMPTS, params)
    llm.reset_prefix_cache()  # rows in other steps have other last bits
    last, grown = {}, 0
    for answer in llm.stream(PROMPTS, params):
        before = last.get(answer.index)
        for was, now in zip(before.outputs if before else [], answer.outputs, strict=False):
            assert now.token_ids[: len(was.token_ids)] == was.token_ids
            assert now.text.startswith(was.text)
            grown += len(now.token_ids) > len(was.token_ids)
        last[answer.index] = answer
    assert grown > len(PROMPTS)
    assert told(last[i] for i in range(len(PROMPTS))) == told(want)
    assert [answer.index for answer in want] == list(range(len(PROMPTS)))
    assert pickle.loads(pickle.dumps(want[2])).index == 2


def test_pieces_joined_are_the_answers(llm):
    params = SamplingParams(max_tokens=7, temperature=0.8, seed=3, n=2, logprobs=1)
    want = llm.generate(["ab", "abc"], params)
    llm.reset_prefix_cache()
    joined = {}
    for answer in llm.stream(["ab", "abc"], params, output_kind="delta"):
        for piece in answer.outputs:
            whole = joined.setdefault((answer.index, piece.index), piece)
            if whole is not piece:
                whole.extend(piece)
    assert told(
        [dataclasses.replace(want[0], outputs=[joined[i, j] for j in (0, 1)]) for i in (0, 1)]
    ) == told(want)
    totals = [joined[i, j].cumulative_logprob for i in (0, 1) for j in (0, 1)]
    assert totals == [one.cumulative_logprob for answer in want for one in answer.outputs]


def test_a_stream_that_is_left_ends_what_runs(llm):
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(RequestError, match="unfinished requests"):
        llm.generate([[1]])
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.generate([[5]], GREEDY)[0].finished
    assert list(llm.stream([])) == []
    with pytest.raises(RequestError, match="output_kind is 'all', expected cumulative or delta"):
        llm.stream([[1]], output_kind="all")
    with pytest.raises(RequestError, match="prompt 1: prompt has token id 999"):
        llm.stream([[1], [999]])


def test_prompts_as_vllm_has_them(llm):
    plain = llm.generate(["ab", [5, 6]], GREEDY)
    llm.reset_prefix_cache()
    same = [{"prompt": "ab"}, {"prompt_token_ids": [5, 6]}]
    objects = llm.generate(same, GREEDY, use_tqdm=False)
    assert told(objects) == told(plain)
    assert [answer.prompt for answer in objects] == ["ab", None]
    assert llm.generate({"prompt": "ab"}, GREEDY)[0].outputs[0].text == plain[0].outputs[0].text
    with pytest.raises(UnsupportedError, match=r"no attribute 'beam_search'.*SamplingParams\(n="):
        llm.beam_search(["ab"], None)


def test_a_bar_is_shown_at_a_terminal_alone(llm, monkeypatch, capsys):
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "answering" in shown
    assert "2/2" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


# ----------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0.5}, False),
        ({"temperature": 2.0, "top_k": 5}, False),
        ({"temperature": 0.7, "top_p": 0.8, "min_p": 0.05}, False),
        ({"temperature": 1.0, "logit_bias": {7: 3.0}}, False),
        ({"temperature": 0.9, "allowed_token_ids": list(range(40, 60))}, False),
        ({"temperature": 0.0, "logit_bias": {7: 3.0}}, True),
    ],
)
def test_log_probabilities_of_what_is_drawn_from(model, fields, greedy):
    """Against the distribution that a sampler in float64 draws from."""
    from tests.ops.reference_sampling import keep

    params = SamplingParams(max_tokens=4, seed=2, n=3, ignore_eos=True, logprobs=3, **fields)
    prompt = PROMPTS[0]
    with LLM(model, logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        (answer,) = llm.generate([prompt], params)
    with LLM(model, **OPTIONS) as llm:
        (raw,) = llm.generate([prompt], params)
    for one, of_raw in zip(answer.outputs, raw.outputs, strict=True):
        assert one.token_ids == of_raw.token_ids
        logits = oracle_logprobs(model, prompt + one.token_ids).double()
        total = 0.0
        for i, (token, entry) in enumerate(pairs(one)):
            x = logits[len(prompt) - 1 + i].clone()
            for biased, bias in fields.get("logit_bias", {}).items():
                x[biased] += bias
            if "allowed_token_ids" in fields:
                allowed = torch.full_like(x, -math.inf)
                x = allowed.index_copy(0, ids := torch.tensor(fields["allowed_token_ids"]), x[ids])
            kept = range(len(x))
            if not greedy:
                names = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
                filters = {n: names[n] for n in ("temperature", "top_k", "top_p", "min_p")}
                kept = keep(x.numpy(), **filters)
                x = x / fields["temperature"]
            want = torch.full_like(x, -math.inf)
            index = torch.tensor(list(kept))
            want[index] = torch.log_softmax(x[index], -1)
            assert entry[token].logprob == pytest.approx(want[token].item(), abs=TOLERANCE)
            for other, found in entry.items():
                assert found.logprob == pytest.approx(want[other].item(), abs=TOLERANCE)
            total += entry[token].logprob
            plain = of_raw.logprobs[i][token].logprob
            assert plain == pytest.approx(
                oracle_logprobs(model, prompt + one.token_ids)[len(prompt) - 1 + i][token].item(),
                abs=TOLERANCE,
            )
        assert one.cumulative_logprob == pytest.approx(total)
    with pytest.raises(ConfigError, match="logprobs_mode is 'raw_logits', expected"):
        LLM(model, logprobs_mode="raw_logits", **OPTIONS)


def test_no_beside_logprobs_is_the_sampled_token_alone(llm):
    params = SamplingParams(max_tokens=4, temperature=1.5, seed=0, logprobs=0)
    (answer,) = llm.generate([PROMPTS[0]], params)
    (one,) = answer.outputs
    assert [list(entry) for entry in one.logprobs] == [[token] for token in one.token_ids]


# ----------------------------------------------------------------------------- other weights


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_answers_are_those_of_the_changed_checkpoint(model, other, layout, dtype, monkeypatch):
    monkeypatch.setattr(sizes, "choose_layout", lambda *_, **__: layout)
    options = {**OPTIONS, "dtype": str(dtype).removeprefix("torch.")}
    with LLM(model, **options) as llm, LLM(other, **options) as fresh:
        before = llm.generate(PROMPTS, GREEDY)
        assert llm.update_weights(tensors_of(other).items()) == llm.weights_version == 1
        after, want = llm.generate(PROMPTS, GREEDY), fresh.generate(PROMPTS, GREEDY)
        assert told(after) == told(want)
        assert told(after) != told(before)
        # Nothing that was cached is used again, and all is cached anew.
        assert [a.metrics.num_cached_tokens for a in after] == [
            a.metrics.num_cached_tokens for a in want
        ]
        assert all(one.weight_versions == [1] * 6 for a in after for one in a.outputs)
        assert all(one.weight_versions == [0] * 6 for a in before for one in a.outputs)


@pytest.mark.parametrize("share", ["full", "storage", "off"])
def test_running_answers_go_on_with_the_new_weights(model, fresh, other, share):
    """Behind the tokens that they have, as if these had been their prompt."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0, n=2)
    with LLM(model, share=share, **OPTIONS) as llm:
        last, version = {}, 0
        for number, answer in enumerate(llm.stream(PROMPTS, params)):
            last[answer.index] = answer
            if number in (9, 31):
                named = tensors_of(other if version == 0 else model).items()
                version = llm.update_weights(named, version=10 * (version + 1))
                assert llm.engine.cache.cached_tokens() == 0
                llm.engine.check()
    assert version == 110
    crossed, parts = 0, {0: [], 10: [], 110: []}
    for index, prompt in enumerate(PROMPTS):
        for one in last[index].outputs:
            assert one.weight_versions == sorted(one.weight_versions)
            assert len(one.weight_versions) == len(one.token_ids) == 12
            spans = sorted(set(one.weight_versions))
            crossed += len(spans) > 1
            for span in spans:
                at, count = one.weight_versions.index(span), one.weight_versions.count(span)
                parts[span].append(([*prompt, *one.token_ids[:at]], one, at, count))
    assert crossed > len(PROMPTS)
    with LLM(model, **OPTIONS) as old:
        for llm, of_it in ((old, parts[0]), (fresh, parts[10]), (old, parts[110])):
            each = [GREEDY.replace(max_tokens=count) for *_, count in of_it]
            wanted = llm.generate([begun for begun, *_ in of_it], each)
            for want, (_, one, at, count) in zip(wanted, of_it, strict=True):
                assert want.outputs[0].token_ids == one.token_ids[at : at + count]
                for i, (token, entry) in enumerate(pairs(want.outputs[0])):
                    found = one.logprobs[at + i][token].logprob
                    assert found == pytest.approx(entry[token].logprob, abs=TOLERANCE)


def test_scores_of_one_answer_are_of_one_model(model, other, fresh):
    """A prompt whose log-probabilities were computed in part is scored anew."""
    prompt = [token % 200 + 5 for token in range(90)]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0, ignore_eos=True)
    options = {**OPTIONS, "max_step_tokens": 16}
    with LLM(model, **options) as llm:
        run = llm.stream([prompt, [7]], [params, params.replace(max_tokens=30)])
        answers, done = {}, False
        for answer in run:
            answers[answer.index] = answer
            if not done and answer.index == 1 and len(answer.outputs[0].token_ids) == 3:
                llm.update_weights(tensors_of(other).items())
                done = True
    assert answers[0].outputs[0].weight_versions == [1, 1]
    (want,) = fresh.generate([prompt], params)
    for token, entry, of_fresh in zip(
        prompt[1:], answers[0].prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True
    ):
        assert entry[token].logprob == pytest.approx(of_fresh[token].logprob, abs=TOLERANCE)


def test_some_weights_are_refused_before_anything_changes(llm, model):
    before = llm.generate(PROMPTS, GREEDY)
    cached = llm.engine.cache.cached_tokens()
    tensors = tensors_of(model)
    name = "model.norm.weight"
    doubled = {name: 2 * tensors[name]}
    for wrong, reason in [
        ({**doubled, "model.nothing": tensors[name]}, "no place for: model.nothing"),
        ({**doubled, "model.layers.0.mlp.up_proj.weight": tensors[name]}, "expected \\[96, 64\\]"),
    ]:
        with pytest.raises(WeightsError, match=reason):
            llm.update_weights(wrong.items())
    with pytest.raises(RequestError, match="version is 'x', expected an integer"):
        llm.update_weights(doubled.items(), version="x")
    assert llm.weights_version == 0
    assert llm.engine.cache.cached_tokens() == cached
    llm.reset_prefix_cache()
    assert told(llm.generate(PROMPTS, GREEDY)) == told(before)
    llm.update_weights(iter(doubled.items()))  # some of them
    assert told(llm.generate(PROMPTS, GREEDY)) != told(before)
    llm.update_weights([(name, tensors[name].double())], version=7)
    assert told(llm.generate(PROMPTS, GREEDY)) == told(before)
    assert llm.weights_version == 7


def test_half_written_weights_are_not_used(llm, model, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    tensors = tensors_of(model)
    want = told(llm.generate(PROMPTS, GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr("onestem.engine.step.runner.write_tensors", fail)
        with pytest.raises(MemoryError):
            llm.update_weights(tensors.items())
    with pytest.raises(RequestError, match=r"dropped, and have no values yet for model\.embed_tok"):
        llm.generate([[1]])
    llm.update_weights(tensors.items())
    assert told(llm.generate(PROMPTS, GREEDY)) == want


# ----------------------------------------------------------------------------- sleep


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantised_weights_sleep_and_stay(model, quantization):
    with LLM(model, quantization=quantization, **OPTIONS) as llm:
        want = told(llm.generate(PROMPTS, GREEDY))
        with pytest.raises(RequestError, match=f"level 2 .* {quantization} weights .*use level 1"):
            llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        assert told(llm.generate(PROMPTS, GREEDY)) == want
        with pytest.raises(WeightsError, match=f"update_weights: the weights are {quantization}"):
            llm.update_weights(tensors_of(model).items())
        llm.engine.check()


@pytest.mark.parametrize("layout", [Layout.PLAIN, Layout.PACKED, Layout.PACKED_AND_PLAIN])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_answers_stay_the_same(model, level, layout, monkeypatch):
    monkeypatch.setattr(sizes, "choose_layout", lambda *_, **__: layout)
    with LLM(model, **OPTIONS) as llm:
        want = told(llm.generate(PROMPTS, GREEDY))
        llm.sleep(level)
        pages = llm.engine.launcher.runner.kv_pages
        assert all(t.untyped_storage().nbytes() == 0 for pair in pages for t in pair)
        if level == 2:
            held = [t for t in llm.decoder.tensors if not t.is_mkldnn]
            assert all(t.untyped_storage().nbytes() == 0 for t in held)
        for _ in range(2):
            with pytest.raises(RequestError, match=rf"asleep \(level {level}: weights and kv_cac"):
                llm.generate([[1]])
        with pytest.raises(RequestError, match=r"weights are asleep: call wake_up"):
            llm.update_weights(tensors_of(model).items())
        llm.wake_up(["weights"])
        with pytest.raises(RequestError, match=rf"asleep \(level {level}: kv_cache\)"):
            llm.generate([[1]])
        if level == 2:
            for named in tensors_of(model).items():  # one call each, as TRL does
                llm.update_weights([named])
        llm.wake_up(tags=("kv_cache",))
        assert told(llm.generate(PROMPTS, GREEDY)) == want
        llm.engine.check()


def test_dropped_weights_must_be_given_again(llm, model):
    want = told(llm.generate(PROMPTS, GREEDY))
    llm.sleep(level=1)
    llm.sleep(level=2)  # deeper
    llm.sleep(level=1)
    llm.wake_up()
    llm.wake_up()
    tensors = tensors_of(model)
    first = dict(list(tensors.items())[1:])
    llm.update_weights(first.items())
    (name,) = tensors.keys() - first.keys()
    with pytest.raises(RequestError, match=f"have no values yet for {name}: give them"):
        llm.generate([[1]])
    with pytest.raises(RequestError, match="have no values yet"):
        llm.stream([[1]]).__next__()
    llm.update_weights([(name, tensors[name])])
    assert told(llm.generate(PROMPTS, GREEDY)) == want
    for level in (0, 3, "1", True):
        with pytest.raises(RequestError, match=r"sleep level is .*, expected 1 or 2"):
            llm.sleep(level)
    for tags in ("weights", ["all"]):
        with pytest.raises(RequestError, match=r"wake_up tags are .*, expected some of"):
            llm.wake_up(tags)


def test_answers_that_run_sleep_too(llm):
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=1, n=2, logprobs=0)
    want = llm.generate(PROMPTS, params)
    last = {}
    stream = llm.stream(PROMPTS, params)
    for number, answer in enumerate(stream):
        last[answer.index] = answer
        if number == 13:
            llm.sleep(1)
            llm.wake_up()
        if number == 20:
            assert llm.reset_prefix_cache() is False
            assert llm.reset_prefix_cache(reset_running_requests=True) is True
            assert llm.engine.cache.cached_tokens() == 0
    tokens = [one.token_ids for i in range(len(PROMPTS)) for one in last[i].outputs]
    assert tokens == [one.token_ids for answer in want for one in answer.outputs]
    assert sum(answer.metrics.num_preempted for answer in last.values()) > 0
    stream = llm.stream(PROMPTS, params)
    llm.sleep(1)
    with pytest.raises(RequestError, match="asleep"):
        next(stream)  # before it has begun
    llm.wake_up()
    next(stream)
    next(stream)
    llm.sleep(1)
    for _ in range(2):
        with pytest.raises(RequestError, match="asleep"):
            next(stream)
    llm.wake_up()
    last = {answer.index: answer for answer in stream}
    assert [one.token_ids for i in range(len(PROMPTS)) for one in last[i].outputs] == tokens
    llm.sleep(1)
    assert next(stream, None) is None
    llm.wake_up()
    stream = llm.stream(PROMPTS, params)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished()


def test_reset_drops_what_is_cached_and_keeps_what_is_pinned(llm):
    engine = llm.engine
    engine.requests.pin_prefix("p", PROMPTS[0][:20])
    while engine.has_unfinished():
        engine.step()
    llm.generate(PROMPTS, GREEDY)
    assert llm.reset_prefix_cache() is True
    assert engine.cache.cached_tokens() == 20
    (again,) = llm.generate([PROMPTS[0]], GREEDY)
    assert again.metrics.num_cached_tokens == 20
    llm.update_weights([])
    assert engine.cache.cached_tokens() == 0
    while engine.has_unfinished():  # computed again with the new weights
        engine.step()
    assert [info.ready for info in engine.requests.prefixes()] == [True]
    assert engine.cache.cached_tokens() == 20
    engine.requests.unpin_prefix("p")


# ----------------------------------------------------------------------------- search


def test_going_on_reads_nothing_again(llm):
    """The last token of an output was sampled and never read: its row is computed then, once."""
    prompt, tokens = PROMPTS[0], []
    llm.engine.reset_stats()
    for step in range(5):
        (answer,) = llm.generate([prompt + tokens], GREEDY.replace(max_tokens=4))
        assert answer.metrics.num_computed_tokens == (1 if step else len(prompt))
        tokens += answer.outputs[0].token_ids
    assert rows(llm) == len(prompt) + 4
    (whole,) = llm.generate([prompt], GREEDY.replace(max_tokens=20))
    assert whole.outputs[0].token_ids == tokens


def test_the_best_of_n_goes_on(llm):
    prompt = PROMPTS[0]
    llm.engine.reset_stats()
    params = SamplingParams(max_tokens=6, temperature=1.2, seed=4, n=8, logprobs=0, ignore_eos=True)
    (answer,) = llm.generate([prompt], params)
    assert rows(llm) == len(prompt)
    best = max(answer.outputs, key=lambda one: one.cumulative_logprob)
    llm.generate([prompt + best.token_ids], GREEDY)
    assert rows(llm) == len(prompt) + 1


def test_beams_over_steps(llm, model):
    """Beam search by hand: each token of each beam is read once, and the beams are the oracle's."""
    prompt, width = PROMPTS[0], 3
    step = SamplingParams(max_tokens=1, temperature=0, logprobs=width, ignore_eos=True)
    beams, want = [(0.0, [])], [(0.0, [])]
    llm.engine.reset_stats()
    for depth in range(5):
        answers = llm.generate([prompt + tokens for _, tokens in beams], step)
        grown = [
            (score + entry.logprob, [*tokens, token])
            for (score, tokens), answer in zip(beams, answers, strict=True)
            for token, entry in answer.outputs[0].logprobs[0].items()
        ]
        beams = sorted(grown, reverse=True)[:width]
        assert rows(llm) == len(prompt) + depth * width
        grown = []
        for score, tokens in want:
            values, ids = oracle_logprobs(model, prompt + tokens)[-1].topk(width)
            pairs = zip(values.tolist(), ids.tolist(), strict=True)
            grown += [(score + value, [*tokens, token]) for value, token in pairs]
        want = sorted(grown, reverse=True)[:width]
    assert [tokens for _, tokens in beams] == [tokens for _, tokens in want]


def test_a_tree_search_reads_each_token_once(llm):
    """Monte Carlo tree search: a node is expanded by some tokens from anywhere in the tree, also
    from inside of an answer. Equal answers from one node are one node."""
    chooser = random.Random(0)
    root = tuple(PROMPTS[0])
    nodes, read = [root], set()
    llm.engine.reset_stats()
    for simulation in range(30):
        node = chooser.choice(nodes)
        params = SamplingParams(
            max_tokens=3, temperature=1.5, seed=simulation, n=2, ignore_eos=True
        )
        (answer,) = llm.generate([list(node)], params)
        before = len(read)
        read |= {node[: i + 1] for i in range(len(node))}
        # The row behind which the next token is sampled is computed in any case.
        computed = answer.metrics.num_computed_tokens
        assert computed == max(1, len(read) - before)
        for one in answer.outputs:
            path = (*node, *one.token_ids)
            read |= {path[: i + 1] for i in range(len(path) - 1)}
            nodes += [path, path[:-1]]
    llm.engine.check()
    assert len(read) > 100
