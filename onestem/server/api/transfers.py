"""Files on their way in and out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from onestem.checked import show
from onestem.server.api.limits import check_media_type, limited
from onestem.server.errors import ApiError


@asynccontextmanager
async def uploaded(request: Request, limit: int) -> AsyncIterator[UploadFile]:
    """The file of a multipart body of `limit` bytes at most."""
    check_media_type(request, "multipart/form-data")
    try:
        bounded = await limited(request, limit)
        form = await bounded.form(max_files=1, max_fields=4)
    except (MultiPartException, HTTPException) as error:
        reason = error.message if isinstance(error, MultiPartException) else error.detail
        raise ApiError(400, f"the body is not a good form: {reason}") from error
    try:
        yield _file_of(form)
    finally:
        await form.close()


def _file_of(form: FormData) -> UploadFile:
    for name in form:
        if name not in ("file", "purpose"):
            raise ApiError(400, f"unknown field in body: {show(name)}", param=name)
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "body has no file", param="file")
    if purpose != "batch":
        raise ApiError(400, f"purpose is {show(purpose)}, expected 'batch'", param="purpose")
    return file


class Download(FileResponse):
    """A file, or the part of it that a `Range` asks for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def checked(message: Message) -> None:
            status = message.get("status")
            if status in (400, 416):  # in plain text
                raise ApiError(
                    status,
                    f"range is {show(Headers(scope=scope).get('range'))}, expected parts of the "
                    f"file like bytes=0-99; it has {Path(self.path).stat().st_size} bytes",
                    code="bad_range",
                )
            await send(message)

        await super().__call__(scope, receive, checked)
