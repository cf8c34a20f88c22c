"""What llama.cpp's own drafts gain on the same works: its server without them and with them, in turn, over HTTP."""

import argparse
import contextlib
import json
import shlex
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks.speculation.cpu import WORKS, Work

_PORTS = {"none": 8771, "drafts": 8772}
_START_SECONDS = 120.0


class Run(NamedTuple):
    texts: list[str]
    num_tokens: int
    seconds: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", default="llama-server", help="llama.cpp's server")
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--options", default="--spec-type ngram-simple", help="that turn its drafts on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1")
    parser.add_argument("--works", default="copy")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    most = max(map(int, options.clients.split(",")))
    runs: dict[tuple[str, int, str], list[Run]] = {}
    with contextlib.ExitStack() as stack:
        for side, port in _PORTS.items():
            drafts = shlex.split(options.options) if side == "drafts" else []
            command = [options.server, "--model", options.model, "--port", str(port), "--parallel", str(most)]
            command += ["--threads", str(options.threads), "--ctx-size", str(2048 * most), *drafts]
            stack.enter_context(_server(command, port))
        for round_ in range(-1, options.rounds):  # the first is not counted
            for work in options.works.split(","):
                for clients in map(int, options.clients.split(",")):
                    for side in sorted(_PORTS, reverse=round_ % 2 > 0):
                        done = _run(_PORTS[side], WORKS[work], clients)
                        if round_ >= 0:
                            runs.setdefault((work, clients, side), []).append(done)
    print(f"{'work':6} {'clients':>7} {'side':7} {'tokens/s':>9} {'ratio':>6} {'lowest':>7} {'equal answers':>14}")
    for (work, clients, side), some in sorted(runs.items(), key=lambda each: (each[0][:2], each[0][2] != "none")):
        base = runs[work, clients, "none"]
        rates = [one.num_tokens / one.seconds for one in some]
        ratios = [rate * one.seconds / one.num_tokens for rate, one in zip(rates, base, strict=True)]
        pairs = [
            pair for ours, theirs in zip(some, base, strict=True) for pair in zip(ours.texts, theirs.texts, strict=True)
        ]
        same = f"{sum(one == other for one, other in pairs)} of {len(pairs)}"
        print(f"{work:6} {clients:7} {side:7} {statistics.median(rates):9.1f} {statistics.median(ratios):6.2f} {min(ratios):7.2f} {same:>14}")  # fmt: skip
    return 0


@contextlib.contextmanager
def _server(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _is_ready(port):
            if process.poll() is not None:
                raise SystemExit(f"{shlex.join(command)} has ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{shlex.join(command)} was not ready after {_START_SECONDS:g} s")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _run(port: int, work: Work, clients: int) -> Run:
    """As many requests at a time as there are clients, as benchmarks/speculation/cpu.py sends them."""
    prompts = [work.prompts[at % len(work.prompts)] for at in range(max(clients, len(work.prompts)))]
    params = work.params
    body: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": params.seed}
    if params.structured_outputs:
        schema = params.structured_outputs["json"]
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    started = time.perf_counter()
    answers = []
    for at in range(0, len(prompts), clients):
        batch = prompts[at : at + clients]
        with ThreadPoolExecutor(clients) as pool:
            answers += pool.map(lambda prompt: _ask(port, body, prompt), batch)
    seconds = time.perf_counter() - started
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    return Run(texts, sum(answer["usage"]["completion_tokens"] for answer in answers), seconds)


def _ask(port: int, body: dict[str, Any], prompt: str) -> dict[str, Any]:
    content = json.dumps({**body, "messages": [{"role": "user", "content": prompt}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", content, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
