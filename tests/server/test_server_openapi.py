"""The OpenAPI document is whole and true, and whatever fits or misses its schemas is answered without a server error."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import GenerateRequest, TokenDelta
from octavo.server.app import build_app
from octavo.server.openapi import undocumented
from octavo.server.state.service import Service
from tests.doubles import ScriptedEngine, byte_text, config, says
from tests.server.conftest import Serve, error_of
from tests.server.test_server_embeddings import embeds


async def document(serve: Serve, **options: Any) -> dict[str, Any]:
    answer = await serve(**options).get("/openapi.json")
    assert answer.status_code == 200, answer.text
    return answer.json()


def references(value: Any) -> set[str]:
    match value:
        case dict():
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        case list():
            return set().union(*map(references, value))
    return set()


async def test_every_route_is_described_and_every_reference_leads_somewhere(serve: Serve):
    whole = await document(serve)
    assert list(undocumented(whole)) == []
    for reference in references(whole):
        assert reference.removeprefix("#/components/schemas/") in whole["components"]["schemas"], reference
    operations = [operation for path in whole["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    for path, methods in whole["paths"].items():
        if "post" in methods and not path.endswith(("/cancel", "/ping", "/sleep", "/wake_up")):  # these take no body
            assert methods["post"]["requestBody"]["required"], path
    assert "security" not in whole
    assert all("422" not in operation["responses"] and "4XX" in operation["responses"] for operation in operations)


async def test_the_key_and_the_model_are_told(serve: Serve):
    client = serve(api_key="k")
    assert (await client.get("/openapi.json")).status_code == 401
    whole = (await client.get("/openapi.json", headers={"authorization": "Bearer k"})).json()
    assert whole["security"] == [{"key": []}]
    assert whole["components"]["schemas"]["ChatRequest"]["properties"]["model"] == {"enum": ["byte-model", None]}


def fits(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> bool:
    """As much of JSON Schema as the answers' schemas use."""
    if "$ref" in schema:
        return fits(value, schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return any(fits(value, part, schemas) for part in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema.get("type"):
        case "object":
            named = schema.get("properties", {})
            return isinstance(value, dict) and all(
                fits(inner, named[name], schemas) for name, inner in value.items() if name in named
            ) and set(schema.get("required", ())) <= value.keys()  # fmt: skip
        case "array":
            return isinstance(value, list) and all(fits(inner, schema.get("items", {}), schemas) for inner in value)
        case None:
            return True
        case name:
            kinds = {"string": str, "integer": int, "number": (int, float), "null": type(None), "boolean": bool}
            return isinstance(value, kinds[name]) and (name == "boolean" or not isinstance(value, bool))


GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104, 105]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


@pytest.mark.parametrize("path", GOOD)
async def test_an_answer_fits_its_schema(serve: Serve, path):
    whole = await document(serve)
    answer = await serve().post(path, json=GOOD[path])
    content = whole["paths"][path]["post"]["responses"]["200"]["content"]
    assert fits(answer.json(), content["application/json"]["schema"], whole["components"]["schemas"]), answer.text
    assert not fits({}, content["application/json"]["schema"], whole["components"]["schemas"])


async def test_the_ranges_are_those_that_requests_meet(serve: Serve):
    """At each end a value is taken, beyond it refused."""
    client = serve(max_n=4)
    properties = (await client.get("/openapi.json")).json()["components"]["schemas"]["CompletionRequest"]["properties"]
    tried = 0
    for name, field in properties.items():
        for kind in field.get("anyOf", ()):
            for end, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                if end not in kind:
                    continue
                body = {"prompt": "p", name: kind[end] + step}
                assert error_of(await client.post("/v1/completions", json=body), 400)["param"] == name, (name, end)
                tried += 1
                if name.endswith("logprobs"):
                    continue  # the scripted engine has none to give
                body[name] = kind[end] + (1e-9 if end == "exclusiveMinimum" else 0)
                # A deadline of 1 ms is a valid one that may pass on a busy machine.
                taken = (200, 504) if name == "deadline_ms" else (200,)
                assert (await client.post("/v1/completions", json=body)).status_code in taken, (name, end)
    assert tried >= 20


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 1e308, "", "\x00", "\ud800".encode("utf-16", "surrogatepass").hex()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def bodies(path: str, properties: list[str]) -> st.SearchStrategy[Any]:
    """A good body with a few fields changed, or any JSON at all."""
    names = st.sampled_from(properties) | st.text(max_size=8)
    changed = st.dictionaries(names, VALUES, max_size=3).map(lambda changes: {**GOOD.get(path, {}), **changes})
    return changed | st.dictionaries(names, VALUES, max_size=5) | VALUES


def says_or_embeds(request: GenerateRequest) -> list[list[TokenDelta]]:
    return says("ok")(request) if request.pooling is None else embeds(request)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(ask, document): the application on an event loop that lives as long as this file's examples."""
    with asyncio.Runner() as runner:

        async def start() -> tuple[httpx.AsyncClient, dict[str, Any], Service]:
            options = config(files_folder=str(tmp_path_factory.mktemp("files")))
            app = build_app(ScriptedEngine(says_or_embeds), byte_text(), options, "byte-model")
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
            return client, (await client.get("/openapi.json")).json(), app.state.service

        async def stop() -> None:
            await client.aclose()
            service.compiler.close()

        client, whole, service = runner.run(start())

        def ask(method: str, path: str, **request: Any) -> httpx.Response:
            return runner.run(client.request(method, path, **request))

        yield ask, whole
        runner.run(stop())


def check(answer: httpx.Response, whole: dict[str, Any], path: str, method: str) -> None:
    assert answer.status_code < 500, answer.text
    responses = whole["paths"][path][method]["responses"]
    content = responses["200" if answer.status_code == 200 else "4XX"]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content, answer.headers
    if kind == "application/json":
        assert fits(answer.json(), content[kind]["schema"], whole["components"]["schemas"]), answer.text


def endless(whole: dict[str, Any]) -> set[str]:
    """Feeds that whoever asks gets for as long as they listen."""
    gets = {path: methods["get"] for path, methods in whole["paths"].items() if "get" in methods and "{" not in path}
    return {path for path, get in gets.items() if "text/event-stream" in get["responses"]["200"]["content"]}


def test_no_body_is_a_server_error(server):
    ask, whole = server
    schemas = whole["components"]["schemas"]
    found = {
        path: list(schemas[body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]["properties"])
        for path, methods in whole["paths"].items()
        if "application/json" in (body := methods.get("post", {}).get("requestBody", {"content": {}}))["content"]
    }
    assert GOOD.keys() <= found.keys()

    @settings(max_examples=400, deadline=None)
    @given(data=st.data())
    def walk(data):
        path = data.draw(st.sampled_from(sorted(found)))
        body = data.draw(bodies(path, found[path]))
        text = json.dumps(body).encode()
        if data.draw(st.integers(0, 9)) == 0:
            text = data.draw(st.binary(max_size=30)) or text[:-1]
        answer = ask("POST", path, content=text, headers={"content-type": "application/json"})
        check(answer, whole, path, "post")

    walk()


def test_no_path_or_query_is_a_server_error(server):
    ask, whole = server
    operations = sorted(
        (path, method)
        for path, methods in whole["paths"].items()
        for method in methods
        if method in ("get", "delete") and path not in endless(whole)
    )
    words = st.text(min_size=1, max_size=12).filter(lambda text: text.strip("./") != "")

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def walk(data):
        path, method = data.draw(st.sampled_from(operations))
        url = path
        for name in ("{file_id}", "{batch_id}", "{name}", "{stream_id}", "{request_id}", "{page}", "{response_id}"):
            url = url.replace(name, "".join(f"%{byte:02x}" for byte in data.draw(words).encode()))
        names = st.sampled_from(["limit", "after", "order", "purpose", "state", "x"])
        query = data.draw(st.dictionaries(names, st.integers() | st.text(max_size=10), max_size=3))
        answer = ask(method.upper(), url, params=query)
        if "{" in path and answer.status_code == 404 and "no such route" in answer.text:
            return  # a name with a slash in it
        check(answer, whole, path, method)

    walk()
