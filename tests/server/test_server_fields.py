"""No field is passed over in silence; no body makes the server fail."""

import json
import logging
import string
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.server.app import build_app
from octavo.server.endpoints import chat, completions
from octavo.server.endpoints.compat import all_route_schemas
from octavo.server.schema.fields import GenerationFields
from octavo.server.schema.unsupported import NOT_OFFERED, WITHOUT_EFFECT
from tests.doubles import ScriptedEngine, byte_text, config, says
from tests.server.conftest import Serve, error_of, events

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
TABLES = {
    "/v1/completions": {**NOT_OFFERED, **completions.NOT_OFFERED},
    "/v1/chat/completions": {**NOT_OFFERED, **chat.NOT_OFFERED},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_harmless_value_of_every_field_that_is_not_offered_is_taken(serve: Serve, path: str) -> None:
    client = serve()
    for name, values in TABLES[path].items():
        for value in (None, *values):
            response = await client.post(path, json={**BODIES[path], name: value})
            assert response.status_code == 200, (name, value, response.text)
            assert "ignored_fields" not in response.json(), "it asks for nothing, so nothing was passed over"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("strict", [False, True])
async def test_any_other_value_is_refused_by_name(serve: Serve, path: str, strict: bool) -> None:
    engine = ScriptedEngine()
    client = serve(engine, strict_fields=strict)
    for name in TABLES[path]:
        if name in WITHOUT_EFFECT and not strict:
            continue
        error = error_of(await client.post(path, json={**BODIES[path], name: {"x": [1]}}), 400)
        assert error["param"] == name and error["code"] == "unsupported_parameter"
        assert name in error["message"] and '{"x":[1]}' in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"top_logprobs": 2}),
        ("/v1/chat/completions", {"echo": True}),
        ("/v1/chat/completions", {"truncation_side": "right"}),
        ("/v1/chat/completions", {"bad_word_ids": [[1]]}),
        ("/v1/completions", {"suffix": "x"}),  # the model cannot fill in the middle
        ("/v1/completions", {"messages": []}),
        ("/v1/chat/completions", {"functions": [{"name": "x"}]}),
        ("/v1/chat/completions", {"prompt_embeds": "x"}),
        ("/v1/chat/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"anything_at_all": None}),
    ],
)
async def test_examples(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    error = error_of(await serve(strict_fields=True).post(path, json={**BODIES[path], **fields}), 400)
    assert error["param"] == next(iter(fields)) and error["code"] == "unsupported_parameter"


async def test_a_slip_of_the_pen_gets_a_hint(serve: Serve) -> None:
    client = serve(strict_fields=True)
    body = {"prompt": "a", "max_token": 5, "odd": 1, "service_tier": "flex", "length_penalty": 2.0}
    error = error_of(await client.post("/v1/completions", json=body), 400)
    assert error["param"] == "max_token" and "\"max_token\" (did you mean 'max_tokens'?)" in error["message"]
    assert all(name in error["message"] for name in body if name != "prompt"), "one error names every field"
    error = error_of(
        await client.post("/v1/completions", json={"prompt": "a", **dict.fromkeys(map(str, range(99)))}), 400
    )
    assert error["message"].endswith('"7"; and 91 more fields'), error


@pytest.mark.parametrize("path", BODIES)
async def test_what_has_no_effect_is_named_back(serve: Serve, path: str, caplog: pytest.LogCaptureFixture) -> None:
    client = serve()
    more: dict[str, Any] = {"bogus\nfield": None, "service_tier": "flex", "user": "ann", "x" * 300: 1}
    names = ["bogus\nfield", "x" * 100, "service_tier"]
    with caplog.at_level(logging.INFO, "octavo.server"):
        whole = (await client.post(path, json={**BODIES[path], **more})).json()
        assert whole["ignored_fields"] == names and whole["choices"]
        response = await client.post(path, json={**BODIES[path], **more, "stream": True, "n": 2})
    first, *others = events(response.content)
    assert first["ignored_fields"] == names and first["choices"]
    assert not any("ignored_fields" in chunk for chunk in others)
    warnings = [record for record in caplog.records if "fields without effect" in record.message]
    assert [record.levelname for record in warnings] == ["WARNING", "INFO"], "the same news again is no warning"
    assert all(path in record.message and "\n" not in record.message for record in warnings)


async def test_fields_within_fields_count_too(serve: Serve) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": False}}
    first = events((await serve().post("/v1/completions", json=body)).content)[0]
    assert first["ignored_fields"] == ["stream_options.include_obfuscation"]
    error = error_of(await serve(strict_fields=True).post("/v1/completions", json=body), 400)
    assert error["param"] == "stream_options.include_obfuscation" and error["code"] == "unsupported_parameter"


async def test_an_answer_does_not_grow_with_rubbish(serve: Serve) -> None:
    rubbish = {f"field_{number}": 1 for number in range(5000)}
    answer = (await serve().post("/v1/completions", json={"prompt": "a", **rubbish})).json()
    assert len(answer["ignored_fields"]) == 65 and answer["ignored_fields"][-1] == "and 4936 more"


async def test_limits_are_the_servers(serve: Serve) -> None:
    client = serve(max_n=3, max_messages=2)
    message = {"role": "user", "content": "a"}
    assert (await client.post("/v1/chat/completions", json={"messages": [message] * 2, "n": 3})).status_code == 200
    error = error_of(await client.post("/v1/chat/completions", json={"messages": [message] * 3}), 400)
    assert error["param"] == "messages" and "at most 2 (--max-messages)" in error["message"]
    error = error_of(await client.post("/tokenize", json={"messages": [message] * 3}), 400)
    assert error["param"] == "messages"
    error = error_of(await client.post("/v1/completions", json={"prompt": "a", "n": 4}), 400)
    assert error["param"] == "n" and "at most 3 (--max-n)" in error["message"]


async def test_labels_are_taken_and_typed(serve: Serve) -> None:
    client = serve()
    labels = {"user": "ann", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s"}
    assert (await client.post("/v1/completions", json={"prompt": "a", **labels})).status_code == 200
    for name in labels:
        assert error_of(await client.post("/v1/completions", json={"prompt": "a", name: 5}), 400)["param"] == name


def test_a_field_is_offered_or_not_offered_and_never_both() -> None:
    routes = {route.path: route for route in all_route_schemas()}
    assert routes.keys() >= {*BODIES, "/v1/embeddings", "/tokenize", "/detokenize"}
    for path, route in routes.items():
        assert not route.not_offered.keys() & route.schema.model_fields.keys(), path
    for path, table in TABLES.items():
        assert issubclass(routes[path].schema, GenerationFields) and routes[path].not_offered == table


# ── fuzz ────────────────────────────────────────────────────────────────────────────────────────────

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-5, 300)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "a", "user", "text", "byte-model", "\x00", "\U0001f600", "\ufffd"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "include_usage", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    sorted({*completions.CompletionRequest.model_fields, *chat.ChatFields.model_fields, *TABLES["/v1/completions"]})
) | st.text(string.ascii_lowercase, max_size=6)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "king"]), "content": VALUES}), max_size=3
)
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": VALUES | st.text(max_size=40) | st.lists(st.integers(-1, 300), max_size=40),
        "messages": MESSAGES | VALUES,
        "stream": st.booleans(),
        "n": st.integers(-1, 10),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    },
).flatmap(lambda known: st.dictionaries(NAMES, VALUES, max_size=3).map(lambda more: {**known, **more}))


@pytest.fixture(scope="module")
def app() -> Any:
    return build_app(ScriptedEngine(says("ok")), byte_text(), config(), "byte-model")


async def responded(app: Any, path: str, body: bytes) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        response = await client.post(path, content=body)
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
        else:
            assert response.json()["choices"]
    else:
        assert response.status_code in (400, 404), response.text
        assert error_of(response, response.status_code)


FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True
)


@FUZZ
@given(path=st.sampled_from(sorted(BODIES)), body=OBJECTS)
async def test_any_json_object_is_answered_or_refused(app: Any, path: str, body: dict[str, Any]) -> None:
    await responded(app, path, json.dumps(body).encode())


@FUZZ
@given(path=st.sampled_from(sorted(BODIES)), body=st.binary(max_size=60), base=st.booleans(), at=st.integers(0, 100))
async def test_any_bytes_are_answered_or_refused(app: Any, path: str, body: bytes, base: bool, at: int) -> None:
    good = json.dumps({**BODIES[path], "stop": ["x"], "n": 2, "stream": True}).encode()
    await responded(app, path, good[:at] + body + good[at + len(body) :] if base else body)
