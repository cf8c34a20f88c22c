"""From process start to first token: once with no compiled kernel on the machine, then with them.
Starts a fresh process for every figure and reads its stamps."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.show import Results, table
from benchmarks.gpu.targets import COLD_START_SECONDS

STAGES = ("interpreter", "torch", "imports", "weights", "pages", "engine", "first token", "decode")
_LIMIT_S = 300
_ROOT = Path(__file__).resolve().parents[2]


def run(options: dict[str, Any], num_warm: int, results: Results) -> int:
    """Returns how many of the starts failed."""
    figures: list[dict[str, Any]] = []
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="octavo-kernels-") as cache:
        for name in ("no kernels", *(["kernels cached"] * num_warm)):
            try:
                figures.append({"start": name, **_start(options, cache)})
            except (subprocess.SubprocessError, RuntimeError) as error:
                print(f"cold start ({name}) failed: {error}")
                num_failed += 1
            results.put("cold_start", figures)
    print("\n" + show(figures))
    return num_failed


def _start(options: dict[str, Any], cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.first_token", json.dumps(options)]
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": _python_path()}
    began = time.monotonic()
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    ended = time.monotonic()
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"exit code {done.returncode}")
    stamps = json.loads(done.stdout.splitlines()[-1])
    seconds, reached = {}, began
    for stage in STAGES:
        seconds[stage] = round(stamps[stage] - reached, 3)
        reached = stamps[stage]
    return {
        "seconds": seconds,
        "to_first_token": round(stamps["first token"] - began, 3),
        "whole_process": round(ended - began, 3),
        "kernels_in_cache": sum(1 for _ in Path(cache).rglob("*.cubin")),
    }


def _python_path() -> str:
    """Return PYTHONPATH with the repository first: not every way to start Python puts the working folder on the path."""
    return os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def show(figures: list[dict[str, Any]]) -> str:
    rows = []
    for i, figure in enumerate(figures):
        must = COLD_START_SECONDS["first" if i == 0 else "afterwards"]
        mark = "✓" if figure["to_first_token"] <= must else "✗"
        cells = [f"{figure['seconds'][stage]:.2f}" for stage in STAGES]
        verdict = [f"{figure['to_first_token']:.2f}", f"{must:g} {mark}", str(figure["kernels_in_cache"])]
        rows.append([figure["start"], *cells[:-1], *verdict, cells[-1]])
    titles = ("seconds", *STAGES[:-1], "sum", "must", "kernels", "16 more tokens")
    return (
        table(titles, rows)
        + f"\nvLLM: about {COLD_START_SECONDS['vllm_first']:g} s the first time. weights: reading or making them; pages: KV store, "
        + "and what is captured or compiled before the first step"
    )
