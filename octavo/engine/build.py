"""Builds an engine: the executor by name, cache and scheduler from the integers that it reports, and the observers of its steps.
An executor's module, and with it torch, is imported only when it is chosen."""

import importlib
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.admission.queue_limit import QueueLimit
from octavo.cache import KVCache
from octavo.cache.page_keys import fleet_root
from octavo.config import Config, KVTiers, read_tiers
from octavo.engine.adapter_traffic import AdapterTraffic
from octavo.engine.control import EngineControl
from octavo.engine.cost_meter import CostMeter
from octavo.engine.idle_memory import IdleMemory
from octavo.engine.live_view import LiveView
from octavo.engine.loop import EngineLoop
from octavo.engine.pin_files import PinFiles
from octavo.engine.prefix_holds import PrefixHolds
from octavo.engine.step_heartbeat import StepHeartbeat
from octavo.engine.tier_traffic import TierTraffic
from octavo.errors import ConfigError
from octavo.executor.base import AdapterLoader, Executor
from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.launch import FleetMember, PlacedRanks
from octavo.kv_tier.folder import folder_secret
from octavo.messages import AdapterRef, EngineReport
from octavo.messages.speculation import speculation_of
from octavo.observe.history import History
from octavo.observe.journeys.journal import EngineJournal
from octavo.observe.journeys.journey import MAX_RING_BYTES, JourneyRing
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.observe.replica_feed import ReplicaFeed
from octavo.observe.step_observer import Observers, StepObserver
from octavo.schedule import POLICIES, Fairness, Scheduler
from octavo.schedule.drafts.lengths import speculation
from octavo.schedule.stall_limit import StallLimit
from octavo.weights.sources.source import ModelSource

EXECUTORS = {"local": "octavo.executor.local:LocalExecutor", "processes": "octavo.executor.processes:ProcessExecutor"}
RANK_LAUNCHER = "octavo.executor.placed:PlacedLauncher"


class Engine(NamedTuple):
    loop: EngineLoop
    report: EngineReport
    control: EngineControl


def start_engine(
    config: Config,
    source: ModelSource,
    model_name: str,
    heartbeat: Heartbeat | None = None,
    queue_limit: QueueLimit | None = None,
    history: History | None = None,
    member: FleetMember | None = None,
    epoch: int = 0,
    ranks: PlacedRanks | None = None,
    pin_files: PinFiles | None = None,
) -> Engine:
    """Load the model and be ready to step. Raises ConfigError for what a person must change. `member`: its place in a fleet, of which it
    is engine number `epoch`; None: it is alone. `ranks`: where they are, if that is not this machine's to decide. `pin_files`: of pinned prefixes
    that this engine takes over; None: there are none."""
    executor = load_executor(config, source) if ranks is None else load_executor(config, source, ranks)
    try:
        policy = config.scheduler.scheduling_policy
        report = msgspec.structs.replace(
            executor.start(),
            scheduling_policy=policy,
            max_inter_token_ms=config.scheduler.max_inter_token_ms,
            is_fair=config.scheduler.fairness != "none",
            prefix_eviction=config.cache.prefix_eviction,
        )
        is_exact = report.fingerprint.get("deterministic") != "no"
        settings = speculation_of(config.scheduler.speculative_config, report.memory is not None, is_exact)
        if settings is not None and report.draft_len:
            method = report.draft_method or settings.method
            settings = msgspec.structs.replace(settings, method=method, max_len=report.draft_len)
        report = msgspec.structs.replace(
            report, speculation=settings if report.can_generate and report.num_stages == 1 else None
        )
    except BaseException:
        executor.close()
        raise
    tiers = read_tiers(config.cache.kv_tier)
    try:
        root = tier_root = _tier_root(tiers, report) if tiers else os.urandom(16)
    except BaseException:
        executor.close()
        raise
    if member is not None:
        report = msgspec.structs.replace(report, replica=member.replica, epoch=epoch)
        root = fleet_root(member.secret, report.system_fingerprint)
    cache = KVCache(
        report.num_pages,
        report.page_size,
        report.num_host_pages,
        config.cache.enable_prefix_caching,
        report.num_warm_pages,
        report.windows,
        report.max_num_batched_tokens,
        root,
        report.prefix_eviction,
    )
    # Below one page a copy saves nothing worth its bookkeeping.
    scheduler = Scheduler(
        cache,
        report.max_num_seqs,
        report.max_num_batched_tokens,
        swap_min_tokens=report.page_size,
        policy=POLICIES[policy],
        stall_limit=StallLimit.of(report.max_inter_token_ms),
        speculation=speculation(report.speculation),
        num_stages=report.num_stages,
        fairness=Fairness(report.max_num_seqs, report.max_num_batched_tokens) if report.is_fair else None,
        max_grammar_bytes=int(config.budget.compiled_grammar_bytes),
    )
    metrics = EngineMetrics(model_name, report)
    max_ring_bytes = int(config.server.journey_bytes)
    engine = build_engine(
        scheduler,
        executor,
        metrics,
        heartbeat=heartbeat,
        queue_limit=queue_limit,
        max_ring_bytes=max_ring_bytes,
        history=history,
        idle_memory=None if report.num_warm_pages is None else IdleMemory(cache.pool, report.page_bytes),
        pin_files=pin_files,
    )
    if report.adapter_bytes:
        _open_adapters(config, engine, executor)
    if tiers:
        _open_tiers(tiers, tier_root, engine, executor)
    if member is not None:
        feed_routers(engine)
    return engine


def _tier_root(tiers: KVTiers, report: EngineReport) -> bytes:
    """The root of page keys; all engines with one folder and equal pages share it. Raises ConfigError where pages cannot be stored."""
    if report.windows != (0,) or not report.num_pages:
        raise ConfigError(
            "--kv-tier does not store pages of this model (it has sliding windows, or none): leave it out"
        )
    if tiers.disk is None:
        return os.urandom(16)
    pages = (report.system_fingerprint, report.page_size, report.page_bytes, report.kv_dtype, report.dtype)
    return fleet_root(folder_secret(Path(tiers.disk.folder)), repr(pages))


def _open_tiers(tiers: KVTiers, root: bytes, engine: Engine, executor: Executor) -> None:
    """`root`: _tier_root(). In a fleet keys have another, but pages of one shape are still in one folder."""
    loop, clock = engine.loop, time.monotonic
    layout = blake2b(root, digest_size=16, person=b"octavo layout").hexdigest()
    try:
        mover = executor.open_tier(tiers, layout)
    except BaseException:
        executor.close()
        raise
    traffic = TierTraffic(loop.scheduler, mover, loop.observers, clock)
    loop.open_tier(traffic)
    engine.control.live_view.tier_state = traffic.state
    page_size, notes = engine.report.page_size, engine.report.notes
    if mover.num_ram_pages:
        notes.append(
            f"prefixes that leave the GPU are kept in {tiers.ram_bytes / 2**30:.1f} GiB of pinned memory, which holds "
            f"{mover.num_ram_pages * page_size:,} tokens"
        )
    if tiers.disk is not None:
        known = traffic.stats.num_keys * page_size
        notes.append(f"prefixes are kept in {tiers.disk.folder} as well, which holds {known:,} tokens for this model")


def _open_adapters(config: Config, engine: Engine, executor: Executor) -> None:
    """Serve requests with adapters. Checks those of --lora-modules against the model: raises ConfigError."""
    assert isinstance(executor, AdapterLoader)
    lora, report = config.lora, engine.report
    loop = engine.loop
    traffic = AdapterTraffic(
        loop.scheduler,
        executor,
        report.adapter_bytes,
        time.monotonic,
        lora.max_loras,
        lora.max_cpu_loras,
        executor.adapter_itemsize(),
    )
    try:
        sizes = [
            executor.check_adapter(AdapterRef(name, path, "", lora.max_lora_rank))
            for name, path in lora.modules.items()
        ]
    except BaseException:
        executor.close()
        raise
    loop.open_adapters(traffic)
    report.notes.append(_about_adapters(report.adapter_bytes, sizes))


def _about_adapters(budget: int, sizes: list[int]) -> str:
    """How many of the adapters fit into memory."""
    said = f"adapters may take {budget / 2**20:,.0f} MiB"
    if not sizes:
        return said
    total, mean = sum(sizes), sum(sizes) / len(sizes)
    fits = (
        "all fit"
        if total <= budget
        else f"about {int(budget // mean)} fit at a time, and the others are read when they are needed"
    )
    return f"{said}; {len(sizes)} are registered, of {mean / 2**20:,.1f} MiB on average: {fits}"


def feed_routers(engine: Engine) -> None:
    """Have the engine's driver send routers which pages it holds and how much work waits."""
    feed = ReplicaFeed(engine.loop.scheduler, engine.report.replica, engine.report.epoch)
    engine.loop.observers.add(feed)
    engine.control.feed = feed


def build_engine(
    scheduler: Scheduler,
    executor: Executor,
    metrics: EngineMetrics,
    clock: Callable[[], float] = time.monotonic,
    heartbeat: Heartbeat | None = None,
    queue_limit: QueueLimit | None = None,
    max_ring_bytes: int = MAX_RING_BYTES,
    history: History | None = None,
    idle_memory: IdleMemory | None = None,
    pin_files: PinFiles | None = None,
) -> Engine:
    """Put an engine together around an executor that has started. `heartbeat`: None: nothing outside this process reads it.
    `queue_limit`: None: any number of requests may wait. `history`: None: it ends with this engine. `idle_memory`: None: idle prefixes
    keep their memory. `pin_files`: None: pins end with this engine."""
    heartbeat = Heartbeat() if heartbeat is None else heartbeat
    queue_limit = QueueLimit() if queue_limit is None else queue_limit
    history = History() if history is None else history
    history.start(clock())
    report = metrics.report
    journal, live_view = EngineJournal(), LiveView(scheduler, metrics, history)
    cost_meter = CostMeter(
        report.one_row_seconds, report.verify_seconds, report.draft_seconds, report.device.startswith("cpu")
    )
    # Everything that hears of every step, in this order. A recorder is added later (EngineLoop.record).
    observers: list[StepObserver] = [
        queue_limit,
        StepHeartbeat(heartbeat, scheduler, queue_limit),
        metrics,
        journal,
        live_view,
        cost_meter,
    ]
    hearing = Observers(observers, clock)
    holds = PrefixHolds(scheduler.cache, hearing, metrics.report.page_bytes, clock, pin_files)
    holds.restore()
    loop = EngineLoop(scheduler, executor, hearing, cost_meter, idle_memory, holds)
    ring = JourneyRing(max_ring_bytes)
    control = EngineControl(loop, metrics, journal, live_view, queue_limit, heartbeat, ring, clock)
    return Engine(loop, metrics.report, control)


def load_executor(config: Config, source: ModelSource, ranks: PlacedRanks | None = None) -> Executor:
    # Compute threads that spin without end while they wait starve each other when another program's threads do the same.
    # A bounded spin keeps a quiet machine fast and a crowded one alive; benchmarks/cpu.md has what each bound costs.
    # Read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if config.parallel.uses_ray:  # those that Ray places are started without it
        raise ConfigError("--distributed-executor-backend ray is for octavo serve: leave it out here")
    name = "local" if config.parallel.num_ranks == 1 else "processes"
    options = {}
    if ranks is not None:
        options["launcher"] = _by_name(RANK_LAUNCHER)(ranks)
    executor: Executor = _by_name(EXECUTORS[name])(config, source, **options)
    return executor


def _by_name(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
