"""FleetClient: an EngineClient over several replicas. A router chooses the replica of each request; requests of a replica that ends or
drains go on at another, from the tokens that their clients already have.

Placement is the truth: a delta counts only if it comes from the replica at which its request is placed now, over the link of that
replica's current engine. So no stream is answered twice, whatever a replica that was taken for dead still sends."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from octavo.cache.page_keys import fleet_root
from octavo.client.client import LAST_TOKENS_SECONDS, EngineClient, Placement
from octavo.client.fleet_answers import (
    ReplicaAnswer,
    merged_history,
    merged_journeys,
    merged_live,
    merged_metrics,
    merged_prefixes,
    merged_progress,
)
from octavo.client.inflight_limit import InflightLimit
from octavo.client.link import EngineLink, listen
from octavo.client.streams import SUSPICIOUS
from octavo.config import FleetConfig
from octavo.errors import EngineDead, EngineError, EngineUnavailable, InvalidRequest, Overloaded
from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.launch import ReplicaAddress
from octavo.messages import (
    ASLEEP,
    AWAKE,
    Abort,
    Control,
    Dying,
    EngineGone,
    EngineLost,
    EngineReport,
    EngineStarted,
    Finish,
    FleetChanged,
    FleetState,
    FromEngine,
    FromSupervisor,
    GenerateRequest,
    Hello,
    HoldPrefix,
    LeaveQueue,
    LoadAdapter,
    PageEvents,
    PageSnapshot,
    Ping,
    ReadHistory,
    ReadJourneys,
    ReadLive,
    ReadMetrics,
    ReadPage,
    ReadPlace,
    ReadPrefixes,
    ReadProgress,
    ReadSleep,
    ReleasePrefix,
    ReplicaDrains,
    ReplicaIdle,
    ReplicaJoined,
    Reply,
    ResetPrefixCache,
    Responded,
    ScaleFleet,
    SleepEngine,
    StepDeltas,
    ToEngine,
    ToSupervisor,
    Travelled,
    WakeEngine,
    WantSnapshot,
)
from octavo.observe.metrics.fleet_metrics import fleet_metrics
from octavo.routing import POLICIES, PageScheme, Router

log = logging.getLogger("octavo.engine")

REPLY_SECONDS = 2.0
"""How long a question to all replicas waits for the slowest: one in a long step is left out."""

LOAD_SECONDS = 60.0
"""The same, for an adapter to be read. A replica that is left out reads it with its first request."""


class _Member:
    """A replica, as this API process sees it."""

    def __init__(self, number: int, heartbeat: Heartbeat, limit: InflightLimit) -> None:
        self.number, self.heartbeat, self.limit = number, heartbeat, limit
        self.epoch = 0
        self.link: EngineLink | None = None  # None: it has no engine now
        self.report: EngineReport | None = None  # None: its engine is not ready
        self.is_draining = False
        self.awaits_snapshot = False  # its engine was asked for one
        self.requests: dict[str, None] = {}  # that are placed here, in order
        self.quarantined: set[str] = set()  # suspects that wait for its next engine

    @property
    def takes_requests(self) -> bool:
        return self.report is not None and not self.is_draining


class _Place(NamedTuple):
    member: _Member
    fingerprint: str  # of its engine; the request's tokens were made there


class FleetClient(EngineClient):
    def __init__(
        self,
        config: FleetConfig,
        replicas: Sequence[ReplicaAddress],
        secret: bytes,
        origin: int,
        supervisor_address: str,
        heartbeat_fd: int,
        limits: tuple[int, int],
        num_servers: int,
        tell: Callable[[ToSupervisor], None],
    ) -> None:
        """`replicas`: those that there are now; the supervisor announces changes. `limits`: requests that may wait at a replica, and their
        tokens. `tell`: sends the supervisor a message."""
        super().__init__(origin)
        self.can_be_replaced = True
        self.fleet: FleetState = FleetState([], len(replicas))
        self._announced = self.fleet  # by the supervisor
        self._config, self._secret, self._tell = config, secret, tell
        self._heartbeat_fd, self._limits, self._num_servers = heartbeat_fd, limits, num_servers
        self.heartbeat = Heartbeat(heartbeat_fd)  # the first block also has the API processes' own words
        self._initial = replicas
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._supervisor = listen(zmq.asyncio.Context(self._context), supervisor_address)
        self._listener: asyncio.Task[None] | None = None
        self._members: dict[int, _Member] = {}
        self._places: dict[str, _Place] = {}  # of each open request that has one
        self._placements: dict[str, Placement] = {}  # the same, as it is shown
        self._unplaced: dict[str, str] = {}  # requests that wait for a replica → its fingerprint; empty: any
        self._unsettled: set[str] = set()  # requests without a token
        self._router = Router(
            secret, 1, POLICIES[config.routing_policy], config.saturation_seconds, origin
        )  # each replica joins with its own page keys
        self._home: _Member | None = None  # keeps the records of HTTP requests for all API processes
        self._drain_timers: dict[int, asyncio.TimerHandle] = {}
        self._call_members: dict[int, _Member] = {}  # open call → the replica that is asked
        self.num_moved = 0  # requests that went on at another replica

    def scale(self, wish: ScaleFleet) -> None:
        least, most = self._config.least_replicas, self._config.most_replicas
        if wish.replicas and not least <= wish.replicas <= most:
            raise InvalidRequest(f"replicas must be between {least} and {most}, got {wish.replicas}", param="replicas")
        self._tell(wish)

    # ── requests ──

    def submit(self, request: GenerateRequest) -> None:
        if self._failure is not None:
            raise self._failure
        if self.report is None:
            raise EngineUnavailable("the replicas are still starting", retry_after=2)
        request = msgspec.structs.replace(request, origin=self.origin, submitted=time.monotonic())
        open_to = self._accepting(request)
        self._streams.open(request)
        self._unsettled.add(request.id)
        if any(request.begun):  # in another process, whose replicas were these
            fingerprint = self.report.system_fingerprint
            able = self._able(request.id, fingerprint)
            open_to = [member for member in open_to if member in able]
            self._unplaced[request.id] = fingerprint  # where none is left
        self._place(request, open_to)
        if request.deadline or request.queue_until:
            self._set_timers(request)

    def release(self, request_id: str) -> None:
        super().release(request_id)  # sends an Abort where it has not ended
        self._router.settle(request_id)
        self._unsettled.discard(request_id)
        self._forget_place(request_id)
        self._placements.pop(request_id, None)
        self._unplaced.pop(request_id, None)

    def placement(self, request_id: str) -> Placement | None:
        return self._placements.get(request_id)

    def responded(self, responded: Responded) -> None:
        if self._home is not None and self._home.link is not None:
            self._home.link.send(responded)

    def _accepting(self, request: GenerateRequest) -> list[_Member]:
        """The replicas that may take one more request. Raises Overloaded if there are some and all are full; none: it waits."""
        found: list[_Member] = []
        full: Overloaded | None = None
        for member in self._members.values():
            if member.takes_requests:
                assert member.report is not None
                try:
                    member.limit.check(request, member.report.max_num_seqs, False, lambda m=member: self._quiet(m))  # type: ignore[misc]
                    found.append(member)
                except Overloaded as error:
                    full = error
        if not found and full is not None:
            raise full
        if not found and self.report is not None and self._members:
            limit = next(iter(self._members.values())).limit
            limit.check(request, self.report.max_num_seqs, True, self._streams.without_tokens)
        return found

    def _quiet(self, member: _Member) -> list[GenerateRequest]:
        """Requests at a replica that have received no token."""
        return [each for each in self._streams.without_tokens() if each.id in member.requests]

    def _place(self, request: GenerateRequest, members: Collection[_Member], moved: str = "") -> bool:
        """Send a request to the best of these replicas. False: there is none, and it waits. `moved`: why it left another."""
        tokens = request.prompt_ids
        if any(request.begun):
            tokens = tokens + max((each for each in request.begun if each), key=len)
        before = self._placements.get(request.id)
        among = [member.number for member in members]
        choice = self._router.route(request.id, tokens, among, self._router.space_of(request))
        if choice is None:
            self._unplaced.setdefault(request.id, "")
            return False
        self._unplaced.pop(request.id, None)
        member = self._members[choice.replica]
        assert member.link is not None and member.report is not None
        self._places[request.id] = _Place(member, member.report.system_fingerprint)
        member.requests[request.id] = None
        member.limit.hold(request)
        placement = Placement(choice.replica, choice.reason, choice.num_held, round(choice.seconds, 6), moved)
        self._placements[request.id] = placement
        member.link.send(msgspec.structs.replace(request, num_expected=choice.num_held))
        if before is not None:
            self.num_moved += 1
            self.observer.moved(request.id, placement)
        return True

    def _forget_place(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            member = place.member
            member.requests.pop(request_id, None)
            member.quarantined.discard(request_id)
            member.limit.drop(request_id)
            self._check_drained(member)

    def _send(self, message: ToEngine) -> None:
        """Send what concerns a request to its replica. Without one, its next placement covers it."""
        match message:
            case Abort() | LeaveQueue():
                place = self._places.get(message.request_id)
                if place is not None and place.member.link is not None:
                    place.member.link.send(message)
            case _:
                raise AssertionError(f"{type(message).__name__} has no replica")

    def _leave_queue(self, request: GenerateRequest) -> None:
        if request.id in self._unplaced and not self._streams.has_begun(request.id):
            message = "the replicas are being restarted, and the request's max_queue_ms has passed"
            self._streams.end(request.id, Finish("error", message=message, cause="overload", retry_after=2))
        else:
            super()._leave_queue(request)

    # ── replicas ──

    async def ready(self) -> EngineReport:
        if self._listener is None:
            for address in self._initial:
                member = self._member(address.replica)
                if not address.is_lost:
                    self._connect(member, address.engine_address, address.reply_address, address.epoch)
            self._listener = asyncio.create_task(self._follow_supervisor())
            self._listener.add_done_callback(self._reader_ended)
        return await super().ready()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        for timer in self._drain_timers.values():
            timer.cancel()
        for member in self._members.values():
            if (
                member.link is not None
            ):  # the router's index goes with the process: taking each replica out of it takes time
                member.link.close(200)
        self._supervisor.close(linger=0)
        self._context.term()

    def heartbeats(self) -> list[Heartbeat]:
        return [member.heartbeat for member in self._members.values() if member.takes_requests]

    def _member(self, number: int) -> _Member:
        if number not in self._members:
            heartbeat = Heartbeat(self._heartbeat_fd, number)
            limit = InflightLimit(heartbeat, self.origin, *self._limits, self._num_servers)
            self._members[number] = _Member(number, heartbeat, limit)
        return self._members[number]

    def _connect(self, member: _Member, engine_address: str, reply_address: str, epoch: int) -> None:
        """Connect to a replica's new engine. Suspects that wait for it go with the Hello: an engine runs these before all others."""
        member.epoch, member.is_draining, member.awaits_snapshot = epoch, False, False

        def receive(message: FromEngine) -> None:
            self._receive_from(member, epoch, message)

        member.link = EngineLink(self._context, engine_address, reply_address, receive, self._reader_ended)
        survivors = [found for each in member.quarantined if (found := self._streams.survivor(each)) is not None]
        member.link.send(Hello(self.origin, reply_address, survivors))

    def _disconnect(self, member: _Member) -> None:
        """Drop the connection to a replica's engine and all that is still in it."""
        if member.link is not None:
            member.link.close()
        member.link = member.report = None
        self._router.leave(member.number)
        self.is_recovering = not any(each.takes_requests for each in self._members.values())
        self._show_fleet()
        self._choose_home()

    def _show_fleet(self) -> None:
        """The fleet as its supervisor announced it, where a replica that cannot be reached from here is not called ready."""
        reached = {member.number for member in self._members.values() if member.report is not None}
        shown = [
            msgspec.structs.replace(each, status="restarting")
            if each.status == "ready" and each.replica not in reached
            else each
            for each in self._announced.replicas
        ]
        self.fleet = msgspec.structs.replace(self._announced, replicas=shown)

    def _choose_home(self) -> None:
        """The replica with the lowest number keeps the records of HTTP requests. A new one gets those that are known here."""
        ready = [member for member in self._members.values() if member.takes_requests]
        home = min(ready, key=lambda member: member.number, default=None)
        if home is not self._home:
            self._home = home
            if home is not None:
                self.observer.found()

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._fail(EngineDead(f"the connection to a replica has failed: {type(error).__name__}: {error}"))

    def _receive_from(self, member: _Member, epoch: int, message: FromEngine) -> None:
        if epoch != member.epoch:  # its engine was taken for dead
            return
        match message:
            case StepDeltas():
                places, unsettled = self._places, self._unsettled
                mine = []
                for delta in message.deltas:
                    place = places.get(delta.request_id)
                    if place is not None and place.member is member:
                        mine.append(delta)
                        if delta.request_id in unsettled and (delta.token_ids or delta.finish is not None):
                            unsettled.discard(delta.request_id)
                            self._router.settle(delta.request_id)
                self._streams.deliver(mine)
            case PageEvents():
                if self._router.take_events(message):
                    self._ask_if_incomplete(member)
            case PageSnapshot():
                member.awaits_snapshot = False
                self._router.take_snapshot(message)
            case EngineReport():
                self._joined(member, message)
            case Dying():
                log.warning("replica %d: %s", member.number, message.message)  # the supervisor decides what follows
            case Travelled() | Reply():
                self._receive(message)

    def _ask_if_incomplete(self, member: _Member) -> None:
        """Ask a replica of which events are missing for a snapshot, once: making one takes its engine time between two steps."""
        if member.awaits_snapshot or member.link is None or member.number not in self._router.index.incomplete:
            return
        member.awaits_snapshot = True
        member.link.send(WantSnapshot(self.origin))

    def _joined(self, member: _Member, report: EngineReport) -> None:
        """A replica's engine is ready."""
        member.report = report
        root = fleet_root(self._secret, report.system_fingerprint)
        if not member.is_draining:
            self._router.join(member.number, member.epoch, PageScheme(root, report.page_size))
        self.report = report if self.report is None else self.report
        for request_id in [*member.quarantined]:
            place = self._places[request_id]
            if place.fingerprint not in ("", report.system_fingerprint) and self._streams.has_begun(request_id):
                self._wait_for_place(request_id, place.fingerprint)
        member.quarantined.clear()
        self.is_recovering = not any(each.takes_requests for each in self._members.values())
        self._is_ready.set()
        self._show_fleet()
        self._choose_home()
        self._place_waiting()
        self._tell(ReplicaJoined(member.number, member.epoch))

    def _place_waiting(self) -> None:
        for request_id, fingerprint in [*self._unplaced.items()]:
            request = self._streams.survivor(request_id)
            if request is None:
                self._unplaced.pop(request_id, None)
                continue
            self._place(request, self._able(request_id, fingerprint), "the replica had ended")

    def _able(self, request_id: str, fingerprint: str) -> list[_Member]:
        """Replicas that may continue a request: if it has tokens, only those that would have made the same."""
        members = [member for member in self._members.values() if member.takes_requests]
        if not fingerprint or not self._streams.has_begun(request_id):
            return members
        return [each for each in members if each.report is not None and each.report.system_fingerprint == fingerprint]

    def _wait_for_place(self, request_id: str, fingerprint: str) -> None:
        self._forget_place(request_id)
        self._unplaced[request_id] = fingerprint

    def _move(self, member: _Member, request_id: str, why: str) -> bool:
        """Continue a request at another replica. False: none may continue it now."""
        place, request = self._places[request_id], self._streams.survivor(request_id)
        if request is None:
            return True
        able = [each for each in self._able(request_id, place.fingerprint) if each is not member]
        if not able:
            return False
        if member.link is not None:
            member.link.send(Abort(request_id))
        self._router.settle(request_id)
        self._forget_place(request_id)
        if not self._streams.has_begun(request_id):
            self._unsettled.add(request_id)
        return self._place(request, able, why)

    # ── what the supervisor says ──

    async def _follow_supervisor(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromSupervisor)
        while True:
            await self._handle_notice(decoder.decode(await self._supervisor.recv()))

    async def _handle_notice(self, notice: FromSupervisor) -> None:
        match notice:
            case EngineLost():
                # Its last tokens may still be in the socket: they need not be computed again, and show which requests made progress.
                await asyncio.sleep(LAST_TOKENS_SECONDS)
                self._lose(self._member(notice.replica), notice.message, notice.seated, notice.suspects)
            case EngineStarted():
                member = self._member(notice.replica)
                self._disconnect(member)
                self.num_restarts += member.epoch > 0
                self._connect(member, notice.engine_address, notice.reply_address, notice.epoch)
            case EngineGone():
                await self._remove(notice)
            case ReplicaDrains():
                self._drain(self._member(notice.replica), notice.epoch, notice.seconds)
            case FleetChanged():
                self._announced = notice.state
                self._show_fleet()

    def _lose(self, member: _Member, message: str, seated: list[str], suspects: list[str]) -> None:
        """A replica's engine has ended, or was taken for dead. Its requests go on at others; those that may have ended it wait for its next
        engine, so that they cannot end another."""
        self._disconnect(member)
        for name in self._streams.strike(seated, suspects):
            log.error("request %s is failed: it was in each of the replicas that have ended", name)
        self._stop_drain(member.number)
        for request_id in [*member.requests]:
            request = self._streams.survivor(request_id)
            if request is None:
                self._forget_place(request_id)
            elif request.strikes >= SUSPICIOUS:
                member.quarantined.add(request_id)
                self.observer.lost([request_id])
            elif not self._move(member, request_id, "the replica ended"):
                self.observer.lost([request_id])
                self._wait_for_place(request_id, self._places[request_id].fingerprint)
        self._fail_calls_of(member, EngineUnavailable(f"{message}; it is being restarted", retry_after=2))

    async def _remove(self, notice: EngineGone) -> None:
        """A replica will not be started again."""
        member = self._member(notice.replica)
        if member.link is not None or member.requests:
            await asyncio.sleep(LAST_TOKENS_SECONDS)
        self._lose(member, notice.message, [], [])
        del self._members[member.number]
        if not self._members:
            return self._fail(EngineDead(notice.message))
        for request_id in [*member.requests]:  # suspects that waited for it
            fingerprint = self._places[request_id].fingerprint
            self._wait_for_place(request_id, fingerprint)
        self._place_waiting()
        self._fail_hopeless(notice.message)
        return None

    def _fail_hopeless(self, message: str) -> None:
        """Fail requests with tokens that no replica left would continue with the same ones."""
        known = {each.report.system_fingerprint for each in self._members.values() if each.report is not None}
        if any(each.report is None for each in self._members.values()):
            return  # one that starts may be the right one
        for request_id, fingerprint in [*self._unplaced.items()]:
            if fingerprint and fingerprint not in known and self._streams.has_begun(request_id):
                why = f"{message}; no replica that is left would continue this answer with the same tokens"
                self._streams.end(request_id, Finish("error", message=why))
                self._unplaced.pop(request_id, None)

    # ── draining ──

    def _drain(self, member: _Member, epoch: int, seconds: float) -> None:
        if member.epoch != epoch:  # nothing of ours is there
            return self._tell(ReplicaIdle(member.number, epoch))
        member.is_draining = True
        self._router.leave(member.number)
        self._choose_home()
        if member.requests:
            loop = asyncio.get_running_loop()
            self._drain_timers[member.number] = loop.call_later(seconds, self._move_rest, member, epoch)
        return self._check_drained(member)

    def _move_rest(self, member: _Member, epoch: int) -> None:
        """The time to finish is over. A request that no other replica may continue stays until it is done."""
        self._drain_timers.pop(member.number, None)
        if member.epoch == epoch and member.is_draining:
            for request_id in [*member.requests]:
                if self._streams.survivor(request_id) is not None:
                    self._move(member, request_id, "the replica was drained")

    def _check_drained(self, member: _Member) -> None:
        if member.is_draining and not member.requests and member.link is not None:
            self._stop_drain(member.number)
            self._tell(ReplicaIdle(member.number, member.epoch))

    def _stop_drain(self, number: int) -> None:
        if (timer := self._drain_timers.pop(number, None)) is not None:
            timer.cancel()

    # ── questions ──

    async def control(self, control: Control) -> str:
        if self._failure is not None:
            raise self._failure
        members = [member for member in self._members.values() if member.report is not None]
        if not any(member.takes_requests for member in members):
            raise EngineUnavailable("all replicas have ended and are being restarted", retry_after=2)
        match control:
            case ReadPlace():
                place = self._places.get(control.request_id)
                return "" if place is None or place.member.report is None else await self._ask(place.member, control)
            case Ping():
                return await self._first_answer(members, control)
            case ReadPage():
                return await self._ask_page(members, control)
            case ReadMetrics():
                return merged_metrics(await self._ask_all(members, control)) + fleet_metrics(self.fleet)
            case ReadProgress():
                return merged_progress(await self._ask_all(members, control))
            case ReadJourneys():
                answers = await self._ask_all(members, control)
                home = -1 if self._home is None else self._home.number
                return merged_journeys(sorted(answers, key=lambda answer: answer.replica == home), control.limit)
            case ReadLive():
                return merged_live(await self._ask_all(members, control), self._seconds(), self.fleet)
            case ReadHistory():
                return merged_history(await self._ask_all(members, control))
            case LoadAdapter():
                answers = await self._ask_all(members, control, LOAD_SECONDS)
                return next((answer.body for answer in answers if answer.body), "")
            case HoldPrefix() | ReleasePrefix() | ReadPrefixes():
                return merged_prefixes(await self._ask_all(members, control))
            case SleepEngine() | WakeEngine() | ReadSleep():
                answers = await self._ask_all(members, control, LOAD_SECONDS)
                return ASLEEP if all(answer.body == ASLEEP for answer in answers) else AWAKE
            case ResetPrefixCache():
                return str(sum(int(answer.body) for answer in await self._ask_all(members, control)))

    def _seconds(self) -> dict[int, float]:
        """Seconds of work that wait at each replica."""
        return {replica: self._router.seconds_of(replica) for replica in self._router.replicas}

    async def _ask(self, member: _Member, control: Control) -> str:
        call = next(self._call_ids)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._call_members[call] = member
        try:
            if member.link is None:
                raise EngineUnavailable(f"replica {member.number} has ended", retry_after=2)
            member.link.send(msgspec.structs.replace(control, call=call, origin=self.origin))
            return await future
        finally:
            del self._calls[call], self._call_members[call]

    async def _ask_all(
        self, members: Sequence[_Member], control: Control, seconds: float = REPLY_SECONDS
    ) -> list[ReplicaAnswer]:
        """The answers of all replicas that give one soon; at least one. By number."""
        tasks = {asyncio.create_task(self._ask(member, control)): member for member in members}
        try:
            done, late = await asyncio.wait(tasks, timeout=seconds)
            good = [task for task in done if task.exception() is None]
            while late and not good:
                done, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not good:
            raise EngineUnavailable("no replica answers", retry_after=2)
        return sorted(ReplicaAnswer(tasks[task].number, tasks[task].report, task.result()) for task in good)

    async def _first_answer(self, members: Sequence[_Member], control: Control) -> str:
        pending = {asyncio.create_task(self._ask(member, control)) for member in members}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None:
                        return task.result()
        finally:
            for task in pending:
                task.cancel()
        raise EngineUnavailable("no replica answers", retry_after=2)

    async def _ask_page(self, members: Sequence[_Member], control: ReadPage) -> str:
        """Pages are counted over all replicas, as the live state shows them."""
        page = control.page
        for member in sorted(members, key=lambda each: each.number):
            assert member.report is not None
            if page < member.report.num_pages:
                return await self._ask(member, msgspec.structs.replace(control, page=page))
            page -= member.report.num_pages
        return "[]"

    def _fail_calls_of(self, member: _Member, error: EngineError) -> None:
        for call, future in self._calls.items():
            if self._call_members.get(call) is member and not future.done():
                future.set_exception(error)
