"""Hints: what other limits would have done for the last minutes' requests, simulated from the recording (plan/advise.py). A process of its own does
it, at the lowest priority, when a client asks; its answer, or that there was none, is kept for a while: clients that ask in a loop start no more."""

import asyncio
import contextlib
import signal
import sys
import time

from octavo.errors import EngineUnavailable, NotFound
from octavo.ipc.subprocesses import describe_exit

KEPT_SECONDS = 60.0
LIMIT_SECONDS = 120.0
"""On the clock: the process only gets what others leave."""
MEMORY_BYTES = 2 * 2**30
"""That the process may allocate beyond what it has after its start. A recording of 6 MiB took 230 MiB."""
EXIT_MEMORY = 3
"""Exit code of a process that has reached MEMORY_BYTES."""
_COMMAND = (sys.executable, "-m", "octavo.cli.planning.background")


class Hints:
    def __init__(self) -> None:
        self.recording = ""  # folder that the engine writes to; empty: there is none, or there are several engines
        self._body = b""  # empty: there was no answer
        self._why_not = ""  # why there was none
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
            raise EngineUnavailable(
                f"the last minutes could not be simulated: {self._why_not}; try again later", retry_after=60
            )
        return self._body

    async def _make(self) -> None:
        self._body, self._why_not = b"", "the process was not started"
        try:
            self._body, self._why_not = await self._simulate()
        finally:
            self._made, self._making = time.monotonic(), None

    async def _simulate(self) -> tuple[bytes, str]:
        """JSON, or nothing and why."""
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            self.recording,
            str(MEMORY_BYTES),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                body, _ = await process.communicate()
        except TimeoutError:
            return b"", f"that took more than {LIMIT_SECONDS:g} s at the lowest priority"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        assert process.returncode is not None, "communicate() waits for the end"
        return (b"", _reason(process.returncode)) if process.returncode else (body.strip(), "")


def _reason(code: int) -> str:
    """Why a process that has ended with this code gave no answer."""
    if code == EXIT_MEMORY:
        return f"that takes more than {MEMORY_BYTES >> 20} MiB of memory"
    if code == -signal.SIGXCPU:
        return "that takes more processor time than it may have"
    return f"the process failed ({describe_exit(code)})"
