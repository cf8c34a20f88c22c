"""Hit rates and times to the first token of a trace with prefixes, by policy: a simulated fleet beside one infinite cache."""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.cluster.approximate import ApproximateTree
from benchmarks.cluster.bounds import ROOT, best_hits, infinite_hits, page_numbers
from benchmarks.cluster.simulated import Arrival, FleetSettings, StepCost, run_fleet
from octavo.replay.stats import at
from octavo.routing import POLICIES
from octavo.routing.policy import round_robin

NAME = "trace"
CACHE_AWARE = "sglang"  # approximate.py
TRACE_PAGE = 512  # tokens that one hash of the trace stands for
LEAST_SHARE = 0.97


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="JSON lines with timestamp (ms), input_length, output_length, hash_ids")
    parser.add_argument("--requests", type=int, default=10**9, help="only the first so many")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--saturation", type=float, default=2.0)
    parser.add_argument("--max-output", type=int, default=10**9, help="cut answers to so many tokens")
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES, CACHE_AWARE], default=[*POLICIES, CACHE_AWARE])
    parser.add_argument("--caches", type=float, nargs="+", default=[1.0, 0.25], help="of each replica, in working sets")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--row-ms", type=float, default=0.1)
    parser.add_argument("--token-ms", type=float, default=0.08)


def load(arguments: argparse.Namespace) -> list[Arrival]:
    """Every hash becomes a page of its own tokens."""
    arrivals = []
    for number, line in enumerate(arguments.file.read_text().splitlines()[: arguments.requests]):
        record = json.loads(line)
        length, hashes = record["input_length"], record["hash_ids"]
        prompt: list[int] = []
        for each in hashes:
            prompt += [each] * min(TRACE_PAGE, length - len(prompt))
        num_output = max(1, min(record["output_length"], arguments.max_output))
        arrivals.append(Arrival(record["timestamp"] / 1e3, f"r{number}", prompt, num_output))
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def run(arguments: argparse.Namespace) -> None:
    arrivals = load(arguments)
    page_size = arguments.page_size
    prompts = page_numbers((arrival.prompt for arrival in arrivals), page_size)
    total = sum(len(arrival.prompt) for arrival in arrivals)
    working_set = len({page for pages in prompts for page in pages})
    infinite = infinite_hits(prompts) * page_size
    print(
        f"{len(arrivals):,} requests in {arrivals[-1].seconds:,.0f} s, {total:,} prompt tokens; working set {working_set:,} pages of "
        f"{page_size}; one infinite cache finds {infinite / total:.1%}"
    )
    print(
        f"{arguments.replicas} replicas; a step takes {arguments.step_ms} ms + {arguments.row_ms} ms a row + {arguments.token_ms} ms a "
        f"prompt token; saturated at {arguments.saturation} s"
    )
    print(
        f"{'policy':<12} {'cache each':>11} {'hit rate':>9} {'of infinite':>12} {'of best':>8} {'TTFT p50':>9} {'p99 s':>8} {'most/least':>11}"
    )
    cost = StepCost(arguments.step_ms / 1e3, arguments.row_ms / 1e3, arguments.token_ms / 1e3)
    longest = max(len(arrival.prompt) + arrival.num_output for arrival in arrivals)
    shares = {}
    for share in arguments.caches:
        # A request must fit, however small the share is.
        num_pages = max(int(working_set * share), 2 * -(-longest // page_size))
        best = best_hits(prompts, arguments.replicas * num_pages) * page_size
        settings = FleetSettings(arguments.replicas, num_pages, page_size, 256, 8192, cost, arguments.saturation)
        for policy in arguments.policies:
            tree = ApproximateTree(ROOT, page_size, arguments.replicas) if policy == CACHE_AWARE else None
            result = run_fleet(arrivals, settings, POLICIES.get(policy, round_robin), tree)
            hits = result.hit_tokens
            shares[policy, share] = hits / infinite
            print(
                f"{policy:<12} {num_pages:>11,} {hits / total:>9.1%} {hits / infinite:>12.1%} {hits / best:>8.1%} "
                f"{at(result.first_seconds, 0.5) or 0:>9.2f} {at(result.first_seconds, 0.99) or 0:>8.2f} "
                f"{max(result.num_requests):>6}/{min(result.num_requests)}"
                + (f"  {result.preemptions} preemptions" if result.preemptions else ""),
                flush=True,
            )
    found = shares.get(("prefix", 1.0))
    if found is not None and found < LEAST_SHARE:
        print(f"FAILED: prefix finds less than {LEAST_SHARE:.0%} of one infinite cache's hits")
        sys.exit(1)
