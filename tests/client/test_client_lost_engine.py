"""Clients over real sockets whose engines end: a real loop and scheduler on a thread, without a model. This file plays the
supervisor."""

import asyncio
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from octavo.admission.queue_limit import QueueLimit
from octavo.cache import audit
from octavo.client import inflight_limit
from octavo.client.client import ZmqClient
from octavo.client.inflight_limit import InflightLimit
from octavo.engine.build import Engine
from octavo.engine.driver import Driver, Inbox
from octavo.engine.process import ZmqOutbox
from octavo.engine.recovery import Recovery
from octavo.errors import EngineDead, EngineUnavailable, Overloaded
from octavo.ipc.heartbeat import Heartbeat, shared_memory
from octavo.messages import (
    Abort,
    EngineGone,
    EngineLost,
    EngineStarted,
    GenerateRequest,
    Hello,
    Ping,
    Responded,
    ServerGone,
    StepDeltas,
    StepPlan,
    StepResult,
    ToEngine,
)
from tests.client.test_client_engine import CountingExecutor, make_engine, request


class Killed(BaseException):
    """The engine ends at this place, as by a signal: no code of its own may act on it."""


class Mortal(CountingExecutor):
    """Fails at a step, at a prompt or at a grammar. Tokens depend on the position alone, so a missing or repeated one is noticed."""

    poison = 99
    deadly_grammar = "deadly"
    gate: threading.Event  # no step ends while this is clear

    def submit(self, plan: StepPlan) -> None:
        if any(self.poison in entering.token_ids for entering in plan.enters):
            raise EngineDead("poisoned")
        super().submit(plan)

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        if grammar == self.deadly_grammar:
            raise Killed
        super().prepare(grammar, forgets, done)

    def collect(self) -> StepResult:
        self.gate.wait()
        if self.plans[0].step == self.fail_at:
            raise EngineDead("a worker is lost")
        return super().collect()


class House:
    """The clients of two API processes in this event loop, and engines on threads, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fd = shared_memory()
        self.heartbeat = Heartbeat(self.fd)
        self.queue_limit = QueueLimit()
        self.gate = threading.Event()
        self.gate.set()
        self.num_engines = 0
        self.num_received = 0  # messages, by all engines
        self.threads: list[threading.Thread] = []
        self.inbox: Inbox = queue.SimpleQueue()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients = []
        self.notices = []
        for origin in range(2):
            address = f"ipc://{folder}/notices-{origin}"
            inflight_limit = InflightLimit(self.heartbeat, origin, 0, 0, 2)
            self.clients.append(ZmqClient(*self.addresses(origin, 1), origin, address, self.heartbeat, inflight_limit))
            self.notices.append(self.context.socket(zmq.PUSH))
            self.notices[-1].connect(address)

    def bound(self, max_requests: int) -> None:
        """Limit the waiting requests of the clients and of engines started from now on."""
        self.queue_limit = QueueLimit(max_requests)
        for origin, client in enumerate(self.clients):
            client._inflight_limit = InflightLimit(self.heartbeat, origin, max_requests, 0, 2)

    def addresses(self, origin: int, number: int) -> tuple[str, str]:
        return f"ipc://{self.folder}/engine-{number}", f"ipc://{self.folder}/api-{origin}-{number}"

    def start_engine(self, fail_at: int = -1, overlap: bool = True) -> None:
        self.num_engines += 1
        executor, heartbeat = Mortal(overlap, fail_at), Heartbeat(self.fd)
        executor.gate = self.gate
        heartbeat.reset()
        engine = make_engine(executor=executor, heartbeat=heartbeat, queue_limit=self.queue_limit)
        self.inbox = queue.SimpleQueue()
        self.ended = threading.Event()
        receiver = threading.Thread(target=self.receive, args=(self.addresses(0, self.num_engines)[0], self.inbox))
        driver = threading.Thread(target=self.drive, args=(engine, self.inbox, self.ended))
        for thread in (receiver, driver):
            thread.daemon = True
            thread.start()
        self.threads = [driver]

    def receive(self, address: str, inbox: Inbox) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        socket = zmq.Context().socket(zmq.PULL)
        socket.bind(address)
        while True:
            inbox.put(decoder.decode(socket.recv()))
            self.num_received += 1

    def drive(self, engine: Engine, inbox: Inbox, ended: threading.Event) -> None:
        outbox = ZmqOutbox()
        try:
            Driver(engine, inbox, outbox, num_origins=2).run()
        except (EngineDead, Killed):
            ended.set()
        finally:
            outbox.close()

    def tell(self, notice) -> None:
        for notices in self.notices:
            notices.send(msgspec.msgpack.encode(notice))

    async def replace_engine(self, **options) -> None:
        """Wait until the engine has ended, and start another."""
        await asyncio.to_thread(self.ended.wait)
        self.tell(EngineLost("it ended", self.heartbeat.seated()))
        self.start_engine(**options)
        for origin, notices in enumerate(self.notices):
            notices.send(msgspec.msgpack.encode(EngineStarted(*self.addresses(origin, self.num_engines))))

    def close(self) -> None:
        self.inbox.put(None)
        self.gate.set()
        self.ended.set()  # a thread that still waits for it would keep the event loop from closing
        for thread in self.threads:
            thread.join(5)
        for client in self.clients:
            client.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def house(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("h"))
    yield house
    house.close()


async def collect(client: ZmqClient, name: str) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for deltas in client.deltas(name):
        for delta in deltas:
            assert delta.finish is None or delta.finish.reason != "error", delta
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
async def test_every_stream_goes_on_where_it_was(house, overlap):
    house.start_engine(fail_at=16, overlap=overlap)
    await asyncio.gather(*(client.ready() for client in house.clients))
    requests = [request(f"r{i}", 30 + i % 9, n=1 + i % 2) for i in range(20)]
    reading = []
    for number, each in enumerate(requests):
        client = house.clients[number % 2]
        client.submit(each)
        reading.append(asyncio.create_task(collect(client, each.id)))
    for fail_at in (13, 0, 14, -1):  # 0: the engine ends at once
        await house.replace_engine(fail_at=fail_at, overlap=overlap)
    answers = await asyncio.wait_for(asyncio.gather(*reading), 20)
    for each, answer in zip(requests, answers, strict=True):
        wanted = list(range(3, 3 + each.params.max_tokens))
        assert answer == dict.fromkeys(range(each.params.n), wanted)
    assert all(client.num_restarts == 4 and len(client._streams) == 0 for client in house.clients)


async def test_between_two_engines_requests_are_taken_and_calls_refused(house):
    house.start_engine(fail_at=2)
    first, second = house.clients
    await asyncio.gather(*(client.ready() for client in house.clients))
    first.submit(request("a", 30))
    await asyncio.to_thread(house.ended.wait)
    house.tell(EngineLost("it ended", []))
    while not second.is_recovering:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    second.submit(request("b", 5))
    second.submit(request("c", 5))
    await second.deltas("c").aclose()  # never read: nothing of it may be computed
    second._streams.close("c")
    with pytest.raises(EngineUnavailable, match="being restarted"):
        await second.control(Ping(0))
    house.start_engine()
    for origin, notices in enumerate(house.notices):
        notices.send(msgspec.msgpack.encode(EngineStarted(*house.addresses(origin, 2))))
    answers = await asyncio.wait_for(asyncio.gather(collect(first, "a"), collect(second, "b")), 20)
    assert answers == [{0: list(range(3, 33))}, {0: list(range(3, 8))}]
    assert await second.control(Ping(0)) == "pong" and not second.is_recovering


async def test_what_waits_for_an_engine_that_does_not_answer_is_bounded(house, monkeypatch):
    """The next engine does not refuse what one has taken in. All other requests are counted in their API process, and again by
    the next engine."""
    monkeypatch.setattr(inflight_limit, "AWAY_SECONDS", 0.02)
    house.bound(6)  # each of the two processes has a share of three of them, and of two of the four rows
    house.gate.clear()
    house.start_engine(fail_at=0)
    first, second = house.clients
    await first.ready()  # the engine takes nothing in until the second client has sent its Hello

    def submit(client: ZmqClient, name: str) -> asyncio.Task[dict[int, list[int]]]:
        client.submit(request(name, 7))
        return asyncio.create_task(collect(client, name))

    def is_full(client: ZmqClient, words: str) -> None:
        with pytest.raises(Overloaded, match=f"requests are already waiting; at most .* may wait .*{words}") as refused:
            client.submit(request("refused"))
        assert refused.value.retry_after >= 1 and not client._streams._streams.get("refused")

    taken = [submit(first, f"a{number}") for number in range(10)]
    is_full(first, "waiting-requests")  # as many are in flight as an idle engine would accept
    while house.num_received < 1 + len(taken):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await second.ready()
    while first._inflight_limit._sent:
        first._inflight_limit._drop_taken()
        await asyncio.sleep(0.01)
    while not second._inflight_limit._is_silent():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="does not respond, and each of 2"):
        first.submit(request("refused"))
    new = [submit(second, f"b{number}") for number in range(5)]
    is_full(second, "does not respond")
    house.gate.set()
    await asyncio.to_thread(house.ended.wait)
    house.tell(EngineLost("it ended", []))
    while not second.is_recovering:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    is_full(second, "does not respond")
    new.pop().cancel()  # its client leaves, and another request takes its place
    await asyncio.sleep(2 * inflight_limit.RECOUNT_SECONDS)
    new.append(submit(second, "b5"))
    await house.replace_engine()
    answers = await asyncio.wait_for(asyncio.gather(*taken, *new, return_exceptions=True), 20)
    assert answers[:10] == [{0: list(range(3, 10))}] * 10
    assert all(
        isinstance(answer, AssertionError) and "6 requests are already wait" in str(answer)  # pytest shortens it
        for answer in answers[10:]
    )
    assert await submit(second, "c") == {0: list(range(3, 10))} and not second._inflight_limit._sent_all.num_tokens


@pytest.mark.parametrize("cause", ["prompt", "grammar"])
async def test_what_ends_engines_is_failed_alone(house, cause):
    house.start_engine()
    await asyncio.gather(*(client.ready() for client in house.clients))
    good = [request(f"r{i}", 25) for i in range(3)]
    bad = request("bad", 25)
    if cause == "prompt":
        bad = msgspec.structs.replace(bad, prompt_ids=[1, Mortal.poison, 2])
    else:  # it ends engines while its grammar is compiled, before it has a row
        params = msgspec.structs.replace(bad.params, grammar=Mortal.deadly_grammar)
        bad = msgspec.structs.replace(bad, params=params)
    reading = []
    for number, each in enumerate([*good[:2], bad, *good[2:]]):
        client = house.clients[number % 2]
        client.submit(each)
        reading.append(asyncio.create_task(collect(client, each.id)))
    while not reading[2].done():
        ended = asyncio.create_task(asyncio.to_thread(house.ended.wait))
        await asyncio.wait({ended, reading[2]}, return_when=asyncio.FIRST_COMPLETED)
        if not reading[2].done():
            await house.replace_engine()
        assert house.num_engines < 12
        await asyncio.sleep(0.05)
    answers = await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), 20)
    assert isinstance(answers[2], AssertionError) and "request bad was alone" in str(answers[2])
    assert [answers[i] for i in (0, 1, 3)] == [{0: list(range(3, 28))}] * 3


async def test_when_there_will_be_no_other_every_request_fails(house):
    house.start_engine(fail_at=3)
    await asyncio.gather(*(client.ready() for client in house.clients))
    house.clients[0].submit(request("a", 30))
    reading = asyncio.create_task(collect(house.clients[0], "a"))
    await asyncio.to_thread(house.ended.wait)
    house.tell(EngineGone("given up"))
    with pytest.raises(EngineDead, match="given up"):
        await reading
    with pytest.raises(EngineDead, match="given up"):
        house.clients[0].submit(request("b"))


class Kept:
    """An outbox that keeps the messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, object]] = []

    def connect(self, hello: Hello) -> None: ...

    def send(self, origin: int, message: object) -> None:
        self.sent.append((origin, message))

    def send_all(self, message: object) -> None: ...


def test_what_an_ended_process_asked_for_is_let_go():
    """Its requests free their rows and pages; those of other processes and of its successor continue."""
    engine, inbox, outbox = make_engine(), queue.SimpleQueue(), Kept()
    driver, scheduler = Driver(engine, inbox, outbox, num_origins=2), engine.loop.scheduler

    def take(*messages) -> list[str]:
        for message in messages:
            inbox.put(message)
        inbox.put(None)
        driver.run()
        driver._continue_requests(driver._recovery or Recovery(0))
        driver._send(engine.loop.step())
        return scheduler.request_ids()

    asked = [
        msgspec.structs.replace(request(name, 20), origin=origin) for name, origin in (("a", 0), ("b", 1), ("c", 0))
    ]
    assert take(Hello(0, "first"), Hello(1, "second"), *asked[:2]) == ["a", "b"]
    assert take(ServerGone(0, "not the one that is there")) == ["a", "b"]
    assert take(ServerGone(0, "first")) == ["b"] and not audit(scheduler.cache)
    assert take(Hello(0, "third"), asked[2], ServerGone(0, "first")) == ["b", "c"]
    assert take(Hello(0, "fourth")) == ["b"]  # the third's end was never announced: the fourth replaces it
    sent = [origin for origin, message in outbox.sent[-2:] if isinstance(message, StepDeltas)]
    assert sent and set(sent) == {1} and len(scheduler.cache.tables) == 1


def test_an_engine_rests_when_nothing_has_come_for_a_while_and_not_after_every_message(monkeypatch):
    """A message about the last request arrives just before the next request, which must not wait."""
    engine, inbox = make_engine(), queue.SimpleQueue()
    driver, loop = Driver(engine, inbox, Kept(), num_origins=2), engine.loop
    loop.add(request("a", 2))
    while loop.has_work:
        loop.step()
    monkeypatch.setattr("octavo.engine.driver._REST_SECONDS", 0.01)
    inbox.put(Responded(["a"], "POST", "/v1/completions", 200, 0.1))
    assert driver._take_in() and engine.control.audits.counts["right"] == 0
    assert driver._take_in() and engine.control.audits.counts["right"] == 1


def test_a_request_is_named_while_its_grammar_is_compiled():
    """Also while others are computed: what compiles it in a thread may end the engine."""

    class Compiles(CountingExecutor):
        def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
            compiled.append(done)

    compiled: list[Callable[[int], None]] = []
    heartbeat = Heartbeat()
    engine = make_engine(executor=Compiles(False), heartbeat=heartbeat)
    loop = engine.loop

    def with_grammar(name: str) -> GenerateRequest:
        each = request(name, 5)
        return msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, grammar=name))

    loop.add(request("plain", 5))
    for name in ("a", "b"):
        loop.add(with_grammar(name))
    loop.step()
    assert sorted(heartbeat.seated()) == ["a", "b", "plain"]
    loop.abort(Abort("b"))
    assert sorted(heartbeat.seated()) == ["a", "plain"]
    compiled[0](0)
    loop.step()
    assert sorted(heartbeat.seated()) == ["a", "plain"]
    loop.abort(Abort("a"))
    loop.step()
    assert heartbeat.seated() == ["plain"], "it was in its row alone"
    for number in range(100):  # more than there are places
        loop.add(with_grammar(f"more {number}"))
    assert 60 < len(heartbeat.seated()) < 80
    for number in range(100):
        loop.abort(Abort(f"more {number}"))
    assert heartbeat.seated() == ["plain"]
