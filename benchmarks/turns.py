"""Two trees of the repository (worktrees of two commits) compared by their servers' steady throughput.

    python -m benchmarks.turns OLD NEW                  # folders; 32 clients, 30 turns of 2 s for each
    python -m benchmarks.turns OLD NEW --clients 8 --new-flags "--speculative-config '{\\"method\\": \\"none\\"}'"

Both servers have their load all the time. One runs while the other is stopped, in turns, so that what else happens on the machine happens to
both: runs of many seconds one after the other differ by more on a shared machine. Tokens are the engine's count, so steps that give several at once
are counted right. Prompts are random words; answers repeat themselves, as a small model's do, so drafts count for much."""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from octavo.cli.bench.http_stream import Client, Target
from octavo.server.process import loop_factory
from tests.processes import signal_all

START_S = 180.0
WARM_UP_S, SETTLE_S = 10.0, 0.25
WORDS = [
    "river",
    "stone",
    "letter",
    "quiet",
    "number",
    "window",
    "garden",
    "simple",
    "winter",
    "market",
    "yellow",
    "second",
    "paper",
    "before",
    "village",
    "reason",
]
COUNTED = {
    "tokens": "vllm:generation_tokens_total",
    "steps": "octavo:steps_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "host seconds": "octavo:host_step_seconds_sum",
}


class Side:
    """The server of one tree, and what it has done in its turns."""

    def __init__(self, tree: Path, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.rates: list[float] = []
        self.counts = dict.fromkeys(COUNTED, 0.0)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", "--port", str(port), *flags],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree.resolve())},
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            time.sleep(0.1)
        raise SystemExit(f"benchmarks.turns: {self.process.args} did not start")

    def read(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()

        def total(metric: str) -> float:
            return sum(map(float, re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

        return {name: total(metric) for name, metric in COUNTED.items()}

    async def send_on(self, arguments: argparse.Namespace, dice: random.Random) -> None:
        client = Client(Target.parse(self.url))
        try:
            while True:
                prompt = " ".join(dice.choice(WORDS) for _ in range(arguments.input_len))
                body = {"prompt": prompt, "max_tokens": arguments.output_len, "stream": True, "ignore_eos": True}
                async for _ in client.post_events("/v1/completions", json.dumps(body | {"temperature": 0}).encode()):
                    pass
        finally:
            await client.close()

    async def turn(self, seconds: float) -> None:
        await asyncio.sleep(SETTLE_S)
        began, before = time.perf_counter(), await asyncio.to_thread(self.read)
        await asyncio.sleep(seconds)
        after, took = await asyncio.to_thread(self.read), time.perf_counter() - began
        self.rates.append((after["tokens"] - before["tokens"]) / took)
        for name in COUNTED:
            self.counts[name] += after[name] - before[name]


@contextlib.contextmanager
def served(arguments: argparse.Namespace) -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        for tree, flags in ((arguments.old, arguments.old_flags), (arguments.new, arguments.new_flags)):
            sides.append(Side(tree, shlex.split(flags)))
        for side in sides:
            side.wait()
        yield sides
    finally:
        for side in sides:
            signal_all(side.process.pid, signal.SIGCONT)
            side.process.terminate()
        for side in sides:
            side.process.wait()


async def take_turns(sides: list[Side], arguments: argparse.Namespace) -> None:
    dice = [random.Random(arguments.seed) for _ in sides]
    tasks = [
        asyncio.create_task(side.send_on(arguments, each))
        for side, each in zip(sides, dice, strict=True)
        for _ in range(arguments.clients)
    ]
    await asyncio.sleep(WARM_UP_S)
    for number in range(arguments.rounds):
        for side in sides[:: 1 if number % 2 else -1]:
            for other in sides:
                signal_all(other.process.pid, signal.SIGCONT if other is side else signal.SIGSTOP)
            await side.turn(arguments.seconds)
    for side in sides:
        signal_all(side.process.pid, signal.SIGCONT)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("old", type=Path, help="a tree of the repository")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--old-flags", default="", help="of octavo serve, in one string")
    parser.add_argument("--new-flags", default="")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    with served(arguments) as sides, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(take_turns(sides, arguments))
    for name, side in zip(("old", "new"), sides, strict=True):
        steps = max(side.counts["steps"], 1)
        print(
            f"{name}: {statistics.mean(side.rates):,.0f} tokens/s; {side.counts['tokens'] / steps:.1f} tokens a step, "
            f"{side.counts['drafted']:,.0f} drafted, {side.counts['accepted']:,.0f} of them right; "
            f"{side.counts['host seconds'] / steps * 1e3:.2f} ms of the host a step"
        )
    ratios = [new / old for old, new in zip(sides[0].rates, sides[1].rates, strict=True)]
    mean = statistics.mean(ratios)
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
    print(
        f"new / old: {statistics.median(ratios):.3f} (median of {len(ratios)} turns), {mean:.3f} on average, "
        f"95 % interval {mean - half:.3f} to {mean + half:.3f}"
    )


if __name__ == "__main__":
    main()
