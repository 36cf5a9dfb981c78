"""Offline jobs: OpenAI's batch format in and out, resumable, in bounded memory. No torch."""

from onestem.batch.identity import model_identity
from onestem.batch.inputs import JobInput
from onestem.batch.interface import (
    DIED_TWICE,
    EngineDiedError,
    JobInterrupted,
    JobSummary,
    Planner,
    Progress,
    SpooledPrompts,
)
from onestem.batch.job import run_job
from onestem.batch.planned import PlannedLines
from onestem.batch.spool import Tokenizer, output_lengths

__all__ = [
    "DIED_TWICE",
    "EngineDiedError",
    "JobInput",
    "JobInterrupted",
    "JobSummary",
    "PlannedLines",
    "Planner",
    "Progress",
    "SpooledPrompts",
    "Tokenizer",
    "model_identity",
    "output_lengths",
    "run_job",
]
