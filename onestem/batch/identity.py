"""Identity of a model: a short text that changes when its answers might."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from onestem.errors import JobError
from onestem.files import check_regular
from onestem.models.gguf.file import open_gguf

PATTERNS = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
WHOLE_BYTES = 64 << 20  # larger files are sampled: reading a large model takes minutes
NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10


def model_identity(directory: str | os.PathLike[str]) -> str:
    """16 hexadecimal digits over config, tokenizer and weights in a model directory, or over a GGUF
    file and its other parts.

    Files of up to 64 MiB are hashed in full. Larger ones count by size and 64 samples of 64 KiB,
    from the beginning to the end. That is enough to tell trainings of a model apart.
    """
    digest = hashlib.sha256()
    try:
        for path in model_files(directory):
            check_regular(path, JobError, most_bytes=None)
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(_content_hash(path))
    except OSError as error:
        raise JobError(f"cannot read {error.filename}: {error.strerror}") from error
    return digest.hexdigest()[:16]


def model_files(directory: str | os.PathLike[str]) -> Sequence[Path]:
    """What answers depend on: files in a model directory, or a GGUF file and its other parts."""
    folder = Path(directory)
    if not folder.is_dir():
        return open_gguf(folder).parts
    return sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})


def _content_hash(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256()
        for i in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.digest()
