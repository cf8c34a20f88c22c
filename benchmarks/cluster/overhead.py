"""What routing adds to a request: a server whose engine is a clock, alone and with several replicas, asked in turn. With --peer also other projects'
routers before servers of one engine each."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cluster.peers import PEER_MODEL, peer_router
from benchmarks.front import SERVE, _children, _cpu_seconds
from benchmarks.front_engine import MAX_MODEL_LEN, STEP_MS, VOCAB_SIZE
from benchmarks.gpu.serve import server
from octavo.cli.bench.http_stream import Client, Target
from octavo.cli.bench.report import percentile
from octavo.cli.bench.workload import id_prompts

NAME = "overhead"
ALONE = "one engine"
NUM_WARM = 50
MOST_MS = {"whole answer": (0.3, 1.0), "first event": (0.3, 1.0)}  # more than alone: p50, p99


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2000, help="of each kind and side")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument(
        "--peer", type=Path, action="append", default=[], help="program of sglang-router or vllm-router"
    )


def run(arguments: argparse.Namespace) -> None:
    os.environ[STEP_MS] = "0"
    with tempfile.TemporaryDirectory(prefix="octavo-overhead-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        _write_words(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCAB_SIZE}))
        command = [sys.executable, "-m", "benchmarks.front", SERVE, str(folder), "--served-model-name", PEER_MODEL]
        command += ["--port", "0", "--load-format", "dummy", "--max-model-len", str(MAX_MODEL_LEN)]
        command += ["--max-num-seqs", "64", "--api-processes", "1", "--record-bytes", "0"]
        print(
            f"prompts of {arguments.prompt_len} tokens, one client; two sides in turn, {arguments.requests} requests each; ms"
        )
        print(f"{'':<16} {'':<13} {'p50':>8} {'p99':>8} {'more p50':>9} {'more p99':>9}", flush=True)
        url, pid = stack.enter_context(server(command))
        failed = _compare_fleet(arguments, command, url, pid)
        if arguments.peer:
            second = stack.enter_context(server(command))[0]
        for program in arguments.peer:
            with peer_router(program, [url, second]) as router:
                _show(program.name, asyncio.run(measure(arguments, {ALONE: url, program.name: router})))
    if failed:
        sys.exit(f"FAILED: more than {MOST_MS}: {', '.join(failed)}")


def _compare_fleet(arguments: argparse.Namespace, command: list[str], url: str, pid: int) -> list[str]:
    """Returns which kind of request takes too long."""
    name = f"{arguments.replicas} replicas"
    with server([*command, "--data-parallel-size", str(arguments.replicas)]) as (fleet_url, fleet_pid):
        processes = {ALONE: _children(pid), name: _children(fleet_pid)}
        before = {side: _spent(found) for side, found in processes.items()}
        failed = _show(name, asyncio.run(measure(arguments, {ALONE: url, name: fleet_url})))
        num_requests = len(MOST_MS) * (arguments.requests + NUM_WARM)
        for side, found in processes.items():
            spent = {kind: (now - before[side][kind]) / num_requests * 1e3 for kind, now in _spent(found).items()}
            print(f"{side}: CPU ms a request: " + ", ".join(f"{kind} {each:.3f}" for kind, each in spent.items()))
    return failed


def _show(other: str, figures: dict[tuple[str, str], list[float]]) -> list[str]:
    """Print what a side takes more than one engine. Returns the kinds that take more than they may."""
    failed = []
    for kind, limits in MOST_MS.items():
        alone = [percentile(figures[kind, ALONE], each) for each in (50, 99)]
        found = [percentile(figures[kind, other], each) for each in (50, 99)]
        more = [each - before for each, before in zip(found, alone, strict=True)]
        print(f"{ALONE:<16} {kind:<13} {alone[0]:>8.3f} {alone[1]:>8.3f}")
        print(f"{other:<16} {kind:<13} {found[0]:>8.3f} {found[1]:>8.3f} {more[0]:>+9.3f} {more[1]:>+9.3f}", flush=True)
        if any(each > most for each, most in zip(more, limits, strict=True)):
            failed.append(kind)
    return failed


def _write_words(folder: Path) -> None:
    """A tokenizer whose tokens are words, and that reads text: peers' routers take no token ids."""
    vocabulary = {f"w{number}": number for number in range(VOCAB_SIZE)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text("{}")


def _spent(processes: dict[int, str]) -> dict[str, float]:
    """CPU seconds so far of API processes and engines."""
    found = dict.fromkeys(processes.values(), 0.0)
    for pid, kind in processes.items():
        found[kind] += _cpu_seconds(pid)
    return found


async def measure(arguments: argparse.Namespace, sides: dict[str, str]) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each request, by kind and side. The sides are asked in turn, so that what else the machine does meets all alike."""
    clients = {side: Client(Target.parse(url)) for side, url in sides.items()}
    found: dict[tuple[str, str], list[float]] = {(kind, side): [] for kind in MOST_MS for side in sides}
    for number, ids in enumerate(
        id_prompts(arguments.requests + NUM_WARM, arguments.prompt_len, 0, VOCAB_SIZE, seed=1)
    ):
        prompt = " ".join(f"w{each}" for each in ids)
        for kind in MOST_MS:
            body = json.dumps(
                {
                    "model": PEER_MODEL,
                    "prompt": prompt,
                    "max_tokens": 1,
                    "ignore_eos": True,
                    "temperature": 0,
                    "stream": kind == "first event",
                }
            )
            for side, client in clients.items():
                began = time.perf_counter()
                if kind == "whole answer":
                    await client.post("/v1/completions", body.encode())
                    ended = time.perf_counter()
                else:
                    ended = 0.0
                    async for _ in client.post_events("/v1/completions", body.encode()):
                        ended = ended or time.perf_counter()
                if number >= NUM_WARM:
                    found[kind, side].append((ended - began) * 1e3)
    for client in clients.values():
        await client.close()
    return found
