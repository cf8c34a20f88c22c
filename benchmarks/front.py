"""Measures what the HTTP front costs: `octavo serve` with its real processes, a clock as its model, under `octavo bench serve`.
CPU seconds are counted for each process, so a busy machine gives the same figures.

Usage: python -m benchmarks.front [--streams 256] [--step-ms 14] [--api-processes 1] [--client-processes 1] [--requests 512]

With --step-ms 0 the engine makes tokens as fast as it can and the front is the limit. A process uses one core at most:
1000 / (CPU ms per 1,000 tokens) thousand tokens a second is the most that one API process can stream."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.front_engine import MAX_MODEL_LEN, PAGE_SIZE, STEP_MS, VOCAB_SIZE, TimedSteps
from benchmarks.gpu.serve import Load, clients, server
from benchmarks.gpu.show import table
from octavo.cache import KVCache
from octavo.cli import main as cli
from octavo.cli.bench.workload import id_prompts
from octavo.engine.build import build_engine
from octavo.messages import GenerateRequest, SamplingParams
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.supervisor import supervisor
from octavo.text.tokenize.made_up import write_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SERVE = "--serve-for-benchmark"


def main() -> int:
    if sys.argv[1:2] == [SERVE]:
        supervisor.ENGINE_MODULE = "benchmarks.front_engine"
        return cli.main(["serve", *sys.argv[2:]])
    arguments = build_parser().parse_args()
    os.environ[STEP_MS] = str(arguments.step_ms)
    with tempfile.TemporaryDirectory(prefix="octavo-front-") as name:
        folder = Path(name)
        write_tokenizer(folder, VOCAB_SIZE)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCAB_SIZE}))
        command = [sys.executable, "-m", "benchmarks.front", SERVE, str(folder), "--port", "0"]
        command += ["--load-format", "dummy", "--max-num-seqs", str(arguments.streams)]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--api-processes", arguments.api_processes]
        command += arguments.flags
        with server(command) as (url, pid):
            measure(arguments, url, pid, folder)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams (default: 256)")
    parser.add_argument("--requests", type=int, default=512, help="total requests (default: 512)")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument(
        "--step-ms", type=float, default=14.0, help="time of a step in ms; 0: as fast as possible (default: 14)"
    )
    parser.add_argument("--api-processes", default="1", help="value for `octavo serve` (default: 1)")
    parser.add_argument("--client-processes", default="1", help="value for `octavo bench serve` (default: 1)")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--profile", metavar="FOLDER", help="also write py-spy profiles of engine and API processes there"
    )
    parser.add_argument("flags", nargs="*", help="further flags of `octavo serve`, after --")
    return parser


def measure(arguments: argparse.Namespace, url: str, pid: int, folder: Path) -> None:
    processes = _children(pid)
    load = Load(arguments.streams, arguments.requests, arguments.input_len, arguments.output_len)
    more = ["--client-processes", arguments.client_processes, "--vocab-size", str(VOCAB_SIZE)]
    clients(url, dataclasses.replace(load, num_requests=64), 1, folder, more)  # warm
    rows = []
    for run in range(arguments.runs):
        profilers = _profile(processes, arguments.profile) if arguments.profile and run == 0 else []
        before = {number: _cpu_seconds(number) for number in processes}
        figures = clients(url, load, 2 + run, folder, more)
        after = {number: _cpu_seconds(number) for number in processes}
        for profiler in profilers:
            profiler.wait()
        spent = {number: after[number] - before[number] for number in processes}
        rows.append((figures, spent))
    without = offline(load, arguments.step_ms / 1000)
    titles = (
        "tokens/s",
        "of offline",
        "ITL p50",
        "p99",
        "engine",
        "API",
        "client",
        "texts/token",
        "CPU s of each API process",
    )
    print(f"{arguments.streams} streams, {arguments.requests} requests, {arguments.input_len} tokens in, "
          f"{arguments.output_len} out, {arguments.step_ms:g} ms a step; CPU ms per 1,000 tokens")  # fmt: skip
    print(table(titles, [_row(figures, without, processes, spent) for figures, spent in rows]))


def offline(load: Load, step_seconds: float) -> float:
    """Return tokens per second of the same load and clock in process: all requests are submitted at once, without streaming."""
    executor = TimedSteps(load.num_streams, step_seconds)
    report = executor.start()
    scheduler = Scheduler(
        KVCache(report.num_pages, PAGE_SIZE), report.max_num_seqs, report.max_num_batched_tokens, PAGE_SIZE
    )
    loop = build_engine(scheduler, executor, EngineMetrics("none", report)).loop
    params = SamplingParams(max_tokens=load.output_len, seed=0, ignore_eos=True)
    for number, prompt in enumerate(id_prompts(load.num_requests, load.input_len, 0, VOCAB_SIZE, seed=2)):
        loop.add(GenerateRequest(f"request-{number}", prompt, params, [2]))
    started = time.perf_counter()
    while loop.has_work:
        loop.step()
    return load.num_requests * load.output_len / (time.perf_counter() - started)


def _row(figures: dict[str, Any], offline_rate: float, processes: dict[int, str], spent: dict[int, float]) -> list[str]:
    thousands = figures["output_tokens"] / 1000
    of_api = [seconds for number, seconds in spent.items() if processes[number] == "API"]
    of_engine = [seconds for number, seconds in spent.items() if processes[number] == "engine"]
    return [
        f"{figures['output_tokens_per_second']:,.0f}",
        f"{figures['output_tokens_per_second'] / offline_rate:.3f}",
        *(f"{figures['itl_ms'][name]:.1f}" if figures["itl_ms"] else "–" for name in ("p50", "p99")),
        *(f"{sum(seconds) / thousands * 1000:.1f}" for seconds in (of_engine, of_api)),
        f"{figures['client_cpu_seconds'] / thousands * 1000:.1f}",
        f"{figures['texts_per_token']:.2f}",
        " ".join(f"{seconds:.2f}" for seconds in of_api),
    ]


def _children(pid: int) -> dict[int, str]:
    """Return the supervisor's child processes: process id → kind."""
    numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    named = {int(number): Path(f"/proc/{number}/cmdline").read_text() for number in numbers}
    return {number: "engine" if "front_engine" in line else "API" for number, line in named.items()}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _profile(processes: dict[int, str], folder: str) -> Sequence[subprocess.Popen[bytes]]:
    Path(folder).mkdir(parents=True, exist_ok=True)
    started = []
    for number, what in processes.items():
        command = ["py-spy", "record", "--pid", str(number), "--duration", "12", "--rate", "200", "--native"]
        command += ["--format", "raw", "--output", f"{folder}/{what}-{number}.txt"]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return started


if __name__ == "__main__":
    sys.exit(main())
