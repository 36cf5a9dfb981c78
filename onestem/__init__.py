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

if TYPE_CHECKING:
    __version__: str
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
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'onestem' has no attribute {name!r}")


def _version() -> str:
    """The installed package's version; sources that were never installed have none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("onestem")
    except PackageNotFoundError:
        return "unknown"
