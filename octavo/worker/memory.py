"""How many KV pages there will be, and what that allows: measured, checked, and said in words.
Knows nothing of tensors or devices: ranks report bytes, and bytes are all that is counted here."""

from octavo.config import AUTO, CacheConfig
from octavo.errors import ConfigError
from octavo.messages import EngineReport, LoadReport

MiB = 2**20
GiB = 2**30

_AUTO_CPU_BYTES = 4 * GiB  # a host has other work: more than this is taken only when it is asked for
_AUTO_CPU_SHARE = 0.4


def settle(config: CacheConfig, reports: list[LoadReport]) -> EngineReport:
    """What all ranks can hold together. ConfigError where that is not what was asked for."""
    first = reports[0]
    page_bytes = sum(report.page_bytes for report in reports)
    available = sum(report.available_bytes for report in reports)
    num_host_pages = _host_pages(config, reports, page_bytes)
    # On a CPU the swap space comes out of the same memory as the pages.
    if is_cpu(first):
        available -= num_host_pages * page_bytes
    num_pages, note = _pages(config, reports, page_bytes, available)
    notes = [*first.notes, note]
    fits = num_pages * config.page_size
    max_model_len = first.max_model_len
    if fits < max_model_len:
        if not first.max_model_len_is_auto:
            raise ConfigError(_too_long(config, first, num_pages, page_bytes, available))
        notes.append(f"the context is cut from {max_model_len} to {fits} tokens, which is what the KV store holds")
        max_model_len = fits
    return EngineReport(
        device=first.device if len(reports) == 1 else f"{len(reports)} ranks, each {first.device}",
        dtype=first.dtype,
        vocab_size=first.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=first.max_num_seqs,
        max_num_batched_tokens=first.max_num_batched_tokens,
        page_size=config.page_size,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        weights_bytes=sum(report.weights_bytes for report in reports),
        page_bytes=page_bytes,
        notes=notes,
    )


def is_cpu(report: LoadReport) -> bool:
    return report.device.startswith("cpu")


def in_words(num_bytes: float) -> str:
    """1.5 GiB, 512 MiB: for people."""
    for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", 1024)):
        if num_bytes >= size:
            number = f"{num_bytes / size:.1f}".removesuffix(".0")
            return f"{number} {unit}"
    return f"{int(num_bytes)} bytes"


def _pages(config: CacheConfig, reports: list[LoadReport], page_bytes: int, available: int) -> tuple[int, str]:
    """How many pages, and why so many."""
    first = reports[0]
    # Ranks hold the same pages: the one with the least memory decides.
    most = min(report.available_bytes // report.page_bytes for report in reports)
    most = min(most, available // page_bytes)
    if most < 1:
        raise ConfigError(
            f"a KV page of {config.page_size} tokens takes {in_words(page_bytes)} and {in_words(max(0, available))} "
            "is left after the weights: free some memory, use a smaller model, or lower --swap-space or --block-size"
        )
    if isinstance(config.kv_cache_memory_bytes, int):
        return _explicit_pages(config, config.kv_cache_memory_bytes, page_bytes, most)
    useful = first.max_num_seqs * -(-first.max_model_len // config.page_size)
    if not is_cpu(first):
        share = f"{config.gpu_memory_utilization:.0%} of the GPU, less weights and working space"
    else:
        share = f"{_AUTO_CPU_SHARE:.0%} of the available memory"
        if most * page_bytes * _AUTO_CPU_SHARE > _AUTO_CPU_BYTES:
            share = "the most that auto takes on a CPU"
        most = max(1, int(min(_AUTO_CPU_BYTES, most * page_bytes * _AUTO_CPU_SHARE)) // page_bytes)
    if useful <= most:
        most, share = useful, f"all that {first.max_num_seqs} rows of {first.max_model_len} tokens can use"
    return most, f"the KV store takes {in_words(most * page_bytes)}: {share}"


def _explicit_pages(config: CacheConfig, wanted: int, page_bytes: int, most: int) -> tuple[int, str]:
    num_pages = wanted // page_bytes
    if num_pages > most:
        raise ConfigError(
            f"--kv-cache-memory-bytes asks for {in_words(wanted)} and {in_words(most * page_bytes)} is left after "
            f"weights and swap space: use {_flag(most * page_bytes)} or less"
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


def _too_long(config: CacheConfig, first: LoadReport, num_pages: int, page_bytes: int, available: int) -> str:
    """One line with the ways out, the one that keeps most of what was asked for first."""
    needed = -(-first.max_model_len // config.page_size) * page_bytes
    fits = num_pages * config.page_size
    ways = []
    if needed <= available:
        ways.append(f"--kv-cache-memory-bytes {_flag(needed, up=True)} ({in_words(available)} is available)")
    if first.dtype == "float32" and needed // 2 <= num_pages * page_bytes:
        ways.append("--dtype bfloat16")
    ways.append(f"--max-model-len {fits}")
    return (
        f"--max-model-len {first.max_model_len} needs {in_words(needed)} of KV pages and the store holds "
        f"{in_words(num_pages * page_bytes)} ({fits} tokens): use {', or '.join(ways)}"
    )


def _flag(num_bytes: int, up: bool = False) -> str:
    """As a value that can be typed: whole mebibytes where that is near enough."""
    if num_bytes < 16 * MiB:
        return str(num_bytes)
    return f"{-(-num_bytes // MiB) if up else num_bytes // MiB}M"
