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


class _Count:
    """Requests and their prompt tokens."""

    def __init__(self) -> None:
        self.num = self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        self.num += 1
        self.num_tokens += num_tokens

    def remove(self, num_tokens: int) -> None:
        self.num -= 1
        self.num_tokens -= num_tokens


class InflightLimit:
    def __init__(self, heartbeat: Heartbeat, origin: int, max_requests: int, max_tokens: int, num_servers: int) -> None:
        """`max_requests`, `max_tokens`: requests that may wait, and their prompt tokens, in all API processes together; 0: no
        limit."""
        self._heartbeat, self._origin, self._num_servers = heartbeat, origin, num_servers
        self._max_requests, self._max_tokens = max_requests, max_tokens
        # → (submitted, prompt tokens, number of the part), oldest first
        self._sent: OrderedDict[str, tuple[float, int, int]] = OrderedDict()
        # Counted twice, as in QueueLimit: the first parts of responses, and all parts.
        self._sent_firsts, self._sent_all = _Count(), _Count()
        # While the engine is away: requests without a token. A request that ends is noticed at the next count.
        self._counted = float("-inf")  # time of the last count
        self._quiet_firsts, self._quiet_all = _Count(), _Count()  # prompt tokens: of those beyond _num_rows
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
            count = self._quiet_all if request.part else self._quiet_firsts
            waiting, tokens = count.num - self._num_rows, count.num_tokens
        else:
            share = 1
            count = self._sent_all if request.part else self._sent_firsts
            waiting, tokens = count.num - num_rows, count.num_tokens
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
        self._sent[request.id] = (request.submitted, num_tokens, request.part)
        for count in self._counts(request.part):
            count.add(num_tokens)
        for count in (self._quiet_all,) if request.part else (self._quiet_firsts, self._quiet_all):
            count.add(num_tokens if count.num >= self._num_rows else 0)

    def drop(self, request_id: str) -> None:
        """Stop counting a request that has ended, whether or not an engine has seen it."""
        if (sent := self._sent.pop(request_id, None)) is not None:
            _, num_tokens, part = sent
            for count in self._counts(part):
                count.remove(num_tokens)

    def was_taken(self, request: GenerateRequest) -> bool:
        """Whether the current or an earlier engine has taken the request in. A later engine must not refuse it."""
        return self._heartbeat.has_taken(self._origin, request.submitted)

    def _drop_taken(self) -> None:
        """Stop counting the requests that the engine has taken in."""
        while self._sent:
            request_id, (submitted, _, _) = next(iter(self._sent.items()))
            if not self._heartbeat.has_taken(self._origin, submitted):
                return
            self.drop(request_id)

    def _counts(self, part: int) -> tuple[_Count, ...]:
        return (self._sent_all,) if part else (self._sent_firsts, self._sent_all)

    def _is_silent(self) -> bool:
        return time.monotonic_ns() - self._heartbeat.beat > AWAY_SECONDS * 1e9

    def _count(self, num_rows: int, quiet: Callable[[], Collection[GenerateRequest]]) -> None:
        now = time.monotonic()
        if now - self._counted >= RECOUNT_SECONDS or num_rows != self._num_rows:
            requests = quiet()
            self._counted, self._num_rows = now, num_rows
            self._quiet_firsts, self._quiet_all = _Count(), _Count()
            for count, counted in (
                (self._quiet_firsts, [request for request in requests if not request.part]),
                (self._quiet_all, requests),
            ):
                for request in counted:
                    count.add(len(request.prompt_ids) if count.num >= num_rows else 0)
