"""python -m benchmarks.torture [faults | fuzz | hostile | soak], on a real server, with the figures printed. Exit code 1: something was
lost, or a bound is broken."""

import argparse
import asyncio
import itertools
import json
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.torture.attack_run import (
    MAX_GAP,
    MAX_HEALTH,
    MAX_MEMORY,
    MAX_START,
    AttackCampaign,
    Row,
)
from benchmarks.torture.attacks import CATALOGUE
from benchmarks.torture.faults import FLAGS, Campaign
from benchmarks.torture.faults_alone import AloneCampaign
from benchmarks.torture.fuzz import fuzz
from benchmarks.torture.house import House
from benchmarks.torture.soak import FLAGS as SOAK_FLAGS
from benchmarks.torture.soak import HOSTILE_FLAGS, Look, Soak, slope, steady, verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default=["faults", "fuzz"], help="faults, fuzz, hostile, soak (default: faults fuzz)"
    )
    parser.add_argument("--streams", type=int, default=64, help="faults: concurrent good clients (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, help="faults: output tokens of each request (default: 64)")
    parser.add_argument(
        "--only", default="", help="only faults or attacks whose name contains this; of attacks, several with commas"
    )
    parser.add_argument("--list", action="store_true", help="hostile: print the names of the attacks")
    parser.add_argument(
        "--api-processes", type=int, default=1, help="hostile: API processes of the server (default: 1)"
    )
    parser.add_argument("--api-key", action="store_true", help="hostile: the server has keys, and attacks use one")
    parser.add_argument(
        "--gateway", action="store_true", help="hostile: three models on one port, of which two take turns in one place"
    )
    parser.add_argument("--json", default="", help="hostile: file for every row's figures")
    parser.add_argument(
        "--requests", type=int, default=100_000, help="fuzz: number of hostile requests (default: 100000)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="soak: duration in minutes (default: 30)")
    parser.add_argument("--clients", type=int, default=32, help="soak: concurrent clients (default: 32)")
    parser.add_argument("--hostile", action="store_true", help="soak: clients that attack are among them")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    arguments = parser.parse_args()
    campaigns = {"faults": run_faults, "fuzz": run_fuzz, "hostile": run_hostile, "soak": run_soak}
    if unknown := [what for what in arguments.what if what not in campaigns]:
        parser.error(f"unknown campaign {unknown[0]!r}; there are {', '.join(campaigns)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped, too
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


def run_hostile(arguments: argparse.Namespace) -> int:
    campaign = AttackCampaign(arguments.api_processes, arguments.api_key, arguments.seed, arguments.gateway)
    attacks = campaign.chosen(CATALOGUE, arguments.only)
    if arguments.list:
        print("\n".join(attack.name for attack in attacks))
        return 0
    print(
        f"{len(attacks)} attacks, {arguments.api_processes} API processes, {'with' if arguments.api_key else 'without'} keys, "
        f"seed {arguments.seed}. Bounds: gap +{MAX_GAP:g} s beyond quiet times, a new stream's first event +{MAX_START:g} s, "
        f"/health {MAX_HEALTH * 1000:.0f} ms, memory +{MAX_MEMORY / 2**20:.0f} MB and twice the bytes sent, no process ends, no 5xx. "
        "A row that is over a bound by little is run up to twice more, and its medians are shown (×2, ×3)."
    )
    _show_row("attack", "sent", "gap", "first", "health", "memory", "took", "status", "")
    began, rows = time.monotonic(), []
    for row in campaign.run(attacks):
        rows.append(row)
        _show_attack(row)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps([asdict(each) for each in rows], indent=1))
    broken = [row for row in rows if row.is_broken]
    print(
        f"\n{len(rows)} attacks in {time.monotonic() - began:.0f} s, {campaign.num_starts} servers: {len(broken)} broke a bound"
    )
    for row in broken:
        print(f"  {row.attack:42}  {'; '.join(row.figures.broken)[:200]}")
    if rows:
        figures = [row.figures for row in rows]
        print(
            f"worst: gap +{max(each.gap for each in figures):.2f} s, first event +{max(each.start for each in figures):.2f} s, "
            f"/health {max(each.health for each in figures) * 1000:.0f} ms, memory +{max(each.memory for each in figures) / 2**20:.0f} MB, "
            f"the watcher's own delay {max(each.lag for each in figures) * 1000:.0f} ms\n"
        )
    return 1 if broken or not rows else 0


def _show_attack(row: Row) -> None:
    figures = row.figures
    times = f" ×{row.num_runs}" if row.num_runs > 1 else ""
    words = [f"BROKEN: {'; '.join(figures.broken)[:160]}"] if row.is_broken else []
    _show_row(
        row.attack + times,
        f"{figures.sent / 2**20:.1f} MB",
        f"+{figures.gap * 1000:.0f} ms",
        f"+{figures.start * 1000:.0f} ms",
        f"{figures.health * 1000:.0f} ms",
        f"+{figures.memory / 2**20:.0f} MB",
        f"{figures.seconds:.1f} s",
        figures.statuses,
        "; ".join([*words, *filter(None, [figures.remark])]),
    )


def _show_row(
    attack: str, sent: str, gap: str, start: str, health: str, memory: str, took: str, status: str, words: str
) -> None:
    print(
        f"{attack:44} {sent:>9} {gap:>9} {start:>9} {health:>8} {memory:>8} {took:>6}  {status:14} {words}".rstrip(),
        flush=True,
    )


def run_soak(arguments: argparse.Namespace) -> int:
    print(f"soak of {arguments.minutes:g} minutes, {arguments.clients} clients, seed {arguments.seed}")
    print(
        "  minute  all resident  without files  open files  threads  pages used/cached/free  most used  preempted  "
        "engine + its grammars + API + its sandboxes + supervisor",
        flush=True,
    )
    flags = (*SOAK_FLAGS, *HOSTILE_FLAGS) if arguments.hostile else SOAK_FLAGS
    with House(*flags) as house:
        soak = Soak(house, arguments.minutes, arguments.seed, arguments.clients, arguments.hostile)
        looks = asyncio.run(soak.run(_show_look))
    count = soak.count
    print("  requests: " + ", ".join(f"{kind} {number:,}" for kind, number in count.asked.most_common()))
    if arguments.hostile:
        names = ", ".join(f"{name} {number:,}" for name, number in count.attacks.most_common(12))
        print(f"  attacks: {count.attacks.total():,} of {len(count.attacks)} kinds: {names} …")
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
