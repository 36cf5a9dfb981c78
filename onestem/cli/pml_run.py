"""What `onestem pml run` and `encode` do: an answer and its cost; modules written to a disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onestem.cli.options import check_answered
from onestem.errors import ConfigError
from onestem.pml import PmlError, Prompt, Schema, read
from onestem.progress import progress_bar
from onestem.request import RequestOutput

if TYPE_CHECKING:
    from onestem.llm import LLM


def default_disk() -> Path:
    """The default folder for modules."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "onestem" / "modules"


def find_schema_file(prompt_file: Path, prompt: Prompt) -> Path:
    """The file beside a prompt that holds its schema.

    Raises:
        ConfigError: no file there does.
    """
    for path in sorted(prompt_file.parent.glob("*.xml")):
        try:
            found = read(path)
        except PmlError:
            continue  # a broken file beside it does not concern this prompt
        if isinstance(found, Schema) and found.name == prompt.schema:
            return path
    raise ConfigError(
        f"no *.xml beside {prompt_file} holds schema {prompt.schema!r}: name its file with --schema"
    )


def load_library(llm: LLM, prompt_file: Path, prompt: Prompt, schemas: list[Path] | None) -> None:
    """Add a prompt's schema: one of the files given, or the one beside the prompt."""
    for path in schemas or [find_schema_file(prompt_file, prompt)]:
        llm.add_schema(path)


def answer_facts(output: RequestOutput) -> dict[str, Any]:
    """Texts of an answer and its cost, for JSON; times in seconds."""
    check_answered(output, "the prompt")
    metrics = output.metrics
    assert metrics.first_token_time is not None
    return {
        "texts": [completion.text for completion in output.outputs],
        "finish_reasons": [completion.finish_reason for completion in output.outputs],
        "time_to_first_token": metrics.first_token_time - metrics.arrival_time,
        "num_prompt_tokens": metrics.num_prompt_tokens,
        "num_cached_tokens": metrics.num_cached_tokens,
        "num_computed_tokens": metrics.num_computed_tokens,
        "num_output_tokens": metrics.num_output_tokens,
    }


def cost_line(facts: dict[str, Any]) -> str:
    """What `answer_facts` says of the cost, in a line."""
    return (
        f"first token after {1000 * facts['time_to_first_token']:.1f} ms; "
        f"{facts['num_prompt_tokens']} prompt tokens: {facts['num_cached_tokens']} cached, "
        f"{facts['num_computed_tokens']} computed; {facts['num_output_tokens']} sampled"
    )


def encode_schema(llm: LLM, schema: Schema, isolation: str, *, quiet: bool) -> dict[str, Any]:
    """Have all of a schema's cached text computed, or found in the tiers; returns its figures.

    Raises:
        ConfigError: some of it could not be written.
    """
    llm.add_schema(schema)
    segments = llm.schemas.encoding(schema.name, isolation).segments.values()
    total = sum(segment.kind == "cached" for segment in segments)
    with progress_bar("encoding", total, shown=not quiet) as advance:
        for _ in llm.encode_schema(schema.name, isolation):
            advance()
    assert llm.engine.tiers is not None
    tiers = llm.engine.tiers.stores
    assert tiers.disk is not None
    if tiers.stats.not_written:
        raise ConfigError(
            f"{tiers.stats.not_written} of {total} segments could not be written to "
            f"{tiers.disk.folder}: make room there, or raise --disk-kv-size"
        )
    return {
        "schema": schema.name,
        "isolation": isolation,
        "num_segments": total,
        "num_tokens": sum(len(s.token_ids) for s in segments if s.kind == "cached"),
        "num_computed_tokens": tiers.stats.saved_tokens,
        "folder": str(tiers.disk.folder),
        "folder_bytes": sum(size for _, size, _ in tiers.disk.files()),
    }


def encode_line(facts: dict[str, Any]) -> str:
    """What `encode_schema` returns, in a line."""
    return (
        f"schema {facts['schema']}, {facts['isolation']}: {facts['num_segments']} segments, "
        f"{facts['num_tokens']} tokens, {facts['num_computed_tokens']} of them computed now; "
        f"{facts['folder']} holds {facts['folder_bytes'] / 2**20:.1f} MiB"
    )
