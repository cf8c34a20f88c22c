"""`octavo chat`: Markdown in the terminal, commands, several lines, saved conversations, and Ctrl-C, once in a real terminal."""

import http.server
import io
import json
import os
import random
import re
import signal
import ssl
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pytest

from octavo.cli.chat import RemoteModel
from octavo.cli.conversation import GREETING, HELP, Conversation, Keyboard, converse
from octavo.cli.models import OLLAMA_SAMPLING
from octavo.cli.terminal_markdown import BOLD, CODE, RESET, TerminalMarkdown, TerminalText, clean
from octavo.errors import EngineUnavailable, RequestFailed
from octavo.server.dialects.ollama.request import DEFAULTS
from tests.certificates import make_certificates
from tests.cli.pseudo_terminal import Terminal

# ── Markdown ────────────────────────────────────────────────────────────────────────────────────────

TEXT = """# Title with **bold**
Some *italic*, **bold**, ***both***, `co*de`, 2 * 3 and 2 ** 3, a*b, snake_case.
- one
* two **x**
  - nested
1. first
> quote

```python
def f(x):
    return x * 2  # **no**
```
---
| a | bb |
|---|:--:|
| long cell | `x` |
after **unclosed
~~~
tilde"""
SHOWN = """Title with bold
Some italic, bold, both, co*de, 2 * 3 and 2 ** 3, a*b, snake_case.
• one
• two x
  • nested
1. first
│ quote

┌─ python
def f(x):
    return x * 2  # **no**
└─
────────────────────────────────────────
a         │ bb
──────────┼───
long cell │ x
after unclosed
┌─
tilde"""


def painted(pieces: list[str]) -> str:
    painter = TerminalMarkdown()
    return "".join([painter.feed(piece) for piece in pieces]) + painter.finish()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_markdown_is_shown_the_same_however_it_is_cut() -> None:
    assert plain(painted([TEXT])) == SHOWN
    for seed in range(50):
        draw, pieces, at = random.Random(seed), [], 0
        while at < len(TEXT):
            size = draw.randint(1, 7)
            pieces.append(TEXT[at : at + size])
            at += size
        assert plain(painted(pieces)) == SHOWN, seed


PROSE = "Some **bold words** and `code` that go on, with a-rather-hyphenated-word in them. " * 3
WIDE = "東京は日本の首都です。人口は約千四百万人で、世界最大級の都市圏です。"


def wrapped(
    pieces: list[str], columns: int, kind: type[TerminalMarkdown] | type[TerminalText] = TerminalMarkdown
) -> str:
    painter = kind(lambda: columns)
    return plain("".join([painter.feed(piece) for piece in pieces]) + painter.finish())


@pytest.mark.parametrize("columns", [30, 40, 79])
def test_lines_are_broken_between_words(columns: int) -> None:
    text = f"{PROSE}\n- {PROSE}\n"
    lines = wrapped([text], columns).split("\n")
    words = plain(painted([text])).split()
    assert " ".join(lines).split() == words, "no word is cut, lost or repeated"
    assert all(len(line) < columns for line in lines) and len(lines) >= len(text) // columns
    for seed in range(20):
        draw, pieces, at = random.Random(seed), [], 0
        while at < len(text):
            pieces.append(text[at : (at := at + draw.randint(1, 9))])
        assert wrapped(pieces, columns).split("\n") == lines, f"seed {seed}"
    assert wrapped([PROSE], columns, TerminalText).replace("\n", " ").split() == PROSE.split()


def test_wide_characters_take_two_columns() -> None:
    lines = wrapped([*WIDE], 21).split("\n")
    assert "".join(lines) == WIDE and all(2 * len(line) < 21 for line in lines) and len(lines) == 4
    assert all(line[0] not in "、。" for line in lines), "no line begins with a full stop"
    assert wrapped(["e\u0301" * 9 + " x"], 12) == "e\u0301" * 9 + " x", "an accent takes no column"


def test_code_tables_and_long_words_stay_as_they_are() -> None:
    long = "https://example.com/" + "x" * 50
    code = "    return a  +  b  # a comment that is longer than the line"
    table = "| a column of many words | another column |\n|---|---|\n| x | y |"
    shown = wrapped([f"See {long} now\n```py\n{code}\n```\n{table}\n  - deep\n"], 30)
    assert f"See {long}" in shown and code in shown.split("\n") and "\n  • deep" in shown
    assert "a column of many words │ another column" in shown
    text = f"one two three four five six seven\n```py\n{code}\n```\none two three four five six seven"
    broken = "one two three four five six\nseven"
    for pieces in ([text], [*text]):
        assert wrapped(pieces, 30, TerminalText) == f"{broken}\n```py\n{code}\n```\n{broken}"
    assert wrapped(["\x1b]0;title\x07a\rb"], 30, TerminalText) == "]0;titleab", "nor a control character"


def test_a_window_may_change_its_size() -> None:
    columns = [40]
    painter = TerminalMarkdown(lambda: columns[0])
    first = painter.feed("one two three four five six ")
    columns[0] = 12
    assert plain(first + painter.feed("seven eight nine\n")) == "one two three four five six\nseven eight\nnine\n"


def test_styles_end_with_their_line_and_with_the_answer() -> None:
    assert painted(["**a** b"]) == f"{RESET}{BOLD}a{RESET} b"
    assert painted(["`a` b"]) == f"{CODE}a{RESET} b"
    for open_ended in ("**a", "`a", "# a", "> a", "*a", "```\na", "| a"):
        assert painted([open_ended, "\n", "b"]).endswith(("b", RESET)), open_ended
        text = painted([open_ended])
        assert text.count("\x1b") % 2 == 0 or text.endswith(RESET), open_ended


def test_what_needs_no_decision_is_written_at_once() -> None:
    painter = TerminalMarkdown()
    assert painter.feed("Hel") == "Hel" and painter.feed("lo wor") == "lo wor"
    assert painter.feed("*") == "" and painter.feed(" ") == "* "


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("\x1b[2Ja", "[2Ja"),
        ("\x1b]0;title\x07b", "]0;titleb"),
        ("\x9b31mc", "31mc"),
        ("a\r\u202eb\x7f", "ab"),
        ("ä\t日\n", "ä\t日\n"),
    ],
)
def test_no_control_character_reaches_the_terminal(text: str, kept: str) -> None:
    assert clean(text) == kept
    assert plain(painted([text])).rstrip("\n") == kept.rstrip("\n")


# ── the conversation ────────────────────────────────────────────────────────────────────────────────


class Echo:
    """Answers with the number of messages and the last one; raises what it is told to raise after that."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.is_closed = False

    def check_chat(self) -> None:
        pass

    def chat(self, messages: list[dict[str, str]]) -> Iterator[str]:
        try:
            yield f"{len(messages)}: "
            if self.failure is not None:
                raise self.failure
            yield messages[-1]["content"]
        finally:
            self.is_closed = True

    def complete(self, prompt: str) -> Iterator[str]:
        raise AssertionError


class Talk:
    def __init__(self, system: str | None = None) -> None:
        self.model, self.out = Echo(), io.StringIO()
        self.it = Conversation(self.model, system, self.out, is_styled=False)

    def say(self, line: str) -> str:
        """What is printed for a line."""
        self.out.seek(0)
        self.out.truncate()
        if line.startswith("/"):
            assert self.it.run_command(line)
        else:
            self.it.ask(line)
        return self.out.getvalue()


def test_questions_answers_and_the_system_message() -> None:
    talk = Talk("be brief")
    assert talk.say("one") == "2: one\n" and talk.say("two") == "4: two\n"
    assert talk.say("/system") == "system message: be brief\n"
    assert talk.say("/system be long") == "system message: be long\n"
    assert talk.it.messages[0] == {"role": "system", "content": "be long"} and len(talk.it.messages) == 5
    assert talk.say("/clear") == "a new conversation\n" and talk.say("three") == "2: three\n"
    assert talk.say("/system clear") == "there is no system message\n" and talk.say("four") == "3: four\n"


def test_retry_asks_the_last_question_again() -> None:
    talk = Talk()
    assert talk.say("/retry") == "there is no question yet\n"
    talk.say("one")
    talk.say("two")
    assert talk.say("/retry") == "3: two\n" and len(talk.it.messages) == 4
    talk.model.failure = RequestFailed("no")
    before = list(talk.it.messages)
    talk.say("/retry")
    assert talk.it.messages == before, "a retry that fails loses nothing"


def test_an_interrupt_stops_the_answer_and_keeps_what_came() -> None:
    talk = Talk()
    talk.model.failure = KeyboardInterrupt()
    assert talk.say("go on") == "1: \n"
    assert talk.it.messages == [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "1: "}]
    assert talk.model.is_closed, "the request is ended"


def test_a_failed_question_does_not_stay(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk()
    talk.model.failure = RequestFailed("too\nlong")
    talk.say("x")
    assert talk.it.messages == [] and capsys.readouterr().err == "\noctavo: error: too long\n"


def test_a_conversation_is_saved_and_continued(tmp_path: Path) -> None:
    talk, path = Talk("s"), tmp_path / "talk.json"
    talk.say("one")
    assert talk.say(f"/save {path}") == f"saved 3 messages in {path}\n"
    assert talk.say(f"/save {path}").startswith("saved"), "a saved conversation may be replaced"
    other = Talk()
    assert other.say(f"/load {path}") == f"loaded 3 messages from {path}\n" and other.say("two") == "4: two\n"
    before = list(other.it.messages)
    for text in (
        "",
        "[]",
        '{"messages": 3}',
        '{"messages": [{"role": "x", "content": ""}]}',
        "[" * 10**5,
        '{"messages": [1]}',
    ):
        (tmp_path / "bad").write_text(text)
        assert "is not a saved conversation" in other.say(f"/load {tmp_path / 'bad'}")
        assert "another file" in other.say(f"/save {tmp_path / 'bad'}")
    assert "No such file" in other.say("/load /no/such") and "cannot save" in other.say("/save /no/such/folder/x")
    assert other.say("/save") == "give a file: /save FILE\n" and "no command /dance" in other.say("/dance")
    assert "octavo run MODEL --temperature 0" in other.say("/set parameter temperature 0")
    assert "octavo doctor MODEL" in other.say("/show info")
    assert "/retry" in other.say("/help") and other.it.messages == before
    assert not other.it.run_command("/exit") and not other.it.run_command("/bye")


def all_of(screen: BinaryIO) -> bytes:
    """What was written to a terminal that is closed. One read returns what has arrived by then."""
    parts = b""
    try:
        while part := screen.read(8192):
            parts += part
    except OSError:  # EIO: the end
        pass
    return parts


@pytest.mark.parametrize("columns", [12, 30, 80])
def test_what_octavo_says_is_wrapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    system = "answer in words that a child of five knows, and in no more than three sentences"
    with os.fdopen(theirs, "w", buffering=1) as terminal, os.fdopen(ours, "rb", buffering=0) as screen:
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
        monkeypatch.setenv("NO_COLOR", "1")
        for name in ("stdin", "stdout", "stderr"):
            monkeypatch.setattr(sys, name, terminal)
        lines = iter(["/help", "/system", "/exit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        assert converse(Echo(), system) == 0
        terminal.close()
        shown = all_of(screen).decode()
    assert " ".join(shown.split()) == " ".join(f"{GREETING} {HELP} system message: {system}".split())
    longest = max(len(word) for word in shown.split())
    for line in shown.split("\r\n"):
        assert len(line) < max(columns, longest + columns // 3 + 1), line
    if columns == 80:
        assert "\r\n" + " " * 18 + "removes it\r\n" in shown, "an explanation goes on below its beginning"


def test_questions_of_several_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = iter(['"""one', "two", 'three"""', "a\\", "b", '"""x"""', "last"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    keyboard = Keyboard(is_styled=False, history=None)
    assert [keyboard.read() for _ in range(4)] == ["one\ntwo\nthree", "a\nb", "x", "last"]


class Listed(http.server.BaseHTTPRequestHandler):
    """A server of two models, of which one has an opinion about its temperature. It keeps what it is asked."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        cards = [
            {"id": "calm", "default_sampling": {"temperature": 0.3}},
            {"id": "silent", "default_sampling": {}},
            {"id": "foreign"},
        ]
        self._answer(json.dumps({"data": cards}).encode())

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"data: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_run_samples_as_ollama_does_where_the_model_says_nothing() -> None:
    assert OLLAMA_SAMPLING == DEFAULTS
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for name, given, sent in (
            ("silent", {}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}),
            ("silent", {"temperature": 0.0}, {"temperature": 0.0, "top_k": 40, "top_p": 0.9}),
            ("calm", {}, {"top_k": 40, "top_p": 0.9}),
            ("foreign", {}, {}),
        ):
            model = RemoteModel(f"http://127.0.0.1:{server.server_address[1]}", name, "", given)
            model.sample_by_default(OLLAMA_SAMPLING)
            assert list(model.chat([{"role": "user", "content": "x"}])) == []
            asked = Listed.asked[-1]
            assert {key: asked[key] for key in asked if key not in ("model", "stream", "messages")} == sent, name
    finally:
        server.shutdown()
        server.server_close()


def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server, made.server_key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listed)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.raises(
            EngineUnavailable, match=r"certificate that is not trusted here \(.+\): name its file in SSL_CERT_FILE"
        ):
            RemoteModel(url, "", "", {})
        monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
        RemoteModel(url, "", "", {})
    finally:
        server.shutdown()
        server.server_close()


# ── in a terminal ───────────────────────────────────────────────────────────────────────────────────


class Slow(http.server.BaseHTTPRequestHandler):
    """A server that says **one** word after another, until its client goes."""

    protocol_version = "HTTP/1.1"
    gone = threading.Event()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "slow"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for number in range({"on": 1000, "some": 60}.get(question, 1)):
                text = f"**word{number}** "
                self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")
                self.wfile.flush()
                time.sleep(0.01)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.gone.set()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Children get SIGINT and SIGHUP, also where the tests run in the background of a shell or under nohup, which have them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGHUP, before[1])


def test_ctrl_c_stops_the_answer_and_not_the_conversation(interrupts: None, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    terminal = Terminal("chat", "--url", url, size=(80, 24), environment={"OCTAVO_CACHE": str(tmp_path)})
    terminal.screen = lambda: terminal.raw  # type: ignore[method-assign] # it scrolls
    try:
        terminal.until(lambda text: "> " in text)
        terminal.press("on\n")
        terminal.until(lambda text: "word3" in text)
        terminal.process.send_signal(signal.SIGINT)  # what Ctrl-C sends
        assert Slow.gone.wait(20), "the request is ended"
        terminal.press("again\n")
        terminal.until(
            lambda text: text.rstrip().endswith("> ") or ("again\r\n" in text and "word0" in text.split("again\r\n")[1])
        )
        assert f"{BOLD}word0{RESET}" in terminal.raw and "**" not in terminal.raw
        terminal.press("/exit\n")
        code, _ = terminal.close()
        assert code == 0
        history = tmp_path / "chat_history"
        assert "again" in history.read_text() and history.stat().st_mode & 0o077 == 0
    finally:
        terminal.process.kill()
        server.shutdown()
        server.server_close()


def is_echoing(terminal: Terminal) -> bool:
    return bool(termios.tcgetattr(terminal.fd)[3] & termios.ECHO)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_keys_do_not_appear_in_an_answer_and_are_kept(interrupts: None, tmp_path: Path, ending: signal.Signals) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    terminal = Terminal("chat", "--url", url, size=(40, 24), environment={"OCTAVO_CACHE": str(tmp_path)}, controls=True)
    terminal.screen = lambda: plain(terminal.raw)  # type: ignore[method-assign] # it scrolls
    try:
        terminal.until(lambda text: "> " in text)
        terminal.press("some\n")
        terminal.until(lambda text: "word9" in text)
        assert not is_echoing(terminal)
        terminal.press("typed early")
        shown = terminal.until(lambda text: "word59" in text and text.rstrip().endswith("typed early"))
        answer = shown[shown.index("word0") :]
        assert answer.index("typed") > answer.index("word59"), "it is at the next prompt, and not in the answer"
        assert all(len(line) < 40 for line in answer.split("\r\n"))
        terminal.press("\x15on\n")  # Ctrl-U, and an answer without an end
        terminal.until(lambda text: "word99" in text)
        assert not is_echoing(terminal)
        if ending != signal.SIGINT:
            terminal.process.send_signal(ending)
        else:
            terminal.press("\x03")  # Ctrl-C: the terminal sends the signal
            terminal.until(lambda text: text.endswith("> "))
            terminal.press("/exit\n")
        assert terminal.process.wait(30) == (0 if ending == signal.SIGINT else -ending)
        assert is_echoing(terminal)
    finally:
        terminal.process.kill()
        terminal.close()
        server.shutdown()
        server.server_close()
