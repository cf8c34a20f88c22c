"""Service: what every endpoint shares: the engine, the text, the limits, and whether new work is accepted."""

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from octavo.client.client import EngineClient
from octavo.config import Config
from octavo.errors import EngineDead, EngineUnavailable, ModelNotFound, quote
from octavo.ipc.cores import usable_cores
from octavo.ipc.launch import Patience
from octavo.messages import Control, EngineReport, GenerateRequest, TokenDelta
from octavo.observe.journeys.journey import Journey, OpenJourney, current
from octavo.observe.logs import request_fields, request_line
from octavo.observe.metrics.http_metrics import UNCOUNTED
from octavo.server.state.adapters import AdapterRegistry
from octavo.server.state.compiler import Compiler
from octavo.server.state.disconnect import DRAIN_RETRY_AFTER
from octavo.server.state.hints import Hints
from octavo.server.state.journeys import Journeys
from octavo.server.state.live_feed import LiveFeed
from octavo.server.state.loopback import LoopbackResponse
from octavo.server.state.owners import owners_of
from octavo.server.state.peers import Peers
from octavo.server.state.resume import StreamLogs
from octavo.server.state.stream_records import StreamRecord, StreamRecords
from octavo.server.state.tenants import Tenants
from octavo.server.state.traces import Traces
from octavo.text import Text

log = logging.getLogger("octavo.server")

ANSWER_SECONDS = 10.0  # Prometheus' default scrape timeout
MAX_NAMED_ADAPTERS = 8  # in the error for an unknown model

Ask = Callable[..., Awaitable[LoopbackResponse]]
"""A loopback request: route, body, owner, more of its scope (loopback.py)."""


class Service:
    def __init__(
        self, engine: EngineClient, text: Text, config: Config, model_name: str, model_path: Path | None = None
    ) -> None:
        """`model_path`: of the model's files, where they are known."""
        self.engine = engine
        self.text = text
        self.config = config
        self.model_name = model_name
        self.model_path = model_path
        self.model_names = config.model.served_names or [model_name]  # under which it is served
        self.adapters = AdapterRegistry(config.lora, self.model_names)
        self.created = int(time.time())
        self.owners = owners_of(config)
        self.compiler = Compiler(text, config.budget)
        # As many as the supervisor starts: they share the engine's memory for journeys.
        num_processes = config.server.num_api_processes(usable_cores())
        kept = int(config.server.journey_bytes) // num_processes if engine.can_be_replaced else 0
        self.tenants = Tenants(config, self.owners)
        engine.count_usage(self.tenants.accounts)
        self.journeys = Journeys(engine, engine.origin, config.server.log_prompts, kept)
        self.journeys.spell = lambda token_ids: text.decode(token_ids, False)
        self.live = LiveFeed(engine)
        self.hints = Hints()
        endpoint = config.server.otlp_traces_endpoint
        self.traces = Traces(endpoint, model_name, version()) if endpoint else None
        if self.traces is not None:
            self.journeys.on_report.append(self.traces.export)
        if config.server.enable_log_requests:
            self.journeys.on_report.append(self._log)
        self.idle = asyncio.Event()  # set while no HTTP request is in progress
        self.idle.set()
        self.num_requests = 0  # HTTP requests so far
        self.draining = False  # no new work; what runs may finish
        self.stopping = False  # what still runs is being cancelled
        self.patience = Patience()
        self.last_heard = float("-inf")  # time.monotonic() of the engine's last sign of life
        server = config.server
        self.logs = StreamLogs(server.resume_seconds, int(server.resume_bytes), self.owners.may_see)
        self.peers = Peers()  # the other API processes
        self.records = StreamRecords()
        self.ask: Ask | None = None  # set by build_app
        self.openapi: Callable[[], dict[str, Any]] = dict  # set by build_app
        self.body_limits: dict[str, int] = {}  # route → bytes, where it takes more than --max-body-bytes
        # Background work: its own, and that of endpoints.
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self.tenants.keep,
            functools.partial(self.records.sweep, server.resume_seconds),
        ]
        self._was_ready = False
        self._num_in_flight = 0
        self._arriving: set[asyncio.Timeout] = set()  # limits of requests whose body is awaited
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def report(self) -> EngineReport:
        """The engine's limits. Raises EngineUnavailable while it starts, EngineDead once it has ended."""
        report = self.engine.report
        if report is None:
            raise EngineDead("the engine has ended") if self._was_ready else EngineUnavailable("the engine is starting")
        self._was_ready = True
        return report

    @functools.cached_property
    def max_text_len(self) -> int:
        """The most characters of text in one request."""
        return self.config.budget.text_len(self.report.max_model_len)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal fingerprints mean that equal requests with equal seeds give equal bytes. GET /version has its parts."""
        return self.report.system_fingerprint

    async def query(self, control: Control, seconds: float | None = None) -> str:
        """The engine's answer. Raises EngineUnavailable while it starts, and after this many seconds."""
        seconds = ANSWER_SECONDS if seconds is None else seconds
        _ = self.report  # raises while the engine starts
        try:
            async with asyncio.timeout(seconds):
                return await self.engine.control(control)
        except TimeoutError:
            raise EngineUnavailable(f"the engine has not answered for {seconds:.0f} s", 5) from None

    def accept(self) -> None:
        """Raise EngineUnavailable unless new work is accepted."""
        if self.draining:
            raise EngineUnavailable("the server is shutting down and accepts no new requests", DRAIN_RETRY_AFTER)
        _ = self.report

    async def check_model(self, name: str | None) -> None:
        """None and the empty string mean the one model that is served. An adapter's name means the model with this adapter: what the HTTP
        request submits from now on is computed with it."""
        if not name or name in self.model_names:
            return
        if (adapter := await self.adapters.find(name)) is not None:
            journey = current.get()
            assert journey is not None, "a model is asked for by an HTTP request"
            journey.adapter = adapter
            return
        names = " or ".join(map(repr, self.model_names))
        raise ModelNotFound(
            f"model {quote(name)} is not served here; use {names}{self._adapter_words()}", param="model"
        )

    def _adapter_words(self) -> str:
        """The adapters that a client may name as its model, after the names of the model itself: the first few of them."""
        adapters = self.adapters.names() if self.adapters.is_enabled else []
        if not adapters:
            return ""
        shown = ", ".join(quote(each) for each in adapters[:MAX_NAMED_ADAPTERS])
        more = len(adapters) - MAX_NAMED_ADAPTERS
        kind = "the adapter" if len(adapters) == 1 else "one of the adapters"
        return f", or {kind} {shown}" + (f" and {more} more (/v1/models)" if more > 0 else "")

    @property
    def answering_name(self) -> str:
        """The name of what answers the HTTP request: the model, or the adapter that the request asks for."""
        journey = current.get()
        return self.model_name if journey is None or journey.adapter is None else journey.adapter.name

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Give requests to the engine, in order: all of them, or none where one is refused. Their deltas are to be read; those
        that are not are released when the HTTP request is over. Raises RateLimited or BudgetSpent for a key at one of its limits."""
        journey = current.get()
        if journey is not None:
            if self.tenants.accounts and not self._were_admitted(requests):
                self.tenants.admit(journey.owner, requests)
            if self.config.server.prefix_sharing == "key" and journey.owner:
                requests = [self._salted(each, journey.owner) for each in requests]
            if self.config.scheduler.fairness != "none":
                tenant, weight = self.tenants.number_of(journey.owner, journey)
                requests = [msgspec.structs.replace(each, tenant=tenant, weight=weight) for each in requests]
        try:
            for request in requests:
                record = self.records.by_request.get(request.id)
                left = request if record is None else record.begun(request)
                if left is not None:  # else it had been computed to its end when its process ended
                    self.journeys.submit(left)
                    if record is not None and journey is not None:
                        self._resume_charges(left, record, journey.owner)
        except BaseException:
            self.release([request.id for request in requests])
            raise

    def _resume_charges(self, request: GenerateRequest, record: StreamRecord, owner: bytes) -> None:
        account = self.tenants.of(owner).account
        if account is not None:
            known = record.num_known(len(request.prompt_ids))
            self.engine.resume_charges(request.id, record.num_charged(account), known, record.note_charge)

    def _were_admitted(self, requests: Sequence[GenerateRequest]) -> bool:
        """Whether this goes on with a stream whose process has ended."""
        records = self.records.by_request
        return bool(records) and any(each.id in records and records[each.id].was_admitted for each in requests)

    def deltas(self, request_id: str) -> AsyncGenerator[list[TokenDelta], None]:
        """As EngineClient.deltas, for requests that were given to submit(); those of a stream with a record are written down."""
        record = self.records.by_request.get(request_id)
        return self.engine.deltas(request_id) if record is None else self._recorded(request_id, record)

    async def _recorded(self, request_id: str, record: StreamRecord) -> AsyncGenerator[list[TokenDelta], None]:
        for deltas in record.lists:
            yield deltas
        record.is_made_again = True
        if not self.engine.has(request_id):  # it had been computed to its end
            return
        async with aclosing(self.engine.deltas(request_id)) as steps:
            async for deltas in steps:
                record.write(deltas)
                yield deltas

    def _salted(self, request: GenerateRequest, owner: bytes) -> GenerateRequest:
        params = msgspec.structs.replace(
            request.params, prefix_salt=self.prefix_salt(owner, request.params.prefix_salt)
        )
        return msgspec.structs.replace(request, params=params)

    def prefix_salt(self, owner: bytes, salt: str = "") -> str:
        """SamplingParams.prefix_salt of this owner's requests. `salt`: what the request itself brings."""
        if self.config.server.prefix_sharing != "key" or not owner:
            return salt
        return hashlib.blake2b(owner + salt.encode(), digest_size=16, person=b"octavo key salt").hexdigest()

    def release(self, request_ids: Iterable[str]) -> None:
        """Abort those that have not ended, and forget them all."""
        for request_id in request_ids:
            self.engine.release(request_id)

    def enter(self) -> None:
        self._num_in_flight += 1
        self.num_requests += 1
        self.idle.clear()

    def leave(self) -> None:
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self.idle.set()

    @contextlib.contextmanager
    def arriving(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Have the time limit of a body shortened when the server begins to drain: nothing is computed for it yet."""
        self._arriving.add(limit)
        try:
            yield
        finally:
            self._arriving.discard(limit)

    def drain(self) -> None:
        """Take no new work. What runs may finish; bodies that are on their way get Patience.farewell for their next bytes."""
        self.draining = True
        soon = asyncio.get_running_loop().time() + self.patience.farewell
        for limit in self._arriving:
            if (until := limit.when()) is None or until > soon:
                limit.reschedule(soon)

    def refused(self, kind: str, reason: str) -> None:
        """Count a request that was refused before its key or its content was looked at (REFUSALS in ipc/heartbeat.py)."""
        if self.engine.heartbeat is not None:
            self.engine.heartbeat.count_refusal(self.engine.origin, kind, reason)

    def heard(self) -> None:
        self.last_heard = time.monotonic()

    def track(self, task: asyncio.Task[Any]) -> None:
        """Remember a task that computes a response, so that `stop` can end it."""
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _log(self, journey: Journey, opened: OpenJourney) -> None:
        if opened.handler in UNCOUNTED and journey.status < 400:
            return
        line, fields = request_line(journey, opened), request_fields(journey, opened)
        if opened.prompts:
            longest = self.config.server.max_log_len
            prompts = [self.text.decode(ids, skip_special_tokens=False)[:longest] for ids in opened.prompts]
            line += f"; prompts {prompts!r}"
            fields["prompts"] = prompts
        log.info("%s", line, extra={"fields": fields})

    async def run_background(self) -> None:
        """Run until cancelled. A failure is logged, and does not affect requests."""
        async with asyncio.TaskGroup() as group:
            for work in self.background:
                group.create_task(_log_failure(work()))

    def stop(self) -> None:
        """End every running response now, each with an error that says why."""
        self.draining = self.stopping = True
        for task in list(self._work):
            task.cancel()
        self.compiler.close()
        self.adapters.close()


async def _log_failure(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("background work failed")


@functools.cache
def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"
