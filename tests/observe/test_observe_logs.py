"""Log lines reach their descriptor, or are lost and counted; nothing that happens to it holds up who logs."""

import json
import logging
import os
import subprocess
import sys

import pytest

from octavo.observe import logs
from octavo.observe.logs import JsonFormatter, LineHandler, LineWriter


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
