"""What a user of `plan_job` can rely on: inputs, edge cases, cuts, order, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest

import onestem.planner
from onestem.errors import ConfigError, JobError
from onestem.planner import JobPlan, plan_job

Levels = Literal["one", "all"]
both_levels = pytest.mark.parametrize("levels", get_args(Levels))


def document(number: int, tokens: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + tokens))


def shared(plan: JobPlan) -> list[tuple[list[int], int]]:
    return [(g.members.tolist(), g.prefix_tokens) for g in plan.groups if g.prefix_tokens]


@both_levels
def test_no_prompts(levels: Levels) -> None:
    plan = plan_job([], levels=levels)
    assert plan.order.tolist() == plan.group_of.tolist() == list(plan.groups) == []
    assert plan.report.saving_one_level == plan.report.saving_all_levels == 0.0
    assert plan.report.levels == 0


@both_levels
@pytest.mark.parametrize("prompt", [[], [5], [5, 6, 7]])
def test_one_prompt(levels: Levels, prompt: list[int]) -> None:
    plan = plan_job([prompt], levels=levels)
    assert plan.order.tolist() == plan.group_of.tolist() == [0]
    assert [(g.members.tolist(), g.prefix_tokens) for g in plan.groups] == [([0], 0)]
    assert plan.report.processed_tokens_all_levels == len(prompt)
    assert plan.report.saving_all_levels == 0.0


@both_levels
def test_equal_prompts_share_all_but_the_last_token(levels: Levels) -> None:
    plan = plan_job([document(1, 50)] * 4, levels=levels)
    assert shared(plan) == [([0, 1, 2, 3], 49)]
    assert plan.report.processed_tokens_one_level == 49 + 4
    assert plan.report.processed_tokens_all_levels == 49 + 4


@both_levels
def test_a_prompt_that_begins_another(levels: Levels) -> None:
    plan = plan_job([document(1, 60), document(1, 50)], levels=levels)
    assert shared(plan) == [([1, 0], 49)]
    assert plan.report.processed_tokens_all_levels == 49 + 1 + 11


@both_levels
def test_single_tokens_and_empty_prompts_share_nothing(levels: Levels) -> None:
    plan = plan_job([[1], [], [1], []], levels=levels)
    assert shared(plan) == []
    assert plan.report.processed_tokens_all_levels == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_kinds_of_input_agree(dtype: type) -> None:
    lists = [[*document(i % 3, 20), 90 + i, i] for i in range(12)]
    expected = plan_job(lists)
    kinds: list[Any] = [
        np.array(lists, dtype),
        [np.array(p, dtype) for p in lists],
        list(map(tuple, lists)),
    ]
    for prompts in kinds:
        plan = plan_job(prompts)
        assert plan.order.tolist() == expected.order.tolist()
        assert plan.report == expected.report


def test_memory_mapped_prompts(tmp_path: Path) -> None:
    lists = [[*document(i % 3, 20), 90 + i, i] for i in range(12)]
    np.save(tmp_path / "prompts.npy", np.array(lists, np.int32))
    mapped = np.load(tmp_path / "prompts.npy", mmap_mode="r")
    assert plan_job(mapped).report == plan_job(lists).report


def test_a_header_over_the_whole_job_is_not_one_group() -> None:
    """Also where the header is longer than a document saves: nesting costs it nothing."""
    for header in (1, 30, 300):
        prompts = [document(0, header) + document(1 + i // 2, 200) + [i] for i in range(20)]
        plan = plan_job(prompts)
        assert [len(members) for members, _ in shared(plan)] == [2] * 10
        assert {tokens for _, tokens in shared(plan)} == {header + 200}
        assert plan.report.levels == 2


def test_a_header_is_a_group_if_nothing_else_is_shared() -> None:
    prompts = [document(0, 300) + document(1 + i, 50) for i in range(20)]
    assert shared(plan_job(prompts)) == [(list(range(20)), 300)]


def test_bos_alone_makes_no_group() -> None:
    prompts = [[0, *document(1 + i, 200)] for i in range(20)]
    plan = plan_job(prompts)
    assert shared(plan) == []
    assert len(plan.groups) == 20
    assert plan.report.processed_tokens_all_levels == 1 + 20 * 200


def test_a_document_keeps_questions_that_share_a_few_words() -> None:
    prompts = [document(1, 500) + [7, 8, 9][: i % 4] + document(2 + i, 20) for i in range(12)]
    assert [tokens for _, tokens in shared(plan_job(prompts))] == [500]


def test_requests_beside_documents_share_the_header() -> None:
    header = document(0, 100)
    of_documents = [header + document(1 + i // 4, 200) + [i] for i in range(8)]
    others = [header + document(10 + i, 50) for i in range(3)]
    plan = plan_job(of_documents + others)
    assert sorted(shared(plan)) == [([0, 1, 2, 3], 300), ([4, 5, 6, 7], 300), ([8, 9, 10], 100)]


def test_budget_splits_a_group_by_its_inner_prefixes() -> None:
    """Two parts of one document: 300 + 2 * (50 + 4) tokens at once, or 354 for each part."""
    prompts = [document(1, 300) + document(2 + i // 4, 50) + [i] for i in range(8)]
    assert [tokens for _, tokens in shared(plan_job(prompts))] == [300]
    assert [tokens for _, tokens in shared(plan_job(prompts, kv_budget_tokens=408))] == [300]
    split = plan_job(prompts, kv_budget_tokens=407)
    assert shared(split) == [([0, 1, 2, 3], 350), ([4, 5, 6, 7], 350)]
    with_outputs = plan_job(prompts, kv_budget_tokens=408, output_lengths=1)
    assert [tokens for _, tokens in shared(with_outputs)] == [350, 350]


def test_budget_cannot_split_what_shares_nothing_more() -> None:
    prompts = [document(1, 300) + document(2 + i, 50) for i in range(8)]
    assert shared(plan_job(prompts, kv_budget_tokens=310)) == [(list(range(8)), 300)]


def test_short_prefixes_can_be_ignored() -> None:
    prompts = [[*document(1, 15), i, i] for i in range(4)]
    assert plan_job(prompts, min_prefix_tokens=15).report.saving_all_levels > 0
    plan = plan_job(prompts, min_prefix_tokens=16)
    assert shared(plan) == []
    assert plan.report.saving_one_level == plan.report.saving_all_levels == 0.0
    assert plan.report.levels == 0


@both_levels
def test_groups_run_by_decode_to_prefill_ratio(levels: Levels) -> None:
    """Eq. 3: short prompts first as long as all outputs are alike."""
    lengths = [400, 100, 200]
    prompts = [[*document(g, lengths[g]), 3000 + i, i] for i in range(3) for g in range(3)]
    plan = plan_job(prompts, levels=levels)
    assert shared(plan) == [([1, 4, 7], 100), ([2, 5, 8], 200), ([0, 3, 6], 400)]


@both_levels
def test_long_outputs_run_first(levels: Levels) -> None:
    prompts = [document(i // 2, 100) + document(10 + i, 10) for i in range(6)]
    outputs = [1, 9, 50, 2, 7, 7]
    plan = plan_job(prompts, levels=levels, output_lengths=outputs)
    assert plan.order.tolist() == [2, 3, 4, 5, 1, 0]
    same = plan_job(prompts, levels=levels, output_lengths=np.array(outputs, np.int32))
    assert same.order.tolist() == plan.order.tolist()


@both_levels
def test_equal_ratios_keep_the_input_order(levels: Levels) -> None:
    prompts = [[*document(g, 100), 3000 + i, i] for i in range(3) for g in (2, 0, 1)]
    plan = plan_job(prompts, levels=levels)
    assert [members for members, _ in shared(plan)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert plan_job(prompts, levels=levels, output_lengths=64).order.tolist() == plan.order.tolist()


def test_many_nested_levels() -> None:
    """A conversation that grows turn by turn: each prompt begins the next."""
    prompts = [[*document(0, 3 * turn), 9] for turn in range(1, 400)]
    for levels in get_args(Levels):
        plan = plan_job(prompts, levels=levels)
        assert plan.report.levels == 398
        assert plan.report.processed_tokens_all_levels == 3 * 399 + 399
        assert sorted(plan.order.tolist()) == list(range(399))


def test_report_is_json_able() -> None:
    report = plan_job([document(1, 50)] * 4).report
    values = json.loads(json.dumps(asdict(report)))
    assert values["largest_groups"] == [[4, 49]]
    assert values["requests"] == 4
    assert values["planning_seconds"] > 0


def test_the_largest_groups_come_first() -> None:
    sizes = {1: 3, 2: 5, 3: 3, **dict.fromkeys(range(4, 12), 2)}
    prompts = [[*document(g, 20 + g), 20000 + i] for g, size in sizes.items() for i in range(size)]
    plan = plan_job([*prompts, [5, 6]])
    largest = [(len(group.members), group.prefix_tokens) for group in plan.largest_groups]
    assert largest == [(5, 22), (3, 23), (3, 21), *((2, tokens) for tokens in range(31, 24, -1))]
    assert largest == plan.report.largest_groups
    for group in plan.largest_groups:
        assert any(np.array_equal(group.members, one.members) for one in plan.groups)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"levels": "two"}, ConfigError, "levels is 'two'"),
        ({"order": "odd"}, ConfigError, "order is 'odd'"),
        ({"kv_budget_tokens": 0}, ConfigError, "kv_budget_tokens is 0"),
        ({"min_prefix_tokens": 0}, ConfigError, "min_prefix_tokens is 0"),
        ({"output_lengths": [1, 2]}, JobError, "one for each of 1 prompts"),
        ({"output_lengths": [-1]}, JobError, "output_lengths contains -1"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plan_job([[1, 2]], **options)


def test_exports_exist_and_need_no_torch() -> None:
    assert all(hasattr(onestem.planner, name) for name in onestem.planner.__all__)
    root = Path(onestem.planner.__file__).parents[2]
    code = "import sys, onestem.planner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
