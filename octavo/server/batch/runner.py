"""BatchRunner: answers the lines of batches in the background, in the API process that holds the lock.

If that process ends, another one, or the next server on the same folder, resumes its batches: it reads the records back and asks
only for the remaining lines. Lines that were in flight when a process ended come last, one at a time; one that ended two processes
is failed (crash_memory.py)."""

import asyncio
import contextlib
import fcntl
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.errors import ConfigError, InvalidRequest, NotFound
from octavo.server.batch.answer_lines import answer_lines, read_in_thread
from octavo.server.batch.batches import (
    Batch,
    BatchError,
    BatchErrors,
    BatchStore,
    BatchUsage,
    InputTokensDetails,
    OutputTokensDetails,
    RequestCounts,
    Status,
    Unfinished,
)
from octavo.server.batch.crash_memory import VALIDATION, CrashMemory
from octavo.server.batch.files import FileStore, new_name
from octavo.server.batch.lines import BadLine, Line, Rules, read_lines
from octavo.server.batch.records import Record, Seen, Tally, encode_record, open_records, read_back, unanswered_record
from octavo.server.batch.threads import finish_in_thread
from octavo.server.state.loopback import LoopbackResponse
from octavo.server.state.pools import BATCHES
from octavo.server.state.service import Ask

log = logging.getLogger("octavo.server")

LOOK_SECONDS = 0.5  # how often the folder is checked for batches and cancellations from other processes
MAX_ACTIVE = 8  # batches that run at once and share the slots; the others wait
MAX_LINES = 50_000  # OpenAI's limit
MAX_INPUT_LINES = 4 * MAX_LINES  # with empty ones: a file has room for hundreds of millions
MAX_ERRORS = 100  # lines named in the errors of a refused batch
LOOK_EVERY_RECORDS = 64
PAUSE_SECONDS = 30  # before a batch whose result could not be stored is tried again
ENDED_PROCESSES = "request_ended_server"  # the error code of a line that is not tried again
OUTCOMES: tuple[Status, ...] = ("failed", "expired", "cancelled")
WHY_NOT_ANSWERED = {  # with OpenAI's codes
    "expired": BatchError("batch_expired", "the batch's completion window ended before this request was answered"),
    "cancelled": BatchError("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class _Refused(Exception):
    """The batch ends as failed, with these errors."""

    def __init__(self, errors: list[BatchError]) -> None:
        self.errors = errors


class BatchRunner:
    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        ask: Ask,
        rules: Rules,
        model_name: str,
        lock: Path,
        is_crowded: Callable[[], bool],
        memory: CrashMemory,
        num_slots: int,
        sleeps: Callable[[], Awaitable[bool]],
    ) -> None:
        """`rules.urls`: all routes that batches may use; each batch names one. `is_crowded`: whether requests wait for the
        engine. `num_slots`: lines of all batches together that are in flight at once; `memory` has room for these and one more of
        each active batch. `sleeps`: whether the engine was put to sleep: batches do not wake it."""
        self._files, self._batches = files, batches
        self._ask, self._rules, self._model_name = ask, rules, model_name
        self._lock, self._is_crowded = lock, is_crowded
        self._memory, self._sleeps = memory, sleeps
        self._slots, self._num_slots, self._trial = asyncio.Semaphore(num_slots), num_slots, asyncio.Lock()
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}

    def wake(self) -> None:
        """Check the folder now: this process has changed something in it."""
        self._news.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncGenerator[None, None]:
        """Wait until no line of any batch is in flight; none begins before this is left."""
        async with self._trial:  # two that hold some slots each would wait for each other
            num_taken = 0
            try:
                while num_taken < self._num_slots:
                    await self._slots.acquire()
                    num_taken += 1
                yield
            finally:
                for _ in range(num_taken):
                    self._slots.release()

    async def run(self) -> None:
        """Run batches until cancelled."""
        with self._lock.open("wb") as lock:
            is_mine = is_tidy = False  # while another process holds the lock, that one runs the batches
            problem = ""
            try:
                while True:
                    self._news.clear()
                    try:
                        is_mine = is_mine or _try_lock(lock)
                        if is_mine and not is_tidy:
                            await BATCHES.run(self._files.tidy)
                            await BATCHES.run(self._batches.tidy)
                            await BATCHES.run(self._memory.open)  # last: what it has read it counts once
                            is_tidy = True
                        if is_mine:
                            unfinished = await BATCHES.run(self._batches.unfinished)
                            self._look(await self._without_new(unfinished))
                        problem = ""
                    except OSError as error:  # too many open files, for example: batches wait for the next check
                        if str(error) != problem:  # log the same problem once
                            log.warning("cannot check for new batches: %s", error.strerror)
                        problem = str(error)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await self._news.wait()
            finally:
                tasks = list(self._running.values())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._memory.close()

    async def _without_new(self, unfinished: list[Unfinished]) -> list[Unfinished]:
        """Without those that have not begun, while the engine sleeps."""
        old = [each for each in unfinished if each.is_cancelled or each.id in self._running]
        return old if len(old) < len(unfinished) and await self._sleeps() else unfinished

    def _look(self, unfinished: list[Unfinished]) -> None:
        """Start unfinished batches and pass cancellations on. A batch may have ended since it was listed: `_Run` handles that."""
        for batch_id, is_cancelled in unfinished:
            if batch_id not in self._running:
                if len(self._running) >= MAX_ACTIVE and not is_cancelled:
                    continue
                self._cancelled[batch_id] = asyncio.Event()
                self._running[batch_id] = asyncio.create_task(self._guard(batch_id))
            if is_cancelled:
                self._cancelled[batch_id].set()

    async def _guard(self, batch_id: str) -> None:
        try:
            await _Run(self, *self._batches.load(batch_id), self._cancelled[batch_id]).run()
            self._memory.forget(batch_id)
        except NotFound:  # its card was removed from the folder: there is nothing to run
            self._batches.forget(batch_id)
            self._memory.forget(batch_id)
        except Exception:
            log.exception("batch %s could not be finished; trying again in %d s", batch_id, PAUSE_SECONDS)
            await asyncio.sleep(PAUSE_SECONDS)
        finally:
            del self._running[batch_id], self._cancelled[batch_id]
            self._news.set()  # the next may begin


class _Run:
    """Runs one batch from its current state to its end. However it ends, the answers so far become its output."""

    def __init__(self, runner: BatchRunner, batch: Batch, owner: bytes, cancelled: asyncio.Event) -> None:
        """`owner`: the key that created the batch. Its requests are asked on behalf of that key."""
        self._files, self._batches = runner._files, runner._batches
        self._ask, self._owner = runner._ask, owner
        self._rules = msgspec.structs.replace(runner._rules, urls=(batch.endpoint,))
        self._model_name, self._is_crowded = runner._model_name, runner._is_crowded
        self._batch = batch
        self._slots, self._alone, self._memory = runner._slots, runner.alone, runner._memory
        self._cancelled = cancelled
        self._tally, self._seen = Tally(), Seen()
        self._knows_all = False  # whether all earlier records were read back
        self._num_written = 0
        self._next_save = 0.0
        self._changing = asyncio.Lock()

    async def run(self) -> None:
        if self._batch.has_ended:  # its process died before it removed the open marks
            return self._batches.end(self._batch, self._owner)
        try:
            with contextlib.ExitStack() as stack:
                output, errors = (stack.enter_context(open_records(p)) for p in self._batches.outputs(self._batch.id))
                self._output, self._errors = output, errors
                if self._batch.finalizing_at is None:
                    outcome = await self._outcome()
                    await BATCHES.run(self._decide, *outcome)
                elif not self._has_files:
                    with contextlib.suppress(_Refused):
                        await BATCHES.run(self._read_back)
                if not self._has_files:
                    await BATCHES.run(self._record_unanswered)
            await BATCHES.run(self._finish)
        finally:
            self._seen.close()

    @property
    def _has_files(self) -> bool:
        """Whether all records are written and the output files have their ids."""
        return self._batch.output_file_id is not None or self._batch.error_file_id is not None

    def _read_back(self) -> None:
        for file in (self._output, self._errors):
            try:
                read_back(file, "the output", self._seen, self._tally)
            except ConfigError as error:
                log.error("batch %s: %s", self._batch.id, error.message)
                words = "the records written so far cannot be read back; they are kept as they are"
                raise _Refused([BatchError("server_error", words)]) from None
        self._knows_all = True

    async def _outcome(self) -> tuple[Status, list[BatchError]]:
        """Work until the batch is completed, cancelled, expired or failed. Returns (outcome, errors)."""
        try:
            await BATCHES.run(self._read_back)
            return await self._until_over(), []
        except _Refused as refused:
            return "failed", refused.errors
        except OSError as error:
            return "failed", [BatchError("storage_full", f"the answers cannot be stored ({error.strerror})")]
        except Exception as error:
            log.exception("batch %s failed", self._batch.id)
            words = f"the server could not run this batch ({type(error).__name__}); see the server's log"
            return "failed", [BatchError("server_error", words)]

    async def _until_over(self) -> Status:
        if self._cancelled.is_set():
            return "cancelled"
        work = asyncio.create_task(self._work())
        asked = asyncio.create_task(self._cancelled.wait())
        try:
            left = max(0.0, self._batch.expires_at - time.time())
            await asyncio.wait({work, asked}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return "completed"
            return "cancelled" if asked.done() else "expired"
        finally:
            asked.cancel()
            work.cancel()
            await asyncio.gather(asked, work, return_exceptions=True)

    async def _work(self) -> None:
        batch_id, memory = self._batch.id, self._memory
        if self._batch.status == "validating":
            async with self._trial_of(VALIDATION):
                with memory.trying(batch_id, VALIDATION):
                    total = await BATCHES.run(self._validate)
            counts = RequestCounts(total, self._tally.completed, self._tally.failed)
            await self._change_in_thread(
                status="in_progress", in_progress_at=int(time.time()), request_counts=counts, model=self._model_name
            )
        suspects = memory.suspects(batch_id)
        with self._open_input() as file:
            lines = self._unanswered(file)
            lines = (None if isinstance(line, Line) and line.number in suspects else line for line in lines)
            await answer_lines(lines, self._ask_line, self._slots, self._write, self._is_crowded, self._trying)
        if suspects:
            with self._open_input() as file:
                lines = self._unanswered(file)
                lines = (line if isinstance(line, Line) and line.number in suspects else None for line in lines)
                async with contextlib.aclosing(read_in_thread(lines)) as read:
                    async for line in read:
                        if line is not None:
                            await self._try_suspect(line)

    async def _try_suspect(self, line: Line | BadLine) -> None:
        if self._memory.is_guilty(self._batch.id, line.number):
            message = "this request ended the server process twice and is not tried again"
            log.error("line %d of %s is failed: it ended the server process twice", line.number, self._batch.id)
            return await self._write(unanswered_record(line, ENDED_PROCESSES, message))
        async with self._trial_of(line.number):
            await answer_lines([line], self._ask_line, asyncio.Semaphore(1), self._write, trying=self._trying)

    @contextlib.asynccontextmanager
    async def _trial_of(self, line: int) -> AsyncGenerator[None, None]:
        """Before a suspect is tried: wait until it is the only line. Does nothing for others."""
        batch_id, memory = self._batch.id, self._memory
        if line not in memory.suspects(batch_id):
            yield
        elif memory.is_guilty(batch_id, line):
            words = "reading the input file ended the server process twice; it is not tried again"
            raise _Refused([BatchError(ENDED_PROCESSES, words, param="input_file_id")])
        else:
            await asyncio.sleep(memory.seconds_until_trial(batch_id, line))
            async with self._alone():
                yield

    def _trying(self, line: Line) -> contextlib.AbstractContextManager[None]:
        return self._memory.trying(self._batch.id, line.number)

    def _ask_line(self, url: str, body: bytes) -> Awaitable[LoopbackResponse]:
        return self._ask(url, body, self._owner)

    def _validate(self) -> int:
        """Return the number of requests. Raises _Refused if a line is bad: as at OpenAI, such a batch does not run at all."""
        errors: list[BatchError] = []
        ids, total = Seen(), 0
        try:
            with self._open_input() as file:
                for line in read_lines(file, self._rules):
                    total += 1
                    if isinstance(line, BadLine):
                        errors.append(BatchError(line.code, line.message, line.number, line.param))
                    elif not ids.add(line.custom_id):
                        words = f"line {line.number}: custom_id {line.custom_id[:60]!r} was used by an earlier line"
                        errors.append(BatchError("duplicate_custom_id", words, line.number, "custom_id"))
                    if len(errors) >= MAX_ERRORS or total > MAX_LINES:
                        break
        finally:
            ids.close()
        if total > MAX_LINES:
            errors.append(BatchError("too_many_requests", f"a batch has at most {MAX_LINES} requests"))
        if not total and not errors:
            errors.append(BatchError("empty_file", "the input file has no requests", param="input_file_id"))
        if errors:
            raise _Refused(errors)
        return total

    def _open_input(self) -> BinaryIO:
        try:
            return self._batches.open_input(self._batch.id)
        except FileNotFoundError:
            words = "the lines of the input file were removed from the server's folder"
            raise _Refused([BatchError("invalid_file", words, param="input_file_id")]) from None

    def _unanswered(self, file: BinaryIO) -> Iterator[Line | BadLine | None]:
        """Yield each line, or None if it has a record already. A line may be bad though the batch passed validation, if an
        earlier server with other rules validated it."""
        for line in read_lines(file, self._rules):
            key = line.number if line.custom_id is None else line.custom_id
            yield None if key in self._seen else line

    async def _write(self, record: Record) -> None:
        self._tally.count(record)
        is_good = record.response is not None and record.response.status_code < 300
        (self._output if is_good else self._errors).write(encode_record(record))
        self._seen.note(record)
        self._num_written += 1
        if self._num_written % LOOK_EVERY_RECORDS == 0:
            try:
                await BATCHES.run(self._files.check_room)  # it stats every file
            except InvalidRequest as error:
                raise _Refused([BatchError("storage_full", error.message)]) from None
        if (now := time.monotonic()) >= self._next_save:
            self._next_save = now + 1.0
            await self._change_in_thread(request_counts=self._counts(), usage=self._usage())

    def _decide(self, outcome: Status, reasons: list[BatchError]) -> None:
        """Save the outcome. A process that resumes the batch after this keeps it."""
        now = int(time.time())
        known = {"request_counts": self._counts(), "usage": self._usage()} if self._knows_all else {}
        self._change(
            **({} if outcome == "completed" else {f"{outcome}_at": now}),
            **known,
            status="finalizing",
            finalizing_at=now,
            cancelling_at=self._batches.get(self._batch.id).cancelling_at,
            errors=BatchErrors(reasons) if reasons else None,
        )

    @property
    def _decided(self) -> Status:
        return next((name for name in OUTCOMES if getattr(self._batch, f"{name}_at") is not None), "completed")

    def _record_unanswered(self) -> None:
        """Write a record that says why for every line without an answer."""
        batch = self._batch
        why = WHY_NOT_ANSWERED.get(self._decided) or (batch.errors.data[0] if batch.errors else None)
        if why is None or why.code == "storage_full" or batch.in_progress_at is None or not self._knows_all:
            return
        try:
            with self._open_input() as file:
                for line in self._unanswered(file):
                    if line is not None:
                        record = unanswered_record(line, why.code, why.message)
                        self._errors.write(encode_record(record))
                        self._tally.count(record)
        except (OSError, _Refused):
            log.exception("batch %s: the records of unanswered lines could not be written", batch.id)

    def _finish(self) -> None:
        """Make the outputs files, then end the batch. If this process is killed in between, the next one completes it."""
        batch, outcome = self._batch, self._decided
        paths = self._batches.outputs(batch.id)
        if not self._has_files:
            ids = [new_name("file-") if path.stat().st_size else None for path in paths]
            counts, usage = self._counts(), self._usage()
            self._change(output_file_id=ids[0], error_file_id=ids[1], request_counts=counts, usage=usage)
        ids = [self._batch.output_file_id, self._batch.error_file_id]
        expiry = batch.output_expires_after.seconds if batch.output_expires_after else None
        for file_id, path, kind in zip(ids, paths, ("output", "error"), strict=True):
            if file_id is not None:
                self._files.adopt(path, file_id, f"{batch.id}_{kind}.jsonl", expiry, self._owner)
            path.unlink(missing_ok=True)
        ended = msgspec.structs.replace(self._batch, **{f"{outcome}_at": int(time.time())}, status=outcome)
        self._batches.end(ended, self._owner)

    async def _change_in_thread(self, **changes: object) -> None:
        """Replacing a file may wait for the disk: not on the event loop."""
        async with self._changing:
            await finish_in_thread(functools.partial(self._change, **changes))

    def _change(self, **changes: object) -> None:
        self._batch = msgspec.structs.replace(self._batch, **changes)
        self._batches.save(self._batch, self._owner)

    def _counts(self) -> RequestCounts:
        return RequestCounts(self._batch.request_counts.total, self._tally.completed, self._tally.failed)

    def _usage(self) -> BatchUsage:
        tally = self._tally
        return BatchUsage(
            tally.input_tokens,
            InputTokensDetails(tally.cached_tokens),
            tally.output_tokens,
            OutputTokensDetails(tally.reasoning_tokens),
            tally.input_tokens + tally.output_tokens,
        )


def _try_lock(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
