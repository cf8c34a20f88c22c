"""GrammarCache: which grammars are ready where steps are computed, which are being compiled, and which may be forgotten. It decides
which compile jobs to start; prepared() reports that one is done.

A request's wait for its grammar does not depend on requests that come after it. It lasts until these are compiled, two at a time, each
in a process that is ended when it has used a few seconds of processor time (sampling/grammar/row_processes.py):

    jobs that are out (two at most) + grammars of earlier requests that have no job yet, each once + its own

A request that leaves takes its grammar off that list, unless its job is out. A grammar that is ready already, or that others wait
for, adds nothing. Where `max_used` grammars are in use, a request that needs another one first waits for k of them to become
unused: k is its place among the requests that lack a slot, counting each grammar once.

No job starts while the grammars in use take `max_bytes` or more. How much one takes is known once it is compiled, so jobs that are
out may take them beyond it, each by what one process may allocate."""

from collections import OrderedDict
from typing import NamedTuple

# Ready grammars without a request that are kept for the next one that asks for the same. Each is a process, mostly of 2 to 7 MB; compiling it
# again takes some ten milliseconds, beside the steps.
MAX_UNUSED = 16
# Their share of `max_bytes`. The one that was used last is kept even if it takes more.
UNUSED_SHARE = 16
MAX_BYTES = 2**31
# Jobs that are out at one time; both run, so that a grammar that takes long does not hold up the next. A job that is out cannot be
# withdrawn, so requests that come and go leave at most these for others to wait for.
MAX_JOBS = 2


class GrammarJob(NamedTuple):
    """Compile `grammar`; those in `forgets` are needed no more."""

    grammar: str  # empty: there is only something to forget
    forgets: list[str]


class Dropped(NamedTuple):
    ready: list[str]  # requests that have a slot now and whose grammar happens to be ready
    jobs: list[GrammarJob]


class GrammarCache:
    def __init__(self, max_used: int, max_unused: int = MAX_UNUSED, max_bytes: int = MAX_BYTES) -> None:
        """`max_used`: grammars of open requests that may be there at one time. More than there are rows, so that some of the
        requests that wait for a row are ready for it; requests beyond that wait until others are over. `max_bytes`: that those
        grammars may take before others wait."""
        self._max_used, self._max_unused, self._max_bytes = max_used, max_unused, max_bytes
        # Open request → its grammar, which is ready, being compiled or still without a job; jobs are started in this order.
        self._held: dict[str, str] = {}
        # Open request → its grammar, for which there is no slot yet; in order of arrival.
        self._later: dict[str, str] = {}
        self._users: dict[str, int] = {}  # grammar → open requests that hold it
        # With a job that is out. If there are fewer than MAX_JOBS, and bytes are left, no held grammar is still without a job.
        self._compiling: set[str] = set()
        self._ready: dict[str, int] = {}  # grammar → bytes that it takes
        self._used_bytes = self._unused_bytes = 0  # of the ready ones
        self._unused: OrderedDict[str, None] = OrderedDict()  # of the ready ones; longest unused first

    def hold(self, request_id: str, grammar: str) -> GrammarJob | None:
        """Keep the grammar for a request, until drop(). Returns the job to start, if there is one."""
        if grammar not in self._users and len(self._users) >= self._max_used:
            self._later[request_id] = grammar
            return None
        self._held[request_id] = grammar
        self._users[grammar] = self._users.get(grammar, 0) + 1
        if self._users[grammar] > 1:
            return None
        if grammar in self._unused:
            del self._unused[grammar]
            self._unused_bytes -= self._ready[grammar]
            self._used_bytes += self._ready[grammar]
        return self._job(grammar) if self._lacks(grammar) and self._may_start else None

    def is_ready(self, request_id: str) -> bool:
        """Whether this request's grammar is."""
        return self._held.get(request_id) in self._ready

    def prepared(self, grammar: str, num_bytes: int) -> GrammarJob | None:
        """Its job is done. `num_bytes`: that it takes. Returns the next one to start, if there is one."""
        self._compiling.discard(grammar)
        self._ready[grammar] = num_bytes
        if grammar in self._users:
            self._used_bytes += num_bytes
        else:  # the requests that wanted it have left
            self._keep_unused(grammar)
        wanted = self._next_wanted()
        return self._forgetting() if wanted is None else self._job(wanted)

    def drop(self, request_id: str) -> Dropped:
        """The request is over: another that waits for a slot may have it."""
        dropped = Dropped([], [])
        if self._later.pop(request_id, None) is not None:
            return dropped
        grammar = self._held.pop(request_id)
        self._users[grammar] -= 1
        if not self._users[grammar]:
            del self._users[grammar]
            if grammar in self._ready:
                self._used_bytes -= self._ready[grammar]
                self._keep_unused(grammar)
                while (wanted := self._next_wanted()) is not None:  # those that waited for bytes
                    dropped.jobs.append(self._job(wanted))
        if self._later and len(self._users) < self._max_used:
            later, self._later = self._later, {}
            for other, its_grammar in later.items():  # hold() puts back those that find no slot, in their order
                job = self.hold(other, its_grammar)
                if job is not None:
                    dropped.jobs.append(job)
                elif self.is_ready(other):
                    dropped.ready.append(other)
        if (job := self._forgetting()) is not None:
            dropped.jobs.append(job)
        return dropped

    @property
    def _may_start(self) -> bool:
        return len(self._compiling) < MAX_JOBS and self._used_bytes < self._max_bytes

    def _next_wanted(self) -> str | None:
        """The next grammar to compile; None: none is wanted, or no job may start now."""
        return next((held for held in self._held.values() if self._lacks(held)), None) if self._may_start else None

    def _lacks(self, grammar: str) -> bool:
        return grammar not in self._ready and grammar not in self._compiling

    def _keep_unused(self, grammar: str) -> None:
        self._unused[grammar] = None
        self._unused_bytes += self._ready[grammar]

    def _job(self, grammar: str) -> GrammarJob:
        forgets = self._forget(self._max_unused)
        self._compiling.add(grammar)
        return GrammarJob(grammar, forgets)

    def _forgetting(self) -> GrammarJob | None:
        """A job that only forgets, where those that no request uses take too many bytes. One too many of them waits for the next
        job."""
        forgets = self._forget(len(self._unused))
        return GrammarJob("", forgets) if forgets else None

    def _forget(self, max_unused: int) -> list[str]:
        """Choose what to forget, longest unused first, until as many and as many bytes are left as may be."""
        forgets: list[str] = []
        while len(self._unused) > max_unused or (
            len(self._unused) > 1 and self._unused_bytes > self._max_bytes // UNUSED_SHARE
        ):
            grammar, _ = self._unused.popitem(last=False)
            self._unused_bytes -= self._ready.pop(grammar)
            forgets.append(grammar)
        return forgets
