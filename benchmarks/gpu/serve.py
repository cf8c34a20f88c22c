"""The same load over HTTP and offline: the cost of the server's front at many concurrent streams.
The server is `octavo serve`, the client `octavo bench serve`, each in processes of its own.

`python -m benchmarks.gpu --serve` runs it. Run directly, it takes two more flags for the number of processes on each side:
python -m benchmarks.gpu.serve --model qwen3-0.6b [--api-processes N] [--client-processes N]"""

import argparse
import contextlib
import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import Subject, engine_options
from benchmarks.gpu.targets import SERVED_SHARE
from benchmarks.gpu.workloads import Item
from octavo import config
from octavo.cli.bench.workload import id_prompts
from octavo.text.tokenize.made_up import write_tokenizer

START_LIMIT_S = 300
_ROOT = Path(__file__).resolve().parents[2]
_WARMUP_SEED = 99
_MAX_ID = 30_000  # prompts' ids are below this, as in the workloads


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: when a stream ends, the next request takes its place."""

    num_streams: int
    num_requests: int
    input_len: int
    output_len: int

    @staticmethod
    def scaled(num_streams: int, scale: float) -> "Load":
        streams = max(1, round(num_streams * scale))
        return Load(streams, 4 * streams, max(1, round(128 * scale)), max(2, round(256 * scale)))


def run(arguments: argparse.Namespace, load: Load, seeds: Sequence[int], results: Results) -> int:
    """Run the server and its clients first and then, when they have ended, the engine in this process: the GPU's memory holds one."""
    # Both sides get the same number of rows, or one of them could batch more.
    options = engine_options(arguments, max_num_seqs=load.num_streams)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        served = _over_http(options, load, seeds, Path(folder), arguments)
    results.put("serve", {"load": dataclasses.asdict(load), "http": served})
    offline = _offline(arguments, load, seeds)
    rates = [figures["output_tokens_per_second"] for figures in served]
    ratio = round(statistics.median(rates) / statistics.median(offline), 3)
    results.put(
        "serve",
        {"load": dataclasses.asdict(load), "http": served, "offline_rates": offline, "ratio": ratio},
    )
    print("\n" + show(load, served, rates, offline, ratio))
    return sum(figures["num_errors"] > 0 for figures in served)


def show(
    load: Load, served: list[dict[str, Any]], rates: Sequence[float], offline: Sequence[float], ratio: float
) -> str:
    rows = []
    for name, values in (("HTTP", rates), ("offline", offline)):
        rows.append([name, " ".join(f"{rate:,.0f}" for rate in values), f"{statistics.median(values):,.0f}"])
    middle = min(served, key=lambda figures: abs(figures["output_tokens_per_second"] - statistics.median(rates)))
    spreads = [
        f"{title} p50 {middle[key]['p50']:.1f} p99 {middle[key]['p99']:.1f} ms"
        for title, key in (("first token", "ttft_ms"), ("time per output token", "tpot_ms"))
        if middle[key]
    ]
    return "\n".join(
        [
            f"{load.num_requests} requests, {load.num_streams} at a time, {load.input_len} tokens in, {load.output_len} out",
            table(("", "output tokens/s of each run", "median"), rows),
            f"HTTP / offline = {ratio:.3f} (must: {SERVED_SHARE:g} {'✓' if ratio >= SERVED_SHARE else '✗'}); "
            + "; ".join(spreads),
            f"clients: {middle['client_processes']} processes, the busiest computing for {middle['client_busiest']:.0%} of "
            f"the time; {middle['texts_per_token']:.2f} events a token",
            *(f"failed requests: {figures['errors']}" for figures in served if figures["num_errors"]),
        ]
    )


# ── over HTTP ───────────────────────────────────────────────────────────────────────────────────────


def _over_http(
    options: dict[str, Any], load: Load, seeds: Sequence[int], folder: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    vocab_size = vocab_size_of(options["model"])
    if not options.get("tokenizer") and not has_tokenizer(Path(options["model"])):
        write_tokenizer(folder, vocab_size)
        options = options | {"tokenizer": str(folder)}
    command = [sys.executable, "-m", "octavo.cli.main", "serve", *as_flags(options), "--port", "0"]
    with server([*command, "--api-processes", getattr(arguments, "api_processes", config.AUTO)]) as (url, _):
        more = ["--vocab-size", str(min(vocab_size, _MAX_ID))]
        more += ["--client-processes", getattr(arguments, "client_processes", config.AUTO)]
        clients(url, load, _WARMUP_SEED, folder, more)
        return [clients(url, load, seed, folder, more) for seed in seeds]


def clients(url: str, load: Load, seed: int, folder: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of one run of `octavo bench serve`; `more`: further flags."""
    file = folder / f"run-{seed}.json"
    command = [sys.executable, "-m", "octavo.cli.main", "bench", "serve", "--base-url", url, "--result", str(file)]
    command += ["--num-prompts", str(load.num_requests), "--max-concurrency", str(load.num_streams)]
    command += ["--input-len", str(load.input_len), "--output-len", str(load.output_len), "--seed", str(seed)]
    command += ["--prompt-kind", "ids", "--ignore-eos", *more]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    if not file.exists():
        raise RuntimeError(f"the clients failed: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(file.read_text())["figures"])


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[tuple[str, int]]:
    """Run `octavo serve` by this command while the context is open; yields its URL and process id."""
    process = subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    found: list[str] = []
    settled = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            if match := re.search(r"ready after .*(http://\S+)/v1", line):
                found.append(match[1])
                settled.set()
        settled.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        settled.wait(START_LIMIT_S)
        if not found:
            raise RuntimeError("the server did not start:\n" + "\n".join(lines[-20:]))
        yield found[0], process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()


def as_flags(options: dict[str, Any]) -> list[str]:
    """LLM's options as the flags of `octavo serve`."""
    flags: list[str] = []
    for section, cls in config.sections():
        names = config.field_names(section)
        for field in dataclasses.fields(cls):
            for value in [value for name, value in options.items() if names.get(name) == field.name]:
                name = (field.metadata["flag"] or field.name.replace("_", "-")).split(",")[0]
                if name == "MODEL":
                    flags.insert(0, value)
                elif isinstance(value, bool):
                    flags.append(f"--{name}" if value else f"--no-{name}")
                else:
                    flags += [f"--{name}", str(value)]
    return flags


def has_tokenizer(path: Path) -> bool:
    return path.is_file() or (path / "tokenizer.json").exists() or any(path.glob("*.model"))


def vocab_size_of(model: str) -> int:
    folder = Path(model)
    if not folder.is_dir():
        return _MAX_ID
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


# ── offline ─────────────────────────────────────────────────────────────────────────────────────────


def _offline(arguments: argparse.Namespace, load: Load, seeds: Sequence[int]) -> list[float]:
    """Return output tokens per second of the same prompts through LLM.generate."""
    subject = Subject(arguments, max_num_seqs=load.num_streams)
    vocab_size = min(subject.report.vocab_size, _MAX_ID)
    rates = []
    for seed in (_WARMUP_SEED, *seeds):
        prompts = id_prompts(load.num_requests, load.input_len, 0, vocab_size, seed)
        seconds = subject.generate([Item(prompt, load.output_len) for prompt in prompts])
        rates.append(round(load.num_requests * load.output_len / seconds, 1))
    return rates[1:]


def main() -> int:
    from benchmarks.gpu.__main__ import FIRST_SEED, build_parser

    parser = build_parser()
    for name, whose in (("--api-processes", "octavo serve"), ("--client-processes", "octavo bench serve")):
        parser.add_argument(name, default=config.AUTO, metavar="N", help=f"value for `{whose}` (default: auto)")
    arguments = parser.parse_args()
    seeds = arguments.seeds or [FIRST_SEED + i for i in range(arguments.runs)]
    return run(arguments, Load.scaled(arguments.streams, arguments.scale), seeds, Results(arguments.result))


if __name__ == "__main__":
    sys.exit(main())
