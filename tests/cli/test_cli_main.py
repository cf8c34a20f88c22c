"""The command line as a person uses it: one line and a code for every mistake, a quick start, a conversation with a URL.
The server here is a few lines of standard library that speak OpenAI's API."""

import http.server
import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main, version
from octavo.cli.flags import Parser
from octavo.errors import ConfigError, EngineDead


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the words of the request, one chunk a word; keeps every body."""

    bodies: list[dict[str, Any]]
    key = ""

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "echo"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.key and self.headers["Authorization"] != f"Bearer {self.key}".encode().decode("latin-1"):
            error = {
                "error": {"message": "the key is wrong", "type": "authentication_error", "param": None, "code": None}
            }
            return self._answer(401, json.dumps(error).encode())
        chat = "messages" in body
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        chunks = [{"delta": {"content": word}} if chat else {"text": word} for word in text.split(" ")]
        events = [json.dumps({"choices": [chunk]}) for chunk in chunks]
        if text == "broken":
            events = [json.dumps({"error": {"message": "it broke"}})]
        elif text != "cut":
            events.append("[DONE]")
        self._answer(200, "".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Echo]]]:
    handler = type("Handler", (Echo,), {"bodies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", handler
        listening.shutdown()
        thread.join()


def octavo(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", *argv]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)


# ── errors and codes ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serv"], "COMMAND: 'serv' is not one of serve, chat, run, pull, list, rm, ps, complete, top, scale, bench, run-batch, doctor, replay, plan, help, completion; did you mean serve?"),
        (["stop", "m"], "there is no command stop: octavo ps names the server's process, and kill PID stops it"),
        (["version"], "there is no command version: octavo --version does that"),
        (["top", "--port", "9000"], "unknown flag --port: name the server with --url http://HOST:PORT"),
        (["scale", "0"], "the number of replicas must be between 1 and 64, got 0"),
        (["scale", "99", "--restart"], "the number of replicas must be between 1 and 64, got 99"),
        (["run", "m", "--think=true"], "--think is not offered: requests send think to /api/chat, or reasoning_effort to /v1/chat/completions"),
        (["run", "m", "--verbos"], "unknown flag --verbos"),
        (["bench", "latncy"], "KIND: 'latncy' is not one of latency, throughput, serve; did you mean latency?"),
        (["serve", "--port", "70000"], "--port must be between 0 and 65535, got 70000"),
        (["complete", ""], "the prompt is empty: give a text to continue"),
        (["chat", "--api-key", "k"], "--api-key is for a server: give its --url as well"),
        (["chat", "--url", "ftp://x"], "--url 'ftp://x' is not a URL: give http://HOST:PORT"),
        (["chat", "--url", "http://127.0.0.1:abc"], "--url 'http://127.0.0.1:abc' is not a URL: give http://HOST:PORT"),
        (["chat", "--url", "http://[::1"], "--url 'http://[::1' is not a URL: give http://HOST:PORT"),
        (["chat", "--url", "x", "--api-key", "a\nb"], "the API key holds a line break or another control character: check --api-key and OCTAVO_API_KEY"),
        (["chat", "--url", "localhost:1", "--dtype", "float32"], "--dtype has no effect on the server at --url: leave it out"),
        (["complete", "x", "--temperature", "-1"], "--temperature must be between 0 and 100, got -1.0"),
        (["bench", "serve", "--goodput", "ttft"], "--goodput: 'ttft' is not a service level: give NAME:MILLISECONDS, NAME being ttft, tpot, e2el"),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts: '0' must be at least 1"),
        (["bench", "serve", "--prompt-kind", "ids", "--endpoint", "chat"], "--prompt-kind ids needs --endpoint completions: a chat message is text"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_code_2(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main.main(argv)
    except SystemExit as ended:  # argparse exits this way
        code = int(ended.code or 0)
    assert capsys.readouterr().err == f"octavo: error: {line}\n"
    assert code == 2


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("change\n  this"), 2), (EngineDead("it died"), 1), (KeyboardInterrupt(), 130)]
)
def test_every_way_to_end_has_its_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(_: Any) -> int:
        raise error

    parser = Parser()
    parser.set_defaults(run=fail)
    monkeypatch.setattr(main, "build_parser", lambda: parser)
    assert main.main([]) == code
    assert capsys.readouterr().err.count("\n") == (0 if code == 130 else 1)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert main.main(["bench"]) == 2
    assert "throughput" in capsys.readouterr().err


def test_the_usage_of_a_command_with_many_flags_names_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for command, usage in (
        ("serve", "[MODEL ...] [flags]"),
        ("run-batch", "[INPUT] [OUTPUT] [flags]"),
        ("rm", "[-h] NAME [NAME ...]"),
    ):
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: octavo {command} {usage}\n")


def test_version_and_a_quick_help() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    first, *details = octavo("--version").stdout.splitlines()
    assert first == f"octavo {project['version']}"
    assert [line.split()[0] for line in details] == ["source", "python", "torch", "triton", "kernels"]
    assert f"torch    {importlib.metadata.version('torch')}" in "\n".join(details)
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "complete" in octavo("--help").stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5  # of CPU time, which neighbours do not change much; 0.05 s on an idle machine


def test_the_source_of_an_installation_is_named(tmp_path: Path) -> None:
    package = tmp_path / "octavo"
    package.mkdir()
    assert version.source(package) == f"files in {package}"
    about = {"commit": "abc1234", "date": "2026-11-17", "compiler": "g++ 12.2.0"}
    (package / "build_info.json").write_text(json.dumps(about))
    assert version.source(package) == "wheel of commit abc1234, built 2026-11-17 with g++ 12.2.0"
    (package / "build_info.json").write_text("{")
    assert version.source(package) == "a package whose build_info.json is damaged"


def test_python_m_octavo_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "octavo", "serv"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean serve?" in done.stderr


def test_a_closed_pipe_ends_it_quietly(server: tuple[str, type[Echo]]) -> None:
    text = " ".join("word" for _ in range(50000))
    command = (
        f'{sys.executable} -m octavo.cli.main complete - --url {server[0]} | head -c 10; echo "${{PIPESTATUS[0]}}"'
    )
    done = subprocess.run(["bash", "-c", command], input=text, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "wordwordwo141\n"


@pytest.mark.parametrize(
    ("encoding", "read", "written"), [("ascii", "caf\ufffd\ufffd", b"caf??"), ("latin-1", "café", b"caf\xe9")]
)
def test_a_terminal_without_utf8_ends_nothing(
    server: tuple[str, type[Echo]], encoding: str, read: str, written: bytes
) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "complete", "-", "--url", server[0]]
    given = "café".encode("utf-8" if encoding == "ascii" else encoding)
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, input=given, capture_output=True, timeout=60, env=environment)
    assert done.returncode == 0 and done.stderr == b""
    assert server[1].bodies[-1]["prompt"] == read and done.stdout.strip() == written


# ── chat and complete against a URL ─────────────────────────────────────────────────────────────────


def test_complete_prints_the_completion_and_nothing_else(server: tuple[str, type[Echo]]) -> None:
    url, handler = server
    done = octavo(
        "complete",
        "-",
        "--url",
        url,
        "--temperature",
        "0",
        "--seed",
        "7",
        "--stop",
        "a",
        "--stop",
        "b",
        stdin="one two",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("onetwo", "", 0)
    assert handler.bodies == [
        {"model": "echo", "stream": True, "max_tokens": 256, "temperature": 0.0, "stop": ["a", "b"], "seed": 7, "prompt": "one two"}
    ]  # fmt: skip


def test_chat_keeps_the_conversation(server: tuple[str, type[Echo]]) -> None:
    url, handler = server
    done = octavo(
        "chat", "--url", f"{url}/v1/", "--model", "mine", "--system", "Be brief.", stdin="hello you\n\nagain\n"
    )
    assert (done.stdout, done.returncode) == ("helloyou\nagain\n", 0)
    assert handler.bodies[1] == {
        "model": "mine",
        "stream": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello you"},
            {"role": "assistant", "content": "helloyou"},
            {"role": "user", "content": "again"},
        ],
    }


@pytest.mark.parametrize(("text", "message"), [("broken", "it broke"), ("cut", "ended the response early")])
def test_a_failed_turn_is_reported_and_forgotten(text: str, message: str, server: tuple[str, type[Echo]]) -> None:
    url, handler = server
    done = octavo("chat", "--url", url, stdin=f"{text}\nhello\n")
    assert message in done.stderr and done.returncode == 1
    assert done.stdout.endswith("hello\n")
    assert handler.bodies[1]["messages"] == [{"role": "user", "content": "hello"}]


def test_the_servers_refusal_is_passed_on(server: tuple[str, type[Echo]]) -> None:
    url, handler = server
    handler.key = "right"
    refused = octavo("complete", "x", "--url", url, "--api-key", "wrong")
    assert refused.stderr == f"octavo: error: {url}/v1/completions answered 401: the key is wrong\n"
    assert refused.returncode == 1
    assert octavo("complete", "x", "--url", url, "--api-key", "right").stdout == "x"


def test_a_key_beyond_ascii_is_sent_in_utf8(server: tuple[str, type[Echo]]) -> None:
    url, handler = server
    handler.key = "clé-日"
    done = octavo("complete", "x", "--url", url, "--api-key", handler.key)
    assert (done.stdout, done.stderr, done.returncode) == ("x", "", 0)


def test_nobody_listens() -> None:
    done = octavo("chat", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: error: cannot reach http://127.0.0.1:9/v1: ")


def _answering(answers: list[bytes]) -> tuple[str, threading.Thread]:
    """Start a server that sends each connection the next of these bytes and closes it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # a close with bytes unread would be a reset
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}", thread


def _whole(body: bytes, head: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"%s\r\nContent-Length: %d\r\n\r\n%s" % (head, len(body), body)


MODELS = _whole(b'{"data": [{"id": "m"}]}')
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "so"}]}\n\n'


@pytest.mark.parametrize(
    ("answers", "message", "printed"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], "{url}/v1 does not speak HTTP: SSH-2.0-OpenSSH", ""),
        ([b""], "cannot reach {url}/v1: Remote end closed connection without response; is the server running?", ""),
        ([_whole(b"<html>")], "{url}/v1/models lists no model: is this an OpenAI-compatible server?", ""),
        ([_whole(b"[]")], "{url}/v1/models lists no model: is this an OpenAI-compatible server?", ""),
        ([_whole(b'{"data": []}')], "{url}/v1 serves no model", ""),
        ([MODELS[:-5]], "{url}/v1 ended the response early: IncompleteRead(18 bytes read, 5 more expected)", ""),
        (
            [_whole(b"gone", b"HTTP/1.1 502 Bad Gateway")[:-4]],
            "{url}/v1/models answered 502: Bad Gateway",
            "",
        ),
        (
            [MODELS, STREAM + b"%x\r\n%s\r\n" % (len(EVENT), EVENT) + b"ff\r\ndata: {"],
            "{url}/v1 ended the response early",
            "so",
        ),
        ([MODELS, _whole(b"data: {oops\n\n")], "{url}/v1 sent an event that is not a JSON object: b'{{oops'", ""),
        ([MODELS, _whole(b"data: 5\n\n")], "{url}/v1 sent an event that is not a JSON object: b'5'", ""),
    ],
    ids=["no http", "closed", "html", "list", "no model", "models cut", "refusal cut", "stream cut", "no json", "number"],
)  # fmt: skip
def test_a_broken_answer_is_one_line(
    answers: list[bytes], message: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, thread = _answering(answers)
    assert main.main(["complete", "x", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert err.strip().startswith(f"octavo: error: {message.format(url=url)}") and err.count("\n") == 1
    assert out == printed
    thread.join(10)
