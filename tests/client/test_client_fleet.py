"""A client over several replicas, over real sockets: real loops and schedulers on threads, without a model. This file plays the
supervisor."""

import asyncio
import json
import queue
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from octavo.admission.queue_limit import QueueLimit
from octavo.cache import KVCache
from octavo.cache.page_keys import fleet_root
from octavo.client.client import EngineObserver, Placement
from octavo.client.fleet import FleetClient
from octavo.config import FleetConfig
from octavo.engine.build import build_engine, feed_routers
from octavo.engine.driver import Driver, Inbox
from octavo.engine.process import ZmqOutbox
from octavo.errors import EngineDead, EngineUnavailable, Overloaded
from octavo.ipc.heartbeat import Heartbeat, shared_memory
from octavo.ipc.launch import ReplicaAddress
from octavo.messages import (
    EngineGone,
    EngineLost,
    EngineStarted,
    FleetChanged,
    FleetState,
    GenerateRequest,
    PageEvents,
    Ping,
    ReadHistory,
    ReadJourneys,
    ReadLive,
    ReadMetrics,
    ReadPage,
    ReadPlace,
    ReadProgress,
    ReplicaDrains,
    ReplicaIdle,
    ReplicaJoined,
    ReplicaLoad,
    ReplicaState,
    ResetPrefixCache,
    StepDeltas,
    StepPlan,
    StepResult,
    ToEngine,
    TokenDelta,
    WantSnapshot,
)
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.supervisor.watchdog import CommonRequests
from tests.client.test_client_engine import REPORT, CountingExecutor, request

SECRET = bytes(32)
SECONDS = 20


class Killed(BaseException):
    """The engine ends at this place, as by a signal."""


class Mortal(CountingExecutor):
    """Ends with a prompt that holds `poison`, or once `is_killed` is set. No step ends while `gate` is clear."""

    poison = 99

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(False)
        self.gate, self.is_killed = gate, threading.Event()
        self.pause_at = -1  # the gate is closed at this step

    def submit(self, plan: StepPlan) -> None:
        if any(self.poison in entering.token_ids for entering in plan.enters):
            raise Killed
        super().submit(plan)

    def collect(self) -> StepResult:
        if self.plans[0].step == self.pause_at:
            self.gate.clear()
        self.gate.wait()
        if self.is_killed.is_set():
            raise Killed
        return super().collect()


class Replica:
    """One engine on threads."""

    def __init__(self, fleet: "Fleet", number: int, epoch: int, fingerprint: str) -> None:
        self.number, self.epoch, self.fleet = number, epoch, fleet
        self.heartbeat = Heartbeat(fleet.fd, number)
        self.heartbeat.reset()
        self.gate, self.ended = threading.Event(), threading.Event()
        self.gate.set()
        self.executor = Mortal(self.gate)
        report = msgspec.structs.replace(REPORT, replica=number, epoch=epoch, fingerprint={"model": fingerprint})
        root = fleet_root(SECRET, report.system_fingerprint)
        cache = KVCache(report.num_pages, report.page_size, root=root)
        scheduler = Scheduler(cache, report.max_num_seqs, 32)
        parts: dict[str, Any] = {"heartbeat": self.heartbeat, "queue_limit": fleet.queue_limit or QueueLimit()}
        self.engine = build_engine(scheduler, self.executor, EngineMetrics("tiny", report), **parts)
        feed_routers(self.engine)
        self.inbox: Inbox = queue.SimpleQueue()
        self.seen: list[ToEngine] = []
        for target in (self.receive, self.drive):
            threading.Thread(target=target, daemon=True).start()

    def receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        socket = zmq.Context().socket(zmq.PULL)
        socket.bind(self.fleet.engine_address(self.epoch))
        while True:
            message = decoder.decode(socket.recv())
            self.seen.append(message)
            self.inbox.put(message)

    def drive(self) -> None:
        outbox = ZmqOutbox()
        try:
            Driver(self.engine, self.inbox, outbox, num_origins=self.fleet.num_clients).run()
        except Killed:
            pass
        finally:
            self.ended.set()
            outbox.close()

    def kill(self) -> None:
        self.executor.is_killed.set()
        self.gate.set()
        self.inbox.put(None)

    @property
    def requests(self) -> list[str]:
        return [message.id for message in self.seen if isinstance(message, GenerateRequest)]


class Fleet:
    """Clients in this event loop, replicas on threads."""

    def __init__(self, folder: Path, num_clients: int = 1, queue_limit: QueueLimit | None = None) -> None:
        self.folder, self.num_clients, self.queue_limit = folder, num_clients, queue_limit
        self.fd = shared_memory(8)
        self.replicas: dict[int, Replica] = {}
        self.num_engines = 0
        self.common = CommonRequests()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients: list[FleetClient] = []
        self.notices: list[zmq.Socket[bytes]] = []
        self.joined: list[tuple[int, ReplicaJoined]] = []  # told by clients
        self.told: list[tuple[int, Any]] = []  # all else

    def engine_address(self, epoch: int) -> str:
        return f"ipc://{self.folder}/engine-{epoch}"

    def reply_address(self, origin: int, epoch: int) -> str:
        return f"ipc://{self.folder}/api-{origin}-{epoch}"

    def start(self, number: int, fingerprint: str = "a") -> Replica:
        self.num_engines += 1
        replica = self.replicas[number] = Replica(self, number, self.num_engines, fingerprint)
        return replica

    async def open(self, num_replicas: int, limits: tuple[int, int] = (0, 0), **config: Any) -> FleetClient:
        for number in range(num_replicas):
            self.start(number)
        for origin in range(self.num_clients):
            self.add_client(origin, limits, **config)
        await asyncio.gather(*(client.ready() for client in self.clients))
        for client in self.clients:
            await until(lambda client=client: len(client.heartbeats()) == num_replicas)
        return self.clients[0]

    def add_client(self, origin: int, limits: tuple[int, int] = (0, 0), **config: Any) -> FleetClient:
        addresses = [
            ReplicaAddress(
                each.number, each.epoch, self.engine_address(each.epoch), self.reply_address(origin, each.epoch)
            )
            for each in self.replicas.values()
        ]
        address = f"ipc://{self.folder}/notices-{len(self.notices)}"
        client = FleetClient(
            FleetConfig(data_parallel_size=len(addresses), **config),
            addresses,
            SECRET,
            origin,
            address,
            self.fd,
            limits,
            self.num_clients,
            lambda message: (self.joined if isinstance(message, ReplicaJoined) else self.told).append(
                (origin, message)
            ),
        )
        self.clients.append(client)
        self.notices.append(self.context.socket(zmq.PUSH))
        self.notices[-1].connect(address)
        return client

    def tell(self, notice: Any) -> None:
        for notices in self.notices:
            notices.send(msgspec.msgpack.encode(notice))

    async def lose(self, number: int) -> None:
        """Wait until a replica has ended, and announce it."""
        replica = self.replicas[number]
        await asyncio.to_thread(replica.ended.wait, SECONDS)
        self.announce_loss(number)

    def announce_loss(self, number: int) -> None:
        seated = self.replicas[number].heartbeat.seated()
        self.tell(EngineLost("it ended", seated, number, self.common.note(seated, 0.0)))

    def restart(self, number: int, fingerprint: str = "a") -> Replica:
        replica = self.start(number, fingerprint)
        for origin, notices in enumerate(self.notices):
            addresses = (self.engine_address(replica.epoch), self.reply_address(origin, replica.epoch))
            notices.send(msgspec.msgpack.encode(EngineStarted(*addresses, number, replica.epoch)))
        return replica

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.kill()
        for client in self.clients:
            client.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("f"))
    yield fleet
    fleet.close()


async def until(is_true) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def collect(client: FleetClient, name: str) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for deltas in client.deltas(name):
        for delta in deltas:
            if delta.finish is not None and delta.finish.reason == "error":
                raise AssertionError(delta.finish.message)
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


def submit(client: FleetClient, each: GenerateRequest) -> "asyncio.Task[dict[int, list[int]]]":
    client.submit(each)
    return asyncio.create_task(collect(client, each.id))


def with_prompt(each: GenerateRequest, prompt: list[int]) -> GenerateRequest:
    return msgspec.structs.replace(each, prompt_ids=prompt)


def answer_of(each: GenerateRequest) -> dict[int, list[int]]:
    first = len(each.prompt_ids)
    return {key: list(range(first, first + each.params.max_tokens)) for key in range(each.params.n)}


class Seen(EngineObserver):
    def __init__(self) -> None:
        self.moves: list[tuple[str, Placement]] = []
        self.num_found = 0

    def moved(self, request_id: str, placement: Placement) -> None:
        self.moves.append((request_id, placement))

    def found(self) -> None:
        self.num_found += 1


async def test_requests_are_spread_and_all_answered(fleet):
    client = await fleet.open(3)
    asked = [request(f"r{number}", 10, n=1 + number % 2) for number in range(30)]
    answers = await asyncio.wait_for(asyncio.gather(*(submit(client, each) for each in asked)), SECONDS)
    assert answers == [answer_of(each) for each in asked]
    assert all(len(replica.requests) >= 5 for replica in fleet.replicas.values())
    assert (
        not client._places
        and not client._placements
        and not client._unsettled
        and not client._router.index.num_expected
    )
    assert all(not member.requests and not member.limit._sent for member in client._members.values())


async def test_requests_follow_their_prefix(fleet):
    client = await fleet.open(3)
    prompts = [[number] * 24 for number in (5, 6, 7)]
    for round_ in range(4):
        for number, prompt in enumerate(prompts):
            each = with_prompt(request(f"r{round_}-{number}", 2), prompt)
            assert await asyncio.wait_for(submit(client, each), SECONDS) == answer_of(each)
            num_pages = 5 * (number + 1 if round_ == 0 else len(prompts))
            await until(lambda num=num_pages: len(client._router.index) >= num)  # its pages are reported
    homes = {
        number: {i for i, r in fleet.replicas.items() if any(n.endswith(f"-{number}") for n in r.requests)}
        for number in range(3)
    }
    assert all(len(home) == 1 for home in homes.values()) and len(set.union(*homes.values())) == 3


async def test_streams_of_a_lost_replica_go_on_at_others(fleet):
    client = await fleet.open(3)
    client.observer = seen = Seen()
    lost = fleet.replicas[1]
    lost.executor.pause_at = 12
    asked = [request(f"r{number}", 40 + number % 5, n=1 + number % 2) for number in range(9)]
    reading = [submit(client, each) for each in asked]
    await until(lambda: any(client._streams.has_begun(name) for name in lost.requests) and not lost.gate.is_set())
    there = list(client._members[1].requests)
    lost.kill()
    await fleet.lose(1)
    answers = await asyncio.wait_for(asyncio.gather(*reading), SECONDS)
    assert answers == [answer_of(each) for each in asked]
    assert {name for name, _ in seen.moves} <= set(there) and seen.moves
    assert all(placement.replica != 1 and placement.moved == "the replica ended" for _, placement in seen.moves)
    assert client.num_moved == len(seen.moves) and not client.is_recovering


async def test_a_replica_taken_for_dead_is_not_heard_any_more(fleet):
    """It was only slow: its tokens come late, and the streams have gone on elsewhere."""
    client = await fleet.open(2)
    fleet.replicas[0].gate.clear()
    fleet.replicas[1].gate.clear()
    asked = [request(f"r{number}", 20) for number in range(4)]
    reading = [submit(client, each) for each in asked]
    slow = fleet.replicas[0]
    await until(lambda: len(slow.requests) == 2)
    member, epoch = client._members[0], slow.epoch
    fleet.announce_loss(0)
    await until(lambda: not member.requests)
    late = StepDeltas([TokenDelta(name, 0, [77]) for name in slow.requests])
    client._receive_from(member, epoch, late)  # it was in a socket: another replica has the request now
    slow.gate.set()
    fleet.replicas[1].gate.set()
    assert await asyncio.wait_for(asyncio.gather(*reading), SECONDS) == [answer_of(each) for each in asked]
    fresh = fleet.restart(0)
    await until(lambda: member.report is not None)
    assert member.epoch == fresh.epoch > epoch
    again = submit(client, request("again", 5))
    client._receive_from(member, epoch, StepDeltas([TokenDelta("again", 0, [77])]))  # of an earlier engine
    assert await asyncio.wait_for(again, SECONDS) == answer_of(request("again", 5))


@pytest.mark.parametrize("num_others", [0, 3])
async def test_a_request_that_ends_replicas_is_failed_after_its_second(fleet, num_others):
    client = await fleet.open(4)
    others = [request(f"r{number}", 50) for number in range(num_others)]
    for replica in fleet.replicas.values():
        replica.gate.clear()
    reading = [submit(client, each) for each in others]
    bad = submit(client, with_prompt(request("bad", 50), [1, Mortal.poison, 2]))
    for replica in fleet.replicas.values():
        replica.gate.set()
    num_ended = 0
    ended: set[int] = set()
    while not bad.done():
        for number, replica in [*fleet.replicas.items()]:
            if replica.ended.is_set() and replica.epoch not in ended:
                ended.add(replica.epoch)
                num_ended += 1
                await fleet.lose(number)
        await asyncio.sleep(0.01)
    assert num_ended == 2 and "2 engines have ended with request bad" in str(bad.exception())
    assert await asyncio.wait_for(asyncio.gather(*reading), SECONDS) == [answer_of(each) for each in others]
    with pytest.raises(Exception, match="identical"):
        client.submit(with_prompt(request("bad2", 50), [1, Mortal.poison, 2]))


async def test_suspects_wait_for_the_replica_that_they_ended(fleet):
    """Two requests were in both replicas that ended. They are tried in the second one's next engine, and end no third."""
    client = await fleet.open(2)
    suspects = [with_prompt(request("bad", 50), [1, Mortal.poison, 2]), request("good", 50)]
    for each in suspects:
        client._streams.open(each)
        client._streams._streams[each.id].strikes = 1
        assert client._place(each, [client._members[1]])
    reading = [asyncio.create_task(collect(client, each.id)) for each in suspects]
    fleet.common.note(["bad", "good"], 0.0)
    await fleet.lose(1)
    await until(lambda: len(client._members[1].quarantined) == 2 or any(task.done() for task in reading))
    healthy = fleet.replicas[0]
    replica = fleet.restart(1)
    while not reading[0].done():
        await until(lambda: replica.ended.is_set() or reading[0].done())  # noqa: B023
        if replica.ended.is_set() and not reading[0].done():
            await fleet.lose(1)
            replica = fleet.restart(1)
        assert fleet.num_engines < 8
    assert "bad" in str(reading[0].exception()) and not healthy.ended.is_set() and "bad" not in healthy.requests
    assert await asyncio.wait_for(reading[1], SECONDS) == answer_of(suspects[1])


async def test_no_replica_of_another_fingerprint_continues_a_stream(fleet):
    client = await fleet.open(1)
    first = fleet.replicas[0]
    first.executor.pause_at = 12
    task = submit(client, request("a", 50))
    await until(lambda: client._streams.has_begun("a") and not first.gate.is_set())
    other = fleet.restart(1, fingerprint="b")
    await until(lambda: len(client.heartbeats()) == 2)
    first.kill()
    await fleet.lose(0)
    await until(lambda: "a" in client._unplaced)
    fresh = submit(client, request("b", 5))
    assert await asyncio.wait_for(fresh, SECONDS) == answer_of(request("b", 5)) and other.requests == ["b"]
    fleet.restart(0)  # the same again
    assert await asyncio.wait_for(task, SECONDS) == answer_of(request("a", 50))
    assert other.requests == ["b"]


async def test_a_stream_that_none_may_continue_fails_and_says_why(fleet):
    client = await fleet.open(1)
    fleet.replicas[0].executor.pause_at = 12
    task = submit(client, request("a", 50))
    await until(lambda: client._streams.has_begun("a") and not fleet.replicas[0].gate.is_set())
    fleet.restart(1, fingerprint="b")
    await until(lambda: len(client.heartbeats()) == 2)
    fleet.tell(EngineGone("it is given up", 0))
    with pytest.raises(AssertionError, match="no replica that is left would continue this answer"):
        await asyncio.wait_for(task, SECONDS)


async def test_without_a_replica_requests_wait_and_calls_are_refused(fleet):
    client = await fleet.open(2)
    for number in (0, 1):
        fleet.replicas[number].kill()
        await fleet.lose(number)
    await until(lambda: client.is_recovering)
    task = submit(client, request("a", 5))
    with pytest.raises(EngineUnavailable, match="all replicas"):
        await client.control(Ping(0))
    fleet.restart(1)
    assert await asyncio.wait_for(task, SECONDS) == answer_of(request("a", 5))
    assert not client.is_recovering and await client.control(Ping(0)) == "pong"
    fleet.tell(EngineGone("given up", 0))
    fleet.tell(EngineGone("given up", 1))
    await until(lambda: client.report is None)
    with pytest.raises(EngineDead, match="given up"):
        client.submit(request("b"))


async def test_a_replica_that_is_lost_here_is_not_called_ready(fleet):
    client = await fleet.open(2)
    fleet.tell(FleetChanged(FleetState([ReplicaState(0, "ready", 1), ReplicaState(1, "ready", 2)], 2)))
    await until(lambda: [each.status for each in client.fleet.replicas] == ["ready", "ready"])
    fleet.replicas[1].kill()
    await fleet.lose(1)
    await until(lambda: [each.status for each in client.fleet.replicas] == ["ready", "restarting"])
    fleet.restart(1)
    await until(lambda: [each.status for each in client.fleet.replicas] == ["ready", "ready"])


async def test_each_api_process_says_which_engines_it_has_joined(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("f"), num_clients=2)
    try:
        await fleet.open(2)
        told = [(origin, ReplicaJoined(number, number + 1)) for origin in (0, 1) for number in (0, 1)]
        assert sorted(fleet.joined, key=lambda each: (each[0], each[1].replica)) == told
        fleet.joined.clear()
        fleet.replicas[1].kill()
        await fleet.lose(1)
        await until(lambda: all(len(client.heartbeats()) == 1 for client in fleet.clients))
        assert not fleet.joined
        fleet.restart(1)
        await until(lambda: len(fleet.joined) == 2)
        assert sorted(fleet.joined) == [(0, ReplicaJoined(1, 3)), (1, ReplicaJoined(1, 3))]
    finally:
        fleet.close()


async def test_a_drained_replica_keeps_its_streams_then_gives_them_away(fleet):
    client = await fleet.open(2)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    asked = [request(f"r{number}", 30) for number in range(4)]
    reading = [submit(client, each) for each in asked]
    drained = fleet.replicas[0]
    await until(lambda: len(drained.requests) == 2)
    fleet.tell(ReplicaDrains(0, drained.epoch, 0.2))
    await until(lambda: client._members[0].is_draining)
    assert len(client._members[0].requests) == 2 and not fleet.told
    new = submit(client, request("new", 5))
    assert fleet.replicas[1].gate.set() is None
    assert await asyncio.wait_for(new, SECONDS) == answer_of(request("new", 5)) and "new" not in drained.requests
    await until(lambda: fleet.told)  # its two requests have moved: it computes nothing, and yet they go on
    assert fleet.told == [(0, ReplicaIdle(0, drained.epoch))]
    assert await asyncio.wait_for(asyncio.gather(*reading), SECONDS) == [answer_of(each) for each in asked]


async def test_a_drained_replica_that_is_idle_is_reported_at_once(fleet):
    client = await fleet.open(2)
    task = submit(client, request("a", 3))
    await asyncio.wait_for(task, SECONDS)
    for number in (0, 1):
        fleet.tell(ReplicaDrains(number, fleet.replicas[number].epoch, 60))
    await until(lambda: len(fleet.told) == 2)
    waiting = submit(client, request("b", 3))  # none takes it
    fleet.tell(EngineGone("drained", 0))
    fleet.restart(1)
    assert await asyncio.wait_for(waiting, SECONDS) == answer_of(request("b", 3))


async def test_an_api_process_that_starts_again_gets_the_whole_index(fleet):
    client = await fleet.open(2)
    tasks = [submit(client, with_prompt(request(f"r{number}", 2), [number + 1] * 20)) for number in range(6)]
    await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)
    pages = sum(len(list(each.engine.loop.scheduler.cache.findable_keys())) for each in fleet.replicas.values())
    await until(lambda: len(client._router.index) == pages)
    fleet.num_clients = 1
    other = fleet.add_client(1)
    await other.ready()
    await until(lambda: len(other.heartbeats()) == 2 and len(other._router.index) == pages)
    assert not other._router.index.incomplete


async def test_a_gap_in_the_events_is_closed_by_a_snapshot(fleet):
    client = await fleet.open(2)
    fleet.replicas[0].engine.control.feed.take()  # lost on its way
    task = submit(client, with_prompt(request("a", 2), [3] * 20))
    await asyncio.wait_for(task, SECONDS)
    task = submit(client, with_prompt(request("b", 2), [4] * 20))
    await asyncio.wait_for(task, SECONDS)
    pages = sum(len(list(each.engine.loop.scheduler.cache.findable_keys())) for each in fleet.replicas.values())
    await until(lambda: not client._router.index.incomplete and len(client._router.index) == pages)


async def test_only_the_replica_with_a_gap_is_asked_for_a_snapshot_and_once(fleet):
    client = await fleet.open(2)
    stuck, other = fleet.replicas[0], fleet.replicas[1]
    stuck.executor.pause_at = 0  # it does not answer in the middle of a step
    tasks = [submit(client, with_prompt(request(name, 2), [at] * 20)) for at, name in enumerate("abcd", 3)]
    await until(lambda: not stuck.gate.is_set())
    for number in (50, 51, 52):
        member = client._members[stuck.number]
        client._receive_from(member, stuck.epoch, PageEvents(0, stuck.epoch, number, b"", b"", ReplicaLoad()))
    await until(lambda: any(isinstance(message, WantSnapshot) for message in stuck.seen))
    await asyncio.wait(tasks, timeout=0.2)  # the other replica goes on, and reports
    asked = [sum(isinstance(message, WantSnapshot) for message in each.seen) for each in (stuck, other)]
    assert asked == [1, 0]
    stuck.gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)


async def test_questions_are_answered_for_all_replicas(fleet):
    client = await fleet.open(2)
    client.observer = seen = Seen()
    for replica in fleet.replicas.values():
        replica.gate.clear()
    reading = [submit(client, request(f"r{number}", 30)) for number in range(12)]
    await until(lambda: sum(len(replica.requests) for replica in fleet.replicas.values()) == 12)
    for replica in fleet.replicas.values():
        replica.gate.set()
    metrics = await client.control(ReadMetrics(0))
    heads = [line for line in metrics.splitlines() if line.startswith("# HELP vllm:num_requests_running")]
    assert len(heads) == 1 and 'engine="0"' in metrics and 'engine="1"' in metrics
    progress = json.loads(await client.control(ReadProgress(0)))
    live = json.loads(await client.control(ReadLive(0)))["state"]
    assert (
        live["num_pages"] == 100 and live["max_rows"] == 8 and [each["replica"] for each in live["replicas"]] == [0, 1]
    )
    assert progress["running"] <= 8 and live["replicas"][1]["first_page"] == 50
    journeys = json.loads(await client.control(ReadJourneys(0, limit=5)))
    assert len(journeys) <= 5
    assert json.loads(await client.control(ReadPage(0, 75))) is not None
    assert await client.control(ReadPlace(0, "nothing")) == ""
    await asyncio.wait_for(asyncio.gather(*reading), SECONDS)
    history = json.loads(await client.control(ReadHistory(0, 60.0)))
    assert sum(point[4] for point in history["points"]) == pytest.approx(12 * 30, abs=0.1)
    assert int(await client.control(ResetPrefixCache(0))) > 0
    fleet.replicas[0].kill()
    await fleet.lose(0)
    await until(lambda: seen.num_found == 1)  # the records of HTTP requests are kept at another replica now


async def test_a_full_replica_sends_requests_to_one_with_room(fleet, tmp_path_factory):
    client = await fleet.open(2, limits=(2, 0), routing_policy="round_robin")
    for replica in fleet.replicas.values():
        replica.gate.clear()
    reading = [submit(client, request(f"r{number}", 5)) for number in range(12)]  # 4 rows and 2 in the queue each
    await until(lambda: sum(len(replica.requests) for replica in fleet.replicas.values()) == 12)
    assert [len(replica.requests) for replica in fleet.replicas.values()] == [6, 6]
    with pytest.raises(Overloaded):
        for number in range(20):
            reading.append(submit(client, request(f"more{number}", 5)))
    for replica in fleet.replicas.values():
        replica.gate.set()
    await asyncio.wait_for(asyncio.gather(*reading), SECONDS)


async def test_refused_requests_are_no_work_that_waits(fleet):
    client = await fleet.open(2)
    for number in range(3):
        with pytest.raises(AssertionError, match="could not queue"):
            await asyncio.wait_for(submit(client, with_prompt(request(f"r{number}", 2), [3] * 5000)), SECONDS)
    assert any(replica.requests for replica in fleet.replicas.values())
    await until(lambda: [client._router._loads[number].num_tokens for number in (0, 1)] == [0, 0])
