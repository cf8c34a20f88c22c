"""Backlog: how much waits, how fast that moves, and who is refused because it is too much.
Knows nothing of clocks or sockets: whoever asks brings the time."""

import math
from collections import deque

from octavo.errors import Overloaded
from octavo.messages import GenerateRequest
from octavo.schedule import Scheduler

WINDOW_SECONDS = 60.0
MAX_RETRY_SECONDS = 600


class Backlog:
    def __init__(self, max_requests: int = 0, max_tokens: int = 0) -> None:
        """Requests, and prompt tokens of theirs, that may wait at one time; 0: any number."""
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._admissions: deque[tuple[float, int]] = deque()  # (when, how many), the last minute's
        self._num_admitted = 0  # their sum
        self.rejections = {"num_queued_reqs": 0, "num_queued_tokens": 0, "queue_time": 0}  # since the start, by reason

    def moved(self, now: float, num_admitted: int) -> None:
        """So many got a row."""
        self._admissions.append((now, num_admitted))
        self._num_admitted += num_admitted
        self._forget(now)

    def check(self, request: GenerateRequest, scheduler: Scheduler, now: float) -> None:
        """Raises Overloaded. While there are rows for all who wait, anything is taken: what can be served has a way in."""
        waiting, tokens = scheduler.num_waiting - scheduler.num_free_rows, scheduler.num_waiting_tokens
        if waiting < 0 or not scheduler.num_waiting:
            return
        if self._max_requests and waiting >= self._max_requests:
            reason = "num_queued_reqs"
            what = f"{waiting} requests wait already, as many as may (--max-waiting-requests)"
        elif self._max_tokens and tokens + len(request.prompt_ids) > self._max_tokens:
            reason = "num_queued_tokens"
            what = (
                f"{tokens} prompt tokens wait already; with the {len(request.prompt_ids)} of this request there would be more than "
                f"{self._max_tokens} (--max-waiting-tokens)"
            )
        else:
            return
        self.rejections[reason] += 1
        raise Overloaded(what, self.retry_after(waiting, now))

    def retry_after(self, num_waiting: int, now: float) -> int:
        """Whole seconds in which, at the pace of the last minute, half of the queue will have moved on."""
        return max(1, min(math.ceil(self.seconds_for(num_waiting / 2, now)), MAX_RETRY_SECONDS))

    def seconds_for(self, num_requests: float, now: float) -> float:
        """Until so many more have a row, at the pace of the last minute. Without one to go by: as if it was one a second."""
        self._forget(now)
        if not self._num_admitted:
            return num_requests
        span = max(now - self._admissions[0][0], 1.0)
        return num_requests * span / self._num_admitted

    def _forget(self, now: float) -> None:
        while self._admissions and now - self._admissions[0][0] > WINDOW_SECONDS:
            self._num_admitted -= self._admissions.popleft()[1]
