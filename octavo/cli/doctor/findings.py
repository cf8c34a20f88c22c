"""Findings of `octavo doctor`: what was checked, how it went, and how they are printed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed", "skipped"]
_MARKS: dict[Status, str] = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "–"}
_PLAIN_MARKS: dict[Status, str] = {"ok": "ok", "warning": "!!", "failed": "NO", "skipped": "--"}  # not in UTF-8


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Status
    message: str

    def as_json(self) -> dict[str, str]:
        return {"check": self.check, "status": self.status, "message": self.message}


def printer(subject: str) -> Callable[[Finding], None]:
    """Print the heading, and return what prints a finding as one line."""
    try:
        "".join(_MARKS.values()).encode(sys.stdout.encoding or "ascii")
        marks = _MARKS
    except UnicodeEncodeError:
        marks = _PLAIN_MARKS
    print(f"octavo doctor {subject}".rstrip())

    def show(finding: Finding) -> None:
        print(f" {marks[finding.status]} {finding.check:<14} {' '.join(finding.message.split())}", flush=True)

    return show


def size(num_bytes: int) -> str:
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} bytes"
