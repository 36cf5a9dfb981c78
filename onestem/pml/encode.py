"""Prompts that only compute a schema's cached text, before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from onestem.pml.segments import CompiledPrompt, Encoding, Segment

__all__ = ["encoding_prompts"]


def encoding_prompts(encoding: Encoding) -> Iterator[CompiledPrompt]:
    """A prompt for each cached segment: it imports that and what it attends to, nothing else.

    Its own token is the segment's last one, so it needs no positions beyond the schema's.
    """
    schema = encoding.layout.schema.name
    for target in encoding.segments.values():
        if target.kind != "cached":
            continue
        needed = [*(encoding.segments[index] for index in target.attends), target]
        place = {segment.index: number for number, segment in enumerate(needed)}
        before = len(target.token_ids) - 1
        segments = [one.in_prompt(place, before if one is target else -1) for one in needed]
        end = target.position + len(target.token_ids)
        segments.append(Segment("text", target.token_ids[-1:], end - 1, target.origin))
        yield CompiledPrompt(schema, encoding.isolation, tuple(segments), end)
