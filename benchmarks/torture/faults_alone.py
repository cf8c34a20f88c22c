"""Faults that need a server of their own: at its start, in all of its processes, or at its end. One function each; each returns a
row of the table."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.torture.faults import FLAGS, Row, signal_to, under_load
from benchmarks.torture.house import ROOT, Answer, House, Load, family, free_port
from octavo.cli.bench.http_stream import HTTPFailure
from tests.processes import children_of, is_alive

_JUMPING = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
/* The wall clock jumps by up to a year, either way, four times a second; the other clocks are as they are. */
static long jump(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    unsigned long tick = now.tv_sec * 4ul + now.tv_nsec / 250000000ul;
    return (long)((tick * 6364136223846793005ul + 1442695040888963407ul) >> 33) % 63072000l - 31536000l;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += jump();
    return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class AloneCampaign:
    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self._num_streams, self._num_tokens = num_streams, num_tokens

    def run(self, only: str = "") -> Iterator[Row]:
        faults = [
            self.port_stolen_at_start,
            self.full_disk_for_logs,
            self.clock_jumps,
            self.kill_worker,
            self.kill_only_api_process,
            self.two_poisons,
            self.hang_while_loading,
            self.kill_supervisor,
        ]
        yield from (fault() for fault in faults if only in fault.__name__)

    def port_stolen_at_start(self) -> Row:
        """Another program takes the port while the model loads."""
        port = free_port()
        process = _start("--port", str(port), *FLAGS)
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            time.sleep(0.6)
            thief.bind(("127.0.0.1", port))
            thief.listen()
            _, said = process.communicate(timeout=120)
        lines = [line for line in said.splitlines() if "error" in line]
        is_reported = process.returncode == 2 and len(lines) == 1 and str(port) in lines[0]
        saw = "refused; the server ended with code 2 and one line"
        return Row(
            "port stolen at start",
            saw if is_reported else f"code {process.returncode}: {said[-200:]}",
            None,
            0 if is_reported else 1,
            0,
        )

    def full_disk_for_logs(self) -> Row:
        """All output goes to a full device, also while the engine is killed and replaced."""
        with House(*FLAGS, "--enable-log-requests", log="/dev/full") as house:
            row = self._faulted(house, "full disk for logs, kill -9 engine", signal_to(house.engine(), signal.SIGKILL))
            house.process.terminate()
            code = house.process.wait(60)
        return Row(row.fault, row.saw, row.recovery_s, row.lost + (code != 0), row.leaked, f"exit code {code}")

    def clock_jumps(self) -> Row:
        """The wall clock jumps in every process of the server and every library in it; meanwhile the engine is killed."""
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            source, library = Path(folder) / "jumping.c", Path(folder) / "jumping.so"
            source.write_text(_JUMPING)
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
            with House(*FLAGS, environment={"LD_PRELOAD": str(library)}) as house:
                return self._faulted(house, "clock jumps, kill -9 engine", signal_to(house.engine(), signal.SIGKILL))

    def kill_worker(self) -> Row:
        with House(*FLAGS, "--tensor-parallel-size", "3") as house:
            (_, rank, _) = sorted(children_of(house.engine()))
            return self._faulted(house, "kill -9 rank 1 of 3", signal_to(rank, signal.SIGKILL))

    def kill_only_api_process(self) -> Row:
        """A client that connects while there is no API process waits for the next one and is answered."""
        with House("--kv-cache-memory-bytes", "512M", "--api-processes", "1") as house:
            (doomed,) = house.servers()
            alone = asyncio.run(Load(house, 1, self._num_tokens).run())[0]
            began = time.monotonic()
            os.kill(doomed, signal.SIGKILL)
            while Path(
                f"/proc/{doomed}"
            ).exists():  # a connection made while the process is still ending would be lost with it
                time.sleep(0.001)
            answer = asyncio.run(Load(house, 1, self._num_tokens).run())[0]
            seconds = time.monotonic() - began
            saw = (
                "the next client was answered" if answer.content == alone.content else answer.error or "another answer"
            )
            restarts = asyncio.run(_get(house, "/health/progress"))["api_restarts"]
            lost = int(answer.content != alone.content) + (restarts != 1)
            leaked = asyncio.run(house.used_pages())
        return Row(
            "kill -9 only API process", saw, seconds, lost, leaked, f"/health/progress reports {restarts} restarts"
        )

    def two_poisons(self) -> Row:
        """Two requests that end every engine they enter, among sixteen."""
        with House(*FLAGS, module="tests.e2e.mortal_engine") as house:
            untroubled = asyncio.run(Load(house, 14, self._num_tokens).run())
            load, refused = Load(house, 14, self._num_tokens), list[str]()

            async def poison(prompt: str) -> None:
                client = house.client()
                try:
                    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
                    await client.post("/v1/completions", json.dumps(body).encode())
                except HTTPFailure as failure:
                    error = json.loads(str(failure))["error"]["message"]
                    if failure.status == 500 and error.startswith("request cmpl-"):
                        refused.append(error.split()[1])
                finally:
                    await client.close()

            async def all_of_them() -> list[Answer]:
                prompts = ("The river Mississippi", "Twice as long is the Mississippi river and")
                answers, *_ = await asyncio.gather(load.run(), *map(poison, prompts))
                return answers

            began = time.monotonic()
            answers = asyncio.run(all_of_them())
            seconds = time.monotonic() - began
            lost = sum(ours.content != theirs.content for ours, theirs in zip(answers, untroubled, strict=True))
            restarts = asyncio.run(_get(house, "/health/progress"))["restarts"]
            saw = f"{14 - lost} of 14 whole; {len(set(refused))} of 2 poisons failed by name"
            lost += 2 - len(set(refused))
            return Row(
                "2 poisons among 16", saw, seconds, lost, asyncio.run(house.used_pages()), f"{restarts} engines ended"
            )

    def hang_while_loading(self) -> Row:
        """The engine is stopped before it is ready: --start-timeout ends the server with an error message and exit code 1."""
        process = _start("--port", str(free_port()), *FLAGS, "--start-timeout", "5")
        began = time.monotonic()
        while not (engines := [pid for pid, name in children_of(process.pid).items() if "engine.process" in name]):
            time.sleep(0.01)
        os.kill(engines[0], signal.SIGSTOP)
        _, said = process.communicate(timeout=60)
        is_reported = process.returncode == 1 and "--start-timeout" in said and not is_alive(engines[0])
        saw = (
            "refused; the server ended with code 1 and said why"
            if is_reported
            else f"code {process.returncode}: {said}"
        )
        return Row("engine hangs while loading", saw, time.monotonic() - began, 0 if is_reported else 1, 0)

    def kill_supervisor(self) -> Row:
        """Nothing outlives the supervisor: no process, no file, no shared memory, no socket."""
        shared = set(Path("/dev/shm").iterdir())
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            with House(*FLAGS, "--tensor-parallel-size", "3", environment={"TMPDIR": folder}) as house:
                everybody = family(house.process.pid)
                began = time.monotonic()
                asyncio.run(_kill_under_load(house, self._num_streams, self._num_tokens))
                while (alive := list(filter(is_alive, everybody))) and time.monotonic() < began + 30:
                    time.sleep(0.02)
                seconds = time.monotonic() - began
            left = [path.name for path in Path(folder).iterdir()] + [
                path.name for path in {*Path("/dev/shm").iterdir()} - shared
            ]
            left += [f"process {pid}" for pid in alive]
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", house.port))
        saw = f"connections closed; left behind: {', '.join(left) or 'nothing'}"
        return Row("kill -9 supervisor, 3 ranks", saw, seconds, 0, len(left), f"{len(everybody)} processes gone")

    def _faulted(self, house: House, name: str, fault: Callable[[], Awaitable[None]]) -> Row:
        """Compare with the same server before the fault: another server may compute differently."""
        untroubled = asyncio.run(Load(house, self._num_streams, self._num_tokens).run())
        load = Load(house, self._num_streams, self._num_tokens)
        return asyncio.run(under_load(house, name, fault, load, untroubled))


def _start(*flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "octavo.cli.main", "serve", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


async def _get(house: House, path: str) -> dict[str, int]:
    client = house.client()
    try:
        figures: dict[str, int] = json.loads(await client.get(path))
        return figures
    finally:
        await client.close()


async def _kill_under_load(house: House, num_streams: int, num_tokens: int) -> None:
    load = Load(house, num_streams, num_tokens)
    running = asyncio.create_task(load.run())
    await load.until(num_streams * num_tokens // 4)
    os.kill(house.process.pid, signal.SIGKILL)
    await running
    assert all(answer.error for answer in load.answers if answer.usage is None), "a stream ended without an error"
