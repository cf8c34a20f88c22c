"""RequestMiddleware: request ids, hosts and origins, API keys, the size and time limits of a body, the end of journeys, unexpected errors.

Plain ASGI, because Starlette's function middleware puts two queues between a stream and its socket."""

import asyncio
import base64
import binascii
import hmac
import logging
import os
import time
from collections import deque
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo import fresh
from octavo.errors import EngineUnavailable, Forbidden, RequestError, Unauthorized
from octavo.observe.journeys.journey import current
from octavo.server.http.body import BodyLimits, BodyReader
from octavo.server.http.browsers import HostRule, OriginRule, machine_names
from octavo.server.http.errors import error_response
from octavo.server.state.disconnect import ClientGone, receiving
from octavo.server.state.journeys import JourneySender
from octavo.server.state.loopback import FRESH, INSIDE, OWNER
from octavo.server.state.owners import NO_OWNER
from octavo.server.state.service import Service

log = logging.getLogger("octavo.server")

OPEN_ROUTES = frozenset({"/health", "/health/live", "/health/ready", "/ping"})  # probes, which come without a key
METRICS = "/metrics"
PAGES = frozenset({"/", "/play", "/docs"})
PAGES_FOLDER = "/pages/"
MAX_REQUEST_ID_LEN = 200
MAX_LABEL_LEN = 256  # characters of a header that a request shares the engine by (--fairness header:NAME)
MAX_PATH_LEN = 1000  # characters of a path in journeys and logs


class Entrance:
    """Lets requests begin in order of arrival, few in each iteration of the event loop. A burst of hundreds would otherwise
    run in one iteration, and streams and /health would wait for all of it."""

    MAX_STARTS = 4
    """In one iteration. A request takes about a millisecond to parse and submit."""

    def __init__(self) -> None:
        self._num_started = 0  # in this iteration
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._num_started:
            loop.call_soon(self._next, loop)
        if self._num_started < self.MAX_STARTS and not self._waiting:
            self._num_started += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_started = 0
        while self._waiting and self._num_started < self.MAX_STARTS:
            place = self._waiting.popleft()
            if not place.done():  # else cancelled
                self._num_started += 1
                place.set_result(None)
        if self._num_started:
            loop.call_soon(self._next, loop)


class RequestMiddleware:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        server = service.config.server
        self._app = app
        self._service = service
        self._keys = [key.encode() for key in server.api_keys]
        # Keys for /metrics alone; with them it needs a key, even where nothing else does.
        self._metrics_keys = [key.encode() for key in server.metrics_keys]
        self._is_metrics_open = server.metrics_open
        self._hosts = HostRule(server, machine_names())
        self._origins = OriginRule(server)
        self._prefix = server.root_path.rstrip("/")
        budget = service.config.budget
        self.bodies = BodyLimits(int(budget.max_body_bytes), int(budget.max_bodies_bytes), service.body_limits)
        self._entrance = Entrance()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._prefix:
            # The router then accepts paths with the prefix (proxies that keep it) and without (those that strip it).
            scope["root_path"] = self._prefix
        passage = _Passage(self, self._service, scope, receive, send)
        token, receive_token = current.set(passage.journey), receiving.set(passage.receive)
        fresh_token = fresh.current.set(scope.get(FRESH))
        self._service.enter()
        try:
            if route_of(scope) not in OPEN_ROUTES and INSIDE not in scope:
                await self._entrance.enter()
            await passage.walk(self._app)
        finally:
            if passage.journey.making != "going on":
                self._service.release(passage.journey.requests)  # submitted and not read to the end
            self._service.leave()
            current.reset(token)
            receiving.reset(receive_token)
            fresh.current.reset(fresh_token)
            passage.end()

    def check_access(self, scope: Scope, headers: Headers) -> None:
        """Raise InvalidRequest or Forbidden for a request's Host or Origin, Unauthorized for its key."""
        if INSIDE in scope:
            return
        try:
            self._hosts.check(scope, headers)
            if route_of(scope) == METRICS and (self._metrics_keys or self._is_metrics_open):
                self._check_metrics(scope, headers)
            elif not self._keys:
                self._origins.check(scope, headers)
            elif route_of(scope) not in OPEN_ROUTES:
                self._check_key(scope, headers)
        except Forbidden as error:
            self._service.refused("forbidden", error.reason)
            raise

    def _check_metrics(self, scope: Scope, headers: Headers) -> None:
        """A browser's page of another origin gets no metrics, with --metrics-open either."""
        self._origins.check(scope, headers)
        if not self._is_metrics_open:
            self._check_key(scope, headers, self._metrics_keys)

    def _check_key(self, scope: Scope, headers: Headers, more_keys: Sequence[bytes] = ()) -> None:
        keys, passwords = secrets_of(headers)
        # Every key is compared, in constant time, so that timing reveals nothing about them.
        right, right_passwords = (
            [key for secret in given for key in (*self._keys, *more_keys) if hmac.compare_digest(secret, key)]
            for given in (keys, passwords)
        )
        if not right:
            if not right_passwords:
                raise unauthorized(scope, is_wrong=any(keys) or any(passwords))
            self._origins.check(scope, headers)  # browsers add a stored password to requests of other sites' pages, too
        scope[OWNER] = self._service.owners.of((right or right_passwords)[0])


class _Passage:
    """One request on its way through the middleware."""

    def __init__(self, door: RequestMiddleware, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        self._door = door
        self._service = service
        self._journeys = service.journeys
        self._scope = scope
        self._headers = Headers(scope=scope)
        self._status = 0
        self.request_id = request_id_of(self._headers.get("x-request-id", ""))
        self.journey = service.journeys.begin(self.request_id, scope["method"], scope["path"][:MAX_PATH_LEN], started)
        self._body = BodyReader(
            scope, route_of(scope), receive, door.bodies, service, lambda: self.journey.reach("receive")
        )
        self.receive = self._body.receive
        if "traceparent" in self._headers:
            names = ("traceparent", "tracestate")
            self.journey.trace_context = {name: self._headers[name] for name in names if name in self._headers}
        wants_journey = self._headers.get("x-octavo-journey", "") not in ("", "0")
        self._send = JourneySender(service.journeys, self.journey, send) if wants_journey else send
        scope["octavo.request_id"] = self.request_id
        scope["octavo.send_body"] = (
            send  # bypasses the layers above, for body chunks of streams: none of them changes these
        )

    async def walk(self, app: ASGIApp) -> None:
        try:
            self._door.check_access(self._scope, self._headers)
            self.journey.owner = self._scope.get(OWNER, NO_OWNER)
            if header := self._service.tenants.header:
                self.journey.header_value = self._headers.get(header, "")[:MAX_LABEL_LEN]
            self._body.expect(self._headers.get("content-length", ""), self._headers.get("content-encoding", ""))
            await app(self._scope, self.receive, self.send)
        except (ClientGone, ClientDisconnect):
            self._status = 499
        except Exception as error:
            # These come from the checks above and below; anything else is a bug and is logged.
            if not isinstance(error, RequestError | EngineUnavailable):
                log.exception("request %s failed: %s %s", self.request_id, self._scope["method"], self.journey.path)
            if self._status:
                raise  # the head is sent: only closing the connection can signal it
            method, path = self._scope["method"], route_of(self._scope)
            await error_response(error, self.request_id, method, path)(self._scope, self.receive, self.send)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = self.journey.status = message["status"]
            self._body.release()
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            if (tenants := self._service.tenants).accounts:
                message["headers"] += tenants.headers(self.journey.owner)
        await self._send(message)
        if message["type"] == "http.response.body":
            if not self.journey.first_byte:
                self.journey.first_byte = time.monotonic()
            if not message.get("more_body", False):
                self.journey.ended = time.monotonic()

    def end(self) -> None:
        self._body.release()
        journey = self.journey
        if self._status == 499 or not journey.ended:
            journey.status = self._status or 500
            journey.ended = time.monotonic()
        route = self._scope.get("route")
        journey.handler = getattr(route, "path", "") or "none"
        self._journeys.end(journey)


def request_id_of(given: str) -> str:
    """The client's own id where it is safe in a header and a log line; else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_LEN and given.isascii() and given.isprintable():
        return given
    return new_request_id()


def new_request_id() -> str:
    return "req-" + os.urandom(12).hex()


def secrets_of(headers: Headers) -> tuple[list[bytes], list[bytes]]:
    """The keys that a request carries, and the passwords, which browsers add by themselves: OpenAI's clients send a bearer token,
    Anthropic's x-api-key. Raw bytes: `headers` decodes Latin-1, with which a key outside ASCII would never match."""
    keys, passwords = [], []
    for name, value in headers.raw:
        scheme, _, rest = value.partition(b" ")
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization" and scheme.lower() == b"bearer":
            keys.append(rest.strip())
        elif name == b"authorization" and scheme.lower() == b"basic":
            passwords.append(_password(rest.strip()))
    return keys, passwords


def _password(credentials: bytes) -> bytes:
    """The password of a browser's base64 "name:password". Any name will do. Empty: there is none."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def unauthorized(scope: Scope, *, is_wrong: bool) -> Unauthorized:
    """For a page the challenge asks for a password, which browsers prompt for."""
    route = route_of(scope)
    is_page = scope["method"] == "GET" and (route in PAGES or route.startswith(PAGES_FOLDER))
    how = "give it as the password, with any user name" if is_page else "send the header 'Authorization: Bearer KEY'"
    error = Unauthorized("the API key is wrong" if is_wrong else f"this server needs an API key: {how}")
    if is_page:
        error.challenge = 'Basic realm="octavo"'
    return error


def route_of(scope: Scope) -> str:
    """The path as the router sees it: without the proxy's prefix."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path
