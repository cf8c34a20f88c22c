"""Measures how evenly tokens come while prompts are computed: the time between tokens at 32 clients, the time to first token and the
throughput, with --max-inter-token-ms and without, in turn. Both servers run all the time, one of them idle.

    python -m benchmarks.stalls
    python -m benchmarks.stalls --sides auto --loads mixed --rounds 1 --steps
    python -m benchmarks.stalls --sides auto,off,100 --loads short,mixed,long --rounds 1

short: every client sends prompts of 128 tokens, 128 tokens out. mixed: the same, and beside them one prompt of 4,096 tokens after the
other, with --pause seconds between them. long: every client sends prompts of 4,096 tokens, 64 tokens out; prompts take most of the
time. Where more than half of the steps compute prompts, the median of the limited side is the limit."""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import stalls_steps
from benchmarks.cpu import processes
from octavo.cli.bench.http_stream import Client, Target
from octavo.cli.bench.report import percentile

NUM_CLIENTS = 32
SHORT, SHORT_OUT = 128, 128
LONG, LONG_OUT = 4096, 64
WARM_S = 4.0  # of each load: the first requests come all at once
START_S = 120.0
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
MAX_TRIES = 4  # of a measurement that other processes disturb
SECONDS = {"short": 12.0, "mixed": 25.0, "long": 60.0}  # that are measured of each load, side and round


@dataclass
class Measured:
    gaps: list[float] = field(default_factory=list)  # seconds between two events of a stream, each with a token or more
    gap_ends: list[float] = field(default_factory=list)  # … and when they were over, by the monotonic clock
    windows: list[tuple[float, float]] = field(default_factory=list)  # when was measured
    text_gaps: list[float] = field(
        default_factory=list
    )  # between two events with text: a token may be a part of a character
    first: list[float] = field(default_factory=list)  # seconds to the first token of prompts of 128 tokens
    first_long: list[float] = field(default_factory=list)  # … of 4,096
    num_tokens: int = 0
    num_events: int = 0
    seconds: float = 0.0
    others: float = 0.0  # share of the cores that other processes used
    capped: int = 0  # steps
    steps: int = 0

    def add(self, other: "Measured") -> None:
        self.gaps += other.gaps
        self.gap_ends += other.gap_ends
        self.windows += other.windows
        self.text_gaps += other.text_gaps
        self.first += other.first
        self.first_long += other.first_long
        self.num_tokens += other.num_tokens
        self.num_events += other.num_events
        self.seconds += other.seconds
        self.others = max(self.others, other.others)
        self.capped += other.capped
        self.steps += other.steps

    def figures(self) -> dict[str, float | None]:
        def ms(values: list[float], percent: float) -> float | None:
            return round(percentile(sorted(values), percent) * 1e3, 2) if values else None

        return {
            "gap p50, ms": ms(self.gaps, 50),
            "gap p90, ms": ms(self.gaps, 90),
            "gap p99, ms": ms(self.gaps, 99),
            "gap max, ms": ms(self.gaps, 100),
            "gap of text p99, ms": ms(self.text_gaps, 99),
            "TTFT of 128 p50, ms": ms(self.first, 50),
            "TTFT of 128 p99, ms": ms(self.first, 99),
            "TTFT of 4,096 p50, ms": ms(self.first_long, 50),
            "TTFT of 4,096 max, ms": ms(self.first_long, 100),
            "output tokens/s": round(self.num_tokens / self.seconds, 1) if self.seconds else None,
            "tokens of an event": round(self.num_tokens / self.num_events, 3) if self.num_events else None,
            "requests begun": len(self.first) + len(self.first_long),
            "capped steps, share": round(self.capped / self.steps, 3) if self.steps else None,
            "others' share of the cores": round(self.others, 3),
        }


class Load:
    """Clients that send one request after the other until the time is over. What comes before `counts_from` is not counted."""

    def __init__(self, url: str, seed: int, pause: float) -> None:
        self._client, self._random = Client(Target.parse(url)), random.Random(seed)
        self._pause = pause
        self.measured = Measured()
        self._counts_from = self._ends_at = 0.0

    async def run(self, name: str, seconds: float) -> None:
        self._counts_from = time.perf_counter() + WARM_S
        self._ends_at = self._counts_from + seconds
        length, output = (LONG, LONG_OUT) if name == "long" else (SHORT, SHORT_OUT)
        clients = [self._clients(length, output, 0.0) for _ in range(NUM_CLIENTS)]
        if name == "mixed":
            clients.append(self._clients(LONG, LONG_OUT, self._pause))
        await asyncio.gather(*clients)
        self.measured.seconds = seconds
        self.measured.windows.append((self._counts_from, self._ends_at))
        await self._client.close()

    async def _clients(self, length: int, output: int, pause: float) -> None:
        while time.perf_counter() < self._ends_at:
            # Random tokens: no prompt is in the prefix cache.
            prompt = [self._random.randrange(1000, 40_000) for _ in range(length)]
            body = {
                "prompt": prompt,
                "max_tokens": output,
                "stream": True,
                "stream_options": {
                    "include_usage": True,
                    "continuous_usage_stats": True,
                },  # an event may hold several tokens
                "ignore_eos": True,
                "temperature": 0,
                "return_token_ids": True,  # an event for every token, also for one that gives no text yet
            }
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._left()):
                    await self._stream(json.dumps(body).encode(), length)
            await asyncio.sleep(max(0.0, min(pause, self._left())))

    def _left(self) -> float:
        return self._ends_at - time.perf_counter()

    async def _stream(self, body: bytes, length: int) -> None:
        started, measured, num_tokens = time.perf_counter(), self.measured, 0
        last = last_text = 0.0
        async for event in self._client.post_events("/v1/completions", body):
            if event == b"[DONE]" or b'"choices":[]' in event:
                continue
            now = time.perf_counter()
            has_text = b'"text":""' not in event
            found = _COMPLETION_TOKENS.search(event)
            new_tokens, num_tokens = (int(found[1]) - num_tokens, int(found[1])) if found else (1, num_tokens + 1)
            if now >= self._counts_from:
                measured.num_tokens += new_tokens
                measured.num_events += 1
                if last:
                    measured.gaps.append(now - last)
                    measured.gap_ends.append(now)
                    if has_text:
                        measured.text_gaps.append(now - last_text)
                else:
                    (measured.first_long if length == LONG else measured.first).append(now - started)
            last = now
            if has_text or not last_text:
                last_text = now


@dataclass
class Side:
    setting: str
    port: int
    pid: int = 0
    recording: Path | None = None  # folder; None: steps are not recorded

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, name: str) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            found = re.search(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        return int(float(found[1])) if found else 0


@contextlib.contextmanager
def serving(side: Side, flags: list[str]) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        "--port",
        str(side.port),
        *(["--record-bytes", "0"] if side.recording is None else ["--record-folder", str(side.recording)]),
        *flags,
    ]
    if side.setting != "none":  # a server without the flag
        command += ["--max-inter-token-ms", side.setting]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{side.url}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"benchmarks.stalls: the server with {side.setting} did not start")
            time.sleep(0.2)
        side.pid = process.pid
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def measure(side: Side, load: str, seconds: float, seed: int, pause: float) -> Measured:
    before, steps, capped = processes.work(side.pid), side.count("octavo:steps"), side.count("octavo:capped_steps")
    own, started, driver = time.process_time(), time.perf_counter(), Load(side.url, seed, pause)
    asyncio.run(driver.run(load, seconds))
    after, took = processes.work(side.pid), time.perf_counter() - started
    mine = after.server - before.server + time.process_time() - own
    measured = driver.measured
    measured.others = max(0.0, after.machine - before.machine - mine) / took / len(os.sched_getaffinity(0))
    measured.steps = side.count("octavo:steps") - steps
    measured.capped = side.count("octavo:capped_steps") - capped
    return measured


def show(load: str, found: dict[str, Measured]) -> None:
    figures = {setting: measured.figures() for setting, measured in found.items()}
    print(f"\n{load:28}" + "".join(f"{setting:>12}" for setting in figures))
    for row in next(iter(figures.values())):
        cells = [f"{value:,.3g}" if isinstance(value := each[row], float) and value < 1 else f"{value:,}" if value is not None else "–" for each in figures.values()]  # fmt: skip
        print(f"{row:28}" + "".join(f"{cell:>12}" for cell in cells))
    if "off" not in figures:
        return
    base = figures["off"]
    for setting, mine in figures.items():
        if setting == "off":
            continue
        ratios = {
            "p99 / median off": _ratio(mine["gap p99, ms"], base["gap p50, ms"]),
            "p50 / off": _ratio(mine["gap p50, ms"], base["gap p50, ms"]),
            "p99 / off": _ratio(mine["gap p99, ms"], base["gap p99, ms"]),
            "tokens/s / off": _ratio(mine["output tokens/s"], base["output tokens/s"]),
            "TTFT of 128 p50 / off": _ratio(mine["TTFT of 128 p50, ms"], base["TTFT of 128 p50, ms"]),
            "TTFT of 4,096 p50 / off": _ratio(mine["TTFT of 4,096 p50, ms"], base["TTFT of 4,096 p50, ms"]),
        }
        print(f"  {setting}: " + ", ".join(f"{name} {value}" for name, value in ratios.items() if value is not None))
        print(
            f"  {setting}, targets: p99 of at most 3 medians off: {_met(ratios['p99 / median off'], most=3.0)}, p50 of at most 1.15 off: "
            f"{_met(ratios['p50 / off'], most=1.15)}, at least 0.95 of the tokens/s: {_met(ratios['tokens/s / off'], least=0.95)}"
        )


def _met(ratio: float | None, least: float = 0.0, most: float = math.inf) -> str:
    return "not measured" if ratio is None else "met" if least <= ratio <= most else "missed"


def _ratio(mine: float | None, base: float | None) -> float | None:
    return round(mine / base, 3) if mine is not None and base else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls", description=__doc__)
    parser.add_argument("--sides", default="auto,off", help="values of --max-inter-token-ms (default: auto,off)")
    parser.add_argument("--loads", default="short,mixed", help="short, mixed, long (default: short,mixed)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help=f"measured of each load and side in a round (default: {SECONDS})")
    parser.add_argument(
        "--pause", type=float, default=5.0, help="seconds between two prompts of 4,096 tokens (default: 5)"
    )
    parser.add_argument(
        "--max-others",
        type=float,
        default=0.05,
        help="share of the cores that other processes may use; above it a measurement is made again, up to three times (default: 0.05)",
    )
    parser.add_argument(
        "--steps",
        action="store_true",
        help="also record the steps, and print how long they took beside what was predicted (benchmarks.stalls_steps)",
    )
    parser.add_argument("--port", type=int, default=8100, help="of the first server; the others follow")
    parser.add_argument("--result", type=Path, help="also write all figures to this JSON file")
    parser.add_argument("flags", nargs="*", help="further flags of the servers, after --")
    arguments = parser.parse_args()
    sides = [Side(setting, arguments.port + at) for at, setting in enumerate(arguments.sides.split(","))]
    found: dict[str, dict[str, Measured]] = {}
    rounds: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        recordings = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-stalls-")))
        for side in sides:
            if arguments.steps:
                side.recording = recordings / side.setting
                side.recording.mkdir()
            stack.enter_context(serving(side, arguments.flags))
        for number in range(arguments.rounds):
            for load in arguments.loads.split(","):
                # The order changes from round to round; prompts are the same on both sides.
                for side in sides if number % 2 == 0 else sides[::-1]:
                    for _ in range(MAX_TRIES):
                        measured = measure(
                            side, load, arguments.seconds or SECONDS[load], 1000 * number + len(load), arguments.pause
                        )
                        rounds.append({"round": number + 1, "load": load, "side": side.setting, **measured.figures()})
                        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
                        if measured.others <= arguments.max_others:
                            break
                        print("again: other processes used the cores", file=sys.stderr, flush=True)
                    found.setdefault(load, {}).setdefault(side.setting, Measured()).add(measured)
        for side in sides if arguments.steps else []:
            assert side.recording is not None
            time.sleep(0.5)  # a recorder writes every 0.2 s
            steps = stalls_steps.steps_of(next(side.recording.glob("live-*")))
            for load, by_side in found.items():
                measured = by_side[side.setting]
                print(f"\n{load}, {side.setting}: steps")
                gaps = list(zip(measured.gap_ends, measured.gaps, strict=True))
                stalls_steps.show(stalls_steps.during(steps, measured.windows), gaps)
    for load, by_side in found.items():
        show(load, by_side)
    if arguments.result is not None:
        arguments.result.write_text(json.dumps({"command": sys.argv, "rounds": rounds}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
