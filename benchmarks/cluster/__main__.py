"""Benchmarks of routing, and of what happens to streams when a replica ends.

Usage: python -m benchmarks.cluster decisions | memory | rejoin | feed | overhead | trace FILE | scaling | ranks | failover | autoscale [--help]"""

import argparse

from benchmarks.cluster import (
    autoscale,
    decisions,
    failover,
    feed_cost,
    memory,
    overhead,
    ranks,
    rejoin,
    scaling,
    trace,
)
from octavo.cli.bench.report import facts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for module in (decisions, memory, rejoin, feed_cost, overhead, trace, scaling, ranks, failover, autoscale):
        command = commands.add_parser(module.NAME, help=module.__doc__, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    machine = facts()["machine"]
    print(f"{machine['processor']}, {machine['cores']} cores")
    arguments.run(arguments)


main()
