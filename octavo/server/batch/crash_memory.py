"""CrashMemory: remembers which lines of batches were in flight when their process ended, so that a line that ends processes is
failed instead of being tried again and again.

A line is written to a memory-mapped file before it is sent, and removed from it when its record is written or it is given up in
order. The mapping outlives its process, however that ends. The next process that runs batches reads it. Lines that were in flight
together are suspects: one of them may be the cause. Each suspect is tried again with no other line in flight. A line that was the
only one in flight at the end of two processes is guilty.

Requests by HTTP run beside the lines and may be the cause, too. Therefore a process runs for a while before it tries suspects: if
it ends in that time, something else ends processes, and all suspects begin again without a strike."""

import contextlib
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from octavo.server.batch.files import replace_file

log = logging.getLogger("octavo.server")

GUILTY = 2  # processes that ended while it was the only line in flight
CONTROL_SECONDS = 2.0
"""How long a process runs without a suspect before it tries one; as long again for each strike."""
VALIDATION = 0  # the line number that stands for reading the whole input

_HEADER = struct.Struct("<8sQQQ")  # magic, run, whether it runs, whether others may be the cause
_SLOT = struct.Struct("<38sxxQ")  # batch id, line number
_MAGIC = b"octavo 1"

Line = tuple[str, int]  # batch id, line number


class _Suspects(msgspec.Struct):
    run: int = 0  # the last run whose end was counted
    strikes: dict[str, dict[int, int]] = {}  # batch id → line number → ends at which it was the only line in flight


class CrashMemory:
    def __init__(
        self,
        root: Path,
        num_slots: int,
        lost_engine: Callable[[], bool] = lambda: False,
        num_seated: Callable[[], int] = lambda: 1,
    ) -> None:
        """`num_slots`: most lines in flight at once. `lost_engine`: whether the engine has ended for good, which ends the server:
        the lines in flight count as at the end of a process. `num_seated`: requests that the engine was computing then."""
        self._map_path, self._suspects_path = root / "lines-in-flight", root / "suspects.json"
        self._num_slots = num_slots
        self._lost_engine, self._num_seated = lost_engine, num_seated
        self._suspects = _Suspects()
        self._map: mmap.mmap | None = None
        self._free = list(range(num_slots))
        self._run = 0
        self._tries_from = 0.0  # time.monotonic()

    def open(self) -> None:
        """Read what the previous process has left, count its end, and begin an own record. Raises OSError."""
        self._suspects = _read_suspects(self._suspects_path)
        run, was_running, has_company, in_flight = _read_map(self._map_path)
        if was_running and run != self._suspects.run:
            self._count(in_flight, has_company)
            self._suspects.run = run
            self._save()
        self._run = time.time_ns()
        size = _HEADER.size + self._num_slots * _SLOT.size
        fresh = self._map_path.with_name(f"{self._map_path.name}.new")
        with open(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b") as file:
            # Written, not only extended: storing to a mapped page of a full disk would end this process.
            file.write(_HEADER.pack(_MAGIC, self._run, True, False).ljust(size, b"\0"))
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        fresh.replace(self._map_path)
        self._tries_from = time.monotonic()

    def close(self) -> None:
        """The runner stops in order: no line is to blame for that."""
        if self._map is not None:
            self._mark(is_running=self._lost_engine())
            self._map.close()
            self._map = None

    def suspects(self, batch_id: str) -> frozenset[int]:
        """Lines to be tried alone."""
        return frozenset(self._suspects.strikes.get(batch_id, {}))

    def is_guilty(self, batch_id: str, line: int) -> bool:
        return self._strikes(batch_id, line) >= GUILTY

    def seconds_until_trial(self, batch_id: str, line: int) -> float:
        """How long to wait before a suspect is tried."""
        pause = CONTROL_SECONDS * (1 + self._strikes(batch_id, line))
        return max(0.0, self._tries_from + pause - time.monotonic())

    @contextlib.contextmanager
    def trying(self, batch_id: str, line: int) -> Iterator[None]:
        """Record the line as in flight."""
        assert self._map is not None
        slot = self._free.pop()
        place = _HEADER.size + slot * _SLOT.size
        _SLOT.pack_into(self._map, place, batch_id.encode(), line)
        try:
            yield
        finally:
            if self._map is not None and not self._lost_engine():
                _SLOT.pack_into(self._map, place, b"", 0)
            self._free.append(slot)

    def forget(self, batch_id: str) -> None:
        """The batch has ended. Raises OSError."""
        if self._suspects.strikes.pop(batch_id, None) is not None:
            self._save()

    def _strikes(self, batch_id: str, line: int) -> int:
        return self._suspects.strikes.get(batch_id, {}).get(line, 0)

    def _count(self, in_flight: list[Line], has_company: bool) -> None:
        """Count the end of a process."""
        every = self._suspects.strikes
        if not in_flight:
            for lines in every.values():
                lines.update(dict.fromkeys(lines, 0))
            return
        for batch_id, line in in_flight:
            strikes = every.setdefault(batch_id, {})
            strikes[line] = strikes.get(line, 0) + (len(in_flight) == 1 and not has_company)
        names = ", ".join(f"line {line} of {batch_id}" for batch_id, line in in_flight[:8])
        more = f" and {len(in_flight) - 8} more" if len(in_flight) > 8 else ""
        log.warning("a process ended while it ran %s%s: trying these one at a time", names, more)

    def _mark(self, is_running: bool) -> None:
        assert self._map is not None
        _HEADER.pack_into(self._map, 0, _MAGIC, self._run, is_running, is_running and self._num_seated() != 1)

    def _save(self) -> None:
        replace_file(self._suspects_path, msgspec.json.encode(self._suspects))


def _read_suspects(path: Path) -> _Suspects:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Suspects)
    except FileNotFoundError:
        return _Suspects()
    except (ValueError, RecursionError):  # of msgspec, and where a text is not UTF-8
        log.error("%s cannot be read and is replaced by an empty one", path.name)
        return _Suspects()


def _read_map(path: Path) -> tuple[int, bool, bool, list[Line]]:
    """(run, whether it was running, whether others may be the cause, lines in flight)"""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        return 0, False, False, []
    _, run, was_running, has_company = _HEADER.unpack_from(content)
    slots = content[_HEADER.size :]
    slots = slots[: len(slots) // _SLOT.size * _SLOT.size]
    found = [(name.rstrip(b"\0").decode("ascii", "replace"), line) for name, line in _SLOT.iter_unpack(slots)]
    return run, bool(was_running), bool(has_company), [each for each in found if each[0]]
