"""Measures what prefixes that are kept are worth: in the KV store, and in files across restarts.

    python -m benchmarks.tiers restart                  the first token of a 4,096-token prompt: cold, after a restart, with the files out of the page cache
    python -m benchmarks.tiers twice --peer URL         108 prompts, twice, by 1 and by 8 clients; the peer (llama.cpp's server) gets the same
    python -m benchmarks.tiers agents                   8 sessions that grow by 250 tokens a turn, in a KV store of a quarter of what they need
    python -m benchmarks.tiers misses                   what the tier costs where no prefix comes again, both sides in turn
    python -m benchmarks.tiers kill --times 20          kill -9 while pages are written: the same tokens, every start succeeds, bytes stay within the limit
    python -m benchmarks.tiers identity --requests 10000    the same requests without a tier, with one, and with one now and then: the same tokens
    python -m benchmarks.tiers pressure --group FOLDER  another process of the server's control group takes memory: idle prefixes give theirs back
    python -m benchmarks.tiers full --folder MOUNT      a disk that fills up, files that are damaged and a folder that goes away under a running server
    python -m benchmarks.tiers faults                   a disk that is slow, returns errors and hangs under a running server (FUSE; needs root and mfusepy)

Prompts are token ids drawn by a seed. Servers get ports of their own; everything else on the machine should be idle."""

import argparse
import asyncio
import atexit
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fault_disk import MODES, FaultDisk
from octavo.cli.bench.http_stream import Client, Target
from octavo.cli.bench.report import percentile
from octavo.server.process import loop_factory

START_S = 180.0
VOCABULARY = (200, 40_000)  # ids that prompts are drawn from


class Answer(NamedTuple):
    first: float  # seconds to the first token
    seconds: float
    gaps: list[float]
    text: str
    cached: int


class Server:
    """A server in a process group of its own, so that kill() ends all of it."""

    def __init__(self, flags: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        atexit.register(self._end)
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"benchmarks.tiers: the server did not start: {' '.join(command)}")
            time.sleep(0.1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def _end(self) -> None:
        """Leave no server behind when the benchmark itself is ended."""
        if self.process.poll() is None:
            self.kill()

    def metric(self, name: str, label: str = "") -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)

    def wait_stored(self, least: float) -> None:
        """Until the tier has so many tokens, or nothing more comes for some seconds."""
        before, since = -1.0, time.monotonic()
        while (now := self.metric("octavo:kv_tier_tokens_total", 'what="stored"')) < least:
            if now > before:
                before, since = now, time.monotonic()
            if time.monotonic() - since > 5:
                break
            time.sleep(0.1)


@contextlib.contextmanager
def serving(flags: Sequence[str]) -> Iterator[Server]:
    server = Server(flags)
    try:
        yield server
    finally:
        server.stop()


def _body(prompt: list[int], max_tokens: int, seed: int | None = None) -> bytes:
    """Greedy, or sampled by the seed."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True, "cache_prompt": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if seed is not None:
        body |= {"temperature": 1, "seed": seed}
    return json.dumps(body).encode()


class _Reader:
    """Takes in the events of an answer, with the time since the request was sent."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._times: list[float] = []
        self._text, self._cached = "", 0

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if event.get("choices") and event["choices"][0].get("text"):
            self._times.append(time.perf_counter() - self._started)
            self._text += event["choices"][0]["text"]
        if usage := event.get("usage"):
            self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def answer(self) -> Answer:
        seconds, times = time.perf_counter() - self._started, self._times
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return Answer(times[0] if times else seconds, seconds, gaps, self._text, self._cached)


def ask(url: str, prompt: list[int], max_tokens: int, seed: int | None = None) -> Answer:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    reader = _Reader()
    connection.request("POST", "/v1/completions", _body(prompt, max_tokens, seed), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"benchmarks.tiers: {response.status}: {response.read()[:500]!r}")
    for line in response:
        if line.startswith(b"data: "):
            reader.take(line[6:].strip())
    answer = reader.answer()
    connection.close()
    return answer


def drawn(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(*VOCABULARY) for _ in range(count)]


def by_clients(url: str, prompts: Sequence[list[int]], max_tokens: int, num_clients: int) -> list[Answer]:
    """Every client sends the next prompt when its last answer is over. One thread: several would wait for each other, and that would
    count as the server's time."""
    answers: list[Answer] = []
    left = list(reversed(prompts))

    async def send_on() -> None:
        client = Client(Target.parse(url))
        while left:
            body, reader = _body(left.pop(), max_tokens), _Reader()
            async for data in client.post_events("/v1/completions", body):
                reader.take(data)
            answers.append(reader.answer())
        await client.close()

    async def run() -> None:
        await asyncio.gather(*(send_on() for _ in range(num_clients)))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
    return answers


def ms(values: Sequence[float], percent: float) -> float:
    return round(percentile(sorted(values), percent) * 1e3, 1)


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*/*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restart(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tier = ["--kv-tier", f"disk:4GiB:{folder}"]
    found: dict[str, list[float]] = {"cold": [], "after a restart": [], "after a restart, cold disk": []}
    texts = set()
    for number in range(arguments.rounds):
        prompt = drawn(number, arguments.tokens)
        for name in found:
            if name.endswith("disk"):
                drop_from_page_cache(folder)
            with serving([*tier, *arguments.flags]) as server:
                ask(server.url, drawn(10**6 + number, 16), 4)  # the first request of an engine
                answer = ask(server.url, [*prompt, 300, 301, 302], 8)
                found[name].append(answer.first)
                texts.add((number, answer.text))
                server.wait_stored(arguments.tokens - 32 if name == "cold" else 0)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "first token, ms": {name: round(value * 1e3, 1) for name, value in medians.items()},
        "share of cold": {name: round(value / medians["cold"], 4) for name, value in medians.items()},
        "same text": len(texts) == arguments.rounds,
        "target": "after a restart ≤ 0.08",
    }


def twice(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run(name: str, url: str, num_clients: int, seed: int) -> None:
        prompts = [drawn(seed + at, random.Random(at).randrange(64, 512)) for at in range(108)]
        for number in ("first pass", "second pass"):
            firsts = [answer.first for answer in by_clients(url, prompts, 16, num_clients)]
            found[f"{name}, {num_clients} clients, {number}"] = {"p50, ms": ms(firsts, 50), "p99, ms": ms(firsts, 99)}

    for num_clients in (1, 8):
        with serving(arguments.flags) as server:
            run("octavo", server.url, num_clients, 10**6 * num_clients)
        if arguments.peer:
            run("peer", arguments.peer, num_clients, 10**6 * num_clients)
    return found


def agents(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A store of a quarter of what all sessions need at their end."""
    context = arguments.tokens
    num_turns = max(1, (context - 600) // 250)
    bytes_needed = arguments.sessions * context * arguments.token_bytes
    flags = ["--kv-cache-memory-bytes", str(bytes_needed // 4), "--max-model-len", str(context), *arguments.flags]
    took, texts = {}, {}
    for name, extra in (("without", []), ("with", ["--kv-tier", f"disk:20GiB:{folder}"])):
        with serving([*flags, *extra]) as server:
            started, said = time.perf_counter(), []
            chains = [drawn(number, 500) for number in range(arguments.sessions)]
            for turn in range(num_turns):
                for number in range(arguments.sessions):
                    chains[number] = [*chains[number], *drawn(1000 * turn + number, 250)]
                    said.append(ask(server.url, chains[number], 8).text)
            took[name], texts[name] = time.perf_counter() - started, said
    return {
        "seconds": {name: round(value, 1) for name, value in took.items()},
        "share": round(took["with"] / took["without"], 3),
        "same text": texts["with"] == texts["without"],
        "target": "≤ 0.333",
    }


def misses(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both servers run all the time, one of them idle; pairs alternate."""
    sides: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    with serving(arguments.flags) as plain, serving(["--kv-tier", f"disk:4GiB:{folder}", *arguments.flags]) as tiered:
        for number in range(arguments.rounds * 7):
            order: list[tuple[str, Server]] = [("without", plain), ("with", tiered)]
            for name, server in order if number % 2 else reversed(order):
                prompts = [drawn(10**7 * (name == "with") + 100 * number + at, 256) for at in range(16)]
                started = time.perf_counter()
                answers = by_clients(server.url, prompts, 64, 8)
                gaps = [gap for answer in answers for gap in answer.gaps]
                sides[name].append((16 * 64 / (time.perf_counter() - started), percentile(sorted(gaps), 99)))
        stored = tiered.metric("octavo:kv_tier_tokens_total", 'what="stored"')
    pairs = list(zip(sides["with"], sides["without"], strict=True))[1:]
    return {
        "throughput, with / without, median of pairs": round(statistics.median(a[0] / b[0] for a, b in pairs), 4),
        "p99 between tokens, with / without, median of pairs": round(
            statistics.median(a[1] / b[1] for a, b in pairs), 4
        ),
        "pairs": len(pairs),
        "tokens stored": stored,
        "target": "≥ 0.99, ≤ 1.03",
    }


def kill(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    limit, dice = 64 * 2**20, random.Random(arguments.seed)
    flags = ["--kv-tier", f"disk:64MiB:{folder}", *arguments.flags]
    prompts = [drawn(number, 160) for number in range(12)]
    with serving(arguments.flags) as server:
        expected = [ask(server.url, prompt, 8).text for prompt in prompts]
    num_cached = wrong = most = 0
    for number in range(arguments.times):
        server = Server(flags)
        threading.Timer(dice.uniform(0.05, arguments.seconds), server.kill).start()
        with contextlib.suppress(OSError, http.client.HTTPException, SystemExit):
            while True:
                at = dice.randrange(len(prompts))
                answer = ask(server.url, prompts[at], 8)
                ask(server.url, drawn(dice.randrange(10**9), 300), 1)  # pages that push others out
                num_cached += answer.cached
                wrong += answer.text != expected[at] and server.process.poll() is None
        server.process.wait(60)
        most = max(most, sum(path.stat().st_size for path in folder.glob("*/*")))
        print(f"killed {number + 1} of {arguments.times}", file=sys.stderr)
    with serving(flags) as server:
        wrong += sum(ask(server.url, prompt, 8).text != text for prompt, text in zip(prompts, expected, strict=True))
        loaded = server.metric("octavo:kv_tier_tokens_total", 'what="loaded"')
        bad = server.metric("octavo:kv_tier_files_total", 'reason="bad"')
    return {
        "killed": arguments.times,
        "wrong answers": wrong,
        "tokens from caches": num_cached,
        "tokens loaded after the last": loaded,
        "bad files after the last": bad,
        "most bytes": most,
        "limit": limit,
    }


def identity(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prompts that share beginnings of any length, half of them sampled, in a store that is too small for them.
    `flipping`: in every part of the run the server is another one, with the tier and without it in turn, and every
    other one was killed."""
    low, high = arguments.vocabulary
    dice = random.Random(arguments.seed)
    beginnings = [[dice.randrange(low, high) for _ in range(arguments.tokens)] for _ in range(arguments.sessions * 4)]
    requests: list[tuple[list[int], int | None]] = []
    for number in range(arguments.requests):
        start = dice.choice(beginnings)[: dice.randrange(16, arguments.tokens)]
        prompt = [*start, *(dice.randrange(low, high) for _ in range(dice.randrange(1, 8)))]
        requests.append((prompt, number if number % 2 else None))
    tier = ["--kv-tier", f"disk:1GiB:{folder}"]
    texts: dict[str, list[str]] = {}
    loaded: dict[str, float] = {}
    for name in ("off", "on", "flipping"):
        said = texts[name] = [""] * len(requests)
        loaded[name] = 0.0
        size = len(requests) if name == "off" else -(-len(requests) // arguments.parts)
        for part, first in enumerate(range(0, len(requests), size)):
            has_tier = name == "on" or (name == "flipping" and part % 2 == 0)
            server = Server([*(tier if has_tier else []), *arguments.flags])
            left = list(reversed(range(first, min(first + size, len(requests)))))

            def client(left: list[int] = left, said: list[str] = said, url: str = server.url) -> None:
                with contextlib.suppress(IndexError):
                    while True:
                        at = left.pop()
                        prompt, seed = requests[at]
                        said[at] = ask(url, prompt, 6, seed).text

            threads = [threading.Thread(target=client) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            loaded[name] += server.metric("octavo:kv_tier_tokens_total", 'what="loaded"')
            if part % 4 < 2:
                server.stop()
            else:
                server.kill()
        print(f"{name}: {len(requests)} requests", file=sys.stderr)
    return {
        "requests": len(requests),
        "different from off": {
            name: sum(a != b for a, b in zip(texts["off"], texts[name], strict=True)) for name in ("on", "flipping")
        },
        "empty answers": sum(not text for text in texts["off"]),
        "tokens loaded": loaded,
    }


def full(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`--folder`: a small file system of its own, for example a tmpfs of 8 MiB; the tier is allowed more than it has."""
    prompts = [drawn(number, 256) for number in range(24)]
    with serving(arguments.flags) as server:
        expected = [ask(server.url, prompt, 8).text for prompt in prompts]
    wrong: dict[str, int] = {}
    counts: dict[str, float] = {}
    with serving(["--kv-tier", f"disk:1GiB:{folder}", *arguments.flags]) as server:

        def round_of(name: str) -> None:
            texts = [answer.text for answer in by_order(server.url, prompts)]
            wrong[name] = sum(text != right for text, right in zip(texts, expected, strict=True))
            time.sleep(2)
            for reason in ("failed", "bad"):
                counts[f"{name}: {reason} files"] = server.metric("octavo:kv_tier_files_total", f'reason="{reason}"')

        def reset() -> None:
            """Empty the prefix cache in memory by other prompts, so that the files are read."""
            for number in range(arguments.times):
                ask(server.url, drawn(5000 + number, 1024), 1)

        round_of("full disk")
        for path in sorted(folder.glob("*/*.kv")):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"damaged")
        reset()
        round_of("damaged files")
        for path in sorted(folder.glob("*/*")):
            path.unlink()
        for path in folder.glob("*/"):
            path.rmdir()
        reset()
        round_of("folder gone")
    return {"wrong answers": wrong, "counted": counts}


def faults(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A new server for each fault, which finds eight prompts in the tier and is to store one more. Nothing may be wrong, and no first token
    later than patience with the tier allows."""
    prompts = [drawn(number, 512) for number in range(8)]
    new = [drawn(100 + number, 512) for number in range(len(MODES))]
    with serving(arguments.flags) as server:
        answers = by_order(server.url, prompts)
        texts = [answer.text for answer in (*answers, *by_order(server.url, new))]
    backing, mount = folder.parent / "backing", folder.parent / "disk"
    backing.mkdir(parents=True, exist_ok=True)
    mount.mkdir(exist_ok=True)
    found: dict[str, Any] = {"without a tier": {"slowest first token, ms": _slowest(answers)}}
    flags = ["--kv-tier", f"disk:1GiB:{mount / 'tier'}", *arguments.flags]
    with FaultDisk(backing, mount) as disk:
        with serving(flags) as server:
            by_order(server.url, prompts)
            server.wait_stored(sum(map(len, prompts)) - 16 * len(prompts))
        for number, mode in enumerate(MODES):
            server = Server(flags)
            disk.set(mode)
            answers = by_order(server.url, [*prompts, new[number]])
            time.sleep(3)  # in which it is stored, or is not
            right = [*texts[: len(prompts)], texts[len(prompts) + number]]
            found[mode] = {
                "wrong answers": sum(answer.text != text for answer, text in zip(answers, right, strict=True)),
                "slowest first token, ms": _slowest(answers),
                "prompt tokens from the tier": sum(answer.cached for answer in answers),
                "tokens stored": server.metric("octavo:kv_tier_tokens_total", 'what="stored"'),
                "files that failed or were bad": sum(
                    server.metric("octavo:kv_tier_files_total", f'reason="{reason}"') for reason in ("failed", "bad")
                ),
            }
            started = time.monotonic()
            server.stop()
            found[mode] |= {"stopped after, s": round(time.monotonic() - started, 1), "exit": server.process.poll()}
            disk.set("well")
    return found


def _slowest(answers: Sequence[Answer]) -> int:
    return round(1000 * max(answer.first for answer in answers))


def pressure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`--group`: a memory control group of version 1 with a limit, for example of 3 GiB; needs the right to put processes into it."""
    group = Path(arguments.group)
    limit = int((group / "memory.limit_in_bytes").read_text())
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taker = (
        "import sys, time; held = bytearray(int(sys.argv[1])); held[::4096] = b'x' * len(held[::4096]); time.sleep(600)"
    )

    def used() -> int:
        """Memory of the server, without that of the other process: what is anonymous in the group."""
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(lines["total_rss"])

    found: dict[str, float] = {}
    with serving(arguments.flags) as server:
        found["at the start, MB"] = used() / 1e6
        texts = [ask(server.url, drawn(number, 1024), 8).text for number in range(arguments.times)]
        found["with idle prefixes, MB"] = full_bytes = used()
        available = limit - full_bytes
        taken = max(0, available - 128 * 2**20)  # less than what is scarce stays
        process = subprocess.Popen([sys.executable, "-c", taker, str(taken)])
        try:
            time.sleep(arguments.seconds)
            found["under pressure, MB"] = (used() - taken) / 1e6
            again = [ask(server.url, drawn(number, 1024), 8).text for number in range(arguments.times)]
        finally:
            process.kill()
            process.wait()
        found["with idle prefixes, MB"] /= 1e6
    return {
        **{name: round(value) for name, value in found.items()},
        "limit, MB": round(limit / 1e6),
        "taken by another process, MB": round(taken / 1e6),
        "same text": texts == again,
    }


def by_order(url: str, prompts: Sequence[list[int]]) -> list[Answer]:
    return [ask(url, prompt, 8) for prompt in prompts]


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "restart": restart,
    "twice": twice,
    "agents": agents,
    "misses": misses,
    "kill": kill,
    "identity": identity,
    "full": full,
    "pressure": pressure,
    "faults": faults,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (restart), or of the context (agents)")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument(
        "--token-bytes", type=int, default=23_040, help="of a token's keys and values; the embedded model's"
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6.0, help="most seconds before a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", default="", help="folder of a memory control group, of pressure")
    parser.add_argument("--requests", type=int, default=10_000, help="of identity")
    parser.add_argument("--parts", type=int, default=20, help="servers one after the other in each run of identity")
    parser.add_argument(
        "--vocabulary", type=int, nargs=2, default=VOCABULARY, help="first and last id of prompts of identity"
    )
    parser.add_argument("--peer", default="", help="address of a server to compare with, for example llama.cpp's")
    parser.add_argument(
        "--folder", default="", help="folder for the tier, on the disk to be measured; empty: a temporary one"
    )
    parser.add_argument("flags", nargs="*", help="of octavo serve, after --")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary) / "tier"
        print(json.dumps(PARTS[arguments.part](arguments, folder), indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
