"""Tables for people, and the JSON file that is rewritten as results come: a failure loses nothing measured before it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.cli.bench import report


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    cells = [list(titles), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    lines = []
    for row in cells:
        parts = [text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def gib(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


class Results:
    """All measurements of one command, by part. The file is rewritten whenever a part is added."""

    def __init__(self, path: str | None) -> None:
        report.check_writable(path)
        self._path = path
        self.parts: dict[str, Any] = {}

    def put(self, part: str, value: Any) -> None:
        self.parts[part] = value
        if self._path:
            Path(self._path).write_text(json.dumps(report.facts() | self.parts, indent=2) + "\n")
