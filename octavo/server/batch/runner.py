"""BatchRunner: answers the lines of batches in the background, in the API process that holds the lock.

If that process ends, another one, or the next server on the same folder, resumes its batches: it reads the records back and asks
only for the remaining lines."""

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.errors import ConfigError, InvalidRequest, NotFound
from octavo.server.batch.answer_lines import answer_lines
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
from octavo.server.batch.files import FileStore, new_name
from octavo.server.batch.lines import BadLine, Line, Rules, read_lines
from octavo.server.batch.records import Record, Seen, Tally, encode_record, open_records, read_back, unanswered_record
from octavo.server.state.loopback import LoopbackResponse
from octavo.server.state.service import Ask

log = logging.getLogger("octavo.server")

LOOK_SECONDS = 0.5  # how often the folder is checked for batches and cancellations from other processes
MAX_ACTIVE = 8  # batches that run at once and share the slots; the others wait
MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 100  # lines named in the errors of a refused batch
LOOK_EVERY_RECORDS = 64
PAUSE_SECONDS = 30  # before a batch whose result could not be stored is tried again
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
    ) -> None:
        """`rules.urls`: all routes that batches may use; each batch names one. `is_crowded`: whether requests wait for the
        engine."""
        self._files, self._batches = files, batches
        self._ask, self._rules, self._model_name = ask, rules, model_name
        self._lock, self._is_crowded = lock, is_crowded
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}

    def wake(self) -> None:
        """Check the folder now: this process has changed something in it."""
        self._news.set()

    async def run(self, num_slots: int) -> None:
        """Run batches until cancelled. `num_slots`: lines of all batches together that are in flight at once."""
        slots = asyncio.Semaphore(num_slots)
        with self._lock.open("wb") as lock:
            is_mine = is_tidy = False  # while another process holds the lock, that one runs the batches
            problem = ""
            try:
                while True:
                    self._news.clear()
                    try:
                        is_mine = is_mine or _try_lock(lock)
                        if is_mine and not is_tidy:
                            await asyncio.to_thread(self._files.tidy)
                            await asyncio.to_thread(self._batches.tidy)
                            is_tidy = True
                        if is_mine:
                            self._look(await asyncio.to_thread(self._batches.unfinished), slots)
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

    def _look(self, unfinished: list[Unfinished], slots: asyncio.Semaphore) -> None:
        """Start unfinished batches and pass cancellations on. A batch may have ended since it was listed: `_Run` handles that."""
        for batch_id, is_cancelled in unfinished:
            if batch_id not in self._running:
                if len(self._running) >= MAX_ACTIVE and not is_cancelled:
                    continue
                self._cancelled[batch_id] = asyncio.Event()
                self._running[batch_id] = asyncio.create_task(self._guard(batch_id, slots))
            if is_cancelled:
                self._cancelled[batch_id].set()

    async def _guard(self, batch_id: str, slots: asyncio.Semaphore) -> None:
        try:
            await _Run(self, self._batches.load(batch_id), slots, self._cancelled[batch_id]).run()
        except NotFound:  # its card was removed from the folder: there is nothing to run
            self._batches.forget(batch_id)
        except Exception:
            log.exception("batch %s could not be finished; trying again in %d s", batch_id, PAUSE_SECONDS)
            await asyncio.sleep(PAUSE_SECONDS)
        finally:
            del self._running[batch_id], self._cancelled[batch_id]
            self._news.set()  # the next may begin


class _Run:
    """Runs one batch from its current state to its end. However it ends, the answers so far become its output."""

    def __init__(self, runner: BatchRunner, batch: Batch, slots: asyncio.Semaphore, cancelled: asyncio.Event) -> None:
        self._files, self._batches = runner._files, runner._batches
        self._ask, self._owner = runner._ask, self._batches.owner(batch.id)
        self._rules = msgspec.structs.replace(runner._rules, urls=(batch.endpoint,))
        self._model_name, self._is_crowded = runner._model_name, runner._is_crowded
        self._batch = batch
        self._slots, self._cancelled = slots, cancelled
        self._tally, self._seen = Tally(), Seen()
        self._knows_all = False  # whether all earlier records were read back
        self._num_written = 0
        self._next_save = 0.0

    async def run(self) -> None:
        if self._batch.has_ended:  # its process died before it removed the open marks
            return self._batches.end(self._batch)
        try:
            with contextlib.ExitStack() as stack:
                answers, errors = (stack.enter_context(open_records(p)) for p in self._batches.outputs(self._batch.id))
                self._answers, self._errors = answers, errors
                if self._batch.finalizing_at is None:
                    self._decide(*await self._outcome())
                elif not self._has_files:
                    with contextlib.suppress(_Refused):
                        await asyncio.to_thread(self._read_back)
                if not self._has_files:
                    await asyncio.to_thread(self._record_unanswered)
            await asyncio.to_thread(self._finish)
        finally:
            self._seen.close()

    @property
    def _has_files(self) -> bool:
        """Whether all records are written and the output files have their ids."""
        return self._batch.output_file_id is not None or self._batch.error_file_id is not None

    def _read_back(self) -> None:
        for file in (self._answers, self._errors):
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
            await asyncio.to_thread(self._read_back)
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
        if self._batch.status == "validating":
            total = await asyncio.to_thread(self._validate)
            counts = RequestCounts(total, self._tally.completed, self._tally.failed)
            self._change(
                status="in_progress", in_progress_at=int(time.time()), request_counts=counts, model=self._model_name
            )
        with self._open_input() as file:
            await answer_lines(self._unanswered(file), self._ask_line, self._slots, self._write, self._is_crowded)

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
        (self._answers if is_good else self._errors).write(encode_record(record))
        self._seen.note(record)
        self._num_written += 1
        if self._num_written % LOOK_EVERY_RECORDS == 0:
            try:
                await asyncio.to_thread(self._files.check_room)  # it stats every file
            except InvalidRequest as error:
                raise _Refused([BatchError("storage_full", error.message)]) from None
        if (now := time.monotonic()) >= self._next_save:
            self._next_save = now + 1.0
            self._change(request_counts=self._counts(), usage=self._usage())

    def _decide(self, outcome: Status, reasons: list[BatchError]) -> None:
        """Save the outcome. A process that resumes the batch after this keeps it."""
        now = int(time.time())
        self._change(
            **({} if outcome == "completed" else {f"{outcome}_at": now}),
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
                self._files.adopt(path, file_id, f"{batch.id}_{kind}.jsonl", expiry)
            path.unlink(missing_ok=True)
        self._batches.end(msgspec.structs.replace(self._batch, **{f"{outcome}_at": int(time.time())}, status=outcome))

    def _change(self, **changes: object) -> None:
        self._batch = msgspec.structs.replace(self._batch, **changes)
        self._batches.save(self._batch)

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
