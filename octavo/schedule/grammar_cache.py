"""GrammarCache: which grammars stand ready where steps are computed, which are being made ready, and which may go.
Knows nothing of grammars, nor of who makes them ready: it says what is to be done, and is told when it was.

How long a request waits for its grammar, whatever comes after it: until as many as these are made ready, one after the other:

    those that are ordered (two at most) + those of requests that came before it, which are not ordered yet, each once + its own

Whoever leaves takes its grammar off that list, unless it is ordered. A grammar that is ready already, or that others wait for, adds
nothing. Where `max_used` grammars are in use, a request that needs another one waits first until so many of them are used no more
as it would be the next for: one for each grammar that those before it lack room for, and one for its own."""

from collections import OrderedDict
from typing import NamedTuple

MAX_UNUSED = 64  # that are kept for the next request that asks for the same
# Orders that are out at one time: one is carried out, one lies ready so that its turn comes at once. What is out cannot be taken
# back when nobody wants it any more, so whoever comes and goes leaves no more than these for others to wait for.
MAX_ORDERED = 2


class Order(NamedTuple):
    """Make `grammar` ready; those in `forgets` are needed no more."""

    grammar: str
    forgets: list[str]


class GrammarCache:
    def __init__(self, max_used: int, max_unused: int = MAX_UNUSED) -> None:
        """`max_used`: grammars of open requests that may be there at one time; more than there are rows, so that some of those
        who wait for a row are ready for it. Requests beyond that wait until others are over."""
        self.orders: list[Order] = []  # for whoever carries them out, in this order
        self._max_used, self._max_unused = max_used, max_unused
        # Open request → its grammar, which is there, on its way or to be ordered; in this order, of what is not ordered yet.
        self._held: dict[str, str] = {}
        # Open request → its grammar, for which there is no room yet; in order of arrival.
        self._later: dict[str, str] = {}
        self._users: dict[str, int] = {}  # grammar → open requests that hold it
        # Ordered and not ready yet. Fewer than may be: nothing that is held is still to be ordered.
        self._ordered: set[str] = set()
        self._ready: set[str] = set()
        self._unused: OrderedDict[str, None] = OrderedDict()  # of the ready ones; longest unused first

    def hold(self, request_id: str, grammar: str) -> bool:
        """From now until drop(). True: it is ready."""
        if grammar not in self._users and len(self._users) >= self._max_used:
            self._later[request_id] = grammar
            return False
        self._held[request_id] = grammar
        self._users[grammar] = self._users.get(grammar, 0) + 1
        if self._users[grammar] == 1:
            self._unused.pop(grammar, None)
            if self._lacks(grammar) and len(self._ordered) < MAX_ORDERED:
                self._order(grammar)
        return grammar in self._ready

    def is_ready(self, request_id: str) -> bool:
        """Whether that of this request is."""
        return self._held.get(request_id) in self._ready

    def prepared(self, grammar: str) -> None:
        self._ordered.discard(grammar)
        self._ready.add(grammar)
        if grammar not in self._users:  # whoever wanted it has left
            self._unused[grammar] = None
        if len(self._ordered) < MAX_ORDERED:
            wanted = next((held for held in self._held.values() if self._lacks(held)), None)
            if wanted is not None:
                self._order(wanted)

    def drop(self, request_id: str) -> list[str]:
        """The request is over. → those for which there is room now, and whose grammar happens to be ready."""
        if self._later.pop(request_id, None) is not None:
            return []
        grammar = self._held.pop(request_id)
        self._users[grammar] -= 1
        if not self._users[grammar]:
            del self._users[grammar]
            if grammar in self._ready:
                self._unused[grammar] = None
        if not self._later or len(self._users) >= self._max_used:
            return []
        later, self._later = self._later, {}
        # Who finds no room is put back, in its order.
        return [other for other, its_grammar in later.items() if self.hold(other, its_grammar)]

    def _lacks(self, grammar: str) -> bool:
        return grammar not in self._ready and grammar not in self._ordered

    def _order(self, grammar: str) -> None:
        forgets: list[str] = []
        while len(self._unused) > self._max_unused:
            forgets.append(self._unused.popitem(last=False)[0])
        self._ready.difference_update(forgets)
        self._ordered.add(grammar)
        self.orders.append(Order(grammar, forgets))
