"""One request cannot take the engine for itself: what it may ask for in all, at every endpoint; and others beside it, on the real
engine loop."""

import asyncio
import json
import time
from typing import Any

import httpx
import msgspec
import pytest

from octavo.messages import Finish, GenerateRequest, TokenDelta
from tests.doubles import REPORT, ScriptedEngine
from tests.server import running
from tests.server.conftest import Serve, error_of
from tests.server.test_server_embeddings import embeds

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SIZE = {"max_request_sequences": 8, "max_request_tokens": 600}


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: embeds(request) if request.pooling else [_end(request)])


def _end(request: GenerateRequest) -> list[TokenDelta]:
    return [TokenDelta(request.id, index, [65], Finish("length")) for index in range(request.params.n)]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 3}, "prompt", "prompt has 3 entries and n is 3, which makes 9 sequences; one request may have at most 8 (--max-request-sequences)"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "prompt", "prompt has 9 entries, which makes 9 sequences"),
        (COMPLETIONS, {"prompt": ["a"] * 2, "best_of": 5}, "prompt", "prompt has 2 entries and best_of is 5"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 3, "use_beam_search": True}, "prompt", "9 sequences"),
        (COMPLETIONS, {"prompt": "a", "n": 9}, "n", "n is 9, which makes 9 sequences"),
        (COMPLETIONS, {"prompt": ["a"] * 4, "max_tokens": 160}, "prompt", "prompt has 4 entries and max_tokens is 160, which may take 640 tokens in all; one request may take at most 600 (--max-request-tokens)"),
        (COMPLETIONS, {"prompt": ["a" * 20] * 4, "n": 2, "max_tokens": 60}, "prompt", "prompt has 80 tokens in 4 entries, n is 2 and max_tokens is 60, which may take 640 tokens in all"),
        (COMPLETIONS, {"prompt": ["a" * 200] * 3}, "prompt", "prompt has 600 tokens in 3 entries and max_tokens is 16"),
        (COMPLETIONS, {"prompt": "a", "n": 4, "max_completion_tokens": 200}, "n", "n is 4 and max_completion_tokens is 200"),
        (CHAT, {"messages": HI, "n": 9}, "n", "n is 9, which makes 9 sequences"),
        (CHAT, {"messages": HI, "n": 3}, "messages", "n is 3 and max_tokens is 234, which may take 768 tokens in all"),
        (EMBEDDINGS, {"input": ["a"] * 9}, "input", "input has 9 entries, which makes 9 sequences"),
        (EMBEDDINGS, {"input": ["a" * 101] * 6}, "input", "input has 606 tokens in 6 entries, which may take 606 tokens"),
    ],
)  # fmt: skip
async def test_too_much_is_refused_with_its_numbers(
    serve: Serve, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    scripted = engine()
    error = error_of(await serve(scripted, **SIZE).post(path, json=body), 400)
    assert error["param"] == param and words in error["message"], error
    assert not scripted.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 4, "n": 2, "max_tokens": 74}),
        (COMPLETIONS, {"prompt": ["a" * 50] * 8}),
        (CHAT, {"messages": HI, "n": 8, "max_tokens": 50}),
        (EMBEDDINGS, {"input": ["a" * 75] * 8}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 200, "messages": HI}),
    ],
)
async def test_what_is_within_the_limits_is_served(serve: Serve, path: str, body: dict[str, Any]) -> None:
    response = await serve(engine(), **SIZE).post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 200}, "max_output_tokens is 200"),
        ("/v1/messages", {"max_tokens": 200, "messages": HI}, "max_tokens is 200"),
    ],
)
async def test_other_dialects_name_their_own_fields(serve: Serve, path: str, body: dict[str, Any], field: str) -> None:
    response = await serve(engine(), max_request_tokens=100).post(path, json=body)
    assert response.status_code == 400 and field in response.text and "--max-request-tokens" in response.text


async def test_the_defaults_pass_real_use_and_no_more(serve: Serve) -> None:
    report = msgspec.structs.replace(REPORT, max_model_len=131_072)
    client = serve(ScriptedEngine(engine().script, report))
    for path, body in (
        (EMBEDDINGS, {"input": ["a"] * 2048, "pooling": "last"}),
        (CHAT, {"messages": HI, "n": 128}),
        (COMPLETIONS, {"prompt": ["a"] * 1024, "n": 4}),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text[:300]
    error = error_of(await client.post(COMPLETIONS, json={"prompt": ["a"] * 1024, "n": 64}), 400)
    assert "65536 sequences" in error["message"]
    error = error_of(await client.post(COMPLETIONS, json={"prompt": ["a"] * 1024, "max_tokens": 100_000}), 400)
    assert "102400000 tokens" in error["message"]


async def test_no_limit_on_tokens(serve: Serve) -> None:
    response = await serve(engine(), max_request_tokens=0).post(COMPLETIONS, json={"prompt": ["a" * 200] * 100})
    assert response.status_code == 200


async def test_a_line_of_a_batch_has_the_same_limits(serve: Serve, tmp_path: Any) -> None:
    """Through the loopback that batches use."""
    client = serve(engine(), **SIZE)
    ask = client.app.state.service.ask  # type: ignore[attr-defined]
    refused = await ask(COMPLETIONS, json.dumps({"prompt": ["a"] * 9}).encode(), b"")
    assert refused.status == 400 and b"--max-request-sequences" in refused.body


async def test_parts_of_a_response_are_known_to_the_engine(serve: Serve) -> None:
    scripted = engine()
    client = serve(scripted)
    await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "n": 2})
    await client.post(COMPLETIONS, json={"prompt": "a"})
    await client.post(EMBEDDINGS, json={"input": ["a", "b"], "pooling": "last"})
    first, alone, embedding = scripted.requests[:3], scripted.requests[3], scripted.requests[4:]
    assert len({request.response_id for request in first}) == 1 and first[0].response_id
    assert [request.part for request in first] == [0, 1, 2] and (alone.response_id, alone.part) == ("", 0)
    assert [request.part for request in embedding] == [0, 1] and embedding[0].response_id == embedding[1].response_id
    assert embedding[0].response_id != first[0].response_id


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, running.ask(max_tokens=200, n=4) | {"prompt": ["Hi"] * 1024}),
        (COMPLETIONS, running.ask(max_tokens=200, n=128)),
        (CHAT, {"messages": HI, "n": 128, "ignore_eos": True}),
    ],
    ids=["prompts", "choices", "chat"],
)
async def test_a_bystander_is_served_beside_a_request_that_fills_the_engine(
    served: Any, path: str, body: dict[str, Any]
) -> None:
    """A step takes 2 ms; all that the large request asks for takes minutes."""
    server: running.Served = served(running.engine(num_pages=256))
    attack = asyncio.create_task(server.http.post(path, json=body))
    while not (await _running(server.http)):
        assert not attack.done()
    times = []
    for _ in range(10):
        started = time.monotonic()
        answer = await server.http.post(COMPLETIONS, json=running.ask(max_tokens=1))
        assert answer.status_code == 200, answer.text
        times.append(time.monotonic() - started)
    assert not attack.done() and max(times) < 5, times
    attack.cancel()
    await asyncio.gather(attack, return_exceptions=True)


async def _running(http: httpx.AsyncClient) -> bool:
    text = (await http.get("/metrics")).text
    rows = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return bool(rows) and float(rows[0].rsplit(" ", 1)[1]) >= REPORT.max_num_seqs - 4
