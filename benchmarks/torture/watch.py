"""The watcher: a process of its own that streams as well-behaved clients do, probes /health and samples the server's memory while
attacks run. Building and sending an attack's bytes would disturb these measurements in the same process."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.torture.house import family, held
from octavo.cli.bench.http_stream import Client, HTTPFailure, Target

NUM_BYSTANDERS = 3
NUM_TOKENS = 160
_PROBE_S = 0.03
_SAMPLE_S = 0.02
_TICK_S = 0.005
_PROBE_LIMIT_S = 30.0
_MAX_PROBES = 64  # unanswered ones
_CLOSE_LOOK = 96 * 2**20  # growth in resident bytes from which pages shared by forked processes are told apart
_CLOSE_STEP = 32 * 2**20
RUNAWAY = 4 * 2**30
"""Growth at which the server is killed, so that it does not take the machine's memory."""


@dataclass(slots=True)
class Seen:
    """What was seen from `begin` to now."""

    gap: float = 0.0  # longest between two events of a running stream, seconds
    start: float = 0.0  # longest from a bystander's request to its first event
    health: float = 0.0  # longest answer to /health, or age of an unanswered probe
    health_faults: int = 0  # answers other than 200, and connections refused
    memory: int = 0  # bytes of growth at the peak
    lost: list[str] = field(default_factory=list)  # bystanders' streams that failed
    changed: int = 0  # bystanders' answers that differ from the first ones
    lag: float = 0.0  # the watcher's own longest delay: noise of the machine
    was_killed: bool = False  # by the watcher, for its memory
    ages: list[float] = field(default_factory=list)  # seconds since each bystander's last event
    probe_age: float = 0.0  # seconds since the start of the latest probe that was answered


class Watch:
    """The watcher's process, from the outside."""

    def __init__(self, port: int, supervisor: int, key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, inner = context.Pipe()
        self._process = context.Process(target=_main, args=(inner, port, supervisor, key), daemon=True)

    def __enter__(self) -> "Watch":
        self._process.start()
        self._pipe.recv()  # every bystander has its first answer
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.join()

    def begin(self) -> None:
        self._pipe.send("begin")
        self._pipe.recv()

    def look(self) -> Seen:
        self._pipe.send("look")
        found: Seen = self._pipe.recv()
        return found


# ── in its process ──


def _main(pipe: Connection, port: int, supervisor: int, key: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Watcher(pipe, port, supervisor, key).run())


class _Watcher:
    def __init__(self, pipe: Connection, port: int, supervisor: int, key: str) -> None:
        self._pipe, self._port, self._supervisor, self._key = pipe, port, supervisor, key
        self._seen = Seen()
        self._answers: list[str | None] = [None] * NUM_BYSTANDERS
        now = time.monotonic()
        self._last = [now] * NUM_BYSTANDERS  # each bystander's last event, or its request
        self._asked = [0.0] * NUM_BYSTANDERS  # when it asked; 0: it has had its first event
        self._probes: set[float] = set()  # when the unanswered ones began
        self._answered = now
        self._level = 0
        self._close_level = 0
        self._closest = 0  # resident growth at the last close look
        self._pids: list[int] = []
        self._began = now
        self._stalled, self._due = 0.0, now  # lost time up to the last tick, and when the next one is due
        self._stalled_at = [0.0] * NUM_BYSTANDERS  # the same at each bystander's last event

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(self._tick())]
        tasks += [asyncio.create_task(self._bystander(number)) for number in range(NUM_BYSTANDERS)]
        while None in self._answers:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        tasks += [asyncio.create_task(each) for each in (self._probe(), self._sample())]
        self._begin()
        self._pipe.send("ready")
        loop.add_reader(self._pipe.fileno(), self._serve)
        await asyncio.gather(*tasks)

    def _serve(self) -> None:
        try:
            asked = self._pipe.recv()
        except EOFError:  # the campaign was killed
            os._exit(0)
        match asked:
            case "begin":
                self._begin()
                self._pipe.send("begun")
            case _:
                self._pipe.send(self._look())

    def _begin(self) -> None:
        self._pids = family(self._supervisor)
        self._level, self._close_level = self._resident(), self._proportional()
        self._closest = _CLOSE_LOOK - _CLOSE_STEP
        self._seen = Seen()
        self._began = time.monotonic()
        self._stalled_at = [self._lost_time()] * NUM_BYSTANDERS

    def _look(self) -> Seen:
        now, seen = time.monotonic(), self._seen
        for number in range(NUM_BYSTANDERS):
            self._note(number, now)
        if self._probes:
            seen.health = max(seen.health, now - max(min(self._probes), self._began))
        seen.ages = [now - last for last in self._last]
        seen.probe_age = now - self._answered
        return seen

    # ── bystanders ──

    def _note(self, number: int, now: float) -> None:
        """Note how long a bystander has waited until now."""
        waited = now - max(self._last[number], self._began) - (self._lost_time() - self._stalled_at[number])
        if self._asked[number]:
            self._seen.start = max(self._seen.start, waited)
        else:
            self._seen.gap = max(self._seen.gap, waited)

    async def _bystander(self, number: int) -> None:
        body = json.dumps({
            "prompt": f"Story number {number}: Once upon a time", "max_tokens": NUM_TOKENS - 30 * number, "ignore_eos": True,
            "stream": True, "temperature": 0,
        }).encode()  # fmt: skip
        while True:
            client = Client(Target("127.0.0.1", self._port, False, ""), self._key)
            self._asked[number] = self._last[number] = time.monotonic()
            self._stalled_at[number] = self._lost_time()
            try:
                text = await self._listen(client, number, body)
            except (OSError, HTTPFailure, ValueError) as error:
                self._note(number, time.monotonic())
                self._seen.lost.append(f"{type(error).__name__}: {error}"[:200])
                await asyncio.sleep(0.1)
                continue
            finally:
                await client.close()
            if self._answers[number] is None:
                self._answers[number] = text
            self._seen.changed += text != self._answers[number]

    async def _listen(self, client: Client, number: int, body: bytes) -> str:
        text = ""
        async for event in client.post_events("/v1/completions", body):
            now = time.monotonic()
            self._note(number, now)
            self._last[number], self._asked[number], self._stalled_at[number] = now, 0.0, self._lost_time()
            if event == b"[DONE]":
                return text
            chunk: Any = json.loads(event)
            if "error" in chunk:
                raise ValueError(chunk["error"].get("message", "error"))
            text += "".join(choice["text"] for choice in chunk["choices"])
        raise ValueError("the stream ended without [DONE]")

    # ── the machine's noise ──

    async def _tick(self) -> None:
        """Measure how late this process itself runs: that much of a wait is not the server's."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        while True:
            self._due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._seen.lag = max(self._seen.lag, time.monotonic() - self._due)
            self._stalled = self._lost_time()

    def _lost_time(self) -> float:
        """Seconds in which this process could not run, so far. A stall may have ended before the tick that measures it."""
        late = time.monotonic() - self._due
        return self._stalled + (late if late > _TICK_S else 0.0)

    # ── /health ──

    async def _probe(self) -> None:
        """Probe on fresh connections, which the supervisor hands to the API processes in turn."""
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while True:
            due += _PROBE_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - _PROBE_S)
            if len(running) < _MAX_PROBES:
                task = asyncio.create_task(self._ask_health())
                running.add(task)
                task.add_done_callback(running.discard)

    async def _ask_health(self) -> None:
        client = Client(Target("127.0.0.1", self._port, False, ""))
        began, stalled = time.monotonic(), self._lost_time()
        self._probes.add(began)
        try:
            async with asyncio.timeout(_PROBE_LIMIT_S):
                await client.get("/health")
            self._answered = max(self._answered, began)
        except (OSError, HTTPFailure, TimeoutError):
            self._seen.health_faults += 1
        finally:
            self._probes.discard(began)
            took = time.monotonic() - max(began, self._began) - (self._lost_time() - stalled)
            self._seen.health = max(self._seen.health, took)
            await client.close()

    # ── memory ──

    async def _sample(self) -> None:
        for number in range(10**12):
            await asyncio.sleep(_SAMPLE_S)
            if number % 5 == 0:
                self._pids = family(self._supervisor)
            growth = self._resident() - self._level
            if growth > _CLOSE_LOOK and growth > self._closest + _CLOSE_STEP:
                self._closest = growth
                growth = self._proportional() - self._close_level
            elif growth > _CLOSE_LOOK:
                continue
            self._seen.memory = max(self._seen.memory, growth)
            if growth > RUNAWAY and not self._seen.was_killed:
                self._seen.was_killed = True
                for pid in self._pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _resident(self) -> int:
        """Anonymous and shared bytes of all processes; pages that forked processes share count for each."""
        total = 0
        for pid in self._pids:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
                total += resident - shared
        return total * os.sysconf("SC_PAGE_SIZE")

    def _proportional(self) -> int:
        """The same, with shared pages counted once. It takes milliseconds, and the processes wait for them."""
        total = 0
        for pid in self._pids:
            with contextlib.suppress(OSError):
                total += held([pid]).private
        return total
