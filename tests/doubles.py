"""Small real objects that the tests of several rooms share: a byte tokenizer's Text, an engine that plays a script, an ASGI client.
None of them mocks our own code: octavo.text loads the Text, and the engine is a client with no engine behind it."""

import asyncio
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.client.client import EngineClient
from octavo.config import Config, replace
from octavo.messages import (
    Abort,
    Dying,
    EngineReport,
    Finish,
    FinishReason,
    GenerateRequest,
    Hello,
    HoldPrefix,
    LeaveQueue,
    Ping,
    ReadHistory,
    ReadJourneys,
    ReadLive,
    ReadMetrics,
    ReadPage,
    ReadPlace,
    ReadPrefixes,
    ReadProgress,
    ReadSleep,
    ReleasePrefix,
    Reply,
    ResetPrefixCache,
    SleepEngine,
    StepDeltas,
    ToEngine,
    TokenDelta,
    WakeEngine,
)
from octavo.observe.live_state import LiveLook, LiveState, LiveTotals
from octavo.text import Text, load_text

EOS = 256
"""The byte tokenizer's ids: a byte's own value, then these."""
TURN = 257
VOCAB_SIZE = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
REPORT = EngineReport(
    device="cpu (1 thread)",
    fingerprint={"numerics": "1", "model": "scripted"},
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    page_size=16,
    num_pages=64,
    num_host_pages=0,
    weights_bytes=1000,
    page_bytes=100,
)


IDLE_LOOK = LiveLook(
    LiveState(
        time=0.0,
        step=0,
        totals=LiveTotals(0, 0, 0, 0, 0, 0, 0.0, 0, 0.0, 0, 0.0),
        num_waiting=0,
        rows=[],
        waiting=[],
        lanes=[],
        blocked_by=None,
        advice="",
        num_pages=REPORT.num_pages,
        page_size=REPORT.page_size,
        max_rows=REPORT.max_num_seqs,
        max_step_tokens=REPORT.max_num_batched_tokens,
        num_host_pages=0,
        num_host_pages_used=0,
        num_shared_pages=0,
        num_cached_pages=0,
        num_free_pages=REPORT.num_pages,
        ended=[],
        recent=[],
        pages=bytes(2 * REPORT.num_pages),
    ),
    rows=[],
    waiting=[],
    ended=[],
)


@functools.cache
def byte_text(chat_template: str = CHAT_TEMPLATE, generation_config: str = "{}") -> Text:
    """One token per byte, <|end|> and <|turn|>: a text's token count and split points are obvious."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), chat_template)
        (Path(folder) / "generation_config.json").write_text(generation_config)
        return load_text(Path(folder))


def write_byte_tokenizer(folder: Path, chat_template: str = CHAT_TEMPLATE, special: tuple[str, ...] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json, as a model's folder has them. `special`: further tokens, from 258 on."""
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|turn|>", *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_characters() -> dict[int, str]:
    """GPT-2's table: every byte as a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


Script = Callable[[GenerateRequest], list[list[TokenDelta]]]
"""What the engine sends for a request: one list of deltas per step."""


def says(*texts: str, reason: FinishReason = "stop", cached: int = 0, chunk: int = 1) -> Script:
    """Choice i gets text i (the last one where there are more choices), `chunk` bytes a step, then the end.

    "stop" ends with the end-of-sequence token; "length" with the text's last byte."""

    def script(request: GenerateRequest) -> list[list[TokenDelta]]:
        steps: list[list[TokenDelta]] = []
        for index in range(request.params.n):
            ids = list(texts[min(index, len(texts) - 1)].encode()) + ([EOS] if reason == "stop" else [])
            pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
            for at, piece in enumerate(pieces):
                finish = None
                if at == len(pieces) - 1:
                    finish = Finish(reason, EOS if reason == "stop" else None, num_cached_tokens=cached)
                while len(steps) <= at:
                    steps.append([])
                steps[at].append(TokenDelta(request.id, index, piece, finish))
        return steps

    return script


def never_ends(request: GenerateRequest) -> list[list[TokenDelta]]:
    """Many more tokens than a test waits for, and no finish."""
    return [[TokenDelta(request.id, index, [ord("a")])] for _ in range(5_000) for index in range(request.params.n)]


class ScriptedEngine(EngineClient):
    """Plays `script` for every request, one step in each iteration of the event loop. Keeps the messages it receives."""

    def __init__(self, script: Script | None = None, report: EngineReport | None = REPORT) -> None:
        super().__init__()
        self.script = script or says("hello")
        self.requests: list[GenerateRequest] = []
        self.aborts: list[Abort] = []
        self.num_pings = 0
        self.answers_control = True
        self.progress = "{}"  # its answer to ReadProgress
        self.place = ""  # its answer to ReadPlace
        self.leaves: list[str] = []  # requests that asked not to wait any longer
        self.on_step: Callable[[GenerateRequest, int], None] = lambda request, step: None  # before each step
        self.gate = asyncio.Event()  # no step is played while it is clear
        self.gate.set()
        self._players: dict[str, asyncio.Task[None]] = {}
        if report is not None:
            self._receive(report)

    @property
    def num_running(self) -> int:
        return len(self._players)

    def die(self, message: str = "the engine process ended (killed by SIGKILL)") -> None:
        for player in self._players.values():
            player.cancel()
        self._receive(Dying(message))

    def close(self) -> None:
        for player in self._players.values():
            player.cancel()

    def _send(self, message: ToEngine) -> None:
        match message:
            case GenerateRequest():
                self.requests.append(message)
                player = asyncio.get_running_loop().create_task(self._play(message))
                self._players[message.id] = player
                player.add_done_callback(lambda _: self._players.pop(message.id, None))
            case Abort():
                self.aborts.append(message)
                player = self._players.get(message.request_id)  # type: ignore[assignment]
                if player is not None and message.index < 0:
                    player.cancel()
            case LeaveQueue():
                self.leaves.append(message.request_id)
            case (
                Ping()
                | ReadMetrics()
                | ReadProgress()
                | ReadPlace()
                | ResetPrefixCache()
                | ReadJourneys()
                | ReadHistory()
                | ReadLive()
                | ReadPage()
                | HoldPrefix()
                | ReleasePrefix()
                | ReadPrefixes()
                | SleepEngine()
                | WakeEngine()
                | ReadSleep()
            ):
                self.num_pings += isinstance(message, Ping)
                if self.answers_control:
                    bodies = {
                        ReadMetrics: "# no metrics\n",
                        ReadProgress: self.progress,
                        ReadPlace: self.place,
                        ReadJourneys: "[]",
                        ReadHistory: '{"time":0,"interval":1,"since":0,"points":[]}',
                        ReadLive: msgspec.json.encode(IDLE_LOOK).decode(),
                        ReadPage: "[]",
                        **dict.fromkeys((HoldPrefix, ReleasePrefix, ReadPrefixes), "{}"),
                    }
                    body = bodies.get(type(message), "pong")
                    asyncio.get_running_loop().call_soon(self._receive, Reply(message.call, body))
            case Hello():
                raise AssertionError("nobody says hello to a scripted engine")

    async def _play(self, request: GenerateRequest) -> None:
        for number, deltas in enumerate(self.script(request)):
            await self.gate.wait()
            self.on_step(request, number)
            self._receive(StepDeltas(deltas))
            await asyncio.sleep(0)


def config(**options: Any) -> Config:
    return replace(Config(), **options)


class AsgiCall:
    """One request to an ASGI app; its client can watch the bytes arrive, read slowly, or disconnect."""

    def __init__(
        self, app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.sent: list[bytes] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._news = asyncio.Event()
        self.reads = asyncio.Event()  # while clear, the server must hold all it sends after the first bytes
        self.reads.set()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [
                (key.lower().encode(), value.encode())
                for key, value in {"host": "localhost", **(headers or {})}.items()
            ],
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._take))

    async def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {key.decode(): value.decode() for key, value in message["headers"]}
        elif message.get("body"):
            self.sent.append(message["body"])
        self._news.set()
        await asyncio.sleep(0)
        if self.sent:
            await self.reads.wait()

    async def until(self, condition: Callable[["AsgiCall"], bool]) -> None:
        """Wait until the response so far meets `condition`."""
        async with asyncio.timeout(10):
            while not condition(self):
                self._news.clear()
                await self._news.wait()

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def done(self) -> None:
        async with asyncio.timeout(10):
            await self.task
