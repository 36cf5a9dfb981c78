"""What a batch leaves among its key's files: its output, and a file of its failed lines.

Each step can be repeated after a crash and then changes nothing: ids derive from the batch's.
"""

from __future__ import annotations

import os
from pathlib import Path

from onestem.openai.read import JsonError, read_object
from onestem.server.objects.files import new_file_row
from onestem.server.objects.store import Store


def keep_output(
    store: Store, owner: str, batch_id: str, path: Path
) -> tuple[str | None, str | None]:
    """Make a batch's output at `path` a file of the key's, and its errors another.

    Returns:
        The ids of both; None for one that would be empty.
    """
    name = batch_id.removeprefix("batch_")
    output, errors = f"file-{name}o", f"file-{name}e"
    if path.exists():
        _cut_torn_line(path)
        os.replace(path, store.files / output)
    if not _size(store.files / output):
        (store.files / output).unlink(missing_ok=True)
        return None, None
    _add(store, owner, output, f"{batch_id}_output.jsonl")
    draft = store.files / f"{errors}.draft"
    _copy_errors(store.files / output, draft)
    if not _size(draft):
        draft.unlink()
        return output, None
    os.replace(draft, store.files / errors)
    _add(store, owner, errors, f"{batch_id}_errors.jsonl")
    return output, errors


def count_lines(store: Store, file_id: str | None) -> int:
    """Lines of a file that `keep_output` made; 0 where it made none."""
    if file_id is None:
        return 0
    with open(store.files / file_id, "rb") as file:
        return sum(1 for _ in file)


def counts_in(output: Path) -> dict[str, int]:
    """`request_counts` of a whole output."""
    with open(output, "rb") as file:
        failed = [_is_error(raw) for raw in file]
    return {"total": len(failed), "completed": failed.count(False), "failed": failed.count(True)}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _add(store: Store, owner: str, file_id: str, filename: str) -> None:
    row = new_file_row(owner, filename, "batch_output") | {"id": file_id}
    store.add_file(row | {"bytes": _size(store.files / file_id)})


def _cut_torn_line(path: Path) -> None:
    """Cut half a line at the end, which a killed server may have left."""
    with open(path, "rb+") as file:
        whole = sum(len(raw) for raw in file if raw.endswith(b"\n"))
        file.truncate(whole)


def _copy_errors(output: Path, target: Path) -> None:
    with open(output, "rb") as source, open(target, "wb") as file:
        file.writelines(raw for raw in source if _is_error(raw))


def _is_error(raw: bytes) -> bool:
    try:
        return read_object(raw).get("error") is not None
    except JsonError:
        return False
