"""GET /health and /metrics: the truth about the engine, cheaply."""

import asyncio

import pytest

from octavo.server.endpoints import health, metrics
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
    assert response.text == "# no metrics\n"
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    monkeypatch.setattr(metrics, "ANSWER_SECONDS", 0.02)
    engine.answers_control = False
    assert error_of(await client.get("/metrics"), 503)
