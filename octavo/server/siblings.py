"""The other API processes of one server: a stream that can be resumed may live in any of them, and a connection may reach any.
Knows nothing of HTTP: a log's bytes pass from process to process over UNIX sockets, in a folder that only this user can enter.

On the wire: one JSON line with what is asked, one with the answer, then chunks behind their length; length 0 is the end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec

from octavo.errors import EngineUnavailable, InvalidRequest, OctavoError
from octavo.server.errors_http import error_event
from octavo.server.resume import StreamLogs

log = logging.getLogger("octavo.server")

PATIENCE_SECONDS = 5.0  # with a process that does not answer
CONNECTION_LOST = "the API process that holds this stream has ended"


class Question(msgspec.Struct, frozen=True):
    stream_id: str
    owner: bytes
    start: int


class Answer(msgspec.Struct, frozen=True):
    is_found: bool
    refusal: str = ""  # found, but not to be read from there


class Siblings:
    def __init__(self, folder: Path, origin: int, logs: StreamLogs) -> None:
        self._folder, self._own = folder, folder / f"streams-{origin}"
        self._logs = logs
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._own)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def find(self, stream_id: str, owner: bytes, start: int) -> AsyncGenerator[bytes, None] | None:
        """The events, from whichever process has them. None: none has. Raises InvalidRequest where `start` is not kept."""
        question = msgspec.json.encode(Question(stream_id, owner, start)) + b"\n"
        for path in sorted(self._folder.glob("streams-*")):
            if path == self._own:
                continue
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    reader, writer = await asyncio.open_unix_connection(path)
                    writer.write(question)
                    answer = msgspec.json.decode(await reader.readline(), type=Answer)
            except (OSError, TimeoutError, msgspec.DecodeError):  # it has ended, or is about to
                continue
            if answer.is_found and not answer.refusal:
                return _chunks(reader, writer)
            writer.close()
            if answer.is_found:
                raise InvalidRequest(answer.refusal, param="from")
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            question = msgspec.json.decode(await reader.readline(), type=Question)
            found = self._logs.find(question.stream_id, question.owner)
            if found is None:
                return writer.write(_line(Answer(False)))
            try:
                found.check(question.start)
            except InvalidRequest as error:
                return writer.write(_line(Answer(True, error.message)))
            writer.write(_line(Answer(True)))
            sending = asyncio.create_task(_send(found.read(question.start), writer, question.stream_id))
            gone = asyncio.create_task(reader.read())  # nothing more is said: its end is the other side's
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)


async def _send(events: AsyncGenerator[bytes, None], writer: asyncio.StreamWriter, stream_id: str) -> None:
    async with aclosing(events):
        try:
            async for chunk in events:
                await _put(writer, chunk)
        except OctavoError as error:  # what the stream ends with
            await _put(writer, error_event(error, stream_id))
        except OSError:
            return
        except Exception as error:
            log.exception("stream %s failed", stream_id)
            await _put(writer, error_event(error, stream_id))
        writer.write((0).to_bytes(4, "big"))
        await writer.drain()


async def _put(writer: asyncio.StreamWriter, chunk: bytes) -> None:
    writer.write(len(chunk).to_bytes(4, "big") + chunk)
    await writer.drain()


async def _chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncGenerator[bytes, None]:
    with contextlib.closing(writer):
        try:
            while size := int.from_bytes(await reader.readexactly(4), "big"):
                yield await reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            raise EngineUnavailable(CONNECTION_LOST) from None


def _line(answer: Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
