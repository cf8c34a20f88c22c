"""Measures what a cockpit's live feed costs the server: CPU seconds of API and engine processes with and without a watcher.
Runs `octavo serve` with its real processes; the model is a clock (benchmarks.front_engine).

Usage: python -m benchmarks.cockpit [--requests 1000] [--pages 10000] [--step-ms 200] [--seconds 10] [--pairs 3] [--watchers 1]

Requests arrive without pause. Measurements with and without a watcher alternate; the verdict uses the median difference."""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import urllib.parse
from contextlib import suppress
from pathlib import Path

from benchmarks.front import SERVE, _children, _cpu_seconds
from benchmarks.front_engine import MAX_MODEL_LEN, PAGES, STEP_MS, VOCAB_SIZE
from benchmarks.gpu.serve import server
from octavo.cli.bench.report import facts
from octavo.text.tokenize.made_up import write_tokenizer

MAX_SHARE = 0.05  # of one core
PROMPT_LEN, OUTPUT_LEN = 96, 64  # ten pages of 16 at the end


def main() -> int:
    arguments = build_parser().parse_args()
    os.environ[STEP_MS], os.environ[PAGES] = str(arguments.step_ms), str(arguments.pages)
    with tempfile.TemporaryDirectory(prefix="octavo-cockpit-") as name:
        folder = Path(name)
        write_tokenizer(folder, VOCAB_SIZE)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCAB_SIZE}))
        command = [
            sys.executable,
            "-m",
            "benchmarks.front",
            SERVE,
            str(folder),
            "--port",
            "0",
            "--load-format",
            "dummy",
        ]
        command += ["--max-num-seqs", str(arguments.rows or arguments.requests), "--max-model-len", str(MAX_MODEL_LEN)]
        command += ["--api-processes", "1"]
        with server(command) as (url, pid):
            return asyncio.run(measure(arguments, url, _children(pid)))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="concurrent requests (default: 1000)")
    parser.add_argument("--rows", type=int, default=0, help="requests that run at once; the others wait (default: all)")
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement (default: 10)")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--watchers", type=int, default=1)
    return parser


async def measure(arguments: argparse.Namespace, url: str, processes: dict[int, str]) -> int:
    place = urllib.parse.urlsplit(url)
    host, port = place.hostname or "", place.port or 0
    load = [asyncio.create_task(ask_for_ever(host, port, number)) for number in range(arguments.requests)]
    await asyncio.sleep(4 + arguments.step_ms / 1000 * 10)  # all requests have started and no longer decode in lockstep
    machine = facts()["machine"]
    print(f"{machine['processor']}, {machine['cores']} cores; {arguments.requests} requests, {arguments.pages} pages, "
          f"{arguments.step_ms:g} ms a step, {arguments.watchers} watching; CPU seconds in {arguments.seconds:g} s")  # fmt: skip
    print(f"{'engine without':>15} {'with':>7} {'API without':>13} {'with':>7} {'share of a core':>17} {'MB/s':>6}")
    shares = []
    for _ in range(arguments.pairs):
        off, _ = await spent(arguments.seconds, processes, host, port, 0)
        on, num_bytes = await spent(arguments.seconds, processes, host, port, arguments.watchers)
        shares.append((sum(on.values()) - sum(off.values())) / arguments.seconds)
        print(f"{off['engine']:15.2f} {on['engine']:7.2f} {off['API']:13.2f} {on['API']:7.2f} {shares[-1]:17.1%} "
              f"{num_bytes / arguments.seconds / 1e6:6.2f}")  # fmt: skip
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    share = statistics.median(shares)
    is_cheap = share <= MAX_SHARE
    print(f"watching takes {share:.1%} of one core: {'within' if is_cheap else 'MORE THAN'} {MAX_SHARE:.0%}")
    return 0 if is_cheap else 1


async def spent(
    seconds: float, processes: dict[int, str], host: str, port: int, num_watchers: int
) -> tuple[dict[str, float], int]:
    """Return (CPU seconds by kind of process, bytes that the watchers read)."""
    counts = [0] * num_watchers
    watchers = [asyncio.create_task(watch(host, port, counts, at)) for at in range(num_watchers)]
    await asyncio.sleep(1.5)  # skip the initial full state: only the updates are the cost of watching
    before = {pid: _cpu_seconds(pid) for pid in processes}
    read = sum(counts)
    await asyncio.sleep(seconds)
    found = {"engine": 0.0, "API": 0.0}
    for pid, kind in processes.items():
        found[kind] += _cpu_seconds(pid) - before[pid]
    num_bytes = sum(counts) - read
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    assert not num_watchers or num_bytes, "the feed sent nothing"
    return found, num_bytes


async def watch(host: str, port: int, counts: list[int], at: int) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /v1/live HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        while data := await reader.read(1 << 20):
            counts[at] += len(data)
    finally:
        writer.close()


async def ask_for_ever(
    host: str, port: int, number: int, prompt_len: int = PROMPT_LEN, shared_len: int = 64, output_len: int = OUTPUT_LEN
) -> None:
    """Send one request after another, with different lengths of output; half of them share a prefix."""
    rng = random.Random(number)
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            while True:
                shared = rng.random() < 0.5
                prompt = [
                    1000 + (at if shared and at < shared_len else rng.randrange(20_000)) for at in range(prompt_len)
                ]
                body = {"prompt": prompt, "max_tokens": rng.randint(output_len // 4, output_len), "ignore_eos": True}
                data = json.dumps(body).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                answer = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in answer.split(b"\r\n", 1)[0], answer
                length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
        finally:
            writer.close()


if __name__ == "__main__":
    sys.exit(main())
