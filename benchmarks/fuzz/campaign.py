"""A campaign: a target's cases run in a child process with limits. If the child dies or hangs, the case that it was at is a fault, and
another child goes on."""

import contextlib
import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from benchmarks.fuzz.coverage import Coverage
from benchmarks.fuzz.mutate import MAX_BYTES
from benchmarks.fuzz.target import Target

MEMORY_BYTES = 768 * 2**20  # beyond what the child holds before its first case
HANG_SECONDS = 30.0
MAX_CORPUS = 2000
_HEAD = struct.Struct("<QQ")  # case number, length of the case; the case follows
_SLOT_BYTES = _HEAD.size + 2 * MAX_BYTES


@dataclass
class Fault:
    kind: str  # "exception", "slow", "signal" or "hang"
    what: str
    case: str  # hexadecimal


@dataclass
class Report:
    """A target's results so far."""

    target: str
    num_cases: int = 0
    num_refused: int = 0
    num_arcs: int = 0
    num_corpus: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    lines: dict[str, tuple[int, int]] = field(default_factory=dict)


def campaign(name: str, num_cases: int, seed: int, folder: Path) -> Report:
    """Run the cases of the target `name`. `folder`: where its corpus is kept between campaigns."""
    report = Report(name)
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        slot = Path(scratch) / "slot"
        slot.write_bytes(bytes(_SLOT_BYTES))
        num_children = 0
        while report.num_cases < num_cases and num_children < 200:
            arguments = [name, str(num_cases - report.num_cases), str(seed + 1000 * num_children), str(folder), scratch]
            num_children += 1
            complaints = Path(scratch) / "stderr"
            with open(complaints, "wb") as errors:
                child = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.fuzz", "--child", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            is_hung = _watch(child, slot)
            assert child.stdout is not None
            out = child.stdout.read()
            done, case = _slot(slot)
            if out and child.returncode == 0:
                part = msgspec.convert(json.loads(out), Report)
            else:  # what the child had counted is lost, but for the number of cases
                kind = "hang" if is_hung else "signal"
                words = complaints.read_bytes()[-400:].decode(errors="replace").strip()
                part = Report(name, num_cases=done, faults=[Fault(kind, f"{child.returncode}: {words}", case.hex())])
                slot.write_bytes(bytes(_SLOT_BYTES))
            report.num_cases += max(1, part.num_cases)
            report.num_refused += part.num_refused
            report.num_arcs = max(report.num_arcs, part.num_arcs)
            report.num_corpus = max(report.num_corpus, part.num_corpus)
            report.slowest = max(report.slowest, part.slowest)
            report.faults += part.faults
            report.lines = part.lines or report.lines
    report.seconds = time.monotonic() - began
    return report


def _watch(child: "subprocess.Popen[bytes]", slot: Path) -> bool:
    """Wait for the child to end. True: it was at one case for too long, by its own CPU time, and was killed. A child that sleeps, or that
    a busy machine does not run, gets ten times as long."""
    at, since, cpu_since = -1, time.monotonic(), 0.0
    while True:
        try:
            child.wait(1.0)
            return False
        except subprocess.TimeoutExpired:
            pass
        done, _ = _slot(slot)
        limit = HANG_SECONDS + (60 if done == 0 else 0)
        cpu = _cpu_seconds(child.pid)
        if done != at:
            at, since, cpu_since = done, time.monotonic(), cpu
        elif cpu - cpu_since > limit or time.monotonic() - since > 10 * limit:
            child.kill()
            child.wait()
            return True


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process that has not been waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _slot(slot: Path) -> tuple[int, bytes]:
    data = slot.read_bytes()
    number, length = _HEAD.unpack_from(data)
    return number, data[_HEAD.size : _HEAD.size + length]


# ── in the child ──


def run_child(target: Target, num_cases: int, seed: int, folder: Path, scratch: Path) -> Report:
    dice = random.Random(seed)
    coverage, report = Coverage(), Report(target.name)
    with open(scratch / "slot", "r+b") as file:
        slot = mmap.mmap(file.fileno(), _SLOT_BYTES)
    _limit()
    with contextlib.suppress(BaseException):
        target.run(target.seeds[0])  # imports what is imported late, so that it does not count as covered
    corpus: list[bytes] = []
    known: set[str] = set()
    kept = [path.read_bytes() for path in sorted(folder.iterdir())][:MAX_CORPUS]
    for seed_case in (*target.seeds, *kept):
        _run(target, seed_case, coverage, report, slot, known)
        corpus.append(seed_case)
    while report.num_cases < num_cases:
        case = target.case(dice, corpus)[:MAX_BYTES]
        _run(target, case, coverage, report, slot, known)
        if coverage.new and len(corpus) < MAX_CORPUS:
            corpus.append(case)
            (folder / f"{len(corpus):05d}-{dice.randrange(2**32):08x}").write_bytes(case)
    report.num_arcs, report.num_corpus, report.lines = len(coverage.seen), len(corpus), coverage.lines()
    return report


def _run(target: Target, case: bytes, coverage: Coverage, report: Report, slot: mmap.mmap, known: set[str]) -> None:
    slot[: _HEAD.size + len(case)] = _HEAD.pack(report.num_cases + 1, len(case)) + case
    began = time.process_time()
    try:
        with coverage:
            target.run(case)
    except target.refusals:
        report.num_refused += 1
    except BaseException as error:  # panics of Rust libraries are not Exceptions
        if isinstance(error, KeyboardInterrupt):
            raise
        _note(report, known, "exception", _place(error), case)
    seconds = time.process_time() - began
    report.slowest = max(report.slowest, seconds)
    if seconds > target.seconds:
        _note(report, known, "slow", f"{seconds:.1f} s", case)
    report.num_cases += 1


def _note(report: Report, known: set[str], kind: str, what: str, case: bytes) -> None:
    if f"{kind} {what}" not in known and len(known) < 100:
        known.add(f"{kind} {what}")
        report.faults.append(Fault(kind, what, case.hex()))


def _place(error: BaseException) -> str:
    """The error and the line of Octavo that it came through last: one fault is noted once."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/octavo/" in frame.filename] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__} at {where}: {str(error)[:160]}"


def _limit() -> None:
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def as_json(reports: Sequence[Report]) -> str:
    return json.dumps([asdict(report) for report in reports], indent=1)
