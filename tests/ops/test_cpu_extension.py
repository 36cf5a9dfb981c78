"""Whether the C++ extension is there, and which instruction set it uses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from onestem.errors import UnsupportedError
from onestem.ops import available, resolve, resolve_layers
from onestem.ops.cpu import CpuAttention, chosen_isa, is_built, isas, native, status

needs_extension = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")


# Importing PyTorch takes seconds: one process does it, and each piece of code runs in a fork.
FORKS = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(asked["files"], start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(asked["variables"])
        code = 0
        try:
            exec(asked["code"], {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    """Runs code in a process of its own that has imported PyTorch and nothing of this package."""
    files = [tmp_path_factory.mktemp("forks") / name for name in ("stdout", "stderr")]
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None

        def ask(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
            asked = {"code": code, "variables": variables, "files": list(map(str, files))}
            print(json.dumps(asked), file=forks.stdin, flush=True)
            ended = int(forks.stdout.readline())
            return subprocess.CompletedProcess(code, ended, *(file.read_text() for file in files))

        yield ask
        forks.stdin.close()


def test_an_installation_with_a_compiler_has_it():
    try:
        distribution("onestem")
    except PackageNotFoundError:
        pytest.skip("onestem is not installed here, only imported from its sources")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler here")
    assert is_built(), status()


def test_without_it_torch_computes(run: Run):
    """The module is hidden, as where it could not be built."""
    done = run(
        "import sys\n"
        "sys.modules['onestem.ops.cpu._native'] = None\n"
        "import onestem\n"
        "from onestem.ops import available, resolve, resolve_layers\n"
        "from onestem.ops.cpu import is_built, status\n"
        "from onestem.errors import UnsupportedError\n"
        "assert not is_built() and 'cpu' not in available()\n"
        "assert resolve('auto', 'cpu').name == resolve_layers('cpu').name == 'torch'\n"
        "try:\n"
        "    resolve('cpu')\n"
        "except UnsupportedError as error:\n"
        "    print(status(), '|', error)\n"
    )
    assert done.returncode == 0, done.stderr
    said, error = done.stdout.strip().split(" | ")
    assert said == "not built: install with a C++ compiler for faster attention"
    assert "use impl='torch'" in error
    assert "\n" not in error


@needs_extension
def test_auto_is_cpu():
    assert "cpu" in available()
    assert isinstance(resolve("auto", "cpu"), CpuAttention)
    assert resolve("cpu").name == resolve_layers("cpu").name == "cpu"


@needs_extension
def test_isas_of_this_machine():
    assert chosen_isa() in isas()
    assert isas()[-1] == "portable"
    assert set(isas()) <= set(native().compiled_isas())
    assert chosen_isa() in status()


@needs_extension
@pytest.mark.parametrize("isa", isas() if is_built() else ())
def test_an_isa_can_be_forced(run: Run, isa):
    done = run("from onestem.ops.cpu import status; print(status())", ONESTEM_CPU_ISA=isa)
    assert done.stdout.startswith(f"built, {isa} (of "), done.stderr


@needs_extension
def test_an_isa_that_is_not_here_is_refused(run: Run):
    done = run(
        "from onestem.ops import resolve\n"
        "from onestem.ops.cpu import native\n"
        "native().has_isa = lambda name: name == 'portable'\n"
        "resolve('auto', 'cpu').prepare(None)\n",
        ONESTEM_CPU_ISA="avx2",
    )
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].endswith("use one of: portable")
    with pytest.raises(UnsupportedError, match="not compiled for it, use one of: "):
        CpuAttention(isa="sse9").prepare(None)


@needs_extension
def test_threads_are_those_of_torch():
    """One OpenMP runtime: that which torch has loaded."""
    if not torch.backends.openmp.is_available():
        pytest.skip("this torch has threads of its own")
    source = native().thread_source()
    assert source in Path("/proc/self/maps").read_text()
    assert "omp" in os.path.basename(source)
