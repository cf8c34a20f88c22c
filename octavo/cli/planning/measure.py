"""`octavo plan --measure`: starts the server, sends it steps of all sizes, and fits a StepModel to what it recorded. The server computes in
processes of its own; this one only sends requests."""

import argparse
import asyncio
import contextlib
import math
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from octavo import __version__
from octavo.cli.bench.http_stream import Client, Target
from octavo.cli.bench.report import facts
from octavo.cli.bench.sending import RequestResult, Sender, loop_factory
from octavo.cli.models import StartedServer
from octavo.cli.planning.check import EVERY_TOKEN
from octavo.errors import ConfigError, RequestFailed
from octavo.plan.machine import FORMAT, MachineCosts, write_costs
from octavo.plan.model_shape import read_shape
from octavo.plan.recorded import Measured
from octavo.plan.settings import JITTER_PARTS, Front, Jitter
from octavo.plan.speed import Probed, speed_of
from octavo.plan.step_model import fit_model, without_slow_stretches
from octavo.recording.format import Recording, read
from octavo.recording.recorder import FLUSH_SECONDS

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_PROMPTS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_TIMEOUT = 300.0
_SHORT = 128  # prompt tokens, up to which a request's way in is taken for the constant
_TOKENS = 24  # of a row in the ladder of rows
_ANSWER = 16  # tokens of a request that is alone: the first steps after a prompt take longer than those that follow
_PAUSE = 0.05  # seconds for which the engine is idle before it
_PROBE_PROMPTS, _PROBE_ROUNDS = (24, 192, 64, 320), 6
_USERS = (1, 2, 4, 8, 16)  # of the mixed load, one number after the other
_USER_PROMPT, _USER_ANSWER = (16, 1024), (4, 64)  # tokens, log-uniform
_PREFIX_SHARE = 0.25  # of its requests begin with the same tokens


class Asked(NamedTuple):
    prompt_len: int
    result: RequestResult


class Exercised(NamedTuple):
    alone: list[Asked]  # requests that were alone
    mixed: list[Asked]  # … those of a mixed load
    probes: list[Asked]  # … and those that say how fast the machine was (Load.probe)


class Load:
    """Sends prompts of random token ids to the server."""

    def __init__(self, url: str, model: str, vocab_size: int, key: str, seed: int = 0) -> None:
        self._client = Client(Target.parse(url), key)
        self._model, self._vocab_size = model, vocab_size
        self.dice = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        lowest = min(1000, self._vocab_size // 2)
        return [self.dice.randrange(lowest, self._vocab_size) for _ in range(length)]

    def log_uniform(self, least: int, most: int) -> int:
        return round(math.exp(self.dice.uniform(math.log(least), math.log(most))))

    async def ask(self, prompt: list[int], max_tokens: int) -> Asked:
        options = argparse.Namespace(
            endpoint="completions", timeout=_TIMEOUT, output_len=max_tokens, temperature=0.0, ignore_eos=True,
            extra_body=EVERY_TOKEN,
        )  # fmt: skip
        result = await Sender(self._client, options, self._model).send(prompt)
        if result.error:
            raise RequestFailed(f"a request of the measurement failed: {result.error}")
        return Asked(len(prompt), result)

    async def ask_all(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Asked]:
        return list(await asyncio.gather(*(self.ask(prompt, max_tokens) for prompt in prompts)))

    async def probe(self, max_len: int, rounds: int = 1) -> list[Asked]:
        """Requests that say how fast the machine is now: always of the same lengths, one at a time. Six rounds take two seconds where a request takes 80 ms."""
        found = []
        for length in _PROBE_PROMPTS * rounds:
            await asyncio.sleep(_PAUSE)
            found.append(await self.ask(self.prompt(min(length, max_len // 2)), min(_ANSWER, max_len // 4)))
        return found

    async def close(self) -> None:
        await self._client.close()


async def exercise(load: Load, max_rows: int, max_len: int, seconds: float, first: int = 0) -> Exercised:
    """Steps of every size that the limit of time allows, and half of the time a mixed load: there steps come in the order, with the pauses and beside
    the work of other processes that servers have. `first`: section to begin with. Servers that are measured at once have different ones, so that the
    steps of each run beside all kinds of steps of others, as in a fleet."""
    alone: list[Asked] = []
    mixed: list[Asked] = []
    ends = time.monotonic() + seconds
    sections = [_rows, _alone, _long_rows, _behind_prefix, _beside_streams]
    sections = sections[first % len(sections) :] + sections[: first % len(sections)]
    rounds = 0
    probes: list[Asked] = []
    while time.monotonic() < ends or not rounds:
        for section in sections:
            began = time.monotonic()
            alone += await section(load, max_rows, max_len)
            probes += await load.probe(max_len)
            if time.monotonic() > ends and rounds:
                break
            left = seconds / (2 * len(sections)) if not rounds else time.monotonic() - began
            mixed += await _mixed(load, max_rows, max_len, left)
        rounds += 1
    return Exercised(alone, mixed, probes)


async def _rows(load: Load, max_rows: int, max_len: int) -> list[Asked]:
    """Rows with short contexts."""
    for rows in (count for count in _ROWS if count <= max_rows):
        await load.ask_all([load.prompt(8) for _ in range(rows)], _TOKENS)
    return []


async def _alone(load: Load, max_rows: int, max_len: int) -> list[Asked]:
    """Prompts alone."""
    alone = []
    for length in (count for count in _PROMPTS if count + _ANSWER <= max_len):
        for _ in range(2 if length <= 512 else 1):
            prompt = load.prompt(length)
            await asyncio.sleep(_PAUSE)
            alone.append(await load.ask(prompt, _ANSWER))
    return alone


async def _long_rows(load: Load, max_rows: int, max_len: int) -> list[Asked]:
    """Rows with long contexts."""
    long = min(2048, max_len - 64)
    for rows in (count for count in (1, 4, 8) if count <= max_rows):
        await load.ask_all([load.prompt(long)] * 1 + [load.prompt(long // 2) for _ in range(rows - 1)], 32)
    return []


async def _behind_prefix(load: Load, max_rows: int, max_len: int) -> list[Asked]:
    """Prompts behind a cached prefix."""
    for prefix in (256, 1024):
        shared = load.prompt(min(prefix, max_len // 2))
        await load.ask(shared, 1)
        for length in (16, 32, 64, 96, 160, 256):
            if len(shared) + length + _ANSWER <= max_len:
                await load.ask(shared + load.prompt(length), _ANSWER)
    return []


async def _beside_streams(load: Load, max_rows: int, max_len: int) -> list[Asked]:
    """Prompts beside streams."""
    for streams in (count for count in (2, 8, 24) if count < max_rows):
        beside = [length for length in (24, 32, 64, 128, 400) if length + 2 <= max_len]
        await asyncio.gather(load.ask_all([load.prompt(32) for _ in range(streams)], 64), _one_by_one(load, beside))
    return []


async def _mixed(load: Load, max_rows: int, max_len: int, seconds: float) -> list[Asked]:
    """Users who read an answer for as long as they have waited for it, then ask again. A faster machine gets more requests: the load is as large a
    share of what it can do."""
    numbers = [count for count in _USERS if count <= max_rows]
    shared = load.prompt(min(256, max_len // 4))
    found: list[Asked] = []
    for count in numbers:
        ends = time.monotonic() + seconds / len(numbers)
        for asked in await asyncio.gather(*(_user(load, shared, max_len, ends) for _ in range(count))):
            found += asked
    return found


async def _user(load: Load, shared: list[int], max_len: int, ends: float) -> list[Asked]:
    found: list[Asked] = []
    reads = _PAUSE
    while (now := time.monotonic()) < ends:
        await asyncio.sleep(min(load.dice.expovariate(1 / reads), ends - now))
        began = time.monotonic()
        prefix = shared if load.dice.random() < _PREFIX_SHARE else []
        length = min(load.log_uniform(*_USER_PROMPT), max_len // 4)
        length_of_answer = min(load.log_uniform(*_USER_ANSWER), max_len // 4)
        found.append(await load.ask(prefix + load.prompt(length), length_of_answer))
        reads = time.monotonic() - began
    return found


async def _one_by_one(load: Load, lengths: Sequence[int]) -> None:
    for length in lengths:
        await load.ask(load.prompt(length), 2)


def measure(model: str, flags: Sequence[str], path: Path, seconds: float, num_servers: int = 1) -> MachineCosts:
    """`num_servers`: that share the machine: all of them are measured at once. Raises ConfigError where one does not start or records nothing."""
    shape = read_shape(model)
    signal.signal(signal.SIGTERM, _leave)  # so that no server outlives this process
    with tempfile.TemporaryDirectory(prefix="octavo-plan-") as folder, contextlib.ExitStack() as running:
        folders = [Path(folder) / str(number) for number in range(num_servers)]
        servers = []
        start_seconds = 0.0
        for each in folders:
            each.mkdir()
            started = time.monotonic()
            own = ["--record-folder", str(each), "--record-bytes", "1G", "--speculative-config", '{"method": "none"}']
            servers.append(StartedServer(model, [*own, *flags]))
            running.callback(servers[-1].stop)
            start_seconds = max(start_seconds, time.monotonic() - started)
        key = os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            urls = [(server.record.url, server.record.model) for server in servers]
            asked = runner.run(_exercise_all(urls, folders, shape.vocab_size, key, seconds))
        recordings = [recording_of(each) for each in folders]
    recording = recordings[0]
    measured = [Measured(each) for each in recordings]
    try:
        samples, disturbed = without_slow_stretches([step for each in measured for step in each.timed()])
        found = fit_model(samples)
    except ValueError as error:
        raise ConfigError(f"too few steps were measured: {error}") from None
    report = recording.header.report
    costs = MachineCosts(
        format=FORMAT,
        made=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        version=__version__,
        machine=_machine(report.device),
        is_cpu=report.device.startswith("cpu"),
        shape=shape,
        weights_bytes=report.weights_bytes,
        page_bytes=report.page_bytes,
        page_size=report.page_size,
        num_pages=report.num_pages,
        max_model_len=report.max_model_len,
        max_num_seqs=report.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens,
        depth=measured[0].learned.depth,
        step=found.model,
        front=front_of(asked, measured),
        start_seconds=start_seconds,
        num_steps=found.num_samples,
        median_error=found.median_error,
        p90_error=found.p90_error,
        noise=found.noise,
        flags=list(flags),
        disturbed=disturbed,
        num_servers=num_servers,
        overlap_rows=measured[0].learned.overlap_rows,
    )
    if num_servers == 1:
        costs = with_speed(costs, asked.probes)
    write_costs(path, costs)
    return costs


def with_speed(costs: MachineCosts, probes: Sequence[Asked]) -> MachineCosts:
    """`probes`: that were sent while these costs were measured."""
    probed = probed_of(probes)
    return msgspec.structs.replace(costs, speed=speed_of(costs.settings, probed) if probed else None)


def probed_of(probes: Sequence[Asked]) -> list[Probed]:
    results = [(length, result) for length, result in probes if result.output_tokens > 1]
    return [
        Probed(length, result.output_tokens, result.first - result.started, result.ended - result.first)
        for length, result in results
    ]


def probe(url: str, model: str, vocab_size: int, max_len: int, key: str, seed: int) -> list[Probed]:
    """How fast a running server is now. `seed`: of the prompts; of another one none is cached."""

    async def send() -> list[Asked]:
        load = Load(url, model, vocab_size, key, seed)
        try:
            return await load.probe(max_len, _PROBE_ROUNDS)
        finally:
            await load.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return probed_of(runner.run(send()))


async def _exercise_all(
    servers: Sequence[tuple[str, str]], folders: Sequence[Path], vocab_size: int, key: str, seconds: float
) -> Exercised:
    """`servers`: URL and model of each."""
    loads = [Load(url, model, vocab_size, key, seed) for seed, (url, model) in enumerate(servers)]
    await asyncio.gather(*(load.ask(load.prompt(16), 4) for load in loads))
    limits = recording_of(folders[0]).header.report
    found = await asyncio.gather(
        *(
            exercise(load, limits.max_num_seqs, limits.max_model_len, seconds, 2 * number)
            for number, load in enumerate(loads)
        )
    )
    for load in loads:
        await load.close()
    alone, mixed, probes = ([asked for each in part for asked in each] for part in zip(*found, strict=True))
    return Exercised(alone, mixed, probes)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def recording_of(folder: Path) -> Recording:
    """What the server has recorded so far."""
    time.sleep(3 * FLUSH_SECONDS)
    found = sorted(folder.glob("live-*"))
    if not found:
        raise ConfigError("the server recorded nothing: leave --record-bytes out")
    return read(found[-1])


def front_of(asked: Exercised, measured: Sequence[Measured]) -> Front:
    """What requests that were alone took outside the engine, each compared with its own way through it. The way in is a constant and so much for each prompt token:
    middle ones, because a request that comes during a step waits for its end. The way back is a mean: how long a first token takes depends
    on which core its process finds free, and means of first tokens are what a plan is compared with."""
    passages = {name: way for each in measured for name, way in each.passages.items()}
    inward: list[tuple[int, float]] = []
    first: list[float] = []
    last: list[float] = []
    for each in asked.alone:
        passage, result = passages.get(each.result.response_id), each.result
        if passage is None or passage.first == math.inf:
            continue
        inward.append((each.prompt_len, max(0.0, passage.arrived - result.started)))
        first.append(max(0.0, result.first - passage.first))
        if passage.ended > passage.first:
            last.append(max(0.0, result.ended - passage.ended))
    if not inward:
        return Front()
    constant = median([seconds for length, seconds in inward if length <= _SHORT] or [min(inward)[1]])
    slopes = [(seconds - constant) / length for length, seconds in inward if length > _SHORT]
    return Front(
        constant,
        max(0.0, median(slopes)) if slopes else 0.0,
        fmean(first),
        fmean(last or first),
        _jitter(asked.mixed, measured),
    )


def _jitter(asked: Sequence[Asked], measured: Sequence[Measured]) -> list[Jitter]:
    """Of each kind of step with enough times between tokens: the middles of equal parts of what was found."""
    found: defaultdict[tuple[bool, int], list[float]] = defaultdict(list)
    for each in measured:
        for _, result in asked:
            times: Sequence[float] = each.token_times.get(result.response_id, ())
            if len(times) != len(result.gaps) + 1:
                continue
            rows = each.token_rows[result.response_id][1:]
            for gap, (before, after), num_rows in zip(result.gaps, pairwise(times), rows, strict=True):
                found[num_rows < 0, abs(num_rows).bit_length()].append(gap - (after - before))
    kinds = []
    for (with_prompt, power), several in sorted(found.items()):
        if len(several) >= JITTER_PARTS:
            ordered = sorted(several)
            middles = [ordered[int((part + 0.5) / JITTER_PARTS * len(ordered))] for part in range(JITTER_PARTS)]
            mean = fmean(middles)
            kinds.append(Jitter(1 << (power - 1), with_prompt, [round(each - mean, 9) for each in middles]))
    return kinds


def _machine(device: str) -> str:
    machine = facts()["machine"]
    return f"{device}: {machine['processor']}, {machine['cores']} cores" if device.startswith("cpu") else device
