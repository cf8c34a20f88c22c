"""Targets: parsers of what clients send: heads, uploads, bodies and ids."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from benchmarks.fuzz.target import Target
from octavo.config import BudgetConfig, Config
from octavo.errors import OctavoError
from octavo.server.batch.batches import BatchStore
from octavo.server.batch.files import FileStore
from octavo.server.dialects.openai_responses.store import ResponseStore
from octavo.server.endpoints.compat import all_route_schemas
from octavo.server.endpoints.stream import first_wanted
from octavo.server.http.multipart import Form
from octavo.server.http.protocol import Connection
from octavo.server.schema.fields import parse_body
from octavo.server.state.resume import StreamLogs

# ── HTTP heads ──


class _Memory(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _read_all(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


class _Http:
    """A connection for each case, in one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._faults: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda loop, context: self._faults.append(context))
        self._config = uvicorn.Config(_read_all, http="httptools", ws="none", lifespan="off", log_config=None)
        self._config.load()

    def run(self, data: bytes) -> None:
        self._loop.run_until_complete(self._converse(data))
        if self._faults:
            fault = self._faults.pop()
            self._faults.clear()
            raise fault.get("exception") or RuntimeError(fault.get("message"))

    async def _converse(self, data: bytes) -> None:
        state = ServerState()
        connection = Connection(
            config=self._config,
            server_state=state,
            app_state={},
            is_refused=False,
            budget=BudgetConfig(),
            on_malformed=lambda kind: None,
        )
        transport = _Memory()
        connection.connection_made(transport)
        step = max(1, len(data) // (1 + len(data) % 5))
        for at in range(0, len(data), step):
            if not transport.is_closing():
                connection.data_received(data[at : at + step])
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        connection.eof_received()
        connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        if transport.written and not transport.written.startswith(b"HTTP/1.1 "):
            raise AssertionError(f"not an HTTP response: {bytes(transport.written[:40])!r}")


_HEADS = [
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}",
    b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nTrailer: z\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"POST /x HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na",
    b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
_HEAD_WORDS = (
    "GET ", "POST ", "HEAD ", "OPTIONS * ", "CONNECT a:1 ", " HTTP/1.1", " HTTP/1.0", "\r\n", "\n", "\r\n\r\n", "Host: ",
    "Content-Length: ", "Transfer-Encoding: chunked", "Connection: close", "Connection: keep-alive", "Expect: 100-continue",
    "0\r\n\r\n", "ffffffffffffffff\r\n", ";", "%00", "%0a", "\t", "Upgrade: h2c", "Content-Length: -1", "Authorization: ",
)  # fmt: skip

# ── uploads ──


class _Sink:
    def write(self, data: bytes) -> None: ...


def _run_multipart(data: bytes) -> None:
    form = Form(b"bound", "file", _Sink())
    middle = len(data) // 3
    form.feed(data[:middle])
    form.feed(data[middle:])
    form.finish()


_FORM = (
    b'--bound\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--bound\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n{}\n\r\n'
    b"--bound--\r\n"
)

# ── bodies ──

_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "4"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
            "tool_choice": "auto", "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["x"], "logit_bias": {"5": 1.0},
            "logprobs": True, "top_logprobs": 2, "seed": 1, "max_tokens": 5, "stream": True,
            "stream_options": {"include_usage": True}, "response_format": {"type": "json_object"},
            "structured_outputs": {"choice": ["a"]}, "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
            "bad_words": ["b"], "stop_token_ids": [3], "allowed_token_ids": [1], "metadata": {"a": "b"},
            "chat_template_kwargs": {"x": 1}, "deadline_ms": 100,
        }
    ],
    "/v1/completions": [{"model": "m", "prompt": ["a", "b"], "echo": True, "logprobs": 3, "best_of": 2, "suffix": None}],
    "/v1/embeddings": [{"model": "m", "input": [[1, 2], [3]], "encoding_format": "base64", "dimensions": 4}],
    "/v1/responses": [
        {
            "model": "m", "instructions": "x", "store": True, "previous_response_id": "resp_1", "truncation": "auto",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
                {"type": "item_reference", "id": "msg_1"},
                {"type": "reasoning", "id": "rs_1", "summary": []},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}], "text": {"format": {"type": "text"}},
        }
    ],
    "/v1/messages": [
        {
            "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "x"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
            "thinking": {"type": "disabled"}, "stop_sequences": ["z"],
        }
    ],
    "/tokenize": [{"prompt": "a", "add_special_tokens": True}, {"messages": [{"role": "user", "content": "a"}]}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/v1/batches": [
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}
    ],
    "/v1/prefix": [
        {"action": "pin", "name": "a", "prompt": "hi", "seconds": 5.0},
        {"action": "warm", "messages": [{"role": "system", "content": "x"}], "tools": [], "chat_template_kwargs": {"x": 1}},
    ],
    "/v1/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}],
    "/v1/score": [{"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 5}],
    "/classify": [{"input": ["a", "b"], "activation": True}],
    "/pooling": [{"input": ["a", [1, 2]], "task": "token_embed", "encoding_format": "base64", "dimensions": 4}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "/x", "load_inplace": True, "base_model_name": "m"}],
    "/v1/fleet": [{"replicas": 2, "restart": True}],
    "/api/chat": [
        {
            "model": "m", "messages": [{"role": "user", "content": "Hi", "images": []}], "stream": False, "format": "json", "think": True,
            "options": {"num_predict": 5, "temperature": 0.5, "stop": ["x"], "num_ctx": 512}, "keep_alive": "5m", "tools": [],
        }
    ],
    "/api/generate": [{"model": "m", "prompt": "a", "system": "b", "raw": False, "options": {"seed": 1}, "keep_alive": 0}],
    "/api/embed": [{"model": "m", "input": ["a"], "truncate": True, "dimensions": 4}],
    "/completion": [
        {
            "prompt": ["a", 1, [1, 2]], "n_predict": 5, "logit_bias": [[5, 1.0], ["a", False]], "grammar": 'root ::= "a"', "samplers": ["top_k"],
            "n_probs": 2, "cache_prompt": True, "id_slot": -1, "response_fields": ["content"], "stop": ["x"], "json_schema": {},
        }
    ],
    "/infill": [{"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f", "text": "t"}], "prompt": "c"}],
    "/apply-template": [{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1}}],
}  # fmt: skip


@cache
def _routes() -> dict[str, Any]:
    return {route.path: route for route in all_route_schemas()}


def _run_body(path: str, data: bytes) -> None:
    parse_body(data, _routes()[path], Config())


def _words_in(value: Any) -> set[str]:
    match value:
        case dict():
            return set(value) | {word for member in value.values() for word in _words_in(member)}
        case list():
            return {word for member in value for word in _words_in(member)}
        case str():
            return {value}
    return set()


def _body_target(path: str) -> Target:
    bodies = _BODIES.get(path) or _BODIES["/v1/chat/completions"]
    if path.startswith("/v1/messages"):
        bodies = _BODIES["/v1/messages"]
    if path.startswith("/v1/responses"):
        bodies = _BODIES["/v1/responses"]
    seeds = [json.dumps(body).encode() for body in bodies]
    words = sorted(set().union(*map(_words_in, bodies)))
    return Target(f"body {path}", seeds, partial(_run_body, path), (OctavoError,), words, is_json=True)


# ── ids ──


class _Stores:
    def __init__(self) -> None:
        root = Path(tempfile.mkdtemp(prefix="octavo-fuzz-"))
        self._files = FileStore(root, 1000, 10_000, 10)
        self._batches = BatchStore(root)
        self._responses = ResponseStore(10, 1000)
        self._logs = StreamLogs(60.0, 1000)

    def run(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        for look in (
            self._files.get,
            self._files.open,
            self._batches.get,
            self._batches.cancel,
            lambda wanted: self._responses.get(wanted, b""),
            lambda wanted: self._responses.item(wanted, b""),
            lambda wanted: self._logs.find(wanted, b""),
        ):
            with contextlib.suppress(OctavoError):
                look(text)
        first, _, second = data.partition(b"\n")
        headers = [(b"last-event-id", second)] if second else []
        first_wanted(Request({"type": "http", "query_string": first, "headers": headers, "path": "/", "method": "GET"}))


TARGETS: dict[str, Callable[[], Target]] = {
    "http": lambda: Target("http", _HEADS, _Http().run, (), _HEAD_WORDS),
    "multipart": lambda: Target(
        "multipart", [_FORM], _run_multipart, (OctavoError,),
        ("--bound", "--bound--", "\r\n", "Content-Disposition: ", "form-data", 'name="file"', "filename", "filename*=UTF-8''"),
    ),
    "ids": lambda: Target(
        "ids", [b"file-" + b"0" * 32, b"batch_" + b"0" * 32, b"from=5", b"from=1\n7", b"resp_1", b"../../etc/passwd"],
        _Stores().run, (OctavoError,), ("file-", "batch_", "resp_", "msg_", "../", "%2e", "\0", "from=", "٣", "²"),
    ),
    **{
        f"body{path}": partial(_body_target, path)
        for path in (
            "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/responses/input_tokens",
            "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/batches", "/v1/responses/compact", "/v1/prefix",
            "/v1/rerank", "/v1/score", "/classify", "/pooling", "/v1/load_lora_adapter", "/v1/fleet", "/api/chat", "/api/generate",
            "/api/embed", "/completion", "/infill", "/apply-template",
        )
    },
}  # fmt: skip
