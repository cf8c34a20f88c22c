"""Measures how long one large request blocks an API process's event loop, and with it every other stream: the longest gap
between two ticks of a timer. The engine is scripted; the tokenizer is the embedded model's.

    python -m benchmarks.api_stalls
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from octavo.config import Config, replace
from octavo.messages import Finish, GenerateRequest, Logprobs, TokenDelta
from octavo.server.app import build_app
from octavo.server.process import settle_collector
from octavo.text import load_text
from octavo.weights.sources.source import resolve
from tests.doubles import REPORT, ScriptedEngine

BEAT_SECONDS = 0.001
NUM_TOKENS = 30_000
TOP = 5
NUM_ANSWERED, TOP_ANSWERED = 8_192, 20
NUM_FILES = 900


def scored(request: GenerateRequest) -> list[list[TokenDelta]]:
    """Answer with max_tokens tokens, their logprobs and, if requested, the prompt's logprobs."""
    num_tokens, top = request.params.max_tokens or 1, request.params.logprobs or TOP
    entry = Logprobs(7, list(range(100, 101 + top)), [-1.5] * (top + 1))
    scores = (entry,) * (len(request.prompt_ids) - 1) if request.params.prompt_logprobs is not None else ()
    own = (entry,) * num_tokens
    return [[TokenDelta(request.id, 0, [100] * num_tokens, Finish("length"), logprobs=own, prompt_logprobs=scores)]]


async def longest_gap(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Return (longest gap between two timer ticks, time of the work itself), in milliseconds."""
    longest, is_over = 0.0, False

    async def beat() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not is_over:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.05)
    longest, started = 0.0, time.perf_counter()
    await work()
    took = time.perf_counter() - started
    await asyncio.sleep(2 * BEAT_SECONDS)
    is_over = True
    await beating
    return longest * 1000, took * 1000


async def main() -> None:
    report = msgspec.structs.replace(REPORT, vocab_size=49152, max_model_len=2**17)
    source = resolve("")
    with tempfile.TemporaryDirectory() as folder:
        config = replace(Config(), files_folder=folder)
        app = build_app(ScriptedEngine(scored, report), load_text(Path(source.path)), config, "m")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as http:
            await _run(http)


async def _run(http: httpx.AsyncClient) -> None:
    ids = [100 + number % 1000 for number in range(NUM_TOKENS)]
    words = "the quick brown fox jumps over the lazy dog " * 20_000
    scoring = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": TOP}

    def post(path: str, body: dict[str, Any]) -> Callable[[], Awaitable[None]]:
        content = json.dumps(body).encode()

        async def work() -> None:
            response = await http.post(path, content=content)
            assert response.status_code == 200, response.text[:300]

        return work

    async def upload() -> None:
        form = {"purpose": "batch"}
        response = await http.post("/v1/files", data=form, files={"file": ("f", b"{}\n")})
        assert response.status_code == 200, response.text[:300]

    for _ in range(NUM_FILES):
        await upload()
    cases = {
        f"prompt_logprobs of {NUM_TOKENS} tokens, {TOP} each": post("/v1/completions", scoring),
        f"echo with logprobs of {NUM_TOKENS} tokens": post(
            "/v1/completions", {**scoring, "echo": True, "logprobs": TOP}
        ),
        f"a chat's answer of {NUM_ANSWERED} tokens, logprobs of {TOP_ANSWERED} each": post(
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": NUM_ANSWERED,
                "logprobs": True,
                "top_logprobs": TOP_ANSWERED,
            },
        ),
        "a completion's answer of as many, the same": post(
            "/v1/completions", {"prompt": [100], "max_tokens": NUM_ANSWERED, "logprobs": TOP_ANSWERED}
        ),
        f"/tokenize of {len(words)} characters, with names": post(
            "/tokenize", {"prompt": words, "return_token_strs": True}
        ),
        f"/detokenize of {10 * NUM_TOKENS} tokens": post("/detokenize", {"tokens": ids * 10}),
        f"an upload beside {NUM_FILES} files": upload,
    }
    for name, work in cases.items():
        gaps = [await longest_gap(work) for _ in range(3)]
        gap, took = min(gaps)
        print(f"{name}: longest gap {gap:.0f} ms of {took:.0f} ms")


if __name__ == "__main__":
    settle_collector()
    asyncio.run(main())
