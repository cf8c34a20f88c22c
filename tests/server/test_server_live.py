"""The live feed, over the real engine loop: it says what the metrics say, sends of pages what changed, and rests unwatched."""

import asyncio
import base64
import json
import os
import random
from array import array
from typing import Any

import msgspec
import pytest

from octavo.cache import KVCache
from octavo.cache.page_map import CACHED, FREE, HELD, LOADING, SHARED, owner_code, owners_of, page_map
from octavo.observe.advice import Standing, advice
from octavo.observe.history import LEVELS, MAX_SECONDS, History, history_memory
from octavo.observe.live_state import LiveTotals, changes
from octavo.server.state import live_feed
from tests.doubles import AsgiCall
from tests.server.conftest import error_of
from tests.server.running import Served, ask, engine

COMPLETIONS = "/v1/completions"


class Watch:
    """Somebody who watches, and keeps the map of pages up to date by what is sent."""

    def __init__(self, server: Served) -> None:
        self.call = AsgiCall(server.app, "GET", "/v1/live")
        self.pages: array[int] = array("H")
        self._seen = 0

    async def next(self) -> dict[str, Any]:
        await self.call.until(lambda call: len(call.sent) > self._seen)
        event = self.call.sent[self._seen]
        self._seen += 1
        assert event.startswith(b"data: ") and event.endswith(b"\n\n")
        state = dict(json.loads(event[6:]))
        if state["pages"]:
            self.pages = array("H", base64.b64decode(state["pages"]))
        for start, codes in state.get("changes", ()):
            self.pages[start : start + len(codes)] = array("H", codes)
        return state

    async def until(self, condition: Any) -> dict[str, Any]:
        async with asyncio.timeout(60):  # a state that was missed never comes
            while not condition(state := await self.next()):
                pass
        return state

    async def leave(self) -> None:
        self.call.leave()
        await self.call.done()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "INTERVAL_SECONDS", 0.01)


def stream(server: Served, name: str, prompt: str, max_tokens: int) -> AsgiCall:
    body = json.dumps(ask(prompt, max_tokens, stream=True)).encode()
    return AsgiCall(server.app, "POST", COMPLETIONS, body, {"x-request-id": name})


async def test_rows_queue_pages_and_ends(served: Any) -> None:
    # Streams that are long enough not to end before they are looked at, on a busy machine too; they are left before their end.
    server = served(engine(num_pages=256, max_num_seqs=2, seconds=0.005, max_model_len=2048))
    watch = Watch(server)
    empty = await watch.next()
    assert empty["rows"] == [] and empty["advice"] == "" and list(watch.pages) == [FREE] * 256
    shared = "s" * 40  # two full pages of 16, and a part of one
    first = stream(server, "first", shared + "1", 1800)
    await watch.until(lambda state: [row[1] for row in state["rows"]] == ["first"])
    second = stream(server, "second", shared + "2", 1800)
    state = await watch.until(lambda state: len(state["rows"]) == 2)
    rows = {row[1]: row for row in state["rows"]}
    assert state["num_shared_pages"] == list(watch.pages).count(SHARED) == 2
    assert {rows["first"][9], rows["second"][9]} <= set(watch.pages)
    assert rows["first"][6] == 41 and rows["first"][7] == 41 + 1800 and rows["second"][8] >= 3
    page = watch.pages.index(SHARED)
    owners = (await server.http.get(f"/v1/live/pages/{page}")).json()
    assert owners == {"page": page, "owners": ["first", "second"]}
    third = stream(server, "third", "x", 2)
    state = await watch.until(
        lambda state: state["num_waiting"] == 1 and state["blocked_by"]
    )  # a plan has looked at it
    assert [(wait[0], wait[1]) for wait in state["waiting"]] == [("third", "rows")] and state["blocked_by"] == "rows"
    assert state["advice"].startswith("1 request waits: all 2 rows are in use, while ") and "(now 2)" in state["advice"]
    (lane,) = state["lanes"]
    assert lane[:2] == ["new", 1] and lane[2] == pytest.approx(state["waiting"][0][2])
    metrics = (await server.http.get("/metrics")).text
    assert 'vllm:num_requests_running{model_name="byte-model",engine="0"} 2.0' in metrics
    first.leave()
    state = await watch.until(lambda state: any(end["id"] == "third" for end in state["ended"]))
    (end,) = [end for end in state["ended"] if end["id"] == "third"]
    assert end["status"] == 200 and end["output_tokens"] == 2 and end["stages"]["queue"] > 0
    second.leave()
    for call in (first, second, third):
        await call.done()
    state = await watch.until(lambda state: not state["rows"])
    await server.http.post(COMPLETIONS, json={"prompt": "x", "temperature": -1}, headers={"x-request-id": "refused"})
    await watch.until(lambda state: [(end["id"], end["status"]) for end in state["ended"]] == [("refused", 400)])
    late = Watch(server)  # sees what ended before it came, and the minutes before
    whole = await late.next()
    assert {"first", "second", "third", "refused"} >= {end["id"] for end in whole["ended"]} >= {"third", "refused"}
    assert all(0 < end["at"] <= whole["time"] for end in whole["ended"])
    history = (await server.http.get("/v1/live/history")).json()
    assert history["interval"] == 1 and 0 < history["since"] <= history["time"]
    assert sum(point[4] for point in history["points"]) == pytest.approx(whole["totals"]["generation_tokens"], abs=0.01)
    assert sum(point[12] for point in history["points"]) == 1 and max(point[15] for point in history["points"]) == 2
    assert [point[0] for point in whole["recent"]] == [point[0] for point in history["points"]][-len(whole["recent"]) :]
    await late.leave()
    assert set(watch.pages) == {FREE, CACHED} and state["num_cached_pages"] == list(watch.pages).count(CACHED) > 2
    assert state["totals"]["finished"] == 3 and state["totals"]["generation_tokens"] > 2
    await watch.leave()


async def test_nothing_is_asked_while_nobody_watches_and_each_watcher_gets_the_whole_first(served: Any) -> None:
    server = served()
    feed = server.app.state.service.live
    assert feed._task is None
    one, two = Watch(server), Watch(server)
    assert (await one.next())["pages"] and (await two.next())["pages"]
    assert not (await one.next())["pages"]
    late = Watch(server)
    assert (await late.next())["pages"] and not (await late.next())["pages"]
    for watch in (one, two, late):
        await watch.leave()
    task = feed._task
    if task is not None:
        await asyncio.wait_for(task, 10)
    assert feed._task is None and not feed._watchers


async def test_a_server_that_drains_ends_the_feed(served: Any) -> None:
    server = served()
    watch = Watch(server)
    await watch.next()
    server.app.state.service.live.close()
    await watch.call.done()


async def test_a_watcher_that_does_not_read_is_let_go(served: Any) -> None:
    server = served()
    slow, quick = Watch(server), Watch(server)
    await slow.next()
    slow.call.reads.clear()
    feed = server.app.state.service.live
    while len(feed._watchers) == 2:
        await quick.next()
    slow.call.reads.set()
    await slow.call.done()
    await quick.leave()


async def test_bad_questions(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served()
    for page in ("64", "-1", "x", "9" * 30):
        assert "from 0 to 63" in error_of(await server.http.get(f"/v1/live/pages/{page}"), 404)["message"]
    for seconds in ("0", "-1", "x", "1e3", str(MAX_SECONDS + 1), "9" * 30):
        error = error_of(await server.http.get("/v1/live/history", params={"seconds": seconds}), 400)
        assert error["param"] == "seconds" and f"between 1 and {MAX_SECONDS}" in error["message"]
    assert error_of(await server.http.get("/v1/live/history?minutes=1"), 400)["param"] == "minutes"
    assert (await server.http.get(f"/v1/live/history?seconds={MAX_SECONDS}")).json()["interval"] == 60
    monkeypatch.setattr(live_feed, "MAX_WATCHERS", 0)
    response = await server.http.get("/v1/live")
    assert error_of(response, 429) and response.headers["retry-after"] == "10"


def test_the_map_of_pages_tells_each_state() -> None:
    cache = KVCache(12, 4, num_host_pages=4)
    first, second = list(range(10)), [*range(8), 50, 51]
    cache.admit(7, first)
    cache.publish(7, first, 10)
    cache.admit(9, second)
    cache.admit(11, [90, 91])
    cache.release(11)
    codes = page_map(cache)
    tables = {sequence: cache.tables[sequence][0].pages for sequence in (7, 9)}
    assert [codes[page] for page in tables[7]] == [SHARED, SHARED, owner_code(7)]
    assert [codes[page] for page in tables[9]] == [SHARED, SHARED, owner_code(9)]
    assert codes.count(FREE) == 8 and owners_of(cache, tables[7][0]) == [7, 9] and owners_of(cache, 11) == []
    cache.release(7)
    cache.release(9)
    codes = page_map(cache)
    assert codes.count(CACHED) == 2 and codes.count(FREE) == 10
    assert owner_code(5) != owner_code(6) and 3 <= owner_code(2**40) < 2**16


def test_the_map_tells_held_and_loading_pages_from_cached_ones() -> None:
    cache = KVCache(12, 4)
    for sequence in (0, 1):
        assert cache.admit(sequence, list(range(100 * sequence, 100 * sequence + 9))) is not None
        cache.publish(sequence, list(range(100 * sequence, 100 * sequence + 9)), 8)
        cache.release(sequence)
    held = [cache.pool.keys[0], cache.pool.keys[1]]
    assert None not in held
    cache.hold([key for key in held if key is not None])
    before = [key for key in (cache.pool.keys[3],) if key is not None]
    pages = cache.begin_load(7, before, 2)
    assert pages is not None
    codes = page_map(cache)
    assert [codes[0], codes[1], codes[2]] == [HELD, HELD, CACHED]
    assert all(codes[page] == LOADING for page in pages) and codes.count(LOADING) == 3, "and the page before them"
    assert owner_code(LOADING - 3) < LOADING and owner_code(HELD - 3) < LOADING, "no owner has their codes"


@pytest.mark.parametrize("seed", range(20))
def test_changes_make_one_map_of_the_other(seed: int) -> None:
    rng = random.Random(seed)
    before = array("H", [rng.randrange(9) for _ in range(rng.choice([0, 1, 63, 64, 65, 1000]))])
    after = array("H", before)
    for _ in range(rng.choice([0, 1, 5, 200]) if after else 0):
        after[rng.randrange(len(after))] = rng.randrange(70000 % 2**16)
    changed = changes(before.tobytes(), after.tobytes())
    for start, codes in changed:
        before[start : start + len(codes)] = array("H", codes)
    assert before == after and sum(len(codes) for _, codes in changed) <= 200


STANDING = Standing(
    num_waiting=3, reason=None, num_rows=8, max_rows=8, num_pages=100, num_open_pages=40, max_step_tokens=512,
    head_tokens=170, head_pages=11, spare_pages=4, num_preempted=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reason": "rows"}, ["3 requests wait: all 8 rows are in use, while 40% of the KV pages are free", "--max-num-seqs (now 8)"]),
        ({"reason": "rows", "num_open_pages": 4}, ["and so are 96% of the KV pages: this server is full"]),
        ({"reason": "pages", "num_open_pages": 12}, ["up to 11 KV pages for 170 tokens, with 4 more reserved", "12 of 100 are free", "--gpu-memory-utilization"]),
        ({"reason": "pages"}, ["3 requests wait for KV pages that have just become free."]),
        ({"reason": "pages", "is_cpu": True, "num_waiting": 1, "num_open_pages": 3}, ["1 request waits", "(--kv-cache-memory-bytes)"]),
        ({"reason": "budget"}, ["all 512 tokens of a step", "--max-num-batched-tokens"]),
        ({"reason": "streams", "limit_ms": 62.4}, ["tokens within 62 ms", "--max-inter-token-ms, or set it to off"]),
        ({}, ["3 requests wait for the current step to end."]),
        ({"num_waiting": 0, "num_preempted": 2}, ["2 preemptions in the last 10 s, because KV pages ran out; preempted requests are recomputed (--swap-space", "--max-num-seqs, now 8"]),
        ({"num_waiting": 0, "num_preempted": 1, "has_swap": True}, ["1 preemption in the last 10 s", "wait in host memory or are recomputed"]),
    ],
)  # fmt: skip
def test_advice_says_what_is_lacking_and_what_to_change(changed: dict[str, Any], words: list[str]) -> None:
    sentence = advice(msgspec.structs.replace(STANDING, **changed))
    assert [word for word in words if word not in sentence] == [], sentence
    assert "--gpu" not in sentence or not changed.get("is_cpu")


def test_nothing_is_said_where_nothing_waits() -> None:
    assert advice(msgspec.structs.replace(STANDING, num_waiting=0)) == ""


@pytest.mark.parametrize("reason", ["rows", "pages", "budget", "grammar", "step", None])
@pytest.mark.parametrize("num_open", [2, 12, 40, 90])
@pytest.mark.parametrize("num_preempted", [0, 3])
@pytest.mark.parametrize("num_waiting", [0, 1, 50])
def test_advice_never_contradicts_itself(reason: Any, num_open: int, num_preempted: int, num_waiting: int) -> None:
    sentence = advice(
        msgspec.structs.replace(
            STANDING, reason=reason, num_open_pages=num_open, num_preempted=num_preempted, num_waiting=num_waiting
        )
    )
    assert bool(sentence) == bool(num_waiting or num_preempted)
    assert not ("Raise --max-num-seqs" in sentence and "fewer" in sentence), sentence
    for flag in ("--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-dtype", "--kv-cache-memory-bytes"):
        assert sentence.count(flag) <= 1, sentence
    if num_preempted:
        assert "Raise" not in sentence, f"more work would only be preempted: {sentence}"
    if "are free. Give" in sentence:
        assert STANDING.head_pages + STANDING.spare_pages > num_open, sentence


NO_TOTALS = LiveTotals(0, 0, 0, 0, 0, 0, 0.0, 0, 0.0, 0, 0.0)


def run_steps(history: History, times: list[float], tokens: int = 0) -> int:
    """As an engine does that generates a token at each of these times, and notes when it is due."""
    for now in times:
        tokens += 1
        history.last_step = now
        if now >= history.due:
            note(history, tokens)
    return tokens


def note(history: History, tokens: int) -> None:
    history.note(msgspec.structs.replace(NO_TOTALS, generation_tokens=tokens), 0.5, 2, 3)


def rates(history: History, seconds: float, now: float) -> dict[float, float]:
    return {past.time: past.generation_tokens for past in history.read(seconds, now).points}


def test_a_rest_is_no_spike_and_every_token_is_in_its_second() -> None:
    history = History()
    history.start(100.0)
    tokens = run_steps(history, [100 + at / 10 for at in range(1, 38)])  # until 103.7, ten a second
    note(history, tokens)  # work arrives at 190.5
    history.resume(190.5)
    tokens = run_steps(history, [190.5 + at / 10 for at in range(1, 11)], tokens)
    note(history, tokens)
    found = rates(history, 300, 192.0)
    assert {time: round(value, 1) for time, value in found.items() if value > 0.01} == {
        100.0: 10.0, 101.0: 10.0, 102.0: 10.0, 103.0: 7.0, 190.0: 5.0, 191.0: 5.0,
    }  # fmt: skip
    assert sum(found.values()) == pytest.approx(tokens)


def test_a_long_step_counts_where_it_was_computed() -> None:
    history = History()
    history.start(50.0)
    history.last_step = 58.0
    note(history, 80)
    assert rates(history, 300, 60.0) == {float(second): pytest.approx(10) for second in range(50, 58)} | {58.0: 0.0}


def test_the_next_engine_continues_the_history() -> None:
    fd = history_memory()
    first = History(fd)
    first.start(100.0)
    run_steps(first, [101.0, 102.5])
    second = History(fd)  # the first was killed
    second.start(130.0)
    run_steps(second, [131.0, 132.5])
    history = second.read(300, 133.0)
    assert history.since == 100.0 and [past.time for past in history.points if past.starts] == [100.0, 130.0]
    tokens = [past.generation_tokens for past in history.points]
    assert sum(tokens) == pytest.approx(4) and min(tokens) >= 0, "the totals of a new engine start at 0"
    os.close(fd)


@pytest.mark.parametrize(("seconds", "interval"), [(60, 1), (600, 1), (3600, 10), (6 * 3600, 60), (MAX_SECONDS, 60)])
def test_a_day_fits_in_bounded_memory(seconds: int, interval: int) -> None:
    history = History()
    history.start(0.0)
    tokens = 0
    for now in range(1, 2 * MAX_SECONDS, 7):  # two days, a token every seven seconds
        tokens = run_steps(history, [float(now)], tokens)
    found = history.read(seconds, 2.0 * MAX_SECONDS)
    assert found.interval == interval
    assert all(past.time >= 2 * MAX_SECONDS - seconds - interval for past in found.points)
    assert sum(past.generation_tokens for past in found.points) == pytest.approx(seconds / 7, rel=0.05, abs=2)
    assert [past.time for past in found.points] == sorted(past.time for past in found.points)
    assert len(found.points) <= max(level.num_slots for level in LEVELS) + 1
    assert all(past.used_share == 0.5 and past.num_waiting == 2 and past.num_rows == 3 for past in found.points)


def test_preemptions_of_the_last_seconds_are_counted() -> None:
    history = History()
    history.start(10.0)
    for now, total in ((11.0, 1), (25.0, 3), (30.0, 4)):
        history.last_step = now
        history.resume(now - 0.5)
        history.note(msgspec.structs.replace(NO_TOTALS, preemptions=total), 0, 0, 1)
    assert history.preemptions_since(20.0) == 3 and history.preemptions_since(26.0) == 1
