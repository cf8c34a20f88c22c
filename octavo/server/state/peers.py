"""Queries between the API processes of one server: a connection may reach any of them, and ask for what another one has.

Bytes over UNIX sockets, in a folder that only this user can enter: one JSON line with the query, one with the reply, then
chunks, each after its length; length 0 is the end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import msgspec

from octavo.errors import EngineUnavailable, InvalidRequest

log = logging.getLogger("octavo.server")

MAX_QUESTION = 16 * 1024  # bytes: more than any id needs, and less than a reader of lines takes
PATIENCE_SECONDS = 5.0  # waiting for a process that does not answer
CONNECTION_LOST = "the API process that served this has ended"

Handler = Callable[[bytes], AsyncGenerator[bytes, None] | None]
"""A query of one kind → its answer in chunks, now or as they come. None: this process has none. It may raise InvalidRequest: it
has one, but not the requested part."""


class _Question(msgspec.Struct, frozen=True):
    kind: str
    body: bytes


class _Reply(msgspec.Struct, frozen=True):
    is_found: bool
    refusal: str = ""  # found, but not available as requested
    param: str | None = None  # what the refusal is about


class Peers:
    """Has no other processes to ask until it is opened."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._folder: Path | None = None
        self._own: Path | None = None
        self._server: asyncio.Server | None = None

    def handle(self, kind: str, handler: Handler) -> None:
        """Register the handler of queries of this kind."""
        self._handlers[kind] = handler

    async def open(self, folder: Path, origin: int) -> None:
        self._folder, self._own = folder, folder / f"sibling-{origin}"
        self._server = await asyncio.start_unix_server(self._serve, self._own)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def ask(self, kind: str, body: bytes) -> AsyncGenerator[bytes, None] | None:
        """The answer of the first process that has one. None: none has. Raises InvalidRequest where one refuses."""
        if self._folder is None:
            return None
        question = msgspec.json.encode(_Question(kind, body)) + b"\n"
        if len(question) > MAX_QUESTION:  # with an id that no process has given
            return None
        for path in sorted(self._folder.glob("sibling-*")):
            if path == self._own:
                continue
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    reply, reader, writer = await _put(question, path)
            except (OSError, TimeoutError, msgspec.DecodeError):  # it has ended, or is about to
                continue
            if reply.is_found and not reply.refusal:
                return _chunks(reader, writer)
            writer.close()
            if reply.is_found:
                raise InvalidRequest(reply.refusal, param=reply.param)
        return None

    async def ask_whole(self, kind: str, body: bytes) -> bytes | None:
        chunks = await self.ask(kind, body)
        return None if chunks is None else b"".join([chunk async for chunk in chunks])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            question = msgspec.json.decode(await reader.readline(), type=_Question)
            handler = self._handlers.get(question.kind)
            try:
                chunks = None if handler is None else handler(question.body)
            except InvalidRequest as error:
                return writer.write(_line(_Reply(True, error.message, error.param)))
            writer.write(_line(_Reply(chunks is not None)))
            if chunks is None:
                return None
            sending = asyncio.create_task(_send(chunks, writer, question.kind))
            gone = asyncio.create_task(
                reader.read()
            )  # no more input is expected: its end means that the other side has gone
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)


async def _put(question: bytes, path: Path) -> tuple[_Reply, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(question)
        return msgspec.json.decode(await reader.readline(), type=_Reply), reader, writer
    except BaseException:
        writer.close()
        raise


async def _send(chunks: AsyncGenerator[bytes, None], writer: asyncio.StreamWriter, kind: str) -> None:
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                writer.write(len(chunk).to_bytes(4, "big") + chunk)
                await writer.drain()
        except OSError:
            return
        except Exception:  # without the end mark the other side sees that it is incomplete
            log.exception("an answer to another API process about %s failed", kind)
            return
        writer.write((0).to_bytes(4, "big"))
        await writer.drain()


async def _chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncGenerator[bytes, None]:
    with contextlib.closing(writer):
        try:
            while size := int.from_bytes(await reader.readexactly(4), "big"):
                yield await reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            raise EngineUnavailable(CONNECTION_LOST) from None


def _line(reply: _Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"
