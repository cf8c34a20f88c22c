"""The real application over an engine that plays a script, on a real socket, for tests of what the pages do: what the model says is
known, comes at once or waits, and costs nothing. The model echoes: a question `say: TEXT` is answered with TEXT."""

import asyncio
import socket
import struct
import threading
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

from octavo.engine.in_process_client import InProcessClient
from octavo.messages import Finish, GenerateRequest, Logprobs, TokenDelta
from octavo.server.app import build_app
from tests.doubles import EOS, REPORT, TURN, ScriptedEngine, byte_text, config
from tests.server import running

SAY = "say: "
MODEL = "byte-model"
CHAT = msgspec.structs.replace(REPORT, max_model_len=20_000)
ENCODER = msgspec.structs.replace(REPORT, hidden_size=8, can_generate=False, num_pages=0, page_bytes=0)
GENERATION_CONFIG = '{"temperature": 0.6, "top_k": 20}'


def turns_of(request: GenerateRequest) -> list[str]:
    """The messages of a chat request, as the byte template writes them: "role: content"."""
    turns: list[bytearray] = []
    for token in request.prompt_ids:
        if token == TURN:
            turns.append(bytearray())
        elif token < 256 and turns:
            turns[-1].append(token)
    return [turn.decode() for turn in turns]


def echo(request: GenerateRequest) -> list[list[TokenDelta]]:
    """Say what the last question asks for. What was said already, where an answer is continued, is not said again."""
    *before, last = turns_of(request)
    question = next(turn for turn in reversed(before) if turn.startswith("user: "))
    answer = question.partition(SAY)[2].rstrip("\n") or f"You said {len(question) - 7} letters."
    if answer.startswith("FAIL"):
        return [[TokenDelta(request.id, 0, [], Finish("error", message="the model broke"))]]
    said = last.removeprefix("assistant: ")
    rest = answer.removeprefix(said).encode()
    limit = min(len(rest), request.params.max_tokens or len(rest))
    steps = [[delta(request, [byte])] for byte in rest[:limit]]
    if "HALF" in answer and not said:  # the engine fails in the middle
        return [*steps[: len(steps) // 2], [TokenDelta(request.id, 0, [], Finish("error", message="the model broke"))]]
    end = Finish("length") if limit < len(rest) else Finish("stop", EOS)
    return [*steps, [TokenDelta(request.id, 0, [] if limit < len(rest) else [EOS], end)]]


def delta(request: GenerateRequest, ids: list[int]) -> TokenDelta:
    if request.params.logprobs is None:
        return TokenDelta(request.id, 0, ids)
    odds = Logprobs(1, [ids[0], ids[0], ord("x"), ord("y")], [-0.2, -0.2, -2.0, -3.0])
    return TokenDelta(request.id, 0, ids, logprobs=(odds,))


def embed(request: GenerateRequest) -> list[list[TokenDelta]]:
    """A vector by the letters of a text: texts with the same letters are near each other."""
    numbers = [0.001] * 8
    for token in request.prompt_ids:
        numbers[token % 8] += 1.0
    length = sum(number * number for number in numbers) ** 0.5
    vector = struct.pack("<8f", *(number / length for number in numbers))
    return [[TokenDelta(request.id, 0, [], Finish("stop"), vector)]]


class AppServer:
    """An application on a socket. `base`: its address. It can be stopped and started again at the same port, as a machine that is gone
    for a while."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.start()

    def build(self) -> FastAPI:
        """Called in the event loop that serves."""
        raise NotImplementedError

    def close_engine(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._is_up.wait(30)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = self.build()
        settings = uvicorn.Config(app, "127.0.0.1", self.port, log_level="critical", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(settings)
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110 uvicorn has no event for it
            await asyncio.sleep(0.01)
        self._is_up.set()
        await serving
        self.close_engine()
        app.state.service.compiler.close()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def call(self, action: Any) -> None:
        """Run it in the event loop that serves."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        assert done.wait(10)


class ScriptedServer(AppServer):
    def __init__(self, is_encoder: bool = False, **options: Any) -> None:
        self._is_encoder = is_encoder
        super().__init__(**options)

    def build(self) -> FastAPI:
        self.engine = ScriptedEngine(*((embed, ENCODER) if self._is_encoder else (echo, CHAT)))
        text = byte_text(generation_config=GENERATION_CONFIG)
        return build_app(self.engine, text, config(**self._options), MODEL)

    def close_engine(self) -> None:
        self.engine.close()

    def hold_after(self, num_steps: int) -> None:
        """Hold the tokens once this many of an answer have come, until `release`."""

        def look(request: GenerateRequest, step: int) -> None:  # before the step's token is sent
            if step == num_steps - 1:
                self.engine.gate.clear()

        self.engine.on_step = look
        if not num_steps:
            self.call(self.engine.gate.clear)

    def release(self) -> None:
        self.engine.on_step = lambda request, step: None
        self.call(self.engine.gate.set)

    @property
    def requests(self) -> list[GenerateRequest]:
        return self.engine.requests


class LoopServer(AppServer):
    """The real engine loop, scheduler and cache over a model that always says the letter a, in a few milliseconds a step."""

    def __init__(
        self, num_pages: int = 64, seconds: float = 0.005, limits: dict[str, int] | None = None, **options: Any
    ) -> None:
        self._engine = running.engine(num_pages, seconds, **(limits or {}))
        super().__init__(**options)

    def build(self) -> FastAPI:
        self._client = InProcessClient(self._engine)
        return build_app(self._client, byte_text(), config(**self._options), MODEL)

    def close_engine(self) -> None:
        self._client.close()
