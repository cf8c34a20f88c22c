"""ModelServer: one model's server as a process, and what is known of it."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from typing import Literal

import msgspec

from octavo.config import KEY_VARIABLES
from octavo.errors import EngineUnavailable
from octavo.ipc.subprocesses import describe_exit
from octavo.server.gateway.catalog import ServedModel
from octavo.server.gateway.upstream import Upstream, UpstreamGone

log = logging.getLogger("octavo.gateway")

State = Literal["unloaded", "loading", "ready", "unloading", "asleep", "failed"]

LOOK_SECONDS = 0.1  # between two questions whether a server is ready
KILL_SECONDS = 10.0  # beyond --shutdown-timeout, after which a server that does not end is killed
SLEEP_SECONDS = 60.0  # that an engine without requests may take to give memory back, or to wake up
MAX_LINE = 4096  # bytes of a line of a log


class ModelServer:
    """Owned by the Pool, which decides when it is loaded. `open`: responses in progress: it is not stopped before they have ended.
    `num_waiting`: requests that wait for it to be loaded."""

    def __init__(self, model: ServedModel) -> None:
        self.name, self.config = model
        self.state: State = "unloaded"
        self.upstream = Upstream(model.config.server.uds)
        self.open = self.num_waiting = 0
        self.last_used = self.ready_at = self.started = time.monotonic()
        self.num_loads = 0
        self.has_batches = False  # that have not ended
        self.keeps_weights = False  # it sleeps at level 1: its processes run
        self.is_put_to_sleep = False  # by an administrator: batches do not wake it
        self.why = ""  # the last load failed, or the server ended
        self.load_seconds = 0.0  # of the last load
        self.process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=20)
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_occupying(self) -> bool:
        """Whether it takes memory for KV pages. One that is asleep takes that of its weights, or none."""
        return self.state in ("loading", "ready", "unloading")

    @property
    def needs_load(self) -> bool:
        """Whether a load has to come before a request can run: its weights are kept (asleep), or nothing is (unloaded). One that has failed is not
        loaded by itself."""
        return self.state in ("asleep", "unloaded")

    @property
    def is_sleeping(self) -> bool:
        """The answer of /is_sleeping: it sleeps at level 1 (asleep) or at level 2 (unloaded)."""
        return self.state in ("asleep", "unloaded")

    async def start(self) -> None:
        """Start the server and wait until it takes requests. Raises EngineUnavailable."""
        self.started, self.why = time.monotonic(), ""
        self._lines.clear()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octavo.server.gateway.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in KEY_VARIABLES},
            start_new_session=True,  # Ctrl-C reaches the gateway alone
            limit=MAX_LINE * 16,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.config) + b"\n")
        self._reading = asyncio.create_task(self._read(self.process))
        while not await self.upstream.answers("/health/ready"):
            if self.process.returncode is not None:
                await self._reading
                self.why = self._reason(self.process.returncode)
                raise EngineUnavailable(f"model {self.name!r} could not be loaded: {self.why}", 5)
            await asyncio.sleep(LOOK_SECONDS)
        self.note_ready()

    async def sleep(self) -> bool:
        """Have the engine give its memory back, but for the weights. False: it does not."""
        self.keeps_weights = await self._ask_engine(b"/sleep?level=1", b'{"is_sleeping":true}')
        self.upstream.close()
        return self.keeps_weights

    async def wake_up(self) -> bool:
        """Go on after sleep(). False: the server has to be started anew."""
        self.started, self.keeps_weights = time.monotonic(), False
        if not await self._ask_engine(b"/wake_up", b'{"is_sleeping":false}'):
            return False
        self.note_ready()
        return True

    async def _ask_engine(self, target: bytes, expected: bytes) -> bool:
        server, headers = self.config.server, [(b"host", b"localhost")]
        if server.admin_keys:
            headers.append((b"authorization", b"Bearer " + server.admin_keys[0].encode()))
        elif server.api_keys:
            log.warning(
                "model %s cannot keep its weights while it sleeps: keys are used, and none is an --admin-key", self.name
            )
            return False
        try:
            status, body = await self.upstream.ask(target, headers, SLEEP_SECONDS, "POST")
        except UpstreamGone as error:
            log.warning("model %s: its server does not answer: %s", self.name, error)
            return False
        if (status, body) != (200, expected):
            log.warning("model %s: its server answered with %d to %s", self.name, status, target.decode())
        return (status, body) == (200, expected)

    def note_ready(self) -> None:
        """Count a load that has ended."""
        self.ready_at = self.last_used = time.monotonic()
        self.load_seconds = self.ready_at - self.started
        self.num_loads += 1

    async def stop(self) -> None:
        """Stop the server in order, and wait for its end. Its requests get --shutdown-timeout."""
        self.keeps_weights = False
        self.upstream.close()
        process = self.process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self.config.server.shutdown_timeout + KILL_SECONDS):
                    await process.wait()
            except TimeoutError:
                log.error("model %s does not stop and is killed", self.name)
                process.kill()
                await process.wait()
        self.process = None
        if self._reading is not None:
            await self._reading

    def hurry(self) -> None:
        """Have the server stop at once: a second signal tells it so."""
        if self.process is not None and self.process.returncode is None:
            for _ in range(2):
                self.process.send_signal(signal.SIGTERM)

    def has_ended(self) -> bool:
        """Whether its process has ended without being asked."""
        return self.process is not None and self.process.returncode is not None

    def describe_end(self) -> str:
        assert self.process is not None and self.process.returncode is not None
        return self._reason(self.process.returncode)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass the server's log on, with its name before each line."""
        assert process.stderr is not None
        is_json = self.config.server.log_format == "json"
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than the buffer: dropped
                continue
            if not line:
                return
            text = line[:MAX_LINE].decode("utf-8", "replace").rstrip()
            self._lines.append(text)
            if "ready after " in text:  # the gateway has an address of its own
                continue
            if is_json:
                os.write(2, f"{text}\n".encode())
            else:
                log.info("[%s] %s", self.name, text.removeprefix("octavo: "))

    def _reason(self, code: int) -> str:
        said = [line.partition("error: ")[2] for line in self._lines if "error: " in line]
        return said[-1] if said else f"its server ended ({describe_exit(code)})"
