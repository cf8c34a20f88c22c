"""Pool: which models are loaded. Where not all of them may be loaded at once, models take turns: one that is asked for has another leave,
which first finishes its responses and has stayed for a minimum time."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence

from octavo.errors import EngineUnavailable, Overloaded
from octavo.server.gateway.catalog import ServedModel
from octavo.server.gateway.model_server import ModelServer

log = logging.getLogger("octavo.gateway")

LOOK_SECONDS = 0.25
MAX_WAITING = 1024  # requests that wait for one model to be loaded
RETRY_SECONDS = 5
BATCH_SECONDS = 1.0  # between two looks for batches
BATCH_QUIET_SECONDS = 10.0  # without a request, after which a model leaves for one with batches
FIRST_DELAY, MAX_DELAY = 1.0, 30.0  # seconds before a server that has ended is started again; it doubles each time


class Pool:
    """`max_loaded`: models in memory at once; 0: all. `idle_seconds`: without a request after which a model is unloaded; 0: never.
    `sleep_level`: 1: a model that leaves keeps its weights in host memory; 2: it ends.
    `min_seconds`: that a model stays once it is loaded. `find_batches`: names of models that have batches to run; called in a thread.
    `keep`: names of models that stay loaded."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        max_loaded: int,
        idle_seconds: float,
        min_seconds: float,
        on_demand: bool,
        find_batches: Callable[[], set[str]] = set,
        make: Callable[[ServedModel], ModelServer] = ModelServer,
        keep: Collection[str] = (),
        sleep_level: int = 2,
    ) -> None:
        self.servers = {model.name: make(model) for model in models}
        self._keep = keep
        self.default = next(iter(self.servers.values()))
        self._max_loaded, self._idle_seconds, self._min_seconds = max_loaded or len(models), idle_seconds, min_seconds
        self.is_kept = not on_demand and not idle_seconds and not max_loaded  # all models are to be there all the time
        self._on_demand = on_demand
        self._sleep_level = sleep_level
        self._find_batches = find_batches
        self._changed = asyncio.Condition()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, tuple[float, float]] = {}  # name → (when, delay) of a server that has ended
        self._leaving: set[asyncio.Task[None]] = set()
        self.is_closing = False

    async def begin(self) -> None:
        """Load what is to be loaded at the start, one after the other: each measures the memory that is left. Raises EngineUnavailable."""
        kept = [self.servers[name] for name in self._keep]
        others = [] if self._on_demand else [each for each in self.servers.values() if each not in kept]
        for server in [*kept, *others][: max(len(kept), self._max_loaded)]:
            await self._load(server)

    async def acquire(self, server: ModelServer) -> None:
        """Have a response in progress at a server, which is loaded first if it is not. Raises EngineUnavailable. To be followed by
        release()."""
        while True:
            if self.is_closing:
                raise EngineUnavailable("the server is shutting down and accepts no new requests", 5)
            if server.state == "ready":
                server.open += 1
                server.last_used = time.monotonic()
                return
            wait = self._retry_in(server)
            if server.state == "failed" and wait > 0 and server.name not in self._loads:
                raise EngineUnavailable(f"model {server.name!r} is not available: {server.why}", int(wait) + 1)
            if server.num_waiting >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} requests wait for model {server.name!r} to be loaded", RETRY_SECONDS)
            server.num_waiting += 1
            try:
                await self._load(server)
            finally:
                server.num_waiting -= 1

    async def release(self, server: ModelServer) -> None:
        server.open -= 1
        server.last_used = time.monotonic()
        await self._notify()

    async def wake(self, server: ModelServer) -> None:
        if server.state != "ready":
            await self._load(server)

    async def sleep(self, server: ModelServer, level: int) -> None:
        """Have a model leave when its responses have ended: it keeps its weights in host memory (level 1) or not (2)."""
        if server.state == "ready" or (server.state == "asleep" and level == 2):
            server.is_put_to_sleep = True
            await asyncio.shield(self._begin_leaving(server, level))  # it goes on if the one that asked for it leaves

    async def watch(self) -> None:
        """Run until cancelled: unload idle models, and start servers again that have ended."""
        while True:
            now = time.monotonic()
            for server in self.servers.values():
                if server.state == "ready" and server.has_ended():
                    await self._ended(server, now)
                elif server.state == "ready" and self._is_idle(server, now):
                    log.info("model %s was idle for %g s and leaves", server.name, self._idle_seconds)
                    self._begin_leaving(server, self._sleep_level)
                elif server.state == "asleep" and server.has_ended():
                    log.error(
                        "the server of model %s has ended while it was asleep: %s", server.name, server.describe_end()
                    )
                    await server.stop()
                    server.state = "unloaded"
                elif self._is_due(server):
                    self._begin_load(server)
            await asyncio.sleep(LOOK_SECONDS)

    async def watch_batches(self) -> None:
        """Run until cancelled: load models for their batches, where that takes no model from requests."""
        while True:
            await asyncio.sleep(BATCH_SECONDS)
            waiting = await asyncio.to_thread(self._find_batches)
            for server in self.servers.values():
                server.has_batches = server.name in waiting
            for server in self.servers.values():
                if self._may_load_for_batches(server):
                    log.info("model %s is loaded for its batches", server.name)
                    self._begin_load(server)
                    break  # the next one when this one is there

    def _may_load_for_batches(self, server: ModelServer) -> bool:
        is_wanted = server.has_batches and server.needs_load and not server.is_put_to_sleep
        if not is_wanted or self._loads or self._leaving:
            return False
        now, occupying = time.monotonic(), [each for each in self.servers.values() if each.is_occupying]
        if len(occupying) < self._max_loaded:
            return True
        quiet = max(self._min_seconds, BATCH_QUIET_SECONDS)
        occupying = [each for each in occupying if each.name not in self._keep]
        return any(not e.open and not e.has_batches and now - max(e.last_used, e.ready_at) >= quiet for e in occupying)

    async def close(self) -> None:
        """Stop all servers in order."""
        self.is_closing = True
        running = [*self._loads.values(), *self._leaving]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self.servers.values()))

    def hurry(self) -> None:
        """Have all servers stop at once."""
        for server in self.servers.values():
            server.hurry()

    def _retry_in(self, server: ModelServer) -> float:
        """Seconds until a server that has ended may be started again."""
        return self._retry_at.get(server.name, (0.0, 0.0))[0] - time.monotonic()

    def _is_due(self, server: ModelServer) -> bool:
        """Whether a server that has ended is to be started again now."""
        has_failed = server.state == "failed" and server.name not in self._loads
        is_wanted = self.is_kept or server.name in self._keep
        return has_failed and is_wanted and self._retry_in(server) <= 0

    def _is_idle(self, server: ModelServer, now: float) -> bool:
        if server.name in self._keep:
            return False
        is_unused = not server.open and not server.has_batches and now - server.last_used >= self._idle_seconds
        return bool(self._idle_seconds) and is_unused and now - server.ready_at >= self._min_seconds

    async def _ended(self, server: ModelServer, now: float) -> None:
        server.why, server.state = server.describe_end(), "failed"
        server.upstream.close()
        delay = min(MAX_DELAY, 2 * self._retry_at.get(server.name, (0.0, FIRST_DELAY / 2))[1])
        if now - server.ready_at > 10 * MAX_DELAY:
            delay = FIRST_DELAY
        self._retry_at[server.name] = (now + delay, delay)
        log.error("the server of model %s has ended: %s; the other models serve on", server.name, server.why)
        await self._notify()

    async def _load(self, server: ModelServer) -> None:
        """Wait until the server is ready. All that wait share one load, which goes on if some of them leave."""
        task = self._loads.get(server.name) or self._begin_load(server)
        await asyncio.shield(task)

    def _begin_load(self, server: ModelServer) -> "asyncio.Task[None]":
        task = self._loads[server.name] = asyncio.create_task(self._load_now(server))

        def done(task: "asyncio.Task[None]") -> None:
            self._loads.pop(server.name, None)
            if not task.cancelled():
                task.exception()  # those that wait have got it

        task.add_done_callback(done)
        return task

    async def _load_now(self, server: ModelServer) -> None:
        await self._make_room(server)
        try:
            if not server.keeps_weights:
                await server.start()
            elif not await server.wake_up():
                await server.stop()
                await server.start()
        except BaseException as error:
            await server.stop()
            if isinstance(error, EngineUnavailable):
                delay = min(MAX_DELAY, 2 * self._retry_at.get(server.name, (0.0, FIRST_DELAY / 2))[1])
                self._retry_at[server.name] = (time.monotonic() + delay, delay)
                log.error("%s", error.message)
            server.state = "failed"
            await self._notify()
            raise
        server.state = "ready"
        log.info("model %s is loaded after %.1f s", server.name, server.load_seconds)
        await self._notify()

    async def _make_room(self, server: ModelServer) -> None:
        """Wait until one more model may be loaded, and have others leave for that. `server` is then counted as loading."""
        while True:
            async with self._changed:
                # A model that is still leaving, to be loaded again, has to be gone first.
                others = [each for each in self.servers.values() if each.is_occupying]
                if server.state != "unloading" and len(others) < self._max_loaded:
                    server.state, server.is_put_to_sleep = "loading", False
                    return
                if not any(each.state == "unloading" for each in others):
                    leaver = self._leaver(others)
                    if leaver is not None:
                        log.info(
                            "model %s leaves for %s when its %d responses have ended",
                            leaver.name,
                            server.name,
                            leaver.open,
                        )
                        self._begin_leaving(leaver, self._sleep_level)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_SECONDS)

    def _leaver(self, others: Sequence[ModelServer]) -> ModelServer | None:
        """The model that leaves for another: one without responses and batches before others, then the one that was used least recently.
        None: it has to stay for longer."""
        ready = [each for each in others if each.state == "ready" and each.name not in self._keep]
        first = min(ready, key=lambda each: (each.open > 0, each.has_batches, each.last_used), default=None)
        if first is None or time.monotonic() - first.ready_at < self._min_seconds:
            return None
        return first

    def _begin_leaving(self, server: ModelServer, level: int) -> "asyncio.Task[None]":
        """Take no more requests for a model, and unload it when its responses have ended, but for its weights with level 1."""
        server.state = "unloading"
        task = asyncio.create_task(self._leave(server, level))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def _leave(self, server: ModelServer, level: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not server.open)
        # A server with batches ends: they go on when it is loaded again, and would keep its engine busy until then.
        if level == 1 and not server.has_batches and await server.sleep():
            server.state = "asleep"
            log.info("model %s is asleep and keeps its weights", server.name)
        else:
            await server.stop()
            server.state = "unloaded"
            log.info("model %s is unloaded", server.name)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
