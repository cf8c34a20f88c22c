"""Measures the gateway of several models: what it adds to a request and to an event, the memory of a model behind it, and turns under traffic.

    python -m benchmarks.gateway cost       # the same model with and without the gateway, in turn: milliseconds and CPU time
    python -m benchmarks.gateway memory     # PSS of idle processes: one model alone, and one, two and three behind a gateway
    python -m benchmarks.gateway sleep      # memory and wake-up time of both levels of sleep; answers are the same
    python -m benchmarks.gateway swap       # two models that take turns, with clients for both: nothing is cut, answers are the same

MODEL is a small one, unless --model names another: its steps hide little of the rest. CPU seconds are counted for each process, so a busy
machine gives nearly the same figures; milliseconds need an idle one."""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.torture.house import family, held
from octavo.cli.bench.http_stream import Client, Target
from octavo.cli.bench.report import percentile
from tests.adapters import write_model
from tests.e2e.servers import Server
from tests.processes import children_of

FLAGS = ("--kv-cache-memory-bytes", "64M", "--api-processes", "1", "--record-bytes", "0")
MB = 2**20


def cpu_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def body(num_tokens: int, model: str = "", prompt: str = "abc", **more: Any) -> bytes:
    given = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True, **more}
    return json.dumps({**given, **({"model": model} if model else {})}).encode()


async def _events(client: Client, sent: bytes) -> tuple[list[float], str]:
    """(seconds at which the events came, the text)"""
    started, times, text = time.perf_counter(), [], ""
    async for event in client.post_events("/v1/completions", sent):
        times.append(time.perf_counter() - started)
        if event != b"[DONE]":
            chunk = json.loads(event)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            text += "".join(choice["text"] for choice in chunk.get("choices", ()))
    return times, text


# ── cost ────────────────────────────────────────────────────────────────────────────────────────────


async def _requests(server: Server, number: int, num_tokens: int, clients: int) -> list[list[float]]:
    found: list[list[float]] = []

    async def send() -> None:
        client = Client(Target.parse(server.base), "")
        for _ in range(number // clients):
            found.append((await _events(client, body(num_tokens)))[0])
        await client.close()

    await asyncio.gather(*(send() for _ in range(clients)))
    return found


def cost(arguments: argparse.Namespace) -> None:
    kinds = (
        ("1 client, 1 token", arguments.requests, 1, 1),
        ("1 client, 200 tokens", arguments.requests // 10, 200, 1),
        ("16 clients, 200 tokens", arguments.requests // 4, 200, 16),
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = arguments.model or _small(Path(folder))
        sides = {
            "alone": stack.enter_context(Server(model, *FLAGS, *arguments.flags)),
            "gateway": stack.enter_context(Server(f"m={model}", *FLAGS, *arguments.flags)),
        }
        for what, number, num_tokens, clients in kinds:
            first: dict[str, list[float]] = {side: [] for side in sides}
            gaps: dict[str, list[float]] = {side: [] for side in sides}
            own: list[float] = []
            num_events = num_requests = 0
            for at in range(arguments.rounds + 1):  # the first one warms
                for side in list(sides)[:: 1 if at % 2 else -1]:
                    server = sides[side]
                    before = cpu_seconds([server.process.pid])
                    found = asyncio.run(_requests(server, number, num_tokens, clients))
                    if not at:
                        continue
                    first[side] += [times[0] for times in found]
                    gaps[side] += [b - a for times in found for a, b in itertools.pairwise(times)]
                    if side == "gateway":
                        own.append(cpu_seconds([server.process.pid]) - before)
                        num_requests += len(found)
                        num_events += sum(map(len, found))
            print(f"{what}, {num_requests} requests and {num_events} events through the gateway")
            for name, figures in (("first event", first), ("between events", gaps)):
                p50, p99 = ([percentile(sorted(figures[side]), p) * 1e3 for side in sides] for p in (50, 99))
                print(
                    f"  {name:15} p50 {p50[0]:7.3f} → {p50[1]:7.3f} ms ({p50[1] - p50[0]:+.3f}), "
                    f"p99 {p99[0]:7.3f} → {p99[1]:7.3f} ms ({p99[1] - p99[0]:+.3f})"
                )
            print(
                f"  gateway's CPU: {sum(own) / num_requests * 1e3:.2f} ms a request, "
                f"{sum(own) / num_events * 1e6:.0f} µs an event",
                flush=True,
            )


def _small(folder: Path) -> str:
    write_model(folder / "small", 4096)
    return str(folder / "small")


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────


def memory(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or _small(Path(folder))
        for number in range(4):
            names = [f"m{at}={model}" for at in range(number)] or [model]
            with Server(*names, *FLAGS, *arguments.flags) as server:
                for at in range(max(1, number)):
                    named = {"model": f"m{at}"} if number else {}
                    server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **named})
                time.sleep(arguments.settle)  # freed memory is given back while idle
                whole = held(family(server.process.pid))
                print(f"{f'{number} behind a gateway' if number else 'one model alone':20} {_words(whole)}")
                if number:
                    print(f"    {'gateway':16} {_words(held([server.process.pid]))}")
                    children = children_of(server.process.pid)
                    for at, pid in enumerate(sorted(pid for pid, line in children.items() if "gateway.child" in line)):
                        print(f"    {f'model {at}':16} {_words(held(family(pid)))}", flush=True)


def _words(found: Any) -> str:
    return (
        f"PSS {found.proportional / MB:6.0f} MB, of it not of files {found.private / MB:6.0f} MB, "
        f"{found.processes} processes, {found.threads} threads"
    )


# ── swap ────────────────────────────────────────────────────────────────────────────────────────────


async def _traffic(server: Server, model: str, want: dict[int, str], seconds: float) -> tuple[int, list[float]]:
    """Send requests for one model until the time is over. → (how many, seconds to each one's first event)"""
    client, until, first, number = Client(Target.parse(server.base), ""), time.monotonic() + seconds, [], 0
    while time.monotonic() < until:
        prompt = number % len(want)
        times, text = await _events(client, body(64, model, f"Story {prompt}"))
        if text != want[prompt]:
            raise SystemExit(f"model {model} answers otherwise than alone: {text!r} instead of {want[prompt]!r}")
        first.append(times[0])
        number += 1
        await asyncio.sleep(0.2)
    await client.close()
    return number, first


async def _alone(server: Server, model: str) -> dict[int, str]:
    client = Client(Target.parse(server.base), "")
    found = {at: (await _events(client, body(64, model, f"Story {at}")))[1] for at in range(4)}
    await client.close()
    return found


def swap(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = [f"a={arguments.model or _small(Path(folder))}", f"b={arguments.other or _small(Path(folder) / 'b')}"]
        want = {}
        for name, entry in zip("ab", models, strict=True):
            with Server(entry, *FLAGS, *arguments.flags) as server:
                want[name] = asyncio.run(_alone(server, name))
        turns = ("--max-loaded-models", "1", "--model-min-seconds", str(arguments.stay))
        with Server(*models, *FLAGS, *turns, *arguments.flags) as server:

            async def both() -> list[tuple[int, list[float]]]:
                return await asyncio.gather(
                    *(_traffic(server, name, want[name], arguments.seconds) for name in "ab" for _ in range(2))
                )

            found = asyncio.run(both())
            loads = {name: server.metric("octavo:model_loads_total", f'"{name}"') for name in "ab"}
            last = {name: server.metric("octavo:model_load_seconds", f'"{name}"') for name in "ab"}
            wakes = []
            for _ in range(arguments.wakes):
                assert server.post(f"/sleep?model=a&level={arguments.level}", {})[0] == 200
                started = time.monotonic()
                assert server.post("/wake_up?model=a", {})[0] == 200
                wakes.append(time.monotonic() - started)
    waits = sorted(second for _, first in found for second in first)
    print(
        f"{sum(number for number, _ in found)} streams of 4 clients in {arguments.seconds:g} s: none was cut, all answers as alone"
    )
    print(f"loads: {loads}; the last ones took {last} s; the longest wait for a first event: {waits[-1]:.1f} s")
    print(f"wake-up of model a from level {arguments.level}: median {statistics.median(wakes):.2f} s of {len(wakes)}")


# ── sleep ───────────────────────────────────────────────────────────────────────────────────────────


async def _fill(server: Server) -> list[str]:
    """Answers of 16 clients, whose prompts fill some of the KV pages."""

    async def send(number: int) -> str:
        client = Client(Target.parse(server.base), "")
        prompt = f"{number} " + "one two three four " * 100
        text = (await _events(client, body(32, "a", prompt)))[1]
        await client.close()
        return text

    return await asyncio.gather(*(send(number) for number in range(16)))


def sleep(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = f"a={arguments.model or _small(Path(folder))}"
        with Server(model, "--api-processes", "1", "--record-bytes", "0", *arguments.flags) as server:
            want = asyncio.run(_fill(server))
            for level in (1, 2):
                sizes: dict[str, list[float]] = {"awake, after requests": [], "asleep": [], "awake again": []}
                falls, wakes, firsts = [], [], []
                for _ in range(arguments.wakes):
                    assert asyncio.run(_fill(server)) == want, "an answer has changed"
                    time.sleep(arguments.settle)
                    sizes["awake, after requests"].append(held(family(server.process.pid)).proportional)
                    started = time.monotonic()
                    assert server.post(f"/sleep?model=a&level={level}", {})[0] == 200
                    falls.append(time.monotonic() - started)
                    time.sleep(arguments.settle)
                    sizes["asleep"].append(held(family(server.process.pid)).proportional)
                    started = time.monotonic()
                    assert server.post("/wake_up?model=a", {})[0] == 200
                    wakes.append(time.monotonic() - started)
                    assert server.post("/v1/completions", json.loads(body(1, "a", stream=False)))[0] == 200
                    firsts.append(time.monotonic() - started)
                    sizes["awake again"].append(held(family(server.process.pid)).proportional)
                assert asyncio.run(_fill(server)) == want, "an answer has changed"
                memory = ", ".join(f"{name} {statistics.median(each) / MB:.0f} MB" for name, each in sizes.items())
                print(f"level {level}: PSS of all processes {memory}")
                for what, times in (("sleep", falls), ("wake_up", wakes), ("wake_up and a first token", firsts)):
                    print(
                        f"  {what}: median {statistics.median(times) * 1e3:.0f} ms, longest {max(times) * 1e3:.0f} ms"
                    )
        print("all answers as before")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (cost, memory, sleep, swap):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        command.add_argument("--model", default="", help="the model (default: a small one with random weights)")
        command.add_argument("flags", nargs="*", help="further flags of the servers, after --")
        if function is cost:
            command.add_argument("--requests", type=int, default=400, help="of one token; others have fewer")
            command.add_argument("--rounds", type=int, default=5)
        elif function is sleep:
            command.add_argument("--wakes", type=int, default=5)
            command.add_argument("--settle", type=float, default=2.0, help="seconds before memory is read")
        elif function is memory:
            command.add_argument(
                "--settle", type=float, default=5.0, help="seconds without a request before memory is read"
            )
        else:
            command.add_argument("--other", default="", help="the other model")
            command.add_argument("--seconds", type=float, default=60.0)
            command.add_argument("--stay", type=float, default=3.0, help="--model-min-seconds")
            command.add_argument("--wakes", type=int, default=5)
            command.add_argument("--level", type=int, default=2, help="of the sleep: 1 keeps the weights in memory")
    arguments = parser.parse_args()
    arguments.run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
