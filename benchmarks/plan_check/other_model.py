"""Another model than the measured one: the embedded model is measured, and a plan from that is checked against a server with the other model, both with
the commands that a user has."""

import argparse
import contextlib
import io
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from benchmarks.plan_check.goals import OTHER_MODEL_GOAL
from benchmarks.plan_check.loads import NO_DRAFTS, loads
from benchmarks.plan_check.others import core_time
from octavo.cli.main import main
from octavo.cli.models import StartedServer
from octavo.plan.trace_files import write_trace

_LOADS = ("chat", "code")


def other_model(arguments: argparse.Namespace) -> None:
    """Each load with `--scale` of its rate, for as many requests: a larger model is slower."""
    traces = loads(arguments.seconds, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="octavo-plan-check-") as folder:
        costs = str(Path(folder) / "costs.json")
        cores = core_time()
        _octavo("plan", "--measure", costs, "--measure-seconds", str(arguments.measure_seconds))
        print(f"measured; others took {core_time().others_since(cores):.1%} of the cores", flush=True)
        server = StartedServer(arguments.model, NO_DRAFTS)
        try:
            found: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
            for _ in range(arguments.rounds):
                for name in _LOADS:
                    path = Path(folder) / f"{name}.jsonl"
                    write_trace(path, traces[name].scaled(arguments.scale))
                    cores = core_time()
                    command = ("plan", arguments.model, "--costs", costs, "--trace", str(path))
                    said = json.loads(_octavo(*command, "--check", server.record.url, "--json"))
                    others = core_time().others_since(cores)
                    print(f"{name}: {said['failed']} failed; others took {others:.1%} of the cores", flush=True)
                    for row in said["rows"]:
                        found[name, row["name"]].append((row["predicted"], row["seen"]))
        finally:
            server.stop()
    print("| load | measure | predicted | seen, mean of the runs | lowest … highest | off by | goal |")
    print("|---|---|---|---|---|---|---|")
    for (name, measure), values in found.items():
        if measure.endswith(("mean, s", "tokens/s")):
            predicted = fmean(each for each, _ in values)
            seen = [each for _, each in values]
            off = predicted / fmean(seen) - 1
            result = "met" if abs(off) <= OTHER_MODEL_GOAL else f"missed ({OTHER_MODEL_GOAL:.0%})"
            print(
                f"| {name} | {measure} | {predicted:.4g} | {fmean(seen):.4g} | {min(seen):.4g} … {max(seen):.4g} | {off:+.1%} | {result} |"
            )


def _octavo(*command: str) -> str:
    """What a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*command])
    return printed.getvalue()
