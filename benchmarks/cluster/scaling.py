"""How throughput grows with replicas: the same work for each, on a virtual clock with real schedulers, caches and one real router."""

import argparse
import random
import sys
import time

from benchmarks.cluster.simulated import Arrival, FleetSettings, StepCost, run_fleet
from octavo.replay.stats import at
from octavo.routing import POLICIES

NAME = "scaling"
LEAST_SHARE = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=64, help="for each replica")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--policy", choices=[*POLICIES], default="prefix")
    parser.add_argument("--seed", type=int, default=1)


def arrivals_of(num_replicas: int, arguments: argparse.Namespace, cost: StepCost) -> list[Arrival]:
    """A Poisson stream of more than the replicas compute, so that their pace is what counts; prompts share nothing."""
    rng = random.Random(arguments.seed)
    rows = 16
    # Seconds of a replica that a request takes: its prompt, and its share of decode steps.
    each = arguments.prompt_len * cost.token + arguments.output_len * (cost.step / rows + cost.row)
    rate = 4 * num_replicas / each
    now, found = 0.0, []
    for number in range(arguments.requests * num_replicas):
        now += rng.expovariate(rate)
        prompt = [rng.randrange(32_000) for _ in range(arguments.prompt_len)]
        found.append(Arrival(now, f"r{number}", prompt, arguments.output_len))
    return found


def run(arguments: argparse.Namespace) -> None:
    cost = StepCost(0.02, 0.0001, 0.00008)
    print(f"{arguments.requests} requests a replica, {arguments.prompt_len} tokens in and {arguments.output_len} out")
    print(
        f"{'replicas':>9} {'tokens/s':>10} {'of linear':>10} {'TTFT p50 s':>11} {'p99 s':>7} {'most/least':>11} {'front µs a request':>19}"
    )
    first: float | None = None
    worst = 1.0
    pages = 2 * arguments.requests * -(-(arguments.prompt_len + arguments.output_len) // 16)
    for count in arguments.replicas:
        arrivals = arrivals_of(count, arguments, cost)
        settings = FleetSettings(count, pages, 16, 256, 2048, cost, 2.0)
        began = time.process_time()
        result = run_fleet(arrivals, settings, POLICIES[arguments.policy])
        spent = time.process_time() - began
        pace = len(arrivals) * arguments.output_len / result.seconds
        first = first or pace / count
        share = pace / (first * count)
        worst = min(worst, share)
        print(
            f"{count:>9} {pace:>10,.0f} {share:>10.1%} {at(result.first_seconds, 0.5) or 0:>11.3f} "
            f"{at(result.first_seconds, 0.99) or 0:>7.3f} {max(result.num_requests):>6}/{min(result.num_requests):<4} "
            f"{result.routing_seconds / len(arrivals) * 1e6:>19.0f}   ({spent:.0f} s CPU)",
            flush=True,
        )
        saturates = len(arrivals) / result.routing_seconds
    print(f"one core routes {saturates:,.0f} requests/s of this size, events included")
    if worst < LEAST_SHARE:
        sys.exit(f"{worst:.1%} of linear: below {LEAST_SHARE:.0%}")
