"""Real runs: steps are measured on a server, then each load is sent to it. What they leave is kept; predictions are made from it later."""

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path

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
from octavo.cli.bench import clients
from octavo.cli.bench.sending import RequestResult, loop_factory
from octavo.cli.bench.serve import warm_up
from octavo.cli.bench.workload import trace_workload
from octavo.cli.models import StartedServer
from octavo.cli.planning.measure import Asked, Load, exercise, recording_of
from octavo.plan.model_shape import read_shape
from octavo.plan.trace import Trace
from octavo.recording.recorder import FLUSH_SECONDS
from octavo.text.tokenize.made_up import write_tokenizer


class Measuring(msgspec.Struct, frozen=True):
    since: float
    until: float
    alone: list[Asked]
    mixed: list[Asked] = []


class Sent(msgspec.Struct, frozen=True):
    """One run of a load: seconds since 1970, and what its client saw."""

    load: str
    since: float
    until: float
    results: list[RequestResult]


class Seen(msgspec.Struct, frozen=True):
    """All that a real run left, besides its recording: predictions are made from it later."""

    model: str
    setting: str
    seconds: float
    measuring: list[Measuring]  # before each round of the loads
    sent: list[Sent]
    seed: int = 11  # of the loads
    gpu: str = ""  # name of the model, with the loads for a GPU; "": those for a CPU
    scale: float = 1.0  # of these

    @property
    def traces(self) -> dict[str, Trace]:
        return gpu_loads(self.gpu, self.scale, self.seed) if self.gpu else loads(self.seconds, self.seed)

    @property
    def title(self) -> str:
        return Path(self.gpu).name if self.gpu else self.setting


def run(arguments: argparse.Namespace) -> None:
    """Costs are measured on the same server just before each round of the loads: a shared machine is not the same some minutes later."""
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
                model = runner.run(warm_up(options))
            for number in range(-1 if gpu else 0, arguments.rounds):
                if number >= 0:
                    seen.measuring.append(
                        calibrate(server, Path(recordings), arguments.measure_seconds, options.vocab_size)
                    )
                for at, (name, trace) in enumerate(seen.traces.items()):
                    if number < 0 and at:  # on a GPU steps are captured in a first run of the largest load
                        continue
                    load = trace_workload(trace, options.vocab_size, seed=100 * (number + 1) + at)
                    since = time.time()
                    num_clients = NUM_CLIENTS if gpu else 1
                    results = clients.send_all(options, model, load, lambda count: None, num_clients).results
                    if number >= 0:
                        seen.sent.append(Sent(name, since, time.time(), results))
                    print(
                        f"{seen.title}, {name}: {time.time() - since:.1f} s, {sum(bool(each.error) for each in results)} failed; "
                        f"{time.monotonic() - began:.0f} s so far",
                        flush=True,
                    )
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


def calibrate(server: StartedServer, folder: Path, seconds: float, vocab_size: int = 30_000) -> Measuring:
    """As octavo plan --measure does, on a server that goes on."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        load = Load(server.record.url, server.record.model, vocab_size, "")
        runner.run(load.ask(load.prompt(16), 4))
        limits = recording_of(folder).header.report
        since = time.time()
        asked = runner.run(exercise(load, limits.max_num_seqs, limits.max_model_len, seconds))
        runner.run(load.close())
    return Measuring(since, time.time(), *asked)
