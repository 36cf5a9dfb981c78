"""Compiles a prompt to segments: which text is in use, and where arguments and new text are.

* Arguments are at their parameter's positions; a shorter one leaves a gap.
* New text before the last import follows the import before it, in positions that no module of this
  prompt has. Without an import before it, it follows what else is in use before the next import.
  "Before" and "last" mean the prompt's order of imports, which is free.
* New text after the last import, and the answer, start after the highest position in use. A
  parameter counts with its whole length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onestem.pml.binding import Binding, bind
from onestem.pml.ending import ending
from onestem.pml.layout import Layout, Span, separated
from onestem.pml.nodes import Prompt
from onestem.pml.place import PmlError, show
from onestem.pml.reading import NewText, new_texts
from onestem.pml.segments import CompiledPrompt, Encoding, Isolation, Segment, SegmentKind
from onestem.pml.tokens import encode_parts, encode_text

Path = tuple[str, ...]
NO_LIMIT = 2**31


def compile_prompt(
    layout: Layout,
    prompt: Prompt,
    isolation: Isolation = "anchored",
    *,
    encoding: Encoding | None = None,
) -> CompiledPrompt:
    """Segments of a prompt, in the order in which a step computes them.

    Args:
        encoding: that of `layout` under `isolation`, which all prompts can share; None: made here.

    Raises:
        PmlError: as `onestem.pml.binding`; also an argument longer than its parameter, a text that
            does not fit its gap, positions above the model's limit, or turns that the chat template
            refuses.
    """
    encoding = Encoding(layout, isolation) if encoding is None else encoding
    if encoding.layout is not layout or encoding.isolation != isolation:
        raise ValueError("encoding belongs to another layout or isolation")
    bindings = bind(layout.schema, prompt)
    placement = _Placement(layout, bindings)
    texts = new_texts(prompt, layout, len(bindings))
    for text in texts:
        if not text.last:
            placement.put(text)
    placement.end_with([text for text in texts if text.last], prompt)
    return _assemble(encoding, placement)


class _Placement:
    """Which positions are in use, and what is computed at them.

    Attributes:
        items: spans and slots in use, by position.
        computed: arguments and new text.
    """

    def __init__(self, layout: Layout, bindings: Sequence[Binding]) -> None:
        self.layout = layout
        blocks = [layout.root, *(layout.blocks[binding.path] for binding in bindings)]
        items = [item for block in blocks for item in block.items]
        self.items = sorted(items, key=lambda item: item.position)
        self.computed: list[Segment] = []
        self._used = [(item.position, item.end) for item in self.items]
        self._ends: dict[Path, int] = {}  # of an import: last position in use + 1
        self._texts: list[tuple[int, int]] = []  # positions of the texts among the imports
        for block in blocks:
            self._reach(block.path, block.items[-1].end if block.items else block.start)
        for binding in bindings:
            self._fill(binding)

    @property
    def end(self) -> int:
        """The highest position in use + 1."""
        return max((end for _, end in self._used), default=0)

    def _reach(self, path: Path, end: int) -> None:
        """Extend a module, and those around it, to `end`."""
        for depth in range(1, len(path) + 1):
            self._ends[path[:depth]] = max(self._ends.get(path[:depth], 0), end)

    def _fill(self, binding: Binding) -> None:
        """Compute a module's arguments at their places."""
        for slot in self.layout.blocks[binding.path].slots:
            name, length = slot.parameter.name, slot.parameter.length
            value = binding.values.get(name)
            given = None if value is None else encode_text(self.layout.tokenizer, value)
            ids = slot.default_ids if given is None else given
            assert ids is not None
            if len(ids) > length:
                raise PmlError(
                    f"argument {name}={show(value or '')} has {len(ids)} tokens, its parameter's "
                    f"length is {length}: shorten it, or raise the length in the schema",
                    binding.node.at,
                )
            self._compute("argument", ids, slot.position, f"argument {name} of {slot.block}")

    def _compute(self, kind: SegmentKind, ids: np.ndarray, position: int, origin: str) -> None:
        if len(ids):
            self.computed.append(Segment(kind, ids, position, origin))

    def put(self, text: NewText) -> None:
        """Place a text among the imports."""
        content = separated(text.node.text, self.layout.schema.separator)
        ids = encode_text(self.layout.tokenizer, content)
        start = self._start(text)
        end = start + len(ids)
        limit = min((begin for begin, _ in self._used if begin >= start), default=NO_LIMIT)
        if end > limit:
            raise PmlError(
                f"text {show(text.node.text.strip())} needs {len(ids)} positions {text.beside()}, "
                f"the gap has {limit - start}, {end - limit} too few: shorten it, or put it after "
                "the last import",
                text.node.at,
            )
        self._compute("text", ids, start, "prompt")
        self._used.append((start, end))
        self._texts.append((start, end))

    def _start(self, text: NewText) -> int:
        """Where a text begins; those placed before it keep their positions."""
        if text.after is None and text.before is not None:
            begin = self.layout.blocks[text.before].start
            start = max((end for _, end in self._used if end <= begin), default=0)
        else:
            start = self._ends[text.after or text.inside]
        for begin, end in sorted(self._texts):
            if begin <= start < end:
                start = end
        return start

    def end_with(self, texts: Sequence[NewText], prompt: Prompt) -> None:
        """Place the text after the last import, and what begins the answer."""
        start = self.end
        last = self.items[-1] if self.items else None
        after_space = (
            last is None
            or (isinstance(last, Span) and last.ends_in_space)
            or any(end == start for _, end in self._texts)
        )
        parts = ending(self.layout, texts, after_space=after_space, at=prompt.at)
        ids = encode_parts(self.layout.tokenizer, parts, first=False)
        self._compute("text", ids, start, "prompt")
        self._used.append((start, start + len(ids)))
        at = texts[0].node.at if texts else prompt.at
        most = self.layout.max_positions
        if most is not None and self.end > most:
            raise PmlError(
                f"the prompt reaches position {self.end - 1} and the model has {most} positions: "
                "shorten its text, or import less",
                at,
            )
        if self.end == 0:
            raise PmlError("schema and prompt have no token at all: add some text", at)


def _assemble(encoding: Encoding, placement: _Placement) -> CompiledPrompt:
    stored = encoding.segments
    segments = encoding.in_prompt(i.index for i in placement.items if i.index in stored)
    computed = placement.computed + [
        Segment("text", span.token_ids, span.position, str(span.block))
        for span in placement.items
        if isinstance(span, Span) and span.index not in stored
    ]
    if segments and segments[-1].end > max((one.end for one in computed), default=0):
        # The highest position must have logits. No other segment attends to this one.
        before, last = segments.pop().with_last_computed()
        segments += [before] if before.in_use else []
        computed.append(last)
    segments += sorted(computed, key=lambda segment: segment.position)
    schema = encoding.layout.schema.name
    return CompiledPrompt(schema, encoding.isolation, tuple(segments), placement.end)
