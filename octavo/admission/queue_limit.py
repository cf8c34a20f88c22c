"""QueueLimit: refuses requests when too many wait, and estimates from recent admissions how fast the queue moves.

Only primary sequences count against the first part of another (schedule/policy.py): a response with many prompts fills no queue
but its own. Against its further parts, all prompts that wait count."""

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from octavo.errors import Overloaded
from octavo.messages import GenerateRequest
from octavo.observe.step_observer import StepObserver

if TYPE_CHECKING:  # API processes import too_much(), and have no use for a scheduler
    from octavo.schedule import Scheduler
    from octavo.schedule.results import Planned

WINDOW_SECONDS = 60.0
MAX_RETRY_SECONDS = 600


class Excess(NamedTuple):
    reason: str  # the label in metrics
    words: str


def too_much(
    num_waiting: int, num_tokens: int, num_new_tokens: int, max_requests: int, max_tokens: int
) -> Excess | None:
    """Why one more request, with a prompt of `num_new_tokens`, may not wait. None: it may. A limit of 0: any number."""
    if max_requests and num_waiting >= max_requests:
        return Excess(
            "num_queued_reqs",
            f"{num_waiting} requests are already waiting; at most {max_requests} may wait (--max-waiting-requests)",
        )
    if max_tokens and num_tokens + num_new_tokens > max_tokens:
        return Excess(
            "num_queued_tokens",
            f"{num_tokens} prompt tokens are already waiting; with the {num_new_tokens} of this request they would exceed the limit "
            f"of {max_tokens} (--max-waiting-tokens)",
        )
    return None


def retry_seconds(seconds: float) -> int:
    """When to retry, if the whole queue is admitted within `seconds`: after half of them, it is half as long."""
    return max(1, min(math.ceil(seconds / 2), MAX_RETRY_SECONDS))


class QueueLimit(StepObserver):
    def __init__(self, max_requests: int = 0, max_tokens: int = 0) -> None:
        """How many requests may wait at one time, and how many prompt tokens they may have; 0: any number."""
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._admissions: deque[tuple[float, int]] = deque()  # (when, how many), the last minute's
        self._num_admitted = 0  # their sum
        self.rejections = {"num_queued_reqs": 0, "num_queued_tokens": 0, "queue_time": 0}  # since the start, by reason

    def rows_changed(self, planned: "Planned", now: float) -> None:
        if planned.admitted:
            self.moved(now, len(planned.admitted))

    def moved(self, now: float, num_admitted: int) -> None:
        """`num_admitted` requests got a row."""
        self._admissions.append((now, num_admitted))
        self._num_admitted += num_admitted
        self._forget(now)

    def check(self, request: GenerateRequest, scheduler: "Scheduler", now: float) -> None:
        """Raises Overloaded. As long as there are free rows for all that wait, every request is taken."""
        num_waiting, tokens = scheduler.rows.backlog(only_primaries=not request.part)
        waiting = num_waiting - len(scheduler.rows.free)
        if waiting < 0 or not num_waiting:
            return
        excess = too_much(waiting, tokens, len(request.prompt_ids), self._max_requests, self._max_tokens)
        if excess is not None:
            self.rejections[excess.reason] += 1
            raise Overloaded(excess.words, self.retry_after(waiting, now))

    def retry_after(self, num_waiting: int, now: float) -> int:
        """Whole seconds until half of the queue is admitted, at the pace of the last minute."""
        return retry_seconds(self.seconds_for(num_waiting, now))

    def seconds_for(self, num_requests: float, now: float) -> float:
        """Seconds until `num_requests` more are admitted, at the pace of the last minute. Without admissions: one a second."""
        self._forget(now)
        if not self._num_admitted:
            return num_requests
        span = max(now - self._admissions[0][0], 1.0)
        return num_requests * span / self._num_admitted

    def _forget(self, now: float) -> None:
        while self._admissions and now - self._admissions[0][0] > WINDOW_SECONDS:
            self._num_admitted -= self._admissions.popleft()[1]
