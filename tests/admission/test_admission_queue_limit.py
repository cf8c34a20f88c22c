"""Which requests are refused, when, and with which message: a real loop and scheduler, with steps that take a moment."""

import asyncio
import time

import msgspec
import pytest

from octavo.admission.finish_errors import failure_of
from octavo.admission.queue_limit import MAX_RETRY_SECONDS, QueueLimit
from octavo.engine.build import Engine
from octavo.errors import DeadlineExceeded, OctavoError, Overloaded, RequestFailed
from octavo.messages import Finish, Ping, ReadPlace, ReadProgress, StepResult
from tests.client.test_client_engine import REPORT, CountingExecutor, client_of, collect, make_engine, request


class SlowExecutor(CountingExecutor):
    def collect(self) -> StepResult:
        time.sleep(0.002)
        return super().collect()


def slow_engine(queue_limit: QueueLimit) -> Engine:
    report = msgspec.structs.replace(REPORT, max_model_len=4096, num_pages=10_000)
    return make_engine(report=report, executor=SlowExecutor(False), queue_limit=queue_limit)


async def end_of(client, each) -> OctavoError | int:
    """Return the request's error, or its number of tokens."""
    count = 0
    async for deltas in client.deltas(each.id):
        for delta in deltas:
            count += len(delta.token_ids)
            if delta.finish is not None and delta.finish.reason == "error":
                return failure_of(delta.finish)
    return count


async def until_running(client, num_requests: int) -> dict:
    """Wait until num_requests requests hold a row, and return the engine's progress."""
    while (progress := msgspec.json.decode(await client.control(ReadProgress(0))))["running"] < num_requests:
        pass
    return progress


def long(name: str, **options):
    each = request(name, 40)
    params = msgspec.structs.replace(each.params, max_tokens=options.pop("num_tokens", 300))
    return msgspec.structs.replace(each, params=params, arrived=time.monotonic(), **options)


async def test_a_full_queue_refuses_with_the_time_to_come_again():
    async with client_of(slow_engine(QueueLimit(max_requests=3))) as client:
        running = [long(f"run{i}") for i in range(4)]  # as many as there are rows
        for each in running:
            client.submit(each)
        await until_running(client, 4)
        waiting = [long(f"wait{i}", num_tokens=5) for i in range(6)]
        for each in waiting:
            client.submit(each)
        ends = await asyncio.gather(*(end_of(client, each) for each in [*running, *waiting]))
    assert ends[:7] == [300] * 4 + [5] * 3
    for refused in ends[7:]:
        assert isinstance(refused, Overloaded) and "--max-waiting-requests" in refused.message
        assert 1 <= refused.retry_after <= MAX_RETRY_SECONDS


async def test_tokens_that_wait_are_limited_too_but_an_empty_queue_takes_anything():
    engine = slow_engine(QueueLimit(max_tokens=5))
    async with client_of(engine) as client:
        for number in range(4):
            client.submit(long(f"run{number}"))
        await until_running(client, 4)
        first = long("first", num_tokens=3, prompt_ids=[1] * 9)  # alone above the limit
        second = long("second", num_tokens=3)
        client.submit(first)
        client.submit(second)
        ends = await asyncio.gather(end_of(client, first), end_of(client, second))
    assert ends[0] == 3 and isinstance(ends[1], Overloaded)
    assert "9 prompt tokens are already waiting; with the 3 of this request" in ends[1].message


async def test_a_deadline_ends_what_runs_and_what_waits():
    engine = slow_engine(QueueLimit())
    async with client_of(engine) as client:
        soon = time.monotonic() + 0.1
        running = [long(f"run{i}", num_tokens=3000, deadline=soon) for i in range(4)]
        waiting = long("wait", deadline=soon)
        for each in [*running, waiting]:
            client.submit(each)
        ends = await asyncio.gather(*(end_of(client, each) for each in [*running, waiting]))
        assert all(isinstance(end, DeadlineExceeded) for end in ends)
        assert "deadline_ms has passed" in str(ends[0])
        await client.control(Ping(0))
        assert engine.loop.scheduler.is_idle and engine.loop.scheduler.cache.pool.num_used == 0
        client.submit(done := long("done", num_tokens=2, deadline=time.monotonic() + 100))
        assert await end_of(client, done) == 2 and not client._timers


async def test_who_has_no_row_in_time_leaves_the_queue_and_who_has_stays():
    async with client_of(slow_engine(QueueLimit())) as client:
        soon = time.monotonic() + 0.1
        running = [long(f"run{i}", queue_until=soon) for i in range(4)]  # as many as there are rows
        waiting = long("wait", queue_until=soon)
        late = long("late", queue_until=time.monotonic())  # too late on arrival
        for each in [*running, waiting, late]:
            client.submit(each)
        await until_running(client, 4)
        assert (await client.control(ReadPlace(0, "wait"))).startswith("1 ")
        assert await client.control(ReadPlace(0, "run0")) == ""
        ends = await asyncio.gather(*(end_of(client, each) for each in [*running, waiting, late]))
    assert ends[:4] == [300] * 4
    assert all(isinstance(end, Overloaded) and "max_queue_ms" in end.message for end in ends[4:])


async def test_who_waits_and_why_can_be_read():
    async with client_of(slow_engine(QueueLimit())) as client:
        before = time.monotonic() - 60
        for number in range(6):
            client.submit(msgspec.structs.replace(long(f"r{number}"), arrived=before))
        progress = await until_running(client, 4)
        assert progress["waiting"] == 2
        assert progress["oldest_waiting"]["id"] == "r4" and progress["oldest_waiting"]["why"] == "rows"
        assert progress["oldest_waiting"]["seconds"] >= 60
        assert {"r4", "r5"} <= {each["id"] for each in progress["without_progress"]}


def test_the_pace_is_that_of_the_last_minute():
    queue_limit = QueueLimit()
    assert queue_limit.seconds_for(10, 5.0) == 10  # no rate known yet
    for second in range(100, 200):
        queue_limit.moved(float(second), 4)
    assert queue_limit.seconds_for(40, 199.0) == pytest.approx(10, rel=0.05)
    assert queue_limit.retry_after(400, 199.0) == pytest.approx(50, abs=3)
    assert queue_limit.retry_after(10**9, 199.0) == MAX_RETRY_SECONDS and queue_limit.retry_after(0, 199.0) == 1
    assert queue_limit.seconds_for(3, 400.0) == 3  # the last rate is long out of date


def test_a_failure_is_what_its_cause_says():
    assert isinstance(failure_of(Finish("error")), RequestFailed)
    overload = failure_of(Finish("error", message="full", cause="overload", retry_after=7))
    assert isinstance(overload, Overloaded) and overload.retry_after == 7
    assert isinstance(failure_of(Finish("error", cause="deadline")), DeadlineExceeded)


async def test_a_request_without_wishes_sets_no_timers():
    async with client_of(make_engine()) as client:
        client.submit(request("a"))
        assert not client._timers
        await collect(client, "a")


async def test_the_parts_of_one_response_fill_no_queue_but_their_own():
    """With room for three in the queue, a response has three parts that wait; another response is taken all the same, and a further
    part of any is refused."""
    async with client_of(slow_engine(QueueLimit(max_requests=3))) as client:
        parts = [long(f"large-{part}", num_tokens=3000, response_id="large", part=part) for part in range(8)]
        for each in parts:
            client.submit(each)
        first = long("other-0", num_tokens=3, response_id="other")
        second = long("other-1", num_tokens=3, response_id="other", part=1)
        client.submit(first)
        client.submit(second)
        ends = await asyncio.gather(*(end_of(client, each) for each in (first, second, parts[-1])))
        for each in parts[:-1]:
            client.release(each.id)
    assert ends[0] == 3
    assert all(isinstance(end, Overloaded) and "--max-waiting-requests" in end.message for end in ends[1:])
