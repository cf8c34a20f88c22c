"""octavo plan against real runs: three loads × three settings of the embedded model on this machine, predicted beside seen. The steps that the
model is fitted to (octavo plan --measure) are of other requests.

    python -m benchmarks.plan_check all --seconds 15 --measure-seconds 15 --output results       # every goal, and goals.json; or part by part:
    python -m benchmarks.plan_check run --setting default --output results
    python -m benchmarks.plan_check run --setting few-rows --output results
    python -m benchmarks.plan_check run --setting small-steps --output results
    python -m benchmarks.plan_check table --output results
    python -m benchmarks.plan_check steps --output results          # which steps the model is off for
    python -m benchmarks.plan_check limit --servers 1 --requests 120
    python -m benchmarks.plan_check other --model FILE --scale 0.25 --seconds 25 --rounds 2      # by the steps of the embedded model
    python -m benchmarks.plan_check speed
    python -m benchmarks.plan_check fleet --replicas 1000 --seconds 600

    python -m benchmarks.plan_check run --gpu qwen3-0.6b --rounds 2 --output DIR     # on a GPU, with random weights; also llama-3.1-8b
    python -m benchmarks.plan_check table --output DIR                               # anywhere: DIR has gpu-*.tar.gz

Every run of the first kind takes about five minutes, on an otherwise idle machine: twice it measures steps, and three times it sends each load, with a
probe of the machine before and after. Runs beside which others took more than 3 % of the cores are sent again, and left out.
speed: simulated requests a second on one core, with eight replicas."""

import argparse
from collections.abc import Callable

from benchmarks.plan_check.goals import run_all, table
from benchmarks.plan_check.limit import limit
from benchmarks.plan_check.loads import SETTINGS
from benchmarks.plan_check.other_model import other_model
from benchmarks.plan_check.real import run
from benchmarks.plan_check.residuals import residuals
from benchmarks.plan_check.scale import fleet, speed

COMMANDS: dict[str, Callable[[argparse.Namespace], object]] = {
    "all": run_all,
    "run": run,
    "table": table,
    "steps": residuals,
    "speed": speed,
    "fleet": fleet,
    "limit": limit,
    "other": other_model,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", default="")
    parser.add_argument(
        "--flag", action="append", default=[], help="a further flag of the server, as --flag=--cpu-threads=1"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure-seconds", type=float, default=15.0)
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=450.0,
        help="of a setting: after them, no run beside which others computed is sent again",
    )
    parser.add_argument(
        "--gpu",
        default="",
        help="qwen3-0.6b, llama-3.1-8b or a folder: random weights, loads for a GPU, results in one file",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of a GPU's loads: a rehearsal; with other: of the rates"
    )
    parser.add_argument("--setting", choices=SETTINGS, help="default: default; with all: every one")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--output", default="plan-check")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument(
        "--share", type=float, action="append", help="of the fleet that is simulated; several: compared with the first"
    )
    parser.add_argument("--seed", type=int, default=11, help="of the loads")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--trace", default="")
    parser.add_argument("--requests", type=int, default=4000)
    arguments = parser.parse_args()
    if arguments.what == "run":
        arguments.setting = arguments.setting or "default"
    COMMANDS[arguments.what](arguments)


if __name__ == "__main__":
    main()
