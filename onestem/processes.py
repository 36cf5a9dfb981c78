"""Python processes beside this one."""

from __future__ import annotations

import sys
from pathlib import Path


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as `python -m` does, with this process's import path: files
    of the working directory are not imported instead of modules."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", code, *arguments]


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped by a signal, as SIGSTOP does; never by a
    debugger. False where there is no `/proc`."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "T"
