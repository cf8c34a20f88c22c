"""`python -m benchmarks.gpu`: reads the command line and runs the parts it names, several on one engine where they can share it.
Only --serve and --wake-up need the HTTP packages."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import workloads
from benchmarks.gpu.show import Results
from octavo.cli.bench.flags import above_zero, positive
from octavo.cli.flags import OFFLINE, Parser, add_config_flags, count, integer, options_from
from octavo.errors import ConfigError, OctavoError

FIRST_SEED = 100


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        return 1 if _run(arguments) else 0
    except ConfigError as error:
        sys.stderr.write(f"benchmarks.gpu: error: {error.message}\n")
        return 2
    except OctavoError as error:
        sys.stderr.write(f"benchmarks.gpu: error: {error.message}\n")
        return 1


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks.gpu",
        description="Measure the GPU path. Parts can be combined: --workload, --growth, --stages and --trace share one engine.",
    )
    parts = parser.add_argument_group("parts", "at least one; --model is qwen3-0.6b, llama-3.1-8b or a folder")
    add = parts.add_argument
    add("--workload", type=_names, metavar="NAME", help=f"tokens per second of these loads, separated by commas: {', '.join(workloads.NAMES)}, or all")  # fmt: skip
    add("--limits", action="store_true", help="what the chip allows each workload, computed: needs no GPU")
    add("--ceilings", action="store_true", help="the chip's own rates: bytes read, products in a burst and for seconds")
    add("--growth", action="store_true", help="decode step time for batch 1 to 1024 and context 128 to 32k (1024 rows unless --max-num-seqs says otherwise)")  # fmt: skip
    add("--trace", nargs="?", const="", metavar="FILE", help="GPU busy time and kernels of decode_heavy's steady steps; FILE gets the Chrome trace, compressed if it ends in .gz")  # fmt: skip
    add("--stages", action="store_true", help="where a run of shared_prefix spends its time: on the host, and in steps")
    add("--cold-start", action="store_true", help="process start to first token, without compiled kernels and with them")  # fmt: skip
    add("--wake-up", action="store_true", help="a model behind the gateway from sleep to its first token")
    add("--serve", action="store_true", help="the same load over HTTP (256 streams, 128 in, 256 out) and offline")
    add("--determinism", action="store_true", help="the workloads (default: all) with --deterministic and without, and the self-test of both")  # fmt: skip
    add("--routing", action="store_true", help="of a mixture: experts that steps of the workloads (default: decode_heavy and prefill_heavy) reach, beside uniform routing")  # fmt: skip
    add("--accuracy-fp8", action="store_true", help="next-token distributions with fp8 weights and fp8 KV against bf16")
    _add_settings(parser)
    add_config_flags(parser, OFFLINE, positional=False)
    return parser


def _add_settings(parser: Parser) -> None:
    add = parser.add_argument_group("settings").add_argument
    add("--runs", type=positive, default=3, metavar="N", help="measured runs (default: 3)")
    add("--seeds", type=_integers, metavar="N,N,…", help=f"a seed for each run (default: {FIRST_SEED}, {FIRST_SEED + 1}, …)")  # fmt: skip
    add("--warmup", choices=("full", "short", "none"), default="full", help="before each workload: a whole run with another seed, one of few output tokens, or none (default: full)")  # fmt: skip
    add("--scale", type=above_zero, default=1.0, metavar="X", help="shrink counts and lengths by this factor: a rehearsal, not a measurement")  # fmt: skip
    add("--bandwidth", type=above_zero, metavar="X", help="the chip's bytes per second (default: 4.26e12)")
    add("--flops", type=above_zero, metavar="X", help="the chip's FLOP per second (default: 795e12; fp8 weights: twice that)")  # fmt: skip
    add("--max-prefill-seconds", type=above_zero, default=8.0, metavar="X", help="growth: skip points whose prefill would take longer (default: 8)")  # fmt: skip
    add("--trace-rows", type=_integers, default=[], metavar="N,N,…", help="trace: steps of so many rows (default: as many as the engine takes); FILE gets the last")  # fmt: skip
    add("--trace-steps", type=positive, default=100, metavar="N", help="steps in the trace (default: 100)")
    add("--warm-starts", type=count, default=2, metavar="N", help="cold start: starts with cached kernels, after the one without (default: 2)")  # fmt: skip
    add("--wakes", type=positive, default=5, metavar="N", help="wake-up: times (default: 5)")
    add("--streams", type=positive, default=256, metavar="N", help="serve: concurrent streams (default: 256)")
    add("--windows", type=positive, default=32, metavar="N", help="accuracy: windows of 258 tokens, eight next tokens each (default: 32)")  # fmt: skip
    add("--text", default="", metavar="FILE", help="accuracy: text of the windows (default: random ids)")
    add("--result", metavar="FILE", help="also write all measurements to this JSON file, part by part")


def _names(text: str) -> list[str]:
    if text == "all":
        return list(workloads.NAMES)
    names = text.split(",")
    for name in names:
        if name not in workloads.NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(workloads.NAMES)}, all")
    return names


def _integers(text: str) -> list[int]:
    return [integer(part) for part in text.split(",")]


def _run(arguments: argparse.Namespace) -> int:
    """Return how many measurements failed."""
    if arguments.determinism:
        from benchmarks.gpu import determinism

        seeds = arguments.seeds or [FIRST_SEED + i for i in range(arguments.runs)]
        results = Results(arguments.result)
        return determinism.run(arguments, arguments.workload or workloads.NAMES, seeds, results)
    if arguments.routing:
        from benchmarks.gpu import routing
        from benchmarks.gpu.subject import Subject

        subject = Subject(arguments, enforce_eager=True)  # layers are watched while they compute
        names = arguments.workload or ["decode_heavy", "prefill_heavy"]
        num_failed = routing.run(subject, names, FIRST_SEED, arguments.scale, Results(arguments.result))
        subject.llm.close()
        return num_failed
    in_process = arguments.workload or arguments.growth or arguments.stages or arguments.trace is not None
    if not (
        in_process
        or arguments.limits
        or arguments.ceilings
        or arguments.cold_start
        or arguments.wake_up
        or arguments.serve
        or arguments.accuracy_fp8
    ):
        raise ConfigError("nothing to measure: give --workload all, --limits, --ceilings, --growth, --stages, --trace, --cold-start, --wake-up, --serve, --determinism, --routing or --accuracy-fp8")  # fmt: skip
    results = Results(arguments.result)
    results.put("options", options_from(arguments))
    seeds = arguments.seeds or [FIRST_SEED + i for i in range(arguments.runs)]
    if arguments.limits:
        from benchmarks.gpu import bounds

        bounds.run(arguments, seeds, results)
    if arguments.ceilings:
        from benchmarks.gpu import ceilings

        ceilings.run(results)
    # Parts with processes of their own come first: afterwards this process holds GPU memory.
    num_failed = _run_processes(arguments, seeds, results)
    if in_process:
        num_failed += _run_here(arguments, seeds, results)
    if arguments.accuracy_fp8:
        from benchmarks.gpu import accuracy
        from benchmarks.gpu.subject import engine_options

        options = engine_options(arguments)
        num_failed += accuracy.run(options, arguments.windows, arguments.text, accuracy.CUTS, results)
    return num_failed


def _run_processes(arguments: argparse.Namespace, seeds: Sequence[int], results: Results) -> int:
    num_failed = 0
    if arguments.cold_start:
        from benchmarks.gpu import cold_start
        from benchmarks.gpu.subject import engine_options

        num_failed += cold_start.run(engine_options(arguments), arguments.warm_starts, results)
    if arguments.wake_up:
        from benchmarks.gpu import wake_up

        num_failed += wake_up.run(arguments, results)
    if arguments.serve:
        from benchmarks.gpu import serve

        num_failed += serve.run(arguments, serve.Load.scaled(arguments.streams, arguments.scale), seeds, results)
    return num_failed


def _run_here(arguments: argparse.Namespace, seeds: Sequence[int], results: Results) -> int:
    from benchmarks.gpu.subject import Subject

    otherwise: dict[str, Any] = {"max_num_seqs": 1024} if arguments.growth else {}
    subject = Subject(arguments, **otherwise)
    results.put("engine", subject.describe())
    print(subject.headline(), flush=True)
    num_failed = 0
    if arguments.workload:
        from benchmarks.gpu import throughput

        num_failed += throughput.run(subject, arguments.workload, seeds, arguments.scale, arguments.warmup, results)
    if arguments.growth:
        from benchmarks.gpu import growth

        num_failed += growth.run(subject, growth.points(arguments.scale), arguments.max_prefill_seconds, results)
    if arguments.stages:
        from benchmarks.gpu import stages

        num_failed += stages.run(subject, seeds, arguments.scale, results)
    if arguments.trace is not None:
        from benchmarks.gpu import trace

        for rows in arguments.trace_rows or [subject.report.max_num_seqs]:
            part = f"trace_{rows}" if arguments.trace_rows else "trace"
            steps = arguments.trace_steps
            num_failed += trace.run(subject, rows, arguments.trace, seeds[0], arguments.scale, steps, results, part)
    subject.llm.close()
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
