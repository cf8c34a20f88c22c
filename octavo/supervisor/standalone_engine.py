"""StandaloneEngine: an engine process for one caller, for as long as a context lasts: without a supervisor and without HTTP.
Knows nothing of requests or text."""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from octavo.client.client import ZmqClient
from octavo.config import Config
from octavo.errors import EngineDead
from octavo.ipc.launch import EngineLaunch
from octavo.ipc.subprocesses import describe_exit, spawn
from octavo.supervisor.runtime_dir import RuntimeDir
from octavo.weights.sources.source import resolve

ENGINE_MODULE = "octavo.engine.process"
FAREWELL_SECONDS = 5.0  # after which an engine that does not end is killed
T = TypeVar("T")


class StandaloneEngine:
    """Raises ConfigError where the model's name leads nowhere."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self._config = config
        self._source = resolve(model.model, model.revision, allow_missing_weights=model.load_format == "dummy")
        self.name = model.served_model_name or self._source.name
        self._folder = RuntimeDir()

    @property
    def model_path(self) -> str:
        return str(self._source.path)

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        return self._source.default_sampling

    async def __aenter__(self) -> "StandaloneEngine":
        address, source = f"ipc://{self._folder.path}/engine", self._source
        order = EngineLaunch(self._config, self.model_path, source.kind, source.name, self.name, address, 1)
        self._process = spawn(ENGINE_MODULE, order)
        self._ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        self.client = ZmqClient(address, f"ipc://{self._folder.path}/api-0")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.client.close()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        await asyncio.wait({self._ended}, timeout=FAREWELL_SECONDS)
        if not self._ended.done():
            self._process.kill()
        self._process.stdout.close()
        await self._ended
        self._folder.close()

    async def ended(self) -> int:
        """Its exit code, when it has. 2: it could not start, and has said why."""
        return await asyncio.shield(self._ended)

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, unless the engine ends before it does: then EngineDead."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineDead(f"the engine ended unexpectedly ({describe_exit(self._ended.result())})")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
