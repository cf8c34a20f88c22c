"""Log lines, as text or JSON, written by a thread so that a slow disk, a full pipe or a closed descriptor never blocks the caller.

Where writing fails or takes too long, lines are dropped and counted; the next line that can be written is preceded by their
number.

Every process of a server installs the same format before it does anything else: for its own records, those of libraries, warnings,
uncaught exceptions and what Python code prints. A formatter escapes what could forge a line."""

import io
import json
import logging
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from octavo.ipc.stderr import escape, escape_json
from octavo.observe.journeys.journey import Journey, OpenJourney

MAX_WAITING = 10_000
"""Lines that may wait to be written; more are dropped."""
FAREWELL_SECONDS = 0.5
PREFIX = "octavo: "
CONTINUED = "octavo: | "
"""Begins the lines of a traceback, so that none of them can be taken for a record."""


class LineWriter:
    """Writes lines to a file descriptor, in a thread of its own."""

    def __init__(self, descriptor: int, about_lost: Callable[[str], str] = str) -> None:
        """`about_lost`: formats the message about dropped lines."""
        self.num_lost = 0
        self._descriptor = descriptor
        self._about_lost = about_lost
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        if not self._thread.is_alive():  # closed: the process is ending
            self._put(f"{line}\n".encode(errors="backslashreplace"))
        elif self._lines.qsize() < MAX_WAITING:
            self._lines.put(line)
        else:
            self.num_lost += 1

    def close(self) -> None:
        """Write the lines that wait, if that takes no longer than FAREWELL_SECONDS."""
        self._lines.put(None)
        self._thread.join(FAREWELL_SECONDS)

    def _run(self) -> None:
        num_reported = 0
        while (line := self._lines.get()) is not None:
            num_lost = self.num_lost
            if num_lost > num_reported:
                line = self._about_lost(f"{num_lost - num_reported} log lines could not be written") + f"\n{line}"
            if self._put(f"{line}\n".encode(errors="backslashreplace")):
                num_reported = num_lost
            else:
                self.num_lost += 1

    def _put(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # the disk is full, or the reader is gone
            return False
        return True


class LineHandler(logging.Handler):
    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self.writer = LineWriter(descriptor, self._about_lost)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.write(self.format(record))
        except Exception:  # a record that cannot be formatted must not raise in the caller
            self.writer.num_lost += 1

    def close(self) -> None:
        self.writer.close()
        super().close()

    def _about_lost(self, words: str) -> str:
        return self.format(logging.LogRecord("octavo.log", logging.WARNING, "", 0, words, None, None))


class TextFormatter(logging.Formatter):
    """A record as one line that begins with its time, followed by those of its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        lines = [f"{_time_of(record)} {PREFIX}{level}{escape(record.getMessage().rstrip())}"]
        for more in (self.formatException(record.exc_info) if record.exc_info else "", record.stack_info or ""):
            lines += [CONTINUED + escape(line) for line in more.split("\n") if line]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """A record as one JSON object, with the members of `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().rstrip(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return escape_json(json.dumps(line, ensure_ascii=False))


def _time_of(record: logging.LogRecord) -> str:
    """UTC, to the millisecond."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


class LogStream(io.TextIOBase):
    """A text stream whose lines become records: what Python code prints to standard error."""

    def __init__(self, raw: TextIO | None) -> None:
        """`raw`: the stream that it replaces, for its descriptor."""
        self._raw = raw
        self._log = logging.getLogger("octavo.stderr")
        self._log.setLevel(logging.INFO)
        self._rest = ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._raw is None:
            raise OSError("no standard error")
        return self._raw.fileno()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._record(line)
        return len(text)

    def _record(self, line: str) -> None:
        """Log a line, whose level may be named as TextFormatter names it."""
        line = line.rstrip().removeprefix(PREFIX)
        if not line:
            return
        for level, name in ((logging.WARNING, "warning: "), (logging.ERROR, "error: ")):
            if line.startswith(name):
                return self._log.log(level, "%s", line.removeprefix(name))
        self._log.info("%s", line)


class RareWarning:
    """A warning that clients can cause at will: logged at most once in `seconds`, with the number of those in between."""

    def __init__(self, log: logging.Logger, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._seconds, self._clock = log, seconds, clock
        self._last = float("-inf")
        self._message, self._num_held = "", 0

    def __call__(self, message: str) -> None:
        self._message = message
        self._num_held += 1
        self.flush()

    def flush(self) -> None:
        """Log what was held back, if it is time. To be called now and then."""
        now = self._clock()
        if self._num_held and now - self._last >= self._seconds:
            more = f" (and {self._num_held - 1} more like it)" if self._num_held > 1 else ""
            self._last, self._num_held = now, 0
            self._log.warning("%s%s", self._message, more)


def install(level: int, kind: str) -> None:
    """Log every record from `level` on to standard error, as text ("text") or JSON ("json"); warnings and uncaught exceptions, too.
    What is printed to sys.stderr becomes records as well, unless it is a terminal, where progress bars are redrawn in place. (A
    library's C code can still write to the descriptor.)"""
    handler = LineHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    warnings.showwarning = _log_warning
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable
    is_watched = sys.stderr is not None and sys.stderr.isatty() and kind != "json"
    if not is_watched and not isinstance(sys.stderr, LogStream):
        sys.stderr = LogStream(sys.stderr)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def _log_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    logging.getLogger("octavo").critical("this process ends: %s", kind.__name__, exc_info=(kind, error, where))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit or args.exc_value is None:
        return
    name = args.thread.name if args.thread is not None else "unknown"
    logging.getLogger("octavo").error(
        "thread %s ends: %s", name, args.exc_type.__name__, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
    )


def _log_unraisable(args: "sys.UnraisableHookArgs") -> None:
    if args.exc_value is not None:
        logging.getLogger("octavo").error(
            "%s in %r",
            args.err_msg or "an exception was ignored",
            args.object,
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )


def request_line(journey: Journey, opened: OpenJourney) -> str:
    """One request as text: its tokens, how long it took, and what it waited for."""
    parts = [f"{journey.id} {opened.method} {opened.path} {journey.status} {journey.seconds:.3f} s"]
    if journey.prompt_tokens:
        cached = f" ({journey.cached_tokens} cached)" if journey.cached_tokens else ""
        if journey.cache_miss == "evicted":
            cached = f" ({journey.cached_tokens} cached, more was evicted)"
        reasons = ",".join(str(reason) for reason in journey.finish_reasons)
        parts.append(f"{journey.prompt_tokens}{cached} → {journey.output_tokens} tokens, {reasons}")
    if journey.first_byte_seconds is not None and journey.prompt_tokens:
        parts.append(f"first byte {journey.first_byte_seconds:.3f} s")
    if journey.prompt_tokens:
        parts.append(", ".join(f"{name} {seconds:.3f}" for name, seconds in journey.stage_seconds().items()))
    if waits := journey.wait_seconds():
        parts.append("waited for " + ", ".join(f"{reason} {seconds:.3f}" for reason, seconds in waits.items()))
    if journey.preemptions:
        parts.append(f"preempted {journey.preemptions}")
    if journey.error:
        parts.append(journey.error)
    return "; ".join(parts)


def request_fields(journey: Journey, opened: OpenJourney) -> dict[str, object]:
    """The same as fields for JSON."""
    return {
        "event": "request",
        "id": journey.id,
        "response_ids": journey.response_ids,
        "method": opened.method,
        "path": opened.path,
        "status": journey.status,
        "state": journey.state,
        "seconds": journey.seconds,
        "first_byte_seconds": journey.first_byte_seconds,
        "prompt_tokens": journey.prompt_tokens,
        "cached_tokens": journey.cached_tokens,
        "cache_miss": journey.cache_miss,
        "output_tokens": journey.output_tokens,
        "finish_reasons": journey.finish_reasons,
        "preemptions": journey.preemptions,
        "stages": journey.stage_seconds(),
        "waits": journey.wait_seconds(),
        **({"error": journey.error} if journey.error else {}),
    }
