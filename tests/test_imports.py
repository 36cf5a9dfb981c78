"""Imports point down, and policy imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "onestem"

# From the bottom up; a module may import from its own layer's package and from lower layers.
LAYERS = [
    (
        "arrays",
        "errors",
        "interrupts",
        "processes",
        "progress",
        "seeds",
        "threads",
    ),
    ("garbage",),
    ("beside_vllm",),
    ("checked", "children", "files", "native", "rawtext", "shapes", "tree", "utf8"),
    ("options",),
    ("pml", "scores"),
    ("request",),
    ("openai",),
    ("adapters",),
    ("ops",),
    ("cache", "planner", "models"),
    ("engine",),
    ("batch", "cost", "parallel"),
    ("answers", "build", "prompts"),
    ("llm",),
    ("advice", "forecasts", "needs"),
    ("replicas", "report"),
    ("bench", "evals", "jobs"),
    ("server",),
    ("async_llm", "rollouts"),
    ("cli",),
    ("__main__",),
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
NO_TORCH = [
    "arrays",
    "errors",
    "garbage",
    "threads",
    "request",
    "tree",
    "pml",
    "scores",
    "cache",
    "planner",
    "batch",
    "checked",
    "cost",
    "adapters",
    "openai",
    "options",
    "native",
    "rawtext",
    "shapes",
    "models.config",
    "models.find",
    "ops.plan",
    "ops.state_rows",
    "engine.schedule.backlog",
    "engine.schedule.queue",
    "engine.schedule.scheduler",
    "engine.sequence",
    "cli.app",
]


def modules() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE or path.stem != "__init__"
    ]


def imported(path: Path) -> set[str]:
    """Top-level parts of the package that a file imports, type-checking imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("onestem."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                name.name.split(".")[1] for name in node.names if name.name.startswith("onestem.")
            }
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported(path):
        assert name == own or HEIGHT[name] < HEIGHT[own], f"{own} imports {name}"


def test_the_package_does_not_know_the_laboratory():
    for path in PACKAGE.rglob("*.py"):
        assert not [name for name in _plain_imports(path) if name.startswith("onestem_lab")], path


def test_cache_planner_and_models_do_not_know_each_other():
    for own in ("cache", "planner", "models"):
        for path in (PACKAGE / own).rglob("*.py"):
            assert not imported(path) & ({"cache", "planner", "models"} - {own})


def test_attention_implementations_do_not_import_each_other():
    for path in (PACKAGE / "ops").glob("*.py"):
        if path.stem in ("dispatch", "__init__"):
            continue
        source = path.read_text()
        others = {"reference", "torch_impl", "triton", "cpu"} - {path.stem}
        assert not any(f"onestem.ops.{other}" in source for other in others)


def test_policy_imports_no_torch():
    # Modules of `onestem.ops` need their package, whose __init__ brings torch: read as files.
    names = [name for name in NO_TORCH if not name.startswith("ops.")]
    code = (
        "import sys\n"
        + "\n".join(f"import onestem.{name}" for name in names)
        + "\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in set(NO_TORCH) - set(names):
        path = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
        assert "torch" not in {node.split(".")[0] for node in _plain_imports(path)}


def _plain_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_all_names_exist():
    import importlib.util

    for path in modules():
        if path.name == "__main__.py" or path.relative_to(PACKAGE).parts[0] == "embedded":
            continue
        name = ".".join(("onestem", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        if name == "onestem.evals.lm_eval" and importlib.util.find_spec("lm_eval") is None:
            continue  # an extra
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            assert hasattr(module, exported), f"{name}.{exported}"


# The server's rooms and what stands between them, from the bottom up.
SERVER = [
    ("errors", "log_lines", "settings"),
    ("logs",),
    ("link",),
    ("objects", "served_model", "snapshots"),
    ("records", "startup"),
    ("service",),
    ("api",),
    ("page",),
    ("run",),
]


def test_the_rooms_of_the_server_know_only_those_below_them():
    heights = {name: height for height, names in enumerate(SERVER) for name in names}
    for path in (PACKAGE / "server").rglob("*.py"):
        own = path.relative_to(PACKAGE / "server").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("onestem.server."):
                room = module.split(".")[2]
                assert room == own or heights[room] < heights[own], f"{path}: {module}"
