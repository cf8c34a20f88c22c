"""`bench serve` against a small scripted server: what it sends, times, counts and reports.
Times are compared with the server's own pauses, generously: the machine may be busy."""

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.cli.bench import report, serve
from octavo.cli.bench.http_stream import Client, Target
from octavo.cli.bench.sending import RequestResult, Sender, drive
from octavo.cli.bench.serve import is_good, judge
from octavo.cli.bench.workload import WORDS, Workload, id_prompts, poisson_arrivals, word_prompts
from octavo.errors import ConfigError

FIRST, GAP = 0.06, 0.02  # seconds the scripted server waits before the first and before each later token


class Scripted:
    """An OpenAI-compatible server on raw sockets. Words in the prompt choose its behaviour."""

    def __init__(self, framing: str = "chunked") -> None:
        self.framing = framing
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.connections = 0
        self.open_now = self.open_peak = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.headers.append(head.decode())
                length = re.search(rb"content-length: (\d+)", head.lower())
                body = await reader.readexactly(int(length[1])) if length else b""
                await self._answer(head, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET"):
            return self._whole(writer, 200, {"data": [{"id": "scripted"}]})
        request = json.loads(body)
        self.bodies.append(request)
        self.open_now += 1
        self.open_peak = max(self.open_peak, self.open_now)
        try:
            await self._stream(request, writer)
        finally:
            self.open_now -= 1

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chat = "messages" in request
        prompt = request["messages"][0]["content"] if chat else request["prompt"]
        if "REFUSE" in prompt:
            return self._whole(writer, 429, {"error": {"message": "the queue is full"}})
        if "VANISH" in prompt:
            return writer.transport.abort()
        frame = {"chunked": b"Transfer-Encoding: chunked", "close": b"Connection: close"}[self.framing]
        writer.write(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%s\r\n\r\n" % frame
        )
        await asyncio.sleep(3600 if "HANG" in prompt else FIRST)
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        num = request["max_tokens"]
        for index in range(num):
            if index:
                await asyncio.sleep(GAP)
            reason = "length" if index == num - 1 else None
            piece = {"delta": {"content": "é "}} if chat else {"text": "é "}
            # Two tokens to a chunk: a client that counted chunks would report half.
            if "return_token_ids" in request:  # a token without a text, and then three tokens to an event
                ids = [index] if index == 0 else list(range((index - 1) // 3 * 3 + 1, index + 1))
                if index % 3 == 0 or reason:
                    choice = {"text": "é" * bool(index), "token_ids": ids, "finish_reason": reason}
                    self._event(writer, {"id": "cmpl-1", "choices": [choice]})
            elif index % 2 == 0 or reason:
                self._event(writer, {"choices": [piece | {"finish_reason": reason}], "usage": None})
            if "BREAK" in prompt:
                return self._event(writer, {"error": {"message": "it broke"}}) or self._end(writer)
        if "NOUSAGE" not in prompt:
            size = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            self._event(writer, {"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": num}})
        self._send(writer, b"data: [DONE]\n\n")
        self._end(writer)

    def _event(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self._send(writer, b"data: " + json.dumps(body).encode() + b"\n\n")

    def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        # Split, so that an event never arrives as one piece.
        for part in (data[:9], data[9:]):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part) if self.framing == "chunked" else part)

    def _end(self, writer: asyncio.StreamWriter) -> None:
        if self.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        else:
            writer.close()


@asynccontextmanager
async def running(framing: str = "chunked") -> AsyncIterator[tuple[str, Scripted]]:
    scripted = Scripted(framing)
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", scripted
    server.close()


def arguments(url: str, *extra: str) -> argparse.Namespace:
    return main.build_parser().parse_args(["bench", "serve", "--base-url", url, "--output-len", "6", *extra])


async def send_all(url: str, prompts: list[Any], *extra: str, concurrency: int | None = None) -> list[RequestResult]:
    client = Client(Target.parse(url))
    sender = Sender(client, arguments(url, *extra), "scripted")
    try:
        return await drive(sender, Workload(prompts, [0.0] * len(prompts)), concurrency, lambda: None)
    finally:
        await client.close()


# ── one request ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("framing", ["chunked", "close"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_times_and_counts(framing: str, endpoint: str) -> None:
    async with running(framing) as (url, scripted):
        [result] = await send_all(url, ["one two three"], "--endpoint", endpoint, "--ignore-eos")
    assert result.error == ""
    assert (result.prompt_tokens, result.output_tokens, result.has_usage) == (3, 6, True)
    assert result.ttft is not None and result.latency is not None
    assert FIRST <= result.ttft < FIRST + 10
    assert FIRST + 5 * GAP <= result.latency < FIRST + 5 * GAP + 10
    assert len(result.gaps) == 3  # chunks after tokens 1, 3, 5 and 6
    assert result.tpot is not None and result.tpot == pytest.approx((result.latency - result.ttft) / 5)
    body = scripted.bodies[0]
    assert body.pop("messages", None) == (
        [{"role": "user", "content": "one two three"}] if endpoint == "chat" else None
    )
    assert body.pop("prompt", None) == (None if endpoint == "chat" else "one two three")
    assert body == {
        "model": "scripted",
        "max_tokens": 6,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_tokens_are_counted_by_their_ids() -> None:
    """The first has no text; the others come in events of three and of two."""
    async with running() as (url, _):
        [result] = await send_all(url, ["NOUSAGE"], "--extra-body", '{"return_token_ids": true}')
    assert (result.output_tokens, len(result.gaps), result.response_id) == (6, 5, "cmpl-1")
    assert [gap > 0 for gap in result.gaps] == [True, False, False, True, False]


async def test_without_usage_chunks_are_counted_and_said() -> None:
    async with running() as (url, _):
        results = await send_all(url, ["NOUSAGE"])
    assert results[0].output_tokens == 4
    figures = judge(results, {})
    assert figures["token_counts_from"] == "chunks"
    assert "counted in chunks" in serve.show(figures)


async def test_each_failure_is_counted_and_the_others_go_on() -> None:
    async with running() as (url, _):
        prompts = ["fine", "REFUSE", "VANISH", "BREAK", "HANG", "REFUSE", "fine too"]
        results = await send_all(url, prompts, "--timeout", "1")
    assert [bool(result.error) for result in results] == [False, True, True, True, True, True, False]
    figures = judge(results, {})
    assert figures["num_errors"] == 5
    assert figures["errors"]["HTTP 429: the queue is full"] == 2
    assert figures["errors"]["it broke"] == 1
    assert figures["errors"]["no end within 1 s"] == 1
    assert "2 × HTTP 429: the queue is full" in serve.show(figures)
    assert figures["output_tokens"] == 12


async def test_nobody_listens() -> None:
    [result] = await send_all("http://127.0.0.1:9", ["x"])
    assert result.error.startswith("ConnectionRefusedError")


# ── many requests ───────────────────────────────────────────────────────────────────────────────────


async def test_concurrency_is_bounded_and_connections_are_reused() -> None:
    async with running() as (url, scripted):
        results = await send_all(url, ["a"] * 12, concurrency=3)
    assert not any(result.error for result in results)
    assert scripted.open_peak == 3
    assert scripted.connections == 3


async def test_without_a_bound_all_are_open_at_once() -> None:
    async with running() as (url, scripted):
        await send_all(url, ["a"] * 12)
    assert scripted.open_peak == 12


async def test_a_connection_the_server_closed_meanwhile_is_replaced() -> None:
    async with running() as (url, scripted):
        client = Client(Target.parse(url))
        await client.get("/v1/models")
        client._idle[0]._writer.transport.abort()
        assert json.loads(await client.get("/v1/models"))["data"]
        assert scripted.connections == 2
        await client.close()


def test_arrivals_are_poisson_and_repeatable() -> None:
    arrivals = poisson_arrivals(4000, 50.0, seed=1)
    assert arrivals == poisson_arrivals(4000, 50.0, seed=1) != poisson_arrivals(4000, 50.0, seed=2)
    gaps = [b - a for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert arrivals[0] == 0.0 and mean == pytest.approx(1 / 50, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)
    assert poisson_arrivals(3, float("inf"), seed=1) == [0.0, 0.0, 0.0]


async def test_requests_leave_at_their_times() -> None:
    async with running() as (url, _):
        client = Client(Target.parse(url))
        load = Workload(["a", "b"], [0.0, 0.25])
        first, second = await drive(Sender(client, arguments(url), "m"), load, None, lambda: None)
        await client.close()
    assert 0.25 <= second.started - first.started < 10


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    words = [prompt.split() for prompt in word_prompts(5, 20, 30, seed=0)]
    assert all(len(prompt) == 50 and set(prompt) <= set(WORDS) for prompt in words)
    assert len({tuple(prompt[:30]) for prompt in words}) == 1
    assert len({tuple(prompt[30:]) for prompt in words}) == 5
    ids = id_prompts(5, 20, 30, vocab_size=512, seed=0)
    assert all(len(prompt) == 50 and min(prompt) >= 256 and max(prompt) < 512 for prompt in ids)
    assert len({tuple(prompt[:30]) for prompt in ids}) == 1
    assert ids == id_prompts(5, 20, 30, vocab_size=512, seed=0) != id_prompts(5, 20, 30, vocab_size=512, seed=1)


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────


def result(started: float, ttft: float, latency: float, tokens: int) -> RequestResult:
    return RequestResult(started, started + ttft, started + latency, [0.1], 10, tokens, True)


def test_figures_of_a_known_run() -> None:
    results = [result(100.0, 0.2, 1.2, 11), result(101.0, 0.4, 3.0, 27), RequestResult(100.5, error="no")]
    figures = judge(results, {"ttft": 300.0, "tpot": 100.5})
    assert figures["seconds"] == 4.0
    assert figures["requests_per_second"] == 0.5
    assert figures["output_tokens_per_second"] == 9.5
    assert figures["total_tokens_per_second"] == 14.5
    assert figures["goodput_requests_per_second"] == 0.25
    assert figures["ttft_ms"] == {"mean": 300.0, "p50": 300.0, "p90": 380.0, "p99": 398.0}
    assert figures["tpot_ms"]["p50"] == 100.0


def test_failures_are_part_of_the_time() -> None:
    timed_out = RequestResult(100.5, ended=110.0, error="no end within 9.5 s")
    figures = judge([result(100.0, 0.2, 1.0, 20), timed_out], {"ttft": 300.0})
    assert figures["seconds"] == 10.0
    assert figures["requests_per_second"] == figures["goodput_requests_per_second"] == 0.1
    assert figures["output_tokens_per_second"] == 2.0
    assert figures["e2el_ms"]["p99"] == 1000.0


async def test_a_failure_ends_when_it_fails() -> None:
    async with running() as (url, _):
        hung, broken = await send_all(url, ["HANG", "BREAK"], "--timeout", "0.5")
    assert 0.5 <= hung.ended - hung.started < 20
    assert (hung.ttft, hung.latency) == (None, None)
    assert broken.ttft is not None and FIRST <= broken.ttft <= broken.ended - broken.started
    assert broken.latency is None
    assert judge([hung, broken], {})["seconds"] >= 0.5


def test_goodput_needs_every_level() -> None:
    answer = result(0.0, 0.2, 1.2, 11)
    assert is_good(answer, {"ttft": 200.001, "tpot": 100.001, "e2el": 1200.001})
    assert not is_good(answer, {"ttft": 199.0})
    assert not is_good(answer, {"ttft": 300.0, "tpot": 99.0})
    assert not is_good(answer, {"e2el": 1199.0})
    assert not is_good(RequestResult(0.0, error="no"), {})


def test_a_run_where_all_fail_has_no_figures_and_no_crash() -> None:
    figures = judge([RequestResult(0.0, error="no")], {"ttft": 1.0})
    assert figures["ttft_ms"] is None and figures["requests_per_second"] == 0.0
    assert "1 failed" in serve.show(figures)


def test_a_key_is_not_written_down() -> None:
    said = report.facts(["octavo", "--api-key", "secret", "--api-key=secret", "--api_key", "secret", "--seed", "1"])[
        "command"
    ]
    assert said == ["octavo", "--api-key", "…", "--api-key=…", "--api_key", "…", "--seed", "1"]


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentiles(percent: float, value: float) -> None:
    assert report.percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


# ── the command ─────────────────────────────────────────────────────────────────────────────────────


async def command(url: str, *extra: str) -> int:
    call: Callable[[], int] = lambda: main.main(["bench", "serve", "--base-url", url, "--output-len", "3", *extra])  # noqa: E731
    running: Coroutine[Any, Any, int] = asyncio.to_thread(call)
    return await running


async def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    extra = ["--num-prompts", "4", "--input-len", "9", "--shared-prefix-len", "5", "--max-concurrency", "2"]
    async with running() as (url, scripted):
        code = await command(url, *extra, "--goodput", "ttft:5000", "--api-key", "secret", "--result", str(file))
    printed = capsys.readouterr().out
    assert code == 0
    assert f"scripted at {url} (completions)" in printed and "4 answered, 0 failed" in printed
    assert all("Authorization: Bearer secret" in head for head in scripted.headers)
    assert len(scripted.bodies) == 5  # one warm-up
    text = file.read_text()
    result = json.loads(text)
    assert "secret" not in json.dumps(result["settings"])
    assert result["figures"]["prompt_tokens"] == 4 * 14
    assert result["figures"]["output_tokens"] == 12
    assert result["versions"]["python"] and result["machine"]["cores"] >= 1
    assert len(result["requests"]) == 4


async def test_ids_are_sent_as_ids() -> None:
    async with running() as (url, scripted):
        assert (
            await command(url, "--num-prompts", "2", "--prompt-kind", "ids", "--vocab-size", "100", "--input-len", "7")
            == 0
        )
    assert all(len(body["prompt"]) == 7 and max(body["prompt"]) < 100 for body in scripted.bodies)


async def test_a_run_with_errors_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    monkeypatch.setattr(
        serve, "word_prompts", lambda num, *_: ["fine"] * (num - 1) + ["fine" if num == 1 else "REFUSE"]
    )
    async with running() as (url, _):
        assert await command(url, "--num-prompts", "3", "--result", str(file)) == 1
    assert "1 × HTTP 429: the queue is full" in capsys.readouterr().out
    *answered, refused = json.loads(file.read_text())["requests"]
    assert all(request["latency"] >= request["ttft"] > 0 for request in answered)
    assert (refused["ttft"], refused["latency"]) == (None, None)


async def test_the_first_request_must_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "word_prompts", lambda num, *_: ["REFUSE"] * num)
    async with running() as (url, scripted):
        assert await command(url, "--num-prompts", "3") == 1
    assert capsys.readouterr().err == f"octavo: error: the first request to {url} failed: HTTP 429: the queue is full\n"
    assert len(scripted.bodies) == 1


async def test_a_result_is_saved_as_vllm_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--backend vllm --endpoint /v1/completions --dataset-name random --random-input-len 9 --random-output-len 4"
    further = "--num-prompts 3 --request-rate inf --seed 3 --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 99 --top-p 0.5"
    folder = tmp_path / "made" / "here"
    saved = ["--save-result", "--result-dir", str(folder), "--metadata", "tp=1", "--extra-body", '{"user": "u"}']
    async with running() as (url, scripted):
        assert await command(url, *given.split(), *further.split(), *saved, "--result-filename", "x.json") == 0
        assert (
            await command(url, "--num-prompts", "1", "--save-result", "--result-dir", str(folder), "--label", "mine")
            == 0
        )
        assert await command(url, "--num-prompts", "1", "--result-dir", str(tmp_path / "never")) == 0
        assert await command(url, "--save-result", "--result", "y") == 2
    assert all(body["top_p"] == 0.5 and body["user"] == "u" for body in scripted.bodies[:4])
    assert "top_p" not in scripted.bodies[-1]
    result = json.loads((folder / "x.json").read_text())
    assert (result["completed"], result["failed"], result["total_input_tokens"], result["tp"]) == (3, 0, 27, "1")
    assert result["median_ttft_ms"] == result["figures"]["ttft_ms"]["p50"] and result["p99_e2el_ms"] >= 1000 * FIRST
    assert [name.name[:24] for name in folder.glob("mine-*")] == ["mine-infqps-model-" + time.strftime("%Y%m")]
    assert not (tmp_path / "never").exists()
    errors = capsys.readouterr().err
    assert "have no effect without --save-result" in errors and "leave out --save-result" in errors


def test_mistakes_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "serve", "--result", str(tmp_path / "no" / "x.json")]) == 2
    assert main.main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    folder, unreachable = capsys.readouterr().err.splitlines()
    assert "does not exist" in folder
    assert "cannot reach http://127.0.0.1:9" in unreachable and unreachable.endswith("is the server running?")


def test_a_result_that_cannot_be_written_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        report.check_writable(str(tmp_path))
    file = tmp_path / "result.json"
    report.check_writable(str(file))
    assert not file.exists()  # the check itself leaves nothing behind
    file.write_text("earlier")
    report.check_writable(str(file))
    assert file.read_text() == "earlier"


def test_flags_of_vllms_benchmark_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[argparse.Namespace] = []
    monkeypatch.setattr("octavo.cli.bench.serve.run", lambda arguments: asked.append(arguments) or 0)

    def bench(text: str) -> int:
        return main.main(["bench", "serve", *text.split()])

    assert (
        bench(
            "--backend vllm --model a --served-model-name b --dataset-name random --random-input-len 8 --host ::1 --port 9"
        )
        == 0
    )
    assert (asked[-1].base_url, asked[-1].endpoint, asked[-1].model, asked[-1].input_len) == (
        "http://[::1]:9",
        "completions",
        "b",
        8,
    )
    assert (
        bench(
            "--backend openai-chat --endpoint /v1/chat/completions --tokenizer x --percentile-metrics ttft,tpot --burstiness 1.0"
        )
        == 0
    )
    assert (asked[-1].base_url, asked[-1].endpoint) == ("http://127.0.0.1:8000", "chat")
    assert capsys.readouterr().err.count("has no effect: ") == 3
    for text, error in (
        ("--backend tgi", "--backend: 'tgi' is neither chat nor completions"),
        ("--dataset-name sharegpt", "'sharegpt' is not offered: prompts are random; --trace FILE"),
        ("--burstiness 0.5", "--burstiness 0.5 is not offered: --trace FILE"),
        ("--append-result", "--append-result is not offered: --save-result writes one file"),
        ("--plot-timeline", "--plot-timeline is not offered: the file of --result"),
        ("--logprobs 1", "--logprobs is not offered: give --extra-body"),
        ("--random-batch-size 2", "--random-batch-size 2 is not offered: each request has one prompt"),
        ("--extra-body [1]", "--extra-body: '[1]' is not a JSON object"),
        ("--metadata x", "--metadata: 'x' is not NAME=VALUE"),
    ):
        with pytest.raises(SystemExit):
            bench(text)
        assert error in capsys.readouterr().err
    assert bench("--port 9 --base-url http://x") == 2 and "leave out" in capsys.readouterr().err
