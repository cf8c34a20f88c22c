"""/v1/embeddings as the openai client meets it: the real app over an engine that answers with the prompt's own ids as numbers."""

import asyncio
import base64
import json
import struct
from typing import Any

import msgspec
import openai
import pytest

from octavo.messages import Finish, GenerateRequest, TokenDelta
from tests.doubles import REPORT, AsgiCall, ScriptedEngine
from tests.server.conftest import Serve, error_of

ENCODER = msgspec.structs.replace(REPORT, hidden_size=4, can_generate=False, num_pages=0, page_bytes=0)


def vector_of(request: GenerateRequest) -> list[float]:
    """Four numbers that tell prompts apart."""
    return [float(len(request.prompt_ids)), float(sum(request.prompt_ids)), 0.5, -0.25]


def embeds(request: GenerateRequest) -> list[list[TokenDelta]]:
    assert request.pooling is not None and request.params.max_tokens == 1
    numbers = vector_of(request)[: request.pooling.dimensions or None]
    return [[TokenDelta(request.id, 0, [], Finish("stop"), struct.pack(f"<{len(numbers)}f", *numbers))]]


def fails(request: GenerateRequest) -> list[list[TokenDelta]]:
    return [[TokenDelta(request.id, 0, [], Finish("error", message="it broke"))]]


def engine(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(embeds, msgspec.structs.replace(ENCODER, **changes))


async def test_the_openai_client(serve: Serve) -> None:
    scripted = engine()
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="unused", max_retries=0, http_client=serve(scripted)
    )
    texts = ["hello", "a longer one", "é"]
    for encoding in ("float", "base64", None):  # left out, the client asks for base64 and decodes it
        options: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
        answer = await client.embeddings.create(model="byte-model", input=texts, **options)
        wanted = [[float(len(text.encode())), float(sum(text.encode())), 0.5, -0.25] for text in texts]
        found = [item.embedding for item in answer.data]
        if encoding == "base64":
            found = [list(struct.unpack("<4f", base64.b64decode(text))) for text in found]  # type: ignore[arg-type]
        assert [list(numbers) for numbers in found] == wanted
        assert [item.index for item in answer.data] == [0, 1, 2]
        assert (answer.model, answer.object, answer.data[0].object) == ("byte-model", "list", "embedding")
        num_tokens = sum(len(text.encode()) for text in texts)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    answer = await client.embeddings.create(model="byte-model", input="hello", dimensions=2, encoding_format="float")
    assert answer.data[0].embedding == [5.0, float(sum(b"hello"))]
    answer = await client.embeddings.create(model="byte-model", input=[104, 105], encoding_format="float")
    assert len(answer.data) == 1 and answer.data[0].embedding[:2] == [2.0, 209.0]
    answer = await client.embeddings.create(model="byte-model", input=[[104], [105, 1]], encoding_format="float")
    assert [item.embedding[0] for item in answer.data] == [1.0, 2.0]


async def test_how_vectors_are_made_is_the_models_advice_unless_it_is_said(serve: Serve) -> None:
    scripted = engine()
    client = serve(scripted)
    await client.post("/v1/embeddings", json={"input": "a"})
    said = {"pooling": "last", "normalize": False, "dimensions": 3}
    await client.post("/v1/embeddings", json={"input": "a"} | said)
    first, second = (request.pooling for request in scripted.requests)
    assert first is not None and (first.kind, first.normalize, first.dimensions) == ("mean", True, 0)
    assert second is not None and (second.kind, second.normalize, second.dimensions) == ("last", False, 3)
    assert all(request.needs_one_step for request in scripted.requests)
    decoder = ScriptedEngine(embeds, msgspec.structs.replace(REPORT, hidden_size=4))
    client = serve(decoder)
    for body in ({"input": "a"}, {"input": "a", "pooling": "mean"}):
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    kinds = [(request.pooling.kind, request.needs_one_step) for request in decoder.requests if request.pooling]
    assert kinds == [("last", False), ("mean", True)], "only a decoder's last state may come in chunks"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    # body → the field it is about, what the message says
    "nothing": ({}, "input", "is missing"),
    "null": ({"input": None}, "input", "a string or a list of token ids"),
    "no inputs": ({"input": []}, "input", "is empty"),
    "an empty text": ({"input": ["a", ""]}, "input[1]", "is empty"),
    "an empty list of ids": ({"input": [[1], []]}, "input[1]", "is empty"),
    "a number among texts": ({"input": ["a", 3]}, "input[1]", "a string or a list of token ids"),
    "a fraction": ({"input": [1.5]}, "input[0]", "a string or a list of token ids"),
    "an id beyond the vocabulary": ({"input": [1, 258]}, "input[1]", "from 0 to 257"),
    "too many": ({"input": ["a"] * 2049}, "input", "at most 2048"),
    "too long": ({"input": "a" * 65}, "input", "65 tokens; at most 64"),
    "hopelessly long": ({"input": "a" * 100_000}, "input", "cannot fit"),
    "no such encoding": ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    "too many dimensions": ({"input": "a", "dimensions": 5}, "dimensions", "from 1 to 4"),
    "no dimensions": ({"input": "a", "dimensions": 0}, "dimensions", "from 1 to 4"),
    "no such pooling": ({"input": "a", "pooling": "max"}, "pooling", "one of cls, mean, last"),
    "cut to more than there can be": ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "from 1 to 64"),
    "a field that is not offered": ({"input": "a", "truncation_side": "left"}, "truncation_side", "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_wrong_is_named(case: str, serve: Serve) -> None:
    body, param, words = REFUSED[case]
    scripted = engine()
    response = await serve(scripted).post("/v1/embeddings", content=json.dumps(body))
    error = error_of(response, 400)
    assert error["param"] == param and words in error["message"], error
    assert not scripted.requests


async def test_an_unknown_field_is_named_back_or_refused(serve: Serve) -> None:
    body = {"input": "a", "dimension": 3, "request_id": "x"}
    answer = (await serve(engine()).post("/v1/embeddings", json=body)).json()
    assert answer["ignored_fields"] == ["dimension", "request_id"] and answer["data"]
    error = error_of(await serve(engine(), strict_fields=True).post("/v1/embeddings", json=body), 400)
    assert error["param"] == "dimension" and "did you mean 'dimensions'?" in error["message"]


async def test_long_inputs_are_cut_as_asked(serve: Serve) -> None:
    scripted = engine()
    client = serve(scripted)
    for body in (
        {"input": "a" * 1000, "truncate_prompt_tokens": -1},
        {"input": [list(range(100))], "truncate_prompt_tokens": 7},
    ):
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    assert [len(request.prompt_ids) for request in scripted.requests] == [64, 7]


async def test_other_refusals(serve: Serve) -> None:
    client = serve(engine())
    error_of(await client.post("/v1/embeddings", json={"input": "a", "model": "another"}), 404)
    error = error_of(await client.post("/v1/completions", json={"prompt": "a"}), 400)
    assert "it computes embeddings and does not generate text" in error["message"]
    error = error_of(
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}), 400
    )
    assert "does not generate text" in error["message"]
    failing = serve(ScriptedEngine(fails, ENCODER))
    error = error_of(await failing.post("/v1/embeddings", json={"input": ["a", "b"]}), 500)
    assert error["message"] == "it broke"


async def test_limits_of_its_own(serve: Serve) -> None:
    scripted = engine()
    scripted.gate.clear()
    client = serve(scripted)
    response = await client.post("/v1/embeddings", json={"input": ["a", "b"], "deadline_ms": 30, "max_queue_ms": 15})
    assert error_of(response, 504)["code"] == "deadline_exceeded"
    assert {abort.request_id for abort in scripted.aborts} == {request.id for request in scripted.requests}
    for request in scripted.requests:
        assert request.queue_until > request.arrived and request.deadline - request.queue_until == pytest.approx(0.015)
    error = error_of(await client.post("/v1/embeddings", json={"input": "a", "max_queue_ms": 0}), 400)
    assert error["param"] == "max_queue_ms"


async def test_a_client_that_leaves_ends_the_work(serve: Serve) -> None:
    scripted = engine()
    scripted.gate.clear()
    app = serve(scripted).app  # type: ignore[attr-defined]
    call = AsgiCall(app, "POST", "/v1/embeddings", json.dumps({"input": ["a", "b"]}).encode())
    while len(scripted.requests) < 2:  # noqa: ASYNC110 (the engine has no event for it)
        await asyncio.sleep(0)
    call.leave()
    await call.done()
    assert {abort.request_id for abort in scripted.aborts} == {request.id for request in scripted.requests}
