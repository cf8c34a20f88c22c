"""Recovery: decides which requests a new engine takes over from its predecessor, and in what order. A first engine uses it too.

API processes send the requests that they hold with their Hello. The engine waits for all of them, so that requests are taken in
by order of arrival. Requests that held a row in two engines when those ended, without progress in between, are suspects: one of them
may be the cause. Suspects run before the others continue, the younger half first. If the engine ends again, that half are the
suspects of the next one, and so on, until one request is left alone, which its API process then fails."""

from collections import deque
from collections.abc import Sequence

import msgspec

from octavo.client.streams import PROOF_TOKENS, SUSPICIOUS
from octavo.messages import Abort, GenerateRequest, Hello, TokenDelta


class Recovery:
    def __init__(self, num_origins: int) -> None:
        self._absent = set(range(num_origins))
        self._survivors: list[GenerateRequest] = []
        self._newcomers: list[GenerateRequest] = []  # no engine has taken them in: they come after all survivors
        self._waves: deque[list[GenerateRequest]] | None = None  # None: not all API processes have sent their Hello
        self._on_trial: dict[str, int] = {}  # suspect that runs now → tokens that it must still produce

    @property
    def is_over(self) -> bool:
        """Whether all requests have been handed out: new ones need not pass through here any more."""
        return self._waves is not None and not (self._waves or self._on_trial or self._newcomers)

    def hello(self, hello: Hello) -> None:
        self._absent.discard(hello.origin)
        if self._waves is None:
            self._survivors += hello.survivors
        self._newcomers += hello.newcomers

    def hold(self, request: GenerateRequest) -> None:
        self._newcomers.append(request)

    def drop(self, abort: Abort) -> None:
        """Abort a request that waits here, as the scheduler's abort does for the others."""
        for requests in (self._survivors, self._newcomers, *(self._waves or ())):
            for at, request in enumerate(requests):
                if request.id == abort.request_id:
                    before = request.begun or [[] for _ in range(request.params.n)]
                    begun = [None if abort.index in (-1, index) else tokens for index, tokens in enumerate(before)]
                    is_left = any(tokens is not None for tokens in begun)
                    requests[at : at + 1] = [msgspec.structs.replace(request, begun=begun)] if is_left else []
                    self._drop_empty_waves()
                    return

    def lose(self, origin: int) -> None:
        """Drop the requests of an API process that has ended."""
        for requests in (self._survivors, self._newcomers, *(self._waves or ())):
            requests[:] = [request for request in requests if request.origin != origin]
        self._drop_empty_waves()

    def _drop_empty_waves(self) -> None:
        """Remove empty waves."""
        if self._waves is not None:
            self._waves = deque(wave for wave in self._waves if wave)

    def forget(self, request_id: str) -> None:
        """Take a request that is gone off the trial."""
        self._on_trial.pop(request_id, None)

    def note(self, deltas: Sequence[TokenDelta]) -> None:
        """Count the tokens of the requests on trial. A request that finishes passes."""
        if not self._on_trial:
            return
        for delta in deltas:
            if delta.request_id in self._on_trial:
                self._on_trial[delta.request_id] -= len(delta.token_ids)
                if self._on_trial[delta.request_id] <= 0 or delta.finish is not None:
                    del self._on_trial[delta.request_id]

    def next_wave(self) -> list[GenerateRequest]:
        """Return the requests that may run now. Empty: none yet."""
        if self._absent or self._on_trial:
            return []
        if self._waves is None:
            self._waves = deque(split_into_waves(self._survivors))
            self._survivors = []
        if not self._waves:
            newcomers, self._newcomers = self._newcomers, []
            return sorted(newcomers, key=lambda request: request.submitted)
        wave = self._waves.popleft()
        if wave[0].strikes >= SUSPICIOUS:
            self._on_trial = {request.id: PROOF_TOKENS for request in wave}
        return wave


def split_into_waves(survivors: Sequence[GenerateRequest]) -> list[list[GenerateRequest]]:
    """Split survivors into the waves to run one after another; the last one holds all that are not suspects. Within a wave,
    oldest first."""
    survivors = sorted(survivors, key=lambda request: request.submitted)
    most = max((request.strikes for request in survivors), default=0)
    worst = [request for request in survivors if request.strikes == most]
    first = worst[len(worst) // 2 :] if most >= SUSPICIOUS else []
    tried = {request.id for request in first}
    second = [request for request in survivors if request.strikes >= SUSPICIOUS and request.id not in tried]
    rest = [request for request in survivors if request.strikes < SUSPICIOUS]
    return [wave for wave in (first, second, rest) if wave]
