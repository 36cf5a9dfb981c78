"""The sampler against a slow one in float64, and against itself in other batches."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.engine.logprobs import logprobs_of, token_logprobs
from onestem.engine.random import uniform
from onestem.engine.sampler import MaskedRowError, NonFiniteLogitsError, Sampler
from onestem.engine.sampling_row import SamplingRow
from onestem.errors import OnestemError, RequestError
from onestem.request import SamplingParams

INFINITY = float("inf")


@dataclass
class Defaults:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


# --- the slow reference ------------------------------------------------------------------------


def reference_logits(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Penalties, bias and masks on one row, float64, one token at a time."""
    params = row.params
    x = [float(value) for value in logits]
    output = [int(token) for token in row.output_token_ids]
    seen = set(output) | {int(token) for token in row.prompt_token_ids}
    penalty = params.repetition_penalty or 1.0
    for token in seen:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if row.token_index < params.min_tokens:
        for token in row.stop_ids:
            x[token] = -INFINITY
    if row.allowed_mask is not None:
        x = [value if ok else -INFINITY for value, ok in zip(x, row.allowed_mask, strict=True)]
    return np.array(x)


def reference_token(logits: np.ndarray, row: SamplingRow) -> tuple[int, float]:
    """The token, and how far the random number was from giving another one."""
    params = row.params
    x = reference_logits(logits, row)
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    temperature = 1.0 if params.temperature is None else params.temperature
    if temperature == 0.0:
        return order[0], 1.0
    kept = order[: params.top_k] if params.top_k and params.top_k > 0 else order
    weight = {token: math.exp((x[token] - x[order[0]]) / temperature) for token in kept}
    total = math.fsum(weight.values())
    top_p = 1.0 if params.top_p is None else params.top_p
    margin, nucleus, mass = 1.0, [], 0.0
    for token in kept:
        if top_p < 1.0:
            margin = min(margin, abs(mass / total - top_p))
        if mass / total >= top_p:
            break
        nucleus.append(token)
        mass += weight[token]
    least = params.min_p or 0.0
    kept = [token for token in nucleus if weight[token] >= least]
    margin = min([margin] + [abs(weight[token] - least) for token in nucleus if least > 0.0])
    total = math.fsum(weight[token] for token in kept)
    u = float(uniform([row.seed], [row.sequence_index], [row.token_index])[0])
    mass = 0.0
    for token in kept:
        mass += weight[token]
        margin = min(margin, abs(u - mass / total))
        if u < mass / total:
            return token, margin
    return kept[-1], 0.0


# --- strategies --------------------------------------------------------------------------------

VOCAB = 40


def optional(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([None, 0.0, 0.01, 0.3, 1.0, 2.5]),
    top_k=optional(st.sampled_from([-1, 0, 1, 2, 5, 39, 40, 100])),
    top_p=optional(st.floats(0.01, 1.0)),
    min_p=optional(st.floats(0.0, 1.0)),
    repetition_penalty=optional(st.floats(0.5, 2.0)),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.1]),
    logit_bias=optional(
        st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4)
    ),
    min_tokens=st.integers(0, 5),
    logprobs=optional(st.integers(0, 5)),
)
rows_strategy = st.lists(
    st.builds(
        SamplingRow,
        params=params_strategy,
        seed=st.integers(-(2**63), 2**64 - 1),
        sequence_index=st.integers(0, 9),
        token_index=st.integers(0, 9),
        prompt_token_ids=tokens,
        output_token_ids=tokens,
        stop_ids=st.frozensets(st.integers(0, 3), max_size=3),
        allowed_mask=optional(
            st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB).map(
                # one token that is never a stop id stays allowed
                lambda flags: torch.tensor([*flags[:-1], True])
            )
        ),
    ),
    min_size=1,
    max_size=8,
)


def random_logits(rows: int, vocab_size: int, seed: int, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if ties else logits


# --- equalities --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(rows_strategy, st.integers(0, 2**31), st.booleans())
def test_tokens_are_those_of_the_reference(rows: list[SamplingRow], seed: int, ties: bool) -> None:
    logits = random_logits(len(rows), VOCAB, seed, ties=ties)
    before = logits.clone()
    sampled = Sampler(VOCAB).sample(logits, rows)
    assert torch.equal(logits, before)
    for values, row, token in zip(logits.numpy(), rows, sampled.token_ids, strict=True):
        expected, margin = reference_token(values, row)
        # Penalised logits are float32 here and float64 there.
        assert token == expected or margin < 1e-4 or near_tie(values, row, token, expected)


def near_tie(values: np.ndarray, row: SamplingRow, token: int, other: int) -> bool:
    x = reference_logits(values, row)
    changed = row.params.repetition_penalty is not None or row.params.logit_bias is not None
    ordered = np.sort(x[np.isfinite(x)])
    return changed and bool((np.diff(ordered) < 1e-5).any())


@settings(deadline=None, max_examples=100)
@given(rows_strategy, st.integers(0, 2**31), st.booleans(), st.randoms())
def test_alone_is_as_in_any_batch_and_order(
    rows: list[SamplingRow], seed: int, ties: bool, random
) -> None:
    logits = random_logits(len(rows), VOCAB, seed, ties=ties)
    whole = Sampler(VOCAB).sample(logits, rows)
    order = random.sample(range(len(rows)), len(rows))
    shuffled = Sampler(VOCAB).sample(logits[order], [rows[i] for i in order])
    assert shuffled.token_ids == [whole.token_ids[i] for i in order]
    for i, row in enumerate(rows):
        alone = Sampler(VOCAB).sample(logits[i : i + 1], [row])
        assert alone.token_ids == [whole.token_ids[i]]
        if whole.logprobs[i] is None:
            assert alone.logprobs == [None]
        else:
            assert list(alone.logprobs[0]) == list(whole.logprobs[i])
            assert alone.logprobs[0] == pytest.approx(whole.logprobs[i], abs=1e-12)


WIDE = 3000


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=100.0),
        SamplingParams(temperature=20.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=20.0, min_p=0.3),
        SamplingParams(temperature=1.0, min_p=0.001),
        SamplingParams(temperature=50.0, top_k=200),
        SamplingParams(temperature=50.0, top_k=256),
        SamplingParams(temperature=50.0, top_k=257),
        SamplingParams(temperature=50.0, top_k=2000, top_p=0.5, min_p=0.5),
        SamplingParams(temperature=50.0, top_k=2999),
        SamplingParams(temperature=50.0, top_p=0.001),
    ],
    ids=str,
)
def test_vocabularies_past_the_candidates(params: SamplingParams, ties: bool) -> None:
    """Few candidates, many, and the whole order give what the reference gives."""
    rows = [SamplingRow(params, seed=5, token_index=index) for index in range(24)]
    logits = random_logits(len(rows), WIDE, 3, ties=ties)
    sampled = Sampler(WIDE).sample(logits, rows)
    for values, row, token in zip(logits.numpy(), rows, sampled.token_ids, strict=True):
        expected, margin = reference_token(values, row)
        assert token == expected or margin < 1e-9


def test_all_logits_equal() -> None:
    """No candidate is sure: everything is tied."""
    rows = [SamplingRow(SamplingParams(temperature=1.0), seed, 0, 0) for seed in range(300)]
    token_ids = Sampler(WIDE).sample(torch.zeros(300, WIDE), rows).token_ids
    u = uniform(list(range(300)), [0] * 300, [0] * 300)
    assert token_ids == [math.floor(value * WIDE) for value in u]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(2, 400))
def test_how_often_each_token_comes(seed: int, vocab_size: int) -> None:
    """Inverse CDF over many draws: counts fit the probabilities."""
    draws = 4000
    logits = random_logits(1, vocab_size, seed)
    row = [SamplingRow(SamplingParams(temperature=1.3), seed, 0, index) for index in range(draws)]
    token_ids = Sampler(vocab_size).sample(logits.expand(draws, -1), row).token_ids
    probability = torch.softmax(logits[0].double() / 1.3, -1).numpy()
    order = np.argsort(-probability, kind="stable")
    expected = np.cumsum(probability[order])
    seen = np.cumsum(np.bincount(token_ids, minlength=vocab_size)[order]) / draws
    assert np.abs(seen - expected).max() < 2.2 / math.sqrt(draws)  # Kolmogorov-Smirnov, p < 1e-4


# --- one effect at a time ----------------------------------------------------------------------


def one(logits: list[float], params: SamplingParams, **fields: object) -> int:
    row = SamplingRow(params, seed=1, **fields)  # type: ignore[arg-type]
    return Sampler(len(logits)).sample(torch.tensor([logits]), [row]).token_ids[0]


def seen_tokens(logits: list[float], params: SamplingParams, draws: int = 400) -> set[int]:
    rows = [SamplingRow(params, seed=1, token_index=index) for index in range(draws)]
    return set(Sampler(len(logits)).sample(torch.tensor([logits] * draws), rows).token_ids)


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert one([1.0, 3.0, 3.0, 2.0], GREEDY) == 1
    assert one([1.0, 3.0, 3.0, 2.0], GREEDY.replace(logit_bias={0: 2.0})) == 0


def test_top_k_keeps_exactly_k_also_of_equal_ones() -> None:
    assert seen_tokens([1.0, 1.0, 1.0, 1.0], SamplingParams(top_k=2)) == {0, 1}
    assert seen_tokens([1.0, 1.0, 1.0, 1.0], SamplingParams(top_k=0)) == {0, 1, 2, 3}
    assert seen_tokens([0.0, 2.0, 1.0], SamplingParams(top_k=1)) == {1}


def test_top_p_keeps_the_smallest_set_with_that_mass() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert seen_tokens(logits, SamplingParams(top_p=0.39)) == {1}
    assert seen_tokens(logits, SamplingParams(top_p=0.41)) == {1, 2}
    assert seen_tokens(logits, SamplingParams(top_p=0.71)) == {1, 2, 3}
    assert seen_tokens(logits, SamplingParams(top_p=0.91)) == {0, 1, 2, 3}
    assert seen_tokens(logits, SamplingParams(top_p=1e-9)) == {1}


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    # of 0.4 and 0.3 the first is 0.571
    assert seen_tokens(logits, SamplingParams(top_k=2, top_p=0.56)) == {1}
    assert seen_tokens(logits, SamplingParams(top_k=2, top_p=0.58)) == {1, 2}


def test_min_p_is_a_share_of_the_best() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert seen_tokens(logits, SamplingParams(min_p=0.76)) == {1}
    assert seen_tokens(logits, SamplingParams(min_p=0.49)) == {1, 2, 3}
    assert seen_tokens(logits, SamplingParams(min_p=1.0)) == {1}


def test_repetition_penalty_covers_prompt_and_output_by_sign() -> None:
    params = GREEDY.replace(repetition_penalty=2.0)
    assert one([4.0, 3.0], params) == 0
    assert one([4.0, 3.0], params, prompt_token_ids=[0]) == 1
    assert one([4.0, 3.0], params, output_token_ids=[0, 0, 0]) == 1
    assert one([4.0, 3.0], params, output_token_ids=[0], prompt_token_ids=[1]) == 0
    assert one([-2.0, -3.0], params, prompt_token_ids=[0]) == 1


def test_presence_and_frequency_count_the_output_only() -> None:
    presence = GREEDY.replace(presence_penalty=1.5)
    assert one([4.0, 3.0], presence, prompt_token_ids=[0]) == 0
    assert one([4.0, 3.0], presence, output_token_ids=[0]) == 1
    frequency = GREEDY.replace(frequency_penalty=0.6)
    assert one([4.0, 3.0], frequency, output_token_ids=[0]) == 0
    assert one([4.0, 3.0], frequency, output_token_ids=[0, 0]) == 1


def test_ids_may_stand_in_arrays_and_may_lie_past_the_vocabulary() -> None:
    params = GREEDY.replace(repetition_penalty=2.0, presence_penalty=1.0)
    prompt = array("i", [0, 7])
    assert one([4.0, 3.0], params, prompt_token_ids=prompt, output_token_ids=array("i")) == 1
    assert one([4.0, 3.0], params, prompt_token_ids=np.array([0]), output_token_ids=(1,)) == 0


def test_min_tokens_forbids_stop_ids_until_then() -> None:
    params = GREEDY.replace(min_tokens=2)
    assert one([1.0, 9.0, 2.0], params, stop_ids=(1,), token_index=1) == 2
    assert one([1.0, 9.0, 2.0], params, stop_ids=(1,), token_index=2) == 1


def test_bias_of_minus_100_is_not_a_mask() -> None:
    assert one([5.0], GREEDY.replace(logit_bias={0: -100})) == 0


def test_packed_and_plain_masks_agree() -> None:
    flags = torch.rand(70, generator=torch.Generator().manual_seed(0)) < 0.3
    flags[69] = True
    packed = torch.zeros(3, dtype=torch.int32)
    for token in flags.nonzero().flatten().tolist():
        packed[token // 32] |= torch.tensor(1 << (token % 32), dtype=torch.int64).to(torch.int32)
    logits = random_logits(4, 70, 1)
    for temperature in (0.0, 5.0):
        params = SamplingParams(temperature=temperature)
        found = []
        for masks in ([flags] * 4, [packed] * 4, [flags, packed, flags, packed]):
            rows = [SamplingRow(params, 3, 0, i, allowed_mask=mask) for i, mask in enumerate(masks)]
            found.append(Sampler(70).sample(logits, rows).token_ids)
        assert found[0] == found[1] == found[2]
        assert all(flags[token] for token in found[0])


def test_a_short_packed_mask_forbids_what_it_does_not_reach() -> None:
    mask = torch.tensor([-1], dtype=torch.int32)
    assert one([0.0] * 39 + [9.0], GREEDY, allowed_mask=mask) == 0


def test_defaults_of_the_model_and_what_overrides_them() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.9]] * 200)

    def tokens_of(params: SamplingParams) -> set[int]:
        sampler = Sampler(3, Defaults(temperature=0.0, top_k=2))
        rows = [SamplingRow(params, seed=0, token_index=index) for index in range(200)]
        return set(sampler.sample(logits, rows).token_ids)

    assert tokens_of(SamplingParams()) == {1}
    assert tokens_of(SamplingParams(temperature=1.0)) == {1, 2}
    assert tokens_of(SamplingParams(temperature=1.0, top_k=-1)) == {0, 1, 2}


def test_seed_sequence_and_token_index_give_different_numbers() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(1, 1000)
    found = {
        Sampler(1000).sample(logits, [SamplingRow(params, *where)]).token_ids[0]
        for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    }
    assert len(found) == 4


def test_hot_and_cold_temperatures_stay_finite() -> None:
    logits = torch.tensor([[-3e38, 3e38, 0.0], [-INFINITY, 1e-30, 0.0]])
    for temperature in (1e-300, 1e-6, 100.0):
        params = SamplingParams(temperature=temperature)
        rows = [SamplingRow(params, seed=2), SamplingRow(params, seed=2)]
        assert Sampler(3).sample(logits, rows).token_ids[0] == 1


# --- log-probabilities -------------------------------------------------------------------------


def test_logprobs_are_of_the_unprocessed_logits() -> None:
    logits = random_logits(1, 50, 4)
    params = SamplingParams(
        temperature=0.0, logprobs=3, logit_bias={7: 100.0}, repetition_penalty=1.5
    )
    sampled = Sampler(50).sample(logits, [SamplingRow(params, 0, prompt_token_ids=[1, 2])])
    expected = torch.log_softmax(logits[0].double(), -1)
    assert sampled.token_ids == [7]
    alternatives = sampled.logprobs[0]
    assert alternatives is not None
    best = expected.topk(3).indices.tolist()
    assert list(alternatives) == (best if 7 in best else [*best, 7])
    for token, logprob in alternatives.items():
        assert logprob == pytest.approx(float(expected[token]), abs=1e-12)
    assert sampled.token_logprob == [alternatives[7]]


def test_only_rows_that_ask_get_logprobs() -> None:
    rows = [SamplingRow(GREEDY.replace(logprobs=count), 0) for count in (None, 0, 2)]
    sampled = Sampler(9).sample(random_logits(3, 9, 0), rows)
    assert sampled.logprobs[0] is None
    assert sampled.token_logprob[0] is None
    assert list(sampled.logprobs[1] or {}) == [sampled.token_ids[1]]
    assert len(sampled.logprobs[2] or {}) == 2


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(0, 100))
def test_alternatives_are_in_order_with_ties_by_id(seed: int, vocab_size: int, count: int) -> None:
    logits = random_logits(3, vocab_size, seed, ties=True)
    token_ids = [0, vocab_size // 2, vocab_size - 1]
    found = logprobs_of(logits, token_ids, count)
    for values, token, alternatives in zip(logits.tolist(), token_ids, found, strict=True):
        order = sorted(range(vocab_size), key=lambda other: (-values[other], other))[:count]
        assert list(alternatives) == (order if token in order else [*order, token])


def test_token_logprobs() -> None:
    logits = random_logits(5, 30, 8)
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(5), torch.arange(5)]
    found = token_logprobs(logits, list(range(5)))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)
    assert token_logprobs(logits[:0], []).shape == (0,)
    assert logprobs_of(logits[:0], [], 3) == []


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)])
def test_bad_logits_name_their_rows(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(4, 6)
    logits[1, 3] = logits[3, 0] = bad
    with pytest.raises(NonFiniteLogitsError, match="row 1, 3 of the step") as caught:
        Sampler(6).sample(logits, [SamplingRow(params, 0)] * 4)
    assert caught.value.rows == (1, 3)
    assert isinstance(caught.value, OnestemError)


def test_rows_of_minus_infinity_are_bad_logits() -> None:
    with pytest.raises(NonFiniteLogitsError):
        Sampler(2).sample(torch.full((1, 2), -INFINITY), [SamplingRow(GREEDY, 0)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_is_named(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=3)
    only_stop = torch.tensor([True, False])
    rows = [
        SamplingRow(GREEDY, 0),
        SamplingRow(params, 0, stop_ids=(0,), allowed_mask=only_stop),
        SamplingRow(params, 0, stop_ids=(0,)),
    ]
    with pytest.raises(MaskedRowError, match="row 1 of the step") as caught:
        Sampler(2).sample(torch.zeros(3, 2), rows)
    assert caught.value.rows == (1,)
    assert isinstance(caught.value, RequestError)


def test_ids_past_the_vocabulary_are_refused() -> None:
    sampler = Sampler(10)
    with pytest.raises(RequestError, match="logit_bias names token 10"):
        sampler.check(SamplingParams(logit_bias={10: 1.0}))
    with pytest.raises(RequestError, match="stop_token_ids names token 99"):
        sampler.check(SamplingParams(stop_token_ids=[3, 99]))
    sampler.check(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]))


def test_no_rows() -> None:
    assert Sampler(4).sample(torch.zeros(0, 4), []).token_ids == []


def test_shape_is_checked() -> None:
    with pytest.raises(ValueError, match=r"expected \[1, 5\]"):
        Sampler(5).sample(torch.zeros(1, 4), [SamplingRow(GREEDY, 0)])
