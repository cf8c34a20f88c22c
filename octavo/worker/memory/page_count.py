"""Decide how many KV pages there will be and which context fits, from the bytes that ranks report; write the start notes."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from octavo.cache.span import longest, pages_of
from octavo.config import AUTO, CacheConfig
from octavo.errors import ConfigError
from octavo.messages import DeviceMemory, EngineReport, LoadReport, TrialSeconds

MiB = 2**20
GiB = 2**30

_AUTO_CPU_SHARE = 0.4  # a host has other work: take more only when asked to


_MOST_RANKS = 16  # that a note names
_LEAST_CONTEXT = 2048  # tokens that a suggestion must make room for if --max-model-len is not given


class _TooLittle(ConfigError):
    """The requested sizes do not fit; others may."""


def settle(config: CacheConfig, reports: list[LoadReport]) -> EngineReport:
    """What all ranks can hold together. ConfigError if that is less than requested, with suggestions that do fit."""
    try:
        return _fit(config, reports)
    except _TooLittle as shortage:
        raise ConfigError(f"{shortage.message}: use {', or '.join(_ways_out(config, reports))}") from None


def with_trials(report: EngineReport, seconds: TrialSeconds) -> EngineReport:
    return msgspec.structs.replace(
        report, one_row_seconds=seconds.one_row, verify_seconds=seconds.verified, draft_seconds=seconds.draft
    )


def _fit(config: CacheConfig, reports: list[LoadReport]) -> EngineReport:
    first = reports[0]
    if not first.can_generate:
        return _without_pages(config, reports)
    page_bytes = sum(report.page_bytes for report in reports)
    num_host_pages = _host_pages(config, reports, page_bytes)
    num_pages, note = _pages(config, reports, num_host_pages)
    notes = [*first.notes, note]
    max_model_len = first.max_model_len
    fits = longest(num_pages, max_model_len, config.page_size, first.windows, first.max_num_batched_tokens)
    if fits < max_model_len:
        if not first.max_model_len_is_auto:
            needed = _pages_of(max_model_len, config, first) * page_bytes
            raise _TooLittle(
                f"--max-model-len {max_model_len} needs {in_words(needed)} of KV pages and the store holds "
                f"{in_words(num_pages * page_bytes)} ({fits} tokens)"
            )
        notes.append(f"the context is cut from {max_model_len} to {fits} tokens, which is what the KV store holds")
        max_model_len = fits
    if len(reports) > 1:
        notes.append(_by_rank(reports, num_pages))
    num_warm_pages = _warm_pages(config, reports, num_pages)
    if num_warm_pages is not None and num_warm_pages < num_pages:
        notes.append(
            f"idle prefixes may keep {in_words(num_warm_pages * page_bytes)} of the KV store in memory; more is taken only for "
            "running requests"
        )
    return msgspec.structs.replace(
        _without_pages(config, reports),
        max_model_len=max_model_len,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        page_bytes=page_bytes,
        notes=notes,
        kv_dtype=first.kv_dtype,
        num_warm_pages=num_warm_pages,
        windows=first.windows,
    )


def _without_pages(config: CacheConfig, reports: list[LoadReport]) -> EngineReport:
    """The report without the fields about pages, which is all for an encoder."""
    first = reports[0]
    return EngineReport(
        device=first.device if len(reports) == 1 else f"{len(reports)} ranks, each {first.device}",
        dtype=first.dtype,
        vocab_size=first.vocab_size,
        max_model_len=first.max_model_len,
        max_num_seqs=first.max_num_seqs,
        max_num_batched_tokens=first.max_num_batched_tokens,
        page_size=config.page_size,
        num_pages=0,
        num_host_pages=0,
        weights_bytes=sum(report.weights_bytes for report in reports),
        page_bytes=0,
        notes=first.notes,
        memory=_together([report.memory for report in reports if report.memory is not None]),
        hidden_size=first.hidden_size,
        fingerprint=_fingerprint(reports),
        can_generate=first.can_generate,
        num_labels=first.num_labels,
        num_stages=1 + max(report.stage for report in reports),
        # What each rank can have: an adapter is on all of them.
        adapter_bytes=min(report.adapter_bytes for report in reports) * len(reports),
        draft_len=first.draft_len,
        draft_method=first.draft_method,
    )


def _by_rank(reports: list[LoadReport], num_pages: int) -> str:
    """What each rank holds, and all of them together."""
    stages = max(report.stage for report in reports)
    parts = [
        f"rank {number}{f' (stage {report.stage})' if stages else ''} {in_words(report.weights_bytes)} of weights and "
        f"{in_words(num_pages * report.page_bytes)} of KV pages"
        for number, report in enumerate(reports)
    ]
    total = sum(report.weights_bytes + num_pages * report.page_bytes for report in reports)
    shown = parts if len(parts) <= _MOST_RANKS else [*parts[:_MOST_RANKS], f"{len(parts) - _MOST_RANKS} more"]
    return f"memory by rank: {', '.join(shown)}; {in_words(total)} in all"


def _fingerprint(reports: list[LoadReport]) -> dict[str, str]:
    """That of the whole model: stages differ only in the forms in which they hold their weights."""
    parts = [report.fingerprint for report in reports if report.fingerprint]
    if len(parts) < 2:
        return reports[0].fingerprint
    names = dict.fromkeys(name for each in parts for name in each["weights"].split("+"))
    if parts[0]["kernels"].startswith("native"):
        return parts[0] | {"weights": "+".join(sorted(names))}
    dtype = parts[0]["weights"].split("+")[-1]  # comes last (worker/fingerprint.py)
    return parts[0] | {"weights": "+".join([*(name for name in names if name != dtype), dtype])}


def _pages_of(num_tokens: int, config: CacheConfig, report: LoadReport) -> int:
    """The most pages that one request of `num_tokens` tokens ever holds."""
    return pages_of(num_tokens, config.page_size, report.windows, report.max_num_batched_tokens)


def _warm_pages(config: CacheConfig, reports: list[LoadReport], num_pages: int) -> int | None:
    """Idle pages that may stay resident, since a CPU's pages take memory at their first write. None: all memory is taken at once,
    as on a GPU."""
    if not is_cpu(reports[0]):
        return None
    if not isinstance(config.idle_prefix_bytes, int):
        return num_pages
    return min(num_pages, config.idle_prefix_bytes // sum(report.page_bytes for report in reports))


def is_cpu(report: LoadReport) -> bool:
    return report.device.startswith("cpu")


def in_words(num_bytes: float) -> str:
    """A size for messages: 1.5 GiB, 512 MiB."""
    for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", 1024)):
        if num_bytes >= size:
            number = f"{num_bytes / size:.1f}".removesuffix(".0")
            return f"{number} {unit}"
    return f"{int(num_bytes)} bytes"


def _most_pages(reports: list[LoadReport], num_host_pages: int) -> int:
    """Pages that fit into all available memory. Ranks hold the same pages, so the one with the least memory decides."""
    most = min(report.available_bytes // report.page_bytes for report in reports)
    if not is_cpu(reports[0]):
        return most
    # On a CPU, swap space and pages share the same memory.
    page_bytes = sum(report.page_bytes for report in reports)
    return min(most, sum(report.available_bytes for report in reports) // page_bytes - num_host_pages)


def _pages(config: CacheConfig, reports: list[LoadReport], num_host_pages: int) -> tuple[int, str]:
    """The number of pages, and a note that explains it."""
    first = reports[0]
    page_bytes = sum(report.page_bytes for report in reports)
    most = _most_pages(reports, num_host_pages)
    if isinstance(config.kv_cache_memory_bytes, int) and most >= 1:
        return _explicit_pages(config, config.kv_cache_memory_bytes, page_bytes, most)
    shares = [_gpu_share(config, report) for report in reports]
    most, share = _cpu_share(most, page_bytes) if is_cpu(first) else min(shares)
    if most < 1:
        raise _TooLittle(_no_page(config, reports, num_host_pages))
    useful = first.max_num_seqs * _pages_of(first.max_model_len, config, first)
    if useful <= most:
        most, share = useful, f"all that {first.max_num_seqs} rows of {first.max_model_len} tokens can use"
    return most, f"the KV store takes {in_words(most * page_bytes)}: {share}"


def _cpu_share(most: int, page_bytes: int) -> tuple[int, str]:
    num_pages = int(most * page_bytes * _AUTO_CPU_SHARE) // page_bytes
    return max(min(1, most), num_pages), f"{_AUTO_CPU_SHARE:.0%} of the available memory"


def _gpu_share(config: CacheConfig, report: LoadReport) -> tuple[int, str]:
    """Pages in the configured share of the GPU, less what this process holds (other processes do not count against it), but
    at most what is free; and the reason in words."""
    memory, meant = report.memory, f"{config.gpu_memory_utilization:.0%} of the GPU"
    if memory is None:
        return report.available_bytes // report.page_bytes, f"{meant}, less weights and working space"
    share = int(memory.total * config.gpu_memory_utilization) - memory.own - memory.working - memory.reserve
    if share <= report.available_bytes:
        return share // report.page_bytes, f"{meant}, less weights, working space and reserve"
    why = "all that is free beside weights, working space and reserve"
    if memory.other:
        why = f"all that is free: other processes hold {in_words(memory.other)}, so that {meant} cannot be reached"
    return report.available_bytes // report.page_bytes, why


def _no_page(config: CacheConfig, reports: list[LoadReport], num_host_pages: int) -> str:
    page_bytes = sum(report.page_bytes for report in reports)
    page = f"a KV page of {config.page_size} tokens takes {in_words(page_bytes)}"
    memory = min((r.memory for r in reports if r.memory is not None), key=lambda m: m.for_pages, default=None)
    if memory is None:
        left = sum(report.available_bytes for report in reports) - num_host_pages * page_bytes * is_cpu(reports[0])
        return f"{page} and {in_words(max(0, left))} is left after the weights"
    other = f", and other processes hold {in_words(memory.other)}" if memory.other else ""
    return (
        f"{page} and none fits: of the GPU's {in_words(memory.total)} weights and tables take {in_words(memory.own)}, "
        f"a step {in_words(memory.working)}, {in_words(memory.reserve)} is reserve{other}"
    )


def _explicit_pages(config: CacheConfig, wanted: int, page_bytes: int, most: int) -> tuple[int, str]:
    num_pages = wanted // page_bytes
    if num_pages > most:
        raise _TooLittle(
            f"--kv-cache-memory-bytes asks for {in_words(wanted)} and {in_words(most * page_bytes)} is left for pages"
        )
    if num_pages < 1:
        raise ConfigError(
            f"--kv-cache-memory-bytes {wanted} does not hold one page of {config.page_size} tokens: "
            f"use at least {page_bytes}, or {AUTO}"
        )
    return num_pages, f"the KV store takes {in_words(num_pages * page_bytes)}, as asked"


def _host_pages(config: CacheConfig, reports: list[LoadReport], page_bytes: int) -> int:
    wanted = int(config.swap_space * GiB)
    most = sum(report.host_available_bytes for report in reports)
    if wanted > most:
        raise ConfigError(
            f"--swap-space asks for {in_words(wanted)} and {in_words(most)} of host memory is available: "
            f"use {int(most / GiB * 0.5 * 10) / 10} or less"
        )
    return wanted // page_bytes


def _together(memories: list[DeviceMemory]) -> DeviceMemory | None:
    if not memories:
        return None
    return DeviceMemory(*(sum(getattr(m, name) for m in memories) for name in DeviceMemory.__struct_fields__))


# ── too little memory ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Way:
    """A suggestion: other flags, and the configuration and reports that they lead to."""

    flags: str
    config: CacheConfig
    reports: list[LoadReport]
    context: int  # number of tokens that must fit


def weights_too_large(needed: int, held: str, available: int, fp8_needed: int = 0, bfloat16_needed: int = 0) -> str:
    """The error message for weights that do not fit. `held`: their form, in words. `fp8_needed`, `bfloat16_needed`: the bytes
    they would take in those types; 0: not supported, or no smaller."""
    ways = []
    if 0 < fp8_needed <= available:
        ways.append(f"--quantization fp8 ({in_words(fp8_needed)})")
    if 0 < bfloat16_needed <= available:
        ways.append(f"--dtype bfloat16 ({in_words(bfloat16_needed)})")
    ways += ["a smaller model", "more memory"]
    return (
        f"the weights take {in_words(needed)} {held} and {in_words(available)} is available: use {', or '.join(ways)}"
    )


def decoded_weights(held: int, stored: int, packing: str, dtype: str) -> str:
    """A note on packed weights that had to be decoded, in bytes of this rank; "": they take about as much as when stored."""
    if held < 1.2 * stored:
        return ""
    return (
        f"the weights take {in_words(held)} here and {in_words(stored)} in the checkpoint ({packing}): weights "
        f"without a kernel for their stored format are held in a larger one, or in {dtype}"
    )


def _ways_out(config: CacheConfig, reports: list[LoadReport]) -> list[str]:
    """Suggestions that fit, the one nearest to the request first. Each is checked as if it had been requested."""
    first = reports[0]
    context = min(first.max_model_len, _LEAST_CONTEXT) if first.max_model_len_is_auto else first.max_model_len
    found = [way.flags for way in _candidates(config, reports, context) if _is_enough(way)]
    return found or ["a smaller model, or free some memory"]


def _is_enough(way: _Way) -> bool:
    try:
        return _fit(way.config, way.reports).max_model_len >= way.context
    except ConfigError:
        return False


def _candidates(config: CacheConfig, reports: list[LoadReport], context: int) -> Iterator[_Way]:
    first, num_pages = reports[0], _pages_of(context, config, reports[0])
    yield from _other_sizes(config, reports, context, num_pages)
    yield from _smaller_steps(config, reports, context, num_pages)
    if is_cpu(first) and config.swap_space:
        yield _Way("--swap-space 0", dataclasses.replace(config, swap_space=0.0), reports, context)
    if first.fp8_page_bytes:
        smaller = [_changed(report, page_bytes=report.fp8_page_bytes) for report in reports]
        yield _Way("--kv-cache-dtype fp8", config, smaller, context)
    if first.bfloat16_weights_bytes:
        halves = [
            _changed(_freed(r, r.weights_bytes - r.bfloat16_weights_bytes), page_bytes=r.bfloat16_page_bytes)
            for r in reports
        ]
        yield _Way("--dtype bfloat16", config, halves, context)
    if first.fp8_weights_bytes:
        lighter = [_freed(report, report.weights_bytes - report.fp8_weights_bytes) for report in reports]
        yield _Way("--quantization fp8", config, lighter, context)
    if not first.max_model_len_is_auto:
        fits = _context_that_fits(config, reports)
        shorter = [_changed(report, max_model_len=fits) for report in reports]
        yield _Way(f"--max-model-len {fits}", config, shorter, fits)


def _other_sizes(config: CacheConfig, reports: list[LoadReport], context: int, num_pages: int) -> Iterator[_Way]:
    """A larger KV store from free memory, or a smaller one that fits into it."""
    page_bytes = sum(report.page_bytes for report in reports)
    most = _most_pages(reports, int(config.swap_space * GiB) // page_bytes) * page_bytes
    if isinstance(config.kv_cache_memory_bytes, int) and config.kv_cache_memory_bytes > most > 0:
        typed = _flag(most)
        smaller = dataclasses.replace(config, kv_cache_memory_bytes=_read(typed))
        yield _Way(f"--kv-cache-memory-bytes {typed} or less", smaller, reports, context)
    elif isinstance(config.kv_cache_memory_bytes, int) or is_cpu(reports[0]):
        typed = _flag(num_pages * page_bytes, up=True)
        larger = dataclasses.replace(config, kv_cache_memory_bytes=_read(typed))
        flags = f"--kv-cache-memory-bytes {typed} ({in_words(most)} is available)"
        yield _Way(flags, larger, reports, context)
    elif memories := [(report.memory, report.page_bytes) for report in reports if report.memory is not None]:
        needed = max((m.own + m.working + m.reserve + num_pages * size) / m.total for m, size in memories)
        share = min(100, math.floor(needed * 100) + 1) / 100
        wider = dataclasses.replace(config, gpu_memory_utilization=share)
        yield _Way(f"--gpu-memory-utilization {share:.2f}", wider, reports, context)


def _smaller_steps(config: CacheConfig, reports: list[LoadReport], context: int, num_pages: int) -> Iterator[_Way]:
    """Smaller steps, which need less working space. A step takes the maximum over its parts, each of which is linear in
    tokens or rows. That is convex, so interpolating between two measured points never underestimates it."""
    memories = [report.memory for report in reports if report.memory is not None]
    if not memories:
        return
    tokens, rows = reports[0].max_num_batched_tokens, reports[0].max_num_seqs
    missing = [num_pages * r.page_bytes - _gpu_share(config, r)[0] * r.page_bytes for r in reports]
    if isinstance(config.kv_cache_memory_bytes, int):
        missing = [num_pages * r.page_bytes - r.available_bytes for r in reports]
    allowed = [memory.working - short for memory, short in zip(memories, missing, strict=True)]

    part = _part(allowed, [memory.working_rows for memory in memories], [memory.working for memory in memories])
    fewer = rows + int(part * (tokens - rows)) // 64 * 64
    if rows <= fewer < tokens:
        part = (fewer - rows) / (tokens - rows)
        smaller = [_stepping(r, m.working_rows, part, fewer, rows) for r, m in zip(reports, memories, strict=True)]
        yield _Way(f"--max-num-batched-tokens {fewer}", config, smaller, context)
        return
    part = _part(allowed, [memory.working_least for memory in memories], [memory.working for memory in memories])
    if int(part * rows) >= 1 and int(part * tokens) < tokens:
        fewer, rows = int(part * tokens), int(part * rows)
        smaller = [_stepping(r, m.working_least, part, fewer, rows) for r, m in zip(reports, memories, strict=True)]
        yield _Way(f"--max-num-batched-tokens {fewer} --max-num-seqs {rows}", config, smaller, context)


def _part(allowed: list[int], least: list[int], most: list[int]) -> float:
    """The fraction of the way from `least` to `most` that every rank can afford, 0 to 1; −1: not even `least`."""
    parts = [
        1.0 if a >= m else -1.0 if a < low else (a - low) / (m - low)
        for a, low, m in zip(allowed, least, most, strict=True)
    ]
    return min(parts)


def _stepping(report: LoadReport, least: int, part: float, num_tokens: int, num_rows: int) -> LoadReport:
    """The report with smaller steps; `part`: the fraction from `least` to the measured working space."""
    assert report.memory is not None
    working = math.ceil(least + part * (report.memory.working - least))
    return _changed(
        report,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_rows,
        available_bytes=report.available_bytes + report.memory.working - working,
        memory=msgspec.structs.replace(report.memory, working=working),
    )


def _freed(report: LoadReport, num_bytes: int) -> LoadReport:
    """The report with weights that take `num_bytes` less."""
    memory = report.memory and msgspec.structs.replace(report.memory, own=report.memory.own - num_bytes)
    return _changed(
        report,
        weights_bytes=report.weights_bytes - num_bytes,
        available_bytes=report.available_bytes + num_bytes,
        memory=memory,
    )


def _context_that_fits(config: CacheConfig, reports: list[LoadReport]) -> int:
    try:
        return _fit(config, [_changed(report, max_model_len_is_auto=True) for report in reports]).max_model_len
    except ConfigError:
        return 0


def _changed(report: LoadReport, **values: object) -> LoadReport:
    return msgspec.structs.replace(report, **values)


def _flag(num_bytes: int, up: bool = False) -> str:
    """A value for a command line: whole mebibytes from 16 MiB on."""
    if num_bytes < 16 * MiB:
        return str(num_bytes)
    return f"{-(-num_bytes // MiB) if up else num_bytes // MiB}M"


def _read(flag: str) -> int:
    """The bytes of a value that _flag made."""
    return int(flag.removesuffix("M")) * (MiB if flag.endswith("M") else 1)
