"""Two replicas on one GPU beside one: the same load over HTTP, and streams that go on when a replica is killed.

python -m benchmarks.gpu.replicas --model qwen3-0.6b

Replicas that share a GPU divide its memory and take turns on it: they are not expected to be faster than one. What is shown is what a
second one costs or gains, and that no stream is lost. The second part runs with --deterministic: a stream that moves gets the tokens it
would have had. Weights are random if the folder has none."""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.failover import Stream, streams
from benchmarks.cluster.peers import PEER_MODEL
from benchmarks.gpu.serve import Load, as_flags, clients, has_tokenizer, vocab_size_of
from benchmarks.gpu.show import table
from benchmarks.gpu.subject import engine_options
from octavo.cli.bench.flags import above_zero, positive
from octavo.cli.flags import OFFLINE, Parser, add_config_flags
from octavo.errors import OctavoError
from octavo.text.tokenize.made_up import write_tokenizer
from tests.e2e.servers import Server

WARMUP_SEED, FIRST_SEED = 99, 100
KILLED_AFTER = 8  # events that every stream has had
LIMIT_S = 3.0  # without a token
_LARGEST_ID = 30_000


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="octavo-replicas-") as name:
        folder = Path(name)
        try:
            options = engine_options(arguments)
        except OctavoError as error:
            sys.exit(f"benchmarks.gpu.replicas: error: {error.message}")
        vocab_size = vocab_size_of(options["model"])
        if not options.get("tokenizer") and not has_tokenizer(Path(options["model"])):
            write_tokenizer(folder, vocab_size)
            options["tokenizer"] = str(folder)
        found: dict[str, Any] = {}
        if "throughput" in arguments.parts:
            found["throughput"] = measure_throughput(arguments, options, vocab_size, folder)
            print(show_throughput(found["throughput"]), flush=True)
        if "failover" in arguments.parts:
            found["failover"] = measure_failover(arguments, options, vocab_size)
            print(show_failover(found["failover"]), flush=True)
    if arguments.result:
        Path(arguments.result).write_text(json.dumps(found, indent=1))
    return 0 if found.get("failover", {"met": True})["met"] else 1


def build_parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.gpu.replicas", description=__doc__)
    add = parser.add_argument_group("settings").add_argument
    add("--parts", default="throughput,failover", metavar="NAME,…", help="which to run (default: both)")
    add("--replicas", type=positive, default=2, metavar="N", help="beside one (default: 2)")
    add("--streams", type=positive, default=256, metavar="N", help="of the load, in all (default: 256)")
    add("--failover-streams", type=positive, default=32, metavar="N", help="open when a replica is killed (default: 32)")  # fmt: skip
    add(
        "--failover-tokens",
        type=positive,
        default=3000,
        metavar="N",
        help="of each of them (default: 3000: all are still at work when the replica is killed)",
    )
    add("--runs", type=positive, default=3, metavar="N", help="measured runs of each side (default: 3)")
    add("--scale", type=above_zero, default=1.0, metavar="X", help="shrink counts and lengths of the load by this factor: a rehearsal")  # fmt: skip
    add("--result", metavar="FILE", help="also write all figures to this JSON file")
    add_config_flags(parser, OFFLINE, positional=False)
    return parser


@contextlib.contextmanager
def _server(options: dict[str, Any], num_replicas: int) -> Any:
    flags = [
        *as_flags(options),
        "--served-model-name",
        PEER_MODEL,
        "--data-parallel-size",
        str(num_replicas),
        "--record-bytes",
        "0",
    ]
    started = time.perf_counter()
    with Server(*flags) as server:
        yield server, time.perf_counter() - started


# ── throughput ──────────────────────────────────────────────────────────────────────────────────────


def measure_throughput(
    arguments: argparse.Namespace, options: dict[str, Any], vocab_size: int, folder: Path
) -> list[dict[str, Any]]:
    """The figures of one replica, and of several with as many streams in all."""
    load, found = Load.scaled(arguments.streams, arguments.scale), []
    more = ["--vocab-size", str(min(vocab_size, _LARGEST_ID))]
    for num_replicas in (1, arguments.replicas):
        with _server({"max_num_seqs": load.num_streams} | options, num_replicas) as (server, seconds):
            clients(server.base, load, WARMUP_SEED, folder, more)
            runs = [clients(server.base, load, FIRST_SEED + at, folder, more) for at in range(arguments.runs)]
            fleet = json.loads(server.get("/v1/fleet")[1]) if num_replicas > 1 else {}
        middle = sorted(runs, key=lambda run: run["output_tokens_per_second"])[len(runs) // 2]
        found.append(
            {
                "replicas": num_replicas,
                "start_seconds": round(seconds, 2),
                "tokens_per_second": [run["output_tokens_per_second"] for run in runs],
                "median": middle["output_tokens_per_second"],
                "ttft_ms": middle["ttft_ms"],
                "tpot_ms": middle["tpot_ms"],
                "errors": sum(run["num_errors"] for run in runs),
                "fleet": fleet.get("replicas", []),
            }
        )
    return found


def show_throughput(found: list[dict[str, Any]]) -> str:
    rows = [
        [
            str(each["replicas"]),
            " ".join(f"{rate:,.0f}" for rate in each["tokens_per_second"]),
            f"{each['median']:,.0f}",
            f"{each['ttft_ms']['p50']:.0f} / {each['ttft_ms']['p99']:.0f}",
            f"{each['tpot_ms']['p50']:.1f} / {each['tpot_ms']['p99']:.1f}",
            f"{each['start_seconds']:.1f}",
            str(each["errors"]),
        ]
        for each in found
    ]
    titles = ("replicas", "output tokens/s of each run", "median", "first token p50 / p99, ms", "per token p50 / p99, ms", "start, s", "errors")  # fmt: skip
    ratio = found[1]["median"] / found[0]["median"]
    return f"{table(titles, rows)}\nseveral replicas / one = {ratio:.3f}"


# ── a replica is killed ─────────────────────────────────────────────────────────────────────────────


def measure_failover(arguments: argparse.Namespace, options: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The same streams twice: undisturbed, and with one replica killed while all of them run."""
    count, num_tokens = arguments.failover_streams, arguments.failover_tokens
    r = random.Random(1)
    prompts = [[r.randrange(5, min(vocab_size, _LARGEST_ID)) for _ in range(64)] for _ in range(count)]
    sides: list[list[Stream]] = []
    with _server(options | {"deterministic": True}, arguments.replicas) as (server, _):

        def kill() -> None:
            engines = (pid for pid, command in server.children().items() if command.endswith("engine.process"))
            os.kill(min(engines), signal.SIGKILL)

        asked = argparse.Namespace(streams=count, tokens=num_tokens, fault="kill")
        streams(
            server.base, argparse.Namespace(**vars(asked) | {"tokens": 40}), 0, None, prompts
        )  # compiles and captures
        for fault in (None, kill):
            found, _ = streams(server.base, asked, KILLED_AFTER if fault else 0, fault, prompts)
            sides.append(found)
        journeys = json.loads(server.get(f"/v1/requests?state=finished&limit={count}")[1])["data"]
    calm, killed = sides
    gaps = [max((b - a for a, b in zip(each.times, each.times[1:], strict=False)), default=0.0) for each in killed]
    figures = {
        "streams": count,
        "tokens": num_tokens,
        "errors": [each.error for each in (*calm, *killed) if each.error],
        "identical": sum(each.text == other.text for each, other in zip(calm, killed, strict=True)),
        "moved": sum(len(each["replicas"]) > 1 for each in journeys),
        "longest_pause_s": round(max(gaps), 3),
        "median_pause_s": round(statistics.median(gaps), 3),
    }
    is_met = not figures["errors"] and figures["identical"] == count and figures["moved"] > 0
    return figures | {"met": is_met and figures["longest_pause_s"] <= LIMIT_S}


def show_failover(found: dict[str, Any]) -> str:
    return (
        f"one replica killed, --deterministic: {found['streams']} streams of {found['tokens']} tokens, {len(found['errors'])} errors{found['errors'][:1] or ''}, "
        f"{found['identical']} identical, {found['moved']} moved; longest pause {found['longest_pause_s']:.2f} s (must: {LIMIT_S:g}) "
        f"{'✓' if found['met'] else '✗'}"
    )


if __name__ == "__main__":
    sys.exit(main())
