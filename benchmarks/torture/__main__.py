"""python -m benchmarks.torture [faults | fuzz | soak], on a real server, with the figures printed. Exit code 1: something was lost."""

import argparse
import asyncio
import itertools
import sys
import time
from collections import Counter

from benchmarks.torture.faults import FLAGS, Campaign
from benchmarks.torture.faults_alone import AloneCampaign
from benchmarks.torture.fuzz import fuzz
from benchmarks.torture.house import House
from benchmarks.torture.soak import FLAGS as SOAK_FLAGS
from benchmarks.torture.soak import Look, Soak, slope, steady, verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["faults", "fuzz"], help="faults, fuzz, soak (default: faults fuzz)")
    parser.add_argument("--streams", type=int, default=64, help="faults: concurrent good clients (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, help="faults: output tokens of each request (default: 64)")
    parser.add_argument("--only", default="", help="only faults whose name contains this (kill_engine, disconnect …)")
    parser.add_argument(
        "--requests", type=int, default=100_000, help="fuzz: number of hostile requests (default: 100000)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="soak: duration in minutes (default: 30)")
    parser.add_argument("--clients", type=int, default=32, help="soak: concurrent clients (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    arguments = parser.parse_args()
    campaigns = {"faults": run_faults, "fuzz": run_fuzz, "soak": run_soak}
    if unknown := [what for what in arguments.what if what not in campaigns]:
        parser.error(f"unknown campaign {unknown[0]!r}; there are {', '.join(campaigns)}")
    return max([campaigns[what](arguments) for what in arguments.what])


def run_faults(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    campaigns = [kind(arguments.streams, arguments.tokens) for kind in (Campaign, AloneCampaign)]
    rows = []
    _show("fault", "recovery", "lost", "leaked", "good clients saw")
    for row in itertools.chain.from_iterable(campaign.run(arguments.only) for campaign in campaigns):
        rows.append(row)
        recovery = "-" if row.recovery_s is None else f"{row.recovery_s:.1f} s"
        _show(
            row.fault, recovery, str(row.lost), str(row.leaked), f"{row.saw}; {row.remark}" if row.remark else row.saw
        )
    seconds = time.monotonic() - began
    print(f"\n{len(rows)} faults in {seconds:.0f} s, {arguments.streams} streams of {arguments.tokens} tokens\n")
    return 1 if any(row.lost or row.leaked for row in rows) or not rows else 0


def _show(fault: str, recovery: str, lost: str, leaked: str, saw: str) -> None:
    """Print a row of the table at once. `leaked`: pages, and anything else left behind."""
    print(f"{fault:36}  {recovery:>8}  {lost:>4}  {leaked:>6}  {saw}", flush=True)


def run_fuzz(arguments: argparse.Namespace) -> int:
    with House(*FLAGS) as house:
        before = [house.engine(), *house.servers()]
        tally, changed, seconds = asyncio.run(fuzz(house, arguments.requests, arguments.seed))
        leaked = asyncio.run(house.used_pages())
        crashed = sum(pid not in before for pid in [house.engine(), *house.servers()])
    print(f"{tally.sent.total():,} hostile requests in {seconds:.0f} s (seed {arguments.seed}), with 16 good clients")
    print("  sent: " + ", ".join(f"{kind} {count:,}" for kind, count in tally.sent.most_common()))
    print("  statuses: " + _counts(tally.statuses) + f"; {tally.left:,} disconnected without waiting")
    print("  statuses of requests sent a byte a second: " + (_counts(tally.slow) or "none yet"))
    print(
        f"  5xx or no answer: {len(tally.faults)}; processes that ended: {crashed}; good answers changed: {changed}; pages leaked: {leaked}\n"
    )
    for fault in tally.faults[:10]:
        print(f"  {fault}")
    return 1 if tally.faults or changed or crashed or leaked else 0


def _counts(statuses: Counter[int]) -> str:
    return ", ".join(f"{status} {count:,}" for status, count in statuses.most_common())


def run_soak(arguments: argparse.Namespace) -> int:
    print(f"soak of {arguments.minutes:g} minutes, {arguments.clients} clients, seed {arguments.seed}")
    print(
        "  minute  all resident  without files  open files  threads  pages used/cached/free  most used  preempted  "
        "engine + API + supervisor",
        flush=True,
    )
    with House(*SOAK_FLAGS) as house:
        soak = Soak(house, arguments.minutes, arguments.seed, arguments.clients)
        looks = asyncio.run(soak.run(_show_look))
    count = soak.count
    print("  requests: " + ", ".join(f"{kind} {number:,}" for kind, number in count.asked.most_common()))
    print(
        f"  {count.answers:,} whole answers, {count.left:,} clients disconnected, {count.preemptions:,} preemptions, "
        f"{count.killed} engine killed, {count.canaries:,} canaries ({count.changed} changed), {len(count.errors)} errors"
    )
    for error in count.errors[:10]:
        print(f"    {error}")
    part = steady(looks)
    minutes = part[-1].minute - part[0].minute
    print(f"  steady part, {minutes:.1f} minutes: {slope(part) / 2**10:+.0f} KiB a minute", end="")
    print(f" on {part[0].held.private / 2**20:.0f} MiB")
    problems = verdict(looks, count)
    print(f"  verdict: {'; '.join(problems) or 'flat, nothing lost, nothing leaked'}\n")
    return 1 if problems else 0


def _show_look(look: Look) -> None:
    held = look.held
    pages = "/".join(map(str, look.pages.values()))
    parts = " + ".join(f"{size / 2**20:.1f}" for size in look.parts.values())
    print(
        f"  {look.minute:6.1f}  {held.proportional / 2**20:8.1f} MiB  {held.private / 2**20:9.1f} MiB  {held.open_files:10d}  "
        f"{held.threads:7d}  {pages:>22}  {look.most_pages:9d}  {look.preemptions:9d}  {parts} MiB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
