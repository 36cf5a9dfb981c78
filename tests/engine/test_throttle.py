"""How many rows jobs get beside interactive requests, and how many a prompt gets in a step."""

from __future__ import annotations

from onestem.engine.schedule.throttle import (
    CYCLE,
    FEWEST_ROWS,
    FIRST_ROWS,
    SAMPLES,
    SLOWDOWN,
    JobShare,
    StepLimits,
)


def run(
    share: JobShare, seconds, interactive: int = 8, steps: int = 400
) -> list[tuple[int, float]]:
    """Jobs' rows and slowdown of each step, where a step of so many rows takes `seconds(rows)`."""
    seen = []
    for _ in range(steps):
        jobs = share.rows(interactive)
        took = seconds(interactive + jobs)
        share.note(interactive, jobs, took)
        seen.append((jobs, took / seconds(interactive)))
    return seen


def test_jobs_take_what_slows_down_little():
    linear = run(JobShare(most=1000), lambda rows: 1 + rows / 100)
    late = linear[200:]
    assert max(slowdown for _, slowdown in late) < 1.25
    assert max(jobs for jobs, _ in late) >= 12  # 1.08 s alone; 16 rows more are 15%


def test_jobs_take_all_where_rows_cost_nothing():
    free = run(JobShare(most=256), lambda rows: 1.0)
    assert max(jobs for jobs, _ in free) == 256


def test_jobs_are_hardly_ever_tried_where_each_row_is_dear():
    dear = run(JobShare(most=256), lambda rows: float(rows), interactive=4, steps=20 * CYCLE)
    slow = [slowdown for _, slowdown in dear if slowdown > 1.25 - 1e-9]
    assert 0 < len(slow) <= 0.01 * len(dear)


def test_prompts_alone_never_stop_a_job():
    share = JobShare(most=64)
    assert share.rows(0) == share.limit == 1
    run(share, lambda rows: 1.0)
    assert share.rows(0) == share.limit == 64
    run(share, lambda rows: float(rows), interactive=4, steps=100)
    assert (share.limit, share.rows(0)) == (0, 1)


def test_the_reference_is_measured_again_and_again():
    share = JobShare(most=64)
    without = [jobs == 0 for jobs, _ in run(share, lambda rows: 1.0, steps=10 * CYCLE)]
    assert sum(without) == 10 * SAMPLES
    # A device that has become slower is not taken for jobs' doing for ever.
    run(share, lambda rows: 2.0, steps=10 * CYCLE)
    assert share.limit == 64
    assert SLOWDOWN < 2


def test_a_size_that_was_never_seen_runs_alone_first():
    share = JobShare(most=64)
    run(share, lambda rows: 1.0, interactive=8, steps=CYCLE + SAMPLES)
    assert share.rows(8) > 0
    assert share.rows(100) == 0
    share.note(100, 0, 1.0)
    assert share.rows(100) == share.rows(8)


def test_a_step_takes_about_the_time_it_may():
    limits = StepLimits(step_tokens=1000, step_seconds=0.1)
    assert limits.rows() == FIRST_ROWS  # nothing is known yet
    for _ in range(20):
        limits.note(limits.rows(), 0.001 * limits.rows())
    assert limits.rows() == limits.rows(800) == 100
    assert limits.rows(980) == 100  # half of a step at least is for prompts
    for _ in range(40):
        limits.note(limits.rows(), 1.0 * limits.rows())
    assert limits.rows() == FEWEST_ROWS


def test_decodes_and_prompts_fill_a_step_together():
    limits = StepLimits(step_tokens=1000)
    assert [limits.rows(n) for n in (0, 300, 500, 900, 5000)] == [1000, 700, 500, 500, 500]
    assert [StepLimits(step_tokens=1).rows(n) for n in (0, 1, 7)] == [1, 1, 1]
