"""The flags of `octavo bench latency | throughput | serve`. The measuring modules are imported when their command runs."""

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

from octavo.cli.flags import OFFLINE, Parser, add_config_flags, count, integer, number, one_of
from octavo.config import AUTO

SLO_NAMES = ("ttft", "tpot", "e2el")


def add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure latency, throughput, or a running server")
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", parser_class=Parser)
    parser.set_defaults(run=lambda _: _print_help(parser))
    _add_latency(kinds)
    _add_throughput(kinds)
    _add_serve(kinds)


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _runs(module: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        code: int = importlib.import_module(f"octavo.cli.bench.{module}").run(arguments)
        return code

    return run


def positive(text: str) -> int:
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def above_zero(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _processes(text: str) -> int | str:
    return AUTO if text.strip().lower() == AUTO else positive(text)


def slo(text: str) -> tuple[str, float]:
    """Parse one service level in milliseconds: ttft:500."""
    name, _, limit = text.partition(":")
    if name not in SLO_NAMES or not limit:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a service level: give NAME:MILLISECONDS, NAME being {', '.join(SLO_NAMES)}"
        )
    return name, above_zero(limit)


def _add_lengths(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    add = parser.add_argument
    add("--input-len", "--random-input-len", type=positive, default=input_len, metavar="N", help=f"tokens in each prompt (default: {input_len})")  # fmt: skip
    add("--output-len", "--random-output-len", type=positive, default=output_len, metavar="N", help=f"tokens to generate for each prompt (default: {output_len})")  # fmt: skip


def _add_result(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--result", "--output-json", metavar="FILE", help="also write all measurements to this JSON file"
    )


def _add_latency(kinds: Any) -> None:
    parser = kinds.add_parser(
        "latency",
        help="time to finish one batch",
        description="Measure the time from submitting one batch of equal requests to its last token. End-of-sequence is ignored.",
    )
    _add_lengths(parser, 32, 128)
    parser.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="requests in the batch (default: 8)"
    )
    parser.add_argument("--num-iters", type=positive, default=10, metavar="N", help="measured runs (default: 10)")
    parser.add_argument(
        "--num-iters-warmup", type=integer, default=1, metavar="N", help="runs before measuring (default: 1)"
    )
    _add_result(parser)
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_runs("latency"))


def _add_throughput(kinds: Any) -> None:
    parser = kinds.add_parser(
        "throughput",
        help="tokens per second over many requests at once",
        description="Measure tokens per second when all requests are submitted at once. End-of-sequence is ignored.",
    )
    _add_lengths(parser, 128, 128)
    parser.add_argument("--num-prompts", type=positive, default=32, metavar="N", help="requests (default: 32)")
    parser.add_argument(
        "--shared-prefix", type=integer, default=0, metavar="N", help="tokens that all prompts share at their start, in addition to --input-len (default: 0)"
    )  # fmt: skip
    parser.add_argument(
        "--compare-sequential",
        action="store_true",
        help="also run the same requests one after another, and print the ratio",
    )
    _add_result(parser)
    add_config_flags(parser, OFFLINE)
    parser.set_defaults(run=_runs("throughput"))


def _add_serve(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        help="measure any OpenAI-compatible server",
        description="Send streamed requests to a server and report time to first token, time per output token, "
        "inter-token latency, throughput and goodput.",
    )
    add = parser.add_argument
    add(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: http://127.0.0.1:8000)"
    )
    add("--model", metavar="NAME", help="model to ask for (default: the first one the server lists)")
    add("--endpoint", type=one_of(("chat", "completions")), default="completions", metavar="{chat,completions}", help="which API (default: completions)")  # fmt: skip
    add("--api-key", metavar="KEY", help="the server's API key; environment: OCTAVO_API_KEY")
    add("--num-prompts", type=positive, default=100, metavar="N", help="requests (default: 100)")
    add("--num-warmups", type=integer, default=1, metavar="N", help="requests before measuring (default: 1)")
    add("--request-rate", type=above_zero, default=float("inf"), metavar="X", help="requests per second, with Poisson arrivals (default: inf, all at once)")  # fmt: skip
    add("--trace", metavar="FILE", help="replay a trace (see octavo plan): its times, lengths and prefixes, up to --num-prompts requests; prompts are token ids")  # fmt: skip
    add("--max-concurrency", type=positive, metavar="N", help="most requests in flight (default: no limit)")
    add("--client-processes", type=_processes, default=AUTO, metavar="N", help="processes that send and receive; auto: by cores and streams (default: auto)")  # fmt: skip
    _add_lengths(parser, 128, 128)
    add("--shared-prefix-len", "--random-prefix-len", type=integer, default=0, metavar="N", help="tokens that all prompts share at their start, in addition to --input-len (default: 0)")  # fmt: skip
    add("--prompt-kind", type=one_of(("words", "ids")), default="words", metavar="{words,ids}", help="prompts of random words, about one token each, or of random token ids (default: words)")  # fmt: skip
    add(
        "--vocab-size",
        type=positive,
        default=30000,
        metavar="N",
        help="with --prompt-kind ids: token ids are below this (default: 30000)",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="generate exactly --output-len tokens, even if the model would stop earlier",
    )
    add("--temperature", type=number, default=0.0, metavar="X", help="sampling temperature (default: 0)")
    add("--goodput", type=slo, nargs="+", default=[], metavar="NAME:MS", help="service levels that a request must meet to count for goodput: ttft:500 tpot:50 e2el:10000")  # fmt: skip
    add("--timeout", type=above_zero, default=600.0, metavar="X", help="seconds after which a request counts as failed (default: 600)")  # fmt: skip
    add("--seed", type=integer, default=0, metavar="N", help="seed of prompts and arrivals (default: 0)")
    _add_result(parser)
    parser.set_defaults(run=_runs("serve"))
