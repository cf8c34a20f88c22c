"""A server in processes of its own, and good clients with known answers: the target of every fault."""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.cli.bench.http_stream import Client, HTTPFailure, Target
from tests.processes import children_of

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
TINY = ("tiny-a", "tiny-b")
QUIET_LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def resident(pid: int) -> int:
    """Bytes of the process's own anonymous memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    found = [pid]
    for member in found:
        found += children_of(member)
    return found


def _started(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return sys.maxsize


def gateway_models(folder: Path) -> list[str]:
    """Flags of a server with three models, of which two are in memory: the embedded one, and two small ones that take turns."""
    from octavo.weights.sources.source import resolve
    from tests.adapters import write_model

    for name in TINY:
        write_model(folder / name, 4096)
    models = [f"chat={resolve('').path}", *(f"{name}={folder / name}" for name in TINY)]
    small = json.dumps({name: {"kv_cache_memory_bytes": "64M", "api_processes": 1, "cpu_threads": 1} for name in TINY})
    turns = ["--max-loaded-models", "2", "--keep-loaded", "chat", "--model-min-seconds", "2", "--model-settings", small]
    return [*models, *turns, "--files-folder", str(folder / "files")]


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that all processes of a server hold together."""

    proportional: int  # PSS bytes: shared memory counts once
    private: int  # of these, anonymous and shared memory, without mapped files: independent of other processes
    open_files: int
    threads: int
    processes: int


def held(pids: list[int]) -> Held:
    sizes: Counter[str] = Counter()
    num_files = num_threads = 0
    for pid in pids:
        for name, size in re.findall(r"^(Pss\w*):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M):
            sizes[name] += int(size) * 1024
        num_files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        num_threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
    return Held(sizes["Pss"], sizes["Pss_Anon"] + sizes["Pss_Shmem"], num_files, num_threads, len(pids))


class ServerNotStarted(RuntimeError):
    pass


class House:
    """`octavo serve` on a free port, until the block ends."""

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        log: str = "",
        module: str = "octavo.cli.main",
        key: str = "",
    ) -> None:
        """`log`: a file for the server's output; empty: discard it. `module`: the module that serves. `key`: the key of its
        clients."""
        self._module, self._key = module, key
        self.port = free_port()
        self._log = open(log, "w") if log else open(os.devnull, "w")  # noqa: SIM115
        self._flags, self._environment = flags, environment or {}

    def __enter__(self) -> "House":
        command = [sys.executable, "-m", self._module, "serve", "--port", str(self.port), *self._flags]
        environment = {**os.environ, **self._environment}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(ROOT))))
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=self._log)
        asyncio.run(self._wait_until_well())
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.process.kill()
        self.process.wait()
        self._log.close()

    def client(self) -> Client:
        return Client(Target("127.0.0.1", self.port, False, ""), self._key)

    def engine(self) -> int:
        (pid,) = (
            pid
            for pid, command in children_of(self._supervisor()).items()
            if command.endswith(("engine.process", "mortal_engine"))
        )
        return pid

    def servers(self) -> list[int]:
        """API processes; of several models those of the first, and the gateway."""
        found = children_of(self._supervisor()).items()
        own = [pid for pid, command in found if command.endswith("server.process")]
        return [self.process.pid, *own] if self.models else own

    @property
    def models(self) -> list[int]:
        """The supervisors of several models, in the order of their start. Empty: there is one model."""
        found = children_of(self.process.pid).items()
        return sorted((pid for pid, command in found if "gateway.child" in command), key=_started)

    def models_that_come_and_go(self) -> list[int]:
        """Processes of all models but the first."""
        return [pid for model in self.models[1:] for pid in family(model)]

    def _supervisor(self) -> int:
        return self.models[0] if self.models else self.process.pid

    async def is_well(self) -> bool:
        client = self.client()
        try:
            async with asyncio.timeout(10):
                await client.get("/health")
            return True
        except (OSError, HTTPFailure, TimeoutError):
            return False
        finally:
            await client.close()

    def held(self) -> Held:
        return held(family(self.process.pid))

    async def metrics(self) -> str:
        client = self.client()
        try:
            return (await client.get("/metrics")).decode()
        finally:
            await client.close()

    async def used_pages(self) -> int:
        """Wait until nothing runs and return the pages in use: those have leaked."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        while True:
            text = await self.metrics()
            busy = sum(read_metric(text, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
            used = read_metric(text, "octavo:kv_pages", 'state="used"')
            if (not busy and not used) or time.monotonic() > deadline:
                return used
            await asyncio.sleep(0.1)

    async def _wait_until_well(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not await self.is_well():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerNotStarted(f"the server did not start: exit code {self.process.poll()}")
            await asyncio.sleep(0.05)


def read_metric(text: str, name: str, label: str = "") -> int:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name) and label in line]
    return int(sum(float(value) for key, value in lines if key.split("{")[0] == name))


@dataclass(slots=True)
class Answer:
    text: str = ""
    usage: Any = None
    error: str = ""
    times: list[float] = field(default_factory=list)  # of its events

    @property
    def longest_pause(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    @property
    def content(self) -> tuple[str, object]:
        """The part that must not depend on any fault."""
        return self.text, self.usage


class Load:
    """Good clients: streams, alternately greedy and seeded, whose answers depend only on their number."""

    def __init__(self, house: House, num_streams: int, num_tokens: int) -> None:
        self._house, self._num_tokens = house, num_tokens
        self.answers = [Answer() for _ in range(num_streams)]
        self.num_again = 0

    @property
    def num_events(self) -> int:
        return sum(len(answer.times) for answer in self.answers)

    async def run(self, asks_again: bool = False) -> list[Answer]:
        """`asks_again`: clients whose connection breaks send their request once more."""
        client = self._house.client()
        try:
            await asyncio.gather(*(self._ask(client, number) for number in range(len(self.answers))))
            broken = [number for number, answer in enumerate(self.answers) if answer.error]
            if asks_again:
                self.num_again = len(broken)
                for number in broken:
                    self.answers[number] = Answer()
                await asyncio.gather(*(self._ask(client, number) for number in broken))
        finally:
            await client.close()
        return self.answers

    async def until(self, num_events: int) -> None:
        """Wait until every stream has started and all together have had num_events events."""
        while self.num_events < num_events or not all(answer.times or answer.error for answer in self.answers):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def _ask(self, client: Client, number: int) -> None:
        answer = self.answers[number]
        body: dict[str, Any] = {
            "prompt": f"Story number {number}: Once upon a time",
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"temperature": 0} if number % 2 == 0 else {"temperature": 0.9, "seed": number}),
        }
        try:
            async for event in client.post_events("/v1/completions", json.dumps(body).encode()):
                answer.times.append(time.monotonic())
                if event == b"[DONE]":
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    answer.error = chunk["error"]["message"]
                for choice in chunk.get("choices", ()):
                    answer.text += choice["text"]
                if chunk.get("usage"):
                    answer.usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
        except (OSError, HTTPFailure) as error:
            answer.error = f"{type(error).__name__}: {error}"[:200]
