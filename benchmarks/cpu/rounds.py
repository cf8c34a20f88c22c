"""One server's turn in a round: start it, run every load, read its memory, and record other processes' use of the machine."""

import dataclasses
import os
import re
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from benchmarks.cpu import loads, processes
from benchmarks.cpu.loads import Load
from benchmarks.cpu.servers import Server, started

QUIET = 0.05
"""Largest share of the cores that other processes may use: beyond it, threads that wait for each other wait for those."""

_FIRST_SEED = 100
_MAX_TRIES = 3  # of a load that other processes disturbed, if --patience is given
_LOOK_S = 1.0


@dataclasses.dataclass(slots=True)
class Patience:
    """How long to wait for a quiet machine before each start and each load. With 0, nothing is tried again either."""

    seconds: float = 0.0

    def wait(self, pid: int) -> None:
        """Wait until other processes leave the machine alone, for at most `seconds`."""
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            watch = _Watch(pid)
            time.sleep(_LOOK_S)
            if watch.others_share() <= QUIET:
                return


class _Watch:
    """Measures the share of the cores used since it was made by processes other than this one and the given process's tree."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began, self._own, self._work = time.perf_counter(), time.process_time(), processes.work(pid)

    def others_share(self) -> float:
        now = processes.work(self._pid)
        mine = now.server - self._work.server + time.process_time() - self._own
        seconds = (time.perf_counter() - self._began) * len(os.sched_getaffinity(0))
        return max(0.0, now.machine - self._work.machine - mine) / seconds


def serve(server: Server, wanted: Sequence[Load], number: int, patience: Patience) -> dict[str, Any]:
    """Return all figures of one server in round `number`, from 0."""
    patience.wait(os.getpid())
    with started(server) as running:
        print(f"round {number + 1}, {server.name}: first token after {running.start_s:.2f} s", flush=True)
        idle = processes.resident_bytes(running.pid)
        figures: dict[str, Any] = {"start_s": round(running.start_s, 3), "idle_bytes": idle, "loads": {}}
        for at, load in enumerate(wanted):
            seed = _FIRST_SEED * (number + 1) + at
            found = figures["loads"][load.name] = _least_disturbed(
                load, server, running.url, running.pid, seed, patience
            )
            figures["memory_bytes"] = found["memory_bytes"] = processes.resident_bytes(running.pid)
            if not server.is_peer:
                figures["taken_bytes"] = _taken(running.url)
            print(f"  {load.name}: {_said(found)}", flush=True)
        return figures


def _taken(url: str) -> dict[str, int]:
    """Return the bytes of weights and of KV pages, as our own server reports them."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        metrics = answer.read().decode()
    found = re.findall(r'^octavo:memory_bytes{.*kind="(\w+)".*} (\S+)$', metrics, re.MULTILINE)
    return {kind: int(float(taken)) for kind, taken in found}


def _least_disturbed(load: Load, server: Server, url: str, pid: int, seed: int, patience: Patience) -> dict[str, Any]:
    tries: list[dict[str, Any]] = []
    while not tries or (patience.seconds and len(tries) < _MAX_TRIES and tries[-1]["others_share"] > QUIET):
        patience.wait(pid)
        watch = _Watch(pid)
        # Other prompts each time: a server may cache the last ones.
        found = loads.send(load, url, server.fields, seed + 1000 * _FIRST_SEED * len(tries))
        tries.append(found | {"others_share": round(watch.others_share(), 3)})
    return min(tries, key=lambda found: found["others_share"]) | {"tries": len(tries)}


def _said(found: dict[str, Any]) -> str:
    times = [f"{found[key]['p50']:,.1f}" if found[key] else "–" for key in ("ttft_ms", "tpot_ms")]
    return (
        f"{found['output_tokens_per_second']:,.1f} output tokens/s, first token {times[0]} ms, each further {times[1]} ms; "
        f"{found['memory_bytes'] / 1e9:.2f} GB; others {found['others_share']:.0%}"
    )
