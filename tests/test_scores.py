"""Scores of given tokens: equal to transformers', to themselves whatever runs beside them, and no
token computed twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onestem import LLM, Score
from onestem.errors import OnestemError, RequestError
from onestem.rawtext import RawText
from onestem.scores import ScoreTree, completion_tree, encode_pairs, rolling_windows
from tests.engine.harness import oracle_logprobs
from tests.models.tiny import VOCAB_SIZE

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "device": "cpu", "seed": 0}
OPTIONS_OF_ONE = ("A", "B", "C", "D")
# Of float32: sums of a row differ in their last bits with its batch.
SAME = {"rtol": 1e-6, "atol": 1e-5}
SHARES = ("full", "storage", "off")


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **OPTIONS) as made:
        yield made


def exam(num: int = 20) -> tuple[list[str], list[list[str]]]:
    """Prompts with examples in common; options of one token, of several, with the same beginning,
    and one twice."""
    shots = "Q: which letter comes first? A: a\nQ: and the second? A: b\n"
    prompts = [
        f"{shots}Q: {i % 7}, {'more ' * (i % 3)}please? A:{' ' * (i % 2)}" for i in range(num)
    ]
    several = ["yes", "yes sir", "no", "yes"]
    return prompts, [several if i % 2 else list(OPTIONS_OF_ONE) for i in range(num)]


def flat(scores: list[list[Score]]) -> np.ndarray:
    return np.array([value for some in scores for one in some for value in one.token_logprobs])


def oracle(llm: LLM, prompt: str, completion: str) -> tuple[list[float], bool]:
    tokenizer = llm.tokenizer
    raw = RawText(prompt), [RawText(completion)]
    ids, (more,) = encode_pairs(*raw, tokenizer.encode_batch, tokenizer.first_id)
    table = oracle_logprobs(llm.path, ids + more)
    rows = table[len(ids) - 1 : len(ids) + len(more) - 1]
    values = [float(row[token]) for row, token in zip(rows, more, strict=True)]
    return values, all(int(row.argmax()) == token for row, token in zip(rows, more, strict=True))


def test_scores_are_those_of_transformers(llm):
    prompts, completions = exam()
    for prompt, texts, scores in zip(
        prompts, completions, llm.score(prompts, completions), strict=True
    ):
        for text, score in zip(texts, scores, strict=True):
            values, is_greedy = oracle(llm, prompt, text)
            np.testing.assert_allclose(score.token_logprobs, values, rtol=0, atol=1e-4)
            assert score.logprob == sum(score.token_logprobs)
            assert score.is_greedy == is_greedy
    llm.engine.check()


def test_what_is_most_probable_is_greedy(llm):
    (answer,) = llm.generate("Q: why? A:", onestem_greedy(6))
    ids = llm.tokenizer.encode("Q: why? A:")
    more = answer.outputs[0].token_ids
    ((whole, changed),) = llm.score([ids], [[more, [*more[:-1], (more[-1] + 1) % VOCAB_SIZE]]])
    assert (whole.is_greedy, changed.is_greedy) == (True, False)
    assert whole.token_ids == tuple(more)


def onestem_greedy(max_tokens: int):
    from onestem import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("share", SHARES)
def test_scores_do_not_depend_on_what_else_is_there(model, llm, share):
    prompts, completions = exam()
    want = flat(llm.score(prompts, completions))
    with LLM(model, **OPTIONS, share=share, max_step_tokens=64) as other:
        for _ in range(2):  # the second time all of it is cached
            np.testing.assert_allclose(flat(other.score(prompts, completions)), want, **SAME)
        alone = [other.score([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
        np.testing.assert_allclose(flat(alone), want, **SAME)
        other.engine.check()


def test_scores_under_preemption(model, llm, monkeypatch):
    prompts, completions = exam()
    want = flat(llm.score(prompts, completions))
    with LLM(model, **OPTIONS, max_step_tokens=16) as small:
        scheduler, step = small.engine.scheduler, small.engine._step

        def disturbed(*args):
            step(*args)
            if scheduler.room.num_preempted < 9 and scheduler.running:
                scheduler.room.preempt(scheduler.running[-1])

        monkeypatch.setattr(small.engine, "_step", disturbed)
        np.testing.assert_allclose(flat(small.score(prompts, completions)), want, **SAME)
        assert scheduler.room.num_preempted > 3
        small.engine.check()


@pytest.mark.parametrize("levels", ["all", "none"])
def test_each_token_is_computed_once(model, levels):
    """An exam in small: shots, questions behind them, four options."""
    rng = np.random.default_rng(0)
    prompts, completions = [], []
    for _ in range(4):
        shots = rng.integers(3, VOCAB_SIZE, 150).tolist()
        for q in range(12):
            question = rng.integers(3, VOCAB_SIZE, 20).tolist()
            prompts.append(shots + question)
            several = [[5, 6, 7], [5, 6, 8], [5, 9], [10, 11, 12]]
            completions.append([[5], [6], [7], [8]] if q % 2 else several)
    prefixes = {
        (*prompt, *text[:i])
        for prompt, texts in zip(prompts, completions, strict=True)
        for text in texts
        for i in range(len(text))
    }
    whole = {ids[:i] for ids in prefixes for i in range(1, len(ids) + 1)}
    with LLM(model, **OPTIONS, levels=levels) as llm:
        llm.score(prompts, completions)
        stats = llm.engine.stats
        assert stats.processed_prompt_tokens <= 1.02 * len(whole)
        before = stats.processed_prompt_tokens
        llm.score(prompts, completions)  # cached: one row of each that scores, and what follows
        assert stats.processed_prompt_tokens - before < 0.15 * len(whole)


def test_texts_are_scored_whole(model):
    header = "A long header that all of the texts begin with. "
    texts = [header + end for end in ("one", "two and more", "three")] + [header]
    with LLM(model, **OPTIONS) as llm:
        scores = llm.score(texts)
        computed = llm.engine.stats.processed_prompt_tokens
    first = llm.tokenizer.first_id
    distinct = set()
    for text, score in zip(texts, scores, strict=True):
        ids = [first, *llm.tokenizer.encode(text, add_special_tokens=False)]
        distinct |= {tuple(ids[:i]) for i in range(1, len(ids))}
        table = oracle_logprobs(llm.path, ids)
        want = [float(table[i, token]) for i, token in enumerate(ids[1:])]
        np.testing.assert_allclose(score.token_logprobs, want, rtol=0, atol=1e-4)
        assert score.token_ids == tuple(ids[1:])
    assert computed <= len(distinct)


def test_a_text_longer_than_the_model(model):
    rng = np.random.default_rng(1)
    text = rng.integers(3, VOCAB_SIZE, 75).tolist()
    with LLM(model, **OPTIONS, max_model_len=32) as llm:
        (score,) = llm.score([text])
        ids = [llm.tokenizer.first_id, *text]
        want = []
        for inputs, given_tokens in ((ids[:32], 32), (ids[32:64], 32), (ids[43:75], 11)):
            table = oracle_logprobs(llm.path, inputs)
            start = ids.index(inputs[0]) if inputs[0] == ids[0] else None
            follow = ids[1:33] if start == 0 else ids[33:65] if len(want) == 32 else ids[44:76]
            rows = range(32 - given_tokens, 32)
            want += [float(table[i, follow[i]]) for i in rows]
        assert score.token_ids == tuple(text)
        np.testing.assert_allclose(score.token_logprobs, want, rtol=0, atol=1e-4)


def test_a_prompt_of_the_whole_length_is_scored(model):
    ids = list(range(5, 37))
    with LLM(model, **OPTIONS, max_model_len=32) as llm:
        ((score,),) = llm.score([ids], [[[7]]])
        want = float(oracle_logprobs(llm.path, ids)[-1, 7])
        assert score.logprob == pytest.approx(want, abs=1e-4)
        with pytest.raises(RequestError, match="prompt 1: prompt has 33 tokens, limit is 32: "):
            llm.score([[4], ids], [[[7]], [[7, 8]]])


def test_logits_come_in_blocks(model, llm, monkeypatch):
    prompts, completions = exam()
    want = flat(llm.score(prompts, completions)), llm.score(prompts)
    monkeypatch.setattr("onestem.engine.step.runner.BLOCK_LOGITS", 3 * VOCAB_SIZE + 1)
    with LLM(model, **OPTIONS) as other:
        logits, sizes = other.decoder.logits, []

        def noted(hidden):
            sizes.append(len(hidden))
            return logits(hidden)

        monkeypatch.setattr(other.decoder, "logits", noted)
        np.testing.assert_allclose(flat(other.score(prompts, completions)), want[0], **SAME)
        np.testing.assert_allclose(flat([other.score(prompts)]), flat([want[1]]), **SAME)
        assert max(sizes) == 3


SCHEMA = """<schema name="exam"><module name="rules">Answer with one letter.</module></schema>"""


def test_prompts_in_pml(model):
    with LLM(model, **OPTIONS) as llm:
        llm.add_schema(SCHEMA)
        markup = '<prompt schema="exam"><rules/> Which one?</prompt>'
        ((a, b),) = llm.score_pml(markup, [["yes", "yes sir"]], isolation="off")
        ids = llm.schemas.compile(markup, "off").ordered_token_ids.tolist()
        more = llm.tokenizer.encode("yes sir", add_special_tokens=False)
        ((want,),) = llm.score([ids], [[more]])
        np.testing.assert_allclose(b.token_logprobs, want.token_logprobs, **SAME)
        assert a.token_logprobs == b.token_logprobs[: len(a.token_logprobs)]


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ("text", None, "prompts is 'text', expected a list"),
        (["a"], [], "0 lists of completions for 1 prompts"),
        (["a", "b"], [["x"], [""]], "prompt 1: completion '' has no tokens of its own"),
        (["a"], [[]], "^completions is empty: give at least one$"),
        (["a", "b"], [["x"], []], "^prompt 1: completions is empty: give at least one$"),
        (["a"], [[[5]]], "text and ids mixed"),
        ([[5]], [[[]]], "a completion is empty"),
        ([[]], [[[5]]], "prompt is empty"),
        ([[5]], [[[VOCAB_SIZE]]], f"prompt 0: token id {VOCAB_SIZE}, expected ids from 0"),
        ([[5]], [[[-1]]], "prompt 0: token id -1, expected ids from 0"),
        (["a"], ["xy"], "completions is 'xy', expected a list"),
        ([""], None, "text is empty"),
    ],
)
def test_refusals(llm, prompts, completions, message):
    with pytest.raises(RequestError, match=message):
        llm.score(prompts, completions)
    assert llm.score([], []) == llm.score([]) == []


def test_damaged_weights_are_an_error(model):
    with LLM(model, **OPTIONS) as llm:
        good = llm.score(["a"])
        run = llm.engine.launcher.runner.decoder.logits
        llm.decoder.logits = lambda hidden: run(hidden) * float("nan")
        with pytest.raises(OnestemError, match="no scores: the logits are not finite"):
            llm.score(["a b"])
        llm.decoder.logits = run
        assert llm.score(["a"])[0].logprob == pytest.approx(good[0].logprob, abs=1e-5)
        llm.engine.check()


# --- the tree ----------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 2), min_size=2, max_size=7)


@given(st.lists(texts, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_tree_scores_each_pair_of_row_and_token_once(items, random):
    starts = [random.randrange(1, len(ids)) for ids in items]
    tree = ScoreTree(items, starts)
    order = list(range(len(tree.leaves)))
    random.shuffle(order)
    paths = tree.paths(order)
    computed, found, values = set(), set(), []
    for leaf in order:
        ids, path = tree.leaves[leaf].tolist(), paths[leaf]
        rows = (path.rows + len(ids) - 1).tolist()
        prefixes = [tuple(ids[: row + 1]) for row in rows]
        # Rows from the first that scores on are nobody's who came before.
        own = {tuple(ids[: row + 1]) for row in range(rows[0], len(ids))}
        assert not own & computed
        computed |= {tuple(ids[: row + 1]) for row in range(len(ids))}
        pairs = list(zip(prefixes, path.targets.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        assert not found & set(pairs)
        found |= set(pairs)
    for ids, path in zip(tree.leaves, paths, strict=True):
        rows = (path.rows + len(ids)).tolist()
        pairs = zip(rows, path.targets.tolist(), strict=True)
        values.append(np.array([hash((*ids[:row].tolist(), token)) for row, token in pairs]))
    for ids, start, got in zip(items, starts, tree.take(values), strict=True):
        assert got.tolist() == [hash(tuple(ids[: i + 1])) for i in range(start, len(ids))]


def test_options_of_one_token_take_no_rows():
    _, (path,) = completion_tree([[5], [6], [5], [7]])
    assert (path.tokens.tolist(), path.rows.tolist()) == ([], [0, 0, 0])
    assert path.targets.tolist() == [5, 6, 7]


@given(st.integers(2, 60), st.integers(1, 20))
def test_windows_score_each_token_once(num_tokens, max_len):
    windows = list(rolling_windows(num_tokens, max_len))
    assert [i for _, start, end in windows for i in range(start, end)] == [*range(1, num_tokens)]
    assert all(first < start and end - 1 - first <= max_len for first, start, end in windows)
