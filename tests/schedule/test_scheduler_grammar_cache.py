"""How long a request waits for its grammar, as bounds that do not depend on later requests: those of octavo/schedule/grammar_cache.py.

ready   after so many more have been made ready: those ordered, those that older requests need and that are not ordered, its own
room    where too many are in use: after so many more are used no longer: those that older requests have no room for, its own"""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.schedule.grammar_cache import MAX_JOBS, UNUSED_SHARE, GrammarCache, GrammarJob


class Watched:
    """A cache, whose jobs are carried out one after the other, and what each request was promised when it came."""

    def __init__(self, max_used: int, max_unused: int) -> None:
        self.grammar_cache = GrammarCache(max_used, max_unused)
        self.making: deque[str] = deque()
        self.num_made = self.num_freed = self.num_requests = 0
        self.closest = 1000  # promises that were left when one was kept
        self.open: dict[str, str] = {}
        self.made_by: dict[str, int] = {}  # request → its grammar is ready when so many have been made
        self.freed_by: dict[str, int] = {}  # request → there is room for its grammar when so many are used no more

    def come(self, grammar: str) -> str:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        lacks_room = [*self.grammar_cache._later.values()]
        job = self.grammar_cache.hold(name, grammar)
        self.open[name] = grammar
        assert job is None or (job.grammar == grammar and not self.grammar_cache.is_ready(name))
        self._begin([job])
        if name in self.grammar_cache._later:
            self.freed_by[name] = self.num_freed + len({*lacks_room, grammar})
        else:
            self._promise(name)
        self._look()
        return name

    def go(self, name: str) -> None:
        grammar, held = self.open.pop(name), {*self.grammar_cache._held} - {name}
        self.num_freed += name in self.grammar_cache._held and all(self.open[other] != grammar for other in held)
        self.made_by.pop(name, None)
        self.freed_by.pop(name, None)
        ready, jobs = self.grammar_cache.drop(name)
        self._begin(jobs)
        let_in = [other for other in self.grammar_cache._held if other not in held]
        assert ready == [other for other in let_in if self.grammar_cache.is_ready(other)]
        for other in let_in:
            del self.freed_by[other]
            self._promise(other)
        self._look()

    def make(self) -> None:
        if self.making:
            self.num_made += 1
            self._begin([self.grammar_cache.prepared(self.making.popleft(), 0)])
            self._look()

    def _promise(self, name: str) -> None:
        """The bound, counted apart from how the cache goes about it."""
        grammar, ahead = self.open[name], []
        if self.grammar_cache.is_ready(name):
            return
        for other, its in self.grammar_cache._held.items():
            if other == name:
                break
            ahead.append(its)
        missing = {*ahead, grammar} - {*self.making} - self.grammar_cache._ready.keys()
        self.made_by[name] = self.num_made + len(self.making) + len(missing)

    def _begin(self, jobs: list[GrammarJob | None]) -> None:
        self.making += [job.grammar for job in jobs if job is not None and job.grammar]

    def _look(self) -> None:
        assert len(self.making) <= MAX_JOBS
        for name, bound in [*self.made_by.items()]:
            if self.grammar_cache.is_ready(name):
                self.closest = min(self.closest, bound - self.num_made)
                del self.made_by[name]
            assert self.num_made < bound or self.grammar_cache.is_ready(name), (
                "all that stood before it are made, and it waits"
            )
        for bound in self.freed_by.values():
            assert self.num_freed < bound, "there is room for it, and it does not have it"


EVENTS = st.lists(st.tuples(st.sampled_from("ccccgmmm"), st.integers(0, 50)), max_size=80)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), EVENTS)
def test_whoever_waits_for_a_grammar_has_it_in_time(max_used, max_unused, events):
    watched = Watched(max_used, max_unused)
    for event, number in events:
        match event:
            case "c":
                watched.come("abcdefgh"[number % 8])
            case "g" if watched.open:
                watched.go([*watched.open][number % len(watched.open)])
            case "m":
                watched.make()
    while watched.making:
        watched.make()
    while watched.open:  # the oldest end, until there was room for all
        watched.go(next(iter(watched.open)))
        while watched.making:
            watched.make()
    assert not watched.made_by and not watched.freed_by


def test_the_bound_is_met():
    """Each with a grammar of its own, and nobody leaves: each waits for exactly those before it."""
    watched = Watched(100, 0)
    for number in range(10):
        watched.come(f"grammar {number}")
        assert watched.made_by[f"r{number + 1}"] == number + 1
    while watched.making:
        watched.make()
    assert watched.closest == 0 and watched.num_made == 10


LIMIT = 160
SIZES = {"a": 3, "b": 9, "c": 11, "d": 30, "e": 60, "f": 100, "g": 159, "h": 200}
"""Bytes of each grammar. Unused ones may take ten."""


class Sized:
    """A cache with a limit on bytes, and the processes that carrying out its jobs leaves."""

    def __init__(self) -> None:
        self.cache = GrammarCache(100, 4, LIMIT)
        self.open: dict[str, str] = {}
        self.alive: set[str] = set()
        self.making: deque[str] = deque()
        self.num_requests = 0

    def come(self, grammar: str) -> None:
        self.num_requests += 1
        self.open[name := f"r{self.num_requests}"] = grammar
        self._begin([self.cache.hold(name, grammar)])

    def go(self, name: str) -> None:
        del self.open[name]
        self._begin(self.cache.drop(name).jobs)

    def make(self) -> None:
        grammar = self.making.popleft()
        self.alive.add(grammar)
        self._begin([self.cache.prepared(grammar, SIZES[grammar])])

    def _begin(self, jobs: list[GrammarJob | None]) -> None:
        used = {*self.open.values()}
        for job in filter(None, jobs):
            assert not used & {*job.forgets} and {*job.forgets} <= self.alive
            self.alive -= {*job.forgets}
            if job.grammar:
                assert self.used_bytes < LIMIT and job.grammar in used and job.grammar not in self.alive
                self.making.append(job.grammar)
        assert self.used_bytes < LIMIT + MAX_JOBS * max(SIZES.values())
        missing = used - self.alive - {*self.making}
        assert not missing or len(self.making) == MAX_JOBS or self.used_bytes >= LIMIT, "it waits for nothing"
        unused = [*self.cache._unused]
        assert {*unused} == self.alive - used, "each is counted"
        assert len(unused) <= 1 or sum(SIZES[grammar] for grammar in unused) <= LIMIT // UNUSED_SHARE
        for name, grammar in self.open.items():
            assert self.cache.is_ready(name) == (grammar in self.alive)

    @property
    def used_bytes(self) -> int:
        return sum(SIZES[grammar] for grammar in self.alive & {*self.open.values()})


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_grammars_keep_to_their_bytes_and_none_waits_without_need(events):
    sized = Sized()
    for event, number in events:
        match event:
            case "c":
                sized.come("abcdefgh"[number % 8])
            case "g" if sized.open:
                sized.go([*sized.open][number % len(sized.open)])
            case "m" if sized.making:
                sized.make()
    while sized.open:  # the oldest that is ready ends, until all were
        while sized.making:
            sized.make()
        sized.go(next(name for name in sized.open if sized.cache.is_ready(name)))
    assert len(sized.alive) <= 4


def test_a_large_grammar_goes_once_others_are_unused_after_it():
    sized = Sized()
    for grammar in "ha":
        sized.come(grammar)
        while sized.making:
            sized.make()
        sized.go(next(iter(sized.open)))
        assert "h" in sized.alive or grammar == "a", "it is likely to come again"
    assert sized.alive == {"a"}, "the next job need not be waited for"


def test_a_grammar_waits_until_the_others_take_less():
    sized = Sized()
    for grammar in "fe":
        sized.come(grammar)
        sized.make()
    assert sized.used_bytes == LIMIT
    sized.come("a")
    assert not sized.making
    sized.go("r2")
    assert [*sized.making] == ["a"] and sized.alive == {"f", "e"}, (
        "its bytes are free for others before it is forgotten"
    )
