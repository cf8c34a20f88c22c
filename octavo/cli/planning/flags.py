"""The flags of `octavo plan`."""

import argparse
import re
from typing import Any

from octavo.cli.flags import add_config_flags, count, integer, number, one_of
from octavo.errors import ConfigError, quote

MEASURES = ("ttft", "itl", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
DEFAULT_SLO = "ttft_p99=2s,itl_p99=200ms"
_TIME = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*(s|ms|us|µs|min|)")
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0}
_ARRIVALS = ("poisson", "bursty", "diurnal", "constant")  # plan/arrivals.py


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="how many replicas a load needs, which flags, what it costs, and what breaks first",
        description="Simulate the scheduler, the page cache, the router and the queue limit on a virtual clock, and say how many replicas "
        "of MODEL keep the service levels. Step times come from a measured machine (--costs) or are estimated for a --chip. "
        "octavo plan --measure FILE measures this machine. octavo plan record RECORDING --output FILE makes a trace of a recording. "
        "octavo plan advise RECORDING says what other limits would have done for a server's last minutes.",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace",
        metavar="FILE",
        help="requests: CSV or JSONL of Octavo, Mooncake, Azure or BurstGPT, or a recording of octavo serve",
    )
    load.add_argument("--rate", type=_positive, metavar="X", help="without a trace: requests a second")
    load.add_argument(
        "--seconds",
        type=_positive,
        default=600.0,
        metavar="X",
        help="how long they come, or how much of the trace is taken (default: 600)",
    )
    load.add_argument(
        "--requests", type=count, default=0, metavar="N", help="take at most so many requests (default: all)"
    )
    load.add_argument(
        "--input-len", type=count, default=512, metavar="N", help="mean tokens of a prompt (default: 512)"
    )
    load.add_argument(
        "--output-len", type=count, default=128, metavar="N", help="mean tokens of an output (default: 128)"
    )
    load.add_argument(
        "--length-spread",
        type=number,
        default=0.6,
        metavar="X",
        help="standard deviation of the logarithm of lengths; 0: all alike (default: 0.6)",
    )
    load.add_argument(
        "--shared-prefix",
        type=integer,
        default=0,
        metavar="N",
        help="tokens that prompts share at their start, in addition (default: 0)",
    )
    load.add_argument(
        "--num-prefixes",
        type=count,
        default=1,
        metavar="N",
        help="how many different shared prefixes there are (default: 1)",
    )
    load.add_argument(
        "--arrivals",
        type=one_of(_ARRIVALS),
        default="poisson",
        metavar="{poisson,bursty,diurnal,constant}",
        help="how requests come (default: poisson)",
    )
    load.add_argument(
        "--turns",
        type=count,
        default=1,
        metavar="N",
        help="turns of a session, each of which continues the one before (default: 1)",
    )
    load.add_argument(
        "--scale-rate",
        type=_positive,
        default=1.0,
        metavar="X",
        help="so many times as many requests a second as the trace has (default: 1)",
    )
    load.add_argument(
        "--scale-length",
        type=_positive,
        default=1.0,
        metavar="X",
        help="prompts and outputs so many times as long (default: 1)",
    )
    load.add_argument(
        "--sample",
        type=_share,
        default=1.0,
        metavar="X",
        help="simulate this share of the requests on this share of the replicas, for large fleets (default: 1, all)",
    )
    what = parser.add_argument_group("question")
    what.add_argument(
        "--slo",
        metavar="NAME=TIME,…",
        default=DEFAULT_SLO,
        help=f"service levels: ttft, itl, tpot or e2e, with _mean, _p50, _p90, _p95 or _p99 (default: {DEFAULT_SLO})",
    )
    what.add_argument("--search", action="store_true", help="also try other flags, and say what each is worth")
    what.add_argument(
        "--fail-at",
        type=number,
        metavar="SECONDS",
        help="also say what happens when a replica ends then; -1: at the peak",
    )
    what.add_argument(
        "--price", type=number, metavar="X", help="of one replica for an hour, for the cost of a million output tokens"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--costs", metavar="FILE", help="step times of a machine, from octavo plan --measure")
    machine.add_argument(
        "--chip",
        metavar="NAME",
        help="without a measured machine: h100, h200, a100, l4, l40s, rtx4090, mi300x, or cpu:CORESxCHANNELS; an estimate",
    )
    machine.add_argument(
        "--start-seconds",
        type=number,
        metavar="X",
        help="until a new replica takes requests (default: measured, or 60)",
    )
    machine.add_argument(
        "--draft-tokens",
        type=integer,
        default=0,
        metavar="N",
        help="speculative decoding: tokens drafted for each row, where that pays (default: 0, none)",
    )
    machine.add_argument(
        "--acceptance",
        type=number,
        default=0.6,
        metavar="X",
        help="with --draft-tokens: the probability that a drafted token is accepted if those before it were (default: 0.6)",
    )
    other = parser.add_argument_group("other")
    other.add_argument(
        "--measure", metavar="FILE", help="measure MODEL on this machine in a minute or two, and write FILE"
    )
    other.add_argument("--measure-seconds", type=_positive, default=60.0, metavar="X", help="how long (default: 60)")
    other.add_argument(
        "--check",
        metavar="URL",
        help="replay the load against this server, and print what was predicted beside what was seen",
    )
    other.add_argument("--output", metavar="FILE", help="with record: the trace to write")
    other.add_argument("--chart", metavar="FILE", help="write a chart of latency over load, as SVG")
    other.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_config_flags(parser, ("model", "cache", "scheduler", "parallel", "fleet"))
    parser.add_argument(
        "recording", nargs="?", metavar="RECORDING", help="with record or advise in the place of MODEL: the recording"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from octavo.cli.planning.command import run

    return run(arguments)


def _positive(text: str) -> float:
    value = number(text)
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _share(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most 1")
    return value


def read_levels(text: str) -> dict[str, float]:
    """ttft_p99=1s,itl_p99=50ms → seconds. Raises ConfigError."""
    levels: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        measure, _, which = name.strip().lower().rpartition("_")
        if not equals or measure not in MEASURES or which not in STATISTICS:
            raise ConfigError(
                f"--slo {part.strip() or text}: give NAME=TIME, such as ttft_p99=1s, where NAME is one of {', '.join(MEASURES)} with one of "
                f"{', '.join('_' + each for each in STATISTICS)}"
            )
        levels[f"{measure}_{which}"] = _seconds(value.strip().lower(), part.strip())
    return levels


def _seconds(text: str, part: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--slo {part}: {quote(text)} is not a time; give seconds or milliseconds, such as 1s or 50ms"
        )
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0 < seconds < 1e9:
        raise ConfigError(f"--slo {part}: the time must be above 0, such as 1s or 50ms")
    return seconds
