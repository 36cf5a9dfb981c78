"""Prompts that only compute a schema's cached text, before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from onestem.pml.segments import CompiledPrompt, EncodedSegment, Encoding, Segment

__all__ = ["encoding_prompts"]


def encoding_prompts(encoding: Encoding) -> Iterator[CompiledPrompt]:
    """A prompt for each cached segment: it imports that and what it attends to, nothing else.

    Its own token is the segment's last one, so it needs no positions beyond the schema's.
    """
    for segment in encoding.segments.values():
        if segment.kind == "cached":
            yield _prompt(encoding, segment)


def _prompt(encoding: Encoding, target: EncodedSegment) -> CompiledPrompt:
    needed = [*(encoding.segments[index] for index in target.attends), target]
    place = {segment.index: number for number, segment in enumerate(needed)}
    segments = [
        Segment(
            one.kind,
            one.token_ids,
            one.position,
            one.origin,
            tuple(place[index] for index in one.attends),
            one.key,
            len(one.token_ids) - (one is target),
        )
        for one in needed
    ]
    end = target.position + len(target.token_ids)
    segments.append(Segment("text", target.token_ids[-1:], end - 1, target.origin))
    schema = encoding.layout.schema.name
    return CompiledPrompt(schema, encoding.isolation, tuple(segments), end)
