"""Offline planner: groups, order and report of a job whose prompts are all known. No torch."""

from onestem.planner.deal import Deal
from onestem.planner.plan import Group, JobPlan, default_order, plan_job, planner_of
from onestem.planner.running import Planned, RunningOrder, planned
from onestem.planner.sort import Prompts

__all__ = [
    "Deal",
    "Group",
    "JobPlan",
    "Planned",
    "Prompts",
    "RunningOrder",
    "default_order",
    "plan_job",
    "planned",
    "planner_of",
]
