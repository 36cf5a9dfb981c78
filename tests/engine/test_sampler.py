"""The sampler against a slow one, and against itself in other batches."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.engine.sampling.pending import Sampled
from onestem.engine.sampling.rows import SamplingRow
from onestem.engine.sampling.sampler import LOWEST_TEMPERATURE, Sampler, Step
from onestem.models.config import GenerationDefaults
from onestem.ops.sampling import STATUS_MASKED, STATUS_NOT_FINITE, STATUS_OK
from onestem.request import SamplingParams
from tests.ops.reference_sampling import draw

INFINITY = float("inf")


def sample(
    logits: torch.Tensor, rows: list[SamplingRow], defaults: GenerationDefaults | None = None
) -> Sampled:
    """By a sampler of its own; the logits stay as they are."""
    sampler = Sampler(logits.shape[1], defaults)
    return sampler.sample(logits.clone(), [replace(row, place=-1, record=b"") for row in rows])


# --- the slow reference ------------------------------------------------------------------------


def reference_logits(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Penalties, bias and masks on one row, float32, one token at a time."""
    params, single = row.params, np.float32
    x = logits.astype(np.float32)
    output = [int(token) for token in row.output_token_ids()]
    penalty = single(params.repetition_penalty or 1.0)
    for token in set(output) | {int(token) for token in row.prompt_token_ids}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        count = single(output.count(token))
        x[token] -= single(params.frequency_penalty) * count + single(params.presence_penalty)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += single(bias)
    if row.token_index < params.min_tokens:
        for token in row.stop_ids:
            x[token] = -INFINITY
    if row.allowed_mask is not None:
        words = row.allowed_mask.tolist()
        for token in range(len(x)):
            if token >= 32 * len(words) or not words[token // 32] >> (token % 32) & 1:
                x[token] = -INFINITY
    return x


def not_above(share: float) -> float:
    """The largest float32 that a share reaches."""
    nearest = np.float32(share)
    return float(nearest if float(nearest) <= share else np.nextafter(nearest, np.float32(0)))


def reference_token(logits: np.ndarray, row: SamplingRow) -> int:
    params = row.params
    asked = {name: getattr(params, name) or 0 for name in ("top_k", "min_p")}
    temperature = 1.0 if params.temperature is None else params.temperature
    return draw(
        reference_logits(logits, row),
        seed=row.seed % 2**64,
        sequence=row.sequence_index,
        token=row.token_index,
        temperature=float(np.float32(temperature)),
        top_p=not_above(1.0 if params.top_p is None else params.top_p),
        top_k=asked["top_k"],
        min_p=float(np.float32(asked["min_p"])),
    )


def packed(flags: list[bool]) -> torch.Tensor:
    """A mask as the grammar makes it."""
    words = np.packbits(flags, bitorder="little")
    return torch.from_numpy(np.pad(words, (0, -len(words) % 4)).view(np.int32))


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
        output_token_ids=tokens.map(lambda ids: lambda: ids),
        stop_ids=st.frozensets(st.integers(0, 3), max_size=3),
        allowed_mask=optional(
            st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB).map(
                # one token that is never a stop id stays allowed
                lambda flags: packed([*flags[:-1], True])
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


@settings(max_examples=150)
@given(rows_strategy, st.integers(0, 2**31), st.booleans())
def test_tokens_are_those_of_the_reference(rows: list[SamplingRow], seed: int, ties: bool) -> None:
    logits = random_logits(len(rows), VOCAB, seed, ties=ties)
    sampled = sample(logits, rows)
    assert (sampled.status == STATUS_OK).all()
    expected = [
        reference_token(values, row) for values, row in zip(logits.numpy(), rows, strict=True)
    ]
    assert sampled.ids.tolist() == expected


@settings(max_examples=100)
@given(rows_strategy, st.integers(0, 2**31), st.booleans(), st.randoms())
def test_alone_is_as_in_any_batch_and_order(
    rows: list[SamplingRow], seed: int, ties: bool, random
) -> None:
    logits = random_logits(len(rows), VOCAB, seed, ties=ties)
    whole = sample(logits, rows)
    order = random.sample(range(len(rows)), len(rows))
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert shuffled.ids.tolist() == whole.ids[order].tolist()
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert alone.ids[0] == whole.ids[i]
        assert alone.entries.get(0) == whole.entries.get(i)


@settings(max_examples=40)
@given(rows_strategy, st.integers(0, 2**31), st.integers(1, 4))
def test_steps_without_the_host_between_are_steps_one_by_one(
    rows: list[SamplingRow], seed: int, steps: int
) -> None:
    """What decodes do: penalties, bias and early stop ids follow what is sampled."""
    rows = [replace(row, allowed_mask=None) for row in rows]
    outputs = [list(row.output_token_ids()) for row in rows]
    logits = [random_logits(len(rows), VOCAB, seed + step) for step in range(steps)]
    sampler = Sampler(VOCAB)
    copies = [replace(row) for row in rows]
    many = Step(sampler.records(copies), copies.__getitem__, sampler)
    pending = [sampler.launch(step.clone(), many) for step in logits]
    for step, ahead in zip(logits, pending, strict=True):
        now = [
            replace(row, token_index=row.token_index, output_token_ids=lambda ids=ids: ids)
            for row, ids in zip(rows, outputs, strict=True)
        ]
        expected, found = sample(step, now), ahead.take()
        assert found.ids.tolist() == expected.ids.tolist()
        for i, (row, output) in enumerate(zip(rows, outputs, strict=True)):
            assert found.entries.get(i) == expected.entries.get(i)
            output.append(int(expected.ids[i]))
            row.token_index += 1


def test_a_state_of_penalties_is_made_again_after_a_lost_step() -> None:
    """A step that came to nothing has counted its tokens; the next one must not."""
    sampler = Sampler(6)
    output = [1, 1]
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    row = SamplingRow(params, 0, token_index=2, output_token_ids=lambda: output)
    logits = torch.tensor([[0.0, 2.5, 0.0, 1.0, 0.0, 0.0]])
    first = sampler.sample(logits.clone(), [row]).ids.tolist()
    assert first == sampler.sample(logits.clone(), [row]).ids.tolist() == [3]
    output.append(3)
    row.token_index = 3
    assert sampler.sample(logits.clone(), [row]).ids.tolist() == [1]
    sampler.release(row)
    newcomer = SamplingRow(params, 0)
    assert sampler.sample(logits.clone(), [newcomer]).ids.tolist() == [1]
    assert newcomer.place == 0


# --- one effect at a time ----------------------------------------------------------------------


def one(logits: list[float], params: SamplingParams, output=(), **fields: object) -> int:
    fields["output_token_ids"] = lambda: output
    row = SamplingRow(params, seed=1, **fields)  # type: ignore[arg-type]
    return int(sample(torch.tensor([logits]), [row]).ids[0])


def seen_tokens(logits: list[float], params: SamplingParams, draws: int = 400) -> set[int]:
    rows = [SamplingRow(params, seed=1, token_index=index) for index in range(draws)]
    return set(sample(torch.tensor([logits] * draws), rows).ids.tolist())


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


@pytest.mark.parametrize("top_p", [5e-324, 1e-50, 1e-40])
def test_the_smallest_top_p_keeps_the_first(top_p: float) -> None:
    assert seen_tokens([1.0, 1.0, 0.5], SamplingParams(top_p=top_p), draws=40) == {0}


def test_equal_logits_at_the_limit_of_top_p_stay_outside() -> None:
    """0.1 is a little more than a tenth in float32."""
    assert seen_tokens([0.0] * 20, SamplingParams(top_p=0.1)) == {0, 1}
    assert seen_tokens([0.0] * 20, SamplingParams(top_p=0.7)) == set(range(14))
    assert seen_tokens([0.0] * 3, SamplingParams(top_p=1 / 3)) == {0}


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
    assert one([4.0, 3.0], params, output=[0, 0, 0]) == 1
    assert one([4.0, 3.0], params, output=[0], prompt_token_ids=[1]) == 0
    assert one([-2.0, -3.0], params, prompt_token_ids=[0]) == 1


def test_presence_and_frequency_count_the_output_only() -> None:
    presence = GREEDY.replace(presence_penalty=1.5)
    assert one([4.0, 3.0], presence, prompt_token_ids=[0]) == 0
    assert one([4.0, 3.0], presence, output=[0]) == 1
    frequency = GREEDY.replace(frequency_penalty=0.6)
    assert one([4.0, 3.0], frequency, output=[0]) == 0
    assert one([4.0, 3.0], frequency, output=[0, 0]) == 1


def test_ids_may_stand_in_arrays_and_may_lie_past_the_vocabulary() -> None:
    params = GREEDY.replace(repetition_penalty=2.0, presence_penalty=1.0)
    prompt = array("i", [0, 7])
    assert one([4.0, 3.0], params, prompt_token_ids=prompt, output=array("i")) == 1
    assert one([4.0, 3.0], params, prompt_token_ids=np.array([0]), output=(1,)) == 0


def test_min_tokens_forbids_stop_ids_until_then() -> None:
    params = GREEDY.replace(min_tokens=2)
    assert one([1.0, 9.0, 2.0], params, stop_ids=(1,), token_index=1) == 2
    assert one([1.0, 9.0, 2.0], params, stop_ids=(1,), token_index=2) == 1


def test_bias_of_minus_100_is_not_a_mask() -> None:
    assert one([5.0], GREEDY.replace(logit_bias={0: -100})) == 0


def test_masks_of_some_rows() -> None:
    flags = torch.rand(70, generator=torch.Generator().manual_seed(0)) < 0.3
    flags[69] = True
    logits = random_logits(4, 70, 1)
    for temperature in (0.0, 5.0):
        params = SamplingParams(temperature=temperature)
        masks = [None, packed(flags.tolist()), None, packed(flags.tolist())]
        rows = [SamplingRow(params, 3, 0, i, allowed_mask=mask) for i, mask in enumerate(masks)]
        expected = [reference_token(logits[i].numpy(), row) for i, row in enumerate(rows)]
        assert sample(logits, rows).ids.tolist() == expected
        assert flags[expected[1]]
        assert flags[expected[3]]


def test_a_short_mask_forbids_what_it_does_not_reach() -> None:
    mask = torch.tensor([-1], dtype=torch.int32)
    assert one([0.0] * 39 + [9.0], GREEDY, allowed_mask=mask) == 0


def test_defaults_of_the_model_and_what_overrides_them() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.9]] * 200)

    def tokens_of(params: SamplingParams) -> set[int]:
        rows = [SamplingRow(params, seed=0, token_index=index) for index in range(200)]
        return set(sample(logits, rows, GenerationDefaults(temperature=0.0, top_k=2)).ids.tolist())

    assert tokens_of(SamplingParams()) == {1}
    assert tokens_of(SamplingParams(temperature=1.0)) == {1, 2}
    assert tokens_of(SamplingParams(temperature=1.0, top_k=-1)) == {0, 1, 2}


def test_seed_sequence_and_token_index_give_different_numbers() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(1, 1000)
    found = {
        int(sample(logits, [SamplingRow(params, *where)]).ids[0])
        for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    }
    assert len(found) == 4


def test_hot_and_cold_temperatures_stay_finite() -> None:
    logits = torch.tensor([[-3e38, 3e38, 0.0], [-INFINITY, 1e-30, 0.0]])
    for temperature in (1e-300, LOWEST_TEMPERATURE, 1.0, 100.0):
        params = SamplingParams(temperature=temperature)
        rows = [SamplingRow(params, seed=2), SamplingRow(params, seed=2)]
        sampled = sample(logits, rows)
        assert sampled.ids[0] == 1
        assert sampled.ids[1] in (1, 2)
        assert (sampled.status == STATUS_OK).all()


# --- log-probabilities -------------------------------------------------------------------------


def check_entry(entry: dict[int, float] | None, logits: torch.Tensor, token: int, k: int) -> None:
    expected = torch.log_softmax(logits.double(), -1)
    order = sorted(range(len(logits)), key=lambda other: (-logits[other].item(), other))[:k]
    assert entry is not None
    assert list(entry) == (order if token in order else [*order, token])
    for other, logprob in entry.items():
        # A float32 sum of exponentials, and its log.
        assert logprob == pytest.approx(float(expected[other]), rel=1e-6, abs=2e-6)


def test_logprobs_and_ranks_are_of_the_unprocessed_logits() -> None:
    logits = random_logits(1, 50, 4)
    params = SamplingParams(
        temperature=0.0, logprobs=3, logit_bias={7: 100.0}, repetition_penalty=1.5
    )
    sampler = Sampler(50)
    sampler.tells_ranks = True
    sampled = sampler.sample(logits.clone(), [SamplingRow(params, 0, prompt_token_ids=[1, 2])])
    assert sampled.ids.tolist() == [7]
    check_entry(sampled.entries.get(0), logits[0], 7, 3)
    assert sampled.entries[0].rank == 1 + int((logits[0] > logits[0, 7]).sum()) > 3


def test_only_rows_that_ask_get_logprobs() -> None:
    rows = [SamplingRow(GREEDY.replace(logprobs=count), 0) for count in (None, 0, 2)]
    sampled = sample(random_logits(3, 9, 0), rows)
    assert 0 not in sampled.entries
    assert list(sampled.entries[1]) == [int(sampled.ids[1])]
    assert len(sampled.entries[2]) == 2


@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(0, 100))
def test_alternatives_are_in_order_with_ties_by_id(seed: int, vocab_size: int, count: int) -> None:
    logits = random_logits(3, vocab_size, seed, ties=True)
    token_ids = [0, vocab_size // 2, vocab_size - 1]
    sampler = Sampler(vocab_size)

    def entries() -> list:
        blocks = [logits[[2]], logits[[0, 1]]]
        scored = sampler.logprobs(blocks, np.arange(3), np.array(token_ids), count)
        return scored.take().entries(token_ids, [count, 0, count])

    plain = entries()
    sampler.tells_ranks = True
    found = entries()
    assert plain == found
    assert [type(entry) for entry in plain] == [dict] * 3
    for row, token, entry, k in zip([2, 0, 1], token_ids, found, [count, 0, count], strict=True):
        check_entry(entry, logits[row], token, k)
        values = logits[row].tolist()
        order = sorted(range(vocab_size), key=lambda other: (-values[other], other))
        assert entry.rank == order.index(token) + 1


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)])
def test_bad_logits_cost_their_own_rows(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(4, 6)
    good = sample(logits, [SamplingRow(params, 0)] * 4).ids
    logits[1, 3] = logits[3, 0] = bad
    sampled = sample(logits, [SamplingRow(params, 0)] * 4)
    assert sampled.status.tolist() == [STATUS_OK, STATUS_NOT_FINITE] * 2
    assert sampled.ids[::2].tolist() == good[::2].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_says_so(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=3)
    only_stop = packed([True, False])
    rows = [
        SamplingRow(GREEDY, 0),
        SamplingRow(params, 0, stop_ids=(0,), allowed_mask=only_stop),
        SamplingRow(params, 0, stop_ids=(0,)),
    ]
    sampled = sample(torch.zeros(3, 2), rows)
    assert sampled.status.tolist() == [STATUS_OK, STATUS_MASKED, STATUS_OK]
    assert sampled.ids[2] == 1


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 4), []).ids.tolist() == []


def test_shape_is_checked() -> None:
    with pytest.raises(ValueError, match=r"expected \[1, 5\]"):
        Sampler(5).sample(torch.zeros(1, 4), [SamplingRow(GREEDY, 0)])


def test_a_sampler_that_is_warm_holds_nothing() -> None:
    sampler = Sampler(100)
    sampler.warm_up()
    params = SamplingParams(repetition_penalty=1.5, temperature=0)
    rows = [SamplingRow(params, seed=0) for _ in range(8)]
    assert set(sampler.sample(torch.ones(8, 100), rows).ids.tolist()) == {0}
    assert sorted(row.place for row in rows) == list(range(8))
