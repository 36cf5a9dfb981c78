"""Options that several verbs share, and how they become an `LLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from onestem.llm import LLM

__all__ = [
    "Device",
    "Dtype",
    "Impl",
    "KvMemory",
    "MaxModelLen",
    "MaxStepTokens",
    "Model",
    "PageSize",
    "RandomWeights",
    "Seed",
    "Share",
    "Threads",
    "load_llm",
]

Model = Annotated[
    str,
    typer.Option(help="Model directory, hub name (owner/name), or 'embedded'.", show_default=True),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
KvMemory = Annotated[str, typer.Option(help="KV memory: auto, bytes, or like 2GiB.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and answer (default: the model's).")
]
MaxStepTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of a step, prompts' and one of each that decodes (default: 1024 CPU, "
        "2048 with AMX, 8192 GPU)."
    ),
]
PageSize = Annotated[int, typer.Option(help="Tokens in a page of KV memory.")]
Share = Annotated[str, typer.Option(help="full, storage or off (the last two for measuring).")]
Impl = Annotated[
    str, typer.Option("--attention", help="Attention implementation: auto, torch or reference.")
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads on a CPU (default: the cores that affinity and cgroups leave)."),
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Make weights up: a config is enough.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of random numbers (default: drawn).")]


def load_llm(model: str, **options: Any) -> LLM:
    """Import torch and load a model; a verb that needs none starts fast."""
    from onestem.llm import LLM

    return LLM(model, **options)
