"""What `onestem pml show` prints: a schema's positions, a prompt's segments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from onestem.engine.text.tokenizer import Tokenizer
from onestem.pml import Block, CompiledPrompt, Layout, Segment, Slot, Span


def layout_facts(layout: Layout) -> dict[str, Any]:
    """A schema's modules, texts and parameters with their positions, for JSON."""
    return {
        "name": layout.schema.name,
        "positions": layout.end,
        "max_positions": layout.max_positions,
        "blocks": [_block_facts(block) for block in layout.blocks.values()],
    }


def _block_facts(block: Block) -> dict[str, Any]:
    return {
        "path": list(block.path),
        "start": block.start,
        "end": block.end,
        "cache": block.cached,
        "items": [
            {"position": item.position, "text": item.text, "token_ids": item.token_ids.tolist()}
            if isinstance(item, Span)
            else {
                "position": item.position,
                "parameter": item.parameter.name,
                "length": item.parameter.length,
                "default": item.parameter.default,
            }
            for item in block.items
        ],
    }


def layout_lines(layout: Layout, ids: bool) -> Iterator[str]:
    """The same as lines: first and last position, number of positions, what is there."""
    limit = "" if layout.max_positions is None else f" of {layout.max_positions}"
    yield f"schema {layout.schema.name}: {layout.end} positions{limit}"
    yield from _block_lines(layout.root, 0, ids)


def _block_lines(block: Block, depth: int, ids: bool) -> Iterator[str]:
    parts: list[Span | Slot | Block] = [*block.items, *block.children]
    parts.sort(key=lambda part: part.start if isinstance(part, Block) else part.position)
    opened = None
    for part in parts:
        if not isinstance(part, Block):
            yield from _item_lines(part, depth, ids)
            continue
        assert part.module is not None
        union = part.union
        if union is not None and union is not opened:
            members = [child for child in block.children if child.union is union]
            yield _line(part.start, max(m.end for m in members), depth, "union")
        opened = union
        inner = depth + (union is not None)
        uncached = "" if part.cached else " (computed for each request)"
        yield _line(part.start, part.end, inner, f"module {part.module.name}{uncached}")
        yield from _block_lines(part, inner + 1, ids)


def _item_lines(item: Span | Slot, depth: int, ids: bool) -> Iterator[str]:
    if isinstance(item, Span):
        yield _line(item.position, item.end, depth, f"text {_short(item.text)}")
        if ids:
            yield _ids(item.token_ids.tolist())
        return
    parameter = item.parameter
    default = "" if parameter.default is None else f", default {_short(parameter.default)}"
    yield _line(item.position, item.end, depth, f"parameter {parameter.name}{default}")


def _line(start: int, end: int, depth: int, what: str) -> str:
    place = f"{start}-{end - 1}" if end > start else f"{start}"
    return f"{place:>13} {end - start:>6}  {'  ' * depth}{what}"


def _short(text: str, limit: int = 60) -> str:
    return json.dumps(text if len(text) <= limit else text[: limit - 1] + "…", ensure_ascii=False)


def _ids(token_ids: list[int]) -> str:
    return f"{'':22}{' '.join(map(str, token_ids))}"


def prompt_facts(compiled: CompiledPrompt) -> dict[str, Any]:
    """A prompt's segments and what each attends to, for JSON."""
    return {
        "schema": compiled.schema,
        "isolation": compiled.isolation,
        "num_cached_tokens": compiled.num_cached_tokens,
        "num_computed_tokens": compiled.num_computed_tokens,
        "next_position": compiled.next_position,
        "segments": [_segment_facts(segment) for segment in compiled.segments],
    }


def _segment_facts(segment: Segment) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "origin": segment.origin,
        "position": segment.position,
        "token_ids": segment.token_ids.tolist(),
        "in_use": segment.in_use,
        "attends": list(segment.attends),
        "key": segment.key,
    }


def prompt_lines(compiled: CompiledPrompt, tokenizer: Tokenizer, ids: bool) -> Iterator[str]:
    """The same as lines, with the beginning of each segment's text."""
    yield (
        f"prompt, {compiled.isolation}: {compiled.num_cached_tokens} cached and "
        f"{compiled.num_computed_tokens} computed tokens, the answer begins at position "
        f"{compiled.next_position}"
    )
    for number, segment in enumerate(compiled.segments):
        tokens = segment.token_ids[: segment.in_use].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        what = f"{number} {segment.kind}, {segment.origin}: {_short(text)}"
        if segment.is_encoded:
            attends = ", ".join(map(str, segment.attends)) or "none"
            what += f" attends to {attends}; key {segment.key}"
        yield _line(segment.position, segment.end, 0, what)
        if ids:
            yield _ids(tokens)
