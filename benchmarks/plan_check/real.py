"""Real runs: steps are measured on a server, and each load is sent to it. What they leave is kept; predictions are made from it later."""

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.plan_check.loads import (
    NO_DRAFTS,
    NUM_CLIENTS,
    RECORDED,
    SETTINGS,
    bench_options,
    gpu_loads,
    loads,
    model_of,
)
from benchmarks.plan_check.others import core_time, wait_for_calm
from octavo.cli.bench import clients
from octavo.cli.bench.sending import RequestResult, loop_factory
from octavo.cli.bench.serve import warm_up
from octavo.cli.bench.workload import trace_workload
from octavo.cli.models import StartedServer
from octavo.cli.planning.measure import Asked, Load, exercise, probe, recording_of
from octavo.plan.model_shape import read_shape
from octavo.plan.speed import Probed
from octavo.plan.trace import Trace
from octavo.recording.recorder import FLUSH_SECONDS
from octavo.text.tokenize.made_up import write_tokenizer

_MOST_OTHERS = 0.03  # of the cores' time: a run in which others took more is sent again
_PROBES_SECONDS = 10.0  # before and after a run, at most
_PROBE_LEN = 1024  # a model's context, of which probes' prompts take half at most


class Measuring(msgspec.Struct, frozen=True):
    since: float
    until: float
    alone: list[Asked]
    mixed: list[Asked] = []
    probes: list[Asked] = []
    others: float = 0.0  # share of the cores' time that other processes took


class Sent(msgspec.Struct, frozen=True):
    """One run of a load: seconds since 1970, and what its client saw."""

    load: str
    since: float
    until: float
    results: list[RequestResult]
    probed: list[Probed] = []  # the server's speed just before and just after the run
    others: float = 0.0  # share of the cores' time that other processes took, from the first probe to the last

    @property
    def is_disturbed(self) -> bool:
        return self.others > _MOST_OTHERS


class Seen(msgspec.Struct, frozen=True):
    """All that a real run left, besides its recording: predictions are made from it later."""

    model: str
    setting: str
    seconds: float
    measuring: list[Measuring]  # before each other round of the loads
    sent: list[Sent]
    seed: int = 11  # of the loads
    gpu: str = ""  # name of the model, with the loads for a GPU; "": those for a CPU
    scale: float = 1.0  # of these

    @property
    def traces(self) -> dict[str, Trace]:
        return gpu_loads(self.gpu, self.scale, self.seed) if self.gpu else loads(self.seconds, self.seed)

    def runs_of(self, load: str) -> list[Sent]:
        """Without such as were disturbed, if others are left."""
        runs = [each for each in self.sent if each.load == load]
        return [each for each in runs if not each.is_disturbed] or runs

    @property
    def disturbed(self) -> list[str]:
        """The loads of disturbed runs."""
        return [each.load for each in self.sent if each.is_disturbed]

    @property
    def title(self) -> str:
        return Path(self.gpu).name if self.gpu else self.setting


def run(arguments: argparse.Namespace) -> None:
    """Costs are measured on the same server before each other round of the loads, and the machine is probed before and after each run: it is not the
    same some minutes later."""
    flags, _ = SETTINGS[arguments.setting]
    gpu = arguments.gpu
    seen = Seen(
        model_of(gpu) if gpu else arguments.model,
        arguments.setting,
        arguments.seconds,
        [],
        [],
        arguments.seed,
        gpu,
        arguments.scale,
    )
    folder = Path(arguments.output) / (f"gpu-{seen.title}" if gpu else seen.title)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="octavo-plan-check-") as recordings, tempfile.TemporaryDirectory() as words:
        own = [*RECORDED, recordings, *NO_DRAFTS, *flags, *arguments.flag]
        if gpu:
            write_tokenizer(Path(words), read_shape(seen.model).vocab_size)
            own += ["--load-format", "dummy", "--tokenizer", words]
        server = StartedServer(seen.model, own)
        try:
            print(f"{seen.title}: started in {time.monotonic() - began:.1f} s", flush=True)
            options = bench_options(server)
            if gpu:
                options.vocab_size = min(options.vocab_size, read_shape(seen.model).vocab_size)
            with asyncio.Runner() as runner:
                sender = Sending(seen, server, options, runner.run(warm_up(options)), began)
            if gpu:  # steps are captured in a first run of the largest load
                sender.send(*next(iter(seen.traces.items())), is_kept=False)
            for number in range(arguments.rounds):
                if number % 2 == 0:
                    measuring = calibrate(server, Path(recordings), arguments.measure_seconds, options, number)
                    seen.measuring.append(measuring)
                for name, trace in seen.traces.items():
                    sender.send(name, trace)
            longest = max(each.until - each.since for each in seen.sent) + _PROBES_SECONDS
            for name in seen.disturbed:
                if time.monotonic() - began + longest < arguments.most_seconds:
                    sender.send(name, seen.traces[name])
            time.sleep(3 * FLUSH_SECONDS)  # until it has been written
            shutil.copytree(next(Path(recordings).glob("live-*")), folder / "recording")
        finally:
            server.stop()
    (folder / "seen.json").write_bytes(msgspec.json.encode(seen))
    if gpu:  # in one file, to be taken elsewhere
        file = shutil.make_archive(str(folder), "gztar", folder.parent, folder.name)
        shutil.rmtree(folder)
        print(f"{file}: {Path(file).stat().st_size / 2**20:.1f} MiB")
    print(f"{seen.title}: {len(seen.sent)} runs of {len(seen.traces)} loads")


class Sending(NamedTuple):
    seen: Seen
    server: StartedServer
    options: argparse.Namespace
    model: str
    began: float

    def send(self, name: str, trace: Trace, is_kept: bool = True) -> None:
        """One run of a load, and what it left. The machine is probed just before and after it; not a GPU, which is not shared."""
        seen, options = self.seen, self.options
        at = len(seen.sent)
        wait_for_calm()
        load = trace_workload(trace, options.vocab_size, seed=100 + at)
        cores, probed = core_time(), self._probe(2 * at)
        since = time.time()
        results = clients.send_all(
            options, self.model, load, lambda count: None, NUM_CLIENTS if seen.gpu else 1
        ).results
        until = time.time()
        probed += self._probe(2 * at + 1)
        others = core_time().others_since(cores)
        if is_kept:
            seen.sent.append(Sent(name, since, until, results, probed, others))
        failed = sum(bool(each.error) for each in results)
        print(
            f"{seen.title}, {name}: {until - since:.1f} s, {failed} failed; others took {others:.1%} of the cores; "
            f"{time.monotonic() - self.began:.0f} s so far",
            flush=True,
        )

    def _probe(self, number: int) -> list[Probed]:
        if self.seen.gpu:
            return []
        return probe(self.server.record.url, self.model, self.options.vocab_size, _PROBE_LEN, "", 1000 + number)


def calibrate(server: StartedServer, folder: Path, seconds: float, options: argparse.Namespace, seed: int) -> Measuring:
    """As octavo plan --measure does, on a server that goes on. `seed`: of the prompts; with the same again, all of them would be cached."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        load = Load(server.record.url, server.record.model, options.vocab_size, "", seed)
        runner.run(load.ask(load.prompt(16), 4))
        limits = recording_of(folder).header.report
        since, cores = time.time(), core_time()
        asked = runner.run(exercise(load, limits.max_num_seqs, limits.max_model_len, seconds))
        runner.run(load.close())
    others = core_time().others_since(cores)
    print(f"measured for {time.time() - since:.0f} s; others took {others:.1%} of the cores", flush=True)
    return Measuring(since, time.time(), *asked, others)
