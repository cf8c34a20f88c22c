"""octavo plan against real runs: three loads × three settings of the embedded model on this machine, predicted beside seen. The steps that the
model is fitted to (octavo plan --measure) are of other requests.

    python -m benchmarks.plan_check run --setting default --output results
    python -m benchmarks.plan_check run --setting few-rows --output results
    python -m benchmarks.plan_check run --setting small-steps --output results
    python -m benchmarks.plan_check table --output results
    python -m benchmarks.plan_check limit --servers 1 --requests 120
    python -m benchmarks.plan_check speed
    python -m benchmarks.plan_check fleet --replicas 1000 --seconds 600

    python -m benchmarks.plan_check run --gpu qwen3-0.6b --rounds 2 --output DIR     # on a GPU, with random weights; also llama-3.1-8b
    python -m benchmarks.plan_check table --output DIR                               # anywhere: DIR has gpu-*.tar.gz

Every run of the first kind takes about five minutes, on an otherwise idle machine: three times it measures steps, and sends each load.
speed: simulated requests a second on one core, with eight replicas."""

import argparse
import asyncio
import bisect
import functools
import itertools
import math
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu import workloads
from benchmarks.gpu.subject import MODELS
from octavo import __version__
from octavo.cli.bench import clients
from octavo.cli.bench.report import percentile
from octavo.cli.bench.sending import RequestResult, loop_factory
from octavo.cli.bench.serve import warm_up
from octavo.cli.bench.workload import trace_workload
from octavo.cli.models import StartedServer
from octavo.cli.planning.check import EVERY_TOKEN, Row, compare, rows_of
from octavo.cli.planning.measure import Asked, Load, exercise, front_of, recording_of
from octavo.plan.answer import is_kept
from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.figures import Figures, Levels
from octavo.plan.fleet import Simulation, simulate
from octavo.plan.machine import FORMAT, MachineCosts, read_costs, write_costs
from octavo.plan.model_shape import ModelShape, read_shape
from octavo.plan.recorded import Measured
from octavo.plan.settings import FleetSettings, ReplicaSettings
from octavo.plan.step_model import PICOSECONDS, MeasuredStep, StepModel, fit_model, without_slow_stretches
from octavo.plan.trace import Trace, TraceRequest
from octavo.plan.trace_files import read_trace
from octavo.recording.format import Recording, read
from octavo.recording.recorder import FLUSH_SECONDS
from octavo.text.tokenize.made_up import write_tokenizer

SETTINGS: dict[str, tuple[list[str], dict[str, int | float]]] = {
    "default": ([], {}),
    "few-rows": (["--max-num-seqs", "8"], {"max_num_seqs": 8}),
    "small-steps": (
        ["--max-num-batched-tokens", "128", "--max-inter-token-ms", "off"],
        {"max_num_batched_tokens": 128, "max_inter_token_ms": 0.0},
    ),
}
NO_DRAFTS = ["--speculative-config", '{"method": "none"}']
RECORDED = ["--record-bytes", "1G", "--record-folder"]
PACE_SECONDS = 3.0
GOALS = {"mean": 0.05, "p99": 0.10, "tokens/s": 0.05}


def loads(seconds: float, seed: int = 11) -> dict[str, Trace]:
    shapes = {
        "chat": Shape(3.0, seconds, Lengths(150, 0.8), Lengths(60, 0.6)),
        "code": Shape(2.5, seconds, Lengths(400, 0.7), Lengths(12, 0.6)),
        "bursty, shared prefix": Shape(
            2.5, seconds, Lengths(64, 0.5), Lengths(40, 0.5), "bursty", shared_prefix=256, num_prefixes=3
        ),
    }
    return {name: trace_of(shape, seed) for name, shape in shapes.items()}


def settings_of(costs: MachineCosts, changes: dict[str, int | float]) -> FleetSettings:
    replica = ReplicaSettings(
        costs.max_num_seqs,
        costs.max_num_batched_tokens,
        costs.num_pages,
        costs.max_model_len,
        costs.page_size,
        depth=costs.depth,
    )
    return FleetSettings(1, msgspec.structs.replace(replica, **changes), costs.step, costs.front)


def bench_options(server: StartedServer) -> argparse.Namespace:
    return argparse.Namespace(
        base_url=server.record.url, model=None, api_key=None, endpoint="completions", timeout=300.0, output_len=16, temperature=0.0,
        ignore_eos=True, num_warmups=3, prompt_kind="ids", input_len=64, vocab_size=30_000, seed=2, max_concurrency=None,
        extra_body=EVERY_TOKEN,
    )  # fmt: skip


class GpuLoad(NamedTuple):
    rate: float  # requests a second of the Poisson trace: about half of what the chip can do
    seconds: float


GPU_LOADS = {"qwen3-0.6b": GpuLoad(60.0, 10.0), "llama-3.1-8b": GpuLoad(25.0, 10.0)}
NUM_CLIENTS = 4  # processes, for as many streams as a GPU serves


def gpu_loads(name: str, scale: float, seed: int) -> dict[str, Trace]:
    """The mixed load of benchmarks/gpu, all at once, and a Poisson trace. `scale`: of counts and lengths, for a rehearsal."""
    load = GPU_LOADS.get(name, GpuLoad(4.0, 10.0))
    mixed = [TraceRequest(0.0, len(item.prompt), item.output_len) for item in workloads.make("mixed", 100, scale)]
    shape = Shape(load.rate, load.seconds, Lengths(400 * scale, 0.7), Lengths(200 * scale, 0.7))
    return {"mixed": Trace("mixed", mixed), "poisson": trace_of(shape, seed)}


def model_of(gpu: str) -> str:
    return str(MODELS / gpu) if gpu in GPU_LOADS else gpu


class Measuring(msgspec.Struct, frozen=True):
    since: float
    until: float
    alone: list[Asked]


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


def predict(folder: Path) -> dict[str, Any]:
    """What was seen in a run, and what a plan from the steps that were measured before it says."""
    seen = msgspec.json.decode((folder / "seen.json").read_bytes(), type=Seen)
    recording = read(folder / "recording")
    measured = Measured(recording)
    costs = costs_of(recording, measured, seen.measuring, read_shape(model_of(seen.gpu) if seen.gpu else seen.model))
    if seen.gpu:
        write_costs(folder.parent / f"costs-{seen.title}.json", costs)
    _, changes = SETTINGS[seen.setting]
    found: dict[str, Any] = {}
    for name, trace in seen.traces.items():
        rounds = [each for each in seen.sent if each.load == name]
        factors = [speed_at(costs, measured, each.since, seen.measuring) for each in rounds]
        near = [msgspec.structs.replace(costs, step=costs.step.scaled(factor)) for factor in factors]
        rows = [compare(trace, settings_of(own, changes), each.results) for own, each in zip(near, rounds, strict=True)]
        own = own_costs(costs, measured, [(each.since, each.until) for each in rounds])
        driven = [drive(trace, settings_of(own, changes), measured, each) for each in rounds]
        found[name] = {
            "disturbed": costs.disturbed,
            "failed": sum(bool(result.error) for each in rounds for result in each.results),
            # The model's time of the steps that were really planned, as a share of the time that they took.
            "steps": [
                _of_real_plans(own, measured.samples(each.since, each.until))
                for own, each in zip(near, rounds, strict=True)
            ],
            "factors": factors,
            "rows": _columns(rows, driven),
        }
    return found


def _columns(rows: list[list[Row]], driven: list[list[Row]]) -> list[tuple[str, list[float], list[float], list[float]]]:
    """Of each measure what was predicted and seen in every run, and what the simulation with the seen speed says. A measure that some run did
    not have (no times between tokens, where answers came whole) is left out."""
    planned, again = ([{row.name: row for row in each} for each in runs] for runs in (rows, driven))
    names = [row.name for row in rows[0] if all(row.name in each for each in (*planned, *again))]
    return [
        (
            name,
            [each[name].predicted for each in planned],
            [each[name].seen for each in planned],
            [each[name].predicted for each in again],
        )
        for name in names
    ]


def calibrate(server: StartedServer, folder: Path, seconds: float, vocab_size: int = 30_000) -> Measuring:
    """As octavo plan --measure does, on a server that goes on."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        load = Load(server.record.url, server.record.model, vocab_size, "")
        runner.run(load.ask(load.prompt(16), 4))
        limits = recording_of(folder).header.report
        since = time.time()
        alone = runner.run(exercise(load, limits.max_num_seqs, limits.max_model_len, seconds))
        runner.run(load.close())
    return Measuring(since, time.time(), alone)


def speed_at(costs: MachineCosts, measured: Measured, now: float, measuring: list[Measuring]) -> float:
    """How many times as long as by these costs the steps of the last measuring before took: the machine changes within minutes."""
    last = max((each for each in measuring if each.until <= now), key=lambda each: each.until)
    fitted, _ = without_slow_stretches([each for one in measuring for each in measured.timed(one.since, one.until)])

    def middle(samples: list[MeasuredStep]) -> float:
        return statistics.median(sample.seconds / costs.step.seconds_of(sample) for sample in samples)

    return middle(measured.samples(last.since, last.until)) / middle(fitted)


def costs_of(recording: Recording, measured: Measured, measuring: list[Measuring], shape: ModelShape) -> MachineCosts:
    timed = [each for one in measuring for each in measured.timed(one.since, one.until)]
    samples, disturbed = without_slow_stretches(timed)
    fit = fit_model(samples)
    report = recording.header.report
    return MachineCosts(
        FORMAT, time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), __version__, report.device, True, shape, report.weights_bytes,
        report.page_bytes, report.page_size, report.num_pages, report.max_model_len, report.max_num_seqs, report.max_num_batched_tokens,
        measured.learned.depth, fit.model, front_of([asked for one in measuring for asked in one.alone], measured.passages), 0.0, fit.num_samples, fit.median_error, fit.p90_error, fit.noise, disturbed=disturbed,
    )  # fmt: skip


def own_costs(costs: MachineCosts, measured: Measured, windows: list[tuple[float, float]]) -> MachineCosts:
    """Fitted to the steps of the compared runs themselves. What is still wrong then is not the steps' fit."""
    samples = [sample for window in windows for sample in measured.samples(*window)]
    return msgspec.structs.replace(costs, step=fit_model(samples).model)


def drive(trace: Trace, settings: FleetSettings, measured: Measured, sent: Sent) -> list[Row]:
    """A simulation whose steps are as slow, over a few seconds each, as those of the real run were. What it is off by is not the machine's drift."""
    plain = msgspec.structs.replace(settings.model, noise=[])
    steps = measured.timed(sent.since, sent.until)
    ended = [each for each, _ in steps]
    seen = list(itertools.accumulate((sample.seconds for _, sample in steps), initial=0.0))
    by_model = list(itertools.accumulate((plain.seconds_of(sample) for _, sample in steps), initial=0.0))
    first = min(measured.arrivals(sent.since, sent.until))

    @functools.cache
    def pace(tenth: int) -> float:
        middle = first + tenth / 10
        low, high = (bisect.bisect_left(ended, middle + side * PACE_SECONDS / 2) for side in (-1, 1))
        return (seen[high] - seen[low]) / (by_model[high] - by_model[low]) if high - low >= 5 else 1.0

    settings = msgspec.structs.replace(settings, model=plain)
    simulation = Simulation(trace, settings, with_jumps=False, pace=lambda now: pace(10 * now // PICOSECONDS))
    return rows_of(simulation.run().figures, sent.results)


def _of_real_plans(costs: MachineCosts, samples: list[MeasuredStep]) -> float:
    return sum(costs.step.seconds_of(sample) for sample in samples) / sum(sample.seconds for sample in samples)


def table(arguments: argparse.Namespace) -> None:
    print(
        "| setting | load | measure | predicted | seen, mean of the runs | lowest … highest | off by | goal | with the seen speed |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    num_met = num_driven = num_goals = 0
    for file in sorted(Path(arguments.output).glob("gpu-*.tar.gz")):
        shutil.unpack_archive(file, file.parent, filter="data")
    folders = [Path(arguments.output) / setting for setting in SETTINGS]
    folders += sorted(folder for folder in Path(arguments.output).glob("gpu-*") if folder.is_dir())
    found = {folder.name: predict(folder) for folder in folders if (folder / "seen.json").exists()}
    for setting, by_load in found.items():
        for load, result in by_load.items():
            for name, predicted, seen, driven in result["rows"]:
                goal = next((limit for word, limit in GOALS.items() if name.endswith((word, f"{word}, s"))), None)
                if goal is None or name.startswith(("end", "inter-token, mean")):
                    continue
                mean, planned = sum(seen) / len(seen), sum(predicted) / len(predicted)
                off = planned / mean - 1
                is_met = abs(off) <= goal or min(seen) <= planned <= max(seen)
                num_met, num_goals = num_met + is_met, num_goals + 1
                num_driven += abs(sum(driven) / sum(seen) - 1) <= goal
                unit, scale = ("", 1.0) if "tokens/s" in name else (" ms", 1e3)
                span = f"{min(seen) * scale:.1f} … {max(seen) * scale:.1f}{unit}"
                print(
                    f"| {setting} | {load} | {name.removesuffix(', s')} | {planned * scale:.1f}{unit} | {mean * scale:.1f}{unit} | {span} | "
                    f"{off:+.1%} | {'met' if is_met else f'missed ({goal:.0%})'} | {sum(driven) / sum(seen) - 1:+.1%} |"
                )
    print(f"\n{num_met} of {num_goals} goals are met; with the seen speed {num_driven}.\n")
    for setting, by_load in found.items():
        for load, result in by_load.items():
            shares = ", ".join(f"{share:.3f}" for share in result["steps"])
            shares += " (scaled by " + ", ".join(f"{factor:.2f}" for factor in result["factors"]) + ")"
            print(
                f"{setting}, {load}: steps by the model / seen, same plans: {shares}; failed: {result['failed']}; left out of the measuring: {result['disturbed']:.0%}"
            )
    across(Path(arguments.output))


OTHER_MODEL_GOAL = 0.12


def across(folder: Path) -> None:
    """Each model on a GPU by the steps of another one, whose costs predict() has written."""
    seen = {
        file.parent.name.removeprefix("gpu-"): msgspec.json.decode(file.read_bytes(), type=Seen)
        for file in sorted(folder.glob("gpu-*/seen.json"))
    }
    costs = {name: read_costs(folder / f"costs-{name}.json") for name in seen}
    for name, own in costs.items():
        for other in (each for each in costs.values() if each.shape != own.shape):
            step = other.step_of(own.shape, own.weights_bytes, own.shape.kv_numbers / other.shape.kv_numbers)
            settings = settings_of(msgspec.structs.replace(own, step=step, front=other.front), {})
            for load, trace in seen[name].traces.items():
                rows = [compare(trace, settings, each.results) for each in seen[name].sent if each.load == load]
                for measure, predicted, real, _ in _columns(rows, rows):
                    if not measure.endswith(("mean, s", "tokens/s")):
                        continue
                    off = statistics.fmean(predicted) / statistics.fmean(real) - 1
                    print(
                        f"{name} by the steps of {other.shape.name}, {load}: {measure}: predicted {statistics.fmean(predicted):.4g}, seen "
                        f"{statistics.fmean(real):.4g}, {off:+.1%}, {'met' if abs(off) <= OTHER_MODEL_GOAL else f'missed ({OTHER_MODEL_GOAL:.0%})'}"
                    )


def speed(arguments: argparse.Namespace) -> None:
    """Of a trace in Azure's conversation style, or of the file itself."""
    if arguments.trace:
        trace = read_trace(Path(arguments.trace)).limited(arguments.requests)
    else:
        trace = trace_of(Shape(10.0, arguments.requests / 10, Lengths(1150, 1.0), Lengths(210, 0.8)), seed=1)
    replica = ReplicaSettings(512, 8192, 30_000, 32_768, depth=1)
    before = time.process_time()
    figures = Simulation(trace, FleetSettings(8, replica, GPU)).run().figures
    seconds = time.process_time() - before
    print(
        f"{len(trace.requests)} requests, {figures.output_tokens} output tokens, {figures.num_steps} steps of which {figures.num_plans} were planned one by "
        f"one: {seconds:.2f} s of CPU time, {len(trace.requests) / seconds:,.0f} requests/s"
    )


GPU = StepModel([1, 128, 8192], [0.005, 0.006, 0.2], 2e-5, 3e-8, 1.7e-9)


def fleet(arguments: argparse.Namespace) -> None:
    """Many replicas under one router, one request a second each, of a bursty day; then samples of it."""
    shape = Shape(float(arguments.replicas), arguments.seconds, Lengths(400, 0.8), Lengths(150, 0.7), "bursty")
    trace = trace_of(shape, seed=3)
    replica = ReplicaSettings(64, 2048, 4000, 16_384, depth=1)
    whole: Figures | None = None
    for share in arguments.share or [1.0]:
        settings = FleetSettings(max(1, round(arguments.replicas * share)), replica, GPU)
        wall, before = time.time(), time.process_time()
        figures = Simulation(trace.thinned(share), settings).run().figures
        spent = time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"share {share:g}: {figures.num_replicas} replicas, {figures.num_requests} requests, {figures.num_steps} steps: {spent:.0f} s of CPU time "
            f"({time.time() - wall:.0f} s on the clock), {figures.num_requests / spent:,.0f} requests/s, {peak:.2f} GiB at most",
            flush=True,
        )
        whole = whole or figures
        for name in ("ttft", "itl", "tpot", "e2e"):
            own, all_of_it = getattr(figures, name), getattr(whole, name)
            print(
                f"    {name}: "
                + ", ".join(
                    f"{which} {getattr(own, which) * 1e3:.1f} ms ({getattr(own, which) / getattr(all_of_it, which) - 1:+.1%})"
                    for which in ("mean", "p50", "p99")
                ),
                flush=True,
            )


LIMITS = Levels({"ttft_p99": 1.0, "itl_p99": 0.15})


def limit(arguments: argparse.Namespace) -> None:
    """The highest rate that keeps the service levels: by a plan, and by bisection with real runs. Servers of one thread each."""
    base = trace_of(Shape(1.0, arguments.requests, Lengths(120, 0.7), Lengths(40, 0.6)), seed=21)
    one = [*NO_DRAFTS, "--cpu-threads", "1"]
    with tempfile.TemporaryDirectory(prefix="octavo-plan-check-") as recordings:
        server = StartedServer("", [*RECORDED, recordings, *one])
        try:
            measuring = calibrate(server, Path(recordings), arguments.measure_seconds)
            recording = recording_of(Path(recordings))
        finally:
            server.stop()
    costs = costs_of(recording, Measured(recording), [measuring], read_shape(""))
    settings = msgspec.structs.replace(settings_of(costs, {}), num_replicas=arguments.servers)

    def planned(rate: float) -> bool:
        return is_kept(simulate(base.scaled(rate), settings, levels=LIMITS), LIMITS)

    low, high = 0.1, 100.0
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if planned(middle) else (low, middle)
    predicted = low
    print(
        f"plan: {predicted:.2f} requests/s, front {costs.front.seconds * 1e3:.1f} ms, fit {costs.median_error:.1%}",
        flush=True,
    )
    server = StartedServer("", [*one, "--data-parallel-size", str(arguments.servers)])
    try:
        options = bench_options(server)
        with asyncio.Runner() as runner:
            model = runner.run(warm_up(options))
        low, high = predicted / 1.4, predicted * 1.4
        for number in range(arguments.rounds + 2):
            middle = math.sqrt(low * high)
            load = trace_workload(base.scaled(middle), options.vocab_size, seed=700 + number)
            results = clients.send_all(options, model, load, lambda count: None, 1).results
            ttft = percentile([result.ttft for result in results if result.ttft is not None], 99)
            itl = percentile([gap for result in results for gap in result.gaps], 99)
            kept = ttft <= LIMITS.limits["ttft_p99"] and itl <= LIMITS.limits["itl_p99"]
            kept = kept and not any(result.error for result in results)
            figures = simulate(base.scaled(middle), settings, levels=LIMITS)
            print(
                f"{middle:.2f} requests/s: seen ttft p99 {ttft:.3f} s, itl p99 {itl * 1e3:.1f} ms, {'kept' if kept else 'missed'}; planned "
                f"{figures.level('ttft_p99'):.3f} s, {figures.level('itl_p99') * 1e3:.1f} ms",
                flush=True,
            )
            low, high = (middle, high) if kept else (low, middle)
    finally:
        server.stop()
    seen = math.sqrt(low * high)
    print(
        f"{arguments.servers} servers: planned {predicted:.2f}, seen {low:.2f} … {high:.2f} requests/s: off by {predicted / seen - 1:+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "table", "speed", "fleet", "limit"))
    parser.add_argument("--model", default="")
    parser.add_argument(
        "--flag", action="append", default=[], help="a further flag of the server, as --flag=--cpu-threads=1"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure-seconds", type=float, default=15.0)
    parser.add_argument(
        "--gpu",
        default="",
        help="qwen3-0.6b, llama-3.1-8b or a folder: random weights, loads for a GPU, results in one file",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of a GPU's loads: a rehearsal")
    parser.add_argument("--setting", choices=SETTINGS, default="default")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--output", default="plan-check")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument(
        "--share", type=float, action="append", help="of the fleet that is simulated; several: compared with the first"
    )
    parser.add_argument("--seed", type=int, default=11, help="of the loads")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--trace", default="")
    parser.add_argument("--requests", type=int, default=4000)
    arguments = parser.parse_args()
    {"run": run, "table": table, "speed": speed, "fleet": fleet, "limit": limit}[arguments.what](arguments)


if __name__ == "__main__":
    main()
