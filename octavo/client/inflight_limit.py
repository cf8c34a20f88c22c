"""InflightLimit: bounds the requests of one API process that no engine has taken in yet, and refuses the rest.

An engine checks its queue limit only when it takes requests in. Requests sent while it computes, hangs or is restarted would have
no bound. While the engine sends heartbeats, a process may have as many requests in flight as an idle engine would accept: the
engine would refuse the rest. While it does not, all requests without a token count, and each process has its share of the queue
limits."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection

from octavo.admission.queue_limit import retry_seconds, too_much
from octavo.errors import Overloaded
from octavo.ipc.heartbeat import Heartbeat
from octavo.messages import GenerateRequest

AWAY_SECONDS = 1.5
"""An idle engine sends a heartbeat every second, a busy one in each step. One that is silent for longer counts as away."""
RECOUNT_SECONDS = 0.1
"""Time between two counts of the requests without a token: counting many takes a while."""


class InflightLimit:
    def __init__(self, heartbeat: Heartbeat, origin: int, max_requests: int, max_tokens: int, num_servers: int) -> None:
        """`max_requests`, `max_tokens`: requests that may wait, and their prompt tokens, in all API processes together; 0: no
        limit."""
        self._heartbeat, self._origin, self._num_servers = heartbeat, origin, num_servers
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._sent: OrderedDict[str, tuple[float, int]] = OrderedDict()  # → (submitted, prompt tokens), oldest first
        self._num_sent_tokens = 0
        # While the engine is away: requests without a token. A request that ends is noticed at the next count.
        self._counted = float("-inf")  # time of the last count
        self._num_quiet = 0
        self._num_quiet_tokens = 0  # prompt tokens of those beyond _num_rows
        self._num_rows = 0  # this process's share of the engine's rows

    def check(
        self,
        request: GenerateRequest,
        num_rows: int,
        is_recovering: bool,
        quiet: Callable[[], Collection[GenerateRequest]],
    ) -> None:
        """Raise Overloaded if one more request is too much. `quiet`: this process's requests without a token, oldest first."""
        if not (self._max_requests or self._max_tokens):
            return
        self._drop_taken()
        if is_away := is_recovering or self._is_silent():
            share = self._num_servers
            self._count(-(-num_rows // share), quiet)
            waiting, tokens = self._num_quiet - self._num_rows, self._num_quiet_tokens
        else:
            share = 1
            waiting, tokens = len(self._sent) - num_rows, self._num_sent_tokens
        if waiting <= 0:
            return
        most = (-(-self._max_requests // share), -(-self._max_tokens // share))
        if (excess := too_much(waiting, tokens, len(request.prompt_ids), *most)) is None:
            return
        where = f", and each of {share} API processes has a share of the limit" if share > 1 else ""
        why = f"; the engine does not respond{where}" if is_away else ""
        raise Overloaded(excess.words + why, retry_seconds(waiting * share * self._heartbeat.seconds_per_request))

    def hold(self, request: GenerateRequest) -> None:
        """Count a request that was checked and is now sent."""
        num_tokens = len(request.prompt_ids)
        self._sent[request.id] = (request.submitted, num_tokens)
        self._num_sent_tokens += num_tokens
        self._num_quiet += 1
        if self._num_quiet > self._num_rows:
            self._num_quiet_tokens += num_tokens

    def drop(self, request_id: str) -> None:
        """Stop counting a request that has ended, whether or not an engine has seen it."""
        if (sent := self._sent.pop(request_id, None)) is not None:
            self._num_sent_tokens -= sent[1]

    def was_taken(self, request: GenerateRequest) -> bool:
        """Whether the current or an earlier engine has taken the request in. A later engine must not refuse it."""
        return self._heartbeat.has_taken(self._origin, request.submitted)

    def _drop_taken(self) -> None:
        """Stop counting the requests that the engine has taken in."""
        while self._sent:
            submitted, num_tokens = next(iter(self._sent.values()))
            if not self._heartbeat.has_taken(self._origin, submitted):
                return
            self._sent.popitem(last=False)
            self._num_sent_tokens -= num_tokens

    def _is_silent(self) -> bool:
        return time.monotonic_ns() - self._heartbeat.beat > AWAY_SECONDS * 1e9

    def _count(self, num_rows: int, quiet: Callable[[], Collection[GenerateRequest]]) -> None:
        now = time.monotonic()
        if now - self._counted >= RECOUNT_SECONDS or num_rows != self._num_rows:
            lens = [len(request.prompt_ids) for request in quiet()]
            self._counted, self._num_rows = now, num_rows
            self._num_quiet, self._num_quiet_tokens = len(lens), sum(lens[num_rows:])
