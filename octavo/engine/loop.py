"""The step loop: plan → submit → collect → commit. step() is the place to begin reading the engine.

Observers hear what happens, and read the clock; the loop itself keeps no times and no counts (observe/step_observer.py). What can
be asked of an engine between two steps is in control.py."""

import functools
import queue
from collections import deque
from collections.abc import Callable

from octavo.engine.adapter_traffic import AdapterTraffic, LetThrough
from octavo.engine.cost_meter import CostMeter
from octavo.engine.idle_memory import IdleMemory
from octavo.engine.prefix_holds import PrefixHolds
from octavo.engine.tier_traffic import Released, TierTraffic
from octavo.executor.base import Executor, Sleeper
from octavo.messages import Abort, Finish, GenerateRequest, StepPlan, TokenDelta
from octavo.observe.step_observer import Observers
from octavo.recording.recorder import Recorder
from octavo.schedule import Scheduler
from octavo.schedule.grammar_cache import GrammarJob
from octavo.schedule.results import Planned

_TIER_WAIT_SECONDS = 0.005  # for a load, before messages are looked at again


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        observers: Observers,
        cost_meter: CostMeter | None = None,
        idle_memory: IdleMemory | None = None,
        holds: PrefixHolds | None = None,
    ) -> None:
        """`cost_meter`: one of the observers; None: costs of steps are not measured. `idle_memory`: None: idle prefixes keep their
        memory. `holds`: None: no prefix is held."""
        self.scheduler, self.executor, self.observers = scheduler, executor, observers
        self._cost_meter = CostMeter() if cost_meter is None else cost_meter
        self._idle_memory = idle_memory
        self.holds = holds
        self.on_grammar_ready: Callable[[], None] = lambda: None  # called by any thread: there is work again
        # Called by any thread while it falls asleep or wakes up.
        self.on_memory_moved: Callable[[], None] = lambda: None
        # Compiled, with the bytes that each takes; the scheduler does not know yet.
        self._ready_grammars: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._in_flight: deque[StepPlan] = deque()
        self.tier: TierTraffic | None = None  # None: prefixes live in the KV store alone
        self.adapters: AdapterTraffic | None = None  # None: no request has one (--enable-lora)
        self._warm_awake: int | None = None  # pages that may keep memory when it is awake again; None: it is

    @property
    def has_work(self) -> bool:
        return (
            bool(self._in_flight)
            or self.scheduler.has_work
            or not self._ready_grammars.empty()
            or (self.tier is not None and self.tier.num_held > 0)
            or (self.adapters is not None and (self.adapters.num_held > 0 or self.adapters.has_events))
        )

    def has(self, request_id: str) -> bool:
        return (
            self.scheduler.has(request_id)
            or (self.tier is not None and self.tier.holds(request_id))
            or (self.adapters is not None and self.adapters.holds(request_id))
        )

    def step(self) -> list[TokenDelta]:
        """Make and submit a plan, then take in the results that are due. Returns the tokens that became known. Where all requests
        wait for their grammars, it waits for one.

        A step with drafts is taken in before the next plan, which continues them. If it can overlap with anything, that is the call
        after the one that made it: so what is done with the tokens, between two calls, does not keep the device waiting."""
        scheduler, executor, observers, in_flight = self.scheduler, self.executor, self.observers, self._in_flight
        deltas = [] if self.adapters is None else self._take_adapters(self.adapters)
        if not self._take_inputs():
            return deltas
        observers.began()
        if in_flight and in_flight[0].drafts:
            deltas += self._take_result()
        planned = scheduler.plan()
        observers.planned(planned)
        if not planned.is_empty:
            executor.submit(planned.plan)
            in_flight.append(planned.plan)
        # How many steps may be in flight while the next plan is made.
        wants_drain = planned.wants_drain and not planned.plan.drafts
        can_overlap = executor.overlap and not observers.needs_drain() and not wants_drain
        depth = scheduler.num_stages if can_overlap else 0
        if depth:
            observers.submitted()
        # An empty plan waits for the result of one step: with several in flight, that gives the next plan something to do.
        for _ in range(max(len(in_flight) - depth, int(planned.is_empty and bool(in_flight)))):
            deltas += self._take_result()
        observers.stepped(planned, len(in_flight))
        if self.tier is not None:
            self._feed_tier(self.tier, planned)
        return deltas

    def _take_result(self) -> list[TokenDelta]:
        """Take in the oldest step in flight."""
        result = self.executor.collect()
        self.observers.collected()
        committed = self.scheduler.commit(self._in_flight.popleft(), result)
        self.observers.committed(committed)
        for job in committed.jobs:
            self._start(job)
        return committed.deltas

    def _take_inputs(self) -> bool:
        """Hand the scheduler what came between two steps: requests whose prefix is loaded, compiled grammars, costs, a limit of idle
        prefixes. False: all requests still wait for their prefixes."""
        scheduler = self.scheduler
        if self.tier is not None and not self._take_tier(self.tier):
            return False
        if scheduler.rows.awaiting_grammar or not self._ready_grammars.empty():
            self._take_ready_grammars()
        if (costs := self._cost_meter.take()) is not None:
            scheduler.learn(costs)
            self.observers.costs_learned(costs)
        if self.holds is not None and self.holds.is_used and self.holds.is_due:
            self.holds.take()
        if self._idle_memory is not None:
            self.limit_idle()
        return True

    def add(self, request: GenerateRequest) -> None:
        """Queue the request; or hold it, while its adapter is loaded, or its prefix from a tier."""
        self.wake_up()
        if self.adapters is None:
            self._add_with_prefix(request)
        else:
            self._let_through(self.adapters.add(request))

    def _let_through(self, released: list[LetThrough]) -> None:
        """Add requests whose adapter is in memory."""
        for request, since in released:
            if request.adapter is not None:
                self.observers.waited_for_adapter(request.id, since)
            self._add_with_prefix(request)

    def _add_with_prefix(self, request: GenerateRequest) -> None:
        if self.tier is None or not self.tier.hold(request):
            self._add(request)

    def _add(self, request: GenerateRequest) -> None:
        added = self.scheduler.add(request)
        self.observers.arrived(request, added.awaits_grammar)
        if request.retain_seconds > 0 and self.holds is not None:
            self.holds.follow(request)
        for job in added.jobs:
            self._start(job)

    def abort(self, abort: Abort) -> None:
        if self.adapters is not None and self.adapters.drop(abort):
            return
        if self.tier is not None:
            was_held, request = self.tier.drop(abort)
            if was_held and request is None:
                return
            if request is not None:
                self._add(request)
        removed = self.scheduler.abort(abort.request_id, abort.index)
        if removed is not None:
            self.observers.removed(abort, removed)
            for job in removed.jobs:
                self._start(job)

    def reset_prefixes(self) -> int:
        """Forget cached prefixes. Returns how many pages that freed."""
        num_pages = self.scheduler.cache.reset_prefixes()
        if self.tier is not None:
            self.tier.reset()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.forget()
        self.observers.prefixes_reset()
        return num_pages

    def take_tier_events(self) -> None:
        """Take in what the tier's mover tells, and store pages while nothing runs. Called between two steps."""
        if self.tier is not None:
            self._add_all(self.tier.take())
            self.tier.offer(len(self._in_flight))

    def _add_all(self, released: list[Released]) -> None:
        for request, since, num_loaded in released:
            self.observers.waited_for_load(request.id, since, num_loaded)
            self._add(request)

    def open_adapters(self, adapters: AdapterTraffic) -> None:
        """Serve requests with adapters from now on."""
        self.adapters = adapters
        self.observers.add(adapters)

    def _take_adapters(self, adapters: AdapterTraffic) -> list[TokenDelta]:
        """Add the requests whose adapter was loaded. Waits a moment where there is nothing else to do. → ends of those whose adapter
        cannot be loaded."""
        if not (adapters.num_held or adapters.has_events):
            return []
        is_idle = not (self._in_flight or self.scheduler.has_work or self.scheduler.rows.awaiting_grammar)
        is_idle = is_idle and not (self.tier is not None and self.tier.num_held)
        released, refused = adapters.take(_TIER_WAIT_SECONDS if is_idle else 0.0)
        self._let_through(released)
        return [
            TokenDelta(request.id, index, [], Finish("error", message=why, cause="adapter"))
            for request, why in refused
            for index in range(request.params.n)
            if not request.begun or request.begun[index] is not None
        ]

    def open_tier(self, tier: TierTraffic) -> None:
        """Load prefixes from a tier, and store them there, from now on."""
        self.tier = tier
        self.observers.add(tier)
        self.take_tier_events()

    def _feed_tier(self, tier: TierTraffic, planned: Planned) -> None:
        tier.offer(len(self._in_flight))
        if planned.is_empty and self.scheduler.cache.loads:  # the queue's head may wait for pages of a load
            self._add_all(tier.take(_TIER_WAIT_SECONDS))

    def _take_tier(self, tier: TierTraffic) -> bool:
        """Add the requests whose prefix is loaded. Waits a moment where there is nothing else to do. False: there still is not."""
        is_idle = not (self._in_flight or self.scheduler.has_work or self.scheduler.rows.awaiting_grammar)
        self._add_all(tier.take(_TIER_WAIT_SECONDS if is_idle and tier.num_held else 0.0))
        return bool(not is_idle or self.scheduler.has_work or self.scheduler.rows.awaiting_grammar or not tier.num_held)

    def sleep(self) -> None:
        """Give back the memory of all pages but pinned ones, with the prefix cache, and on a GPU that of the weights. Nothing may be open.
        The next request wakes the loop. Pages are limited by an input that is recorded, as idle ones are."""
        assert self.may_sleep, "requests are open"
        if self.is_asleep:
            return
        pool = self.scheduler.cache.pool
        self._warm_awake = pool.num_warm
        pages = pool.limit_touched(0)
        self.observers.idle_limited(0)
        if isinstance(self.executor, Sleeper):
            # A tier's mover may still copy pages.
            keeps_pages = pool.num_used > 0 or self.tier is not None
            self.executor.sleep(pages, keeps_pages, self.on_memory_moved)

    def wake_up(self) -> None:
        if self._warm_awake is None:
            return
        if isinstance(self.executor, Sleeper):
            self.executor.wake_up(self.on_memory_moved)
        num_warm, self._warm_awake = self._warm_awake, None
        self.scheduler.cache.pool.limit_touched(num_warm)
        self.observers.idle_limited(num_warm)

    @property
    def may_sleep(self) -> bool:
        """No request is open, not even one that waits for its grammar."""
        return not self.has_work and self.scheduler.is_idle

    @property
    def is_asleep(self) -> bool:
        return self._warm_awake is not None

    def limit_idle(self) -> None:
        """Give memory of idle prefixes back where it is scarce. Called between two steps, and now and then while nothing runs."""
        if self.is_asleep or self._idle_memory is None or (num_warm := self._idle_memory.take()) is None:
            return
        pages = self.scheduler.cache.pool.limit_touched(num_warm)
        self.observers.idle_limited(num_warm)
        # A step in flight may still write to these pages for a request that has ended: nothing reads that.
        self.executor.give_back(pages)
        self._idle_memory.num_given_back += len(pages)

    def record(self, recorder: Recorder) -> None:
        """Record from the present state on. Nothing may be in flight."""
        recorder.take(self.scheduler)
        self.observers.add(recorder)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        self.executor.close()
        self.observers.closed()

    def _take_ready_grammars(self) -> None:
        """Tell the scheduler of all that are compiled. Waits for one only if a request needs it and there is nothing else to do: the
        requests that wanted the last one may have left, and then no other comes."""
        ready, scheduler = self._ready_grammars, self.scheduler
        must_wait = scheduler.rows.awaiting_grammar and not (self._in_flight or scheduler.has_work)
        if ready.empty() and not must_wait:
            return
        grammars = dict([ready.get()])
        while not ready.empty():
            grammar, num_bytes = ready.get()
            grammars[grammar] = num_bytes
        happened = scheduler.prepared(grammars)
        self.observers.grammars_ready(happened)
        for job in happened.jobs:
            self._start(job)

    def _start(self, job: GrammarJob) -> None:
        self.executor.prepare(job.grammar, job.forgets, functools.partial(self._grammar_ready, job.grammar))

    def _grammar_ready(self, grammar: str, num_bytes: int) -> None:
        """Called by the thread that compiled it."""
        if grammar:  # else others were forgotten, and that is all
            self._ready_grammars.put((grammar, num_bytes))
            self.on_grammar_ready()
