"""The loads and settings that predictions are compared for."""

import argparse
from typing import NamedTuple

import msgspec

from benchmarks.gpu import workloads
from benchmarks.gpu.subject import MODELS
from octavo.cli.models import StartedServer
from octavo.cli.planning.check import EVERY_TOKEN
from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.machine import MachineCosts
from octavo.plan.settings import FleetSettings
from octavo.plan.trace import Trace, TraceRequest

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
    settings = costs.settings
    return msgspec.structs.replace(settings, replica=msgspec.structs.replace(settings.replica, **changes))


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
