"""Whose work is beside an output: this job's, which goes on, or another's, which is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from onestem.batch.journal import ResultCounts, result_line
from onestem.batch.workplace import JobIdentity, Workplace
from onestem.errors import JobError


class Claim:
    """A job's claim to an output, under its lock.

    Args:
        identity: of the job, as it is asked for.
        max_model_len: as settled; a job that began with it as an option has it in its name.
        warn: called with what was found damaged and is mended, in one line.

    Attributes:
        identity: of the job; that with which it began, where it goes on.
    """

    def __init__(
        self,
        place: Workplace,
        identity: JobIdentity,
        max_model_len: int | None,
        warn: Callable[[str], object],
    ) -> None:
        self._place, self._warn = place, warn
        self._settled = {**identity.options, "max_model_len": max_model_len}
        self.identity = identity
        self._manifest = place.read_manifest()
        self._differences: list[str] = []
        if self._manifest is not None:
            self._differences = identity.differences(self._manifest)
            if not self._differences:
                self.identity = identity.as_begun(self._manifest)

    def complete(self, num_lines: int, force: bool) -> ResultCounts | None:
        """Results of this job's complete output; None: there is no output, or it may be replaced.

        Raises:
            JobError: the output is another job's.
        """
        output = self._place.output
        if not output.exists() or output.stat().st_size == 0:
            return None
        is_known = False
        settled = replace(self.identity, options=self._settled)
        for identity in (self.identity, settled):
            counts, is_whole = _results(output, identity.job)
            if is_whole and counts.done == num_lines:
                if self._manifest is not None and not self._differences:
                    self._place.discard()  # killed between the rename and this
                return counts
            is_known |= counts.done > 0
        if force:
            return None
        whose = "is not as this job left it" if is_known else "exists and is not of this job"
        raise JobError(
            f"{output} {whose}: choose another output, move it away, or replace it with --force"
        )

    def take(self, force: bool) -> None:
        """Make sure that work beside the output is of this job, or there is none.

        Raises:
            JobError: it is another's, and is not thrown away.
        """
        if self._differences:
            if not force:
                raise JobError(
                    f"unfinished work of another job is beside {self._place.output} "
                    f"({'; '.join(self._differences)}): finish that job with its own command, "
                    "choose another output, or throw its work away with --force"
                )
            self._place.discard()
        elif self._manifest is None:
            self._take_answers(force)

    def _take_answers(self, force: bool) -> None:
        """Without a manifest: answers name their job themselves."""
        partial, manifest = self._place.partial, self._place.manifest
        is_damaged = manifest.exists()
        if not partial.exists() or partial.stat().st_size == 0:
            return
        if _has_results(partial, self.identity.job):
            what = "is damaged" if is_damaged else "is missing"
            self._warn(f"{manifest} {what}: it is made anew, answers are kept")
        elif force:
            self._place.discard()
        elif is_damaged:
            raise JobError(
                f"{manifest} is damaged, and no line of {partial} is of this job: give the command "
                "and the model that it began with, choose another output, or throw it away with "
                "--force"
            )
        else:
            raise JobError(
                f"{partial} exists and nothing says which job it is of: move it away, "
                "choose another output, or throw it away with --force"
            )


def _results(file: Path, job: str) -> tuple[ResultCounts, bool]:
    """A job's results at the beginning of a file, and whether there is nothing else in it."""
    counts = ResultCounts()
    with open(file, "rb") as lines:
        for raw in lines:
            result = result_line(raw, job)
            if result is None:
                return counts, False
            counts.add(result.failed)
    return counts, True


def _has_results(file: Path, job: str) -> bool:
    with open(file, "rb") as lines:
        return any(result_line(raw, job) is not None for raw in lines)
