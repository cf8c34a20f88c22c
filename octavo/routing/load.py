"""Load: the work that waits at each replica, in seconds, with requests that were sent there and that it has not reported yet."""

from collections import deque

from octavo.messages import ReplicaLoad

UNMEASURED_SECONDS_PER_TOKEN = 1e-4
"""Taken for every replica while none has measured its own."""


class Load:
    """One replica's. A report replaces the one before; requests sent since then are counted in addition, from the moment they are sent."""

    def __init__(self) -> None:
        self.report = ReplicaLoad()
        self.num_sent = 0  # by this router, in this epoch
        self._unreported: deque[tuple[int, int]] = deque()  # (which one it was among those sent, tokens to compute)
        self.num_tokens = 0  # to compute: reported, and sent since
        self.num_open = 0  # requests, likewise

    def send(self, num_tokens: int) -> None:
        self.num_sent += 1
        self._unreported.append((self.num_sent, num_tokens))
        self.num_tokens += num_tokens
        self.num_open += 1

    def take(self, report: ReplicaLoad, origin: int) -> None:
        """`origin`: this router's number, by which the report counts what came from it."""
        self.report = report
        num_taken = report.num_taken.get(origin, 0)
        while self._unreported and self._unreported[0][0] <= num_taken:
            self._unreported.popleft()
        self.num_tokens = report.uncached_tokens + sum(num_tokens for _, num_tokens in self._unreported)
        self.num_open = report.num_open + len(self._unreported)
