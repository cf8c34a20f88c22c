"""`python -m benchmarks.cpu`: reads the command line and runs the parts it names; without one, Octavo beside the peers."""

import argparse
import signal
import sys
from collections.abc import Collection, Sequence
from types import FrameType

from benchmarks.cpu import loads, peers
from benchmarks.gpu.show import Results
from octavo.cli.bench.flags import positive
from octavo.cli.flags import Parser, number
from octavo.errors import ConfigError, OctavoError
from octavo.weights.sources.source import resolve


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        return 1 if _run(arguments) else 0
    except ConfigError as error:
        sys.stderr.write(f"benchmarks.cpu: error: {error.message}\n")
        return 2
    except OctavoError as error:
        sys.stderr.write(f"benchmarks.cpu: error: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks.cpu",
        description="Measure the CPU path: Octavo and the peers that are installed, on the same prompts back to back.",
    )
    parts = parser.add_argument_group("parts", "without any: Octavo and the peers as servers, under the same loads")
    add = parts.add_argument
    add("--perplexity", action="store_true", help="loss on a fixed text: packed weights against float32 and llama.cpp")
    add("--growth", action="store_true", help="time of a decode step for batch 1 to 64 and context 128 to 4096")
    add("--limits", action="store_true", help="share of the machine's own bandwidth and dot products at batch 1, 8, 32")
    add("--profile", action="store_true", help="where the time of a step of one row goes, by operation")
    add = parser.add_argument_group("settings").add_argument
    add("--model", default="", metavar="FILE", help="GGUF file or folder (default: the embedded SmolLM2-135M-Instruct)")
    add("--servers", type=_names, default=list(peers.NAMES), metavar="NAME,…", help=f"servers to compare (default: {','.join(peers.NAMES)})")  # fmt: skip
    add("--llama-server", default="", metavar="FILE", help="llama.cpp's own server (default: llama-server on the PATH); without one, llama-cpp-python's")  # fmt: skip
    add("--llama-python", default="", metavar="FILE", help="interpreter with llama-cpp-python[server] (default: this one)")  # fmt: skip
    add("--vllm-python", default="", metavar="FILE", help="interpreter with vllm (default: this one)")
    add("--loads", type=_load_names, default=[load.name for load in loads.FULL], metavar="NAME,…", help=f"loads to run (default: {','.join(load.name for load in loads.FULL)})")  # fmt: skip
    add("--rounds", type=positive, default=3, metavar="N", help="rounds over all servers (default: 3)")
    add("--patience", type=number, default=0.0, metavar="X", help="on a shared machine: seconds to wait for it to be quiet before each start and load; also repeat a disturbed load (default: 0)")  # fmt: skip
    add("--quick", action="store_true", help="one round of small loads: a rehearsal, not a measurement")
    add("--result", metavar="FILE", help="also write all measurements to this JSON file, as they arrive")
    return parser


def _names(text: str) -> list[str]:
    return _some_of(peers.NAMES, text)


def _load_names(text: str) -> list[str]:
    return _some_of([load.name for load in loads.FULL], text)


def _some_of(known: Collection[str], text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return names


def _run(arguments: argparse.Namespace) -> int:
    """Return how many measurements failed."""
    results = Results(arguments.result)
    source = resolve(arguments.model)
    wanted = tuple(load for load in (loads.QUICK if arguments.quick else loads.FULL) if load.name in arguments.loads)
    given = peers.setting(arguments, source, wanted)
    results.put("model", {"path": str(source.path), "name": source.name})
    here = [name for name in ("limits", "growth", "profile") if getattr(arguments, name)]
    if not here and not arguments.perplexity:
        return _compare(arguments, given, results)
    num_failed = 0
    if arguments.perplexity:
        from benchmarks.cpu import perplexity

        num_failed += perplexity.run(given, 2 if arguments.quick else None, results)
    return num_failed + _run_here(here, arguments, str(source.path), results)


def _run_here(parts: Sequence[str], arguments: argparse.Namespace, model: str, results: Results) -> int:
    """Run the parts that use the engine in this process."""
    if not parts:
        return 0
    from benchmarks.cpu import engine, growth, profile

    runs = {"limits": growth.run_limits, "growth": growth.run, "profile": profile.run}
    ours = [name for name in arguments.servers if name in engine.OPTIONS]
    if not ours:
        raise ConfigError(f"--{parts[0]} measures Octavo: name one of {', '.join(engine.OPTIONS)} in --servers")
    return sum(runs[part](model, ours, arguments.quick, results) for part in parts)


def _compare(arguments: argparse.Namespace, given: peers.Setting, results: Results) -> int:
    from benchmarks.cpu import compare
    from benchmarks.cpu.rounds import Patience

    servers, skipped = peers.servers(arguments.servers, given)
    for name, reason in skipped.items():
        print(f"{name}: skipped, {reason}")
    results.put("skipped", skipped)
    num_rounds = 1 if arguments.quick else arguments.rounds
    return compare.run(
        servers,
        given.loads,
        num_rounds,
        results,
        patience=Patience(arguments.patience),
        is_rehearsal=arguments.quick,
    )


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit as Ctrl-C does: on the way out, servers are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
