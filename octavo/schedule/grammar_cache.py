"""GrammarCache: which grammars are ready where steps are computed, which are being compiled, and which may be forgotten. It decides
which compile jobs to start; prepared() reports that one is done.

A request's wait for its grammar does not depend on requests that come after it. It lasts until these are compiled, two at a time, each
in a process that is ended when it has used a few seconds of processor time (sampling/grammar/masks.py):

    jobs that are out (two at most) + grammars of earlier requests that have no job yet, each once + its own

A request that leaves takes its grammar off that list, unless its job is out. A grammar that is ready already, or that others wait
for, adds nothing. Where `max_used` grammars are in use, a request that needs another one first waits for k of them to become
unused: k is its place among the requests that lack a slot, counting each grammar once."""

from collections import OrderedDict
from typing import NamedTuple

# Ready grammars without a request that are kept for the next one that asks for the same. Each is a process of 2 to 7 MB; compiling it
# again takes some ten milliseconds, beside the steps.
MAX_UNUSED = 16
# Jobs that are out at one time; both run, so that a grammar that takes long does not hold up the next. A job that is out cannot be
# withdrawn, so requests that come and go leave at most these for others to wait for.
MAX_JOBS = 2


class GrammarJob(NamedTuple):
    """Compile `grammar`; those in `forgets` are needed no more."""

    grammar: str
    forgets: list[str]


class Dropped(NamedTuple):
    ready: list[str]  # requests that have a slot now and whose grammar happens to be ready
    jobs: list[GrammarJob]


class GrammarCache:
    def __init__(self, max_used: int, max_unused: int = MAX_UNUSED) -> None:
        """`max_used`: grammars of open requests that may be there at one time. More than there are rows, so that some of the
        requests that wait for a row are ready for it; requests beyond that wait until others are over."""
        self._max_used, self._max_unused = max_used, max_unused
        # Open request → its grammar, which is ready, being compiled or still without a job; jobs are started in this order.
        self._held: dict[str, str] = {}
        # Open request → its grammar, for which there is no slot yet; in order of arrival.
        self._later: dict[str, str] = {}
        self._users: dict[str, int] = {}  # grammar → open requests that hold it
        # With a job that is out. If there are fewer than MAX_JOBS, no held grammar is still without a job.
        self._compiling: set[str] = set()
        self._ready: set[str] = set()
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
        self._unused.pop(grammar, None)
        return self._job(grammar) if self._lacks(grammar) and len(self._compiling) < MAX_JOBS else None

    def is_ready(self, request_id: str) -> bool:
        """Whether this request's grammar is."""
        return self._held.get(request_id) in self._ready

    def prepared(self, grammar: str) -> GrammarJob | None:
        """Its job is done. Returns the next one to start, if there is one."""
        self._compiling.discard(grammar)
        self._ready.add(grammar)
        if grammar not in self._users:  # the requests that wanted it have left
            self._unused[grammar] = None
        if len(self._compiling) >= MAX_JOBS:
            return None
        wanted = next((held for held in self._held.values() if self._lacks(held)), None)
        return None if wanted is None else self._job(wanted)

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
                self._unused[grammar] = None
        if not self._later or len(self._users) >= self._max_used:
            return dropped
        later, self._later = self._later, {}
        for other, its_grammar in later.items():  # hold() puts back those that find no slot, in their order
            job = self.hold(other, its_grammar)
            if job is not None:
                dropped.jobs.append(job)
            elif self.is_ready(other):
                dropped.ready.append(other)
        return dropped

    def _lacks(self, grammar: str) -> bool:
        return grammar not in self._ready and grammar not in self._compiling

    def _job(self, grammar: str) -> GrammarJob:
        forgets: list[str] = []
        while len(self._unused) > self._max_unused:
            forgets.append(self._unused.popitem(last=False)[0])
        self._ready.difference_update(forgets)
        self._compiling.add(grammar)
        return GrammarJob(grammar, forgets)
