"""Pulls a model in a thread, and reports its progress as Ollama's clients read it: line by line, or its end alone."""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.errors import ConfigError, InvalidRequest, RequestFailed
from octavo.server.http.ndjson import line
from octavo.server.threads import Pool
from octavo.weights.sources.hub_api import HubTrouble
from octavo.weights.sources.names import ModelName, require_name
from octavo.weights.sources.pull import PullReport, pull

PULLS = Pool("model downloads", num_threads=1, max_waiting=4)


class PullStatus(msgspec.Struct, frozen=True):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class Done(msgspec.Struct, frozen=True):
    status: Literal["success"] = "success"


class _ClientGone(Exception):
    pass


def parse_name(name: str) -> ModelName:
    try:
        return require_name(name)
    except ConfigError as error:
        raise InvalidRequest(error.message, param="model") from None


class PullWriter:
    """One pull. A client that disconnects ends it; the next pull of the model continues."""

    def __init__(self, name: ModelName, max_store_bytes: int) -> None:
        self._name, self._max_store_bytes = name, max_store_bytes

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._reports()) as reports:
            async for report in reports:
                yield line(_status(report))

    async def collect(self) -> Done:
        async with aclosing(self._reports()) as reports:
            async for _ in reports:
                pass
        return Done()

    async def _reports(self) -> AsyncGenerator[PullReport, None]:
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[PullReport | None] = asyncio.Queue()
        is_left = threading.Event()

        def on_report(report: PullReport) -> None:
            if is_left.is_set():
                raise _ClientGone
            loop.call_soon_threadsafe(arrivals.put_nowait, report)

        work = functools.partial(pull, self._name, on_report, max_store_bytes=self._max_store_bytes)
        pulling = PULLS.submit(work)
        pulling.add_done_callback(lambda _: arrivals.put_nowait(None))
        try:
            while (report := await arrivals.get()) is not None:
                yield report
            await pulling
        except HubTrouble as error:
            raise RequestFailed(error.message) from None
        except ConfigError as error:
            raise InvalidRequest(error.message, param="model") from None
        finally:
            is_left.set()
            if not pulling.cancel() and pulling.done() and not pulling.cancelled():
                pulling.exception()  # read, so that asyncio does not log it


def _status(report: PullReport) -> PullStatus:
    if not report.total:
        return PullStatus(report.status)
    digest = f"sha256:{report.digest}" if report.digest else UNSET
    return PullStatus(report.status, digest, report.total, report.completed)
