"""From sleep to the first token: a model behind the gateway is put to sleep and woken, again and again, by POST /sleep and /wake_up and by a
request that finds it asleep."""

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.gpu.serve import as_flags, has_tokenizer, server, vocab_size_of
from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import engine_options
from benchmarks.gpu.targets import WAKE_UP_SECONDS
from octavo.text.tokenize.made_up import write_tokenizer

NAME = "m"
_LIMIT_S = 300


def run(arguments: argparse.Namespace, results: Results) -> int:
    """Returns how many measurements failed."""
    options = engine_options(arguments)
    model = options.pop("model")
    with tempfile.TemporaryDirectory(prefix="octavo-wake-") as folder:
        if not options.get("tokenizer") and not has_tokenizer(Path(model)):
            write_tokenizer(Path(folder), vocab_size_of(model))
            options = options | {"tokenizer": folder}
        command = [
            sys.executable,
            "-m",
            "octavo.cli.main",
            "serve",
            f"{NAME}={model}",
            *as_flags(options),
            "--port",
            "0",
        ]
        with server([*command, "--model-min-seconds", "0", "--api-processes", "1"]) as (url, _):
            _complete(url)  # compiles what the first step needs
            figures = [_once(url) for _ in range(arguments.wakes)]
    results.put("wake_up", figures)
    print("\n" + show(model, figures))
    return 0


def _once(url: str) -> dict[str, float]:
    """Seconds of a sleep, of a wake-up, of the first token after it; and of a request that finds the model asleep."""
    found = {}
    for name, path in (("sleep", "/sleep"), ("wake_up", "/wake_up")):
        found[name] = _timed(url, f"{path}?model={NAME}", {})
    found["first_token"] = _complete(url)
    _timed(url, f"/sleep?model={NAME}", {})
    found["request"] = _complete(url)
    return found


def _complete(url: str) -> float:
    return _timed(url, "/v1/completions", {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True})


def _timed(url: str, path: str, body: dict[str, Any]) -> float:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
        response.read()
    return round(time.perf_counter() - started, 3)


def show(model: str, figures: list[dict[str, float]]) -> str:
    names = ("sleep", "wake_up", "first_token", "request")
    rows = [
        [name, " ".join(f"{each[name]:.2f}" for each in figures), f"{statistics.median(e[name] for e in figures):.2f}"]
        for name in names
    ]
    wake = statistics.median(each["wake_up"] for each in figures)
    mark = "✓" if wake <= WAKE_UP_SECONDS else "✗"
    return (
        table(("seconds", "each", "median"), rows)
        + f"\n{Path(model).name}: wake-up {wake:.2f} s (must, of a 0.6B: {WAKE_UP_SECONDS:g} {mark}). request: one token, of a model that sleeps"
    )
