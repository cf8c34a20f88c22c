"""Hints: what other limits would have done for the last minutes' requests, simulated from the recording (plan/advise.py). A process of its own does
it, at the lowest priority, when a client asks; its answer is kept for a while."""

import asyncio
import contextlib
import sys
import time

from octavo.errors import EngineUnavailable, NotFound

KEPT_SECONDS = 60.0
LIMIT_SECONDS = 120.0
"""On the clock: the process only gets what others leave."""
_COMMAND = (sys.executable, "-m", "octavo.cli.planning.background")


class Hints:
    def __init__(self) -> None:
        self.recording = ""  # folder that the engine writes to; empty: there is none, or there are several engines
        self._body = b""
        self._made = 0.0
        self._making: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """JSON of plan.advise.Hint. Calls at the same time share one simulation. Raises NotFound where nothing is recorded."""
        if not self.recording:
            raise NotFound("there is no recording of one engine to simulate: a fleet, or --record-bytes 0")
        if self._body and time.monotonic() - self._made < KEPT_SECONDS:
            return self._body
        if self._making is None:
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made_now)
        return await asyncio.shield(self._making)

    def _made_now(self, task: asyncio.Task[bytes]) -> None:
        self._making = None
        if not task.cancelled() and task.exception() is None:
            self._body, self._made = task.result(), time.monotonic()

    async def _make(self) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, self.recording, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )  # fmt: skip
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                body, _ = await process.communicate()
        except TimeoutError:
            body = b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if not body or process.returncode:
            raise EngineUnavailable("the last minutes could not be simulated in time: try again later", retry_after=60)
        return body.strip()
