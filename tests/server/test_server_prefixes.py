"""POST and GET /v1/prefix, and how long pages stay, over the real loop and cache: what is pinned, by which key, within
which limits; hints in every dialect."""

from collections.abc import Callable
from typing import Any

import pytest

from octavo.server.generate.retention import hold_of, retention_in, session_of
from octavo.server.schema.fields import Retention
from tests.doubles import ScriptedEngine
from tests.server.conftest import Serve
from tests.server.running import Served, ask, engine

URL = "/v1/prefix"
Start = Callable[..., Served]
SYSTEM = "You are a careful clerk who answers in one word, whatever is asked. "  # 68 tokens


async def post(server: Served, **body: Any) -> dict[str, Any]:
    response = await server.http.post(URL, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_a_pinned_prefix_is_computed_at_once_and_stays(served: Start) -> None:
    server = served(engine(num_pages=32, seconds=0.0))
    done = await post(server, action="pin", name="clerk", prompt=SYSTEM)
    assert (done["object"], done["action"], done["prompt_tokens"], done["found_tokens"]) == ("prefix", "pin", 68, 0)
    assert done["pinned"] == [
        {"name": "clerk", "tokens": 64, "cached_tokens": 64, "bytes": 400, "seconds_left": None},
    ]
    for number in range(8):  # take all pages, several times
        await server.http.post("/v1/completions", json=ask(f"{number}" + "x" * 200, max_tokens=2))
    answer = await server.http.post("/v1/completions", json=ask(SYSTEM + "What is 1 + 1?", max_tokens=2))
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    listed = (await server.http.get(URL)).json()
    assert listed["object"] == "list" and [pin["name"] for pin in listed["data"]] == ["clerk"]
    assert (await post(server, action="unpin", name="clerk"))["pinned"] == []
    metrics = (await server.http.get("/metrics")).text
    assert 'octavo:held_prefixes{model_name="byte-model",engine="0",kind="pin"} 0' in metrics


async def test_a_warm_prefix_is_found_and_not_pinned(served: Start) -> None:
    server = served(engine(seconds=0.0))
    messages = [{"role": "system", "content": SYSTEM}]
    done = await post(server, action="warm", messages=messages)
    assert done["found_tokens"] == 0 and done["pinned"] == [] and done["prompt_tokens"] > 68
    chat = {"messages": [*messages, {"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = (await server.http.post("/v1/chat/completions", json=chat)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == done["prompt_tokens"] // 16 * 16
    assert (await post(server, action="warm", messages=messages))["found_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"action": "pin", "prompt": "x"}, 400, "name is needed to pin a prefix"),
        ({"action": "pin", "name": "n" * 129, "prompt": "x"}, 400, "name must have at most 128 characters"),
        ({"action": "pin", "name": "n"}, 400, "give either prompt or messages"),
        ({"action": "warm", "prompt": "x", "messages": []}, 400, "give either prompt or messages"),
        ({"action": "warm", "prompt": "x", "seconds": 5}, 400, "seconds is for action pin"),
        ({"action": "pin", "name": "n", "prompt": "x", "seconds": -1}, 400, "seconds is for action pin"),
        ({"action": "pin", "name": "n", "prompt": "x", "seconds": 1e12}, 400, "at most 2592000"),
        ({"action": "unpin", "name": "n", "prompt": "x"}, 400, "prompt has no meaning with action unpin"),
        ({"action": "unpin", "name": "n"}, 404, "no prefix is pinned under the name 'n'"),
        ({"action": "keep", "name": "n"}, 400, "action"),
        ({"action": "warm", "prompt": ""}, 400, "prompt"),
        ({"action": "warm", "prompt": "x", "tools": []}, 400, "tools is only supported with messages"),
        ({"action": "warm", "prompt": "x" * 400}, 400, "context"),
        ({"action": "pin", "name": "n", "prompt": "x" * 240}, 400, "--max-pinned-bytes"),
    ],
)
async def test_what_is_refused(served: Start, body: dict[str, Any], status: int, said: str) -> None:
    server = served(engine(seconds=0.0))
    response = await server.http.post(URL, json=body)
    assert response.status_code == status, response.text
    assert said in response.json()["error"]["message"], response.text
    assert (await server.http.get(URL)).json()["data"] == []


async def test_a_key_sees_and_unpins_its_own(served: Start) -> None:
    server = served(engine(num_pages=128, seconds=0.0), api_key="a,b", admin_key="root")

    async def call(key: str, **body: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"}
        response = await (
            server.http.post(URL, json=body, headers=headers) if body else server.http.get(URL, headers=headers)
        )
        return dict(response.json())

    assert (await server.http.get(URL)).status_code == 401
    await call("a", action="pin", name="mine", prompt=SYSTEM)
    assert [pin["name"] for pin in (await call("a"))["data"]] == ["mine"] and (await call("b"))["data"] == []
    assert [pin["name"] for pin in (await call("root"))["data"]] == ["mine"]
    assert "error" in await call("b", action="unpin", name="mine")
    assert (await call("a", action="unpin", name="mine"))["pinned"] == []


# ── hints ──


def test_times_are_bounded_and_names_have_one_length() -> None:
    assert hold_of(None, None, 3600.0) == {}
    assert hold_of("k", None, 3600.0) == {"session": session_of("k"), "retain_seconds": 300.0}
    assert hold_of(None, "24h", 3600.0) == {"session": "", "retain_seconds": 3600.0}
    assert hold_of("k", "1h", 0.0) == {}
    assert len(session_of("x" * 10**6)) == len(session_of("\ud800")) == 32 and session_of("a") != session_of("b")


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([[{"type": "text", "cache_control": {"type": "ephemeral"}}]], "5m"),
        ([[{"role": "user", "content": [{"content": [{"cache_control": {"ttl": "1h"}}]}]}]], "1h"),
        ([[{"function": {"cache_control": {}}}]], "5m"),
        ([[{"cache_control": None}], None, "text"], None),
        ([{"cache_control": {"ttl": "5m"}}, [{"cache_control": {"ttl": "1h"}}]], "1h"),
    ],
)
def test_cache_control_is_found_where_clients_put_it(parts: list[object], found: Retention | None) -> None:
    assert retention_in(*parts) == found


MARK = {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("path", "body", "seconds"),
    [
        ("/v1/completions", {"prompt": "hi"}, 0.0),
        ("/v1/completions", {"prompt": "hi", "prompt_cache_key": "k"}, 300.0),
        ("/v1/chat/completions", {"prompt_cache_retention": "24h"}, 3600.0),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": MARK}]}]}, 3600.0),
        ("/v1/responses", {"input": "hi", "prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, 300.0),
        ("/v1/responses/compact", {"input": "hi", "prompt_cache_key": "k"}, 300.0),
        ("/v1/responses/compact", {"input": "hi", "prompt_cache_retention": "24h"}, 3600.0),
        ("/v1/messages", {"max_tokens": 5, "system": [{"type": "text", "text": "s", "cache_control": MARK}]}, 3600.0),
        ("/v1/messages", {"max_tokens": 5, "cache_control": {"type": "ephemeral"}}, 300.0),
        ("/v1/messages", {"max_tokens": 5}, 0.0),
    ],
)  # fmt: skip
async def test_every_dialect_passes_the_wish_on(serve: Serve, path: str, body: dict[str, Any], seconds: float) -> None:
    scripted = ScriptedEngine()
    given = (
        {}
        if path in ("/v1/completions", "/v1/responses", "/v1/responses/compact")
        else {"messages": [{"role": "user", "content": "hi"}]}
    )
    response = await serve(scripted).post(path, json={**given, **body})
    assert response.status_code == 200, response.text
    assert "ignored_fields" not in response.json()
    (request,) = scripted.requests
    assert request.retain_seconds == seconds and bool(request.session) == ("prompt_cache_key" in body)


# ── salts ──


async def test_keys_share_no_pages_where_the_server_says_so(served: Start) -> None:
    server = served(engine(seconds=0.0), api_key="a,b", prefix_sharing="key")

    async def found(key: str, **more: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        answer = await server.http.post("/v1/completions", json=ask(SYSTEM, max_tokens=1, **more), headers=headers)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await found("a"), await found("a")] == [0, 64]
    assert [await found("b"), await found("b")] == [0, 64]
    headers = {"authorization": "Bearer b"}
    pin = await server.http.post(URL, json={"action": "pin", "name": "p", "prompt": SYSTEM}, headers=headers)
    assert pin.json()["found_tokens"] == 64 and pin.json()["pinned"][0]["cached_tokens"] == 64


async def test_a_request_with_a_salt_shares_with_those_that_have_the_same(served: Start) -> None:
    server = served(engine(seconds=0.0))

    async def found(**more: Any) -> int:
        answer = await server.http.post("/v1/completions", json=ask(SYSTEM, max_tokens=1, **more))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await found(), await found()] == [0, 64]
    assert [await found(cache_salt="x"), await found(cache_salt="x"), await found(cache_salt="y")] == [0, 64, 0]


# ── why a prefix was missed ──


async def test_a_journey_shows_the_words_that_differ_to_their_own_key_alone(served: Start) -> None:
    server = served(engine(seconds=0.0), api_key="a,b", admin_key="root")

    async def send(key: str, prompt: str) -> str:
        headers = {"authorization": f"Bearer {key}"}
        answer = await server.http.post("/v1/completions", json=ask(prompt, max_tokens=1), headers=headers)
        return str(answer.headers["x-request-id"])

    async def prefill(key: str, request_id: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"}
        journey = (await server.http.get(f"/v1/requests/{request_id}", headers=headers)).json()
        assert journey["cache_miss"] == "new"
        (listed,) = [
            each
            for each in (await server.http.get("/v1/requests", headers=headers)).json()["data"]
            if each["id"] == request_id
        ]
        assert listed["stages"] == journey["stages"]
        return next(dict(stage) for stage in journey["stages"] if stage["name"] == "prefill")

    first = await send("a", "It is noon. " + SYSTEM)
    second = await send("a", "It is nine o'clock. " + SYSTEM)
    stage = await prefill("a", second)
    assert (stage["differs_at"], stage["differs_from"], stage["differs_text"]) == (7, first, "ine o'cl")
    seen = await prefill("root", second)
    assert seen["differs_at"] == 7 and "differs_text" not in seen
    other = await prefill("b", await send("b", "It is one o'clock. " + SYSTEM))
    assert "differs_at" not in other, "prompts of another key are not compared"
    assert server.app.state.service.journeys._prompts == {}
