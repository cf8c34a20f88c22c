"""Advice: why requests wait, in words, and which setting would help."""

from collections.abc import Callable

import msgspec

from octavo.observe.journeys.stages import WaitReason

LATELY_SECONDS = 10.0
"""Preemptions within this time count as recent."""
SCARCE = 0.1
"""With a smaller share of the pages free, more rows would only run out of pages."""


class Standing(msgspec.Struct, frozen=True, gc=False):
    """The numbers that the advice depends on."""

    num_waiting: int
    reason: WaitReason | None  # what the queue's head lacks; None: no plan has looked at it yet
    num_rows: int
    max_rows: int
    num_pages: int
    num_open_pages: int  # free, or cached and unused
    max_step_tokens: int
    head_tokens: int  # of the queue's head
    head_pages: int  # that these take if none is in the prefix cache
    spare_pages: int  # that an admission must leave free for the running requests
    num_preempted: int  # lately
    is_cpu: bool = False
    has_swap: bool = False  # preempted requests may go to host memory
    limit_ms: float = 0.0  # that a step may take beside running streams; 0: no step was limited yet


def advice(standing: Standing) -> str:
    """Empty: no request waits, and none was preempted recently. Each setting is named at most once: while requests are preempted the
    pages are what is lacking, whatever the queue's head waits for."""
    parts = []
    if standing.num_waiting:
        describe = _SENTENCES.get(standing.reason or "")
        parts.append(describe(standing) if describe else f"{_many(standing)} for the current step to end.")
    if standing.num_preempted:
        parts.append(_preempted(standing))
    return " ".join(parts)


def _many(standing: Standing) -> str:
    return "1 request waits" if standing.num_waiting == 1 else f"{standing.num_waiting:,} requests wait"


def _memory(standing: Standing) -> str:
    flags = "--kv-cache-memory-bytes" if standing.is_cpu else "--gpu-memory-utilization or --kv-cache-memory-bytes"
    return f"Give KV pages more memory ({flags}), or store them in a smaller type (--kv-cache-dtype)"


def _rows(standing: Standing) -> str:
    taken = f"{_many(standing)}: all {standing.max_rows:,} rows are in use"
    share = standing.num_open_pages / max(1, standing.num_pages)
    if share < SCARCE:
        return f"{taken}, and so are {1 - share:.0%} of the KV pages: this server is full. Add another server, or memory for pages."
    if standing.num_preempted:
        return f"{taken}. More rows would not help: KV pages run out already."
    return f"{taken}, while {share:.0%} of the KV pages are free. Raise --max-num-seqs (now {standing.max_rows:,})."


def _pages(standing: Standing) -> str:
    if standing.head_pages + standing.spare_pages <= standing.num_open_pages:  # freed since the plan that lacked them
        return f"{_many(standing)} for KV pages that have just become free."
    needed = f"{standing.head_pages:,} KV pages for {standing.head_tokens:,} tokens"
    if standing.spare_pages:
        needed += f", with {standing.spare_pages:,} more reserved for running requests"
    said = f"{_many(standing)}: the next one needs up to {needed}; {standing.num_open_pages:,} of {standing.num_pages:,} are free."
    return said if standing.num_preempted else f"{said} {_memory(standing)}."


def _budget(standing: Standing) -> str:
    said = f"{_many(standing)}: running requests use all {standing.max_step_tokens:,} tokens of a step."
    if standing.num_preempted:
        return said  # larger steps would take pages sooner
    return f"{said} Raise --max-num-batched-tokens: prompts are computed sooner, and the time between tokens grows a little."


def _streams(standing: Standing) -> str:
    return (
        f"{_many(standing)}: prompts are computed in parts, to keep the running streams' tokens within {standing.limit_ms:,.0f} ms. Raise "
        "--max-inter-token-ms, or set it to off: prompts are computed sooner, and the longest times between tokens grow."
    )


def _preempted(standing: Standing) -> str:
    times = "1 preemption" if standing.num_preempted == 1 else f"{standing.num_preempted:,} preemptions"
    sentence = f"{times} in the last {LATELY_SECONDS:.0f} s, because KV pages ran out"
    sentence += (
        "; preempted requests wait in host memory or are recomputed."
        if standing.has_swap
        else "; preempted requests are recomputed (--swap-space would keep them in host memory)."
    )
    share = standing.num_open_pages / max(1, standing.num_pages)
    if standing.num_waiting and standing.reason == "rows" and share < SCARCE:
        return sentence  # what would help has been said
    return f"{sentence} {_memory(standing)}, or run fewer requests at once (--max-num-seqs, now {standing.max_rows:,})."


def _grammar(standing: Standing) -> str:
    return f"{_many(standing)} for new grammars, which are compiled in the background."


_SENTENCES: dict[str, Callable[[Standing], str]] = {
    "rows": _rows,
    "pages": _pages,
    "budget": _budget,
    "streams": _streams,
    "grammar": _grammar,
}
