"""Recovery: what a new engine takes over from the one before it, and in what order; the same for an engine that is the first.
Knows nothing of sockets or steps: whoever drives the loop brings messages and deltas, and takes requests in.

API processes bring the requests that they hold. All of them must have spoken first, so that the order of arrival is kept over
all of them. If some of the requests were in two engines when those ended, and came no further in between, one of them may be
the cause: they are tried before the others go on, the younger half of them first. Those in a half that ends the engine are the
suspects the next time, and so on, until one is left alone, which its API process then fails."""

from collections import deque
from collections.abc import Sequence

import msgspec

from octavo.client.streams import PROOF_TOKENS
from octavo.messages import Abort, GenerateRequest, Hello, TokenDelta

SUSPICIOUS = 2  # strikes


class Recovery:
    def __init__(self, num_origins: int) -> None:
        self._absent = set(range(num_origins))
        self._survivors: list[GenerateRequest] = []
        self._newcomers: list[GenerateRequest] = []  # came while the others waited: behind all of them
        self._groups: deque[list[GenerateRequest]] | None = None  # None: not all have spoken
        self._on_trial: dict[str, int] = {}  # request → tokens that it still has to give

    @property
    def is_over(self) -> bool:
        """Whether everybody was let in: from now on requests need not be brought here."""
        return self._groups is not None and not (self._groups or self._on_trial or self._newcomers)

    @property
    def num_held(self) -> int:
        groups = [self._survivors] if self._groups is None else [*self._groups]
        return sum(map(len, groups)) + len(self._newcomers)

    def hello(self, hello: Hello) -> None:
        self._absent.discard(hello.origin)
        if self._groups is None:
            self._survivors += hello.survivors
        self._newcomers += hello.newcomers

    def hold(self, request: GenerateRequest) -> None:
        self._newcomers.append(request)

    def drop(self, abort: Abort) -> None:
        """For who waits here, what a scheduler's abort is for others."""
        for requests in (self._survivors, self._newcomers, *(self._groups or ())):
            for at, request in enumerate(requests):
                if request.id == abort.request_id:
                    before = request.begun or [[] for _ in range(request.params.n)]
                    begun = [None if abort.index in (-1, index) else tokens for index, tokens in enumerate(before)]
                    is_left = any(tokens is not None for tokens in begun)
                    requests[at : at + 1] = [msgspec.structs.replace(request, begun=begun)] if is_left else []
                    self._close_ranks()
                    return

    def lose(self, origin: int) -> None:
        """Its API process has ended: nobody waits for what it brought."""
        for requests in (self._survivors, self._newcomers, *(self._groups or ())):
            requests[:] = [request for request in requests if request.origin != origin]
        self._close_ranks()

    def _close_ranks(self) -> None:
        """A group whose last has left is none."""
        if self._groups is not None:
            self._groups = deque(group for group in self._groups if group)

    def forget(self, request_id: str) -> None:
        """It is gone: there is nothing to prove any more."""
        self._on_trial.pop(request_id, None)

    def note(self, deltas: Sequence[TokenDelta]) -> None:
        """What those on trial have given. An end is as good as tokens."""
        if not self._on_trial:
            return
        for delta in deltas:
            if delta.request_id in self._on_trial:
                self._on_trial[delta.request_id] -= len(delta.token_ids)
                if self._on_trial[delta.request_id] <= 0 or delta.finish is not None:
                    del self._on_trial[delta.request_id]

    def next_group(self) -> list[GenerateRequest]:
        """Who may go on now. Empty: nobody, yet."""
        if self._absent or self._on_trial:
            return []
        if self._groups is None:
            self._groups = deque(trials(self._survivors))
            self._survivors = []
        if not self._groups:
            newcomers, self._newcomers = self._newcomers, []
            return sorted(newcomers, key=lambda request: request.submitted)
        group = self._groups.popleft()
        if group[0].strikes >= SUSPICIOUS:
            self._on_trial = {request.id: PROOF_TOKENS for request in group}
        return group


def trials(survivors: Sequence[GenerateRequest]) -> list[list[GenerateRequest]]:
    """In groups that follow one another, the last of them everybody who is above suspicion. In a group, oldest first."""
    survivors = sorted(survivors, key=lambda request: request.submitted)
    most = max((request.strikes for request in survivors), default=0)
    worst = [request for request in survivors if request.strikes == most]
    first = worst[len(worst) // 2 :] if most >= SUSPICIOUS else []
    tried = {request.id for request in first}
    second = [request for request in survivors if request.strikes >= SUSPICIOUS and request.id not in tried]
    rest = [request for request in survivors if request.strikes < SUSPICIOUS]
    return [group for group in (first, second, rest) if group]
