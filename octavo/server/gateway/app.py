"""The ASGI application in front of several models: passes each request on to the server of the model that it names, and answers what is
about all of them: /v1/models, /health, /metrics, /sleep, /wake_up and /is_sleeping."""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.config import Config
from octavo.errors import (
    EngineUnavailable,
    Forbidden,
    ModelNotFound,
    NotFound,
    OctavoError,
    Overloaded,
    TooLarge,
    UnsupportedEncoding,
    quote,
)
from octavo.server.gateway.metrics import LABEL, escaped, merged
from octavo.server.gateway.model_server import ModelServer
from octavo.server.gateway.pool import Pool
from octavo.server.gateway.upstream import Exchange, UpstreamGone
from octavo.server.http.browsers import HostRule, OriginRule, machine_names
from octavo.server.http.errors import describe, error_response
from octavo.server.http.middleware import METRICS, OPEN_ROUTES, route_of, secrets_of, unauthorized

log = logging.getLogger("octavo.gateway")

COMMENT_SECONDS = 2.0  # between two comments in a stream that waits for its model
HEALTH_SECONDS = 10.0  # that a model's server has to say how it is
SMALL_BODY = 64 * 2**10
RETRY_SECONDS = 2
STREAMS = {
    "/v1/chat/completions": b"data: %b\n\ndata: [DONE]\n\n",
    "/v1/completions": b"data: %b\n\ndata: [DONE]\n\n",
    "/v1/responses": b"event: error\ndata: %b\n\n",
    "/v1/messages": b"event: error\ndata: %b\n\n",
}
"""Routes whose streams are events, in which comments are skipped; and how such a stream ends with an error."""
# Of one connection, or written anew: not passed on.
_HOP_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length",
     b"expect", b"x-forwarded-proto"}
)  # fmt: skip


class _Named(msgspec.Struct):
    """What the gateway reads of a body."""

    model: str | None = None
    stream: Any = None


_named = msgspec.json.Decoder(_Named)


class ClientLeft(Exception):
    pass


class Gateway:
    def __init__(self, config: Config, pool: Pool) -> None:
        server = config.server
        self._config, self._pool = config, pool
        self._keys = [key.encode() for key in server.api_keys]
        self._admin_keys = [key.encode() for key in server.admin_keys]
        self._metrics_keys = [key.encode() for key in server.metrics_keys]
        self._is_metrics_open = server.metrics_open
        self._hosts, self._origins = HostRule(server, machine_names()), OriginRule(server)
        self._prefix = server.root_path.rstrip("/")
        self._max_body = int(config.budget.max_body_bytes)
        self._max_file = max(self._max_body, int(config.batches.max_file_bytes) + SMALL_BODY)
        self._max_bodies = int(config.budget.max_bodies_bytes)
        self._num_bodies_bytes = 0
        self.num_open = 0
        self.idle = asyncio.Event()  # set while no request is in progress
        self.idle.set()
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._prefix:
            scope["root_path"] = self._prefix
        request_id = f"req-{os.urandom(12).hex()}"
        scope["octavo.request_id"] = request_id
        passage = _Passage(scope, receive, send)
        self.num_open += 1
        self.idle.clear()
        try:
            await self._answer(passage)
        except ClientLeft:
            pass
        except Exception as error:
            if not isinstance(error, OctavoError):
                log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"][:1000])
            if passage.has_begun:
                raise  # only closing the connection can signal it
            response = error_response(error, request_id, scope["method"], route_of(scope))
            await response(scope, receive, send)
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()
            self._num_bodies_bytes -= passage.num_counted

    async def _answer(self, passage: "_Passage") -> None:
        method, route = passage.scope["method"], route_of(passage.scope)
        match method, route:
            case ("GET" | "HEAD", "/health/live"):
                return await passage.json({"status": "ok"})
            case ("GET" | "HEAD" | "POST", "/health" | "/health/ready" | "/ping"):
                return await self._health(passage)
            case "GET", "/metrics":
                self._check_access(passage)
                return await self._metrics(passage)
            case "GET", "/v1/models":
                self._check_access(passage)
                cards = await asyncio.gather(*(self._cards(each, passage) for each in self._pool.servers.values()))
                return await passage.json({"object": "list", "data": [card for own in cards for card in own]})
            case "GET", "/is_sleeping":
                self._check_access(passage)
                asked = self._asked(passage)
                servers = self._pool.servers.values() if asked is None else [asked]
                return await passage.json({"is_sleeping": all(each.state == "unloaded" for each in servers)})
            case "POST", "/sleep" | "/wake_up":
                self._check_access(passage, is_admin=True)
                await passage.read(self._max_body, self)
                change = self._pool.sleep if route == "/sleep" else self._pool.wake
                asked = self._asked(passage)
                for server in self._pool.servers.values() if asked is None else [asked]:
                    await passage.unless_left(change(server))
                return await passage.json({name: each.state for name, each in self._pool.servers.items()})
        if route.startswith("/v1/models/") and method == "GET":
            self._check_access(passage)
            name = route.removeprefix("/v1/models/")
            if (found := self._pool.servers.get(name)) is not None:
                return await passage.json((await self._cards(found, passage))[0])
        else:
            self._check_access(passage)  # a model's server checks it, too, but a stranger must not have a model loaded
        return await self._pass_on(passage)

    # ── access ──

    def _check_access(self, passage: "_Passage", *, is_admin: bool = False) -> None:
        """As RequestMiddleware checks it; the servers of models check what is passed on to them by themselves."""
        scope, headers = passage.scope, Headers(scope=passage.scope)
        self._hosts.check(scope, headers)
        if route_of(scope) == METRICS and self._is_metrics_open:
            return self._origins.check(scope, headers)
        more = self._metrics_keys if route_of(scope) == METRICS else []
        if not self._keys and not more:
            return self._origins.check(scope, headers)
        if route_of(scope) in OPEN_ROUTES:
            return None
        keys, passwords = secrets_of(headers)
        right = [key for secret in keys for key in (*self._keys, *more) if hmac.compare_digest(secret, key)]
        if not right:
            right = [key for secret in passwords for key in (*self._keys, *more) if hmac.compare_digest(secret, key)]
            if not right:
                raise unauthorized(scope, is_wrong=any(keys) or any(passwords))
            self._origins.check(scope, headers)
        if is_admin and not any(hmac.compare_digest(right[0], key) for key in self._admin_keys):
            raise Forbidden("only an admin key may load and unload models (--admin-key)", "key")
        return None

    # ── what is about all models ──

    def _asked(self, passage: "_Passage") -> ModelServer | None:
        """The model of the query or the body. None: none is named."""
        name = passage.query.get("model") or passage.named.model
        return None if not name else self._find(name)

    def _find(self, name: str) -> ModelServer:
        server = self._pool.servers.get(name) or self._pool.servers.get(
            name.removesuffix(":latest")
        )  # Ollama's clients add it
        if server is None:
            names = ", ".join(map(repr, self._pool.servers))
            raise ModelNotFound(f"model {quote(name)} is not served here; use one of {names}", param="model")
        return server

    async def _cards(self, server: ModelServer, passage: "_Passage") -> list[dict[str, Any]]:
        """A model's entries in /v1/models: its server's own, with its adapters, or a short one while it is not loaded."""
        if server.state == "ready":
            try:
                status, body = await server.upstream.ask(b"/v1/models", passage.forwarded())
                if status == 200:
                    return [{**card, "status": "ready"} for card in json.loads(body)["data"]]
            except (UpstreamGone, ValueError):
                pass
        card = {"id": server.name, "object": "model", "created": self._created, "owned_by": "octavo"}
        return [{**card, "root": server.config.model.model, "status": server.state}]

    async def _health(self, passage: "_Passage") -> None:
        """200 if every model that is to be loaded could produce a token now, and none has failed. With ?model=NAME: if that one could."""
        asked = self._asked(passage)
        servers = [*self._pool.servers.values()] if asked is None else [asked]
        states = dict(zip((s.name for s in servers), await asyncio.gather(*map(self._state, servers)), strict=True))
        if asked is None:
            fine = ("ok",) if self._pool.is_kept else ("ok", "unloaded", "loading", "unloading")
            is_well = all(state["status"] in fine for state in states.values())
        else:
            is_well = states[asked.name]["status"] == "ok"
        body = {"status": "ok" if is_well else "unavailable", "models": states}
        await passage.json(body, 200 if is_well else 503)

    async def _state(self, server: ModelServer) -> dict[str, Any]:
        if server.state != "ready":
            return {"status": server.state, **({"message": server.why} if server.why else {})}
        try:
            status, body = await server.upstream.ask(b"/health", [(b"host", b"localhost")], HEALTH_SECONDS)
        except UpstreamGone as error:
            return {"status": "unavailable", "message": f"its server does not answer: {error}"}
        if status == 200:
            return {"status": "ok"}
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"its server answered with {status}"
        return {"status": "unavailable", "message": message}

    async def _metrics(self, passage: "_Passage") -> None:
        servers = self._pool.servers.values()
        ready = [server for server in servers if server.state == "ready"]
        asked = (server.upstream.ask(b"/metrics", passage.forwarded()) for server in ready)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        texts = {
            server.name: answer[1].decode()
            for server, answer in zip(ready, answers, strict=True)
            if isinstance(answer, tuple) and answer[0] == 200
        }
        own = [
            "# HELP octavo:model_loaded Whether a model is loaded and takes requests.",
            "# TYPE octavo:model_loaded gauge",
            *(_sample("octavo:model_loaded", each.name, int(each.state == "ready")) for each in servers),
            "# HELP octavo:model_loads_total Loads of a model since the start.",
            "# TYPE octavo:model_loads_total counter",
            *(_sample("octavo:model_loads_total", each.name, each.num_loads) for each in servers),
            "# HELP octavo:model_open_responses Responses in progress.",
            "# TYPE octavo:model_open_responses gauge",
            *(_sample("octavo:model_open_responses", each.name, each.open) for each in servers),
            "# HELP octavo:model_load_seconds Seconds that the last load of a model took.",
            "# TYPE octavo:model_load_seconds gauge",
            *(_sample("octavo:model_load_seconds", each.name, round(each.load_seconds, 3)) for each in servers),
        ]
        text = merged(texts) + "\n".join(own) + "\n"
        await passage.respond(Response(text, media_type="text/plain; version=0.0.4; charset=utf-8"))

    # ── what is passed on ──

    async def _pass_on(self, passage: "_Passage") -> None:
        is_file = route_of(passage.scope) == "/v1/files"
        await passage.read(self._max_file if is_file else self._max_body, self)
        name = passage.query.get("model") or passage.named.model
        if name and (name in self._pool.servers or not self._config.lora.enable_lora):
            await self._pass_to(self._find(name), passage)
            return
        ready = [each for each in self._pool.servers.values() if each.state == "ready"]
        if not name and ((passage.scope["method"] == "POST" and passage.body) or not ready):
            await self._pass_to(self._pool.default, passage)
            return
        # An id that does not tell its model, or an adapter's name: the first server that knows it answers.
        for server in ready[:-1]:
            if await self._pass_to(server, passage, unless=404):
                return
        if not ready:
            raise NotFound(f"no loaded model has {quote(name)}")
        await self._pass_to(ready[-1], passage)

    async def _pass_to(self, server: ModelServer, passage: "_Passage", unless: int = 0) -> bool:
        """Have a server answer. → whether it has: a response with the status `unless` is dropped."""
        if server.state != "ready" and passage.named.stream is True and route_of(passage.scope) in STREAMS:
            await self._comment_while(server, passage)
        else:
            await passage.unless_left(self._pool.acquire(server))
        try:
            exchange = await self._exchange(server, passage)
            try:
                if exchange.status == unless:
                    return False
                await passage.unless_left(passage.relay(exchange))
                return True
            finally:
                exchange.close()
        finally:
            await self._pool.release(server)

    async def _exchange(self, server: ModelServer, passage: "_Passage") -> Exchange:
        try:
            exchange = await server.upstream.open()
            try:
                sent = exchange.send(passage.scope["method"], passage.target, passage.forwarded(), passage.body)
                await passage.unless_left(sent)
            except BaseException:
                exchange.close()
                raise
        except UpstreamGone as error:
            raise EngineUnavailable(
                f"the server of model {server.name!r} does not answer: {error}", RETRY_SECONDS
            ) from None
        return exchange

    async def _comment_while(self, server: ModelServer, passage: "_Passage") -> None:
        """Acquire a server that is not loaded, with comments in the client's stream of events meanwhile."""
        task = asyncio.ensure_future(self._pool.acquire(server))
        try:
            while not (await asyncio.wait({task}, timeout=COMMENT_SECONDS))[0]:
                await passage.comment(
                    f"model {server.name} is {server.state}, {time.monotonic() - passage.arrived:.0f} s"
                )
        except BaseException:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and task.exception() is None:
                await self._pool.release(server)
            raise
        try:
            task.result()
        except OctavoError as error:
            if not passage.has_begun:
                raise
            await passage.end_stream(error)
            raise ClientLeft from None

    def count_body(self, num_bytes: int, num_body_bytes: int) -> None:
        """Raises Overloaded if all bodies together are too large."""
        if num_body_bytes > SMALL_BODY and self._num_bodies_bytes + num_bytes > self._max_bodies:
            raise Overloaded(
                f"the bodies of requests in progress take {self._num_bodies_bytes} bytes, and this one would exceed the limit of "
                f"{self._max_bodies} (--max-bodies-bytes)",
                RETRY_SECONDS,
            )
        self._num_bodies_bytes += num_bytes


class _Passage:
    """One request on its way."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.arrived = time.monotonic()
        self.query = dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))
        self.body = b""
        self.named = _Named()
        self.num_counted = 0
        self.has_begun = False
        query = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")

    async def read(self, most: int, owner: Gateway) -> None:
        """Read the body, and the name of the model in it."""
        headers = Headers(scope=self.scope)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedEncoding(
                "bodies must not be compressed where several models are served: the model's name is read from them"
            )
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise TooLarge(f"the request body is over the limit of {most} bytes (--max-body-bytes)")
            owner.count_body(len(part), size)
            self.num_counted += len(part)
            parts.append(part)
            if not message.get("more_body"):
                break
        self.body = b"".join(parts)
        if self.body[:1] in b"{ \t\r\n" and self.body:
            # A server says what is wrong with a body that cannot be read.
            with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                self.named = _named.decode(self.body)

    def forwarded(self) -> list[tuple[bytes, bytes]]:
        """The headers for a model's server."""
        kept = [(name, value) for name, value in self.scope["headers"] if name not in _HOP_HEADERS]
        if self.body or self.scope["method"] in ("POST", "PUT", "PATCH"):
            kept.append((b"content-length", str(len(self.body)).encode()))
        return [*kept, (b"x-forwarded-proto", self.scope.get("scheme", "http").encode())]

    async def unless_left(self, work: Any) -> Any:
        """The result of `work`, which is cancelled if the client leaves first. The body must have been read."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            return task.result()
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def relay(self, exchange: Exchange) -> None:
        """Send a server's response to the client as it comes."""
        if self.has_begun:  # a stream that has waited for its model
            return await self._relay_stream(exchange)
        headers = [(name, value) for name, value in exchange.headers if _is_passed_back(name)]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        try:
            async for part in exchange.body():
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        except UpstreamGone as error:
            raise EngineUnavailable(f"the response was cut off: {error}") from None
        await self._send({"type": "http.response.body", "body": b""})
        return None

    async def _relay_stream(self, exchange: Exchange) -> None:
        parts = [part async for part in _at_most(exchange.body(), SMALL_BODY)] if exchange.status != 200 else []
        if exchange.status != 200:
            await self._send(_data(STREAMS[route_of(self.scope)] % b"".join(parts).strip()))
        else:
            async for part in exchange.body():
                await self._send(_data(part))
        await self._send({"type": "http.response.body", "body": b""})

    async def comment(self, words: str) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(_data(f": {words}\n\n".encode()))

    async def end_stream(self, error: OctavoError) -> None:
        """End a stream that has begun with an error."""
        _, body = describe(error, self.scope["octavo.request_id"])
        await self._send(_data(STREAMS[route_of(self.scope)] % msgspec.json.encode(body)))
        await self._send({"type": "http.response.body", "body": b""})

    async def json(self, body: Any, status: int = 200) -> None:
        await self.respond(Response(json.dumps(body), status, media_type="application/json"))

    async def respond(self, response: Response) -> None:
        self.has_begun = True
        await response(self.scope, self._receive, self._send)


def _is_passed_back(name: bytes) -> bool:
    """Whether a header of a server's response is for the client. Those of CORS are the gateway's own."""
    return (name not in _HOP_HEADERS or name == b"content-length") and not name.startswith(b"access-control-")


async def _at_most(parts: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in parts:
        size += len(part)
        if size <= most:
            yield part


def _data(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _sample(name: str, model: str, value: float) -> str:
    return f'{name}{{{LABEL}="{escaped(model)}"}} {value}'
