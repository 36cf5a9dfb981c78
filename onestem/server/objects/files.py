"""Files: uploads, and the files of a batch job."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from typing import Any, BinaryIO

from onestem.checked import show
from onestem.files import whole_file
from onestem.server.errors import ApiError
from onestem.server.objects.store import Row, Store, now
from onestem.server.objects.tenants import Tenant

CHUNK_BYTES = 1 << 20


def new_file_row(tenant: str, filename: str, purpose: str) -> Row:
    """The row of a file that is to be stored, with an id of its own and no bytes."""
    return {
        "id": f"file-{secrets.token_hex(12)}",
        "owner": tenant,
        "filename": filename,
        "purpose": purpose,
        "bytes": 0,
        "created_at": now(),
    }


def describe(row: Row) -> dict[str, Any]:
    """A file as OpenAI's API shows it."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created_at"],
        "expires_at": None,
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
    }


async def keep(
    store: Store, tenant: Tenant, filename: str, source: BinaryIO, most_bytes: int
) -> Row:
    """Store what `source` holds as a file of a key, which may have `most_bytes` of files."""
    row = new_file_row(tenant.name, filename, "batch")
    row["bytes"] = await asyncio.to_thread(_save, source, store, row["id"])
    await asyncio.to_thread(store.add_file, row)
    try:
        await asyncio.to_thread(check_room, store, tenant.name, most_bytes)
    except ApiError:
        await asyncio.to_thread(store.delete_file, tenant.name, row["id"])
        raise
    return row


def check_room(store: Store, owner: str, most_bytes: int, more: int = 0) -> None:
    """Raise a 409 where a key's files, and `more` bytes that become one, have over `most_bytes`."""
    used = store.file_bytes(owner) + more
    if used > most_bytes:
        raise ApiError(
            409,
            f"files of this key have {used} bytes, limit is {most_bytes}: delete some "
            "(DELETE /v1/files/ID), or raise the server's max_key_files",
            code="files_full",
        )


def _save(source: BinaryIO, store: Store, file_id: str) -> int:
    try:
        with whole_file(store.files / file_id) as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
            return target.tell()
    except OSError as error:
        raise ApiError(507, f"the file cannot be stored: {error.strerror}") from error


async def find_file(store: Store, tenant: Tenant, file_id: str, param: str = "id") -> Row:
    """The row of a key's file; raises a 404 if it has none of that id, which is in `param`."""
    row = await asyncio.to_thread(store.file, tenant.name, file_id)
    if row is None:
        raise ApiError(404, f"there is no file {show(file_id)}", param=param, code="not_found")
    return row


def page_of(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """A page of a list, in the form that OpenAI's clients page through."""
    start = 0
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(
                400, f"after is {show(after)}, expected the id of an item", param="after"
            )
        start = places[0] + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
