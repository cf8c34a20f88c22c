"""simulate(): a trace through a router and replicas, on one virtual clock.

Arrivals and turns of replicas happen in the order of time. A replica in a steady stretch has no turn before the stretch ends, so the
work is proportional to what happens, not to time. Nothing is random: the same inputs give the same figures."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from octavo.messages import PageEvents
from octavo.plan.content import Contents, keys_of
from octavo.plan.figures import Figures, Histogram, Journey, Levels, is_good, spread_of
from octavo.plan.replica import NEVER, SimulatedReplica
from octavo.plan.settings import Failure, FleetSettings
from octavo.plan.step_model import PICOSECONDS
from octavo.plan.trace import Trace, TraceRequest
from octavo.routing import POLICIES, Router
from octavo.schedule.results import Planned
from octavo.supervisor.autoscale import Autoscale

_SCALE_PICOSECONDS = PICOSECONDS // 2  # between two looks at the load
NO_LEVELS = Levels({})


class Moment(NamedTuple):
    """The fleet at one time, for charts and questions about failures."""

    seconds: float
    num_waiting: int
    num_running: int
    num_replicas: int


class Run(NamedTuple):
    figures: Figures
    journeys: list[Journey]  # in the order of the trace
    moments: list[Moment]


class Simulation:
    def __init__(
        self,
        trace: Trace,
        settings: FleetSettings,
        *,
        levels: Levels = NO_LEVELS,
        failures: Sequence[Failure] = (),
        with_jumps: bool = True,
        moments_every: float = 0.0,
        on_plan: Callable[[int, Planned], None] | None = None,
        pace: Callable[[int], float] | None = None,
        draw: int = 0,
    ) -> None:
        """`draw`: of the noise; another number has each step take another of its times. `pace`: of SimulatedReplica. `moments_every`: seconds between two moments; 0: none. `on_plan`: hears of the
        plans that are made one by one, by replica."""
        self._trace, self._settings, self._levels = trace, settings, levels
        self._with_jumps, self._on_plan, self._pace = with_jumps, on_plan, pace
        self._draw = draw
        self._contents = Contents(trace, settings.replica.page_size)
        self._costs = settings.model.costs(settings.replica.max_num_seqs, settings.replica.max_num_batched_tokens)
        self._router: Router | None = None
        is_fleet = settings.num_replicas > 1 or settings.max_replicas > 1
        if is_fleet:
            policy = POLICIES[settings.routing_policy]
            num_pages = settings.replica.num_pages * settings.num_replicas
            self._router = Router(
                b"", settings.replica.page_size, policy, settings.saturation_seconds, num_pages=min(num_pages, 1 << 24),
                page_keys=keys_of,
            )  # fmt: skip
        self._replicas: dict[int, SimulatedReplica] = {}
        self._gone: list[SimulatedReplica] = []
        self._next_number = 0
        self._turns: list[tuple[int, int, int]] = []  # (when, replica, epoch): some are out of date
        self._events: list[tuple[int, int, Callable[[int], None]]] = []  # (when, number, what)
        self._num_events = 0
        self._journeys: list[Journey] = []
        self._refused: Counter[str] = Counter()
        self._unplaced: list[Journey] = []  # while no replica takes requests
        self._sessions: dict[int, list[tuple[int, TraceRequest]]] = {}  # requests that wait for the one before
        self._moments: list[Moment] = []
        self._moments_every = round(moments_every * PICOSECONDS)
        self._most_waiting = 0
        self._num_starting = 0
        self._autoscale: Autoscale | None = None
        self._target = settings.num_replicas
        self._num_open = 0
        for _ in range(settings.num_replicas):
            self._start(0)
        for failure in failures:
            self._at(round(failure.seconds * PICOSECONDS), partial(self._fail, failure))
        if settings.max_replicas:
            least = settings.min_replicas or settings.num_replicas
            self._autoscale = Autoscale(least, settings.max_replicas, settings.saturation_seconds)

    # ── the clock ──

    def run(self) -> Run:
        requests = self._trace.requests
        start = requests[0].seconds if requests else 0.0
        first_times: list[tuple[int, int]] = []
        for number, request in enumerate(requests):
            if request.after_previous:
                self._sessions.setdefault(request.session, []).append((number, request))
            else:
                first_times.append((round((request.seconds - start) * PICOSECONDS), number))
        for waiting in self._sessions.values():
            waiting.reverse()
        front = self._settings.front
        back = (round(front.first_seconds * PICOSECONDS), round(front.last_seconds * PICOSECONDS))
        self._journeys = [
            Journey(number, -1, request.prompt_len, request.output_len, back) for number, request in enumerate(requests)
        ]
        first_times.sort()
        at, num_first = 0, len(first_times)
        last_arrival = first_times[-1][0] if first_times else 0
        if self._moments_every:
            self._at(0, self._note_moment)
        if self._autoscale is not None:
            self._at(0, self._scale)
        turns, events, replicas = self._turns, self._events, self._replicas
        while True:
            arrival = first_times[at][0] if at < num_first else NEVER
            event = events[0][0] if events else NEVER
            turn = turns[0][0] if turns else NEVER
            soonest = min(arrival, event, turn)
            if soonest == NEVER:
                break
            if arrival == soonest:
                number = first_times[at][1]
                at += 1
                self._come(arrival, number)
            elif event == soonest:
                _, _, happen = heapq.heappop(events)
                happen(event)
            else:
                _, number, epoch = turns[0]
                replica = replicas.get(number)
                if replica is None or replica.epoch != epoch or replica.wake != turn:
                    heapq.heappop(turns)
                    continue
                replica.iterate()
                wake = replica.wake
                if wake < NEVER:
                    heapq.heapreplace(turns, (wake, number, epoch))
                else:
                    heapq.heappop(turns)
        return Run(self._figures(last_arrival), self._journeys, self._moments)

    def _at(self, time: int, happen: Callable[[int], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, happen))

    @property
    def _is_over(self) -> bool:
        """Whether all requests of the trace have ended, so that nothing regular needs to go on."""
        return self._num_open == 0 and all(journey.arrived >= 0 for journey in self._journeys)

    # ── requests ──

    def _come(self, now: int, number: int) -> None:
        """A request reaches the server; the engine gets it when its prompt is tokenized."""
        journey, front = self._journeys[number], self._settings.front
        journey.arrived = now
        self._num_open += 1
        delay = round((front.seconds + front.token_seconds * journey.prompt_len) * PICOSECONDS)
        if delay:
            self._at(now + delay, lambda then: self._place(then, journey))
        else:
            self._place(now, journey)

    def _place(self, now: int, journey: Journey) -> None:
        if not journey.tokens:
            journey.tokens = self._contents.tokens(self._trace.requests[journey.number], journey.number)
        replicas, router = self._replicas, self._router
        if not replicas:
            self._unplaced.append(journey)
            return
        num_expected = 0
        if router is None:
            replica = next(iter(replicas.values()))
        else:
            choice = router.route(journey.request_id, journey.tokens[: journey.prompt_len + journey.num_sent])
            assert choice is not None
            replica, num_expected = replicas[choice.replica], choice.num_held
        reason = replica.add(journey, now, num_expected)
        if reason:
            journey.is_refused, journey.tokens = True, []
            self._refused[reason] += 1
            self._num_open -= 1
            if router is not None:
                router.settle(journey.request_id)
            self._follow(now, journey.number)
            return
        heapq.heappush(self._turns, (replica.wake, replica.number, replica.epoch))

    def _move(self, journey: Journey, now: int) -> None:
        self._place(now, journey)

    def _first(self, journey: Journey) -> None:
        if self._router is not None:
            self._router.settle(journey.request_id)

    def _ended(self, journey: Journey) -> None:
        self._num_open -= 1
        if self._router is not None:
            self._router.settle(journey.request_id)
        self._follow(journey.received, journey.number)

    def _follow(self, now: int, number: int) -> None:
        """The session's next request comes after its pause."""
        session = self._trace.requests[number].session
        waiting = self._sessions.get(session)
        if session >= 0 and waiting:
            following, request = waiting.pop()
            time = now + round(request.seconds * PICOSECONDS)
            self._at(time, lambda then: self._come(then, following))

    # ── replicas ──

    def _start(self, now: int) -> None:
        number = self._next_number
        self._next_number += 1
        router = self._router
        report: Callable[[PageEvents], object] | None = None if router is None else router.take_events
        replica = SimulatedReplica(
            number, self._settings.replica, self._settings.model, self._costs, self._first, self._ended, now=now, report=report,
            with_jumps=self._with_jumps, pace=self._pace, draw=self._draw,
        )  # fmt: skip
        if (on_plan := self._on_plan) is not None:
            replica.on_plan = lambda planned: on_plan(number, planned)
        if router is not None:
            router.join(number, replica.epoch)
        self._replicas[number] = replica
        waiting, self._unplaced = self._unplaced, []
        for journey in waiting:
            self._place(now, journey)

    def _remove(self, now: int, replica: SimulatedReplica) -> list[Journey]:
        journeys = replica.stop(now)
        del self._replicas[replica.number]
        self._gone.append(replica)
        if self._router is not None:
            self._router.leave(replica.number)
        return journeys

    def _fail(self, failure: Failure, now: int) -> None:
        settings = self._settings
        busiest = sorted(self._replicas.values(), key=lambda each: (-len(each.journeys), each.number))
        for replica in busiest[: failure.num_replicas]:
            for journey in self._remove(now, replica):
                journey.num_moves += 1
                self._at(now + round(settings.detect_seconds * PICOSECONDS), partial(self._move, journey))
            if failure.comes_back:
                self._start_later(now)

    def _start_later(self, now: int) -> None:
        self._num_starting += 1

        def start(then: int) -> None:
            self._num_starting -= 1
            self._start(then)

        self._at(now + round(self._settings.start_seconds * PICOSECONDS), start)

    def _scale(self, now: int) -> None:
        assert self._autoscale is not None and self._router is not None
        backlogs = [self._router.seconds_of(number) for number in self._replicas]
        target = self._autoscale.target(now / PICOSECONDS, self._target, backlogs)
        for _ in range(target - self._target):
            self._start_later(now)
        if target < self._target and len(self._replicas) > 1:
            quietest = min(self._replicas.values(), key=lambda each: (len(each.journeys), -each.number))
            for journey in self._remove(now, quietest):
                self._place(now, journey)
        self._target = target
        if not self._is_over:
            self._at(now + _SCALE_PICOSECONDS, self._scale)

    def _note_moment(self, now: int) -> None:
        waiting = running = 0
        for replica in self._replicas.values():
            waiting += len(replica.scheduler.waiting)
            running += len(replica.scheduler.running)
        self._moments.append(Moment(now / PICOSECONDS, waiting + len(self._unplaced), running, len(self._replicas)))
        if not self._is_over:
            self._at(now + self._moments_every, self._note_moment)

    # ── figures ──

    def _figures(self, last_arrival: int) -> Figures:
        journeys = self._journeys
        done = [journey for journey in journeys if journey.ended >= 0]
        replicas = [*self._replicas.values(), *self._gone]
        end = max((journey.ended for journey in done), default=0)
        seconds = end / PICOSECONDS
        by_kind: defaultdict[tuple[bool, int], Histogram] = defaultdict(Histogram)
        for replica in replicas:
            for kind, histogram in replica.gaps.items():
                by_kind[kind].merge(histogram)
        gaps = Histogram()
        noise, front = self._settings.model.steady_noise, self._settings.front
        for (with_prompt, power), histogram in by_kind.items():
            histogram = histogram.spread_by([1.0] * len(noise) if with_prompt else noise)
            gaps.merge(histogram.shifted_by(front.jitter_of((1 << power) >> 1, with_prompt)))
        limits = [*self._levels.limits.items()]
        num_good = sum(is_good(journey, limits) for journey in done)
        output = sum(journey.output_len for journey in done)
        prompt = sum(journey.prompt_len for journey in done)
        waits: Counter[str] = Counter()
        for replica in replicas:
            waits.update(replica.waits)
        queried = sum(replica.cache.queried_tokens for replica in replicas)
        num_steps = sum(replica.num_steps for replica in replicas)
        span = last_arrival / PICOSECONDS
        lived = sum(end - replica.started for replica in replicas)
        return Figures(
            num_replicas=self._settings.num_replicas,
            num_requests=len(journeys),
            num_done=len(done),
            num_refused=dict(self._refused),
            seconds=seconds,
            rate=len(journeys) / span if span else float(len(journeys)),
            prompt_tokens=prompt,
            output_tokens=output,
            output_rate=output / seconds if seconds else 0.0,
            total_rate=(output + prompt) / seconds if seconds else 0.0,
            good_share=num_good / len(journeys) if journeys else 0.0,
            goodput=num_good / seconds if seconds else 0.0,
            ttft=spread_of([journey.ttft for journey in done]),
            tpot=spread_of([journey.tpot for journey in done if journey.output_len > 1]),
            itl=gaps.spread(),
            e2e=spread_of([journey.latency for journey in done]),
            hit_rate=sum(replica.cache.hit_tokens for replica in replicas) / queried if queried else 0.0,
            preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
            waits={name: waits[name] / PICOSECONDS for name in sorted(waits)},
            queue_seconds=spread_of([each for replica in replicas for each in replica.queue_times]),
            most_waiting=max((replica.most_waiting for replica in replicas), default=0),
            most_pages=max(
                (replica.most_pages / max(1, replica.cache.pool.num_pages) for replica in replicas), default=0.0
            ),
            mean_rows=sum(replica.num_rows for replica in replicas) / num_steps if num_steps else 0.0,
            busy_share=min(1.0, sum(replica.busy for replica in replicas) / lived) if lived > 0 else 0.0,
            num_steps=num_steps,
            num_plans=sum(replica.num_plans for replica in replicas),
            drained_seconds=max(0.0, seconds - span),
            moved=sum(journey.num_moves > 0 for journey in journeys),
        )


def simulate(
    trace: Trace,
    settings: FleetSettings,
    *,
    levels: Levels = NO_LEVELS,
    failures: Sequence[Failure] = (),
    draw: int = 0,
) -> Figures:
    return Simulation(trace, settings, levels=levels, failures=failures, draw=draw).run().figures
