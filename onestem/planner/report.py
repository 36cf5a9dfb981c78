"""What a plan saves."""

from __future__ import annotations

from dataclasses import dataclass, field


def saving_ratio(processed_tokens: int, logical_tokens: int) -> float:
    """Eq. 1: the fraction of prompt tokens that need not be computed; 0.0 for an empty job."""
    return 1.0 - processed_tokens / logical_tokens if logical_tokens else 0.0


@dataclass(frozen=True)
class PlanReport:
    """Counts of a job's plan. Two reports are equal if all but the time agrees.

    A prompt's last token counts as processed once for each request, since each needs its own
    logits. So of n equal prompts of L tokens, L - 1 + n tokens are processed. This does not depend
    on the order, and the engine never computes more as long as nothing is evicted too early.

    Attributes:
        requests: prompts in the job.
        groups: groups in the plan, lone requests included.
        shared_groups: groups with a common prefix.
        logical_prompt_tokens: tokens of all prompts.
        processed_tokens_one_level: computed when each request shares at most one prefix (as
            Algorithm 1 of BatchLLM chooses them).
        processed_tokens_all_levels: computed when every common prefix is computed once.
        processed_tokens: computed by this plan, which shares only its groups' prefixes; with
            `levels="all"` also the prefixes inside a group.
        saving_one_level: eq. 1, 0..1.
        saving_all_levels: eq. 1, 0..1.
        saving: eq. 1 of this plan, 0..1.
        levels: deepest nesting of shared prefixes in the job; 0 where nothing is shared.
        planning_seconds: wall-clock time to plan.
        largest_groups: (members, prefix tokens) of the ten shared groups with most members.
    """

    requests: int
    groups: int
    shared_groups: int
    logical_prompt_tokens: int
    processed_tokens_one_level: int
    processed_tokens_all_levels: int
    processed_tokens: int
    saving_one_level: float
    saving_all_levels: float
    saving: float
    levels: int
    planning_seconds: float = field(compare=False)
    largest_groups: list[tuple[int, int]]
