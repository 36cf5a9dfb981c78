"""/v1/files: what is uploaded for batches, and what they write."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from onestem.checked import show
from onestem.server.errors import ApiError
from onestem.server.foreign import check_media_type
from onestem.server.limits import limited
from onestem.server.store import Row, Store
from onestem.server.tenants import Tenant

__all__ = ["describe", "find_file", "new_file_row", "page_of", "upload"]

CHUNK_BYTES = 1 << 20


def new_file_row(tenant: str, filename: str, purpose: str) -> Row:
    return {
        "id": f"file-{secrets.token_hex(12)}",
        "owner": tenant,
        "filename": filename,
        "purpose": purpose,
        "bytes": 0,
        "created_at": int(time.time()),
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


async def upload(request: Request, tenant: Tenant, store: Store, limit: int) -> Row:
    """Store the file of a multipart body."""
    check_media_type(request, "multipart/form-data")
    try:
        bounded = await limited(request, limit)
        form = await bounded.form(max_files=1, max_fields=4)
    except (MultiPartException, HTTPException) as error:
        reason = error.message if isinstance(error, MultiPartException) else error.detail
        raise ApiError(400, f"the body is not a good form: {reason}") from error
    try:
        file = _checked(form)
        row = new_file_row(tenant.name, file.filename or "upload.jsonl", "batch")
        row["bytes"] = await asyncio.to_thread(_save, file, store, row["id"])
        await asyncio.to_thread(store.add_file, row)
        return row
    finally:
        await form.close()


def _checked(form: FormData) -> UploadFile:
    for name in form:
        if name not in ("file", "purpose"):
            raise ApiError(400, f"unknown field in body: {show(name)}", param=name)
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "body has no file", param="file")
    if purpose != "batch":
        raise ApiError(400, f"purpose is {show(purpose)}, expected 'batch'", param="purpose")
    return file


def _save(file: UploadFile, store: Store, file_id: str) -> int:
    path = store.files / file_id
    draft = path.with_suffix(".draft")
    try:
        with open(draft, "wb") as target:
            while chunk := file.file.read(CHUNK_BYTES):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
            size = target.tell()
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ApiError(507, f"the file cannot be stored: {error.strerror}") from error
    return size


async def find_file(store: Store, tenant: Tenant, file_id: str) -> Row:
    row = await asyncio.to_thread(store.file, tenant.name, file_id)
    if row is None:
        raise ApiError(404, f"there is no file {show(file_id)}", param="id", code="not_found")
    return row


def page_of(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """A page of a list, as OpenAI's clients walk through it."""
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
