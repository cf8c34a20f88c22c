"""Snapshots of a scheduler between two steps: its state as plain values, and back. A scheduler restored from one makes the same plans
as the original. The caller decides how sampling params and tokens are written (Manner)."""

from collections import OrderedDict
from collections.abc import Callable, Container
from operator import attrgetter
from typing import Any

import msgspec

from octavo.cache.snapshot import CacheState
from octavo.cache.snapshot import restore as restore_cache
from octavo.cache.snapshot import take as take_cache
from octavo.messages import Candidates, PoolingParams, SamplingParams
from octavo.schedule.beams.group import BeamGroup
from octavo.schedule.beams.search import BeamSearch, Ended, Path
from octavo.schedule.drafts.grammar import GrammarDrafter
from octavo.schedule.drafts.grammar import State as GrammarDrafterState
from octavo.schedule.drafts.lengths import CostSpeculation, SpeculationState
from octavo.schedule.drafts.model import ModelDrafter
from octavo.schedule.drafts.model import State as DrafterState
from octavo.schedule.drafts.recent import FollowerState, recent_of
from octavo.schedule.fairness import Fairness, FairnessState
from octavo.schedule.grammar_cache import MAX_BYTES, GrammarCache
from octavo.schedule.repetition import Loops, loops_of
from octavo.schedule.request import Request
from octavo.schedule.results import HeadWaitReason
from octavo.schedule.scheduler import Scheduler
from octavo.schedule.step_costs import StepCosts

Wishes = dict[str, Any]
"""SamplingParams as a dict, without defaults."""

# Attributes of a Request that are stored as they are, in this order.
_KEPT = (
    "sequence", "id", "index", "seed", "stop_ids", "pooling", "needs_one_step", "prompt_len", "max_len", "min_len", "computed",
    "epoch", "row", "capacity", "num_published", "num_cached", "num_preemptions", "num_scored", "is_swapped", "rank",
)  # fmt: skip
_kept_of = attrgetter(*_KEPT)


class Manner(msgspec.Struct, frozen=True):
    """How params and tokens are written: as they are, or such that plans stay the same and no text can be recovered."""

    wishes: Callable[[SamplingParams], Wishes]
    tokens: Callable[[list[int]], list[int]]
    candidates: Callable[[Candidates, Container[int]], Candidates]  # (candidates, the beam's stop ids)
    grammar: Callable[[str], str]  # a name, the same for the same grammar
    # A name of the owner of a request. None: tokens are not written, and so nothing of which drafts are made, either.
    owner: Callable[[bytes], bytes] | None


class RequestState(msgspec.Struct, array_like=True, gc=False):
    kept: tuple[
        int, str, int, int, list[int], PoolingParams | None, bool, int, int, int, int,
        int, int, int, int, int, int, int, bool, int,
    ]  # fmt: skip
    params: Wishes
    num_tokens: int
    tokens: list[int]  # empty: not recorded
    followers: list[int]  # sequences
    late: tuple[int, int, int] = (0, -1, 0)  # late_steps, late_at, sits_out
    # Recordings from before decision 035 do not have these: every request was a response of its own.
    response_id: str = ""
    num_siblings_ahead: int = 0
    place: int = -1
    gives_way: bool = False
    # Of engines that tell tenants apart (decision 053): number, weight, and num_charged.
    tenant: tuple[int, float, int] = (0, 1.0, 0)
    # Of a request for which a draft model drafts, and of one that its grammar drafts for; others follow from the tokens …
    drafter: DrafterState | None = None
    # … but those that draft from recent outputs: a name of the owner, and how far its text was followed through them. None: not recorded.
    owner: bytes = b""
    recent: FollowerState | None = None
    grammar_drafter: GrammarDrafterState | None = None


class Node(msgspec.Struct, array_like=True, gc=False):
    """A Path; paths share their beginnings."""

    before: int  # which node; −1: none
    token: int
    total: float
    length: int


class BeamState(msgspec.Struct, array_like=True, gc=False):
    requests: list[int]  # sequences, the leader first
    is_spread: bool
    holders: list[int]
    found: dict[int, Candidates]
    has_chosen: bool
    sent_tables: dict[int, list[list[int]]]
    nodes: list[Node]
    beams: list[int]
    ended: list[tuple[float, int, bool]]


class GrammarCacheState(msgspec.Struct, array_like=True, gc=False):
    """Grammars are by name (Manner.grammar)."""

    max_used: int
    max_unused: int
    held: dict[str, str]
    later: dict[str, str]
    users: dict[str, int]
    compiling: list[str]
    ready: list[str]
    unused: list[str]  # longest unused first
    max_bytes: int = MAX_BYTES
    ready_bytes: list[int] = []  # of `ready`; empty: not recorded


class SchedulerState(msgspec.Struct, array_like=True, gc=False):
    """What is not an argument of the constructor."""

    step: int
    next_sequence: int
    num_preemptions: int
    head_waits_for: HeadWaitReason | None
    free_rows: list[int]
    leaves: list[int]
    watched: list[int]
    requests: list[RequestState]  # choices of one request next to each other, requests in order of arrival
    waiting: list[int]  # sequences
    awaiting_grammar: list[int]
    grammar_cache: GrammarCacheState
    beams: list[BeamState]
    cache: CacheState
    costs: StepCosts | None = None
    fairness: FairnessState | None = None  # None: tenants are not told apart
    # None: there are no recent outputs to draft from, or they are not recorded.
    speculation: SpeculationState | None = None


def take(scheduler: Scheduler, manner: Manner) -> SchedulerState:
    """Nothing may be in flight. Encode the result at once: parts of it belong to the scheduler."""
    assert not scheduler._in_flight, "a step is under way"
    groups = {
        id(request.special): request.special
        for request in scheduler.requests()
        if isinstance(request.special, BeamGroup)
    }
    return SchedulerState(
        scheduler.num_steps,
        scheduler._next_sequence,
        scheduler.num_preemptions,
        scheduler.head_waits_for,
        scheduler.rows.free,
        scheduler.rows.left,
        sorted(scheduler._watched),
        [_request_state(request, manner, scheduler.fairness) for request in scheduler.requests()],
        list(scheduler.rows.waiting._waiting),
        list(scheduler.rows.awaiting_grammar),
        _grammar_cache_state(scheduler.grammar_cache, manner.grammar),
        [_beam_state(group, manner) for group in groups.values()],
        take_cache(scheduler.cache),
        scheduler.costs,
        None if scheduler.fairness is None else scheduler.fairness.state(),
        _speculation_state(scheduler, manner),
    )


def restore(
    scheduler: Scheduler,
    state: SchedulerState,
    params_of: Callable[[Wishes], SamplingParams],
    tokens_of: Callable[[RequestState], list[int]],
) -> None:
    """Into a new scheduler with a new cache, constructed with the same arguments."""
    restore_cache(scheduler.cache, state.cache)
    scheduler.num_steps, scheduler._next_sequence = state.step, state.next_sequence
    scheduler.num_preemptions, scheduler.head_waits_for = state.num_preemptions, state.head_waits_for
    scheduler.costs = state.costs
    if scheduler.fairness is not None and state.fairness is not None:
        scheduler.fairness.restore(state.fairness)
    if isinstance(scheduler.speculation, CostSpeculation) and state.speculation is not None:
        scheduler.speculation.restore(state.speculation)
    rows = scheduler.rows
    rows.free, rows.left = list(state.free_rows), list(state.leaves)
    scheduler._watched = set(state.watched)
    requests: dict[int, Request] = {}
    for request_state in state.requests:
        request = _request(request_state, params_of(request_state.params), tokens_of(request_state))
        requests[request.sequence] = request
        if scheduler.speculation is not None:
            scheduler.speculation.attach(request)
            if isinstance(request.drafter, ModelDrafter) and request_state.drafter is not None:
                request.drafter.state = request_state.drafter
            if isinstance(request.drafter, GrammarDrafter) and request_state.grammar_drafter is not None:
                request.drafter.state = request_state.grammar_drafter
            recent = recent_of(request.drafter)
            if recent is not None and request_state.recent is not None:
                recent.follower.restore(request_state.recent)
        scheduler._open.setdefault(request.id, []).append(request)
        if scheduler.fairness is not None:
            scheduler.fairness.join(request, *request_state.tenant[:2])
        elif not scheduler.has_priorities:
            request.rank = 0  # recordings from before decision 035 have the order of arrival here
    for request_state in state.requests:
        requests[request_state.kept[0]].followers = [requests[sequence] for sequence in request_state.followers]
    for sequence in state.waiting:
        rows.waiting.add(requests[sequence])
    rows.awaiting_grammar = {sequence: requests[sequence] for sequence in state.awaiting_grammar}
    scheduler.grammar_cache = _grammar_cache(state.grammar_cache)
    running = [request for request in requests.values() if request.row >= 0]
    rows.restore(running)
    for beams in state.beams:
        _restore_beams(beams, requests)
    for _, request in sorted(requests.items()):
        if not isinstance(request.special, BeamGroup) or request is request.special.leader:
            scheduler.siblings.restore(request)


def _request_state(request: Request, manner: Manner, fairness: Fairness | None) -> RequestState:
    assert request.pending == 0, "a step is under way"
    tenant, recent = request.tenant, recent_of(request.drafter)
    return RequestState(
        _kept_of(request),
        manner.wishes(request.params),
        len(request.tokens),
        manner.tokens(request.tokens),
        [follower.sequence for follower in request.followers],
        (request.late_steps, request.late_at, request.sits_out),
        request.response_id,
        request.num_siblings_ahead,
        request.place,
        request.gives_way,
        (0, 1.0, 0)
        if tenant is None or fairness is None
        else (tenant.number, tenant.weight, fairness.charged_until(request, request.computed)),
        request.drafter.state if isinstance(request.drafter, ModelDrafter) else None,
        b"" if manner.owner is None else manner.owner(request.owner),
        None if recent is None or manner.owner is None else recent.follower.state(),
        request.drafter.state if isinstance(request.drafter, GrammarDrafter) else None,
    )


def _speculation_state(scheduler: Scheduler, manner: Manner) -> SpeculationState | None:
    if manner.owner is None or not isinstance(scheduler.speculation, CostSpeculation):
        return None
    state = scheduler.speculation.state()
    if state is not None:
        state.recent.keys = [(manner.owner(owner), space, parts) for owner, space, parts in state.recent.keys]
    return state


def _request(state: RequestState, params: SamplingParams, tokens: list[int]) -> Request:
    request = Request.__new__(Request)
    for name, value in zip(_KEPT, state.kept, strict=True):
        setattr(request, name, value)
    request.params, request.tokens, request.owner = params, tokens, state.owner
    request.late_steps, request.late_at, request.sits_out = state.late
    request.pending, request.is_finished = 0, False
    request.drafted, request.draft_source, request.drafter = 0, 0, None
    request.num_drafted = request.num_accepted = 0  # no plan depends on them
    request.miss = ""
    request.prompt_logprobs = []  # no plan depends on them
    begun = tokens[request.prompt_len :]
    request.special = request.pooling or loops_of(params.repetition_detection, begun)
    request.followers = []
    request.tenant, request.num_charged = None, state.tenant[2]
    request.response_id = state.response_id or request.id
    request.num_siblings_ahead, request.gives_way = state.num_siblings_ahead, state.gives_way
    request.place = state.place if state.place >= 0 else request.sequence
    return request


def _grammar_cache_state(grammar_cache: GrammarCache, name: Callable[[str], str]) -> GrammarCacheState:
    return GrammarCacheState(
        grammar_cache._max_used,
        grammar_cache._max_unused,
        {request_id: name(grammar) for request_id, grammar in grammar_cache._held.items()},
        {request_id: name(grammar) for request_id, grammar in grammar_cache._later.items()},
        {name(grammar): count for grammar, count in grammar_cache._users.items()},
        [name(grammar) for grammar in grammar_cache._compiling],
        [name(grammar) for grammar in grammar_cache._ready],
        [name(grammar) for grammar in grammar_cache._unused],
        grammar_cache._max_bytes,
        [*grammar_cache._ready.values()],
    )


def _grammar_cache(state: GrammarCacheState) -> GrammarCache:
    grammar_cache = GrammarCache(state.max_used, state.max_unused, state.max_bytes)
    grammar_cache._held, grammar_cache._later, grammar_cache._users = (
        dict(state.held),
        dict(state.later),
        dict(state.users),
    )
    sizes = state.ready_bytes or [0] * len(state.ready)
    ready = grammar_cache._ready = dict(zip(state.ready, sizes, strict=True))
    grammar_cache._compiling, grammar_cache._unused = set(state.compiling), OrderedDict.fromkeys(state.unused)
    grammar_cache._unused_bytes = sum(ready[grammar] for grammar in state.unused)
    grammar_cache._used_bytes = sum(sizes) - grammar_cache._unused_bytes
    return grammar_cache


def _beam_state(group: BeamGroup, manner: Manner) -> BeamState:
    stop_ids = group.search._stop_ids
    nodes: list[Node] = []
    places: dict[int, int] = {}

    def place(path: Path | None) -> int:
        if path is None:
            return -1
        if id(path) not in places:
            steps = [step for step in path._steps() if id(step) not in places]
            for step in steps:
                before = -1 if step.before is None else places[id(step.before)]
                (token,) = manner.candidates(Candidates([step.token], [0.0]), stop_ids).token_ids
                places[id(step)] = len(nodes)
                nodes.append(Node(before, token, step.total, step.length))
        return places[id(path)]

    return BeamState(
        [request.sequence for request in group.requests],
        group.is_spread,
        [request.sequence for request in group._holders],
        {sequence: manner.candidates(found, stop_ids) for sequence, found in group._found.items()},
        group._has_chosen,
        group._sent_tables,
        nodes,
        [place(path) for path in group.search.beams],
        [(ended.score, place(ended.path), ended.is_stopped) for ended in group.search.ended],
    )


def _restore_beams(state: BeamState, requests: dict[int, Request]) -> None:
    members = [requests[sequence] for sequence in state.requests]
    leader = members[0]
    group = BeamGroup.__new__(BeamGroup)
    assert leader.params.max_tokens is not None
    group.search = BeamSearch(leader.params, leader.stop_ids, leader.params.max_tokens)
    paths: list[Path] = []
    for node in state.nodes:
        before = None if node.before < 0 else paths[node.before]
        paths.append(Path(before, node.token, node.total, node.length, None))
    group.search.beams = [None if at < 0 else paths[at] for at in state.beams]
    group.search.ended = [Ended(score, paths[at], is_stopped) for score, at, is_stopped in state.ended]
    group.requests, group.is_spread = members, state.is_spread
    group._holders = [requests[sequence] for sequence in state.holders]
    group._found, group._has_chosen = dict(state.found), state.has_chosen
    group._sent_tables = {sequence: [list(table) for table in tables] for sequence, tables in state.sent_tables.items()}
    for request in members:
        request.special = group


class RecordedLoops(Loops):
    """Repetition detection for recordings without tokens: the token LOOP stands for the one that completed a repetition."""

    LOOP = -(2**62)
    __slots__ = ()

    def add(self, token: int) -> bool:
        return token == self.LOOP
