"""Compiler: compiles the grammars and chat templates that clients send, in confined processes (octavo/sandbox).

Verdicts are kept: a grammar that was compiled before costs no process. Equal requests at the same time share one job."""

import asyncio
import hashlib
import logging
import marshal
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from octavo.config import BudgetConfig
from octavo.errors import Field, InvalidRequest, OctavoError, Overloaded, RequestError, RequestFailed, Unsupported
from octavo.observe.journeys.journey import current
from octavo.sandbox import compile_jobs
from octavo.sandbox.compile_jobs import CompileSetup
from octavo.sandbox.errors_as_data import error_data, error_of_data
from octavo.sandbox.pool import JobEnded, JobFailed, SandboxPool
from octavo.server.state.disconnect import while_connected
from octavo.server.state.owners import NO_OWNER
from octavo.text import Text
from octavo.text.chat.template import DescribedTemplate, check_length
from octavo.text.grammar.build import BuiltGrammar, check_size, check_wish, require_llguidance
from octavo.text.grammar.limits import CHECK_STACK_BYTES
from octavo.text.text import RenderCall

log = logging.getLogger("octavo.server")

T = TypeVar("T")

KEPT_GRAMMARS, KEPT_TEMPLATES = 16 * 2**20, 8 * 2**20  # bytes of verdicts that are kept
ENTRY_BYTES = 500  # of an entry beside its value
TEMPLATE = Field("chat_template")
_CAUSES = {
    "time": "takes more than {seconds:g} s to {verb}, which is the limit (--grammar-seconds)",
    "memory": "takes more than {memory} MB of memory to {verb}, which is the limit (--grammar-memory)",
    "crash": "cannot be compiled: it is nested too deeply, or its parts refer to each other in too long a chain",
}


class Compiler:
    def __init__(self, text: Text, budget: BudgetConfig) -> None:
        """Nothing is started before the first job."""
        self._text, self._budget = text, budget
        self._pool: SandboxPool | None = None
        self._grammars = _Verdicts[BuiltGrammar](KEPT_GRAMMARS, _grammar_bytes)
        self._templates = _Verdicts[DescribedTemplate](KEPT_TEMPLATES, lambda kept: len(kept.code) + len(kept.text))

    @property
    def pool(self) -> SandboxPool:
        if self._pool is None:
            budget = self._budget
            self._pool = SandboxPool(
                compile_jobs.MODULE,
                msgspec.msgpack.encode(_setup(self._text)),
                num_processes=budget.grammar_processes,
                seconds=budget.grammar_seconds,
                memory_bytes=int(budget.grammar_memory_bytes),
                stack_bytes=CHECK_STACK_BYTES,
                max_waiting=budget.max_waiting_grammars,
            )
        return self._pool

    @property
    def is_started(self) -> bool:
        return self._pool is not None and self._pool.server_process is not None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    # ── grammars ──

    async def wish(self, wish: Mapping[str, Any], field: Field, where: Field | None) -> BuiltGrammar:
        """The grammar of vLLM's structured_outputs; text/grammar/build.py has the arguments."""
        max_bytes = self._check_vocabulary(field)

        def encode() -> tuple[bytes, Field]:
            _, place = check_wish(wish, field=field, where=where, max_bytes=max_bytes)
            return _encoded(place, "wish", list(field.path), list(place.path), max_bytes, dict(wish)), place

        return await self._grammar(encode)

    async def schema(
        self,
        schema: object,
        field: Field,
        frame: tuple[str, str] | None = None,
        can_repeat: bool = False,
        may_leave_out: bool = False,
    ) -> BuiltGrammar:
        """The grammar of JSON of a schema, if need be in a frame. `may_leave_out`: not all of the schema need be enforced."""
        max_bytes = self._check_vocabulary(field)

        def encode() -> tuple[bytes, Field]:
            require_llguidance(field)
            check_size(schema, field, max_bytes)
            if frame is None:
                return _encoded(field, "schema", list(field.path), max_bytes, may_leave_out, schema), field
            arguments = (list(field.path), max_bytes, may_leave_out, frame, can_repeat, schema)
            return _encoded(field, "framed", *arguments), field

        return await self._grammar(encode)

    async def is_valid(self, pairs: list[tuple[object, str]]) -> bool | None:
        """Whether each text satisfies the schema beside it. None: that takes more than a job may take."""
        field = Field("structured_outputs", "unenforced")

        async def validate() -> tuple[bool, str]:
            payload = await self.pool.in_thread(_encoded, field, "validate", pairs)
            return bool(await self.pool.run(payload, _owner())), "done"

        try:
            return await self._run(field, "check an answer", validate())
        except (RequestError, RequestFailed):
            log.warning("an answer could not be checked against its schema", exc_info=True)
            return None

    async def _grammar(self, encode: Callable[[], tuple[bytes, Field]]) -> BuiltGrammar:
        """`encode`: makes the job, and the field that it is about."""

        async def build() -> BuiltGrammar:
            return msgspec.convert(await self.pool.run(payload, _owner()), BuiltGrammar)

        started = time.monotonic()
        try:
            payload, field = await self.pool.in_thread(encode)
            key = hashlib.blake2b(payload, digest_size=16).digest()
            verdict = self._grammars.get(key, build)
            return await self._run(field, "compile", verdict)
        finally:
            if (journey := current.get()) is not None:
                journey.grammar_seconds += time.monotonic() - started

    def _check_vocabulary(self, field: Field) -> int:
        """Raise Unsupported for a model without grammars. Returns the most bytes of a grammar."""
        try:
            _ = self._text.vocabulary
        except Unsupported as error:
            raise Unsupported(error.message, param=field) from error
        return int(self._budget.max_schema_bytes)

    # ── templates ──

    async def template(self, source: str) -> DescribedTemplate:
        """Compile a request's own template."""
        check_length(source)
        # Keyed by the owner, too: the compiled code is executed only for the key that sent the template.
        key = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16, key=_owner()).digest()
        payload = _encoded(TEMPLATE, "template", source)

        async def compile() -> DescribedTemplate:
            names, takes_system, code = await self.pool.run(payload, _owner())
            return DescribedTemplate(source, frozenset(names), takes_system, code)

        return await self._run(TEMPLATE, "compile", self._templates.get(key, compile))

    async def render(self, template: DescribedTemplate, call: RenderCall) -> str:
        def encode() -> bytes:
            arguments = (call.messages, call.add_generation_prompt, call.tools, call.variables)
            return _encoded(Field("messages"), "render", template.code, *arguments)

        async def render() -> tuple[bytes, str]:
            return await self.pool.run(await self.pool.in_thread(encode), _owner()), "done"

        return (await self._run(TEMPLATE, "render", render())).decode("utf-8", "surrogatepass")

    # ── jobs ──

    async def _run(self, field: Field, verb: str, job: Coroutine[Any, Any, tuple[T, str]]) -> T:
        """Await a job for the current request, unless its client leaves, and count how the job ended."""
        outcome = "abandoned"
        try:
            result, outcome = await while_connected(job)
            return result
        except JobEnded as ended:
            outcome = ended.cause
            limits = {
                "seconds": self._budget.grammar_seconds,
                "memory": int(self._budget.grammar_memory_bytes) // 2**20,
            }
            raise InvalidRequest(field + " " + _CAUSES[ended.cause].format(verb=verb, **limits)) from None
        except JobFailed as failed:
            outcome = "failed"
            log.error("a job to %s %s failed:\n%s", verb, field, failed)
            raise RequestFailed(f"{field} could not be compiled because of a mistake of this server") from None
        except Overloaded:
            outcome = "overloaded"
            raise
        except OctavoError as error:
            outcome = "refused" if isinstance(error, RequestError) else "unavailable"
            raise
        finally:
            if (journey := current.get()) is not None:
                journey.jobs[outcome] = journey.jobs.get(outcome, 0) + 1


def _grammar_bytes(built: BuiltGrammar) -> int:
    notes = sum(50 * len(path) + sum(len(str(step)) for step in path) for path in built.ignored)
    return len(built.grammar) + notes + sum(map(len, built.unenforced))


def _owner() -> bytes:
    """The owner of the current HTTP request."""
    journey = current.get()
    return NO_OWNER if journey is None else journey.owner


def _setup(text: Text) -> CompileSetup:
    variables = text.template_variables
    try:
        vocabulary = text.vocabulary
    except Unsupported:
        return CompileSetup(0, {}, (), variables)
    special = {token_id: vocabulary.spell(token_id) for token_id in vocabulary.special_ids}
    return CompileSetup(vocabulary.size, special, vocabulary.eos_ids, variables)


def _encoded(field: Field, name: str, *arguments: object) -> bytes:
    try:
        return marshal.dumps((name, arguments))  # type: ignore[arg-type]  # plain data of JSON
    except ValueError as error:
        raise InvalidRequest(field + f" cannot be compiled: {error}") from None


class _Verdicts(Generic[T]):
    """Results and refusals of jobs by their key, within a number of bytes. Equal jobs at the same time are one."""

    def __init__(self, max_bytes: int, size: Callable[[T], int]) -> None:
        self._max_bytes, self._size, self._num_bytes = max_bytes, size, 0
        self._kept: OrderedDict[bytes, tuple[T | _Refusal, int]] = OrderedDict()  # with its bytes; oldest use first
        self._open: dict[bytes, _Shared[T]] = {}

    async def get(self, key: bytes, job: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, str]:
        """The result, and whether it was "kept" or is just "done". Raises the job's error. The job is cancelled when no caller
        waits for it any more."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return _result(self._kept[key][0]), "kept"
        if key not in self._open:
            self._open[key] = _Shared(asyncio.create_task(self._make(key, job)))
        shared = self._open[key]
        shared.num_waiting += 1
        try:
            return _result(await asyncio.shield(shared.task)), "done"
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting:
                shared.task.cancel()
                if self._open.get(key) is shared:
                    del self._open[key]

    async def _make(self, key: bytes, job: Callable[[], Coroutine[Any, Any, T]]) -> "T | _Refusal":
        try:
            made: T | _Refusal = await job()
        except Overloaded:
            raise
        except RequestError as error:
            made = _Refusal(error_data(error))
        num_bytes = ENTRY_BYTES + (0 if isinstance(made, _Refusal) else self._size(made))
        if num_bytes <= self._max_bytes:
            self._kept[key] = (made, num_bytes)
            self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._num_bytes -= freed
        return made


class _Refusal(NamedTuple):
    """A job's RequestError as data: each request that it is raised for gets its own exception, and may rename its fields."""

    data: list[Any]


@dataclass(slots=True)
class _Shared(Generic[T]):
    task: "asyncio.Task[T | _Refusal]"
    num_waiting: int = 0


def _result(made: T | _Refusal) -> T:
    if isinstance(made, _Refusal):
        raise error_of_data(made.data)
    return made
