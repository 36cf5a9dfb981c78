"""Parses markup to nodes.

The reader is expat: it gives the line and column of everything, reports character references and
CDATA, and never opens a file or a connection. A document type may declare entities that stand for
plain text, with a bound on their expansion. Any other declaration is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar
from xml.parsers import expat

from onestem.pml.elements import Element, node_of
from onestem.pml.files import MAX_BYTES, decode_markup, read_bytes
from onestem.pml.nodes import ROLES, Prompt, Schema
from onestem.pml.place import Place, PmlError
from onestem.pml.whitespace import Fragment, FragmentKind

MAX_DEPTH = 128  # of nested elements
MAX_ENTITY_TEXT = 1 << 20  # characters, over all uses of declared entities
SCHEMA_TAGS = ("module", "union", "parameter", "param", *ROLES)

D = TypeVar("D", Schema, Prompt)  # a document


def parse(
    text: str | bytes, *, file: str = "<text>", folder: Path | None = None
) -> Schema | Prompt:
    """Parse markup to a schema or a prompt.

    Args:
        file: its name in messages.
        folder: what `src` is relative to and may not leave; None: `src` is refused.

    Raises:
        PmlError: with file, line and column.
    """
    if isinstance(text, bytes):
        text = decode_markup(text, file)
    source = text.removeprefix("\ufeff").encode("utf-8", "surrogatepass")
    if len(source) > MAX_BYTES:
        raise PmlError(
            f"markup has {len(source)} bytes, limit is {MAX_BYTES}: split it, or move texts to "
            "files of their own (src)",
            Place(file, 1, 1),
        )
    return _Reader(source, file, folder).read()


def parse_schema(text: str | bytes, *, file: str = "<text>", folder: Path | None = None) -> Schema:
    """`parse`, for a schema."""
    return of_kind(Schema, parse(text, file=file, folder=folder))


def parse_prompt(text: str | bytes, *, file: str = "<text>") -> Prompt:
    """`parse`, for a prompt."""
    return of_kind(Prompt, parse(text, file=file))


def read(path: str | Path) -> Schema | Prompt:
    """`parse` of a file; `src` is relative to it and stays in its folder."""
    folder = Path(path).parent
    return parse(read_bytes(Path(path), None), file=str(path), folder=folder)


def read_schema(path: str | Path) -> Schema:
    """`read`, for a schema."""
    return of_kind(Schema, read(path))


def read_prompt(path: str | Path) -> Prompt:
    """`read`, for a prompt."""
    return of_kind(Prompt, read(path))


def of_kind(kind: type[D], found: Schema | Prompt) -> D:
    """What was found, if it is of this kind; else raises `PmlError`."""
    if isinstance(found, kind):
        return found
    got, expected = type(found).__name__.lower(), kind.__name__.lower()
    raise PmlError(
        f"this is a <{got}>, expected a <{expected}>: give the {expected}'s file", found.at
    )


class _Reader:
    """One document: expat's events on a stack of open elements."""

    def __init__(self, source: bytes, file: str, folder: Path | None) -> None:
        self.source = source
        self.file = file
        self.folder = folder
        self.open: list[Element] = []
        self.root: Schema | Prompt | None = None
        self._cdata = False
        self._entity_text = 0
        self._expat = parser = expat.ParserCreate("utf-8")
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.CommentHandler = lambda text: self._comment()
        parser.ProcessingInstructionHandler = lambda target, data: self._comment()
        parser.StartCdataSectionHandler = lambda: self._set_cdata(True)
        parser.EndCdataSectionHandler = lambda: self._set_cdata(False)
        parser.StartDoctypeDeclHandler = self._document_type
        parser.EntityDeclHandler = self._entity
        parser.ElementDeclHandler = lambda *given: self._refuse_declaration("<!ELEMENT>")
        parser.AttlistDeclHandler = lambda *given: self._refuse_declaration("<!ATTLIST>")
        parser.NotationDeclHandler = lambda *given: self._refuse_declaration("<!NOTATION>")

    def read(self) -> Schema | Prompt:
        try:
            self._expat.Parse(self.source, True)
        except expat.ExpatError as error:
            raise self._malformed(error) from None
        assert self.root is not None
        return self.root

    def _here(self) -> Place:
        parser = self._expat
        return Place(self.file, parser.CurrentLineNumber, parser.CurrentColumnNumber + 1)

    def _declaration(self) -> Place:
        """Start of the current declaration: its event comes at its end, or inside it."""
        start = self.source.rfind(b"<!", 0, self._expat.CurrentByteIndex + 1)
        lines = self.source[:start].decode("utf-8", "replace").split("\n")
        return Place(self.file, len(lines), len(lines[-1]) + 1)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        at = self._here()
        if len(self.open) >= MAX_DEPTH:
            raise PmlError(f"<{tag}> stands inside {MAX_DEPTH} elements, which is the limit", at)
        preserve = self.open[-1].preserve if self.open else False
        space = attributes.pop("xml:space", None)
        if space is not None:
            if space not in ("default", "preserve"):
                raise PmlError(f"xml:space is {space!r}, expected default or preserve", at)
            preserve = space == "preserve"
        element = Element(tag, attributes, at, preserve)
        self._check_tag(element)
        self.open.append(element)

    def _check_tag(self, element: Element) -> None:
        tag, at = element.tag, element.at
        if not self.open:
            if tag not in ("schema", "prompt"):
                raise PmlError(f"<{tag}> is no PML, expected <schema> or <prompt>", at)
        elif tag in ("schema", "prompt"):
            raise PmlError(f"<{tag}> stands inside another element, expected alone in a file", at)
        elif self._is_schema and tag not in SCHEMA_TAGS:
            known = ", ".join(f"<{name}>" for name in SCHEMA_TAGS)
            raise PmlError(
                f"<{tag}> is no tag of a schema, expected {known}; a < in text is written &lt;", at
            )
        elif not self._is_schema and tag in SCHEMA_TAGS and tag not in ROLES:
            raise PmlError(
                f"<{tag}> belongs in a schema: in a prompt, import a module by its name", at
            )

    @property
    def _is_schema(self) -> bool:
        return self.open[0].tag == "schema"

    def _end(self, tag: str) -> None:
        node = node_of(self.open.pop(), self.folder)
        if isinstance(node, (Schema, Prompt)):
            self.root = node
        else:
            self.open[-1].items.append(node)

    def _characters(self, text: str) -> None:
        at = self._here()
        reference = not self._cdata and self.source[self._expat.CurrentByteIndex] == ord("&")
        if not reference:
            at = at._replace(column=at.column + len(text) - len(text.lstrip(" \t")))
        kind = FragmentKind.REFERENCE if reference else FragmentKind.TEXT
        self.open[-1].items.append(Fragment(kind, text, at))

    def _comment(self) -> None:
        if self.open:
            self.open[-1].items.append(Fragment(FragmentKind.COMMENT, "", self._here()))

    def _set_cdata(self, inside: bool) -> None:
        self._cdata = inside

    def _document_type(
        self, name: str, system_id: str | None, public_id: str | None, internal: int
    ) -> None:
        if system_id is not None or public_id is not None:
            raise PmlError(
                "the document type names an external file, which is never read: leave it out",
                self._declaration(),
            )

    def _entity(
        self, name: str, is_parameter: int, value: str | None, *elsewhere: str | None
    ) -> None:
        at = self._declaration()
        if is_parameter or value is None or any(one is not None for one in elsewhere):
            raise PmlError(
                f"entity {name} is not plain text, expected one that stands for characters: write "
                "out what it stands for",
                at,
            )
        if "&" in value or "<" in value:
            raise PmlError(
                f"entity {name} stands for markup or other entities, expected plain text: write "
                "out what it stands for",
                at,
            )
        self._entity_text += len(value) * self.source.count(f"&{name};".encode())
        if self._entity_text > MAX_ENTITY_TEXT:
            raise PmlError(
                f"entity {name} brings the text of all entities to {self._entity_text} characters, "
                f"limit is {MAX_ENTITY_TEXT}: use it less often",
                at,
            )

    def _refuse_declaration(self, what: str) -> None:
        raise PmlError(
            f"{what} in a document type is not supported, only entities are: leave it out",
            self._declaration(),
        )

    def _malformed(self, error: expat.ExpatError) -> PmlError:
        index, column = self._expat.ErrorByteIndex, error.offset + 1
        for opening in (b"</", b"<", b"&"):
            if self.source[:index].endswith(opening):
                index, column = index - len(opening), column - len(opening)
                break
        rest = self.source[index : index + 200].decode("utf-8", "replace")
        return PmlError(self._explained(error.code, rest), Place(self.file, error.lineno, column))

    def _explained(self, code: int, rest: str) -> str:
        reason = expat.ErrorString(code)
        inner = self.open[-1] if self.open else None
        if reason == expat.errors.XML_ERROR_DUPLICATE_ATTRIBUTE:
            return "an attribute is given twice: leave one out"
        if inner is None:
            return (
                f'malformed markup ({reason}): expected one <schema name="..."> or '
                '<prompt schema="..."> and nothing else'
            )
        if reason == expat.errors.XML_ERROR_TAG_MISMATCH:
            tag = rest.split(">")[0].strip()
            return f"{tag}> closes <{inner.tag}> of line {inner.at.line}: write </{inner.tag}>"
        if reason == expat.errors.XML_ERROR_UNDEFINED_ENTITY:
            name = rest.split(";")[0]
            return f"entity {name}; is unknown: write the character itself, or its number (&#160;)"
        if not rest.strip():
            return f"<{inner.tag}> of line {inner.at.line} is not closed: write </{inner.tag}>"
        return f"malformed markup ({reason}): in text, < is written &lt; and & is written &amp;"
