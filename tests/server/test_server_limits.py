"""Limits, budgets and usage of API keys, over the real engine loop."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.ipc import usage_ledger
from octavo.messages import GenerateRequest, Ping
from octavo.observe.metrics.key_metrics import MAX_KEYS
from octavo.server.state.tenants import duration
from tests.doubles import AsgiCall, ScriptedEngine, config
from tests.server.conftest import Serve, error_of, events
from tests.server.running import Served, ask, engine

COMPLETIONS = "/v1/completions"
ONE, TWO, BOSS = ({"Authorization": f"Bearer {key}"} for key in ("one", "two", "boss"))


def keys(folder: Path, **settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "api_key": "one,two",
        "admin_key": "boss",
        "files_folder": str(folder),
        "key_settings": json.dumps(settings),
    }


async def usage(server: Served, headers: dict[str, str]) -> list[dict[str, Any]]:
    return list((await server.http.get("/v1/usage", headers=headers)).json()["data"])


async def test_usage_is_what_answers_say_and_each_key_sees_its_own(served: Any, tmp_path: Path) -> None:
    options = keys(tmp_path, one={"name": "team-a"})
    server: Served = served(**options)
    answers = [
        (await server.http.post(COMPLETIONS, json=ask(max_tokens=4), headers=ONE)).json(),
        (await server.http.post(COMPLETIONS, json=ask(["p", "longer"], n=2, max_tokens=3), headers=ONE)).json(),
    ]
    total = sum(answer["usage"]["total_tokens"] for answer in answers)
    (mine,) = await usage(server, ONE)
    assert mine["key"] == "team-a" and mine["total_tokens"] == mine["tokens_today"] == total
    assert mine["num_requests"] == 2 and mine["tokens_in_flight"] == 0 and mine["tokens_left_today"] is None
    (theirs,) = await usage(server, TWO)
    assert theirs["key"] == "key-1" and theirs["total_tokens"] == 0
    assert [each["key"] for each in await usage(server, BOSS)] == ["team-a", "key-1", "key-2"]
    text = (await server.http.get("/metrics", headers=TWO)).text
    assert f'octavo:key_tokens_total{{key="team-a",kind="output"}} {mine["completion_tokens"]}' in text
    again: Served = served(**options)  # the next server on the same folder
    assert (await usage(again, ONE))[0]["total_tokens"] == total
    renewed = {**options, "api_key": "new,two", "key_settings": json.dumps({"new": {"name": "team-a"}})}
    third: Served = served(**renewed)  # a name keeps its usage when its key is replaced
    assert (await usage(third, {"Authorization": "Bearer new"}))[0]["total_tokens"] == total


@pytest.mark.parametrize("stream", [False, True])
async def test_at_its_budget_an_answer_ends_and_the_next_request_is_refused(
    served: Any, tmp_path: Path, stream: bool
) -> None:
    server: Served = served(**keys(tmp_path, one={"budget_tokens": 12}))
    body = ask("hello", max_tokens=50, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    answer = await server.http.post(COMPLETIONS, json=body, headers=ONE)
    if stream:
        *chunks, last = events(answer.text)
        choice, used = chunks[-1]["choices"][0], last["usage"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a" * 7
    else:
        choice, used = answer.json()["choices"][0], answer.json()["usage"]
        assert choice["text"] == "a" * 7
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "budget")
    assert used["total_tokens"] == 12
    error_of(refused := await server.http.post(COMPLETIONS, json=ask(), headers=ONE), 429)
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert 0 < int(refused.headers["retry-after"]) <= 86400
    assert refused.headers["x-ratelimit-limit-tokens"] == "12"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert (await server.http.post(COMPLETIONS, json=ask(), headers=TWO)).status_code == 200
    (mine,) = await usage(server, ONE)
    assert mine["tokens_today"] == 12 and mine["tokens_left_today"] == 0 and mine["tokens_in_flight"] == 0
    await server.client.control(Ping(call=0))  # it is behind the abort
    assert server.client._engine.loop.scheduler.is_idle, "the engine stops computing it"


async def test_the_chat_dialects_say_it_too(served: Any, tmp_path: Path) -> None:
    server: Served = served(**keys(tmp_path, one={"budget_tokens": 100}))
    body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    choice = (await server.http.post("/v1/chat/completions", json=body, headers=ONE)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "budget")


async def test_answers_that_run_at_the_same_time_share_a_budget_exactly(served: Any, tmp_path: Path) -> None:
    server: Served = served(**keys(tmp_path, one={"budget_tokens": 101}))
    asked = [server.http.post(COMPLETIONS, json=ask("p", max_tokens=40, n=1 + at % 2), headers=ONE) for at in range(8)]
    answers = await asyncio.gather(*asked)
    served_tokens = sum(each.json()["usage"]["total_tokens"] for each in answers if each.status_code == 200)
    assert {each.status_code for each in answers} <= {200, 429} and served_tokens == 101
    assert (await usage(server, ONE))[0]["total_tokens"] == 101


async def test_limits_a_minute_and_their_headers(served: Any, tmp_path: Path) -> None:
    server: Served = served(**keys(tmp_path, one={"rpm": 2, "tpm": 1000}))
    first = await server.http.post(COMPLETIONS, json=ask("hello", max_tokens=5), headers=ONE)
    assert first.headers["x-ratelimit-limit-requests"] == "2" and first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000" and "x-ratelimit-reset-tokens" in first.headers
    assert (await server.http.post(COMPLETIONS, json=ask(), headers=ONE)).status_code == 200
    refused = await server.http.post(COMPLETIONS, json=ask(), headers=ONE)
    error = error_of(refused, 429)
    assert error["code"] == "rate_limit_exceeded" and "2 requests a minute" in error["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 31
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    other = await server.http.post(COMPLETIONS, json=ask(), headers=TWO)
    assert other.status_code == 200 and not any(name.startswith("x-ratelimit") for name in other.headers)
    assert (await server.http.get("/v1/models", headers=ONE)).status_code == 200, "only what is computed counts"


async def test_tokens_in_flight_are_limited_until_a_request_ends(served: Any, tmp_path: Path) -> None:
    server: Served = served(engine(seconds=0.01), **keys(tmp_path, one={"max_tokens_in_flight": 120}))
    call = AsgiCall(
        server.app, "POST", COMPLETIONS, json.dumps(ask("hello", max_tokens=100, stream=True)).encode(), ONE
    )
    await call.until(lambda call: bool(call.sent))
    error = error_of(await server.http.post(COMPLETIONS, json=ask(max_tokens=50), headers=ONE), 429)
    assert "may take 105 tokens, and this one 55 more; the limit is 120" in error["message"]
    assert (await server.http.post(COMPLETIONS, json=ask(max_tokens=5), headers=ONE)).status_code == 200
    call.leave()
    await call.done()
    assert (await server.http.post(COMPLETIONS, json=ask(max_tokens=50), headers=ONE)).status_code == 200


async def test_a_request_that_is_refused_costs_nothing(serve: Serve, tmp_path: Path) -> None:
    client = serve(**keys(tmp_path, one={"budget_tokens": 1000}))
    error_of(await client.post(COMPLETIONS, json={"prompt": "p", "max_tokens": -1}, headers=ONE), 400)
    used = (await client.get("/v1/usage", headers=ONE)).json()["data"][0]
    assert (used["total_tokens"], used["num_requests"]) == (0, 0)


async def test_the_engine_gets_numbers_and_weights_and_never_a_key(serve: Serve, tmp_path: Path) -> None:
    options = keys(tmp_path, two={"weight": 2.5})
    seen: dict[str, list[GenerateRequest]] = {}
    for fairness in ("none", "key", "user", "header:x-team"):
        scripted = ScriptedEngine()
        client = serve(scripted, fairness=fairness, **options)
        for headers, more in ((ONE, {"user": "ann"}), (TWO, {"user": "ann"}), (TWO, {"user": "bob"})):
            await client.post(COMPLETIONS, json=ask(**more), headers={**headers, "x-team": more["user"]})
        seen[fairness] = scripted.requests
    assert [(each.tenant, each.weight) for each in seen["none"]] == [(0, 1.0)] * 3
    assert [(each.tenant, each.weight) for each in seen["key"]] == [(0, 1.0), (1, 2.5), (1, 2.5)]
    for fairness in ("user", "header:x-team"):
        assert len({each.tenant for each in seen[fairness]}) == 3, fairness
        assert [each.weight for each in seen[fairness]] == [1.0, 2.5, 2.5]


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    for options, words in (
        ({"key_settings": '{"x": {"rpm": 1}}', "api_key": "one"}, "1 keys that no --api-key"),
        ({"key_settings": '{"one": {"budget_tokens": 1}}', "api_key": "one"}, "give --files-folder"),
        ({"fairness": "keys"}, "must be none, key, user, or header:NAME"),
        ({"fairness": "key", "scheduling_policy": "priority"}, "leave out --scheduling-policy priority"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**options)


async def test_metrics_have_a_bounded_number_of_keys(serve: Serve, tmp_path: Path) -> None:
    names = [f"k{number}" for number in range(MAX_KEYS + 20)]
    client = serve(api_key=",".join(names), files_folder=str(tmp_path))
    text = (await client.get("/metrics", headers={"Authorization": "Bearer k3"})).text
    assert text.count("octavo:key_requests_total{") == MAX_KEYS + 1 and 'key="other"' in text


def test_durations() -> None:
    assert [duration(each) for each in (0, 0.12, 1.5, 61, 3600, 86399.25)] == [
        "0ms",
        "120ms",
        "1.5s",
        "1m1s",
        "1h0m0s",
        "23h59m59.25s",
    ]


def test_the_ledger_is_private(served: Any, tmp_path: Path) -> None:
    ledger = usage_ledger.UsageLedger(tmp_path / "ledger")
    ledger.close()
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o600
