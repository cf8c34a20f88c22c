"""`octavo top` against a server that sends three states: what it draws, and the one line for a missing server."""

import base64
import http.server
import json
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.cli.top_screen import Screen
from tests.cli.pseudo_terminal import Terminal


def state(at: float, tokens: int, **more: Any) -> dict[str, Any]:
    totals = dict.fromkeys(
        ("prompt_tokens", "cached_tokens", "finished", "preemptions", "first_tokens", "first_token_seconds"), 0
    )
    return {
        "time": at,
        "step": 5,
        "totals": {**totals, "steps": tokens, "generation_tokens": tokens, "busy_seconds": at / 2, "token_gaps": tokens,
                   "token_gap_seconds": tokens * 0.02},
        "num_waiting": 0,
        "rows": [],
        "waiting": [],
        "blocked_by": None,
        "advice": "",
        "num_pages": 8,
        "page_size": 16,
        "max_rows": 4,
        "max_step_tokens": 64,
        "num_host_pages": 2,
        "num_host_pages_used": 0,
        "num_shared_pages": 1,
        "num_cached_pages": 1,
        "num_free_pages": 4,
        "ended": [],
        "pages": "",
        **more,
    }  # fmt: skip


PAST = {
    "time": 100.0,
    "interval": 1,
    "since": 10.0,
    "points": [[97.0, *[0] * 3, 30.0, *[0] * 11], [98.0, *[0] * 3, 60.0, *[0] * 11]],
}
PAGES = base64.b64encode(array("H", [0, 1, 2, 9, 9, 0, 0, 0]).tobytes()).decode()
STATES = [
    state(100.0, 0, pages=PAGES),
    state(101.0, 50, changes=[[5, [12, 12]]], rows=[[3, "my-request", 1, False, 1, 40, 30, 60, 3, 9]], num_waiting=1,
          waiting=[["other", "rows", 1.25, 10, True, 0]], advice="1 request waits: all 4 rows are in use."),
    state(102.0, 100, ended=[{"number": 1, "id": "my-request", "status": 200, "seconds": 2.5, "prompt_tokens": 30, "output_tokens": 30,
                              "preemptions": 0, "stages": {"decode": 2.25, "flush": 0.001}}]),
]  # fmt: skip


class _Feed(http.server.BaseHTTPRequestHandler):
    holds = threading.Event()  # if set, the feed stays open and silent after its last state

    def do_GET(self) -> None:
        allowed = self.headers.get("authorization") == "Bearer secret"
        self.send_response(200 if self.path.startswith("/v1/live") and allowed else 401)
        self.end_headers()
        if "history" in self.path:
            self.wfile.write(json.dumps(PAST).encode())
            return
        with suppress(ConnectionError):  # --once disconnects before the end
            for state in STATES:
                self.wfile.write(b"data: " + json.dumps(state).encode() + b"\n\n")
        while self.holds.is_set():
            time.sleep(0.02)

    def log_message(self, *arguments: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Feed)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        _Feed.holds.clear()
        self.shutdown()
        self.server_close()


@pytest.fixture
def url() -> Iterator[str]:
    server = _Server()
    yield f"http://127.0.0.1:{server.server_port}"
    server.stop()


def test_one_look(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, "--api-key", "secret", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("octavo top  1/4 rows  1 waiting  50 tokens/s"), "a rate needs two states"
    assert "·cS████·" in lines and "1 request waits: all 4 rows are in use." in lines
    assert "tokens/s ▅█   up to 60" in lines, "the past is the server's"


def test_a_line_for_each_look_where_there_is_no_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, "--api-key", "secret"]) == 1  # the server ended the feed
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and "50 tokens/s" in out.splitlines()[2] and "device 50%" in out.splitlines()[2]
    assert "ended the response early" in err and err.count("\n") == 1


def test_rows_queue_and_ends_are_drawn_within_the_terminal() -> None:
    screen = Screen()
    for state in STATES[:2]:
        screen.take(state)
    lines = screen.draw(100, 40)
    text = "\n".join(lines)
    assert "my-request#1" in text and "decode +1" in text and "40/60" in text
    assert "other" in text and "waits for a free row" in text and "1.2 s  preempted" in text
    assert "1 request waits: all 4 rows are in use." in lines and "·cS████·" in lines
    assert "between tokens 20 ms" in text and "first token –" in text
    screen.take(STATES[2])
    text = "\n".join(screen.draw(100, 40))
    assert "2.50 s  30 → 30  decode 2.25" in text and "flush" not in text
    for width, height in ((20, 5), (200, 100), (1, 1)):
        drawn = screen.draw(width, height)
        assert len(drawn) < max(2, height) and all(len(line) <= width for line in drawn)


@pytest.mark.parametrize("arguments", [["--api-key", "wrong"], []])
def test_a_wrong_key_is_one_line(url: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, *arguments]) == 1
    assert "answered 401" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["top", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "is the server running?" in capsys.readouterr().err


def test_in_a_terminal_it_outlives_the_server_and_leaves_all_as_it_was() -> None:
    _Feed.holds.set()
    server = _Server()
    address = ("--url", f"http://127.0.0.1:{server.server_port}")
    terminal = Terminal("top", *address, size=(100, 40), environment={"OCTAVO_API_KEY": "secret"})
    wide = terminal.until(lambda screen: "2.50 s" in screen)
    assert (
        wide.splitlines()[0].startswith("octavo top (q quits)  0/4 rows  0 waiting  50 tokens/s") and "·cS████·" in wide
    )
    assert terminal.raw.startswith("\x1b[?1049h\x1b[?25l") and "\x1b[38;5;220mS" in terminal.raw
    terminal.resize(34, 20)
    server.stop()
    gone = terminal.until(lambda screen: "No connection since" in screen)
    assert all(len(line) <= 34 for line in gone.splitlines()) and len(gone.splitlines()) < 20
    assert "octavo top (q quits)  0/4 rows" in gone.splitlines(), "figures are not cut but continued"
    _Feed.holds.set()
    server = _Server(server.server_port)
    back = terminal.until(lambda screen: "Idle: there are no requests." in screen)
    assert "No connection" not in back and back.count("my-request") <= 1
    terminal.press("q")
    assert terminal.close() == (0, "")
    server.stop()


@pytest.mark.parametrize("key", ["q", "Q", "\x04"])
def test_a_key_quits_at_once_also_while_the_server_is_silent(key: str) -> None:
    _Feed.holds.set()
    server = _Server()
    terminal = Terminal("top", "--url", f"http://127.0.0.1:{server.server_port}", "--api-key", "secret", size=(80, 24))
    terminal.until(lambda screen: "2.50 s" in screen)
    began = time.monotonic()
    terminal.press(key)
    assert terminal.close() == (0, "")
    assert time.monotonic() - began < 5, "the feed is silent for ten seconds before it counts as lost"
    server.stop()


def test_a_key_that_became_wrong_is_the_end(url: str) -> None:
    terminal = Terminal("top", "--url", url, "--api-key", "wrong", size=(80, 24))
    code, said = terminal.close()
    assert code == 1 and "answered 401" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("miss", "differs_at", "said"),
    [
        ("new", 12, "30 → 30  8 cached, differs at token 12  decode 2.25"),
        ("evicted", None, "30 → 30  8 cached, more was evicted  decode 2.25"),
        ("new", None, "30 → 30  decode 2.25"),
        ("", None, "30 → 30  decode 2.25"),
    ],
)
def test_it_says_why_a_prompt_was_computed_again(miss: str, differs_at: int | None, said: str) -> None:
    screen = Screen()
    end = {**STATES[-1]["ended"][0], "cached_tokens": 8, "cache_miss": miss, "differs_at": differs_at}
    pages = base64.b64encode(array("H", [0, 1, 2, 9, 65535, 65534, 0, 0]).tobytes()).decode()
    kept = {"num_held_pages": 1, "num_loading_pages": 1, "num_tier_pages": 40}
    screen.take({**state(102.0, 100, pages=pages, ended=[end]), **kept})
    text = "\n".join(screen.draw(160, 60))
    assert said in text
    narrow = screen.draw(80, 60)
    if miss and said != "30 → 30  decode 2.25":  # the reason does not fit, and is not cut
        assert [line for line in narrow if line.endswith("30 → 30  decode 2.25")] and "cached," not in "".join(narrow)
    assert "h 1 of these held" in text and "l 1 loading" in text and "on disk 40" in text and "hl" in text


def test_the_replicas_of_a_fleet_have_a_line_each():
    totals = {"prompt_tokens": 100, "cached_tokens": 25}
    one = {"replica": 0, "status": "ready", "place": "cores 0-3", "num_rows": 2, "max_rows": 4, "num_waiting": 1,
           "waiting_seconds": 1.25, "num_pages": 8, "num_free_pages": 4, "num_cached_pages": 1, "totals": totals}  # fmt: skip
    lost = {**one, "replica": 1, "status": "restarting", "place": "", "totals": None}
    screen = Screen()
    screen.take(state(100.0, 0, pages=PAGES, lanes=[], replicas=[one, lost]))
    lines = screen.draw(120, 40)
    assert "replica 0 ready  2/4 rows  1 waiting  1.2 s of work  3/8 pages  25% of prompts cached  cores 0-3" in lines
    assert "replica 1 restarting" in lines
    screen.take(state(101.0, 0, lanes=[], replicas=[{**one, "replica": number} for number in range(9)]))
    assert "and 7 more replicas" in screen.draw(120, 18)
