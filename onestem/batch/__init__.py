"""Offline jobs: OpenAI's batch format in and out, resumable, in bounded memory. No torch."""

from onestem.batch.first_pass import Rules, output_lengths
from onestem.batch.identity import model_files, model_identity
from onestem.batch.inputs import JobInput
from onestem.batch.interface import (
    DIED_TWICE,
    EngineDiedError,
    JobInterrupted,
    JobSummary,
    Progress,
    SpooledPrompts,
)
from onestem.batch.job import run_job
from onestem.batch.lengths import ASSUMED_TOKENS, OpenEnded, expected_outputs
