"""No request makes the server read a file or open a connection, whatever it names; and what it may ask for is limited."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.messages.params import MAX_BAD_WORDS, MAX_BIASES
from octavo.server.endpoints import routers
from octavo.server.http.middleware import OPEN_ROUTES
from tests.doubles import ScriptedEngine
from tests.server.conftest import Serve, error_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
WATCHED = ("open", "os.listdir", "os.scandir", "os.system", "subprocess.Popen", "socket.connect", "socket.getaddrinfo",
           "socket.gethostbyname", "urllib.Request")  # fmt: skip


class Watch:
    """What this process does beyond computing, as the interpreter itself tells it. A hook cannot be taken off again."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Python's own modules, where one is loaded at its first use, are named by nobody.
        if self.is_on and event in WATCHED and not str(arguments[0]).endswith((".py", ".pyc", ".so")):
            self.seen.append(f"{event} {arguments[0]!r}")


_watch = Watch()


@pytest.fixture
def watch() -> Iterator[Watch]:
    _watch.seen.clear()
    yield _watch
    _watch.is_on = False


def part(kind: str, value: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": kind, kind: value}]}]}


def anthropic(content: object) -> dict[str, Any]:
    return {"model": "byte-model", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}


def targets(path: str) -> list[str]:
    return [
        f"file://{path}",
        path,
        "http://127.0.0.1:9/x",
        "https://example.invalid/x",
        "data:text/plain;base64,aGk=",
        "../../x",
    ]


def hostile(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests in which every known way to name a file, an address or a piece of code is tried."""
    found: list[tuple[str, dict[str, Any]]] = []
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    for target in targets(path):
        for kind in ("image_url", "video_url", "audio_url"):
            found += [(CHAT, part(kind, {"url": target})), (CHAT, part(kind, target))]
        found += [
            (CHAT, part("input_audio", {"data": target, "format": "wav"})),
            (CHAT, part("file", {"file_id": target})),
            (CHAT, {**hi, "chat_template": target}),
            (CHAT, {**hi, "chat_template": "{% include '" + target + "' %}"}),
            (CHAT, {**hi, "chat_template": "{{ cycler.__init__.__globals__.os.popen('cat " + target + "').read() }}"}),
            (CHAT, {**hi, "chat_template_kwargs": {"path": target}}),
            (CHAT, {**hi, "documents": [{"url": target}]}),
            (CHAT, {**hi, "media_io_kwargs": {"image": {"path": target}}}),
            (CHAT, {**hi, "web_search_options": {"url": target}}),
            (CHAT, {**hi, "kv_transfer_params": {"remote_host": target}}),
            (CHAT, {**hi, "tools": [{"type": "mcp", "server_url": target}]}),
            (CHAT, {**hi, "model": target}),
            (CHAT, {**hi, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": target}}}}),
            (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"$ref": target}}}),
            (COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": f'%import "{target}"'}}),
            (COMPLETIONS, {"prompt": "a", "prompt_embeds": target}),
            (COMPLETIONS, {"prompt": "a", "vllm_xargs": {"logits_processors": target}}),
            (COMPLETIONS, {"prompt": {"url": target}}),
            (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": target}]}]}),
            (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": target}]}]}),
            (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": target}]}]}),
            (RESPONSES, {"input": "hi", "previous_response_id": target}),
            (RESPONSES, {"input": "hi", "prompt": {"id": target}}),
            (RESPONSES, {"input": "hi", "tools": [{"type": "mcp", "server_label": "a", "server_url": target}]}),
            (RESPONSES, {"input": "hi", "tools": [{"type": "file_search", "vector_store_ids": [target]}]}),
            (MESSAGES, anthropic([{"type": "image", "source": {"type": "url", "url": target}}])),
            (MESSAGES, anthropic([{"type": "document", "source": {"type": "file", "file_id": target}}])),
            (MESSAGES, {**anthropic("hi"), "mcp_servers": [{"type": "url", "url": target, "name": "a"}]}),
            ("/tokenize", {"prompt": "a", "model": target}),
            ("/v1/embeddings", {"input": "a", "model": target}),
            (RESPONSES, {"input": [{"type": "item_reference", "id": target}]}),
        ]  # fmt: skip
    return found


@pytest.mark.parametrize("trusts", [False, True])
async def test_nothing_is_read_and_nobody_is_called(serve: Serve, watch: Watch, tmp_path: Any, trusts: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret words")
    client = serve(ScriptedEngine(), trust_request_chat_template=trusts)
    requests = hostile(str(secret))
    plain = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, plain),
        (RESPONSES, {"input": "a"}),
        *hostile("/nowhere"),
    ]:
        await client.post(path, json=body)  # modules are loaded at their first use: now
    for path, body in requests:
        data = json.dumps(body).encode()
        watch.is_on = True
        response = await client.post(path, content=data)
        watch.is_on = False
        assert response.status_code < 500 and "secret words" not in response.text, (path, body, response.text)
        assert not watch.seen, (path, body, watch.seen)
    assert not any("secret words" in str(request) for request in client.app.state.service.engine.requests)  # type: ignore[attr-defined]


def test_the_watch_does_see(watch: Watch, tmp_path: Any) -> None:
    watch.is_on = True
    with pytest.raises(FileNotFoundError):
        (tmp_path / "nothing").read_text()
    watch.is_on = False
    assert any(event.startswith("open") for event in watch.seen)


async def test_every_route_but_probes_needs_a_key(serve: Serve) -> None:
    client = serve(api_key="secret")
    found = (route for router in routers(client.app.state.service) for route in router.routes)  # type: ignore[attr-defined]
    routes = {(method, route.path) for route in found for method in route.methods}  # type: ignore[attr-defined]
    assert len(routes) > 10
    for method, path in sorted(routes):
        url = re.sub(r"\{[^}]*\}", "x", path)
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"x-api-key": "Bearer secret"},
        ):
            response = await client.request(method, url, headers=headers)
            assert (response.status_code == 401) is (path not in OPEN_ROUTES), (method, path, headers)


@pytest.mark.parametrize(
    ("path", "fields", "param", "limit"),
    [
        (CHAT, {"n": 200}, "n", "at most 128 (--max-n)"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20 (--max-logprobs)"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "between 0 and 20 (--max-logprobs)"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20 (--max-logprobs)"),
        (COMPLETIONS, {"logit_bias": {str(at): 1 for at in range(2000)}}, "logit_bias", f"{MAX_BIASES}"),
        (COMPLETIONS, {"bad_words": ["x"] * 300}, "bad_words", f"{MAX_BAD_WORDS}"),
        (COMPLETIONS, {"stop": ["x"] * 65}, "stop", "64"),
        (COMPLETIONS, {"stop": ["x" * 2000]}, "stop", "1024"),
        (COMPLETIONS, {"stop_token_ids": [1] * 2000}, "stop_token_ids", "1024"),
        (COMPLETIONS, {"prompt": ["x"] * 2000}, "prompt", "1024"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_001}, "messages", "10000 (--max-messages)"),
    ],
)
async def test_limits(serve: Serve, path: str, fields: dict[str, Any], param: str, limit: str) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    error = error_of(await serve().post(path, json={**body, **fields}), 400)
    assert error["param"] == param and limit in error["message"], error
    assert "\n" not in error["message"] and len(error["message"]) < 300


async def test_fewer_logprobs_where_the_server_says_so(serve: Serve) -> None:
    error = error_of(await serve(max_logprobs=2).post(COMPLETIONS, json={"prompt": "a", "logprobs": 3}), 400)
    assert error["param"] == "logprobs" and "between 0 and 2 (--max-logprobs)" in error["message"]


async def test_a_body_beyond_the_limit(serve: Serve) -> None:
    error = error_of(await serve(max_body_bytes=1000).post(COMPLETIONS, json={"prompt": "a" * 1000}), 413)
    assert error["message"] == "the request body is over the limit of 1000 bytes (--max-body-bytes)"
