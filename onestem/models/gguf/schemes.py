"""Which modules of a GGUF file are stored in blocks: values, no torch."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from onestem.models.gguf.architectures import NAMES, architecture_of
from onestem.models.gguf.file import BLOCKS, open_gguf
from onestem.models.names import TensorNames
from onestem.models.quantization import Quantization, Scheme


def blocks_of(path: Path, names: TensorNames) -> Quantization | None:
    """The types of a file's blocks, by modules of the decoder; None: no module has any.

    Args:
        names: of the decoder.
    """
    file = open_gguf(path)
    roles = {theirs: role for role, theirs in {**NAMES, **architecture_of(file).names}.items()}
    found: dict[str, list[str]] = {}
    sizes = Counter[str]()
    for raw in file.tensors.values():
        named = re.fullmatch(r"(?:blk\.(\d+)\.)?([^.]+)\.weight", raw.name)
        role = None if named is None else roles.get(named[2])
        if named is None or role is None or role not in names or raw.kind not in BLOCKS:
            continue
        module = ("" if named[1] is None else names.layer.format(int(named[1]))) + names[role]
        if len(raw.shape) == 3:  # of all experts
            module = "re:" + re.escape(module).replace(r"\{\}", r"\d+") + "$"
        found.setdefault(raw.kind, []).append(module)
        sizes[raw.kind] += raw.num_bytes
    if not found:
        return None
    kinds = [kind for kind, _ in sizes.most_common()]
    return Quantization(
        ", ".join(kinds), tuple((tuple(found[kind]), _scheme(kind)) for kind in kinds)
    )


def _scheme(kind: str) -> Scheme:
    bits, columns = BLOCKS[kind]
    return Scheme(storage="blocks", bits=bits, columns=columns, kind=kind)
