"""octavo plan against real runs: three loads × three settings of the embedded model on this machine, predicted beside seen. The steps that the
model is fitted to (octavo plan --measure) are of other requests.

    octavo plan --measure costs.json
    python -m benchmarks.plan_check run --costs costs.json --setting default --output results
    python -m benchmarks.plan_check run --costs costs.json --setting few-rows --output results
    python -m benchmarks.plan_check run --costs costs.json --setting small-steps --output results
    python -m benchmarks.plan_check table --output results
    python -m benchmarks.plan_check speed

Every run takes about two minutes, on an otherwise idle machine. speed: simulated requests a second on one core, with eight replicas."""

import argparse
import asyncio
import json
import time
from pathlib import Path

import msgspec

from octavo.cli.bench import clients
from octavo.cli.bench.serve import warm_up
from octavo.cli.bench.workload import trace_workload
from octavo.cli.models import StartedServer
from octavo.cli.planning.check import compare
from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.fleet import Simulation
from octavo.plan.machine import MachineCosts, read_costs
from octavo.plan.settings import FleetSettings, ReplicaSettings
from octavo.plan.step_model import StepModel
from octavo.plan.trace import Trace
from octavo.plan.trace_files import read_trace

SETTINGS: dict[str, tuple[list[str], dict[str, int | float]]] = {
    "default": ([], {}),
    "few-rows": (["--max-num-seqs", "8"], {"max_num_seqs": 8}),
    "small-steps": (
        ["--max-num-batched-tokens", "128", "--max-inter-token-ms", "off"],
        {"max_num_batched_tokens": 128, "max_inter_token_ms": 0.0},
    ),
}
NO_DRAFTS = ["--speculative-config", '{"method": "none"}']
GOALS = {"mean": 0.05, "p99": 0.10, "tokens/s": 0.05}


def loads(seconds: float) -> dict[str, Trace]:
    shapes = {
        "chat": Shape(3.0, seconds, Lengths(150, 0.8), Lengths(60, 0.6)),
        "code": Shape(2.5, seconds, Lengths(400, 0.7), Lengths(12, 0.6)),
        "bursty, shared prefix": Shape(
            2.5, seconds, Lengths(64, 0.5), Lengths(40, 0.5), "bursty", shared_prefix=256, num_prefixes=3
        ),
    }
    return {name: trace_of(shape, seed=11) for name, shape in shapes.items()}


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


def run(arguments: argparse.Namespace) -> None:
    costs = read_costs(Path(arguments.costs))
    flags, changes = SETTINGS[arguments.setting]
    server = StartedServer("", [*NO_DRAFTS, *flags])
    results = {}
    try:
        options = argparse.Namespace(
            base_url=server.record.url, model=None, api_key=None, endpoint="completions", timeout=300.0, output_len=16, temperature=0.0,
            ignore_eos=True, num_warmups=3, prompt_kind="ids", input_len=64, vocab_size=30_000, seed=2, max_concurrency=None,
        )  # fmt: skip
        with asyncio.Runner() as runner:
            model = runner.run(warm_up(options))
        for at, (name, trace) in enumerate(loads(arguments.seconds).items()):
            load = trace_workload(trace, options.vocab_size, seed=100 + at)
            seen = clients.send_all(options, model, load, lambda count: None, 1).results
            failed = sum(bool(result.error) for result in seen)
            rows = compare(trace, settings_of(costs, changes), seen)
            results[name] = {"failed": failed, "rows": [[row.name, row.predicted, row.seen] for row in rows]}
    finally:
        server.stop()
    folder = Path(arguments.output)
    folder.mkdir(exist_ok=True)
    (folder / f"{arguments.setting}.json").write_text(json.dumps(results, indent=1))
    print(f"{arguments.setting}: {len(results)} loads")


def table(arguments: argparse.Namespace) -> None:
    print("| setting | load | measure | predicted | seen | off by | goal |")
    print("|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        path = Path(arguments.output) / f"{setting}.json"
        if not path.exists():
            continue
        for load, result in json.loads(path.read_text()).items():
            for name, predicted, seen in result["rows"]:
                goal = next((limit for word, limit in GOALS.items() if name.endswith((word, f"{word}, s"))), None)
                if goal is None or name.startswith(("end", "inter-token, mean")):
                    continue
                off = predicted / seen - 1
                shown = (
                    (f"{predicted:.1f}", f"{seen:.1f}")
                    if "tokens/s" in name
                    else (f"{predicted * 1e3:.1f} ms", f"{seen * 1e3:.1f} ms")
                )
                verdict = "met" if abs(off) <= goal else f"missed ({goal:.0%})"
                print(
                    f"| {setting} | {load} | {name.removesuffix(', s')} | {shown[0]} | {shown[1]} | {off:+.1%} | {verdict} |"
                )


def speed(arguments: argparse.Namespace) -> None:
    """Of a trace in Azure's conversation style, or of the file itself."""
    if arguments.trace:
        trace = read_trace(Path(arguments.trace)).limited(arguments.requests)
    else:
        trace = trace_of(Shape(10.0, arguments.requests / 10, Lengths(1150, 1.0), Lengths(210, 0.8)), seed=1)
    gpu = StepModel([1, 128, 8192], [0.005, 0.006, 0.2], 2e-5, 3e-8, 1.7e-9)
    replica = ReplicaSettings(512, 8192, 30_000, 32_768, depth=1)
    before = time.process_time()
    figures = Simulation(trace, FleetSettings(8, replica, gpu)).run().figures
    seconds = time.process_time() - before
    print(
        f"{len(trace.requests)} requests, {figures.output_tokens} output tokens, {figures.num_steps} steps of which {figures.num_plans} were planned one by "
        f"one: {seconds:.2f} s of CPU time, {len(trace.requests) / seconds:,.0f} requests/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "table", "speed"))
    parser.add_argument("--costs", default="costs.json")
    parser.add_argument("--setting", choices=SETTINGS, default="default")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--output", default="plan-check")
    parser.add_argument("--trace", default="")
    parser.add_argument("--requests", type=int, default=4000)
    arguments = parser.parse_args()
    {"run": run, "table": table, "speed": speed}[arguments.what](arguments)


if __name__ == "__main__":
    main()
