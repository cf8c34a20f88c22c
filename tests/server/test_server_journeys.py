"""Journeys and the request log, over the real engine loop without a model: every token is the letter a."""

import asyncio
import json
import logging
import os
import time
from typing import Any

import pytest

from octavo.observe.journeys.journey import JourneyRing
from octavo.server.state import journeys as journeys_module
from tests.doubles import AsgiCall, ScriptedEngine, says
from tests.server.conftest import Serve, error_of
from tests.server.running import Served, ask, engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def check(journey: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its stages, without gaps from 0 to the end; by name."""
    at = 0.0
    for stage in journey["stages"]:
        assert stage["start"] == pytest.approx(at, abs=2e-6)
        at = stage["end"]
    assert at == pytest.approx(journey["seconds"], abs=2e-6)
    return {stage["name"]: stage for stage in journey["stages"]}


async def test_a_whole_answer_from_byte_to_byte(served: Any) -> None:
    server = served()
    started = time.monotonic()
    response = await server.http.post(COMPLETIONS, json=ask(), headers={"x-request-id": "mine"})
    seconds = time.monotonic() - started
    assert response.status_code == 200 and "journey" not in response.json()
    journey = await server.journey("mine")
    assert journey["state"] == "finished" and journey["status"] == 200 and journey["handler"] == COMPLETIONS
    assert (journey["prompt_tokens"], journey["output_tokens"], journey["finish_reasons"]) == (5, 5, ["length"])
    stages = check(journey)
    wanted = ["receive", "parse", "tokenise", "hand_over", "queue", "prefill", "decode", "detokenise", "flush"]
    assert [stage["name"] for stage in journey["stages"]] == wanted
    assert stages["decode"]["output_tokens"] == 4 and stages["prefill"]["computed_tokens"] == 5
    assert journey["seconds"] <= seconds and 0 < journey["first_byte_seconds"] <= journey["seconds"]
    assert 0 < journey["detokenise_seconds"] < journey["seconds"]
    assert abs(journey["received_at"] - time.time()) < 60
    # The answer's own id leads there too.
    assert await server.journey(response.json()["id"]) == journey


async def test_the_journey_comes_with_the_answer_where_it_is_asked_for(served: Any) -> None:
    server = served()
    headers = {"x-octavo-journey": "1"}
    for body in (ask(), ask(stop="aaa", max_tokens=50)):
        response = await server.http.post(COMPLETIONS, json=body, headers=headers)
        answer = response.json()
        journey = answer.pop("journey")
        assert journey["response_ids"] == [answer["id"]] and journey["id"] == response.headers["x-request-id"]
        assert journey["finish_reasons"] == [answer["choices"][0]["finish_reason"]]
        stages = check(journey)
        assert "decode" in stages and journey["state"] == "finished"
        assert answer["choices"][0]["text"] == ("aaaaa" if body["max_tokens"] == 5 else "")
    plain = await server.http.post(COMPLETIONS, json=ask(), headers={"x-octavo-journey": "0"})
    assert "journey" not in plain.json()
    refused = await server.http.post(COMPLETIONS, json={"prompt": 5}, headers=headers)
    assert set(refused.json()) == {"error"}


async def test_a_stream_ends_with_its_journey(served: Any) -> None:
    server = served()
    response = await server.http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True,
                                                  "stream": True}, headers={"x-octavo-journey": "1"})  # fmt: skip
    *events, last, nothing = response.text.split("\n\n")
    assert nothing == "" and events[-1] == "data: [DONE]"
    name, _, data = last.partition("\n")
    journey = json.loads(data.removeprefix("data: "))
    assert name == "event: octavo.journey" and journey["output_tokens"] == 6
    check(journey)
    kept = await server.journey(journey["id"])
    assert kept["stages"][-1]["name"] == "flush" and kept["seconds"] >= journey["seconds"]
    check(kept)


async def test_several_prompts_and_choices_each_have_a_leg(served: Any) -> None:
    server = served()
    body = {**ask(n=2), "prompt": ["one", "three"]}
    response = await server.http.post(COMPLETIONS, json=body, headers={"x-octavo-journey": "1"})
    journey = response.json()["journey"]
    check(journey)
    legs = [(leg["prompt"], leg["choice"], leg["output_tokens"]) for leg in journey["legs"]]
    assert legs == [(0, 0, 5), (0, 1, 5), (1, 0, 5), (1, 1, 5)]
    assert journey["prompt_tokens"] == 8 and journey["output_tokens"] == 20 and len(journey["response_ids"]) == 2
    ends = [leg["stages"][-1]["end"] for leg in journey["legs"]]
    assert max(ends) <= journey["seconds"]


async def test_what_runs_and_what_waits_can_be_listed(served: Any) -> None:
    server = served(engine(max_num_seqs=1, seconds=0.01))
    first = AsgiCall(server.app, "POST", COMPLETIONS, json.dumps(ask(max_tokens=200, stream=True)).encode(),
                     {"x-request-id": "first"})  # fmt: skip
    await first.until(lambda call: len(call.sent) >= 2)
    second = AsgiCall(
        server.app, "POST", COMPLETIONS, json.dumps(ask(stream=True)).encode(), {"x-request-id": "second"}
    )
    async with asyncio.timeout(10):
        while "second" not in await server.listed(state="waiting"):
            pass  # each look waits for a step
    assert await server.listed(state="running") == ["first"]
    assert await server.listed(state="finished") == []
    waiting = await server.journey("second")
    assert waiting["state"] == "waiting" and waiting["stages"][-1]["name"] == "queue"
    check(waiting)
    running = await server.journey("first")
    assert [stage["name"] for stage in running["stages"]][-1] == "decode" and running["output_tokens"] >= 1
    check(running)
    first.leave()
    await first.done()
    await second.done()
    assert await server.listed(state="aborted") == ["first"] and await server.listed(state="finished") == ["second"]
    gone, served_ = await server.journey("first"), await server.journey("second")
    assert gone["status"] == 499 and gone["finish_reasons"] == ["abort"]
    waits = {wait["reason"]: wait["seconds"] for wait in check(served_)["queue"]["waits"]}
    assert waits["rows"] > 0
    check(gone)


async def test_pages_run_out(served: Any) -> None:
    """Four answers that do not fit beside each other: those that had to leave tell when, with how much, and what came of it."""
    server = served(engine(num_pages=14, seconds=0.001))
    bodies = [ask(f"{letter * 30}", 60) for letter in "bcde"]
    headers = {"x-octavo-journey": "1"}
    answers = await asyncio.gather(*[server.http.post(COMPLETIONS, json=body, headers=headers) for body in bodies])
    journeys = [answer.json()["journey"] for answer in answers]
    assert sum(journey["preemptions"] for journey in journeys) > 0
    for journey in journeys:
        check(journey)
        at = journey["stages"]
        assert sum(stage.get("output_tokens", 0) for stage in at) == journey["output_tokens"] == 60
        left = [stage for stage in at if stage["name"] == "preempted"]
        assert len(left) == journey["preemptions"] == sum(stage["name"] == "recompute" for stage in at)
        for stage, again in zip(left, [stage for stage in at if stage["name"] == "recompute"], strict=True):
            found = again.get("cached_tokens", 0)
            assert found + again["computed_tokens"] >= stage["dropped_tokens"] > 0
            assert sum(wait["seconds"] for wait in stage["waits"]) == pytest.approx(
                stage["end"] - stage["start"], abs=1e-5
            )
    assert "pages" in json.dumps(journeys)
    metrics = (await server.http.get("/metrics")).text
    total = sum(journey["preemptions"] for journey in journeys)
    assert f'vllm:num_preemptions_total{{model_name="byte-model",engine="0"}} {float(total)}' in metrics


async def test_refusals_are_journeys_too_and_other_requests_are_not(served: Any) -> None:
    server = served()
    await server.http.post(COMPLETIONS, json={"prompt": "x", "temperature": -1}, headers={"x-request-id": "bad"})
    await server.http.get("/v1/models", headers={"x-request-id": "look"})
    journey = await server.journey("bad")
    assert (
        journey["state"] == "failed" and journey["status"] == 400 and journey["error"] == "InvalidRequest (temperature)"
    )
    assert [stage["name"] for stage in journey["stages"]] == ["receive", "parse", "answer"]
    check(journey)
    error = error_of(await server.http.get("/v1/requests/look"), 404)
    assert "look" in error["message"] and error["code"] == "not_found"


@pytest.mark.parametrize(
    ("query", "param"),
    [("state=lost", "state"), ("limit=0", "limit"), ("limit=x", "limit"), ("limit=1001", "limit"), ("stat=1", "stat")],
)
async def test_bad_questions(serve: Serve, query: str, param: str) -> None:
    error = error_of(await serve().get(f"/v1/requests?{query}"), 400)
    assert error["param"] == param and error["message"].startswith((param, "unknown parameter"))


async def test_the_ring_keeps_the_latest_within_its_bytes(served: Any) -> None:
    small = engine()
    small.control.ring._max_bytes = 6000
    server = served(small)
    for number in range(20):
        await server.http.post(COMPLETIONS, json=ask(), headers={"x-request-id": f"r{number}"})
    listed = await server.listed()
    assert listed[0] == "r19" and 2 <= len(listed) < 20
    assert listed == [f"r{number}" for number in range(19, 19 - len(listed), -1)]
    assert (await server.http.get("/v1/requests/r0")).status_code == 404
    assert await server.listed(limit="1") == ["r19"]


def test_what_api_processes_tell_a_new_engine_one_after_another_is_in_order_again() -> None:
    ring = JourneyRing(10_000)
    for name, at in (("a", 1.0), ("c", 3.0), ("b", 2.0), ("d", 4.0)):  # two of one process, then two of another
        ring.keep([name], name.encode(), at, is_old=True)
    ring.keep(["e"], b"e", 5.0)
    assert ring.latest("", 9) == [b"e", b"d", b"c", b"b", b"a"] and ring.find("b") == b"b"


async def test_an_engine_that_says_nothing_is_no_reason_to_wait(serve: Serve) -> None:
    client = serve(ScriptedEngine(says("hi")))
    service = client.app.state.service  # type: ignore[attr-defined]
    reported: list[Any] = []
    service.journeys.on_report.append(lambda journey, _: reported.append(journey))
    await client.post(COMPLETIONS, json=ask(), headers={"x-request-id": "a"})
    mine = service.journeys.find("a")
    assert reported == [] and mine is not None
    await service.journeys.engine_part(mine, seconds=0.01)
    journey = mine.as_journey()
    assert [stage.name for stage in journey.stages][3:] == ["engine", "flush"] and journey.note


async def left_alone(server: Served, num_tokens: int, num_chunks: int) -> None:
    """A stream that can be resumed, whose client leaves; as the request "left"."""
    body = ask(max_tokens=num_tokens, stream=True, stream_options={"resumable": True})
    call = AsgiCall(server.app, "POST", COMPLETIONS, json.dumps(body).encode(), {"x-request-id": "left"})
    async with asyncio.timeout(10):
        while "left" not in await server.listed() or len(call.sent) < num_chunks:
            pass  # each look waits for a step
    call.leave()
    await call.done()


@pytest.mark.parametrize(("step_seconds", "num_chunks"), [(0.005, 3), (0.1, 0)])
async def test_a_stream_that_goes_on_without_its_client_is_told_when_it_is_over(
    served: Any, monkeypatch: pytest.MonkeyPatch, step_seconds: float, num_chunks: int
) -> None:
    """However long it takes until there is text. It was sent whole, or will be to whoever reads on: that is no 499."""
    monkeypatch.setattr(journeys_module, "PATIENCE_SECONDS", 0.03)
    server = served(engine(seconds=step_seconds))
    await left_alone(server, 60 if num_chunks else 4, num_chunks)
    async with asyncio.timeout(10):
        while (journey := await server.journey("left"))["state"] != "finished":
            assert journey["state"] in ("waiting", "running")
        while "left" not in await server.listed(
            state="finished"
        ):  # reported to the engine, for every API process to see
            pass
    stages = check(await server.journey("left"))
    assert journey["status"] == 200 and journey["finish_reasons"] == ["length"]
    assert journey["output_tokens"] == stages["decode"]["output_tokens"] + 1 == (60 if num_chunks else 4)
    counts = (await server.http.get("/metrics")).text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1' in counts
    assert 'status="4xx"' not in counts


async def test_a_stream_whose_client_stays_is_told_once(served: Any) -> None:
    server = served()
    reported: list[Any] = []
    server.app.state.service.journeys.on_report.append(lambda journey, _: reported.append(journey))
    body = ask(max_tokens=9, stream=True, stream_options={"resumable": True})
    await server.http.post(COMPLETIONS, json=body, headers={"x-request-id": "stayed"})
    async with asyncio.timeout(10):
        while "stayed" not in await server.listed(state="finished"):
            pass
    assert [(journey.id, journey.status) for journey in reported if journey.response_ids] == [("stayed", 200)]


async def test_a_stream_that_its_client_ends_is_aborted_though_the_client_still_reads(served: Any) -> None:
    """As the playground does when its stop button is pressed: which of both the server sees first is chance."""
    server = served(engine(seconds=0.02))
    body = ask(max_tokens=200, stream=True, stream_options={"resumable": True})
    call = AsgiCall(server.app, "POST", COMPLETIONS, json.dumps(body).encode(), {"x-request-id": "ended"})
    async with asyncio.timeout(10):
        while "ended" not in await server.listed() or len(call.sent) < 3:
            pass  # each look waits for a step
        assert (await server.http.delete(f"/v1/stream/{call.headers['x-stream-id']}")).status_code == 200
        await call.done()
        assert b"this stream was ended" in call.sent[-1]
        while "ended" not in await server.listed(state="aborted"):
            assert "ended" not in await server.listed(state="failed")


async def test_a_stream_that_nobody_reads_on_is_aborted(served: Any) -> None:
    server = served(engine(seconds=0.02), resume_seconds=1)
    await left_alone(server, 200, 3)
    async with asyncio.timeout(10):
        while "left" not in await server.listed(state="aborted"):
            pass  # each look waits for a step
    assert (await server.journey("left"))["status"] == 499


class TestLog:
    async def lines(self, server: Served, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
        with caplog.at_level(logging.INFO, logger="octavo.server"):
            await server.http.get("/metrics")  # asked all day long: no line
            body = ask("a secret", 5, stop="aaaa")
            await server.http.post(COMPLETIONS, json=body, headers={"x-request-id": "one"})
            async with asyncio.timeout(10):
                while not (found := [record for record in caplog.records if "POST" in record.getMessage()]):
                    await server.listed()  # a stop string: the engine tells its part a step later
        return found

    async def test_a_line_tells_tokens_times_and_the_end_and_no_text(
        self, served: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        (record,) = await self.lines(served(enable_log_requests=True), caplog)
        assert "/metrics" not in caplog.text
        line, fields = record.getMessage(), record.fields  # type: ignore[attr-defined]
        assert line.startswith("one POST /v1/completions 200 ") and "8 → 4 tokens, stop" in line
        for word in ("first byte ", "prefill ", "decode ", "waited for step "):
            assert word in line
        assert fields["prompt_tokens"] == 8 and fields["finish_reasons"] == ["stop"] and fields["status"] == 200
        assert sum(fields["stages"].values()) == pytest.approx(fields["seconds"], abs=1e-4)
        assert "secret" not in line + json.dumps(fields)

    async def test_prompts_are_shown_where_that_is_asked_for(
        self, served: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        (record,) = await self.lines(served(enable_log_requests=True, log_prompts=True, max_log_len=6), caplog)
        assert "['a secr']" in record.getMessage() and record.fields["prompts"] == ["a secr"]  # type: ignore[attr-defined]


def test_api_processes_share_journey_memory_by_the_cores_that_the_supervisor_counts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with many cores of which this process may use few: there is one API process, which gets all of the memory."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    engine = ScriptedEngine()
    engine.can_be_replaced = True
    client = serve(engine, journey_bytes=2**20)
    assert client.app.state.service.journeys._sent._max_bytes == 2**20  # type: ignore[attr-defined]
