"""Gauges: the state of the engine at the moment of a scrape, as metrics: running, waiting, pages and waste, refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from octavo.messages import EngineReport
from octavo.observe.metrics.exposition import Scrape

BLOCKED = ("rows", "pages", "budget", "streams")
"""What the first request of the queue may lack."""
PageState = Literal["used", "cached", "free"]


@dataclass(frozen=True, slots=True)
class TierState:
    """KV tiers. Counts are since the start."""

    num_bytes: int = 0  # in the folder of the disk
    num_pages: int = 0  # of this model, there
    loads: int = 0
    loaded_pages: int = 0
    missed_pages: int = 0
    load_seconds: float = 0.0
    saved_seconds: float = 0.0
    stored_pages: int = 0
    store_seconds: float = 0.0
    passed: Mapping[str, int] = field(default_factory=dict)  # requests that did not wait for their pages, by reason
    files: Mapping[str, int] = field(default_factory=dict)  # files that are gone or were not written, by reason
    ram_bytes: int = 0  # in the memory of the host
    num_ram_pages: int = 0
    ram_loaded_pages: int = 0  # of loaded_pages
    ram_stored_pages: int = 0  # of stored_pages


@dataclass(frozen=True, slots=True)
class HoldState:
    """Prefixes whose pages are evicted last, by why: session (a conversation that may go on), pin (POST /v1/prefix)."""

    num_holds: Mapping[str, int] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(
        default_factory=dict
    )  # of their pages, in memory or not; one of two holds counts twice
    num_dropped: int = 0  # since the start


@dataclass(frozen=True, slots=True)
class AdapterState:
    """Adapters (--enable-lora). Counts are since the start."""

    running: tuple[str, ...]  # names of those that requests with a row have
    waiting: tuple[str, ...]  # names of those that requests without one have: they wait for the adapter, or for a row
    max_used: int  # --max-loras
    num_loaded: int
    num_bytes: int
    budget: int
    loads: int
    load_seconds: float
    waits: int  # requests that waited for one, however shortly
    wait_seconds: float
    dropped: int  # to make room
    failures: int  # loads that failed


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine at the moment of a scrape. Pages are device pages; a cached one is free to take and still useful."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)
    num_used_pages: int = 0
    num_cached_pages: int = 0
    num_free_pages: int = 0
    num_touched_pages: int = 0  # those that ever held anything
    num_filled_slots: int = 0  # slots of used pages that hold a token; a page shared by two requests counts once
    num_host_pages_used: int = 0
    audits: Mapping[str, int] = field(default_factory=dict)  # since the start, by result
    restarts: Mapping[tuple[str, str], int] = field(
        default_factory=dict
    )  # since the server's start, by process and cause
    refusals: Mapping[tuple[str, str], int] = field(
        default_factory=dict
    )  # since the server's start, by kind and reason
    rejections: Mapping[str, int] = field(default_factory=dict)  # since the start, by reason
    blocked_seconds: Mapping[str, float] = field(default_factory=dict)  # of the queue's head since the start, by reason
    tier: TierState = TierState()  # all 0: there is none
    adapters: AdapterState | None = None  # None: none are served
    holds: HoldState = HoldState()


def write_gauges(scrape: Scrape, report: EngineReport, state: EngineState) -> None:
    pages = state.num_used_pages + state.num_cached_pages + state.num_free_pages
    use = state.num_used_pages / pages if pages else 0.0
    slots = state.num_used_pages * report.page_size
    states: dict[PageState, int] = {
        "used": state.num_used_pages,
        "cached": state.num_cached_pages,
        "free": state.num_free_pages,
    }
    taken = state.num_touched_pages if report.memory is None else pages
    deferred = state.waiting_by_reason.get("grammar", 0)
    config = {
        "block_size": str(report.page_size),
        "num_gpu_blocks": str(report.num_pages),
        "num_cpu_blocks": str(report.num_host_pages),
        "cache_dtype": report.kv_dtype or report.dtype,
    }
    for name, help, samples in (
        ("vllm:num_requests_running", "Requests that hold a row.", [({}, state.num_running)]),
        ("vllm:num_requests_waiting", "Requests in the queue.", [({}, state.num_waiting)]),
        (
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue that wait for room (capacity) or for their grammar (deferred).",
            [({"reason": "capacity"}, state.num_waiting - deferred), ({"reason": "deferred"}, deferred)],
        ),
        ("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", [({}, use)]),
        # The name that vLLM gave it before; boards and autoscalers still ask for it.
        ("vllm:gpu_cache_usage_perc", "Share of KV pages in use, 0 to 1.", [({}, use)]),
        ("vllm:cache_config_info", "Layout of the KV cache, as labels; always 1.", [(config, 1)]),
        ("octavo:kv_pages", "KV pages by state.", [({"state": key}, value) for key, value in states.items()]),
        (
            "octavo:kv_slot_use_ratio",
            "Share of the slots of used KV pages that hold a token; the rest is waste. 1 when no page is in use.",
            [({}, state.num_filled_slots / slots if slots else 1.0)],
        ),
        (
            "octavo:memory_bytes",
            "Memory in use by kind. On a CPU a KV page takes none before it is first used.",
            [({"kind": "weights"}, report.weights_bytes), ({"kind": "pages"}, taken * report.page_bytes)],
        ),
        ("octavo:host_pages_used", "Pages of the swap space in use.", [({}, state.num_host_pages_used)]),
        (
            "octavo:waiting_by_reason",
            "Requests in the queue by what they wait for.",
            [({"reason": key}, value) for key, value in state.waiting_by_reason.items()],
        ),
    ):
        scrape.gauge(name, help, samples)
    scrape.counter(
        "octavo:queue_blocked_seconds",
        "Time for which the first request of the queue could not be admitted, by what it lacked.",
        [({"reason": reason}, state.blocked_seconds.get(reason, 0.0)) for reason in BLOCKED],
    )
    scrape.counter(
        "octavo:page_audits",
        "Audits of the KV pages while the engine was idle, by result.",
        [({"found": found}, count) for found, count in state.audits.items()],
    )
    scrape.counter(
        "octavo:restarts",
        "Restarts of processes, by process and cause.",
        [({"process": process, "cause": cause}, count) for (process, cause), count in state.restarts.items()],
    )
    for kind, help in (
        (
            "malformed",
            "Requests that were refused because they are not HTTP (syntax) or exceed --max-head-bytes (head).",
        ),
        (
            "forbidden",
            "Requests that were refused because of their Host, Origin or, if a browser sent them, content type.",
        ),
    ):
        counts = [({"reason": reason}, count) for (each, reason), count in state.refusals.items() if each == kind]
        scrape.counter(f"octavo:{kind}_requests", help, counts)
    _write_tier(scrape, report, state.tier)
    _write_holds(scrape, state.holds)
    if state.adapters is not None:
        _write_adapters(scrape, state.adapters)


def _write_adapters(scrape: Scrape, adapters: AdapterState) -> None:
    names = {
        "max_lora": str(adapters.max_used),
        "running_lora_adapters": ",".join(adapters.running),
        "waiting_lora_adapters": ",".join(adapters.waiting),
    }
    scrape.gauge(
        "vllm:lora_requests_info", "Adapters of running and waiting requests, as labels; always 1.", [(names, 1)]
    )
    scrape.gauge("octavo:adapters_loaded", "Adapters in memory.", [({}, adapters.num_loaded)])
    scrape.gauge(
        "octavo:adapter_bytes",
        "Memory that adapters take, and may take (--lora-memory).",
        [({"kind": "used"}, adapters.num_bytes), ({"kind": "limit"}, adapters.budget)],
    )
    scrape.counter("octavo:adapter_loads", "Adapters that were read into memory.", [({}, adapters.loads)])
    scrape.counter("octavo:adapter_load_seconds", "Time for that, beside the steps.", [({}, adapters.load_seconds)])
    scrape.counter("octavo:adapters_dropped", "Adapters that made room for others.", [({}, adapters.dropped)])
    scrape.counter("octavo:adapter_failures", "Adapters that could not be read.", [({}, adapters.failures)])
    scrape.counter(
        "octavo:adapter_wait_seconds",
        "Time for which requests waited for their adapter.",
        [({}, adapters.wait_seconds)],
    )


def _write_holds(scrape: Scrape, holds: HoldState) -> None:
    kinds = ("session", "pin")
    scrape.gauge(
        "octavo:held_prefixes",
        "Prefixes whose KV pages are evicted last: of conversations that may go on (session), and pinned by POST /v1/prefix (pin).",
        [({"kind": kind}, holds.num_holds.get(kind, 0)) for kind in kinds],
    )
    scrape.gauge(
        "octavo:held_prefix_bytes",
        "KV pages of these prefixes; a page of two prefixes counts twice.",
        [({"kind": kind}, holds.num_bytes.get(kind, 0)) for kind in kinds],
    )
    scrape.counter(
        "octavo:held_prefixes_dropped",
        "Conversations whose pages lost their place before their time, because half of the KV pages is held at most.",
        [({}, holds.num_dropped)],
    )


def _write_tier(scrape: Scrape, report: EngineReport, tier: TierState) -> None:
    """All of it, whether or not there is a tier, so that boards need not ask which server has one."""
    scrape.gauge("octavo:kv_tier_bytes", "Bytes of KV pages in the folder of --kv-tier.", [({}, tier.num_bytes)])
    scrape.gauge("octavo:kv_tier_pages", "KV pages of this model in the folder of --kv-tier.", [({}, tier.num_pages)])
    scrape.gauge(
        "octavo:kv_tier_ram_bytes", "Bytes of KV pages in the host's memory (--kv-tier ram).", [({}, tier.ram_bytes)]
    )
    scrape.gauge("octavo:kv_tier_ram_pages", "KV pages there.", [({}, tier.num_ram_pages)])
    scrape.counter(
        "octavo:kv_tier_ram_tokens",
        "Tokens of octavo:kv_tier_tokens_total whose KV pages came from there, or were stored there.",
        [
            ({"what": "loaded"}, tier.ram_loaded_pages * report.page_size),
            ({"what": "stored"}, tier.ram_stored_pages * report.page_size),
        ],
    )
    scrape.counter("octavo:kv_tier_loads", "Prefixes that were loaded from --kv-tier.", [({}, tier.loads)])
    tokens = {"loaded": tier.loaded_pages, "missed": tier.missed_pages, "stored": tier.stored_pages}
    scrape.counter(
        "octavo:kv_tier_tokens",
        "Tokens whose KV pages were loaded from --kv-tier, were missing or damaged there, or were stored there.",
        [({"what": what}, count * report.page_size) for what, count in tokens.items()],
    )
    scrape.counter(
        "octavo:kv_tier_seconds",
        "Time for loading from --kv-tier and for storing there, beside the steps; and what computing the loaded pages would have taken "
        "beyond that, by the measured costs of steps.",
        [
            ({"what": "load"}, tier.load_seconds),
            ({"what": "store"}, tier.store_seconds),
            ({"what": "saved"}, tier.saved_seconds),
        ],
    )
    scrape.counter(
        "octavo:kv_tier_passed_requests",
        "Requests whose prefix was in --kv-tier and did not wait for it: computing is faster (slower), or the load took too long (late).",
        [({"reason": reason}, tier.passed.get(reason, 0)) for reason in ("slower", "late")],
    )
    scrape.counter(
        "octavo:kv_tier_files",
        "Files of --kv-tier that were torn, foreign or damaged (bad), made room for others (evicted), or could not be written (failed).",
        [({"reason": reason}, tier.files.get(reason, 0)) for reason in ("bad", "evicted", "failed")],
    )


def rejections(model_name: str, state: EngineState) -> str:
    """Refused requests. Without the engine label, as vLLM counts them: they never reached an engine."""
    scrape = Scrape({"model_name": model_name})
    scrape.counter(
        "vllm:admission_rejections",
        "Requests that were refused because the queue was full or their max_queue_ms had passed.",
        [({"reason": reason}, count) for reason, count in state.rejections.items()],
    )
    return scrape.text()
