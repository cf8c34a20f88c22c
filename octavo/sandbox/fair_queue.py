"""FairQueue: waiting jobs, taken round-robin from their owners."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    @property
    def owner(self) -> bytes: ...


T = TypeVar("T", bound=Owned)


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._by_owner: OrderedDict[bytes, deque[T]] = OrderedDict()  # the owner to be served next comes first
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[T]:
        for jobs in self._by_owner.values():
            yield from jobs

    def put(self, job: T) -> None:
        self._by_owner.setdefault(job.owner, deque()).append(job)
        self._num_waiting += 1

    def take(self) -> T:
        """Take the oldest job of the owner that was served least recently."""
        owner, jobs = next(iter(self._by_owner.items()))
        job = jobs.popleft()
        self._by_owner.move_to_end(owner)
        self._forget(owner)
        return job

    def take_newest(self, owner: bytes) -> T:
        job = self._by_owner[owner].pop()
        self._forget(owner)
        return job

    def discard(self, job: T) -> None:
        """Remove a job, if it is here."""
        jobs = self._by_owner.get(job.owner, deque())
        if job in jobs:
            jobs.remove(job)
            self._forget(job.owner)

    def num_of(self, owner: bytes) -> int:
        return len(self._by_owner.get(owner, ()))

    def largest_owner(self) -> bytes:
        """The owner with the most jobs."""
        return max(self._by_owner, key=self.num_of)

    def _forget(self, owner: bytes) -> None:
        self._num_waiting -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]
