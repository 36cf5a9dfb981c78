"""Python processes beside this one."""

from __future__ import annotations

import sys

__all__ = ["python_module"]


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as `python -m` does, with this process's import path. With
    `-m` alone, files of the working directory would be imported instead of modules."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", code, *arguments]
