"""`octavo run-batch`: answers a file of requests into a file of records, with its own engine process and without a socket. The
application that would serve the requests over HTTP answers them."""

import asyncio
import fcntl
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
from tqdm import tqdm

from octavo.config import Config
from octavo.errors import ConfigError, EngineDead, OctavoError
from octavo.server.batch.answer_lines import answer_lines
from octavo.server.batch.lines import BadLine, Line, Rules, read_lines
from octavo.server.batch.records import Record, Seen, Tally, encode_record, open_records, read_back
from octavo.server.endpoints.batches import batch_routes, seeded_routes
from octavo.server.prepare import prepare
from octavo.server.state.loopback import ask
from octavo.supervisor.standalone_engine import StandaloneEngine

EXIT_OK, EXIT_STOPPED, EXIT_SOME_FAILED = 0, 1, 3
EXIT_REFUSED = 2  # the engine did not start, and has logged what to change
LINES_PER_ROW = 2
"""Lines in flight for each row of the engine: while some are computed, the next are parsed and wait."""


class Stopped(Exception):
    """SIGTERM was received. The records written so far stay."""


def run_batch(config: Config, input_path: str, output_path: str, max_concurrency: int | None) -> int:
    """Answer the input's lines into the output. Returns the exit code: 0 all answered, 1 stopped before the end, 2 the engine did
    not start, 3 some lines failed."""
    with _open_input(input_path) as lines, _open_output(output_path, input_path) as output:
        tally, seen = Tally(), Seen()
        read_back(output, output_path, seen, tally)
        job = _Job(config, lines, output, seen, tally, max_concurrency)
        try:
            code = asyncio.run(job.run())
        except (Stopped, KeyboardInterrupt, EngineDead) as error:
            job.summary("stopped before the end; run the same command to continue")
            if not isinstance(error, Stopped):
                raise
            return EXIT_STOPPED
        except OSError as error:
            job.summary("stopped before the end; run the same command to continue")
            raise OctavoError(f"the output {output_path} cannot be written ({error.strerror})") from None
        finally:
            seen.close()
        if code is not None:
            return code
        job.summary("done")
        return EXIT_SOME_FAILED if tally.failed else EXIT_OK


def _open_input(path: str) -> BinaryIO:
    try:
        file = open(path, "rb")  # noqa: SIM115
        if not file.seekable():
            raise OSError(0, "it is not a file")
        return file
    except OSError as error:
        raise ConfigError(f"the input {path} cannot be read ({error.strerror}): give a file of JSON lines") from None


def _open_output(path: str, input_path: str) -> BinaryIO:
    """Open the output for reading back and appending. A second run on the same file is refused: it would write every answer
    twice."""
    try:
        if os.path.exists(path) and os.path.samefile(path, input_path):
            raise ConfigError(f"the output {path} is the input: name another file")
        file = open_records(path)
    except OSError as error:
        raise ConfigError(f"the output {path} cannot be written ({error.strerror}): name another file") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"the output {path} is being written by another run: wait for it, or stop it") from None
    return file


class _Job:
    def __init__(
        self, config: Config, lines: BinaryIO, output: BinaryIO, seen: Seen, tally: Tally, max_concurrency: int | None
    ) -> None:
        self._config = config
        self._lines, self._output = lines, output
        self._seen, self._tally = seen, tally
        self._num_before = tally.completed + tally.failed
        self._tokens_before = tally.output_tokens
        self._max_concurrency = max_concurrency
        self._started = 0.0
        self._bar: tqdm[None] | None = None

    async def run(self) -> int | None:
        """Run the job. None: every line has its record. Otherwise the exit code of an engine that did not start."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self._run())
        is_stopping = False

        def stop() -> None:
            nonlocal is_stopping
            is_stopping = True
            work.cancel()

        loop.add_signal_handler(signal.SIGTERM, stop)
        try:
            return await work
        except asyncio.CancelledError:
            if is_stopping:
                raise Stopped from None
            raise

    async def _run(self) -> int | None:
        num_lines = await asyncio.to_thread(_count_lines, self._lines)
        if all(line is None for line in self._unanswered()):
            return None  # nothing left to answer: do not load the model
        self._lines.seek(0)
        async with StandaloneEngine(self._config) as engine:
            try:
                app = await engine.alongside(
                    prepare(engine.client, engine.model_path, engine.name, self._config, engine.default_sampling)
                )
            except EngineDead:
                if await engine.ended() != EXIT_REFUSED:
                    raise
                return EXIT_REFUSED
            assert engine.client.report is not None
            slots = asyncio.Semaphore(self._max_concurrency or LINES_PER_ROW * engine.client.report.max_num_seqs)
            self._started = time.monotonic()
            self._bar = tqdm(
                total=num_lines, initial=self._num_before, desc="requests", unit="", dynamic_ncols=True,
                mininterval=0.1 if sys.stderr.isatty() else 30.0,
            )  # fmt: skip
            try:
                with self._bar:
                    await engine.alongside(
                        answer_lines(self._unanswered(), functools.partial(ask, app), slots, self._write)
                    )
            finally:
                app.state.service.compiler.close()
        os.fsync(self._output.fileno())
        return None

    def _unanswered(self) -> Iterator[Line | BadLine | None]:
        """Yield each line, or None if it has a record already. Lines that repeat an earlier custom_id are bad lines."""
        config = self._config
        rules = Rules(
            batch_routes(),
            int(config.budget.max_body_bytes),
            config.server.strict_fields,
            seeded_routes(),
            config.model.seed,
        )
        here = Seen()
        try:
            for line in read_lines(self._lines, rules):
                if isinstance(line, Line) and not here.add(line.custom_id):
                    message = f"line {line.number}: custom_id {line.custom_id[:60]!r} was used by an earlier line"
                    line = BadLine(line.number, "duplicate_custom_id", message, "custom_id")
                if isinstance(line, BadLine):  # a custom_id belongs to the first good line that has it
                    line = msgspec.structs.replace(line, custom_id=None)
                key = line.number if line.custom_id is None else line.custom_id
                yield None if key in self._seen else line
        finally:
            here.close()

    async def _write(self, record: Record) -> None:
        self._output.write(encode_record(record))
        self._tally.count(record)
        if self._bar is not None:
            self._bar.update()

    def summary(self, outcome: str) -> None:
        tally, seconds = self._tally, time.monotonic() - self._started if self._started else 0.0
        num_now = tally.completed + tally.failed - self._num_before
        before = f", {self._num_before} of them by earlier runs" if self._num_before else ""
        rate = (tally.output_tokens - self._tokens_before) / seconds if seconds else 0.0
        print(
            f"octavo: {outcome}: {tally.completed} answered, {tally.failed} failed{before}; "
            f"{num_now} in {seconds:.1f} s, {rate:.0f} output tokens/s",
            file=sys.stderr,
        )


def _count_lines(file: BinaryIO) -> int:
    """Count lines, including a last one without a newline."""
    num_lines, last = 0, b"\n"
    while piece := file.read(1 << 20):
        num_lines += piece.count(b"\n")
        last = piece
    file.seek(0)
    return num_lines + (not last.endswith(b"\n"))
