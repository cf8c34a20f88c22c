"""Progress: which requests wait, for what and how long."""

from typing import Literal

import msgspec

from octavo.messages import ReplicaState
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.schedule.request import Request

QUIET_SECONDS = 5.0
"""A request that has had no token for this long is named."""
MAX_NAMED = 32

Status = Literal["ok", "starting", "recovering", "draining", "stuck", "dead"]


class Quiet(msgspec.Struct, frozen=True):
    """A request without progress, and why."""

    id: str
    seconds: float  # since its last token; without one, since it arrived
    why: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    status: Status = "ok"
    restarts: int = 0  # engines that were started again
    api_restarts: int = 0  # API processes that were
    steps: int = 0
    last_step_age_s: float | None = None  # None: there has been none
    step_running_s: float | None = None  # None: no step is being computed
    stalled_s: float = 0.0  # without a sign of life
    running: int = 0
    waiting: int = 0
    oldest_waiting: Quiet | None = None
    without_progress: list[Quiet] = []  # the ones that have waited longest
    page_problems: list[str] = []  # what the last audit of the pages found
    replicas: list[ReplicaState] = []  # of a fleet
    target_replicas: int = 1  # how many there should be


def progress_of(scheduler: Scheduler, metrics: EngineMetrics, now: float, owner: bytes | None = None) -> Progress:
    """What is known in the engine, between two steps; the API process adds the rest. Names the requests of one owner (None: of
    all)."""
    waiting, quiet = [], []
    for request in scheduler.requests():
        if owner not in (None, metrics.owner_of(request.id)):
            continue
        arrived, last = metrics.times(request.id, request.index)
        since = now - (last or arrived or now)
        if request.sequence in scheduler.awaiting_grammar:
            entry = Quiet(request.id, round(since, 3), "its grammar is being compiled")
        elif request.row < 0 and request in scheduler.waiting:
            entry = Quiet(request.id, round(since, 3), _why_waiting(scheduler, request))
            waiting.append((request.sequence, entry))
        else:
            left = request.length - request.computed
            nearly = "the end of its beam search" if request.params.use_beam_search else "its next token"
            why = f"prompt: {left} of {request.length} tokens are left to compute" if left > 1 else nearly
            entry = Quiet(request.id, round(since, 3), why)
        if since >= QUIET_SECONDS:
            quiet.append(entry)
    head = scheduler.waiting.head()
    oldest = next((entry for sequence, entry in waiting if head is not None and sequence == head.sequence), None)
    return Progress(
        steps=scheduler.num_steps,
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        oldest_waiting=None
        if oldest is None
        else msgspec.structs.replace(oldest, why=scheduler.head_waits_for or "order"),
        without_progress=sorted(quiet, key=lambda entry: -entry.seconds)[:MAX_NAMED],
    )


def _why_waiting(scheduler: Scheduler, request: Request) -> str:
    reason = f"in the queue, whose first request waits for {scheduler.head_waits_for or 'order'}"
    if not request.is_primary:
        reason = f"{reason}; not the first sequence of its response: it gives way to other requests"
    return f"preempted, {reason}" if request.num_preemptions else reason
