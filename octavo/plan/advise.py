"""advise(): what other settings would have done for the requests that a server had in the last minutes, by its own recording: the same
scheduler on a virtual clock, with steps that take what they took. It runs in a process of its own, at low priority."""

from collections.abc import Callable

import msgspec

from octavo.plan.answer import changed_by
from octavo.plan.figures import Figures
from octavo.plan.fleet import simulate
from octavo.plan.recorded import Measured, trace_of
from octavo.plan.settings import FleetSettings, ReplicaSettings
from octavo.plan.step_model import fit_model
from octavo.plan.trace import Trace
from octavo.recording.format import Recording
from octavo.replay.what_if import Learned

LAST_SECONDS = 120.0
MAX_REQUESTS = 2000
_LEAST_REQUESTS = 5
_WORTH = 0.8  # a change is named if requests wait at most so many times as long, …
_LEAST_SECONDS = 0.05  # … and by so much less


class Outcome(msgspec.Struct, frozen=True):
    """What requests would have seen. Seconds."""

    flag: str  # empty: as it is
    value: str
    queue_mean: float
    queue_p99: float
    ttft_p99: float
    tpot_mean: float


class Hint(msgspec.Struct, frozen=True):
    text: str  # empty: nothing can be said
    seconds: float = 0.0  # that were looked at
    num_requests: int = 0
    outcomes: list[Outcome] = []  # the first: as it is


def advise(recording: Recording, rename: Callable[[bytes], int]) -> Hint:
    measured = Measured(recording)
    trace = _last(trace_of(recording, rename, measured.learned))
    if len(trace.requests) < _LEAST_REQUESTS:
        return Hint("")
    try:
        model = fit_model(measured.samples()).model
    except ValueError:
        return Hint("")
    now = FleetSettings(1, _replica(recording, measured.learned), model)
    outcomes = [_outcome("", "", simulate(trace, now))]
    rows, tokens = now.replica.max_num_seqs, now.replica.max_num_batched_tokens
    tried: list[tuple[str, int | float | str]] = [
        ("--max-num-seqs", rows * 2),
        ("--max-num-seqs", rows * 4),
        ("--max-num-batched-tokens", tokens * 2),
        ("--max-num-batched-tokens", tokens * 4),
        ("--max-inter-token-ms", "off"),
    ]
    for flag, value in tried:
        settings = changed_by(now, flag, value)
        if settings is not None and settings != now:
            outcomes.append(_outcome(flag, str(value), simulate(trace, settings)))
    return Hint(_text(outcomes, trace), trace.seconds, len(trace.requests), outcomes)


def _last(trace: Trace) -> Trace:
    """The requests of the last minutes, from 0 on."""
    if not trace.requests:
        return trace
    since = trace.requests[-1].seconds - LAST_SECONDS
    last = [each for each in trace.requests if each.seconds >= since][-MAX_REQUESTS:]
    start = last[0].seconds
    return msgspec.structs.replace(
        trace, requests=[msgspec.structs.replace(each, seconds=each.seconds - start) for each in last]
    )


def _replica(recording: Recording, learned: Learned) -> ReplicaSettings:
    report, cache = recording.header.report, recording.header.options["cache"]
    return ReplicaSettings(
        max_num_seqs=report.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens,
        num_pages=report.num_pages,
        max_model_len=report.max_model_len,
        page_size=report.page_size,
        num_host_pages=report.num_host_pages,
        enable_prefix_caching=bool(cache["enable_prefix_caching"]),
        prefix_eviction=report.prefix_eviction,
        scheduling_policy=report.scheduling_policy,
        max_inter_token_ms=report.max_inter_token_ms,
        max_waiting_requests=2**31,  # those that were refused are not in the recording
        max_waiting_tokens=2**31,
        depth=learned.depth,
        overlap_rows=learned.overlap_rows,
    )


def _outcome(flag: str, value: str, figures: Figures) -> Outcome:
    queue, ttft, tpot = figures.queue_seconds, figures.ttft, figures.tpot
    return Outcome(
        flag,
        value,
        queue.mean if queue else 0.0,
        queue.p99 if queue else 0.0,
        ttft.p99 if ttft else 0.0,
        tpot.mean if tpot else 0.0,
    )


def _text(outcomes: list[Outcome], trace: Trace) -> str:
    now, *others = outcomes
    num_requests = len(trace.requests)
    when = f"the last {trace.seconds:.0f} s ({num_requests} requests)"
    if trace.seconds < 1:
        when = f"the last {num_requests} requests, which came within a second"
    best = min(others, key=lambda each: each.ttft_p99, default=None)
    if best is None:
        return ""
    if best.ttft_p99 > _WORTH * now.ttft_p99 or now.ttft_p99 - best.ttft_p99 < _LEAST_SECONDS:
        return f"Simulated over {when}: no other limit on rows or steps would have brought first tokens much sooner than {_time(now.ttft_p99)} (p99)."
    return (
        f"Simulated over {when}: with {best.flag} {best.value} the queue would have been {_time(best.queue_mean)} instead of {_time(now.queue_mean)} on "
        f"average, the first token p99 {_time(best.ttft_p99)} instead of {_time(now.ttft_p99)}, a token {_time(best.tpot_mean)} instead of {_time(now.tpot_mean)}."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
