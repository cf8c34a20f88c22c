"""Keys over several models: one budget, one count of usage, one set of files and batches; what waits for a model."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.messages import ASLEEP, ReadSleep
from octavo.server.gateway import app as app_module
from octavo.server.gateway import pool as pool_module
from octavo.server.http import body as body_module
from tests.doubles import AsgiCall
from tests.server.batch.test_batch_batches import content, create, line, until, upload
from tests.server.conftest import error_of
from tests.server.gateway import House, eventually, gateway
from tests.server.running import ask

COMPLETIONS = "/v1/completions"
ONE, TWO, BOSS = ({"Authorization": f"Bearer {key}"} for key in ("one", "two", "boss"))
KEYS: dict[str, Any] = {"api_key": "one,two", "admin_key": "boss"}


def settings(**limits: Any) -> str:
    return json.dumps({"one": {"name": "team", **limits}})


async def usage(house: House, headers: dict[str, str] = ONE) -> dict[str, Any]:
    return (await house.http.get("/v1/usage", headers=headers)).json()["data"][0]


class TestUsage:
    async def test_a_budget_is_one_over_all_models_and_outlives_them(self, tmp_path: Path) -> None:
        limits = settings(budget_tokens=60)
        async with gateway(tmp_path, key_settings=limits, **KEYS) as house:
            for model in ("one", "two"):
                answer = await house.http.post(COMPLETIONS, json=ask(model=model, max_tokens=10), headers=ONE)
                assert answer.json()["usage"]["total_tokens"] == 15
                assert answer.headers["x-ratelimit-limit-tokens"] == "60"
            assert answer.headers["x-ratelimit-remaining-tokens"] in ("45", "30")
            listed = await house.http.get("/v1/models", headers=ONE)
            assert listed.headers["x-ratelimit-remaining-tokens"] == "30", "answers of the gateway have them, too"
            used = await usage(house)
            assert (used["key"], used["total_tokens"], used["num_requests"], used["tokens_left_today"]) == (
                "team",
                30,
                2,
                30,
            )
            text = (await house.http.get("/metrics", headers=ONE)).text
            assert text.count('octavo:key_tokens_total{key="team",kind="prompt"} 10') == 1, "once, not for each model"
        async with gateway(tmp_path, key_settings=limits, **KEYS) as house:
            bodies = [ask(model=model, max_tokens=40) for model in ("one", "two")]
            answers = await asyncio.gather(*(house.http.post(COMPLETIONS, json=body, headers=ONE) for body in bodies))
            served = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
            assert served == 30 and (await usage(house))["tokens_today"] == 60
            ends = [(a.json()["choices"][0]["finish_reason"], a.json()["choices"][0]["stop_reason"]) for a in answers]
            assert ends == [("length", "budget")] * 2
            for model in ("one", "two"):
                refused = await house.http.post(COMPLETIONS, json=ask(model=model), headers=ONE)
                assert error_of(refused, 429)["code"] == "insufficient_quota"
            assert (await house.http.post(COMPLETIONS, json=ask(model="two"), headers=TWO)).status_code == 200

    async def test_limits_a_minute_and_in_flight_hold_over_all_models(self, tmp_path: Path) -> None:
        limits = settings(rpm=3, max_tokens_in_flight=200)
        async with gateway(tmp_path, seconds=0.01, key_settings=limits, **KEYS) as house:
            body = ask(model="one", max_tokens=150, stream=True)
            call = AsgiCall(house.app, "POST", COMPLETIONS, json.dumps(body).encode(), ONE)
            await call.until(lambda call: bool(call.sent))
            refused = await house.http.post(COMPLETIONS, json=ask(model="two", max_tokens=60), headers=ONE)
            assert "tokens, and this one 65 more" in error_of(refused, 429)["message"]
            assert (await usage(house))["tokens_in_flight"] == 155
            assert (await house.http.post(COMPLETIONS, json=ask(model="two"), headers=ONE)).status_code == 200
            call.leave()
            await call.done()
            answer = await house.http.post(COMPLETIONS, json=ask(model="two"), headers=ONE)
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            refused = await house.http.post(COMPLETIONS, json=ask(model="one"), headers=ONE)
            assert "3 requests a minute" in error_of(refused, 429)["message"]

    async def test_a_key_without_budget_has_no_model_loaded(self, tmp_path: Path) -> None:
        async with gateway(tmp_path, key_settings=settings(budget_tokens=5), load_on_demand=True, **KEYS) as house:
            assert (await house.http.post(COMPLETIONS, json=ask("abcd", model="one"), headers=ONE)).status_code == 200
            refused = await house.http.post(COMPLETIONS, json=ask("abcd", model="two"), headers=ONE)
            assert error_of(refused, 429)["code"] == "insufficient_quota" and int(refused.headers["retry-after"]) > 0
            assert house.pool.servers["two"].state == "unloaded"


class TestFilesAndBatches:
    async def test_a_batch_runs_at_the_model_of_its_lines(self, tmp_path: Path) -> None:
        async with gateway(tmp_path, **KEYS) as house:
            client = house.http
            client.headers["authorization"] = "Bearer one"
            lines = [line("a", max_tokens=2, model="two"), line("b", max_tokens=2, model="one")]
            batch = await create(client, await upload(client, *lines))
            done = await until(client, batch["id"], "completed", "failed")
            (answered,) = await content(client, done["output_file_id"])
            assert answered["custom_id"] == "a" and answered["response"]["body"]["model"] == "two"
            (other,) = await content(client, done["error_file_id"])
            assert (other["custom_id"], other["response"]["status_code"]) == ("b", 404), "one batch has one model"
            named = await create(client, await upload(client, line("c", max_tokens=2)), model="two")
            await until(client, named["id"], "completed")
            assert house.shared.stores["two"].batches.get(named["id"]).id == named["id"]
            listed = (await client.get("/v1/batches?limit=1")).json()
            assert ([each["id"] for each in listed["data"]], listed["has_more"]) == ([named["id"]], True)
            body = {"input_file_id": done["output_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
            assert error_of(await client.post("/v1/batches", json=body), 400)["param"] == "input_file_id"
            wrong = await client.post("/v1/batches", json={**body, "model": "three"})
            assert error_of(wrong, 404)["code"] == "model_not_found"
            assert (await usage(house))["num_requests"] == 2

    async def test_files_need_no_model_and_batches_have_theirs_loaded(self, tmp_path: Path) -> None:
        async with gateway(tmp_path, load_on_demand=True, max_loaded_models=1, model_min_seconds=0.0) as house:
            file_id = await upload(house.http, line("a", max_tokens=2, model="two"))
            assert (await house.http.get("/v1/files")).json()["data"][0]["id"] == file_id
            states = {name: each.state for name, each in house.pool.servers.items()}
            assert states == {"one": "unloaded", "two": "unloaded"}
            batch = await create(house.http, file_id)
            done = await until(house.http, batch["id"], "completed", "failed")
            assert done["status"] == "completed" and house.pool.servers["two"].num_loads == 1
            assert not house.pool.servers["one"].num_loads

    @pytest.mark.parametrize(("level", "asleep"), [(1, "asleep"), (2, "unloaded")])
    async def test_a_model_that_was_put_to_sleep_is_not_woken_by_batches(
        self, tmp_path: Path, monkeypatch: Any, level: int, asleep: str
    ) -> None:
        monkeypatch.setattr(pool_module, "BATCH_SECONDS", 0.01)
        async with gateway(tmp_path) as house:
            slept = await house.http.post(f"/sleep?model=two&level={level}", json={})
            assert slept.json() == {"one": "ready", "two": asleep}
            batch = await create(house.http, await upload(house.http, line("a", max_tokens=2, model="two")))
            await eventually(lambda: house.server("two").has_batches)
            looks = house.num_looks
            await eventually(lambda: house.num_looks > looks + 1)
            assert house.server("two").state == asleep
            if level == 1:  # its server runs, and looks for batches
                assert await house.server("two").client.control(ReadSleep(call=0)) == ASLEEP
            assert (await house.http.post("/wake_up?model=two", json={})).status_code == 200
            await until(house.http, batch["id"], "completed")

    async def test_a_large_file_is_not_held_in_memory(self, tmp_path: Path) -> None:
        async with gateway(tmp_path, max_body_bytes=1000, max_bodies_bytes=2**20, max_file_bytes=3 * 2**20) as house:
            await upload(house.http, line("a", prompt="x" * 2 * 2**20))
            sent = await house.http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"x" * (3 * 2**20 + 1))}
            )
            assert "--max-file-bytes" in error_of(sent, 413)["message"]


class TestBodies:
    @pytest.mark.parametrize("encoding", ["gzip", "identity"])
    async def test_a_body_over_the_limit_is_refused(self, tmp_path: Path, encoding: str) -> None:
        async with gateway(tmp_path, max_body_bytes=10_000) as house:
            for size, status in ((9_000, 200), (20_000, 413)):
                body = json.dumps(ask(model="two", user="x" * size, max_tokens=1)).encode()
                sent = gzip.compress(body) if encoding == "gzip" else body
                answer = await house.http.post(COMPLETIONS, content=sent, headers={"Content-Encoding": encoding})
                assert answer.status_code == status, answer.text

    async def test_an_unknown_encoding_is_named_with_those_that_are_taken(self, tmp_path: Path) -> None:
        async with gateway(tmp_path) as house:
            answer = await house.http.post(COMPLETIONS, content=b"x", headers={"Content-Encoding": "zstd"})
            assert error_of(answer, 415)["code"] == "unsupported_encoding"
            assert "gzip" in answer.headers["accept-encoding"]

    async def test_a_body_that_does_not_come_ends_in_time(self, tmp_path: Path) -> None:
        async with gateway(tmp_path) as house:
            house.shared.patience = house.shared.patience.__class__(request=0.05)
            call = AsgiCall(house.app, "POST", COMPLETIONS, b"", {"content-length": "100"})
            call._incoming.get_nowait()
            call._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
            await call.done()
            assert call.status == 408 and str(body_module.BODY_STEP).encode() in b"".join(call.sent)

    async def test_errors_have_the_shape_of_their_dialect(self, tmp_path: Path) -> None:
        async with gateway(tmp_path) as house:
            body = {"model": "three", "max_tokens": 1, "messages": []}
            answer = await house.http.post("/v1/messages", json=body)
            assert answer.status_code == 404 and answer.json()["type"] == "error"
            assert isinstance((await house.http.post("/api/chat", json=body)).json()["error"], str)


class TestWaiting:
    async def test_a_wait_for_a_model_is_part_of_the_journey(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(app_module, "COMMENT_SECONDS", 0.02)
        async with gateway(tmp_path, load_on_demand=True, **KEYS) as house:
            house.gate.clear()
            body = json.dumps(ask(model="two", stream=True)).encode()
            call = AsgiCall(house.app, "POST", COMPLETIONS, body, {**ONE, "x-request-id": "mine"})
            await call.until(lambda call: len(call.sent) > 1)
            assert call.sent[0].startswith(b": model two is loading, ") and call.headers["x-request-id"] == "mine"
            for headers, number in ((ONE, 1), (TWO, 0), (BOSS, 1)):
                listed = (await house.http.get("/v1/requests?state=waiting", headers=headers)).json()["data"]
                assert len(listed) == number
                one = await house.http.get("/v1/requests/mine", headers=headers)
                assert one.status_code == (200 if number else 404)
            cards = (await house.http.get("/v1/models", headers=TWO)).json()["data"]
            (card,) = (each for each in cards if each["id"] == "two")
            assert (card["status"], card["waiting"]) == ("loading", 1) and card["loading_seconds"] >= 0
            assert listed[0]["note"] == "model two is loading" and listed[0]["stages"][0]["name"] == "model"
            house.gate.set()
            await call.done()
            assert call.sent[-1].endswith(b"data: [DONE]\n\n")
            for path in ("/v1/requests/mine", "/v1/requests"):
                found = (await house.http.get(path, headers=ONE)).json()
                journey = found if "id" in found else next(each for each in found["data"] if each["id"] == "mine")
                names = [stage["name"] for stage in journey["stages"]]
                assert names[0] == "model" and "decode" in names, names
                total = sum(stage["end"] - stage["start"] for stage in journey["stages"])
                assert journey["seconds"] == pytest.approx(total, abs=0.002), "stages are consecutive"
                assert journey["state"] == "finished"

    async def test_a_key_cannot_take_all_places(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(app_module, "MAX_WAITING_OF_KEY", 2)
        async with gateway(tmp_path, load_on_demand=True, **KEYS) as house:
            house.gate.clear()
            waiting = [
                asyncio.create_task(house.http.post(COMPLETIONS, json=ask(model=name), headers=headers))
                for name, headers in (("one", ONE), ("two", ONE), ("one", TWO))
            ]
            await eventually(lambda: house.app.num_open == 3)
            refused = await house.http.post(COMPLETIONS, json=ask(model="two"), headers=ONE)
            assert "2 requests of this API key wait" in error_of(refused, 429)["message"]
            house.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3

    async def test_an_idle_model_is_unloaded_after_its_time_and_loaded_again(self, tmp_path: Path) -> None:
        async with gateway(tmp_path, seconds=0.01, model_idle_seconds=0.3, model_min_seconds=0.0) as house:
            body = json.dumps(ask(model="one", max_tokens=200, stream=True)).encode()
            call = AsgiCall(house.app, "POST", COMPLETIONS, body)
            await call.until(lambda call: bool(call.sent))
            await house.until("two", "unloaded")
            one, two = house.pool.servers["one"], house.pool.servers["two"]
            assert one.state == "ready", "a model with a response in progress is not idle"
            before = (
                one.num_loads,
                two.num_loads,
            )  # on a slow machine, they were idle for long enough before the first request
            await call.done()
            assert call.sent[-1].endswith(b"data: [DONE]\n\n")
            await house.until("one", "unloaded")
            assert (await house.http.get("/health")).status_code == 200, "an idle model is well"
            assert (await house.http.post(COMPLETIONS, json=ask(model="two"))).status_code == 200
            assert (one.num_loads, two.num_loads) == (before[0], before[1] + 1)


class TestTurns:
    async def test_a_model_with_responses_stays_where_an_idle_one_may_leave_soon(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"models": "one=x,two=y,three=z", "max_loaded_models": 2, "model_min_seconds": 0.5}
        async with gateway(tmp_path, seconds=0.01, **options) as house:
            body = json.dumps(ask(model="one", max_tokens=250, stream=True)).encode()
            call = AsgiCall(house.app, "POST", COMPLETIONS, body)
            await call.until(lambda call: bool(call.sent))
            house.server("two").ready_at += 1.0  # it has to stay for longer than the one with a response
            assert (await house.http.post(COMPLETIONS, json=ask(model="three"))).status_code == 200
            assert (house.server("one").state, house.server("two").state) == ("ready", "unloaded")
            await call.done()

    async def test_a_model_that_is_kept_does_not_leave(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"models": "one=x,two=y,three=z", "max_loaded_models": 2, "model_min_seconds": 0.0}
        async with gateway(tmp_path, keep_loaded="two", model_idle_seconds=0.2, **options) as house:
            assert house.server("two").num_loads == 1
            for name in ("one", "three", "one"):
                assert (await house.http.post(COMPLETIONS, json=ask(model=name))).status_code == 200
            await house.until("one", "unloaded")
            assert (house.server("two").state, house.server("two").num_loads) == ("ready", 1)


class TestIds:
    async def test_a_response_goes_on_at_the_model_that_has_it(self, tmp_path: Path) -> None:
        async with gateway(tmp_path, **KEYS) as house:
            first = {"model": "two", "input": "hi", "max_output_tokens": 2, "ignore_eos": True}
            made = (await house.http.post("/v1/responses", json=first, headers=ONE)).json()
            more = {"previous_response_id": made["id"], "input": "more", "max_output_tokens": 2, "ignore_eos": True}
            answer = await house.http.post("/v1/responses", json=more, headers=ONE)
            assert answer.status_code == 200 and answer.json()["model"] == "two", answer.text
            unknown = await house.http.post("/v1/responses", json=more, headers=TWO)
            assert unknown.status_code in (400, 404)
            path = f"/v1/responses/{made['id']}"
            assert (await house.http.get(path, headers=ONE)).status_code == 200
            assert (await house.http.get(path, headers=TWO)).status_code == 404
            assert (await house.http.delete(path, headers=ONE)).status_code == 200
            error_of(await house.http.get(path, headers=ONE), 404)


async def test_lists_of_ollama_have_every_model(tmp_path: Path) -> None:
    async with gateway(tmp_path) as house:
        running: httpx.Response = await house.http.get("/api/ps")
        assert {card["name"].removesuffix(":latest") for card in running.json()["models"]} == {"one", "two"}
