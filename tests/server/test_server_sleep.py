"""POST /sleep, /wake_up and GET /is_sleeping, of one model's server and of several models, over real engine loops without a model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo.messages import ASLEEP, ReadSleep
from tests.server.gateway import eventually, gateway
from tests.server.running import Served, ask, engine


async def completed(served: Any, **more: Any) -> str:
    response = await served.http.post("/v1/completions", json=ask(**more))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def is_sleeping(served: Any, query: str = "") -> bool:
    return bool((await served.http.get(f"/is_sleeping{query}")).json()["is_sleeping"])


class TestOneModel:
    async def test_it_gives_pages_back_and_wakes_with_the_next_request(self) -> None:
        served = Served(engine())
        pool = served.client._engine.loop.scheduler.cache.pool
        text = await completed(served, prompt="x" * 40)
        assert pool.num_touched and pool.cached
        for wakes in (True, False):
            assert (await served.http.post("/sleep?level=1")).json() == {"is_sleeping": True}
            assert await is_sleeping(served) and not pool.num_touched and not pool.cached
            assert (await served.http.post("/sleep")).status_code == 200, "level 1 is the default, and twice is once"
            if wakes:
                assert (await served.http.post("/wake_up")).json() == {"is_sleeping": False}
                assert pool.num_warm == pool.num_pages
            assert await completed(served, prompt="x" * 40) == text
            assert not await is_sleeping(served) and pool.cached
        served.client.close()

    async def test_no_open_stream_is_cut(self) -> None:
        served = Served(engine())
        open_one = asyncio.create_task(completed(served, max_tokens=60))
        await eventually(lambda: served.client._engine.loop.scheduler.has_work)
        falling = asyncio.create_task(served.http.post("/sleep"))
        await asyncio.sleep(0.02)
        assert not falling.done() and not await is_sleeping(served)
        assert len(await open_one) == 60
        assert (await falling).json() == {"is_sleeping": True}
        served.client.close()

    async def test_it_falls_asleep_though_its_client_has_left(self) -> None:
        """It is an order, not a question: as in vLLM, it holds once it was accepted. POST /wake_up takes it back."""
        served = Served(engine())
        for is_taken_back in (True, False):
            open_one = asyncio.create_task(completed(served, max_tokens=60))
            await eventually(lambda: served.client._engine.loop.scheduler.has_work)
            falling = asyncio.create_task(served.http.post("/sleep"))
            await asyncio.sleep(0.02)
            falling.cancel()
            await asyncio.gather(falling, return_exceptions=True)
            if is_taken_back:
                await served.http.post("/wake_up")
            assert len(await open_one) == 60
            if is_taken_back:
                await asyncio.sleep(0.05)
                assert not await is_sleeping(served)
            else:
                await eventually(lambda: served.client._engine.loop.is_asleep)
        served.client.close()

    async def test_waking_ends_the_wait_for_sleep(self) -> None:
        served = Served(engine())
        open_one = asyncio.create_task(completed(served, max_tokens=60))
        await eventually(lambda: served.client._engine.loop.scheduler.has_work)
        falling = asyncio.create_task(served.http.post("/sleep"))
        await asyncio.sleep(0.02)
        assert (await served.http.post("/wake_up")).json() == {"is_sleeping": False}
        assert (await falling).json() == {"is_sleeping": False}
        await open_one
        assert not await is_sleeping(served)
        served.client.close()

    @pytest.mark.parametrize(
        ("path", "param"), [("/sleep?level=2", "level"), ("/sleep?level=", "level"), ("/wake_up?tags=weights", "tags")]
    )
    async def test_what_is_not_offered_is_named(self, path: str, param: str) -> None:
        served = Served(engine())
        response = await served.http.post(path)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
        assert not await is_sleeping(served)
        served.client.close()

    async def test_only_an_admin_key_may(self) -> None:
        served = Served(engine(), api_key="user", admin_key="boss")
        for path in ("/sleep", "/wake_up"):
            assert (await served.http.post(path)).status_code == 401
            user, boss = ({"Authorization": f"Bearer {key}"} for key in ("user", "boss"))
            assert (await served.http.post(path, headers=user)).status_code == 403
            assert (await served.http.post(path, headers=boss)).status_code == 200
        served.client.close()


class TestSeveralModels:
    async def test_a_request_wakes_a_model_that_has_kept_its_server(self, tmp_path: Path) -> None:
        async with gateway(tmp_path) as house:
            text = await completed(house, model="two")
            client = house.server("two").client
            assert (await house.http.post("/sleep?model=two")).json() == {"one": "ready", "two": "asleep"}
            assert await client.control(ReadSleep(call=0)) == ASLEEP
            assert await is_sleeping(house, "?model=two") and not await is_sleeping(house)
            assert (await house.http.get("/health?model=two")).status_code == 503
            listed = (await house.http.get("/v1/models")).json()["data"]
            assert {card["id"]: card["status"] for card in listed} == {"one": "ready", "two": "asleep"}
            assert await completed(house, model="two") == text
            assert house.server("two").client is client and house.server("two").state == "ready"

    async def test_weights_that_were_kept_can_be_dropped(self, tmp_path: Path) -> None:
        async with gateway(tmp_path) as house:
            for level, state in ((1, "asleep"), (2, "unloaded"), (1, "unloaded")):
                slept = await house.http.post(f"/sleep?model=two&level={level}")
                assert slept.json() == {"one": "ready", "two": state}
            assert (await house.http.post("/wake_up?model=two")).json() == {"one": "ready", "two": "ready"}
            refused = await house.http.post("/sleep?level=3")
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "level"

    async def test_models_take_turns_and_keep_their_weights(self, tmp_path: Path) -> None:
        turns: dict[str, Any] = {"max_loaded_models": 1, "model_min_seconds": 0.0, "model_sleep_level": 1}
        async with gateway(tmp_path, **turns) as house:
            open_one = asyncio.create_task(completed(house, model="one", max_tokens=60))
            await eventually(lambda: house.server("one").open == 1)
            assert await completed(house, model="two")
            assert len(await open_one) == 60, "it was not cut"
            first = house.server("one").client
            assert (house.server("one").state, house.server("two").state) == ("asleep", "ready")
            assert await completed(house, model="one")
            assert house.server("one").client is first
            assert (house.server("one").state, house.server("two").state) == ("ready", "asleep")

    async def test_with_keys_the_server_is_asked_by_the_admin_key_and_ends_without_one(self, tmp_path: Path) -> None:
        turns: dict[str, Any] = {"max_loaded_models": 1, "model_min_seconds": 0.0, "model_sleep_level": 1}
        for admin, state in ({"admin_key": "boss"}, "asleep"), ({}, "unloaded"):
            async with gateway(tmp_path / state, **turns, api_key="user", **admin) as house:
                house.http.headers["Authorization"] = "Bearer user"
                assert await completed(house, model="two")
                assert house.server("one").state == state
