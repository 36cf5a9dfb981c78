"""Onestem: an LLM inference engine for prompts that share text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onestem.threads import spin_shortly

spin_shortly()

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineOptions",
    "Logprob",
    "OnestemError",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "__version__",
]

__version__ = "0.2.0"

if TYPE_CHECKING:
    from onestem.async_llm import AsyncLLM
    from onestem.errors import OnestemError
    from onestem.llm import LLM
    from onestem.options import EngineOptions
    from onestem.request import Answer as RequestOutput
    from onestem.request import Logprob, SamplingParams
    from onestem.scores import Score

_HOMES = {
    "AsyncLLM": "onestem.async_llm",
    "EngineOptions": "onestem.options",
    "LLM": "onestem.llm",
    "Logprob": "onestem.request",
    "OnestemError": "onestem.errors",
    "RequestOutput": "onestem.request",
    "SamplingParams": "onestem.request",
    "Score": "onestem.scores",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `onestem --help` and policy code need no torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'onestem' has no attribute {name!r}")
