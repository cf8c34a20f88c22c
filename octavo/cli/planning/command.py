"""`octavo plan`: reads the flags, runs the simulation, and prints one page or JSON."""

import argparse
import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.cli.flags import config_from
from octavo.cli.planning.flags import read_levels
from octavo.cli.planning.page import drafts_in_words, page
from octavo.cli.planning.traces import anonymous_names, load_trace, recorded_trace
from octavo.config import AUTO, Config, or_else
from octavo.errors import ConfigError
from octavo.ipc.stderr import say
from octavo.plan.advise import advise
from octavo.plan.answer import Answer, answer
from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.chart import chart
from octavo.plan.chips import chip_of, estimate
from octavo.plan.figures import Levels
from octavo.plan.machine import MachineCosts, read_costs
from octavo.plan.model_shape import ModelShape, longest_of, read_shape
from octavo.plan.settings import FleetSettings, Front, ReplicaSettings
from octavo.plan.speed import Speed
from octavo.plan.trace import Trace
from octavo.plan.trace_files import write_trace
from octavo.recording.format import read

RECORD, ADVISE = "record", "advise"
EXIT_MISSED = 1
_MUCH = 0.05  # of the measured time
# What servers that are measured are given in another way; several of them are started one by one.
_NOT_MEASURED = ("config.positional_model", "config.model", "config.data_parallel_size")
_ESTIMATE_ERROR = 0.25  # of step times that were not measured
_LEAST_ERROR = 0.03
_KV_BYTES = {"fp8": 1.0, "int8": 1.06, "float16": 2.0, "float32": 4.0}


class Machine(NamedTuple):
    """Where the load runs, and how that is known."""

    settings: FleetSettings
    error: float
    source: str  # in words
    is_estimate: bool
    weights_bytes: int
    kv_bytes: int  # of the KV store of a replica, on each of its chips
    chips: int  # of a replica
    name: str
    speed: Speed | None = None  # while this model was measured there, on a server by itself


def run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments, {})
    if config.model.model == RECORD:
        return _record(arguments)
    if config.model.model == ADVISE:
        return _advise(arguments)
    if arguments.recording:
        raise ConfigError(f"unexpected argument {arguments.recording!r}: octavo plan takes one MODEL")
    if arguments.measure:
        return _measure(arguments, config)
    levels = Levels(read_levels(arguments.slo))
    trace = _trace(arguments, config).thinned(arguments.sample)
    if not trace.requests:
        raise ConfigError(f"--sample {arguments.sample:g}: no request is left; take a larger share")
    shape = read_shape(config.model.model)
    machine = _with_drafts(_machine(arguments, config, shape), arguments)
    if arguments.check:
        from octavo.cli.planning.check import check

        return check(arguments, trace, machine.settings, machine.speed)
    fleet = config.fleet
    replicas = fleet.data_parallel_size if fleet.data_parallel_size > 1 or fleet.max_replicas else 0
    found = answer(
        trace,
        machine.settings,
        levels,
        replicas=max(1, round(replicas * arguments.sample)) if replicas else 0,
        error=machine.error,
        price=arguments.price,
        searches=arguments.search,
        fails_at=arguments.fail_at,
        ranks=machine.chips,
        other_ranks=_other_ranks(arguments, config, shape) if arguments.search else None,
        note=_progress,
    )
    _progress("")
    if arguments.sample < 1:
        found = msgspec.structs.replace(found, replicas=replicas or math.ceil(found.replicas / arguments.sample))
        trace = msgspec.structs.replace(
            trace, name=f"{trace.name}, a sample of {arguments.sample:.3g} on as many of the replicas"
        )
    if arguments.chart:
        _write(arguments.chart, chart(found.loads, levels, f"{shape.name}, {found.replicas} × {machine.name}"))
    if arguments.json:
        print(msgspec.json.encode(_as_json(found, machine, trace, levels, shape)).decode())
    else:
        print(
            page(
                found,
                machine.source,
                trace,
                levels,
                shape,
                machine.weights_bytes,
                machine.kv_bytes,
                machine.name,
                drafts_in_words(machine.settings.model),
            )
        )
    return 0 if found.keeps_levels else EXIT_MISSED


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _as_json(found: Answer, machine: Machine, trace: Trace, levels: Levels, shape: ModelShape) -> dict[str, Any]:
    return {
        "model": shape.name,
        "machine": machine.name,
        "step_times": "estimated" if machine.is_estimate else "measured",
        "step_times_from": machine.source,
        "drafts": drafts_in_words(machine.settings.model),
        "levels_seconds": levels.limits,
        "trace": {"name": trace.name, "requests": len(trace.requests), "seconds": trace.seconds, "rate": trace.rate},
        "flags": found.flags,
        "weights_bytes": machine.weights_bytes,
        "kv_bytes": machine.kv_bytes,
        "chips_per_replica": machine.chips,
        "answer": found,
    }


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


# ── the load ────────────────────────────────────────────────────────────────────────────────────────


def _trace(arguments: argparse.Namespace, config: Config) -> Trace:
    if (arguments.trace is None) == (arguments.rate is None):
        raise ConfigError("give the load once: --trace FILE, or --rate X with --input-len and --output-len")
    if arguments.trace is not None:
        trace = load_trace(arguments.trace).scaled(arguments.scale_rate, arguments.scale_length)
        return trace.limited(arguments.requests, arguments.seconds)
    spread = arguments.length_spread
    if not 0 <= spread <= 3:
        raise ConfigError(f"--length-spread must be from 0 to 3, got {spread:g}")
    for name in ("input_len", "output_len", "num_prefixes", "turns"):
        if not 1 <= getattr(arguments, name) <= 1_000_000:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 1 to 1000000, got {getattr(arguments, name)}")
    if not 0 <= arguments.shared_prefix <= 1_000_000:
        raise ConfigError(f"--shared-prefix must be from 0 to 1000000, got {arguments.shared_prefix}")
    shape = Shape(
        arguments.rate * arguments.scale_rate, arguments.seconds, Lengths(arguments.input_len, spread), Lengths(arguments.output_len, spread),
        arguments.arrivals, arguments.shared_prefix, arguments.num_prefixes, arguments.turns,
    )  # fmt: skip
    return trace_of(shape, config.model.seed).limited(arguments.requests)


def _record(arguments: argparse.Namespace) -> int:
    if not arguments.recording or not arguments.output:
        raise ConfigError("give the recording and the trace to write: octavo plan record RECORDING --output FILE")
    trace = recorded_trace(Path(arguments.recording))
    if not trace.requests:
        raise ConfigError(f"{arguments.recording} has no request that generates tokens")
    write_trace(Path(arguments.output), trace)
    say(f"{len(trace.requests)} requests written to {arguments.output}: times, lengths and equal prefixes, no text")
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    if not arguments.recording:
        raise ConfigError("give the recording: octavo plan advise RECORDING")
    hint = advise(read(Path(arguments.recording)), anonymous_names())
    if arguments.json:
        print(msgspec.json.encode(hint).decode())
    else:
        print(hint.text or "the recording has too few requests, or steps of one size: nothing can be said")
    return 0


# ── the machine ─────────────────────────────────────────────────────────────────────────────────────


def _measure(arguments: argparse.Namespace, config: Config) -> int:
    from octavo.cli.planning.measure import measure

    folder = Path(arguments.measure).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--measure {arguments.measure}: the folder {folder} does not exist")
    servers = config.fleet.data_parallel_size
    costs = measure(
        config.model.model, _serve_flags(arguments), Path(arguments.measure), arguments.measure_seconds, servers
    )
    step, front = costs.step, costs.front
    print(f"{costs.shape.name} on {costs.machine}" + (f", {servers} servers at once" if servers > 1 else ""))
    print(
        f"{costs.num_steps} steps measured, each off by {costs.noise:.1%} (median); means of alike ones by {costs.median_error:.1%}, one in ten by {costs.p90_error:.1%} or more"
    )
    if costs.disturbed >= _MUCH:
        print(
            f"others used the machine: steps took much longer than alike ones for {costs.disturbed:.0%} of the time, which is left out; measure again "
            "when it is idle"
        )
    for tokens, seconds in zip(step.tokens, step.seconds, strict=True):
        print(f"{tokens:>8} tokens in a step {seconds * 1e3:>10.2f} ms")
    print(
        f"{step.wake * 1e3:.2f} ms to wake up an idle engine, {step.first * 1e3:.2f} ms more for a step after a first token"
    )
    print(
        f"{step.row * 1e3:.4f} ms a row, {step.context * 1e6:.3f} ms for 1,000 tokens of context; outside the engine {front.seconds * 1e3:.1f} ms on the way in, "
        f"{front.first_seconds * 1e3:.1f} ms back for the first token, {front.last_seconds * 1e3:.1f} ms for the last"
    )
    print(f"written to {arguments.measure}")
    return 0


def _serve_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of the model and its engine that were given, for a server."""
    flags = []
    for name, value in vars(arguments).items():
        if name.startswith("config.") and name not in _NOT_MEASURED:
            flag = "--" + name.removeprefix("config.").replace("_", "-").replace("page-size", "block-size")
            flags += [flag if value else "--no-" + flag[2:]] if isinstance(value, bool) else [flag, str(value)]
    return flags


def _machine(arguments: argparse.Namespace, config: Config, shape: ModelShape) -> Machine:
    if (arguments.costs is None) == (arguments.chip is None):
        raise ConfigError("say where it runs: --costs FILE of octavo plan --measure, or --chip NAME for an estimate")
    if arguments.chip is not None:
        return _estimated(arguments, config, shape)
    return _measured(arguments, config, shape, read_costs(Path(arguments.costs)))


def _measured(arguments: argparse.Namespace, config: Config, shape: ModelShape, costs: MachineCosts) -> Machine:
    is_same = shape == costs.shape
    weights = (
        costs.weights_bytes
        if is_same
        else shape.held_bytes(config.model.quantization, config.model.dtype, costs.is_cpu)
    )
    ratio = shape.kv_numbers / costs.shape.kv_numbers
    page_size = config.cache.page_size
    page_bytes = max(1, round(costs.page_bytes * ratio * page_size / costs.page_size))
    store = costs.num_pages * costs.page_bytes + (0 if is_same else costs.weights_bytes - weights)
    wanted = config.cache.kv_cache_memory_bytes
    num_pages = (wanted if isinstance(wanted, int) else store) // page_bytes
    if num_pages < 2:
        raise ConfigError(f"the model does not fit: no KV page is left beside its weights on {costs.machine}")
    replica = _replica(
        config, shape, num_pages, costs.is_cpu, costs.depth, costs.max_num_seqs, costs.max_num_batched_tokens
    )
    replica = msgspec.structs.replace(replica, overlap_rows=costs.overlap_rows)
    error = max(_LEAST_ERROR, costs.p90_error) if is_same else max(0.12, costs.p90_error)
    kind = "measured" if is_same else f"measured with {costs.shape.name} and scaled to this model"
    if costs.num_servers > 1:
        kind += f" with {costs.num_servers} servers at once"
    source = f"{kind} on {costs.machine}, {costs.made} (octavo {costs.version}): {costs.num_steps} steps, fit off by {costs.median_error:.1%} in the median"
    start = arguments.start_seconds if arguments.start_seconds is not None else costs.start_seconds
    settings = _fleet(config, replica, costs.step_of(shape, weights, ratio), costs.front, start)
    speed = costs.speed if is_same and costs.num_servers == 1 else None
    name = costs.machine.split(":")[0]
    return Machine(settings, error, source, False, weights, num_pages * page_bytes, 1, name, speed)


def _estimated(arguments: argparse.Namespace, config: Config, shape: ModelShape) -> Machine:
    chip = chip_of(arguments.chip)
    ranks = config.parallel.num_ranks
    shape.check_ranks(config.parallel.tensor_parallel_size)
    weights = shape.held_bytes(config.model.quantization, config.model.dtype, chip.is_cpu)
    kind = config.cache.kv_cache_dtype
    kv_bytes = _KV_BYTES.get(kind, 2.0)
    found = estimate(
        chip, shape, weights_bytes=weights, kv_bytes=kv_bytes, page_size=config.cache.page_size, ranks=ranks,
        utilization=config.cache.gpu_memory_utilization, is_8bit=config.model.quantization == "fp8",
    )  # fmt: skip
    num_pages, wanted = found.num_pages, config.cache.kv_cache_memory_bytes
    if isinstance(wanted, int):
        num_pages = min(num_pages, wanted // ranks // found.page_bytes)
    depth = 0 if chip.is_cpu else 1
    replica = _replica(config, shape, num_pages, chip.is_cpu, depth, 0, 0)
    start = arguments.start_seconds if arguments.start_seconds is not None else 60.0
    settings = _fleet(config, replica, found.model, Front(0.003, 2e-6), start)
    name = f"{ranks} {chip.name}" if ranks > 1 else chip.name
    return Machine(
        settings, _ESTIMATE_ERROR, found.note, True, found.weights_bytes, num_pages * found.page_bytes, ranks, name
    )


def _other_ranks(arguments: argparse.Namespace, config: Config, shape: ModelShape) -> dict[int, FleetSettings]:
    """Replicas of other numbers of chips, as far as the model can be divided and fits. Empty for a measured machine: one number was measured."""
    found: dict[int, FleetSettings] = {}
    if arguments.chip is None or chip_of(arguments.chip).is_cpu or config.parallel.pipeline_parallel_size > 1:
        return found
    for ranks in (1, 2, 4, 8):
        if ranks != config.parallel.num_ranks:
            parallel = dataclasses.replace(config.parallel, tensor_parallel_size=ranks)
            with contextlib.suppress(ConfigError):
                found[ranks] = _estimated(arguments, dataclasses.replace(config, parallel=parallel), shape).settings
    return found


def _with_drafts(machine: Machine, arguments: argparse.Namespace) -> Machine:
    drafted, acceptance = arguments.draft_tokens, arguments.acceptance
    if not 0 <= drafted <= 64:
        raise ConfigError(f"--draft-tokens must be from 0 to 64, got {drafted}")
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"--acceptance must be from 0 to 1, got {acceptance:g}")
    if not drafted:
        return machine
    model = msgspec.structs.replace(machine.settings.model, draft_tokens=drafted, acceptance=acceptance)
    return machine._replace(settings=msgspec.structs.replace(machine.settings, model=model))


def _replica(
    config: Config, shape: ModelShape, num_pages: int, is_cpu: bool, depth: int, rows: int, tokens: int
) -> ReplicaSettings:
    scheduler, wanted = config.scheduler, config.model.max_model_len
    rows = or_else(scheduler.max_num_seqs, rows or (64 if is_cpu else 512))
    page_size = config.cache.page_size
    useful = rows * -(-shape.context_len // page_size)
    num_pages = min(num_pages, useful)
    longest = longest_of(shape, num_pages, page_size)
    if isinstance(wanted, int) and wanted > longest:
        raise ConfigError(f"--max-model-len {wanted} does not fit: the model and its KV pages allow {longest} tokens")
    limit = scheduler.max_inter_token_ms
    return ReplicaSettings(
        max_num_seqs=rows,
        max_num_batched_tokens=or_else(
            scheduler.max_num_batched_tokens, max(rows, tokens or (512 if is_cpu else 8192))
        ),
        num_pages=num_pages,
        max_model_len=or_else(wanted, longest),
        page_size=page_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        prefix_eviction=config.cache.prefix_eviction,
        scheduling_policy=scheduler.scheduling_policy,
        max_inter_token_ms=limit if limit == AUTO or not isinstance(limit, str) else 0.0,
        max_waiting_requests=scheduler.max_waiting_requests,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        depth=depth,
    )


def _fleet(config: Config, replica: ReplicaSettings, model: Any, front: Front, start: float) -> FleetSettings:
    fleet = config.fleet
    return FleetSettings(
        num_replicas=fleet.first_replicas,
        replica=replica,
        model=model,
        front=front,
        routing_policy=fleet.routing_policy,
        saturation_seconds=fleet.saturation_seconds,
        start_seconds=start,
        min_replicas=fleet.min_replicas,
        max_replicas=fleet.max_replicas,
    )
