"""Files of a tokenizer's directory, looked at before a library reads them."""

from __future__ import annotations

from pathlib import Path

from onestem.errors import ConfigError
from onestem.files import check_regular

__all__ = ["check_files"]

# Those that transformers may read with a tokenizer; `config.json` is one of them.
_SUFFIXES = (".jinja", ".json", ".model", ".tiktoken", ".txt")
_FOLDERS = (".", "additional_chat_templates")


def check_files(directory: Path) -> None:
    """Raise `ConfigError` for what a library would read for ever, or into all memory."""
    for folder in (directory / name for name in _FOLDERS):
        if not folder.is_dir():
            continue
        for file in sorted(folder.iterdir()):
            if file.suffix in _SUFFIXES and file.exists():
                check_regular(file, ConfigError)
