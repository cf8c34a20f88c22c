"""How fast simulations are, and how large a fleet may be."""

import argparse
import resource
import time
from pathlib import Path

from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.figures import Figures
from octavo.plan.fleet import Simulation
from octavo.plan.settings import FleetSettings, ReplicaSettings
from octavo.plan.step_model import StepModel
from octavo.plan.trace_files import read_trace


def speed(arguments: argparse.Namespace) -> None:
    """Of a trace in Azure's conversation style, or of the file itself."""
    if arguments.trace:
        trace = read_trace(Path(arguments.trace)).limited(arguments.requests)
    else:
        trace = trace_of(Shape(10.0, arguments.requests / 10, Lengths(1150, 1.0), Lengths(210, 0.8)), seed=1)
    replica = ReplicaSettings(512, 8192, 30_000, 32_768, depth=1)
    before = time.process_time()
    figures = Simulation(trace, FleetSettings(8, replica, GPU)).run().figures
    seconds = time.process_time() - before
    print(
        f"{len(trace.requests)} requests, {figures.output_tokens} output tokens, {figures.num_steps} steps of which {figures.num_plans} were planned one by "
        f"one: {seconds:.2f} s of CPU time, {len(trace.requests) / seconds:,.0f} requests/s"
    )


GPU = StepModel([1, 128, 8192], [0.005, 0.006, 0.2], 2e-5, 3e-8, 1.7e-9)


def fleet(arguments: argparse.Namespace) -> None:
    """Many replicas under one router, one request a second each, of a bursty day; then samples of it."""
    shape = Shape(float(arguments.replicas), arguments.seconds, Lengths(400, 0.8), Lengths(150, 0.7), "bursty")
    trace = trace_of(shape, seed=3)
    replica = ReplicaSettings(64, 2048, 4000, 16_384, depth=1)
    whole: Figures | None = None
    for share in arguments.share or [1.0]:
        settings = FleetSettings(max(1, round(arguments.replicas * share)), replica, GPU)
        wall, before = time.time(), time.process_time()
        figures = Simulation(trace.thinned(share), settings).run().figures
        spent = time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"share {share:g}: {figures.num_replicas} replicas, {figures.num_requests} requests, {figures.num_steps} steps: {spent:.0f} s of CPU time "
            f"({time.time() - wall:.0f} s on the clock), {figures.num_requests / spent:,.0f} requests/s, {peak:.2f} GiB at most",
            flush=True,
        )
        whole = whole or figures
        for name in ("ttft", "itl", "tpot", "e2e"):
            own, all_of_it = getattr(figures, name), getattr(whole, name)
            print(
                f"    {name}: "
                + ", ".join(
                    f"{which} {getattr(own, which) * 1e3:.1f} ms ({getattr(own, which) / getattr(all_of_it, which) - 1:+.1%})"
                    for which in ("mean", "p50", "p99")
                ),
                flush=True,
            )
