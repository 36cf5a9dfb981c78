"""Reads schema, prompt and source files: bounded, decoded, and only from allowed folders."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from onestem.pml.place import Place, PmlError, show

MAX_BYTES = 16 << 20  # per file
_DECLARED_ENCODING = re.compile(rb"<\?xml[^>]*?encoding\s*=\s*[\"']([A-Za-z0-9._-]+)[\"']")


def read_bytes(path: Path, at: Place | None) -> bytes:
    """A file's bytes.

    Raises:
        PmlError: at `at`, the place that names the file.
    """
    try:
        if not path.is_file():
            raise PmlError(f"{path} is no file", at)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, PmlError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise PmlError(f"{path} cannot be read: {reason}", at) from error
    if len(data) > MAX_BYTES:
        raise PmlError(f"{path} has more than {MAX_BYTES} bytes: split it", at)
    return data


def decode_markup(data: bytes, file: str) -> str:
    """A document's text, decoded by the encoding that it declares."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _decoded(data, "utf-16", file)
    declared = _DECLARED_ENCODING.match(data.removeprefix(codecs.BOM_UTF8)[:200])
    return _decoded(data, declared.group(1).decode() if declared else "utf-8", file)


def read_source(src: str, folder: Path | None, at: Place) -> tuple[str, Place]:
    """The text of a file that a schema names, and where it begins.

    Line ends become \\n; otherwise the text is unchanged.

    Args:
        folder: the schema's; files outside of it are refused, also through symbolic links.
        at: the element that names the file.
    """
    if folder is None:
        raise PmlError(
            f"src {show(src)} is relative to the schema's file, and the schema is no file: write "
            "the text into the module",
            at,
        )
    path = _inside(src, folder, at)
    text = _decoded(read_bytes(path, at), "utf-8", str(path))
    return text.replace("\r\n", "\n").replace("\r", "\n"), Place(str(path), 1, 1)


def _inside(src: str, folder: Path, at: Place) -> Path:
    path = folder / src
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a loop of links
        raise PmlError(f"src {show(src)} is no path: {error}", at) from error
    if not src or Path(src).is_absolute() or not inside:
        raise PmlError(
            f"src {show(src)} is outside of the schema's folder {folder}: move the file there, "
            "and name it relative to the schema",
            at,
        )
    return path


def _decoded(data: bytes, encoding: str, file: str) -> str:
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(encoding, "replace").split("\n")
        raise PmlError(
            f"byte {data[error.start]:#04x} is not {encoding} text: save the file as UTF-8",
            Place(file, len(before), len(before[-1]) + 1),
        ) from error
    except (LookupError, UnicodeError) as error:
        raise PmlError(
            f"encoding {encoding!r} cannot be read: save the file as UTF-8", Place(file, 1, 1)
        ) from error
