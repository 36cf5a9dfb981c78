"""Run a job and print by how many bytes the process grew: `python -m tests.batch.measured IN OUT`.

Files that are mapped are not counted: the kernel takes their pages back when it needs them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from onestem.batch import Progress
from onestem.request import CompletionOutput, Request, RequestOutput
from tests.batch.fakes import FakeEngine, run_fake


def held_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class ForgetfulEngine(FakeEngine):
    """Answers at once and keeps no request."""

    def finish(self, request: Request) -> RequestOutput:
        self.seen.clear()
        return RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(index=0, text="a", token_ids=[5], finish_reason="stop")],
            finished=True,
        )


def main() -> None:
    before = most = held_bytes()
    calls = 0

    def look(progress: Progress) -> None:
        nonlocal most, calls
        calls += 1
        if progress.stage != "run" or calls % 100 == 0:
            most = max(most, held_bytes())

    run_fake(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        ForgetfulEngine(room=8),
        planner=None,
        validate=lambda request: None,
        on_progress=look,
    )
    print(most - before)


if __name__ == "__main__":
    main()
