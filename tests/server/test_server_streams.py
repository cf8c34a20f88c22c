"""Streams as they happen: what is on the wire when, stop strings, clients that leave or lag, engines that die, shutdown."""

import asyncio
import json
from collections.abc import Callable

import pytest

from octavo.errors import Field
from octavo.messages import Finish, GenerateRequest, TokenDelta
from octavo.server.app import build_app
from octavo.server.http.sse import DONE, KEEP_ALIVE
from tests.calls import Calls
from tests.doubles import AsgiCall, ScriptedEngine, byte_text, config, never_ends, says
from tests.server.conftest import Serve, error_of, events

URL = "/v1/completions"


def call(engine: ScriptedEngine, stream: bool = True, app: object = None, **fields: object) -> AsgiCall:
    app = app or build_app(engine, byte_text(), config(), "byte-model")
    body = json.dumps({"prompt": "p", "max_tokens": 200, "stream": stream, **fields}).encode()
    return AsgiCall(app, "POST", URL, body)


async def until(condition: Callable[[], object]) -> None:
    """Turns the event loop until any state of the double is reached: no clock decides."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


class TestLeaving:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("prompt", ["p", ["p", "q", "r"]])
    async def test_midway(self, stream: bool, prompt: object) -> None:
        engine = ScriptedEngine(never_ends)
        request = call(engine, stream, prompt=prompt)
        num_prompts = 1 if isinstance(prompt, str) else len(prompt)  # type: ignore[arg-type]
        await until(lambda: engine.num_running == num_prompts)
        if stream:
            await request.until(lambda call: len(call.sent) > 3)
        request.leave()
        await request.done()
        assert {abort.request_id for abort in engine.aborts} == {sent.id for sent in engine.requests}
        assert len(engine.requests) == num_prompts
        await until(lambda: engine.num_running == 0)

    async def test_before_the_first_token(self) -> None:
        engine = ScriptedEngine(never_ends)
        engine.gate.clear()
        request = call(engine)
        await until(lambda: engine.num_running == 1)
        request.leave()
        await request.done()
        assert request.status == 0 and len(engine.aborts) == 1

    async def test_a_finished_answer_is_not_aborted(self) -> None:
        for stream in (True, False):
            engine = ScriptedEngine()
            request = call(engine, stream)
            await request.done()
            request.leave()
            assert engine.aborts == [] and request.status == 200

    async def test_while_sending_the_body(self) -> None:
        engine = ScriptedEngine()
        request = AsgiCall(build_app(engine, byte_text(), config(), "byte-model"), "POST", URL)
        request._incoming.get_nowait()
        request._incoming.put_nowait({"type": "http.request", "body": b'{"prom', "more_body": True})
        request.leave()
        await request.done()
        assert request.status == 0 and engine.requests == []


class TestErrorsInTheStream:
    async def test_the_engine_dies(self) -> None:
        engine = ScriptedEngine(never_ends)
        request = call(engine)
        await request.until(lambda call: len(call.sent) > 3)
        engine.die("killed by SIGKILL")
        await request.done()
        *_, last = events(b"".join(request.sent))
        assert last["error"]["code"] == "engine_dead" and "SIGKILL" in last["error"]["message"]
        assert request.sent[-1].endswith(DONE)

    @pytest.mark.parametrize("prompt", ["p", ["p", "q"]])
    async def test_the_engine_dies_under_a_whole_answer(self, prompt: object) -> None:
        engine = ScriptedEngine(never_ends)
        request = call(engine, False, prompt=prompt)
        await until(lambda: engine.num_running)
        engine.die("killed by SIGKILL")
        await request.done()
        assert request.status == 503 and json.loads(request.sent[0])["error"]["code"] == "engine_dead"

    async def test_the_request_fails(self) -> None:
        def script(request: GenerateRequest) -> list[list[TokenDelta]]:
            failed = Finish("error", message="not a number in row 3")
            return [[TokenDelta(request.id, 0, [97])], [TokenDelta(request.id, 0, [], failed)]]

        request = call(ScriptedEngine(script))
        await request.done()
        first, last = events(b"".join(request.sent))
        assert first["choices"][0]["text"] == "a"
        assert last["error"]["message"] == "not a number in row 3" and last["error"]["code"] == "request_failed"

    async def test_a_bug_of_ours(self, caplog: pytest.LogCaptureFixture) -> None:
        def script(request: GenerateRequest) -> list[list[TokenDelta]]:
            return [[TokenDelta(request.id, 0, [97])], [TokenDelta(request.id, 0, ["secret"])]]  # type: ignore[list-item]

        request = call(ScriptedEngine(script))
        await request.done()
        *_, last = events(b"".join(request.sent))
        assert last["error"]["code"] == "internal_error" and request.headers["x-request-id"] in last["error"]["message"]
        assert request.headers["x-request-id"] in caplog.text


class TestStops:
    async def test_a_stop_string_ends_the_choice_and_the_engines_work(self, serve: Serve) -> None:
        engine = ScriptedEngine(lambda request: says("one two three" * 100)(request))
        for stream in (False, True):
            body = {"prompt": "a", "stop": [" th", "zz"], "stream": stream}
            response = await serve(engine).post(URL, json=body)
            if stream:
                chunks = events(response.content)
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                last = chunks[-1]["choices"][0]
            else:
                last = response.json()["choices"][0]
                text = last["text"]
            assert text == "one two"
            assert last["finish_reason"] == "stop" and last["stop_reason"] == " th"
            (abort,) = engine.aborts
            assert abort.request_id == engine.requests[-1].id and abort.reason == "stop" and abort.index == 0
            engine.aborts.clear()

    async def test_one_choice_stops_and_the_other_goes_on(self, serve: Serve) -> None:
        engine = ScriptedEngine(says("ab STOP cd", "no such thing here"))
        response = await serve(engine).post(URL, json={"prompt": "a", "n": 2, "stop": "STOP"})
        assert [choice["text"] for choice in response.json()["choices"]] == ["ab ", "no such thing here"]
        assert [(abort.index, abort.reason) for abort in engine.aborts] == [(0, "stop")]

    async def test_usage_counts_tokens_up_to_the_stop(self, serve: Serve) -> None:
        response = await serve(ScriptedEngine(says("abcdef"))).post(URL, json={"prompt": "a", "stop": "d"})
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == 4
        assert usage["prompt_tokens_details"] is None, "the engine did not report it"


class TestKeepAlive:
    def app(self, engine: ScriptedEngine) -> object:
        return build_app(engine, byte_text(), config(sse_keep_alive_interval=0.01), "byte-model")

    async def test_comments_while_nothing_is_sent(self) -> None:
        engine = ScriptedEngine(says("abc"))
        engine.gate.clear()
        request = call(engine, app=self.app(engine))
        await request.until(lambda call: call.sent.count(KEEP_ALIVE) >= 3)
        assert request.status == 200 and set(request.sent) == {KEEP_ALIVE}, "the head is out, and no event is"
        engine.gate.set()
        await request.done()
        body = b"".join(chunk for chunk in request.sent if chunk != KEEP_ALIVE)
        assert "".join(chunk["choices"][0]["text"] for chunk in events(body)) == "abc"

    async def test_an_error_behind_a_comment_is_an_event(self) -> None:
        engine = ScriptedEngine(never_ends)
        engine.gate.clear()
        request = call(engine, app=self.app(engine))
        await request.until(lambda call: bool(call.sent))
        engine.die()
        await request.done()
        assert request.sent[-1].endswith(DONE) and b'"engine_dead"' in request.sent[-1]

    async def test_a_client_that_leaves_ends_the_comments(self) -> None:
        engine = ScriptedEngine(never_ends)
        engine.gate.clear()
        request = call(engine, app=self.app(engine))
        await request.until(lambda call: bool(call.sent))
        request.leave()
        await request.done()
        assert len(engine.aborts) == 1
        assert len(asyncio.all_tasks()) == 1, "nobody is left to send them"

    async def test_a_refusal_is_still_a_status(self) -> None:
        engine = ScriptedEngine()
        request = call(engine, app=self.app(engine), max_tokens=10_000)
        await request.done()
        assert request.status == 400


class TestPace:
    async def test_what_waits_for_a_lagging_reader_becomes_one_event(self) -> None:
        engine = ScriptedEngine(says("abcdefghij"))
        request = call(engine)
        request.reads.clear()
        await until(lambda: request.sent and engine.num_running == 0)
        request.reads.set()
        await request.done()
        texts = [chunk["choices"][0]["text"] for chunk in events(b"".join(request.sent))]
        assert "".join(texts) == "abcdefghij" and len(texts) == 2

    @pytest.mark.parametrize("by_request", [True, False])
    async def test_an_interval_gathers_tokens_behind_the_first(self, serve: Serve, by_request: bool) -> None:
        engine = ScriptedEngine(says("abcdefgh", "xyz"))
        client = serve(engine) if by_request else serve(engine, stream_interval=3)
        fields = {"stream_interval": 3} if by_request else {}
        body = {"prompt": "p", "stream": True, "n": 2, **fields}
        texts: list[list[str]] = [[], []]
        for chunk in events((await client.post(URL, json=body)).content):
            texts[chunk["choices"][0]["index"]].append(chunk["choices"][0]["text"])
        assert texts == [["a", "bcd", "efg", "h"], ["x", "yz"]]

    async def test_an_interval_of_the_request_beats_the_servers(self, serve: Serve) -> None:
        client = serve(ScriptedEngine(says("abc")), stream_interval=10)
        body = {"prompt": "p", "stream": True, "stream_interval": 1}
        texts = [chunk["choices"][0]["text"] for chunk in events((await client.post(URL, json=body)).content)]
        assert texts == ["a", "b", "c", ""]
        whole = (await client.post(URL, json={"prompt": "p", "stop": "b"})).json()
        assert whole["choices"][0]["text"] == "a" and whole["choices"][0]["stop_reason"] == "b"

    @pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
    async def test_a_bad_interval_is_named(self, serve: Serve, value: object) -> None:
        response = await serve().post(URL, json={"prompt": "p", "stream_interval": value})
        assert error_of(response, 400)["param"] == "stream_interval"

    async def test_a_stop_string_across_an_interval(self, serve: Serve) -> None:
        client = serve(ScriptedEngine(says("abcdefgh")))
        body = {"prompt": "p", "stream": True, "stream_interval": 4, "stop": "de"}
        chunks = events((await client.post(URL, json=body)).content)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    async def test_a_reader_that_never_reads_stalls_nobody(self) -> None:
        engine = ScriptedEngine(never_ends)
        app = build_app(engine, byte_text(), config(), "byte-model")
        stuck = call(engine, app=app)
        stuck.reads.clear()
        await stuck.until(lambda call: bool(call.sent))
        engine.script = says("quick")
        other = call(engine, app=app)
        await other.done()
        assert "".join(chunk["choices"][0]["text"] for chunk in events(b"".join(other.sent))) == "quick"
        assert len(stuck.sent) == 1
        stuck.leave()
        await stuck.done()

    async def test_half_a_character_is_never_sent(self, serve: Serve) -> None:
        response = await serve(ScriptedEngine(says("😀é"))).post(URL, json={"prompt": "a", "stream": True})
        texts = [chunk["choices"][0]["text"] for chunk in events(response.content)]
        assert texts == ["😀", "é", ""]

    async def test_an_event_costs_few_calls(self) -> None:
        """Detokenize and encode. The scripted engine and the event loop are counted, too."""
        num_tokens = 2000
        engine = ScriptedEngine(says("lorem ipsum " * (num_tokens // 12), reason="length"))
        app = build_app(engine, byte_text(), config(), "byte-model")
        generation = _generation(app, engine)
        num = 0
        with Calls() as calls:
            async for chunk in generation:
                num += chunk.count(b"data: ")
        print(f"{calls.num / num:.1f} calls per event")
        assert num > 1000 and calls.num < 100 * num


def _generation(app: object, engine: ScriptedEngine) -> object:
    from octavo.server.dialects.openai_completions.request import CompletionRequest
    from octavo.server.dialects.openai_completions.writer import CompletionWriter
    from octavo.server.generate.requests import Prompt

    fields = CompletionRequest(prompt="p", max_tokens=100)
    writer = CompletionWriter(app.state.service, fields, "cmpl-1", [Prompt([1], Field("prompt"))], 0.0)  # type: ignore[attr-defined]
    writer.generation.submit()
    return writer.stream()


class TestShutdown:
    async def test_draining_refuses_what_is_new_and_finishes_what_runs(self, serve: Serve) -> None:
        engine = ScriptedEngine(says("hello"))
        engine.gate.clear()
        app = build_app(engine, byte_text(), config(), "byte-model")
        running = call(engine, app=app)
        await until(lambda: engine.num_running == 1)
        app.state.service.draining = True
        refused = call(engine, app=app)
        await refused.done()
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert json.loads(refused.sent[0])["error"]["code"] == "engine_unavailable"
        health = AsgiCall(app, "GET", "/health")
        await health.done()
        assert health.status == 503
        assert not app.state.service.idle.is_set()
        engine.gate.set()
        await running.done()
        assert "".join(chunk["choices"][0]["text"] for chunk in events(b"".join(running.sent))) == "hello"
        assert app.state.service.idle.is_set()

    async def test_what_is_cut_off_says_so(self) -> None:
        engine = ScriptedEngine(never_ends)
        app = build_app(engine, byte_text(), config(), "byte-model")
        stream, whole = call(engine, app=app), call(engine, False, app=app)
        await stream.until(lambda call: len(call.sent) > 3)
        await until(lambda: engine.num_running == 2)
        app.state.service.stop()
        await stream.done()
        await whole.done()
        *_, last = events(b"".join(stream.sent))
        assert last["error"]["code"] == "engine_unavailable" and "shut down" in last["error"]["message"]
        assert whole.status == 503 and "shut down" in json.loads(whole.sent[0])["error"]["message"]
        assert len(engine.aborts) == 2 and app.state.service.idle.is_set()
