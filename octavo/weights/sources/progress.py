"""ProgressLine: the progress of a pull on standard error: one line that is redrawn on a terminal, else a line now and then."""

import sys
import time
from typing import IO

from octavo.weights.sources.pull import PullReport

BAR_LEN = 24
SPEED_SECONDS = 5.0  # over which the speed is measured
LINE_SECONDS = 30.0  # between two lines where there is no terminal


class ProgressLine:
    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._status = ""
        self._last_line = 0.0
        self._past: list[tuple[float, int]] = []  # (time.monotonic(), bytes) within SPEED_SECONDS

    def __call__(self, report: PullReport) -> None:
        is_new = report.status != self._status
        if is_new:
            self._end_line()
            self._status, self._past, self._last_line = report.status, [], 0.0
        if not report.total:
            self._write(f"octavo: {report.status}\n")
            self._status = ""
            return
        now = time.monotonic()
        self._past = [(then, num) for then, num in self._past if now - then < SPEED_SECONDS] + [(now, report.completed)]
        line = f"octavo: {report.status} {self._describe(report)}"
        if self._is_terminal:
            self._write(f"\r{line}\x1b[K")
        elif report.completed >= report.total or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self._write(f"{line}\n")

    def close(self) -> None:
        """End a line that was being redrawn."""
        self._end_line()
        self._status = ""

    def _describe(self, report: PullReport) -> str:
        share = report.completed / report.total
        text = f"{share:4.0%} of {size_text(report.total)}"
        if self._is_terminal:
            text = f"[{'█' * int(share * BAR_LEN):<{BAR_LEN}}] {text}"
        (then, before), (now, after) = self._past[0], self._past[-1]
        if now > then and after > before and report.completed < report.total:
            speed = (after - before) / (now - then)
            seconds = (report.total - report.completed) / speed
            text += f", {size_text(speed)}/s, {_duration(seconds)} left"
        return text

    def _end_line(self) -> None:
        if self._is_terminal and self._status:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def size_text(num_bytes: float) -> str:
    """Bytes as people read them: 4.7 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 100 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
