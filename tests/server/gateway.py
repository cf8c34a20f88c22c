"""A gateway in memory, over model servers in this process: real applications on UNIX sockets, over the real engine loop without a model."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from octavo.config import Config, replace, split_list
from octavo.engine.in_process_client import InProcessClient
from octavo.server.app import build_app
from octavo.server.gateway.app import Gateway
from octavo.server.gateway.catalog import ServedModel, read_models
from octavo.server.gateway.model_server import ModelServer
from octavo.server.gateway.pool import Pool
from octavo.server.gateway.serve import GATEWAY_PART
from octavo.server.gateway.shared import Shared
from tests.doubles import byte_text
from tests.server.running import engine


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LocalServer(ModelServer):
    """A model's server in this process. `seconds`: of a step. While `gate` is not set, loads wait."""

    def __init__(self, model: ServedModel, seconds: float, gate: asyncio.Event) -> None:
        super().__init__(model)
        self._seconds, self._gate = seconds, gate
        self._work: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self.started = time.monotonic()
        await self._gate.wait()
        self.client = InProcessClient(engine(num_pages=256, seconds=self._seconds))
        self.app = build_app(self.client, byte_text(), self.config, self.name)
        options = {"uds": self.config.server.uds, "lifespan": "off", "log_config": None, "ws": "none"}
        self._http = _Uvicorn(uvicorn.Config(self.app, timeout_graceful_shutdown=1, **options))
        self._work = [
            asyncio.create_task(self._http.serve()),
            asyncio.create_task(self.app.state.service.run_background()),
        ]
        await eventually(lambda: self._http.started)
        self.note_ready()

    async def stop(self) -> None:
        self.upstream.close()
        if not self._work:
            return
        self._http.should_exit = True
        serving, background = self._work
        background.cancel()
        await asyncio.gather(serving, background, return_exceptions=True)
        self.app.state.service.compiler.close()
        self.app.state.service.tenants.close()
        self.client.close()
        self._work = []


class House:
    def __init__(self, app: Gateway, pool: Pool, shared: Shared, gate: asyncio.Event, looks: list[None]) -> None:
        self.app, self.pool, self.shared, self.gate = app, pool, shared, gate
        self._looks = looks
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=60)

    @property
    def num_looks(self) -> int:
        """For batches."""
        return len(self._looks)

    def server(self, name: str) -> LocalServer:
        found = self.pool.servers[name]
        assert isinstance(found, LocalServer)
        return found

    async def until(self, name: str, state: str) -> None:
        await eventually(lambda: self.pool.servers[name].state == state)


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, models: str = "one=x,two=y", seconds: float = 0.002, **options: Any
) -> AsyncIterator[House]:
    """`seconds`: of a step of an engine; `options`: of the configuration."""
    gate = asyncio.Event()
    gate.set()
    config = replace(Config(), models=models, files_folder=str(folder), files_part=GATEWAY_PART, **options)
    with tempfile.TemporaryDirectory(prefix="octavo-") as sockets:
        served = read_models(config, Path(sockets))
        shared = Shared(config, {model.name: model.config for model in served})
        wishes = config.models
        looks: list[None] = []

        def find_batches() -> set[str]:
            looks.append(None)
            return shared.models_with_batches()

        pool = Pool(
            served, wishes.max_loaded_models, wishes.model_idle_seconds, wishes.model_min_seconds, wishes.load_on_demand,
            find_batches, lambda model: LocalServer(model, seconds, gate), split_list(wishes.keep_loaded), wishes.model_sleep_level,
        )  # fmt: skip
        await pool.begin()
        watching = [asyncio.create_task(work()) for work in (pool.watch, pool.watch_batches)]
        house = House(Gateway(config, pool, shared), pool, shared, gate, looks)
        try:
            yield house
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await house.http.aclose()
            await pool.close()
            shared.close()
