"""Log lines, as text or JSON, written by a thread so that a slow disk, a full pipe or a closed descriptor never blocks the caller.

Where writing fails or takes too long, lines are dropped and counted; the next line that can be written is preceded by their
number."""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from octavo.observe.journeys.journey import Journey, OpenJourney
from octavo.observe.journeys.stages import stage_seconds, wait_seconds

MAX_WAITING = 10_000
"""Lines that may wait to be written; more are dropped."""
FAREWELL_SECONDS = 0.5


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
        if self._lines.qsize() < MAX_WAITING:
            self._lines.put(line)
        else:
            self.num_lost += 1

    def close(self) -> None:
        """Write the lines that wait, if that takes no longer than FAREWELL_SECONDS."""
        self._lines.put(None)
        self._thread.join(FAREWELL_SECONDS)

    def _run(self) -> None:
        num_told = 0
        while (line := self._lines.get()) is not None:
            num_lost = self.num_lost
            if num_lost > num_told:
                line = self._about_lost(f"{num_lost - num_told} log lines could not be written") + f"\n{line}"
            if self._put(f"{line}\n".encode(errors="backslashreplace")):
                num_told = num_lost
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


class JsonFormatter(logging.Formatter):
    """A record as one JSON object, with the members of `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def install(level: int, kind: str) -> None:
    """Log every record from `level` on to standard error, as text ("text") or JSON ("json")."""
    handler = LineHandler()
    text = logging.Formatter("octavo: %(levelname)s: %(message)s")
    handler.setFormatter(JsonFormatter() if kind == "json" else text)
    logging.basicConfig(level=level, handlers=[handler], force=True)


def request_line(told: Journey, journey: OpenJourney) -> str:
    """One request as text: its tokens, how long it took, and what it waited for."""
    parts = [f"{told.id} {journey.method} {journey.path} {told.status} {told.seconds:.3f} s"]
    if told.prompt_tokens:
        cached = f" ({told.cached_tokens} cached)" if told.cached_tokens else ""
        reasons = ",".join(str(reason) for reason in told.finish_reasons)
        parts.append(f"{told.prompt_tokens}{cached} → {told.output_tokens} tokens, {reasons}")
    if told.first_byte_seconds is not None and told.prompt_tokens:
        parts.append(f"first byte {told.first_byte_seconds:.3f} s")
    if told.prompt_tokens:
        parts.append(", ".join(f"{name} {seconds:.3f}" for name, seconds in stage_seconds(told.stages).items()))
    if waits := wait_seconds(told.stages):
        parts.append("waited for " + ", ".join(f"{reason} {seconds:.3f}" for reason, seconds in waits.items()))
    if told.preemptions:
        parts.append(f"preempted {told.preemptions}")
    if told.error:
        parts.append(told.error)
    return "; ".join(parts)


def request_fields(told: Journey, journey: OpenJourney) -> dict[str, object]:
    """The same as fields for JSON."""
    return {
        "event": "request",
        "id": told.id,
        "response_ids": told.response_ids,
        "method": journey.method,
        "path": journey.path,
        "status": told.status,
        "state": told.state,
        "seconds": told.seconds,
        "first_byte_seconds": told.first_byte_seconds,
        "prompt_tokens": told.prompt_tokens,
        "cached_tokens": told.cached_tokens,
        "output_tokens": told.output_tokens,
        "finish_reasons": told.finish_reasons,
        "preemptions": told.preemptions,
        "stages": stage_seconds(told.stages),
        "waits": wait_seconds(told.stages),
        **({"error": told.error} if told.error else {}),
    }
