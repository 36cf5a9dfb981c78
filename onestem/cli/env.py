"""`onestem env`: what this machine has and what Onestem would use."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from onestem.options import Defaults, EngineOptions, InputOptions, Options
from onestem.server.settings import Settings

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "xgrammar", "triton")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with defaults (default: ONESTEM_CONFIG's)."),
    ] = None,
) -> None:
    """Show devices, threads, chosen implementations and versions, and the options from environment
    and file, each with its value and source."""
    facts = _facts(Defaults(config))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        if isinstance(value, dict):
            typer.echo(f"{key}:")
            for name, item in value.items():
                if isinstance(item, dict):
                    item = f"{item['value']} ({item['from']})"
                typer.echo(f"  {name}: {item}")
        else:
            typer.echo(f"{key}: {value}")


def _facts(defaults: Defaults) -> dict[str, Any]:
    import torch

    from onestem import __version__
    from onestem.build import kv_memory_bytes, set_threads
    from onestem.engine.schedule.answers import answer_memory_bytes
    from onestem.models.formats.products import kinds_of
    from onestem.models.linear import choose_layout
    from onestem.ops import available, resolve
    from onestem.ops.cpu import status
    from onestem.threads import ram_bytes, spinning, usable_cores

    engine, _ = defaults.options(EngineOptions)
    set_threads(engine.threads)
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        "onestem": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {
            "cores": f"{os.cpu_count()}, {usable_cores()} of them for this process",
            "threads": torch.get_num_threads(),
            "waiting threads spin": spinning(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "extension": status(),
            "bf16 matrix instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        },
        "gpus": {str(d): torch.cuda.get_device_name(d) for d in devices[1:]} or "none",
        "attention available": ", ".join(available()),
        "attention chosen": {str(d): resolve("auto", d).name for d in devices},
        "linear layers on the cpu": {
            name: choose_layout(getattr(torch, name), devices[0]).value
            for name in ("float32", "bfloat16", "float16")
        },
        **{
            f"quantised weights on {device}": kinds_of(device, torch.bfloat16) for device in devices
        },
        "kv_memory auto": {
            str(d): f"{kv_memory_bytes('auto', d) / 2**30:.2f} GiB" for d in devices
        },
        "memory of this machine": {
            "all": f"{ram_bytes() / 2**30:.2f} GiB",
            "answer_memory auto": f"{answer_memory_bytes('auto') / 2**30:.2f} GiB",
            "a process on a CPU grows to": "weights and kv_memory, each page of which counts once "
            "it was used for the first time, and answers",
        },
        "versions": {name: _version(name) for name in PACKAGES},
        "configuration file": "none" if defaults.file is None else str(defaults.file),
        "options": _options(defaults, EngineOptions),
        "options of serve": _options(defaults, Settings),
        "options of input": _options(defaults, InputOptions),
        "unknown variables": ", ".join(defaults.unknown(EngineOptions, Settings, InputOptions))
        or "none",
    }


def _options(defaults: Defaults, kind: type[Options]) -> dict[str, Any]:
    made, origins = defaults.options(kind)
    return {
        flag.replace("-", "_"): {"value": getattr(made, name), "from": origins.get(name, "default")}
        for name, flag in kind.offered().items()
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
