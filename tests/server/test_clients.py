"""Clients that people use, against the server: `tests/server/clients` has a file for each. Those
that the others are made of always run, `make soak` runs the others. They live in an environment of
their own, which `scripts/test` makes: ONESTEM_CLIENTS names its Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from onestem.errors import OnestemError
from onestem.models.find import find_model
from tests.engine.tiny_tokenizers import LLAMA_3_TEMPLATE, make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.server.harness import running
from tests.soak import soaked

PYTHON = os.environ.get("ONESTEM_CLIENTS")
FOLDER = Path(__file__).parent / "clients"
OWN = ("anthropic_messages", "openai_responses")
OTHERS = {file.stem for file in FOLDER.glob("*.py")} - {"__init__", "asked", *OWN}
# As Qwen3's and DeepSeek's: an answer begins inside reasoning.
THINKS = LLAMA_3_TEMPLATE.replace("{% endif %}", "<think>\n{% endif %}{# </think> #}")


@pytest.fixture(scope="module")
def thinks(tmp_path_factory):
    """A server of a model that never ends its reasoning."""
    root = tmp_path_factory.mktemp("thinks")
    path = make_tiny("llama", root / "thinks")
    marks = ["<think>", "</think>"]
    make_byte_level_tokenizer(path, VOCAB_SIZE, template=THINKS, more_names=marks)
    how = {"engine": {"kv_memory": "8MiB"}, "served_model_name": ["thinks"]}
    with running(root / "state", model=path, **how) as server:
        yield server
        server.check()


@pytest.fixture(scope="module")
def generic(tmp_path_factory):
    """A server of a model whose template knows no tools."""
    try:
        find_model("smollm2")
    except OnestemError as error:
        pytest.skip(str(error))
    how = {"engine": {"kv_memory": "512MiB"}, "served_model_name": ["embedded"]}
    with running(tmp_path_factory.mktemp("generic"), model="smollm2", **how) as server:
        yield server
        server.check()


@pytest.mark.skipif(PYTHON is None, reason="ONESTEM_CLIENTS names no Python with the clients")
@pytest.mark.parametrize("names", [OWN, soaked(sorted(OTHERS))], ids=["own", "others"])
@pytest.mark.parametrize("model", ["embedded", soaked("generic")])
def test_clients(request, thinks, names, model):
    url = request.getfixturevalue(model).url
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}",
         "-o", "python_files=*.py", "-o", "filterwarnings=ignore", "--tb=short",
         *(FOLDER / f"{name}.py" for name in names)],
        cwd=FOLDER.parents[2], capture_output=True, text=True, timeout=3600,
        env={**os.environ, "ONESTEM_URL": url, "ONESTEM_THINKS_URL": thinks.url,
             "ONESTEM_MODEL": model},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
