"""The highest rate that keeps the service levels: by a plan, and by bisection with real runs."""

import argparse
import asyncio
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.plan_check.loads import NO_DRAFTS, bench_options, settings_of
from octavo.cli.bench import clients
from octavo.cli.bench.report import percentile
from octavo.cli.bench.serve import warm_up
from octavo.cli.bench.workload import trace_workload
from octavo.cli.models import StartedServer
from octavo.cli.planning.measure import measure
from octavo.plan.answer import is_kept
from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.figures import Levels
from octavo.plan.fleet import simulate

LIMITS = Levels({"ttft_p99": 1.0, "itl_p99": 0.15})


LIMIT_GOAL = 0.10


class Limit(NamedTuple):
    servers: int
    predicted: float  # requests a second
    low: float  # the highest rate of those that were tried that kept the levels
    high: float  # … and the lowest that did not

    @property
    def off(self) -> float:
        return self.predicted / math.sqrt(self.low * self.high) - 1

    @property
    def is_met(self) -> bool:
        return abs(self.off) <= LIMIT_GOAL

    @property
    def words(self) -> str:
        result = "met" if self.is_met else f"missed ({LIMIT_GOAL:.0%})"
        return f"{self.servers} servers: planned {self.predicted:.2f}, seen {self.low:.2f} … {self.high:.2f} requests/s: off by {self.off:+.1%}, {result}"


def limit(arguments: argparse.Namespace) -> None:
    print(limit_of(arguments.servers, arguments, arguments.requests).words)


def limit_of(servers: int, arguments: argparse.Namespace, num_requests: int) -> Limit:
    """Servers of one thread each, which are measured all at once: each has less of a machine than one alone would."""
    base = trace_of(Shape(1.0, num_requests, Lengths(120, 0.7), Lengths(40, 0.6)), seed=21)
    one = ["--cpu-threads", "1"]
    with tempfile.TemporaryDirectory(prefix="octavo-plan-check-") as folder:
        costs = measure("", one, Path(folder) / "costs.json", arguments.measure_seconds, servers)
    settings = msgspec.structs.replace(settings_of(costs, {}), num_replicas=servers)

    def planned(rate: float) -> bool:
        return is_kept(simulate(base.scaled(rate), settings, levels=LIMITS), LIMITS)

    low, high = 0.1, 100.0
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if planned(middle) else (low, middle)
    predicted = low
    print(
        f"plan: {predicted:.2f} requests/s, front {costs.front.seconds * 1e3:.1f} ms, fit {costs.median_error:.1%}",
        flush=True,
    )
    server = StartedServer("", [*NO_DRAFTS, *one, "--data-parallel-size", str(servers)])
    try:
        options = bench_options(server)
        with asyncio.Runner() as runner:
            model = runner.run(warm_up(options))
        low, high = predicted / 1.4, predicted * 1.4
        for number in range(arguments.rounds + 2):
            middle = math.sqrt(low * high)
            load = trace_workload(base.scaled(middle), options.vocab_size, seed=700 + number)
            results = clients.send_all(options, model, load, lambda count: None, 1).results
            ttft = percentile([result.ttft for result in results if result.ttft is not None], 99)
            itl = percentile([gap for result in results for gap in result.gaps], 99)
            kept = ttft <= LIMITS.limits["ttft_p99"] and itl <= LIMITS.limits["itl_p99"]
            kept = kept and not any(result.error for result in results)
            figures = simulate(base.scaled(middle), settings, levels=LIMITS)
            print(
                f"{middle:.2f} requests/s: seen ttft p99 {ttft:.3f} s, itl p99 {itl * 1e3:.1f} ms, {'kept' if kept else 'missed'}; planned "
                f"{figures.level('ttft_p99'):.3f} s, {figures.level('itl_p99') * 1e3:.1f} ms",
                flush=True,
            )
            low, high = (middle, high) if kept else (low, middle)
    finally:
        server.stop()
    return Limit(servers, predicted, low, high)
