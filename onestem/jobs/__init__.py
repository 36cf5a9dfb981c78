"""Offline jobs on a model: what `onestem batch` and `onestem plan` run."""

from onestem.jobs.plan import plan_file
from onestem.jobs.run import check_trace, run_file, schema_options

__all__ = ["check_trace", "plan_file", "run_file", "schema_options"]
