"""Log lines reach their descriptor, or are lost and counted; nothing that happens to it holds up who logs."""

import json
import logging
import os
import re
import subprocess
import sys

import pytest

from octavo.ipc.stderr import say
from octavo.observe import logs
from octavo.observe.logs import JsonFormatter, LineHandler, LineWriter, LogStream, RareWarning, TextFormatter


def lines_of(descriptor: int) -> list[str]:
    return os.read(descriptor, 10_000_000).decode().splitlines()


def test_lines_are_written_in_order() -> None:
    reader, writer = os.pipe()
    log = LineWriter(writer)
    for number in range(100):
        log.write(f"line {number} é\ud800")
    log.close()
    assert lines_of(reader) == [f"line {number} é\\ud800" for number in range(100)] and log.num_lost == 0


@pytest.mark.parametrize("what", ["a full disk", "a reader that left", "a closed descriptor"])
def test_lines_that_cannot_be_written_are_lost_and_counted(what: str) -> None:
    if what == "a full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
        if what == "a closed descriptor":
            os.close(descriptor)
    log = LineWriter(descriptor)
    for _ in range(10):
        log.write("line")
    log.close()
    assert log.num_lost == 10


def test_a_reader_that_stops_reading_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 50)
    reader, writer = os.pipe()
    log = LineWriter(writer)
    line = "x" * 1000
    for _ in range(5000):  # far beyond what a pipe and the queue hold
        log.write(line)
    assert log.num_lost > 4000
    num_lost = log.num_lost
    text = ""
    while "could not be written" not in text:
        text += os.read(reader, 65536).decode()
        log.write("more")
    assert f"{num_lost} log lines could not be written" in text or log.num_lost > num_lost
    assert line in text


def test_json_lines_hold_their_fields_and_what_went_wrong() -> None:
    reader, writer = os.pipe()
    logger = logging.Logger("octavo.test")
    handler = LineHandler(writer)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.info("a %s", "line", extra={"fields": {"id": "r1", "waits": {"pages": 0.5}}})
    try:
        raise ValueError("oh")
    except ValueError:
        logger.exception("it failed")
    logger.info("%d", "not a number")  # cannot be written down: lost, and no more than that
    handler.close()
    lines = {line["message"]: line for line in map(json.loads, lines_of(reader))}
    first, second = lines["a line"], lines["it failed"]
    assert set(lines) <= {"a line", "it failed", "1 log lines could not be written"}
    assert first["level"] == "info" and first["waits"] == {"pages": 0.5}
    assert first["time"].endswith("Z") and first["logger"] == "octavo.test"
    assert second["level"] == "error" and "ValueError: oh" in second["exception"]
    assert handler.writer.num_lost == 1


def test_closed_standard_streams_are_taken_before_a_socket_gets_their_numbers() -> None:
    code = (
        "import os, socket, sys\n"
        "from octavo.ipc.stderr import hold_standard_streams, say\n"
        "report = os.dup(1)\n"
        "os.closerange(0, 3)\n"
        "sys.stderr = None\n"
        "hold_standard_streams()\n"
        "say('nobody reads this')\n"
        "null = os.stat(os.devnull)\n"
        "same = all(os.path.samestat(os.fstat(fd), null) and os.get_inheritable(fd) for fd in range(3))\n"
        "os.write(report, b'held' if same and socket.socket().fileno() > 2 else b'lost')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.stdout == b"held", done.stderr


def test_a_warning_that_clients_cause_is_rare_and_says_how_many() -> None:
    lines: list[str] = []
    logger = logging.Logger("octavo.test")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    now = [100.0]
    warn = RareWarning(logger, 10.0, lambda: now[0])
    for _ in range(5):
        warn("no HTTP")
    now[0] = 109.0
    warn.flush()
    assert lines == ["no HTTP"]
    now[0] = 110.0
    warn.flush()
    warn.flush()
    now[0] = 200.0
    warn("no HTTP")
    assert lines == ["no HTTP", "no HTTP (and 3 more like it)", "no HTTP"]


HOSTILE = "GET /a\noctavo: error: forged\r\x1b[2J\x07\x7f\x85\x9b\u2028\u2029\u202e\u2066\ufeff\t b"
UNSAFE = set("\n\r\x1b\x07\x7f\x85\x9b\u2028\u2029\u202e\u2066\ufeff\t")


def record_of(message: str, level: int = logging.WARNING, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("octavo.test", level, "", 0, "%s", (message,), exc_info)  # type: ignore[arg-type]


TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


def text_of(record: logging.LogRecord) -> str:
    """A record as text, without its time."""
    line = TextFormatter().format(record)
    assert re.match(TIME, line), line
    return re.sub(TIME, "", line, count=1)


def test_a_record_has_the_time_at_which_it_was_made() -> None:
    record = record_of("ready", logging.INFO)
    record.created, record.msecs = 1_763_358_886.25, 250.0
    assert TextFormatter().format(record) == "2025-11-17T05:54:46.250Z octavo: ready"
    assert json.loads(JsonFormatter().format(record))["time"] == "2025-11-17T05:54:46.250Z"


def test_no_text_forges_a_line() -> None:
    line = text_of(record_of(HOSTILE))
    assert line.startswith(
        "octavo: warning: GET /a\\noctavo: error: forged\\r\\x1b[2J\\x07\\x7f\\x85\\x9b\\u2028\\u2029\\u202e"
    )
    assert not UNSAFE & set(line)
    json_line = JsonFormatter().format(record_of(HOSTILE))
    assert not UNSAFE & set(json_line) and json.loads(json_line)["message"] == HOSTILE
    assert text_of(record_of("Grüße, 世界 🌊", logging.INFO)) == "octavo: Grüße, 世界 🌊"


def test_no_exception_forges_a_line() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record = record_of("it failed", logging.ERROR, (ValueError, error, error.__traceback__))
    first, *rest = text_of(record).split("\n")
    assert first == "octavo: error: it failed" and len(rest) >= 4
    assert all(line.startswith("octavo: | ") for line in rest) and any(
        "| octavo: error: forged" in line for line in rest
    )
    assert not (UNSAFE - {"\n"}) & set("".join(rest))
    (line,) = JsonFormatter().format(record).splitlines()
    assert HOSTILE in json.loads(line)["exception"]


def test_what_is_said_is_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_printed_becomes_records() -> None:
    lines: list[tuple[str, str]] = []
    stream = LogStream(None)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("octavo.stderr").addHandler(handler)
    try:
        print("octavo: ready\n\nocta", file=stream, end="")
        print("vo: error: no\nWarning: plain \nand the rest", file=stream)
    finally:
        logging.getLogger("octavo.stderr").removeHandler(handler)
    assert lines == [("INFO", "ready"), ("ERROR", "no"), ("INFO", "Warning: plain"), ("INFO", "and the rest")]


SPOKEN = """
import logging, sys, threading, warnings
from octavo.observe import logs
logs.install(logging.WARNING, sys.argv[1])
logging.getLogger("uvicorn.error").error("of a library")
warnings.warn("of Python")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
class Bad:
    def __del__(self): raise OSError("ignored")
Bad()
print("printed", file=sys.stderr)
raise KeyError("the last")
"""


@pytest.mark.parametrize("kind", ["text", "json"])
def test_one_format_for_all_that_a_process_says(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", SPOKEN, kind], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    lines = done.stderr.splitlines()
    if kind == "json":
        found = [json.loads(line) for line in lines]
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in found)
        spoken = " ".join(line["message"] + line.get("exception", "") for line in found)
    else:
        assert all(re.match(f"({TIME})?octavo: ", line) for line in lines), lines
        spoken = " ".join(lines)
    for words in ("of a library", "UserWarning: of Python", "thread worker ends", "ZeroDivisionError", "ignored", "printed",
                  "this process ends: KeyError", "KeyError: 'the last'"):  # fmt: skip
        assert words in spoken, (words, lines)
