"""Measures what keys get of a server that they share: fairness, weights, the price of both, and whether budgets count every token.

    python -m benchmarks.tenants flood                   # one key floods the server, another sends a request a second
    python -m benchmarks.tenants weights                 # three keys that always wait, with weights 1 : 2 : 4
    python -m benchmarks.tenants throughput              # the same load with --fairness key and without, in turns of seconds
    python -m benchmarks.tenants budgets                 # 1,000 random requests of three keys, while processes are killed
    python -m benchmarks.tenants budgets --models 2      # the same, for several models on one port
    python -m benchmarks.tenants budgets --resumable     # … by clients that read the rest of broken answers: exact to the token

Further flags of the servers come after --, for example -- --model /models/SmolLM2-135M-Instruct. Prompts are random tokens, so that no prefix
is in the cache. Service is what fairness counts: a token of a prompt 1, a token of an answer 2."""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.cli.bench.http_stream import Client, HTTPFailure, Target
from octavo.cli.bench.report import percentile
from octavo.weights.sources.source import resolve
from tests.e2e.servers import Server
from tests.processes import children_of, signal_all

PROMPT, OUTPUT = 128, 16  # tokens of a light key's request
FLOOD_OUTPUT = 128
ROWS = ("--max-num-seqs", "16")  # fewer than clients: shares are of a server whose queue is never empty


class Tenant:
    """A key that sends completions."""

    def __init__(self, server: Server, key: str, seed: int, vocabulary: int) -> None:
        self.key, self._client = key, Client(Target.parse(server.base), key)
        self._random, self._vocabulary = random.Random(seed), vocabulary
        self.first: list[float] = []  # seconds to the first token
        self.num_tokens = 0

    async def send(self, num_prompt: int, num_output: int) -> None:
        prompt = [self._random.randrange(self._vocabulary // 4, self._vocabulary) for _ in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": num_output, "stream": True, "ignore_eos": True, "temperature": 0}
        started, has_begun = time.perf_counter(), False
        async for event in self._client.post_events("/v1/completions", json.dumps(body).encode()):
            if event == b"[DONE]":
                continue
            self.num_tokens += 1
            if not has_begun:
                has_begun = True
                self.first.append(time.perf_counter() - started)

    async def send_on(self, num_prompt: int, num_output: int, spread: int = 0) -> None:
        """One request after the other, until cancelled. Answers have up to `spread` tokens more or fewer than `num_output`."""
        while True:
            await self.send(num_prompt, num_output + self._random.randint(-spread, spread))

    async def close(self) -> None:
        await self._client.close()


def vocabulary_of(server: Server, key: str) -> int:
    status, text = server.get("/tokenizer_info", Authorization=f"Bearer {key}")
    return int(json.loads(text).get("vocab_size", 512)) if status == 200 else 512


def metric(server: Server, name: str, key: str) -> float:
    text = server.get("/metrics", Authorization=f"Bearer {key}")[1]
    return sum(float(value) for value in re.findall(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def usage(server: Server, admin: str) -> dict[str, dict[str, Any]]:
    status, text = server.get("/v1/usage", Authorization=f"Bearer {admin}")
    assert status == 200, text
    return {each["key"]: each for each in json.loads(text)["data"]}


@contextlib.contextmanager
def serving(lines: list[str], *flags: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("\n".join([*lines, "admin: boss name=ops"]) + "\n")
        files = Path(folder) / "files"
        with Server("--api-key-file", str(keys), "--files-folder", str(files), "--record-bytes", "0", *flags) as server:
            yield server


# ── flood ───────────────────────────────────────────────────────────────────────────────────────────


async def _light(tenant: Tenant, num_requests: int) -> None:
    """One request a second, whether or not the one before has ended."""
    sent = []
    for _ in range(num_requests):
        sent.append(asyncio.create_task(tenant.send(PROMPT, OUTPUT)))
        await asyncio.sleep(1.0)
    await asyncio.gather(*sent)


async def _flooded(server: Server, size: int, num_requests: int, vocabulary: int) -> list[float]:
    light, flood = Tenant(server, "light", size + 1, vocabulary), Tenant(server, "flood", size, vocabulary)
    flooding = [asyncio.create_task(flood.send_on(PROMPT, FLOOD_OUTPUT)) for _ in range(size)]
    await asyncio.sleep(3.0 if size else 0.0)
    await _light(light, num_requests)
    for task in flooding:
        task.cancel()
    await asyncio.gather(*flooding, return_exceptions=True)
    await light.close()
    await flood.close()
    return light.first


def _drain(server: Server) -> None:
    while metric(server, "vllm:num_requests_running", "boss"):
        time.sleep(0.1)


def flood(arguments: argparse.Namespace) -> None:
    sizes = [int(size) for size in arguments.sizes.split(",")]
    with serving(["flood flood 1", "light light 1"], "--fairness", arguments.fairness, *arguments.flags) as server:
        vocabulary = vocabulary_of(server, "boss")
        asyncio.run(_flooded(server, 0, 3, vocabulary))  # warm
        found = {}
        for size in (0, *sizes):
            found[size] = asyncio.run(_flooded(server, size, arguments.requests, vocabulary))
            _drain(server)
        limit = metric(server, "octavo:step_limit_seconds", "boss")
    print(f"fairness {arguments.fairness}; the last limit of a step beside streams: {limit * 1e3:.0f} ms")
    for size, first in found.items():
        p50, p99 = (percentile(sorted(first), percent) * 1e3 for percent in (50, 99))
        what = "alone" if not size else f"beside a flood of {size}"
        print(f"{what:26} first token p50 {p50:7.0f} ms, p99 {p99:7.0f} ms ({len(first)} requests)")


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────


async def _backlogged(server: Server, keys: list[str], clients: int, seconds: float, vocabulary: int) -> dict[str, Any]:
    tenants = [Tenant(server, key, at, vocabulary) for at, key in enumerate(keys)]
    # Unequal requests, so that equal numbers of them would be no equal shares.
    kinds = [(64, 64), (160, 24), (24, 96)]
    tasks = [
        asyncio.create_task(tenant.send_on(*kind))
        for tenant, kind in zip(tenants, kinds, strict=True)
        for _ in range(clients)
    ]
    await asyncio.sleep(5.0)
    before = await asyncio.to_thread(usage, server, "boss")
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(usage, server, "boss")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for tenant in tenants:
        await tenant.close()
    return {
        key: {kind: after[key][kind] - before[key][kind] for kind in ("prompt_tokens", "completion_tokens")}
        for key in keys
    }


def weights(arguments: argparse.Namespace) -> None:
    given = dict(zip("abc", (1, 2, 4), strict=True))
    lines = [f"{key} {key} {weight}" for key, weight in given.items()]
    with serving(lines, "--fairness", "key", *ROWS, *arguments.flags) as server:
        vocabulary = vocabulary_of(server, "boss")
        used = asyncio.run(_backlogged(server, list(given), arguments.clients, arguments.seconds, vocabulary))
        preempted = metric(server, "vllm:num_preemptions", "boss")
    service = {key: each["prompt_tokens"] + 2 * each["completion_tokens"] for key, each in used.items()}
    total = sum(service.values())
    print(f"{arguments.seconds:g} s, {arguments.clients} clients of each key; {preempted:.0f} preemptions")
    for key, weight in given.items():
        share, want = service[key] / total, weight / sum(given.values())
        print(f"key {key}, weight {weight}: {share:6.1%} of the service, {want:6.1%} wanted: {share / want - 1:+.1%}")


# ── throughput ──────────────────────────────────────────────────────────────────────────────────────


async def _take_turns(
    sides: dict[str, Server], clients: int, seconds: float, rounds: int, vocabulary: int
) -> dict[str, list[float]]:
    """Tokens per second of each side in each round. Both have their load all the time. In a round each runs for these seconds while the other
    is stopped, so that what else happens on the machine happens to both."""
    tenants = {
        side: [Tenant(server, key, at, vocabulary) for at, key in enumerate("abc")] for side, server in sides.items()
    }
    tasks = [
        asyncio.create_task(tenant.send_on(PROMPT, 64, 32))
        for group in tenants.values()
        for tenant in group
        for _ in range(clients)
    ]
    await asyncio.sleep(8.0)
    found: dict[str, list[float]] = {side: [] for side in sides}
    try:
        for number in range(rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                for other, server in sides.items():
                    signal_all(server.process.pid, signal.SIGCONT if other == side else signal.SIGSTOP)
                await asyncio.sleep(0.3)
                began, before = time.perf_counter(), sum(each.num_tokens for each in tenants[side])
                await asyncio.sleep(seconds)
                num_tokens = sum(each.num_tokens for each in tenants[side]) - before
                found[side].append(num_tokens / (time.perf_counter() - began))
            if number % 20 == 19:
                rates = ", ".join(f"fairness {side} {sum(rates) / len(rates):.0f}" for side, rates in found.items())
                print(f"{number + 1} rounds: {rates} tokens/s", file=sys.stderr, flush=True)
    finally:
        for server in sides.values():
            signal_all(server.process.pid, signal.SIGCONT)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for group in tenants.values():
        for tenant in group:
            await tenant.close()
    return found


def throughput(arguments: argparse.Namespace) -> None:
    lines = ["a a 1", "b b 2", "c c 4"]
    with contextlib.ExitStack() as stack:
        sides = {
            side: stack.enter_context(serving(lines, "--fairness", side, *ROWS, *arguments.flags))
            for side in ("none", "key")
        }
        vocabulary = vocabulary_of(sides["key"], "boss")
        found = asyncio.run(_take_turns(sides, arguments.clients, arguments.seconds, arguments.rounds, vocabulary))
    ratios = [key / none for key, none in zip(found["key"], found["none"], strict=True)]
    print(f"{3 * arguments.clients} clients, {arguments.rounds} rounds of {arguments.seconds:g} s for each side")
    for side, rates in found.items():
        print(f"fairness {side}: {statistics.mean(rates):.0f} tokens/s on average")
    print(ratio_of(ratios))


def ratio_of(ratios: list[float]) -> str:
    """What the ratios of all rounds say. One round has no interval."""
    mean = statistics.mean(ratios)
    said = f"ratio: {statistics.median(ratios):.3f} (median), {mean:.3f} on average"
    if len(ratios) < 2:
        return said
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{said}, 95 % interval {mean - half:.3f} to {mean + half:.3f}"


# ── budgets ─────────────────────────────────────────────────────────────────────────────────────────


DRAFTED = 9
"""Most tokens of a choice in a step: a draft's, and one."""
MESSAGES = 2
"""From the engine that an API process may have taken in, and not sent on, when it is killed. Each has a step's tokens of every open choice."""


class Served:
    """What clients got: whole answers by their usage, answers that broke off by the last usage that came.

    Charged is what was handed to an API process (decision 054). One that is killed may have taken tokens in that it has not sent: its
    clients cannot have seen them. So of an answer that breaks off, up to MESSAGES steps' tokens may be charged and not seen, and the prompt with the first of
    them; of any other answer, none. A resumable stream is read to its end from another process, also one whose id its client has not got,
    by the file that its process has left: then there is no such difference."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()  # messages
        self.ids: set[str] = set()  # of streams that clients know
        self.lost: Counter[str] = Counter()  # most tokens that may have been handed over and not sent
        self.num_whole = self.num_broken = self.num_refused = self.num_budget = self.num_resumed = self.num_found = 0


async def _rest(client: Client, stream_id: str) -> int:
    """Read a resumable stream again, from any API process, until it is there to its end. → its tokens, with the prompt."""
    for _ in range(200):
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            try:
                whole = await client.get(f"/v1/stream/{stream_id}?from=0")
            except HTTPFailure as error:
                if error.status in (429, 503) or not error.status:
                    await asyncio.sleep(0.1)
                    continue
                raise
            events = [line[5:].strip() for line in whole.split(b"\n") if line.startswith(b"data:")]
            chunks = [json.loads(event) for event in events if event != b"[DONE]"]
            if b"[DONE]" in events or any("error" in chunk for chunk in chunks):
                return max((chunk.get("usage") or {}).get("total_tokens", 0) for chunk in chunks)
        await asyncio.sleep(0.1)
    raise SystemExit(f"stream {stream_id} was not read to its end")


async def _one(
    client: Client,
    key: str,
    dice: random.Random,
    served: Served,
    vocabulary: int,
    models: Sequence[str],
    is_resumable: bool,
) -> None:
    has_left = False
    # A new connection: a request that is sent again, because a kept connection was closed, would be charged twice and seen once.
    await client.close()
    num_prompt, num_output, n = dice.randrange(1, 60), dice.randrange(1, 60), dice.choice([1, 1, 1, 3])
    prompt = [dice.randrange(vocabulary // 4, vocabulary) for _ in range(num_prompt)]
    body = {"prompt": prompt, "max_tokens": num_output, "n": n, "stream": True, "seed": dice.randrange(99)}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True, "resumable": is_resumable}
    if models:
        body["model"] = dice.choice(models)
    last, is_whole, has_error, stream_id, most_new = 0, False, False, "", 1
    try:
        async for event in client.post_events("/v1/completions", json.dumps(body).encode()):
            is_whole |= event == b"[DONE]"
            chunk = {} if event == b"[DONE]" else json.loads(event)
            if "error" in chunk:
                has_error = True
                served.errors[chunk["error"].get("message", "")[:100]] += 1
            stream_id = stream_id or chunk.get("id", "")
            now = (chunk.get("usage") or {}).get("total_tokens", 0)
            most_new = max(most_new, now - last) if last else most_new
            last = max(last, now)
            served.num_budget += any(each.get("stop_reason") == "budget" for each in chunk.get("choices", ()))
            if dice.random() < (0.005 if is_resumable else 0.0005):
                has_left = True
                break  # the client leaves
    except HTTPFailure as error:
        if error.status == 429:
            served.num_refused += 1
            return
        served.errors[f"{error.status}: {error}"[:100]] += 1
        if error.status and error.status < 500:
            raise
    except (OSError, ValueError, asyncio.IncompleteReadError):
        pass
    served.ids |= {stream_id}
    if is_resumable and stream_id and not is_whole and not has_error:
        last = await _rest(client, stream_id)
        is_whole = True
        served.num_resumed += 1
    served.tokens[key] += last
    if is_whole or has_error:
        served.num_whole += 1
    elif is_resumable:
        served.num_broken += 1  # _read_left() reads it, if it had begun
    else:
        served.num_broken += 1
        # A client that leaves is noticed some steps later. most_new: an event may hold the tokens of a draft.
        most = num_prompt + n * num_output - last
        served.lost[key] += (
            most if has_left else min(most, MESSAGES * n * max(most_new, DRAFTED) + (0 if last else num_prompt))
        )


def _kept_streams(server: Server) -> set[str]:
    """Ids of all streams that can be resumed, by their files."""
    records = Path(tempfile.gettempdir()).glob("octavo-*/server.json")
    folders = [path.parent for path in records if json.loads(path.read_text())["pid"] == server.process.pid]
    return {path.name.removeprefix("stream-") for folder in folders for path in folder.glob("stream-*")}


async def _read_left(server: Server, served: Served, kept: set[str]) -> None:
    """Read the streams that clients have asked for and know nothing of: their processes were killed before they sent the first event."""
    assert kept & served.ids, "the server keeps its streams elsewhere"
    for stream_id in sorted(kept - served.ids):
        for key in "abc":
            client = Client(Target.parse(server.base), key)
            try:
                served.tokens[key] += await _rest(client, stream_id)
                served.num_found += 1
                break
            except HTTPFailure as error:
                if error.status != 404:  # another key's
                    raise
            finally:
                await client.close()


async def _spend(server: Server, arguments: argparse.Namespace, vocabulary: int, models: Sequence[str]) -> Served:
    served, dice = Served(), random.Random(arguments.seed)
    left = iter(range(arguments.requests))
    num_killed: Counter[str] = Counter()

    async def client(number: int) -> None:
        own = random.Random(arguments.seed * 1000 + number)
        clients = {key: Client(Target.parse(server.base), key) for key in "abc"}
        for at in left:
            kind = "engine" if at % 200 == 100 else "server" if at % 200 == 199 and arguments.kill_api else ""
            if kind:
                parents = [pid for pid, what in server.children().items() if "gateway.child" in what]
                children = {
                    pid: what for each in parents or [server.process.pid] for pid, what in children_of(each).items()
                }
                pids = [pid for pid, what in children.items() if what.endswith(f"octavo.{kind}.process")]
                if pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(dice.choice(pids), signal.SIGKILL)
                        num_killed[kind] += 1
            key = own.choice("abc")
            await _one(clients[key], key, own, served, vocabulary, models, arguments.resumable)
        for each in clients.values():
            await each.close()

    await asyncio.gather(*(client(number) for number in range(16)))
    print(f"killed: {dict(num_killed)}")
    return served


def _model_of(flags: Sequence[str]) -> str:
    return flags[list(flags).index("--model") + 1] if "--model" in flags else ""


def budgets(arguments: argparse.Namespace) -> None:
    lines = ["a a 1", f"b b 1 budget_tokens={arguments.budget}", "c c 4 tpm=10M"]
    kept = ("--resume-seconds", "3600", "--resume-bytes", "1GiB") if arguments.resumable else ()
    flags = (*kept, "--api-processes", "2", "--fairness", "key", "--max-engine-restarts", "100", *arguments.flags)
    names = [f"m{at}" for at in range(arguments.models)]
    served_models = [f"{name}={_model_of(arguments.flags) or resolve('').path}" for name in names]
    if names:
        flags = tuple(flag for flag in flags if flag not in ("--model", _model_of(arguments.flags)))
    with serving(lines, *served_models, *flags) as server:
        vocabulary = vocabulary_of(server, "boss")
        served = asyncio.run(_spend(server, arguments, vocabulary, names))
        if arguments.resumable:
            asyncio.run(_read_left(server, served, _kept_streams(server)))
        time.sleep(1.0)
        charged = {key: each["total_tokens"] for key, each in usage(server, "boss").items()}
    print(
        f"{served.num_whole} whole answers ({served.num_resumed} of them read on at another connection), {served.num_broken} broken off "
        f"({served.num_found} of them had begun, and were read afterwards), "
        f"{served.num_refused} refused, {served.num_budget} choices ended by the budget"
    )
    for message, count in served.errors.most_common():
        print(f"  {count} × {message}")
    is_right = True
    for key in "abc":
        unseen = charged[key] - served.tokens[key]
        is_right &= 0 <= unseen <= served.lost[key]
        is_right &= bool(unseen) <= bool(served.lost[key])
        print(
            f"key {key}: served {served.tokens[key]}, charged {charged[key]}, of which broken answers did not show {unseen} "
            f"(at most {served.lost[key]} can be)"
        )
    is_right &= charged["b"] <= arguments.budget
    print("every token was counted once" if is_right else "WRONG")
    sys.exit(0 if is_right else 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (flood, weights, throughput, budgets):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        command.add_argument("flags", nargs="*", help="further flags of the server, after --")
        if function is flood:
            command.add_argument("--sizes", default="64,640", help="requests of the flood (default: 64,640)")
            command.add_argument("--requests", type=int, default=30, help="of the light key, for each size")
            command.add_argument("--fairness", default="key", help="none: as a comparison")
        elif function is budgets:
            command.add_argument("--requests", type=int, default=1000)
            command.add_argument("--budget", type=int, default=8000, help="tokens of one of the keys")
            command.add_argument("--seed", type=int, default=1)
            command.add_argument(
                "--models", type=int, default=0, help="serve the model under so many names on one port"
            )
            command.add_argument(
                "--resumable", action="store_true", help="answers that break off are read to their end"
            )
            command.add_argument("--no-kill-api", dest="kill_api", action="store_false", help="kill engines only")
        else:
            command.add_argument("--clients", type=int, default=32 if function is weights else 16, help="of each key")
            command.add_argument("--seconds", type=float, default=60.0 if function is weights else 2.0)
            command.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
