"""/v1/files: upload, list, retrieve, content, delete: OpenAI's shapes, for the inputs and outputs of batches.

A key sees its own files, an admin key all (state/owners.py)."""

from collections.abc import AsyncGenerator
from typing import BinaryIO, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from octavo.errors import InvalidRequest, Unsupported
from octavo.server.batch.files import FILE_ID, MAX_FILENAME_LEN, FileStore, StoredFile, Upload
from octavo.server.batch.stores import StoreHost, open_stores
from octavo.server.http.multipart import Form, read_form
from octavo.server.http.sse import owner_of, viewer_of
from octavo.server.schema.shapes import Shape
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.pools import FILES

FORM_BYTES = 2**20  # of a form beside its file
PIECE = 256 * 1024
FIELDS = frozenset(("purpose", "expires_after[anchor]", "expires_after[seconds]"))
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 24 * 3600
MAX_LIMIT = 10_000


class FileList(msgspec.Struct, frozen=True):
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY, "maximum": MAX_EXPIRY},
    },
    "required": ["file", "purpose"],
}
SHAPES = {
    "POST /v1/files": Shape(
        StoredFile,
        form=FORM,
        leads_to=("GET /v1/files/{file_id}", "GET /v1/files/{file_id}/content", "DELETE /v1/files/{file_id}"),
    ),
    "GET /v1/files": Shape(FileList),
    "GET /v1/files/{file_id}": Shape(StoredFile),
    "GET /v1/files/{file_id}/content": Shape(media=("application/octet-stream",)),
    "DELETE /v1/files/{file_id}": Shape(DeletedFile),
}


def router(service: StoreHost) -> APIRouter:
    router = APIRouter()
    stores = open_stores(service)
    service.body_limits["/v1/files"] = service.config.batches.file_limit + FORM_BYTES

    @router.post("/v1/files")
    async def upload_file(request: Request) -> Response:
        service.accept()
        return await _upload(request, stores().files, service.config.server.strict_fields)

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: int = MAX_LIMIT,
        order: str = "desc",
        after: str | None = None,
    ) -> Response:
        _check_page(limit, order, after)
        found = await FILES.run(stores().files.newest_first, viewer_of(service, request))
        files = [file for file in found if purpose in (None, file.purpose)]
        return json_response(_page(files, limit, order, after))

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(file_id: str, request: Request) -> Response:
        return json_response(await FILES.run(stores().files.get, file_id, viewer_of(service, request)))

    @router.get("/v1/files/{file_id}/content")
    async def file_content(file_id: str, request: Request) -> Response:
        files, viewer = stores().files, viewer_of(service, request)
        size = (await FILES.run(files.get, file_id, viewer)).bytes
        file = await FILES.run(files.open, file_id, viewer)
        headers = {"content-length": str(size)}
        return StreamingResponse(_pieces(file), headers=headers, media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> Response:
        await FILES.run(stores().files.delete, file_id, viewer_of(service, request))
        return json_response(DeletedFile(file_id))

    return router


async def _upload(request: Request, files: FileStore, is_strict: bool) -> Response:
    uploads: list[Upload] = []

    def begin() -> Upload:
        uploads.append(files.begin())
        return uploads[0]

    try:
        form = await read_form(request, "file", begin)
        ignored = _unknown(form, is_strict)
        purpose, expiry = _purpose(form), _expiry(form)
        name = _printable(form.filename or "")
        file = await FILES.run(uploads[0].finish, name, purpose, expiry, owner_of(request))
    finally:
        for upload in uploads:
            upload.discard()
    return json_response(file, ignored)


def _check_page(limit: int, order: str, after: str | None) -> None:
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be between 1 and {MAX_LIMIT}, got {str(limit)[:20]}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order[:20]!r}", param="order")
    if after is not None and not FILE_ID.fullmatch(after):
        raise InvalidRequest("after must be the id of a file", param="after")


def _page(newest_first: list[StoredFile], limit: int, order: str, after: str | None) -> FileList:
    files = newest_first if order == "desc" else newest_first[::-1]
    if after is not None:
        files = [file for file in files if (file.id > after if order == "asc" else file.id < after)]
    page = files[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return FileList(page, first, last, len(files) > limit)


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with file:
        while piece := await FILES.run(file.read, PIECE):
            yield piece


def _unknown(form: Form, is_strict: bool) -> list[str]:
    unknown = [name for name in form.fields if name not in FIELDS]
    if unknown and is_strict:
        raise Unsupported(f"unknown field {unknown[0]!r}", param=unknown[0])
    return unknown


def _purpose(form: Form) -> Literal["batch"]:
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise InvalidRequest("purpose is missing", param="purpose")
    if purpose != "batch":
        raise Unsupported(
            f"purpose must be batch, got {purpose[:40]!r}: no other purpose is supported", param="purpose"
        )
    return "batch"


def _expiry(form: Form) -> int | None:
    anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after[anchor] must be created_at", param="expires_after[anchor]")
    if not (seconds and seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise InvalidRequest("expires_after[seconds] must be a whole number", param="expires_after[seconds]")
    return check_expiry(int(seconds), "expires_after[seconds]")


def check_expiry(seconds: int, param: str) -> int:
    if not MIN_EXPIRY <= seconds <= MAX_EXPIRY:
        given = str(seconds)[:20]
        raise InvalidRequest(f"{param} must be between {MIN_EXPIRY} and {MAX_EXPIRY}, got {given}", param=param)
    return seconds


def _printable(name: str) -> str:
    """A label, never a path: the server names files on disk itself."""
    return "".join(character for character in name if character.isprintable())[:MAX_FILENAME_LEN] or "file"
