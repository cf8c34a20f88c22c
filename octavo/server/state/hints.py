"""Hints: what other limits would have done for the last minutes' requests, simulated from the recording (plan/advise.py). A process of its own does
it, at the lowest priority, when a client asks; its answer, or that there was none, is kept for a while: clients that ask in a loop start no more."""

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
        self._body = b""  # empty: there was no answer
        self._made = -KEPT_SECONDS
        self._making: asyncio.Task[None] | None = None

    async def get(self) -> bytes:
        """JSON of plan.advise.Hint. Those who ask at the same time get the same. Raises NotFound where nothing is recorded."""
        if not self.recording:
            raise NotFound("there is no recording of one engine to simulate: a fleet, or --record-bytes 0")
        if time.monotonic() - self._made >= KEPT_SECONDS:
            if self._making is None:
                self._making = asyncio.create_task(self._make())
            await asyncio.shield(self._making)
        if not self._body:
            raise EngineUnavailable("the last minutes could not be simulated in time: try again later", retry_after=60)
        return self._body

    async def _make(self) -> None:
        self._body = b""
        try:
            self._body = await self._simulate()
        finally:
            self._made, self._making = time.monotonic(), None

    async def _simulate(self) -> bytes:
        """Empty where the process did not end in time, or failed."""
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, self.recording, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )  # fmt: skip
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                body, _ = await process.communicate()
        except TimeoutError:
            return b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return b"" if process.returncode else body.strip()
