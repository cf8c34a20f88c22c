"""Router: chooses a replica for each request, and follows what replicas report. It holds no socket and reads no clock: its owner
passes on messages, and tells it when replicas come and go."""

from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from typing import NamedTuple

from octavo.cache.page_keys import adapter_root, keys_of
from octavo.messages import GenerateRequest, PageEvents, PageSnapshot, ReplicaLoad
from octavo.messages.params import prefix_space
from octavo.routing.load import UNMEASURED_SECONDS_PER_TOKEN, Load
from octavo.routing.policy import Option, Policy, Reason, prefix
from octavo.routing.prefix_index import PrefixIndex, page_ids

SATURATION_SECONDS = 2.0
MAX_ADAPTERS = 100_000  # whose ids are kept


class Choice(NamedTuple):
    """Where a request goes."""

    replica: int
    reason: Reason
    num_held: int  # prompt tokens that are expected in the replica's prefix cache
    seconds: float  # of work that waits there before it


class PageScheme(NamedTuple):
    """How a replica names its pages. Replicas of one fingerprint name them alike."""

    root: bytes
    page_size: int


class Router:
    def __init__(
        self,
        root: bytes,
        page_size: int,
        policy: Policy = prefix,
        saturation: float = SATURATION_SECONDS,
        origin: int = 0,
        num_pages: int = 0,
        page_keys: Callable[[bytes, list[int], int], list[bytes]] = keys_of,
    ) -> None:
        """`root`, `page_size`: of the page keys of replicas that do not say otherwise. `saturation`: seconds of work.
        `origin`: this router's number among several; they begin their turns at different replicas. `num_pages`: of the
        whole fleet, to make room at once. `page_keys`: as cache.page_keys.keys_of(); a simulation has keys of its
        own."""
        self.index = PrefixIndex(num_pages)
        self._pages = PageScheme(root, page_size)
        self._page_keys = page_keys
        self._schemes: dict[int, PageScheme] = {}  # by replica
        self._policy, self._saturation, self._origin = policy, saturation, origin
        self._loads: dict[int, Load] = {}
        self._chosen: dict[int, int] = {}  # replica → the choice at which it was chosen last
        self._num_choices = 0
        self._adapters: dict[str, str] = {}  # AdapterRef.key → id of its content, as replicas found it

    # ── replicas ──

    def join(self, replica: int, epoch: int, scheme: PageScheme | None = None) -> None:
        """A replica takes requests from now on. One that was there before is another now: what it held, and what was sent there, is gone."""
        assert replica >= 0
        self.index.open(replica, epoch)
        self._loads[replica] = Load()
        self._schemes[replica] = scheme or self._pages
        # Before its first request a replica's place among the others is by its number and the router's, so that several routers do not
        # begin with the same one.
        digest = blake2b(b"%d %d" % (self._origin, replica), digest_size=4).digest()
        self._chosen.setdefault(replica, -1 - (int.from_bytes(digest) << 32 | replica))

    def leave(self, replica: int) -> None:
        """It gets no more requests, and what it still says is not believed."""
        self.index.close(replica)
        self._loads.pop(replica, None)
        self._schemes.pop(replica, None)
        self._chosen.pop(replica, None)

    @property
    def replicas(self) -> list[int]:
        return list(self._loads)

    def take_events(self, events: PageEvents) -> bool:
        """False: they are of another epoch, or came before."""
        is_new = self.index.apply(events)
        if is_new:
            self._take_load(events.replica, events.load)
            if events.adapters:
                self._take_adapters(events.adapters)
        return is_new

    def take_snapshot(self, snapshot: PageSnapshot) -> bool:
        is_new = self.index.apply_snapshot(snapshot)
        if is_new:
            self._take_load(snapshot.replica, snapshot.load)
            self._take_adapters(snapshot.adapters)
        return is_new

    def _take_adapters(self, found: dict[str, str]) -> None:
        self._adapters |= found
        while len(self._adapters) > MAX_ADAPTERS:
            del self._adapters[next(iter(self._adapters))]

    def _take_load(self, replica: int, load: ReplicaLoad) -> None:
        self._loads[replica].take(load, self._origin)

    def seconds_of(self, replica: int) -> float:
        """Seconds of work that wait at a replica."""
        return self._loads[replica].num_tokens * self._seconds_per_token(replica, self._slowest())

    # ── requests ──

    def space_of(self, request: GenerateRequest) -> str:
        """What the request's page keys start from, beside a replica's root: its adapter and its salt. Until a replica has read the adapter, no
        page with it exists: a name of its own then holds requests with equal prefixes together."""
        adapter = "" if request.adapter is None else self._adapters.get(request.adapter.key, f"?{request.adapter.key}")
        return prefix_space(adapter, request.params.prefix_salt)

    def route(
        self, request_id: str, prompt: list[int], among: Collection[int] | None = None, space: str = ""
    ) -> Choice | None:
        """Choose a replica. Its work counts there at once. `among`: those that may be chosen; None: all. `space`: as of space_of(). None: there
        is none."""
        loads = self._loads if among is None else {each: self._loads[each] for each in among if each in self._loads}
        if not loads:
            return None
        schemes = self._schemes
        by_scheme = {
            scheme: page_ids(self._page_keys(adapter_root(scheme.root, space), prompt, scheme.page_size))
            for scheme in {*schemes.values()}
        }
        held: dict[int, int] = {}
        for pages in by_scheme.values():
            held |= self.index.held(pages)  # no page has a name in two schemes
        option, reason = self._policy(self._options(len(prompt), held, loads), self._saturation)
        self._num_choices += 1
        self._chosen[option.replica] = self._num_choices
        scheme = schemes[option.replica]
        num_held = option.num_held * scheme.page_size
        self._loads[option.replica].send(len(prompt) - num_held)
        self.index.expect(request_id, by_scheme[scheme], option.replica, option.num_held)
        return Choice(option.replica, reason, num_held, option.seconds)

    def settle(self, request_id: str) -> None:
        """Its first token has come, or it has ended. Until then, its pages count as held where it was sent."""
        self.index.settle(request_id)

    def _options(self, prompt_len: int, held: dict[int, int], loads: Mapping[int, Load]) -> list[Option]:
        slowest, schemes, chosen = self._slowest(), self._schemes, self._chosen
        new = tuple.__new__  # half the time of calling Option; a decision over many replicas makes many
        options = []
        for replica, load in loads.items():
            pace = load.report.seconds_per_token or slowest
            num_held = held.get(replica, 0)
            own = (prompt_len - num_held * schemes[replica].page_size if num_held else prompt_len) * pace
            options.append(
                new(Option, (load.num_tokens * pace, load.num_open, chosen[replica], own, num_held, replica))
            )
        return options

    def _seconds_per_token(self, replica: int, slowest: float) -> float:
        return self._loads[replica].report.seconds_per_token or slowest

    def _slowest(self) -> float:
        """Taken for a replica that has not measured its pace: one that seemed infinitely fast would get everything."""
        slowest = max([load.report.seconds_per_token for load in self._loads.values()])
        return slowest or UNMEASURED_SECONDS_PER_TOKEN
