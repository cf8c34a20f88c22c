"""The live feed, over the real engine loop: it says what the metrics say, sends of pages what changed, and rests unwatched."""

import asyncio
import base64
import json
import random
from array import array
from typing import Any

import msgspec
import pytest

from octavo.cache import KVCache
from octavo.cache.page_map import CACHED, FREE, SHARED, owner_code, owners_of, page_map
from octavo.observe.advice import Standing, advice
from octavo.observe.history import NUM_KEPT, History
from octavo.observe.live_state import changes
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.server.state import live_feed
from tests.doubles import REPORT, AsgiCall
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
    server = served(engine(max_num_seqs=2, seconds=0.005))
    watch = Watch(server)
    empty = await watch.next()
    assert empty["rows"] == [] and empty["advice"] == "" and list(watch.pages) == [FREE] * 64
    shared = "s" * 40  # two full pages of 16, and a part of one
    first = stream(server, "first", shared + "1", 180)
    await watch.until(lambda state: [row[1] for row in state["rows"]] == ["first"])
    second = stream(server, "second", shared + "2", 150)
    state = await watch.until(lambda state: len(state["rows"]) == 2)
    rows = {row[1]: row for row in state["rows"]}
    assert state["num_shared_pages"] == list(watch.pages).count(SHARED) == 2
    assert {rows["first"][9], rows["second"][9]} <= set(watch.pages)
    assert rows["first"][6] == 41 and rows["first"][7] == 41 + 180 and rows["second"][8] >= 3
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
    assert all(0 < end["at"] <= whole["time"] for end in whole["ended"]) and len(whole["past"]) >= 1
    assert (await late.next())["past"] == []
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
        ({"reason": "rows"}, ["3 requests wait: all 8 rows are in use, while 40% of the pages are free", "--max-num-seqs (now 8)"]),
        ({"reason": "rows", "num_open_pages": 4}, ["and so are 96% of the pages: this server is full"]),
        ({"reason": "pages", "num_open_pages": 12}, ["up to 11 KV pages for 170 tokens, with 4 more reserved", "12 of 100 are free", "--gpu-memory-utilization"]),
        ({"reason": "pages", "is_cpu": True, "num_waiting": 1}, ["1 request waits", "(--kv-cache-memory-bytes)"]),
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


def test_the_past_is_one_point_a_second_and_rates_do_not_spread_over_a_rest() -> None:
    metrics = EngineMetrics("m", REPORT)
    history = History()
    for now in (10.0, 11.5, 60.0):
        assert now >= history.due
        history.note(now, metrics.totals(), 7, 0)
    assert history.due == 61.0
    assert [(past.time, past.num_used_pages) for past in history.all()] == [(10.0, 7), (11.5, 7), (59.0, 0), (60.0, 7)]
    assert history.preemptions_since(50.0, 5) == 5
    for now in range(100, 100 + 2 * NUM_KEPT):
        history.note(float(now), metrics.totals(), 0, 1)
    assert len(history.all()) == NUM_KEPT
