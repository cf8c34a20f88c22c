"""Percentiles, the printed table and the JSON file of a benchmark, with the facts about the machine that make figures
comparable."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between the two nearest ranks, as in numpy."""
    assert values
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None if nothing was measured."""
    if not seconds:
        return None
    figures = {"mean": sum(seconds) / len(seconds)} | {f"p{p}": percentile(seconds, p) for p in PERCENTILES}
    return {name: round(value * 1000, 3) for name, value in figures.items()}


def show_spreads(spreads: dict[str, dict[str, float] | None]) -> list[str]:
    """One line per measure, columns aligned, in milliseconds."""
    columns = ["mean", *(f"p{p}" for p in PERCENTILES)]
    lines = [f"{'':24}" + "".join(f"{name:>11}" for name in columns)]
    for name, figures in spreads.items():
        cells = "".join(f"{figures[c]:>11.2f}" if figures else f"{'–':>11}" for c in columns)
        lines.append(f"{name + ' ms':24}{cells}")
    return lines


def show_figures(figures: dict[str, str]) -> list[str]:
    return [f"{name:24}{value}" for name, value in figures.items()]


def facts(command: Sequence[str] | None = None) -> dict[str, Any]:
    """The circumstances of a measurement: command, time, versions, machine."""
    return {
        "command": _without_keys(sys.argv if command is None else command),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {name: _version(name) for name in ("octavo", "torch", "numpy")}
        | {"python": platform.python_version()},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "architecture": platform.machine(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
    }


def _without_keys(command: Sequence[str]) -> list[str]:
    """The command without API keys: results are shared, keys must not be."""
    said: list[str] = []
    for text in command:
        name = text.split("=")[0].replace("_", "-")
        if said and said[-1].replace("_", "-") == "--api-key":
            text = "…"
        elif name == "--api-key" and "=" in text:
            text = "--api-key=…"
        said.append(text)
    return said


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def check_writable(path: str | None) -> None:
    """Check before measuring that the result can be written: an hour's figures must not be lost to a mistyped path."""
    if not path:
        return
    if not (folder := Path(path).absolute().parent).is_dir():
        raise ConfigError(f"--result {path}: the folder {folder} does not exist")
    is_new = not os.path.lexists(path)
    try:
        with open(path, "a"):  # append mode keeps earlier results until there are new ones
            pass
        if is_new:
            os.unlink(path)  # a run that fails leaves no empty file
    except OSError as error:
        raise ConfigError(f"--result {path} cannot be written: {error.strerror}") from None


def write(path: str | None, results: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(facts() | results, indent=2) + "\n")
        print(f"written to {path}", file=sys.stderr)
