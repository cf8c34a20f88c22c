"""The ASGI application in front of several models: passes each request on to the server of the model that it names, and answers what is
about all of them: /v1/models, /health, /metrics, /v1/requests, /sleep, /wake_up and /is_sleeping; and, without any model, what keys share
(shared.py)."""

import asyncio
import functools
import hmac
import json
import logging
import operator
import re
import time
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.config import Config
from octavo.errors import (
    BudgetSpent,
    EngineUnavailable,
    Forbidden,
    ModelNotFound,
    NotFound,
    OctavoError,
    Overloaded,
    Unsupported,
    quote,
)
from octavo.observe.journeys.journey import Journey
from octavo.server.endpoints import llama_cpp, messages, ollama_chat  # noqa: F401 (the shapes of their errors)
from octavo.server.endpoints.journeys import read_query
from octavo.server.gateway.fresh import Fresh
from octavo.server.gateway.metrics import LABEL, escaped, merged
from octavo.server.gateway.model_server import ModelServer
from octavo.server.gateway.passage import STREAMS, ClientLeft, Passage
from octavo.server.gateway.pool import Pool
from octavo.server.gateway.shared import Shared
from octavo.server.gateway.upstream import Exchange, UpstreamGone
from octavo.server.gateway.waits import Wait, Waits
from octavo.server.http.body import BodyLimits
from octavo.server.http.browsers import HostRule, OriginRule, machine_names
from octavo.server.http.errors import error_response
from octavo.server.http.middleware import METRICS, OPEN_ROUTES, Entrance, secrets_of, unauthorized
from octavo.server.state.loopback import OWNER

log = logging.getLogger("octavo.gateway")

COMMENT_SECONDS = 2.0  # between two comments in a stream that waits for its model
HEALTH_SECONDS = 10.0  # that a model's server has to say how it is
MAX_WAITING_OF_KEY = 256  # requests of one key that wait for models to be loaded
RETRY_SECONDS = 2
HEALTH_FRESH_SECONDS = 0.2  # that a server's word counts for others that ask
HEALTH_STALE_SECONDS = 3.0  # that it counts while the server is asked again
METRICS_FRESH_SECONDS = 0.5
MAX_FAN_OUT = 4  # requests at a time that all servers are asked about
_BY_ID = re.compile(r"/v1/(responses|stream|requests)/[^/]+(/(input_items|cancel))?")
"""Routes of things that one of the servers has, whichever."""
_NO_IDS = frozenset({"/v1/responses/compact", "/v1/responses/input_tokens"})
_LISTS = frozenset({"/api/tags", "/api/ps"})


class Gateway:
    def __init__(self, config: Config, pool: Pool, shared: Shared) -> None:
        server, budget = config.server, config.budget
        self._config, self._pool, self._shared = config, pool, shared
        self._keys = [key.encode() for key in server.api_keys]
        self._admin_keys = [key.encode() for key in server.admin_keys]
        self._metrics_keys = [key.encode() for key in server.metrics_keys]
        self._is_metrics_open = server.metrics_open
        self._hosts, self._origins = HostRule(server, machine_names()), OriginRule(server)
        self._prefix = server.root_path.rstrip("/")
        self._bodies = BodyLimits(int(budget.max_body_bytes), int(budget.max_bodies_bytes), shared.body_limits)
        self._entrance = Entrance()
        self._waits = Waits()
        self._fan_out = asyncio.Semaphore(MAX_FAN_OUT)
        self._healths = {
            name: Fresh(functools.partial(self._ask_health, server), HEALTH_FRESH_SECONDS, HEALTH_STALE_SECONDS)
            for name, server in pool.servers.items()
        }
        self._metrics_text = Fresh(self._merge_metrics, METRICS_FRESH_SECONDS)
        self._metrics_headers: list[tuple[bytes, bytes]] = []  # of the last request with the right key
        self.num_open = 0
        self.idle = asyncio.Event()  # set while no request is in progress
        self.idle.set()
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._prefix:
            scope["root_path"] = self._prefix
        passage = Passage(scope, receive, send, self._bodies, self._shared)
        self.num_open += 1
        self.idle.clear()
        try:
            if passage.route not in OPEN_ROUTES:
                await self._entrance.enter()
            await self._answer(passage)
        except ClientLeft:
            pass
        except Exception as error:
            if not isinstance(error, OctavoError):
                log.exception("request %s failed: %s %s", passage.id, scope["method"], scope["path"][:1000])
            if passage.has_begun:
                raise  # only closing the connection can signal it
            await passage.respond(error_response(error, passage.id, scope["method"], passage.route))
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()
            passage.body_reader.release()

    async def _answer(self, passage: Passage) -> None:
        method, route = passage.method, passage.route
        match method, route:
            case ("GET" | "HEAD", "/health/live"):
                return await passage.json({"status": "ok"})
            case ("GET" | "HEAD" | "POST", "/health" | "/health/ready" | "/ping"):
                return await self._health(passage)
        # A model's server checks it, too, but a stranger must not have a model loaded.
        self._check_access(passage, is_admin=method == "POST" and route in ("/sleep", "/wake_up"))
        passage.expect_body()
        match method, route:
            case "GET", "/metrics":
                return await self._metrics(passage)
            case "GET", "/v1/models":
                cards = await asyncio.gather(*(self._cards(each, passage) for each in self._pool.servers.values()))
                return await passage.json({"object": "list", "data": [card for own in cards for card in own]})
            case "GET", "/v1/requests" if "model" not in passage.query:
                return await self._journey_list(passage)
            case "GET", "/is_sleeping":
                asked = self._asked(passage)
                servers = self._pool.servers.values() if asked is None else [asked]
                return await passage.json({"is_sleeping": all(each.is_sleeping for each in servers)})
            case "POST", "/sleep" | "/wake_up":
                return await self._sleep_or_wake(passage)
        if self._shared.has_route(route):
            return await self._shared.app(passage.scope, passage.body_reader.receive, passage.send_own)
        if method == "GET" and route.startswith("/v1/models/"):
            name = route.removeprefix("/v1/models/")
            if (found := self._pool.servers.get(name)) is not None:
                return await passage.json((await self._cards(found, passage))[0])
        return await self._pass_on(passage)

    # ── access ──

    def _check_access(self, passage: Passage, *, is_admin: bool = False) -> None:
        """As RequestMiddleware checks it; the servers of models check what is passed on to them by themselves."""
        scope, headers = passage.scope, passage.headers
        self._hosts.check(scope, headers)
        if passage.route == METRICS and self._is_metrics_open:
            return self._origins.check(scope, headers)
        more = self._metrics_keys if passage.route == METRICS else []
        if not self._keys and not more:
            return self._origins.check(scope, headers)
        keys, passwords = secrets_of(headers)
        right, right_passwords = (
            [key for secret in given for key in (*self._keys, *more) if hmac.compare_digest(secret, key)]
            for given in (keys, passwords)
        )
        if not right:
            if not right_passwords:
                raise unauthorized(scope, is_wrong=any(keys) or any(passwords))
            self._origins.check(scope, headers)
        key = (right or right_passwords)[0]
        passage.owner = scope[OWNER] = self._shared.owners.of(key)
        passage.limit_headers = self._shared.tenants.headers(passage.owner)
        if is_admin and not any(hmac.compare_digest(key, each) for each in self._admin_keys):
            raise Forbidden("only an admin key may load and unload models (--admin-key)", "key")
        return None

    # ── what is about all models ──

    def _asked(self, passage: Passage) -> ModelServer | None:
        """The model of the query or the body. None: none is named."""
        return self._find(passage.model) if passage.model else None

    def _find(self, name: str) -> ModelServer:
        server = self._pool.servers.get(name) or self._pool.servers.get(
            name.removesuffix(":latest")
        )  # Ollama's clients add it
        if server is None:
            names = ", ".join(map(repr, self._pool.servers))
            raise ModelNotFound(f"model {quote(name)} is not served here; use one of {names}", param="model")
        return server

    async def _cards(self, server: ModelServer, passage: Passage) -> list[dict[str, Any]]:
        """A model's entries in /v1/models: its server's own, with its adapters, or a short one while it is not loaded."""
        if server.state == "ready":
            try:
                status, body = await server.upstream.ask(b"/v1/models", passage.forwarded())
                if status == 200:
                    return [{**card, "status": "ready"} for card in json.loads(body)["data"]]
            except (UpstreamGone, ValueError):
                pass
        card = {"id": server.name, "object": "model", "created": self._created, "owned_by": "octavo"}
        progress = {"loading_seconds": round(time.monotonic() - server.started, 1)} if server.state == "loading" else {}
        waiting = {"waiting": server.num_waiting} if server.num_waiting else {}
        return [{**card, "root": server.config.model.model, "status": server.state, **progress, **waiting}]

    async def _health(self, passage: Passage) -> None:
        """200 if every model that is to be loaded could produce a token now, and none has failed. With ?model=NAME: if that one could."""
        asked = self._asked(passage)
        servers = [*self._pool.servers.values()] if asked is None else [asked]
        states = dict(zip((s.name for s in servers), await asyncio.gather(*map(self._state, servers)), strict=True))
        if asked is None:
            fine = ("ok",) if self._pool.is_kept else ("ok", "unloaded", "loading", "unloading", "asleep")
            is_well = all(state["status"] in fine for state in states.values())
        else:
            is_well = states[asked.name]["status"] == "ok"
        body = {"status": "ok" if is_well else "unavailable", "models": states}
        await passage.json(body, 200 if is_well else 503)

    async def _state(self, server: ModelServer) -> dict[str, Any]:
        if server.state != "ready":
            return {"status": server.state, **({"message": server.why} if server.why else {})}
        return await self._healths[server.name].get()

    async def _ask_health(self, server: ModelServer) -> dict[str, Any]:
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

    async def _metrics(self, passage: Passage) -> None:
        self._metrics_headers = passage.forwarded()
        text = await self._metrics_text.get()
        await passage.respond(Response(text, media_type="text/plain; version=0.0.4; charset=utf-8"))

    async def _merge_metrics(self) -> str:
        servers = self._pool.servers.values()
        ready = [server for server in servers if server.state == "ready"]
        asked = (server.upstream.ask(b"/metrics", self._metrics_headers) for server in ready)
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
        return merged(texts) + "\n".join(own) + "\n" + self._shared.tenants.metrics()

    async def _sleep_or_wake(self, passage: Passage) -> None:
        await passage.read()
        asked = self._asked(passage)
        level = passage.query.get("level", "1")
        if passage.route == "/sleep" and level not in ("1", "2"):
            raise Unsupported(
                f"level must be 1 or 2, got {level[:20]!r}: a model that sleeps keeps its weights in host memory with 1, and drops them with 2",
                param="level",
            )
        if passage.route == "/wake_up" and "tags" in passage.query:
            raise Unsupported("tags: weights and KV pages wake up together; leave it out", param="tags")
        for server in self._pool.servers.values() if asked is None else [asked]:
            work = self._pool.sleep(server, int(level)) if passage.route == "/sleep" else self._pool.wake(server)
            await passage.unless_left(work)
        await passage.json({name: each.state for name, each in self._pool.servers.items()})

    async def _journey_list(self, passage: Passage) -> None:
        """The requests of all models: those that wait for one, and those of each loaded server."""
        state, limit = read_query(passage.query)
        viewer = self._shared.owners.viewer(passage.owner)
        ready = [each for each in self._pool.servers.values() if each.state == "ready"]
        waiting = self._waiting(passage) if state in ("", "waiting") else []
        found = [(journey.received_at, msgspec.json.encode(journey)) for journey in waiting]
        async with self._fan_out:
            for server in ready:  # one after the other: each has up to a thousand, with all their stages
                try:
                    status, body = await server.upstream.ask(passage.target, passage.forwarded())
                except UpstreamGone:
                    continue
                if status == 200:
                    found += self._waits.joined(body, viewer, server.name)
                    await asyncio.sleep(0)  # others have their turn
        found.sort(key=operator.itemgetter(0), reverse=True)
        body = b'{"data":[' + b",".join(journey for _, journey in found[:limit]) + b'],"object":"list"}'
        await passage.respond(Response(body, media_type="application/json"))

    def _waiting(self, passage: Passage, request_id: str = "") -> list[Journey]:
        states = {name: each.state for name, each in self._pool.servers.items()}
        viewer = self._shared.owners.viewer(passage.owner)
        return self._waits.journeys(viewer, time.time(), states, request_id)

    # ── what is passed on ──

    async def _pass_on(self, passage: Passage) -> None:
        await passage.read()
        name, servers = passage.model, self._pool.servers
        ready = [each for each in servers.values() if each.state == "ready"]
        is_by_id = passage.route not in _NO_IDS and _BY_ID.fullmatch(passage.route) is not None
        if name and not is_by_id and (name in servers or not self._config.lora.enable_lora):
            await self._pass_to(self._find(name), passage)
        elif is_by_id or (name and ready) or (passage.named.previous_response_id is not None and not name):
            await self._pass_by_id(passage, ready if "model" not in passage.query else [self._find(name)])
        elif passage.route in _LISTS and passage.method == "GET" and ready:
            await self._merge_lists(passage, ready)
        elif name:
            raise NotFound(f"no loaded model has {quote(name)}")
        elif passage.method == "POST" and passage.body:
            await self._pass_to(self._pool.default, passage)
        else:
            await self._pass_to(ready[0] if ready else self._pool.default, passage)

    async def _pass_by_id(self, passage: Passage, servers: list[ModelServer]) -> None:
        """An id that does not tell its model, or an adapter's name: the first server that knows it answers."""
        if passage.route.startswith("/v1/requests/"):
            return await self._journey(passage, servers)
        if not servers:
            raise NotFound("no model is loaded, and what is not stored in files was unloaded with its model")
        for server in servers[:-1]:
            if await self._pass_to(server, passage, unless=404):
                return None
        await self._pass_to(servers[-1], passage)
        return None

    async def _journey(self, passage: Passage, servers: list[ModelServer]) -> None:
        """A request's journey, with the time that it waited for its model."""
        request_id = passage.route.removeprefix("/v1/requests/")
        if waiting := self._waiting(passage, request_id):
            return await passage.respond(Response(msgspec.json.encode(waiting[0]), media_type="application/json"))
        viewer = self._shared.owners.viewer(passage.owner)
        status, body = 0, b""
        for server in servers:
            if server.state == "ready":
                try:
                    status, body = await server.upstream.ask(passage.target, passage.forwarded())
                except UpstreamGone:
                    continue
                if status == 200:
                    body = self._waits.join(body, viewer, server.name)
                    return await passage.respond(Response(body, media_type="application/json"))
        if not status:
            raise NotFound(f"no request {request_id[:200]!r} waits for a model, and no model is loaded")
        return await passage.respond(Response(body, status, media_type="application/json"))

    async def _merge_lists(self, passage: Passage, servers: list[ModelServer]) -> None:
        """Ollama's lists of models: each name once."""
        asked = (each.upstream.ask(passage.target, passage.forwarded()) for each in servers)
        found: dict[str, Any] = {}
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, tuple) and answer[0] == 200:
                for card in json.loads(answer[1])["models"]:
                    found.setdefault(card["name"], card)
        await passage.json({"models": [*found.values()]})

    async def _pass_to(self, server: ModelServer, passage: Passage, unless: int = 0) -> bool:
        """Have a server answer. → whether it has: a response with the status `unless` is dropped."""
        await self._acquire(server, passage)
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

    async def _acquire(self, server: ModelServer, passage: Passage) -> None:
        """Have a server for this request, which waits until it is loaded. Raises Overloaded, BudgetSpent or EngineUnavailable."""
        if server.state == "ready":
            return await self._pool.acquire(server)
        self._check_spent(passage)
        if self._waits.num_of(passage.owner) >= MAX_WAITING_OF_KEY:
            whose = "of this API key " if self._keys else ""
            raise Overloaded(
                f"{MAX_WAITING_OF_KEY} requests {whose}wait for models to be loaded already", RETRY_SECONDS
            )
        wait = Wait(passage.id, passage.owner, passage.route, passage.arrived_at, server.name)
        with self._waits.waiting(wait):
            if passage.named.stream is True and passage.route in STREAMS:
                await self._comment_while(server, passage)
            else:
                await passage.unless_left(self._pool.acquire(server))
            wait.seconds = time.monotonic() - passage.arrived
        return None

    def _check_spent(self, passage: Passage) -> None:
        """A key that has nothing left of its budget must not have a model loaded. Raises BudgetSpent."""
        account = self._shared.tenants.of(passage.owner).account
        if account is not None and account.is_spent():
            seconds = account.seconds_of_day()
            raise BudgetSpent(
                f"this API key has used its {account.settings.budget_tokens} tokens of today: the next day (UTC) begins in "
                f"{seconds} s",
                seconds,
            )

    async def _exchange(self, server: ModelServer, passage: Passage) -> Exchange:
        try:
            exchange = await server.upstream.open()
            try:
                sent = exchange.send(passage.method, passage.target, passage.forwarded(), passage.body)
                await passage.unless_left(sent)
            except BaseException:
                exchange.close()
                raise
        except UpstreamGone as error:
            raise EngineUnavailable(
                f"the server of model {server.name!r} does not answer: {error}", RETRY_SECONDS
            ) from None
        return exchange

    async def _comment_while(self, server: ModelServer, passage: Passage) -> None:
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


def _sample(name: str, model: str, value: float) -> str:
    return f'{name}{{{LABEL}="{escaped(model)}"}} {value}'
