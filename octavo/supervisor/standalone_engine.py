"""StandaloneEngine: an engine process for one caller, for the duration of a context, without a supervisor and without HTTP."""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from octavo.client.client import ZmqClient
from octavo.config import Config, offline
from octavo.errors import EngineDead
from octavo.ipc.launch import EngineLaunch
from octavo.ipc.subprocesses import describe_exit, spawn
from octavo.supervisor.runtime_dir import RuntimeDir
from octavo.weights.sources.source import resolve

ENGINE_MODULE = "octavo.engine.process"
STOP_SECONDS = 5.0  # an engine that has not ended by then is killed
T = TypeVar("T")


class StandaloneEngine:
    """An async context manager. The constructor raises ConfigError if the model cannot be found."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self._config = offline(config)
        self._source = resolve(
            model.model,
            model.revision,
            allow_missing_weights=model.load_format == "dummy",
            download_dir=model.download_dir,
        )
        self.name = model.name_of(self._source.name)
        self._folder = RuntimeDir()

    @property
    def model_path(self) -> str:
        return str(self._source.path)

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        return self._source.default_sampling

    async def __aenter__(self) -> "StandaloneEngine":
        address, source = f"ipc://{self._folder.path}/engine", self._source
        launch = EngineLaunch(self._config, self.model_path, source.kind, source.name, self.name, address, 1)
        self._process = spawn(ENGINE_MODULE, launch)
        self._ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        self.client = ZmqClient(address, f"ipc://{self._folder.path}/api-0")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.client.close()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        await asyncio.wait({self._ended}, timeout=STOP_SECONDS)
        if not self._ended.done():
            self._process.kill()
        self._process.stdout.close()
        await self._ended
        self._folder.close()

    async def ended(self) -> int:
        """Wait for the engine process to end and return its exit code. 2: a start-up error, which it has logged."""
        return await asyncio.shield(self._ended)

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises EngineDead if the engine ends first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineDead(f"the engine ended unexpectedly ({describe_exit(self._ended.result())})")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
