"""Python processes beside this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ends_with_us", "is_stopped", "python_module"]


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as `python -m` does, with this process's import path. With
    `-m` alone, files of the working directory would be imported instead of modules."""
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


def ends_with_us(command: Sequence[str]) -> list[str]:
    """The command that runs another one in its own process, to which Linux sends SIGTERM when the
    thread that starts it ends: also where this process is killed and cleans nothing up."""
    code = (
        "import ctypes, os, signal, sys; PR_SET_PDEATHSIG = 1; "
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM); "
        f"os.getppid() == {os.getpid()} or sys.exit('the process that started this has ended'); "
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, *command]
