"""PML, the markup of Prompt Cache: markup -> nodes -> segments. No model, no tensors.

`read_schema` and `read_prompt` parse files; the nodes (`Schema`, `Module`, ...) may be built in
code as well. `lay_out` gives a schema's tokens their positions, `compile_prompt` makes a prompt's
segments. `docs/pml.md` describes the language.
"""

from onestem.pml.binding import bind, find_schema
from onestem.pml.compile import compile_prompt
from onestem.pml.documents import Documents, DocumentsPrompt, with_documents
from onestem.pml.layout import Block, Layout, Slot, Span, lay_out
from onestem.pml.library import Library
from onestem.pml.markup import to_markup
from onestem.pml.nodes import (
    Argument,
    Import,
    Module,
    Parameter,
    Prompt,
    Role,
    Schema,
    Text,
    Union,
)
from onestem.pml.parser import parse, parse_prompt, parse_schema, read, read_prompt, read_schema
from onestem.pml.place import Place, PmlError
from onestem.pml.segments import (
    ISOLATIONS,
    CompiledPrompt,
    Encoding,
    Isolation,
    Segment,
    parse_isolation,
)
from onestem.pml.tokens import Tokenizer

__all__ = [
    "ISOLATIONS",
    "Argument",
    "Block",
    "CompiledPrompt",
    "Documents",
    "DocumentsPrompt",
    "Encoding",
    "Import",
    "Isolation",
    "Layout",
    "Library",
    "Module",
    "Parameter",
    "Place",
    "PmlError",
    "Prompt",
    "Role",
    "Schema",
    "Segment",
    "Slot",
    "Span",
    "Text",
    "Tokenizer",
    "Union",
    "bind",
    "compile_prompt",
    "find_schema",
    "lay_out",
    "parse",
    "parse_isolation",
    "parse_prompt",
    "parse_schema",
    "read",
    "read_prompt",
    "read_schema",
    "to_markup",
    "with_documents",
]
