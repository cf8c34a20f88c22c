"""Streams that are read on at another connection: nothing lost, nothing twice, and bounds on all that is kept."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from fastapi import FastAPI

from octavo.errors import InvalidRequest
from octavo.server.app import build_app
from octavo.server.state import resume
from tests.doubles import AsgiCall, ScriptedEngine, byte_text, config, never_ends, says
from tests.server.conftest import Serve, error_of, events

URL = "/v1/completions"
TEXT = "the quick brown fox jumps over the lazy dog"


def build(engine: ScriptedEngine, **options: object) -> FastAPI:
    return build_app(engine, byte_text(), config(**options), "byte-model")


def begin(app: FastAPI, headers: dict[str, str] | None = None, **fields: object) -> AsgiCall:
    body = {"prompt": "p", "max_tokens": 200, "stream": True, "stream_options": {"resumable": True}, **fields}
    return AsgiCall(app, "POST", URL, json.dumps(body).encode(), headers)


def get(app: FastAPI, stream_id: str, query: str = "", headers: dict[str, str] | None = None) -> AsgiCall:
    return AsgiCall(app, "GET", f"/v1/stream/{stream_id}{query}", headers=headers)


def numbered(call: AsgiCall) -> dict[int, str]:
    """Number → data of every event that came."""
    found = re.findall(r"id: (\d+)\n(?:data: (.*)\n)\n", b"".join(call.sent).decode())
    assert len(found) == b"".join(call.sent).count(b"\n\n"), "every event has a number"
    return {int(number): data for number, data in found}


def text_of(data: dict[int, str]) -> str:
    assert [*data] == [*range(len(data))] and data[len(data) - 1] == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["text"] for each in [*data.values()][:-1])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def cut_off(app: FastAPI, engine: ScriptedEngine, num_chunks: int = 5) -> tuple[AsgiCall, str]:
    """A stream whose client leaves after some events. → the call, the stream's id"""
    call = begin(app)
    await call.until(lambda call: len(call.sent) >= num_chunks)
    call.leave()
    await call.done()
    return call, call.headers["x-stream-id"]


class TestReadingOn:
    async def test_nothing_is_lost_and_nothing_comes_twice(self) -> None:
        engine = ScriptedEngine(says(TEXT))
        app = build(engine)
        call, stream_id = await cut_off(app, engine)
        before = numbered(call)
        assert json.loads(before[0])["id"] == stream_id and not engine.aborts, "it goes on without its client"
        again = get(app, stream_id, f"?from={len(before)}")
        await again.done()
        assert again.status == 200 and again.headers["content-type"].startswith("text/event-stream")
        after = numbered(again)
        assert min(after) == len(before)
        assert text_of(before | after) == TEXT and len(engine.requests) == 1

    async def test_as_browsers_say_it_and_from_the_beginning(self) -> None:
        app = build(ScriptedEngine(says(TEXT)))
        _, stream_id = await cut_off(app, app.state.service.engine)
        again = get(app, stream_id, headers={"Last-Event-ID": "2"})
        await again.done()
        assert min(numbered(again)) == 3
        whole = get(app, stream_id)
        await whole.done()
        assert text_of(numbered(whole)) == TEXT

    async def test_a_client_that_is_away_for_the_rest(self) -> None:
        engine = ScriptedEngine(says(TEXT))
        app = build(engine)
        call, stream_id = await cut_off(app, engine)
        await until(lambda: app.state.service.idle.is_set())
        again = get(app, stream_id, f"?from={len(numbered(call))}")
        await again.done()
        assert text_of(numbered(call) | numbered(again)) == TEXT
        last = get(app, stream_id, f"?from={max(numbered(again)) + 1}")
        await last.done()
        assert last.status == 200 and not last.sent, "nothing is left to say"

    async def test_whoever_comes_last_reads(self) -> None:
        engine = ScriptedEngine(never_ends)
        app = build(engine)
        first = begin(app)
        await first.until(lambda call: len(call.sent) >= 3)
        second = get(app, first.headers["x-stream-id"])
        await second.until(lambda call: len(call.sent) >= 3)
        await first.done()
        assert b"[DONE]" not in b"".join(first.sent) and not engine.aborts
        second.leave()
        await second.done()
        engine.close()

    async def test_streams_that_did_not_ask_are_as_they_were(self, serve: Serve) -> None:
        response = await serve(ScriptedEngine(says("ab"))).post(URL, json={"prompt": "p", "stream": True})
        assert "x-stream-id" not in response.headers and b"id: " not in response.content
        assert "".join(chunk["choices"][0]["text"] for chunk in events(response.content)) == "ab"

    async def test_ignored_fields_are_named_in_the_first_event(self) -> None:
        app = build(ScriptedEngine(says("ab")))
        call = begin(app, wrong_name=1)
        await call.done()
        data = numbered(call)
        assert json.loads(data[0])["ignored_fields"] == ["wrong_name"] and "ignored_fields" not in data[1]

    async def test_a_chat(self) -> None:
        app = build(ScriptedEngine(says("ab")))
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "stream_options": {"resumable": True}}
        call = AsgiCall(app, "POST", "/v1/chat/completions", json.dumps(body).encode())
        await call.done()
        again = get(app, call.headers["x-stream-id"])
        await again.done()
        assert numbered(again) == numbered(call) and len(numbered(call)) == 5


class TestErrors:
    async def test_before_the_first_event_it_is_a_status(self) -> None:
        engine = ScriptedEngine(never_ends)
        engine.gate.clear()
        app = build(engine)
        call = begin(app)
        await until(lambda: engine.num_running)
        engine.die()
        await call.done()
        assert call.status == 503

    async def test_behind_events_it_is_an_event_for_whoever_reads(self) -> None:
        engine = ScriptedEngine(never_ends)
        app = build(engine)
        _, stream_id = await cut_off(app, engine)
        engine.die()
        again = get(app, stream_id)
        await again.done()
        assert again.status == 200 and b'"engine_dead"' in again.sent[-1]

    @pytest.mark.parametrize("query", ["?from=-1", "?from=x", "?from=", "?from=1e3", "?from=" + "9" * 40])
    async def test_a_number_that_is_none(self, serve: Serve, query: str) -> None:
        error = error_of(await serve().get(f"/v1/stream/cmpl-1{query}"), 400)
        assert error["param"] == "from" and "number of an event" in error["message"]

    async def test_a_number_beyond_the_stream(self) -> None:
        app = build(ScriptedEngine(says("ab")))
        call = begin(app)
        await call.done()
        again = get(app, call.headers["x-stream-id"], "?from=1000")
        await again.done()
        assert again.status == 400 and b"the last event is 3" in again.sent[0]

    async def test_an_unknown_stream(self, serve: Serve) -> None:
        error = error_of(await serve().get("/v1/stream/cmpl-00?from=0"), 404)
        assert error["code"] == "not_found" and "60 s (--resume-seconds)" in error["message"]

    async def test_only_streams_can_be_resumed(self, serve: Serve) -> None:
        body = {"prompt": "p", "stream_options": {"resumable": True}}
        assert error_of(await serve().post(URL, json=body), 400)["param"] == "stream_options"
        error = error_of(await serve(resume_seconds=0).post(URL, json={**body, "stream": True}), 400)
        assert error["param"] == "stream_options.resumable" and "--resume-seconds 0" in error["message"]


class TestKeys:
    async def test_a_stream_is_its_keys(self) -> None:
        app = build(ScriptedEngine(says("ab")), api_key="one,two")
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        call = begin(app, headers=one)
        await call.done()
        stream_id = call.headers["x-stream-id"]
        for headers, status in (({}, 401), (two, 404), (one, 200), ({"x-api-key": "one"}, 200)):
            again = get(app, stream_id, headers=headers)
            await again.done()
            assert again.status == status

    async def test_only_its_key_ends_it(self) -> None:
        engine = ScriptedEngine(never_ends)
        app = build(engine, api_key="one,two")
        engine.on_step = lambda request, step: engine.gate.clear() if step > 20 else None
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        call = begin(app, headers=one)
        await call.until(lambda call: len(call.sent) >= 5)
        for headers, status in (({}, 401), (two, 404), (one, 200), (one, 404)):
            assert not engine.aborts or status == 404
            end = AsgiCall(app, "DELETE", f"/v1/stream/{call.headers['x-stream-id']}", headers=headers)
            await end.done()
            assert end.status == status
        await until(lambda: bool(engine.aborts))
        await call.done()
        assert b"this stream was ended before it was complete" in call.sent[-1]

    async def test_ids_cannot_be_guessed(self) -> None:
        app = build(ScriptedEngine(says("a")))
        ids = set()
        for _ in range(3):
            call = begin(app)
            await call.done()
            ids.add(call.headers["x-stream-id"].removeprefix("cmpl-"))
        assert len(ids) == 3 and all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


class TestBounds:
    async def test_a_client_that_stays_away_ends_its_request(self) -> None:
        engine = ScriptedEngine(never_ends)
        app = build(engine, resume_seconds=1)
        engine.on_step = lambda request, step: engine.gate.clear() if step > 20 else None
        _, stream_id = await cut_off(app, engine)
        async with asyncio.timeout(10):
            while not engine.aborts:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        again = get(app, stream_id)
        await again.done()
        assert again.status == 404
        await until(lambda: len(asyncio.all_tasks()) == 1)

    async def test_a_client_that_comes_back_in_time_does_not(self) -> None:
        engine = ScriptedEngine(never_ends)
        engine.on_step = lambda request, step: engine.gate.clear() if step > 20 else None
        app = build(engine)
        _, stream_id = await cut_off(app, engine)
        log = app.state.service.logs.find(stream_id, b"")
        assert log.timer is not None, "the time runs"
        again = get(app, stream_id)
        await again.until(lambda call: bool(call.sent))
        assert log.timer is None, "it does not while somebody reads"
        again.leave()
        await again.done()
        assert log.timer is not None and log.timer.when() > asyncio.get_running_loop().time() + 50, "and begins anew"
        assert not engine.aborts
        engine.close()

    async def test_a_stream_that_nobody_reads_waits_when_it_has_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resume, "MAX_STREAM_BYTES", 4000)
        engine = ScriptedEngine(lambda request: [*never_ends(request)[:2000], *says("!")(request)])
        app = build(engine)
        call, stream_id = await cut_off(app, engine)
        num_seen = len(numbered(call))
        await until(lambda: engine.num_running == 0)
        log = app.state.service.logs.find(stream_id, b"")
        assert log is not None and not log.is_ended and log.num_bytes < 5000
        again = get(app, stream_id, f"?from={num_seen}")
        await again.done()
        data = numbered(call) | numbered(again)
        assert text_of(data) == "a" * 2000 + "!", "what waited came in larger events"
        assert len(data) < 200
        late = get(app, stream_id, "?from=0")
        await late.done()
        assert late.status == 400 and b"is no longer kept" in late.sent[0]

    async def test_what_could_be_read_when_it_was_asked_for_and_is_gone_when_it_is_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever reads goes on until another does: between a question and its first event, events are forgotten."""
        monkeypatch.setattr(resume, "MAX_STREAM_BYTES", 100)

        async def events() -> AsyncGenerator[bytes, None]:
            for number in range(500):
                yield b"data: %d\n\n" % number

        log = resume.StreamLog("s", b"", lambda log, num_bytes: None)
        filling = asyncio.create_task(log.fill(events(), ()))
        first = log.read(0)
        assert await anext(first)
        log.check(0)
        second = log.read(0)  # nothing runs before its first event is asked for
        for _ in range(20):
            await anext(first)
        with pytest.raises(InvalidRequest, match="is no longer kept"):
            await anext(second)
        assert await anext(first), "whoever read reads on"
        filling.cancel()
        await asyncio.wait({filling})
        await first.aclose()

    async def test_the_longest_abandoned_are_dropped_first_and_complete_ones_before_others(self) -> None:
        engine = ScriptedEngine(
            lambda request: never_ends(request)[:20] if request.prompt_ids == [ord("p")] else says(TEXT)(request)
        )
        app = build(engine, resume_bytes=30_000)
        _, running = await cut_off(app, engine)
        ids = []
        for _ in range(6):
            call = begin(app, prompt="q")
            await call.done()
            ids.append(call.headers["x-stream-id"])
        found = [app.state.service.logs.find(each, b"") is not None for each in (running, *ids)]
        assert found[0] and found[-1], "one that still grows, and the last"
        assert not found[1] and found == sorted(found[:1]) + sorted(found[1:])
        engine.close()

    async def test_a_server_that_is_full_of_them_says_so(self) -> None:
        engine = ScriptedEngine(never_ends)
        engine.on_step = lambda request, step: engine.gate.clear() if step > 50 else None
        app = build(engine, resume_bytes=2000)
        first = begin(app)
        await first.until(lambda call: len(b"".join(call.sent)) > 2000)
        second = begin(app)
        await second.done()
        assert second.status == 429 and second.headers["retry-after"] == "61"
        first.leave()
        await first.done()
        engine.close()

    async def test_draining_waits_for_a_stream_whose_client_is_away(self) -> None:
        engine = ScriptedEngine(says(TEXT))
        engine.on_step = lambda request, step: engine.gate.clear() if step > 10 else None
        app = build(engine)
        service = app.state.service
        _, stream_id = await cut_off(app, engine)
        service.draining = True
        assert not service.idle.is_set()
        again = get(app, stream_id)
        await again.until(lambda call: bool(call.sent))
        engine.on_step = lambda request, step: None
        engine.gate.set()
        await again.done()
        assert text_of(numbered(again)) == TEXT and service.idle.is_set()

    async def test_a_server_that_stops_ends_it(self) -> None:
        engine = ScriptedEngine(never_ends)
        engine.on_step = lambda request, step: engine.gate.clear() if step > 20 else None
        app = build(engine)
        await cut_off(app, engine)
        app.state.service.stop()
        await until(lambda: app.state.service.idle.is_set())
        assert len(engine.aborts) == 1


class TestSeveralProcesses:
    @pytest.fixture
    async def apps(self, tmp_path: Path) -> object:
        apps = [build(ScriptedEngine(says(TEXT))) for _ in range(3)]
        for number, app in enumerate(apps):
            await app.state.service.peers.open(tmp_path, number)
        yield apps
        for app in apps:
            app.state.service.peers.close()
            app.state.service.engine.close()

    async def test_any_of_them_has_it(self, apps: list[FastAPI]) -> None:
        call, stream_id = await cut_off(apps[1], apps[1].state.service.engine)
        num_seen = len(numbered(call))
        for app in (apps[2], apps[0]):
            again = get(app, stream_id, f"?from={num_seen}")
            await again.done()
            assert text_of(numbered(call) | numbered(again)) == TEXT

    async def test_and_refuses_alike(self, apps: list[FastAPI]) -> None:
        _, stream_id = await cut_off(apps[1], apps[1].state.service.engine)
        for query, status in ((f"{stream_id}?from=1000", 400), ("cmpl-1", 404)):
            again = get(apps[0], query)
            await again.done()
            assert again.status == status

    async def test_any_of_them_ends_it(self, apps: list[FastAPI]) -> None:
        engine = apps[1].state.service.engine
        engine.script = never_ends
        engine.on_step = lambda request, step: engine.gate.clear() if step > 20 else None
        _, stream_id = await cut_off(apps[1], engine)
        for status in (200, 404):
            end = AsgiCall(apps[0], "DELETE", f"/v1/stream/{stream_id}")
            await end.done()
            assert end.status == status
        await until(lambda: bool(engine.aborts))

    async def test_leaving_is_leaving_there_too(self, apps: list[FastAPI]) -> None:
        engine = apps[1].state.service.engine
        engine.script = never_ends
        engine.on_step = lambda request, step: engine.gate.clear() if step > 20 else None
        _, stream_id = await cut_off(apps[1], engine)
        log = apps[1].state.service.logs.find(stream_id, b"")
        again = get(apps[0], stream_id)
        await again.until(lambda call: bool(call.sent))
        assert log.has_reader
        again.leave()
        await again.done()
        await until(lambda: not log.has_reader)

    async def test_an_engine_that_dies_is_told(self, apps: list[FastAPI]) -> None:
        engine = apps[1].state.service.engine
        engine.script = never_ends
        _, stream_id = await cut_off(apps[1], engine)
        engine.die()
        again = get(apps[0], stream_id)
        await again.done()
        assert b'"engine_dead"' in again.sent[-1]

    async def test_a_process_that_has_ended_is_passed_over(self, apps: list[FastAPI], tmp_path: Path) -> None:
        _, stream_id = await cut_off(apps[2], apps[2].state.service.engine)
        apps[1].state.service.peers.close()
        again = get(apps[0], stream_id)
        await again.done()
        assert text_of(numbered(again)) == TEXT
