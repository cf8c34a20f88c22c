"""Builds an engine: executor by name, cache and scheduler from the integers the executor reports.
Knows nothing of torch: the executor's module is imported only when it is chosen."""

import importlib
import os
from typing import NamedTuple

import msgspec

from octavo.admission.queue_limit import QueueLimit
from octavo.cache import KVCache
from octavo.config import Config
from octavo.engine.loop import EngineLoop
from octavo.executor.base import Executor
from octavo.ipc.heartbeat import Heartbeat
from octavo.messages import EngineReport
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import POLICIES, Scheduler
from octavo.weights.sources.source import ModelSource

EXECUTORS = {"local": "octavo.executor.local:LocalExecutor", "processes": "octavo.executor.processes:ProcessExecutor"}


class Engine(NamedTuple):
    loop: EngineLoop
    report: EngineReport


def start_engine(
    config: Config,
    source: ModelSource,
    model_name: str,
    heartbeat: Heartbeat | None = None,
    queue_limit: QueueLimit | None = None,
) -> Engine:
    """Load the model and be ready to step. Raises ConfigError for what a person must change."""
    executor = load_executor(config, source)
    try:
        policy = config.scheduler.scheduling_policy
        report = msgspec.structs.replace(executor.start(), scheduling_policy=policy)
    except BaseException:
        executor.close()
        raise
    cache = KVCache(
        report.num_pages,
        report.page_size,
        report.num_host_pages,
        config.cache.enable_prefix_caching,
        report.num_warm_pages,
        report.windows,
        report.max_num_batched_tokens,
        os.urandom(16),
    )
    # Below one page a copy saves nothing worth its bookkeeping.
    scheduler = Scheduler(
        cache,
        report.max_num_seqs,
        report.max_num_batched_tokens,
        swap_min_tokens=report.page_size,
        policy=POLICIES[policy],
    )
    metrics = EngineMetrics(model_name, report)
    max_ring_bytes = int(config.server.journey_bytes)
    loop = EngineLoop(
        scheduler, executor, metrics, heartbeat=heartbeat, queue_limit=queue_limit, max_ring_bytes=max_ring_bytes
    )
    return Engine(loop, report)


def load_executor(config: Config, source: ModelSource) -> Executor:
    # Compute threads that spin without end while they wait starve each other when another program's threads do the same.
    # A bounded spin keeps a quiet machine fast and a crowded one alive; benchmarks/cpu.md has what each bound costs.
    # Read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    name = "local" if config.parallel.tensor_parallel_size == 1 else "processes"
    module, _, attribute = EXECUTORS[name].partition(":")
    executor: Executor = getattr(importlib.import_module(module), attribute)(config, source)
    return executor
