"""The door: request ids, API keys, body size, journeys' ends and the last resort against unforeseen errors.
Knows nothing of routes beyond which one is open to all.

Plain ASGI, because Starlette's function middleware puts two queues between a stream and its socket."""

import hashlib
import hmac
import logging
import os
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import TooLarge, Unauthorized
from octavo.observe.journeys import current
from octavo.server.errors_http import ClientGone, error_response
from octavo.server.inside import INSIDE, OWNER
from octavo.server.journeys import JourneySender
from octavo.server.service import Service

log = logging.getLogger("octavo.server")

OPEN_ROUTES = frozenset({"/health", "/health/live", "/health/ready", "/", "/play"})
OPEN_FOLDER = "/pages/"  # the files of these pages, which ask for the key themselves
MAX_REQUEST_ID_LEN = 200


class Door:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        server = service.config.server
        self._app = app
        self._service = service
        self._keys = [key.encode() for key in server.api_keys]
        self._prefix = server.root_path.rstrip("/")
        self._max_body_bytes = int(server.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._prefix:
            # The router then takes paths with the prefix, from proxies that keep it, and without, from those that cut it.
            scope["root_path"] = self._prefix
        passage = _Passage(self, self._service, scope, receive, send)
        token = current.set(passage.journey)
        self._service.enter()
        try:
            await passage.walk(self._app)
        finally:
            self._service.leave()
            current.reset(token)
            passage.end()

    def check_key(self, scope: Scope, headers: Headers) -> None:
        route = route_of(scope)
        is_open = route in OPEN_ROUTES or (route.startswith(OPEN_FOLDER) and scope["method"] == "GET")
        if not self._keys or INSIDE in scope or is_open:
            return
        # Bytes as they came: `headers` reads them as Latin-1, and a key outside ASCII would never be the one configured.
        given = [_secret(name, value) for name, value in headers.raw if name in (b"authorization", b"x-api-key")]
        if not any(given):
            raise Unauthorized("this server needs an API key: send the header 'Authorization: Bearer KEY'")
        # Every key is compared, in constant time, so that timing tells nothing of any of them.
        right = [key for secret in given for key in self._keys if hmac.compare_digest(secret, key)]
        if not right:
            raise Unauthorized("the API key is wrong")
        scope[OWNER] = hashlib.sha256(right[0]).digest()  # whose it is, for what outlives the request

    def check_length(self, scope: Scope, num_bytes: int) -> None:
        if num_bytes <= self._max_body_bytes or INSIDE in scope:
            return
        limit = self._service.body_limits.get(route_of(scope), self._max_body_bytes)
        if num_bytes > limit:
            raise TooLarge(f"the request body is over the limit of {limit} bytes")


class _Passage:
    """One request on its way through the door."""

    def __init__(self, door: Door, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        self._door = door
        self._journeys = service.journeys
        self._scope = scope
        self._receive = receive
        self._headers = Headers(scope=scope)
        self._num_body_bytes = 0
        self._status = 0
        self.request_id = _request_id(self._headers.get("x-request-id", ""))
        self.journey = service.journeys.begin(self.request_id, scope["method"], scope["path"], started)
        if "traceparent" in self._headers:
            names = ("traceparent", "tracestate")
            self.journey.trace_context = {name: self._headers[name] for name in names if name in self._headers}
        wants_journey = self._headers.get("x-octavo-journey", "") not in ("", "0")
        self._send = JourneySender(service.journeys, self.journey, send) if wants_journey else send
        scope["octavo.request_id"] = self.request_id
        scope["octavo.send_body"] = (
            send  # past the layers above, for streams whose head is out: none of them minds a body
        )

    async def walk(self, app: ASGIApp) -> None:
        try:
            self._door.check_key(self._scope, self._headers)
            length = self._headers.get("content-length", "")
            if length.isascii() and length.isdigit():
                self._door.check_length(self._scope, int(length))
            await app(self._scope, self.receive, self.send)
        except (ClientGone, ClientDisconnect):
            self._status = 499
        except Exception as error:
            # RequestErrors come from this file; the rest is a bug, and the log is where it belongs.
            if not isinstance(error, Unauthorized | TooLarge):
                log.exception("request %s failed: %s %s", self.request_id, self._scope["method"], self._scope["path"])
            if self._status:
                raise  # the head is out: only closing the connection can tell the client
            method, path = self._scope["method"], route_of(self._scope)
            await error_response(error, self.request_id, method, path)(self._scope, self.receive, self.send)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_body_bytes += len(message.get("body", b""))
            self._door.check_length(self._scope, self._num_body_bytes)
            if not message.get("more_body", False):
                self.journey.reach("receive")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = self.journey.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
        await self._send(message)
        if message["type"] == "http.response.body":
            if not self.journey.first_byte:
                self.journey.first_byte = time.monotonic()
            if not message.get("more_body", False):
                self.journey.ended = time.monotonic()

    def end(self) -> None:
        journey = self.journey
        if self._status == 499 or not journey.ended:
            journey.status = self._status or 500
            journey.ended = time.monotonic()
        route = self._scope.get("route")
        journey.handler = getattr(route, "path", "") or "none"
        self._journeys.end(journey)


def _request_id(given: str) -> str:
    """The client's own, where it is fit for a header and a log line; else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_LEN and given.isascii() and given.isprintable():
        return given
    return "req-" + os.urandom(12).hex()


def _secret(name: bytes, value: bytes) -> bytes:
    """The key in a header: OpenAI's clients send it as a bearer token, Anthropic's in x-api-key."""
    if name == b"x-api-key":
        return value.strip()
    scheme, _, bearer = value.partition(b" ")
    return bearer.strip() if scheme.lower() == b"bearer" else b""


def route_of(scope: Scope) -> str:
    """The path as the router sees it: without the prefix under which a proxy serves us."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path
