"""Every route with another key's ids. The routes come from the application: a new one without a place in the tables below fails.

Key one makes one thing of every kind, with a marker in all of its texts. Key two then asks every route for them: an id of key one is
refused as an unknown id is, and no answer to key two has a marker or an id of key one in it. The same through the gateway of several
models, at whose second model key one has made its things."""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles import AsgiCall
from tests.server.batch.test_batch_batches import background, create, line, until, upload
from tests.server.gateway import gateway
from tests.server.running import Served, ask, engine

ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
MARKER = "zebra-quartz"

BY_ID: dict[str, str] = {
    "{batch_id}": "batch",
    "{file_id}": "file",
    "{request_id}": "request",
    "{response_id}": "response",
    "{stream_id}": "stream",
}
"""Parameters of paths that are ids of a client's things, and which."""
OTHER_PARAMETERS = {"{page}": "0", "{name}": "byte-model"}  # at the gateway: a model that it does not have
"""Parameters that name nothing of a client's."""
UNKNOWN = {
    "batch": "batch_" + "0" * 32,
    "file": "file-" + "0" * 32,
    "request": "req-" + "0" * 24,
    "response": "resp_" + "0" * 32,
    "stream": "cmpl-" + "0" * 32,
}
OWN_IDS = re.compile(r"(.*\.)?(call_id|tool_call_id|tool_calls\.id|tool_use_id|content\.id|user_id|\w*token_ids)")
"""Fields that are called ids and are the request's own: of tool calls within it, of tokens, of the caller's users."""
ID_FIELDS: dict[str, str] = {"input_file_id": "file", "previous_response_id": "response", "input.id": "item"}
"""Fields of bodies that are ids of a client's things."""
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/batches", "input_file_id"): {"endpoint": "/v1/completions", "completion_window": "24h"},
    ("/v1/responses", "previous_response_id"): {"input": "go on"},
    ("/v1/responses/input_tokens", "previous_response_id"): {"input": "go on"},
    ("/v1/responses/compact", "previous_response_id"): {"input": "go on"},
    ("/v1/responses", "input.id"): {},
    ("/v1/responses/input_tokens", "input.id"): {},
    ("/v1/responses/compact", "input.id"): {},
}
METHODS = ("get", "post", "delete", "put", "patch")
STREAMS = {"/v1/live"}  # answers that do not end by themselves


def id_fields(
    schema: Any, schemas: dict[str, Any], seen: frozenset[str] = frozenset(), path: str = ""
) -> Iterator[str]:
    """Paths of the fields of a body that are called ids."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema and (name := schema["$ref"].rsplit("/", 1)[1]) not in seen:
        yield from id_fields(schemas[name], schemas, seen | {name}, path)
    for name, inner in schema.get("properties", {}).items():
        if name == "id" or name.endswith(("_id", "_ids")):
            yield f"{path}.{name}".removeprefix(".")
        yield from id_fields(inner, schemas, seen, f"{path}.{name}".removeprefix("."))
    for word in ("items", "anyOf", "oneOf", "allOf", "additionalProperties", "prefixItems"):
        inner = schema.get(word)
        for each in inner if isinstance(inner, list) else [inner]:
            yield from id_fields(each, schemas, seen, path)


class Made:
    """What key one has made."""

    def __init__(self, app: Any, http: httpx.AsyncClient, ids: dict[str, str], document: dict[str, Any]) -> None:
        self.app, self.http, self.ids = app, http, ids
        self.document = document

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for path, operations in self.document["paths"].items():
            for method in METHODS:
                if method in operations:
                    yield method.upper(), path, operations[method]

    async def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """As key two. A stream is read to its first event."""
        if path in STREAMS:
            call = AsgiCall(self.app, method, path, headers=TWO)
            await call.until(lambda call: bool(call.sent))
            call.leave()
            await call.done()
            return httpx.Response(call.status, content=b"".join(call.sent))
        return await self.http.request(method, path, headers=TWO, json=body)

    def check(self, what: str, answer: httpx.Response) -> None:
        for name, mine in self.ids.items():
            assert mine not in answer.text, f"{what} names a {name} of another key"
        assert MARKER not in answer.text, f"{what} shows a text of another key"
        assert answer.status_code < 500, what


KEYS: dict[str, Any] = {"api_key": "one,two", "admin_key": "boss"}


@pytest.fixture(params=["server", "gateway"])
async def made(request: pytest.FixtureRequest, served: Any, tmp_path: Path) -> AsyncIterator[Made]:
    if request.param == "gateway":
        async with gateway(tmp_path, **KEYS) as house:
            document = house.server("two").app.state.service.openapi()
            async with things(house.app, house.http, {"model": "two"}) as ids:
                yield Made(house.app, house.http, ids, document)
        return
    server: Served = served(engine(num_pages=256), files_folder=str(tmp_path), **KEYS)
    server.http.app = server.app  # type: ignore[attr-defined]
    async with background(server.http), things(server.app, server.http, {}) as ids:
        yield Made(server.app, server.http, ids, server.app.state.service.openapi())


@contextlib.asynccontextmanager
async def things(app: Any, client: httpx.AsyncClient, model: dict[str, str]) -> AsyncIterator[dict[str, str]]:
    """Have key one make one thing of every kind. → their ids"""
    client.headers["authorization"] = ONE["Authorization"]
    ids = {"file": await upload(client, line(MARKER, max_tokens=2, **model))}
    batch = await create(client, ids["file"])
    done = await until(client, batch["id"], "completed", "failed")
    ids |= {"batch": batch["id"], "output": done["output_file_id"]}
    answer = await client.post("/v1/completions", json=ask(MARKER, **model))
    ids |= {"request": answer.headers["x-request-id"], "completion": answer.json()["id"]}
    body = {"input": MARKER, "max_output_tokens": 2, "ignore_eos": True, **model}
    response = await client.post("/v1/responses", json=body)
    ids |= {"response": response.json()["id"], "item": response.json()["output"][0]["id"]}
    body = ask(MARKER, stream=True, stream_options={"resumable": True}, **model)
    call = AsgiCall(app, "POST", "/v1/completions", json.dumps(body).encode(), ONE)
    await call.done()
    ids["stream"] = call.headers["x-stream-id"]
    body = ask(MARKER, max_tokens=300, stream=True, **model)
    running = AsgiCall(app, "POST", "/v1/completions", json.dumps(body).encode(), ONE)
    await running.until(lambda call: bool(call.sent))
    ids["running"] = running.headers["x-request-id"]
    del client.headers["authorization"]
    yield ids
    running.leave()
    await running.done()


async def test_an_id_of_another_key_is_as_good_as_none(made: Made) -> None:
    num_tried = 0
    for method, path, _ in made.operations():
        names = re.findall(r"\{\w+\}", path)
        for name in names:
            assert name in BY_ID or name in OTHER_PARAMETERS, f"{path}: say in this file what {name} is"
        if not any(name in BY_ID for name in names):
            continue
        (name,) = names
        kind = BY_ID[name]
        mine = [made.ids[kind], *([made.ids["output"]] if kind == "file" else [])]
        mine += [made.ids["running"], made.ids["completion"]] if kind == "request" else []
        for each in mine:
            refused = [await made.ask(method, path.replace(name, asked)) for asked in (each, UNKNOWN[kind])]
            assert [answer.status_code for answer in refused] == [404, 404], (method, path, refused[0].text)
            told = [
                answer.text.replace(asked, "ID") for answer, asked in zip(refused, (each, UNKNOWN[kind]), strict=True)
            ]
            assert told[0] == told[1], (method, path)
            num_tried += 1
    assert num_tried >= 15
    # Nothing of it has gone: key one still has it all.
    for path in ("/v1/files/{file}", "/v1/batches/{batch}", "/v1/responses/{response}", "/v1/requests/{request}"):
        answer = await made.http.get(path.format(**made.ids), headers=ONE)
        assert answer.status_code == 200, path


async def test_a_body_with_an_id_of_another_key_is_refused(made: Made) -> None:
    schemas = made.document["components"]["schemas"]
    num_tried = 0
    for method, path, operation in made.operations():
        contents = operation.get("requestBody", {}).get("content", {}).values()
        fields = {name for content in contents for name in id_fields(content.get("schema"), schemas)}
        for field in sorted(fields):
            if OWN_IDS.fullmatch(field):
                continue
            assert field in ID_FIELDS, f"{method} {path}: say in this file what {field} is an id of"
            kind, body = ID_FIELDS[field], BODIES[path, field]
            told = []
            for asked in (made.ids[kind], "msg_" + "0" * 32 if kind == "item" else UNKNOWN[kind]):
                given = {"input": [{"type": "item_reference", "id": asked}]} if kind == "item" else {field: asked}
                answer = await made.ask(method, path, {**body, **given})
                assert answer.status_code in (400, 404), (path, field, answer.text)
                told.append(answer.text.replace(asked, "ID"))
            assert told[0] == told[1], (path, field)
            num_tried += 1
    assert num_tried >= 7


async def test_no_answer_shows_anything_of_another_key(made: Made) -> None:
    """Lists, feeds, pages and metrics as key two sees them; every other route with an empty body and with a harmless one."""
    num_tried = 0
    for method, path, _ in made.operations():
        if any(name in path for name in BY_ID):
            continue
        for name, value in OTHER_PARAMETERS.items():
            path = path.replace(name, value)
        # The engine of these tests has no vectors.
        bodies = [{}] if "embed" in path else [{}, ask("hi", max_tokens=2)]
        for body in [None] if method == "GET" else bodies:
            made.check(f"{method} {path}", await made.ask(method, path, body))
            num_tried += 1
    assert num_tried >= 45
    for page in range(16):
        made.check("a page", await made.ask("GET", f"/v1/live/pages/{page}"))


async def test_the_markers_are_there_to_be_found(made: Made) -> None:
    """The tests above can fail: key one sees each of these, the admin too."""
    for headers in (ONE, {"Authorization": "Bearer boss"}):
        for kind, path in (
            ("file", "/v1/files"),
            ("batch", "/v1/batches"),
            ("request", "/v1/requests"),
            ("running", "/v1/requests"),
            ("response", f"/v1/responses/{made.ids['response']}"),
        ):
            answer = await made.http.get(path, headers=headers)
            assert made.ids[kind] in answer.text, (kind, path)
