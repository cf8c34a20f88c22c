"""The client of an engine that runs on a thread of this process, without sockets: for tests and single-process use."""

import asyncio
import contextlib
import queue
import threading

from octavo.client.client import EngineClient
from octavo.engine.build import Engine
from octavo.engine.driver import Driver, Inbox
from octavo.errors import EngineDead
from octavo.messages import FromEngine, Hello, ToEngine


class InProcessClient(EngineClient):
    """Runs the engine's driver on a thread. Must be made on the event loop that uses it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._event_loop = asyncio.get_running_loop()
        self._inbox: Inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drive, name="octavo-engine", daemon=True)
        self._receive(engine.report)
        self._thread.start()

    def fail_open(self, error: EngineDead) -> None:
        """End every open request and call with this error."""
        self._fail(error)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._engine.loop.close()

    def _send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _drive(self) -> None:
        # The driver has already sent Dying to the client.
        with contextlib.suppress(Exception):
            Driver(self._engine, self._inbox, self).run()

    # ── the driver's outbox ──

    def connect(self, hello: Hello) -> None:
        raise AssertionError("there is no Hello within one process")

    def send(self, origin: int, message: FromEngine) -> None:
        self._event_loop.call_soon_threadsafe(self._receive, message)

    def send_all(self, message: FromEngine) -> None:
        self.send(0, message)
