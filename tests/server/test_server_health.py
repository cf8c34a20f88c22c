"""GET /health and /metrics: the truth about the engine, cheaply."""

import asyncio
import threading

import pytest

from octavo.ipc.heartbeat import Heartbeat
from octavo.server.endpoints import health, metrics
from octavo.server.state import service
from tests.doubles import ScriptedEngine
from tests.server.conftest import Serve, error_of


async def test_an_idle_engine_is_asked(serve: Serve) -> None:
    engine = ScriptedEngine()
    response = await serve(engine).get("/health")
    assert response.status_code == 200 and response.json() == {"status": "ok"}
    assert engine.num_pings == 1


async def test_recent_tokens_are_proof_enough(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine)
    await client.post("/v1/completions", json={"prompt": "a"})
    engine.answers_control = False
    assert (await client.get("/health")).status_code == 200
    assert engine.num_pings == 0


async def test_a_loop_that_hangs_is_found_out(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PING_SECONDS", 0.02)
    engine = ScriptedEngine()
    engine.answers_control = False
    response = await serve(engine).get("/health")
    assert error_of(response, 503)["code"] == "engine_unavailable" and "retry-after" in response.headers


async def test_starting(serve: Serve) -> None:
    client = serve(ScriptedEngine(report=None))
    for path in ("/health", "/v1/models", "/metrics"):
        assert "starting" in error_of(await client.get(path), 503)["message"]
    error = error_of(await client.post("/v1/completions", json={"prompt": "a"}), 503)
    assert error["code"] == "engine_unavailable"


async def test_an_engine_that_dies_while_asked(serve: Serve) -> None:
    engine = ScriptedEngine()
    engine.answers_control = False
    asking = asyncio.create_task(serve(engine).get("/health"))
    while not engine.num_pings:  # noqa: ASYNC110
        await asyncio.sleep(0)
    engine.die("killed by SIGSEGV")
    assert "SIGSEGV" in error_of(await asking, 503)["message"]


async def test_metrics_are_the_engines(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    client = serve(engine)
    response = await client.get("/metrics")
    assert response.text.startswith("# no metrics\n# HELP process_cpu_seconds_total ")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.02)
    engine.answers_control = False
    assert error_of(await client.get("/metrics"), 503)


async def test_many_who_read_metrics_at_once_share_a_reading(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[int] = []
    gate = threading.Event()

    def read() -> str:
        readings.append(1)
        assert gate.wait(30)
        return "# read\n"

    monkeypatch.setattr(metrics, "process_metrics", read)
    client = serve(ScriptedEngine())
    asked = [asyncio.ensure_future(client.get("/metrics")) for _ in range(200)]
    while not readings:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for _ in range(50):  # until all of them wait for it
        await asyncio.sleep(0)
    asked.pop().cancel()  # one that leaves takes it from none
    gate.set()
    answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200} and len(readings) <= 3
    assert {answer.text for answer in answers} == {"# no metrics\n# read\n"}


async def test_live_ready_and_the_whole(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FRESH_SECONDS", 60.0)
    engine = ScriptedEngine()
    client = serve(engine)
    engine.heartbeat = heartbeat = Heartbeat()
    heartbeat.rest()
    for path in ("/health", "/health/live", "/health/ready"):
        assert (await client.get(path)).json() == {"status": "ok"}
    assert engine.num_pings == 0  # its pulse is proof enough
    heartbeat.stalled(3.0)
    assert "the engine has made no progress" in error_of(await client.get("/health"), 503)["message"]
    assert (await client.get("/health/ready")).status_code == 200
    engine.is_recovering = True
    for path in ("/health", "/health/ready"):
        assert "being restarted" in error_of(await client.get(path), 503)["message"]
    assert (await client.get("/health/live")).status_code == 200


async def test_a_long_step_that_computes_is_no_fault(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PING_SECONDS", 0.02)
    monkeypatch.setattr(health, "FRESH_SECONDS", -1.0)
    engine = ScriptedEngine()
    engine.answers_control = False
    client = serve(engine, step_timeout=3600.0)
    engine.heartbeat = Heartbeat()
    engine.heartbeat.begin()
    assert (await client.get("/health")).status_code == 200
    engine.heartbeat.rest()  # idle, and still it does not answer
    assert (await client.get("/health")).status_code == 503


async def test_a_step_that_takes_far_longer_than_usual(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ANSWER_SECONDS", 0.02)
    engine = ScriptedEngine()
    engine.answers_control = False
    client = serve(engine)
    engine.heartbeat = heartbeat = Heartbeat()
    heartbeat.seat([], [(0, "cmpl-a")])

    def step(num_tokens: int, seconds: float, ends: bool = False) -> None:
        """One that has run for so long."""
        heartbeat.size(num_tokens)
        heartbeat.begin()
        heartbeat._words[1] -= int(seconds * 1e9)
        if ends:
            heartbeat.end(7, 1, 0)

    async def statuses() -> set[int]:
        return {(await client.get(path)).status_code for path in ("/health", "/health/ready", "/health/progress")}

    step(4, 200)
    assert await statuses() == {200}  # the very first: who knows?
    step(4, 0.01, ends=True)
    step(5, 9)
    assert await statuses() == {200}
    step(5, 11)
    assert await statuses() == {503}
    for path in ("/health", "/health/ready"):
        assert (
            "step 7 has been running for 11.0 s; usually it takes at most 0.1 s"
            in error_of(await client.get(path), 503)["message"]
        )
    body = (await client.get("/health/progress")).json()
    assert body["status"] == "stuck" and "usually it takes at most 0.1 s" in body["without_progress"][0]["why"]
    step(1, 50)
    assert await statuses() == {200}  # of a size that is new here: there may be something to compile
    step(1, 61)
    assert await statuses() == {503}
    step(2048, 250)
    assert await statuses() == {200}  # a prompt as long as none before
    step(2048, 4, ends=True)
    step(2000, 39)
    assert await statuses() == {200}
    step(2048, 41)
    assert await statuses() == {503}
    step(4, 11)
    assert await statuses() == {503}  # what a long prompt takes is no measure for a token
    heartbeat.reset()  # another engine, which has computed nothing
    step(4, 50)
    assert await statuses() == {200}
    assert {(await serve(engine, slow_step_seconds=0.0).get("/health")).status_code} == {200}


async def test_progress_is_the_engines_own_word_while_it_answers(serve: Serve) -> None:
    engine = ScriptedEngine()
    engine.progress = '{"running": 2, "waiting": 1, "oldest_waiting": {"id": "a", "seconds": 7.5, "why": "pages"}}'
    response = await serve(engine).get("/health/progress")
    body = response.json()
    assert response.status_code == 200 and body["status"] == "ok"
    assert body["oldest_waiting"] == {"id": "a", "seconds": 7.5, "why": "pages"} and body["running"] == 2


async def test_progress_of_an_engine_that_hangs_names_who_is_in_its_step(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ANSWER_SECONDS", 0.02)
    engine = ScriptedEngine()
    engine.answers_control = False
    client = serve(engine)
    engine.heartbeat = heartbeat = Heartbeat()
    heartbeat.seat([], [(0, "cmpl-a"), (1, "cmpl-b")])
    heartbeat.begin()
    heartbeat.end(5, 2, 1)
    heartbeat.begin()
    heartbeat.stalled(10.0)
    response = await client.get("/health/progress")
    body = response.json()
    assert response.status_code == 503 and body["status"] == "stuck" and body["steps"] == 5
    assert [each["id"] for each in body["without_progress"]] == ["cmpl-a", "cmpl-b"]
    assert "has not ended" in body["without_progress"][0]["why"] and body["stalled_s"] == 10.0
    engine.is_recovering = True
    assert (await client.get("/health/progress")).json()["status"] == "recovering"
    engine.die("killed")
    assert (await client.get("/health/progress")).json()["status"] == "dead"
