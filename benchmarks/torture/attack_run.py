"""Runs the catalogue of attacks against a real server, one after the other, and holds what bystanders saw against bounds."""

import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.torture.attacks.adapters import write_adapters
from benchmarks.torture.attacks.base import MB, Answer, Attack, Door
from benchmarks.torture.house import House, ServerNotStarted, family, gateway_models
from benchmarks.torture.strike import Battle
from benchmarks.torture.watch import Seen, Watch

MAX_GAP = 0.5  # seconds beyond the longest gap of quiet times
MAX_START = 5.0  # seconds beyond the longest wait of quiet times for a first event
MAX_HEALTH = 0.3  # seconds
MAX_MEMORY = 256 * MB  # beyond twice the bytes sent
NOISE = 4.0  # a time or size over its bound by less than this factor may be noise, and is measured again
QUIET_S = 0.25  # before each attack
SETTLE_S = 0.35  # after each attack, at least
SETTLE_LIMIT_S = 10.0
CLEAR = 6.0  # times a bound: the attack is stopped, and the server replaced
BUSY = 0.7  # of a core, in an API process: it is still at work for the attack
FLAGS = ("--kv-cache-memory-bytes", "512M", "--enable-log-requests", "--trust-request-chat-template")
KEY, OTHER_KEY, ADMIN_KEY = "torture-key", "torture-other", "torture-admin"


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one attack."""

    gap: float  # beyond quiet times
    start: float  # the same of a new stream's first event
    max_start: float
    health: float
    memory: int
    sent: int
    statuses: str
    faults: tuple[str, ...]  # what no repetition excuses
    lag: float
    seconds: float
    remark: str = ""

    @property
    def excess(self) -> float:
        """The worst figure as a share of its bound."""
        memory = self.memory / (MAX_MEMORY + 2 * self.sent)
        return max(self.gap / MAX_GAP, self.start / self.max_start, self.health / MAX_HEALTH, memory)

    @property
    def broken(self) -> list[str]:
        found = [
            (self.gap > MAX_GAP, f"gap +{self.gap:.1f} s"),
            (self.start > self.max_start, f"first event +{self.start:.1f} s"),
            (self.health > MAX_HEALTH, f"/health {self.health * 1000:.0f} ms"),
            (self.memory > MAX_MEMORY + 2 * self.sent, f"memory +{self.memory / MB:.0f} MB"),
        ]
        return [what for is_broken, what in found if is_broken] + list(self.faults)


@dataclass(frozen=True, slots=True)
class Row:
    attack: str
    figures: Figures  # the median of all runs
    num_runs: int

    @property
    def is_broken(self) -> bool:
        return bool(self.figures.broken)


class AttackCampaign:
    def __init__(self, num_api_processes: int, has_key: bool, seed: int, has_gateway: bool = False) -> None:
        self._num_api_processes, self._has_key, self._seed = num_api_processes, has_key, seed
        self._has_gateway = has_gateway
        self._quiet: list[Seen] = []
        self.num_starts = 0

    def chosen(self, attacks: Sequence[Attack], only: str = "") -> list[Attack]:
        wanted = [each.strip() for each in only.split(",")]
        configuration = "key" if self._has_key else "no key"
        return [
            attack
            for attack in attacks
            if attack.needs in ("any", configuration)
            and (self._has_gateway or not attack.needs_gateway)
            and any(each in attack.name for each in wanted)
        ]

    def run(self, attacks: Sequence[Attack]) -> Iterator[Row]:
        left = list(attacks)
        while left:
            yield from self._on_one_server(left)

    def _on_one_server(self, left: list[Attack]) -> Iterator[Row]:
        """Take attacks from the list until it is empty or the server is not well any more."""
        folder = tempfile.mkdtemp(prefix="octavo-torture-")
        log = str(Path(folder) / "log")
        flags = [*FLAGS, "--api-processes", str(self._num_api_processes), "--record-folder", folder]
        keys = (KEY, OTHER_KEY, ADMIN_KEY) if self._has_key else ("", "", "")
        if self._has_key:
            flags += ["--api-key", f"{KEY},{OTHER_KEY}", "--admin-key", ADMIN_KEY]
        adapters = Path(folder) / "adapters"
        adapters.mkdir()
        write_adapters(adapters)
        flags += ["--enable-lora", "--lora-folders", str(adapters)]
        if self._has_gateway:
            flags = [*gateway_models(Path(folder)), *flags]
        self.num_starts += 1
        house = House(*flags, log=log, key=keys[0])
        try:
            with house, Watch(house.port, house.process.pid, keys[0]) as watch:
                site = _Site(house, watch, Door(house.port, *keys, log), self._seed)
                site.calm(2.0)
                while left:
                    row = site.row(left.pop(0))
                    yield row
                    if not site.is_well:
                        _end(house)
                        return
        except ServerNotStarted as error:
            sys.exit(f"{error}\n" + Path(log).read_text(errors="replace")[-2000:])
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _end(house: House) -> None:
    """Kill a server that does not recover: it would take a minute to stop."""
    for pid in family(house.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Site:
    """One server under attack."""

    def __init__(self, house: House, watch: Watch, door: Door, seed: int) -> None:
        self._house, self._watch, self._door, self._seed = house, watch, door, seed
        self._quiet: list[Seen] = []
        self.is_well = True

    def calm(self, seconds: float) -> None:
        """Watch for a while without an attack: the longest gaps of the last quiet times are the normal ones."""
        self._watch.begin()
        time.sleep(seconds)
        self._quiet = [*self._quiet[-11:], self._watch.look()]

    def row(self, attack: Attack) -> Row:
        runs = [self._once(attack)]
        # Noise of the machine can break a bound by a little: the median of three runs counts.
        while self.is_well and len(runs) < 3 and not runs[0].faults and 1.0 < runs[0].excess < NOISE:
            runs.append(self._once(attack))
            if len(runs) == 2 and runs[1].excess > 1.0 and runs[0].excess > 1.0:
                break  # two of three are over already
        best = sorted(runs, key=lambda run: (len(run.faults), run.excess))
        middle = best[len(best) // 2]
        if len(runs) > 1:
            values = [tuple(getattr(run, name) for run in runs) for name in ("gap", "start", "health", "memory")]
            gap, start, health, memory = (statistics.median_low(each) for each in values)
            faults = tuple(dict.fromkeys(fault for run in runs for fault in run.faults))
            middle = replace(middle, gap=gap, start=start, health=health, memory=int(memory), faults=faults)
        return Row(attack.name, middle, len(runs))

    def _once(self, attack: Attack) -> Figures:
        self.calm(QUIET_S)
        normal_gap = max(seen.gap for seen in self._quiet)
        normal_start = max(seen.start for seen in self._quiet)
        max_start = MAX_START + attack.seconds * attack.is_long
        battle = Battle(attack, self._door, random.Random(self._seed))
        named, helpers = self._processes()
        began = time.monotonic()
        self._watch.begin()

        def is_enough() -> bool:
            """Whether a bound is broken so clearly that more time would show nothing."""
            seen = self._watch.look()
            late = max(
                (seen.gap - normal_gap) / MAX_GAP, (seen.start - normal_start) / max_start, seen.health / MAX_HEALTH
            )
            return seen.was_killed or late > CLEAR

        battle.run(is_enough)
        took = time.monotonic() - began
        faults, remarks = [], []
        # A server that is still at work for this attack would spoil the next row.
        num_calm = 3 if battle.is_over else 1
        if battle.was_stopped or not self._settled(num_calm):
            self.is_well = False
        seen = self._watch.look()
        if seen.was_killed:
            self.is_well = False
            faults.append("memory without end: server killed")
        else:
            if ended := self._ended(named):
                faults += ended
                self.is_well = False  # what ended it may run again: a batch is resumed, for instance
            if not battle.was_stopped and (problem := battle.problem):
                faults.append(problem)
        if seen.health_faults:
            faults.append(f"{seen.health_faults} × /health failed")
        if seen.lost and not seen.was_killed:
            faults.append(f"{len(seen.lost)} bystanders failed: {seen.lost[0]}")
        if seen.changed:
            faults.append(f"{seen.changed} bystanders' answers changed")
        if not seen.was_killed and (gone := len(helpers - self._processes()[1])):
            remarks.append(f"{gone} helper processes replaced")
        if not self.is_well:
            remarks.append("server replaced")
        if battle.was_stopped:
            remarks.append("stopped")
        elif battle.is_over:
            remarks.append(f"left after {attack.seconds:g} s")
        return Figures(
            max(0.0, seen.gap - normal_gap),
            max(0.0, seen.start - normal_start),
            max_start,
            seen.health,
            max(0, seen.memory),
            sum(answer.num_sent for answer in battle.answers),
            _statuses(battle.answers),
            tuple(faults),
            seen.lag,
            took,
            "; ".join(remarks),
        )

    def _processes(self) -> tuple[dict[str, set[int]], set[int]]:
        """(the server's own processes by kind, their helpers)"""
        every = set(family(self._house.process.pid))
        try:
            engine = {self._house.engine()}
        except ValueError:  # none at this moment
            engine = set()
        named = {"supervisor": {self._house.process.pid}, "engine": engine, "API process": set(self._house.servers())}
        if self._house.models:
            every -= set(self._house.models_that_come_and_go())
        return named, every - set().union(*named.values())

    def _ended(self, before: dict[str, set[int]]) -> list[str]:
        if self._house.process.poll() is not None:
            return ["the supervisor ended"]
        now, _ = self._processes()
        return [f"the {kind} ended" for kind, pids in before.items() if pids - now[kind]]

    def _settled(self, num_calm: int) -> bool:
        """Wait until streams flow, /health answers and no API process is busy, in `num_calm` looks in a row. False: it takes too
        long."""
        ended = at = time.monotonic()
        used, calm = self._cpu_seconds(), 0
        while calm < num_calm:
            if at > ended + SETTLE_LIMIT_S:
                return False
            time.sleep(SETTLE_S)
            seen, now = self._watch.look(), time.monotonic()
            if seen.was_killed or self._house.process.poll() is not None:
                return False
            before, used = used, self._cpu_seconds()
            busiest = max((used[pid] - before.get(pid, used[pid]) for pid in used), default=0.0) / (now - at)
            at = now
            flows = max(seen.ages) < SETTLE_S and seen.probe_age < SETTLE_S
            calm = calm + 1 if flows and busiest < BUSY else 0
        return True

    def _cpu_seconds(self) -> dict[int, float]:
        """By API process."""
        found = {}
        for pid in self._house.servers():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found


def _statuses(answers: Sequence[Answer]) -> str:
    counts = Counter(
        str(answer.status) if answer.status else "-" if not answer.waited else "closed" if answer.is_closed else "none"
        for answer in answers
    )
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts.most_common())
