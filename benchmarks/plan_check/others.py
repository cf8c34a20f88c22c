"""How much of the machine other processes took: a run beside others' work says nothing about a plan for a machine of one's own."""

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_CALM = 0.05  # of the cores' time
_HERTZ = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle, iowait: numbers of the first line of /proc/stat
_GUEST = 8  # from here on: contained in others


class CoreTime(NamedTuple):
    """Seconds of all cores since the start of the machine."""

    whole: float
    busy: float
    own: float  # by this process and those that it started, directly or not

    def others_since(self, before: "CoreTime") -> float:
        """Share of the cores' time that others took."""
        busy = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, busy) / max(self.whole - before.whole, 1e-9)


def wait_for_calm(seconds: float = 12.0) -> None:
    """Until others took little for a second, or these seconds are over."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        before = core_time()
        time.sleep(1.0)
        if core_time().others_since(before) < _CALM:
            return


def core_time() -> CoreTime:
    numbers = [int(each) for each in Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:]][:_GUEST]
    whole = sum(numbers)
    busy = whole - sum(numbers[at] for at in _IDLE)
    children: defaultdict[int, list[int]] = defaultdict(list)
    spent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(entry.name)
        children[int(fields[1])].append(process)
        spent[process] = sum(int(each) for each in fields[11:15])  # with children that were waited for
    own, waiting = 0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        own += spent.get(process, 0)
        waiting += children[process]
    return CoreTime(whole / _HERTZ, busy / _HERTZ, own / _HERTZ)
