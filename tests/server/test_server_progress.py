"""stream_options.include_progress: chunks without text, for those who ask, before the first token."""

import pytest

from octavo.messages import GenerateRequest, PrefillProgress, TokenDelta
from octavo.server.app import build_app
from tests.doubles import AsgiCall, ScriptedEngine, byte_text, config, says
from tests.server.conftest import Serve, error_of, events

BODIES = {
    "/v1/completions": {"prompt": "abcd"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def progresses(request: GenerateRequest) -> list[list[TokenDelta]]:
    """As the engine tells it: two steps over the prompt, and the first token with the last of it."""
    answer = says("xyz", cached=1)(request)
    if not request.wants_progress:
        return answer
    size = len(request.prompt_ids)
    halves = [TokenDelta(request.id, 0, [], progress=PrefillProgress(at, 1)) for at in (size // 2, size)]
    return [[halves[0]], [halves[1], *answer[0]], *answer[1:]]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("interval", [1, 3])
async def test_chunks_without_text_come_first(serve: Serve, path: str, n: int, interval: int) -> None:
    engine = ScriptedEngine(progresses)
    body = {**BODIES[path], "stream": True, "n": n, "stream_interval": interval}
    options = {"include_progress": True, "include_usage": True, "continuous_usage_stats": True}
    chunks = events((await serve(engine).post(path, json={**body, "stream_options": options})).content)
    plain = events((await serve(engine).post(path, json=body)).content)
    size = len(engine.requests[0].prompt_ids)
    reported = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert reported == [{"prompt_tokens": size, "processed_tokens": at, "cached_tokens": 1} for at in (size // 2, size)]
    assert not any("prompt_progress" in chunk for chunk in plain) and not engine.requests[1].wants_progress
    for chunk in chunks:
        if "prompt_progress" in chunk:
            (choice,) = chunk["choices"]
            assert choice["index"] == 0 and not choice.get("text") and not choice.get("delta")
            assert choice["finish_reason"] is None and chunk["usage"]["prompt_tokens"] == size
    others = [chunk["choices"] for chunk in chunks[:-1] if "prompt_progress" not in chunk]
    assert others == [chunk["choices"] for chunk in plain], "the rest is what it is without"
    if path.endswith("chat/completions"):
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_it_comes_while_the_prompt_is_computed() -> None:
    engine = ScriptedEngine(progresses)
    app = build_app(engine, byte_text(), config(), "byte-model")
    engine.on_step = lambda request, step: engine.gate.clear()
    body = b'{"prompt": "abcd", "stream": true, "stream_options": {"include_progress": true}}'
    call = AsgiCall(app, "POST", "/v1/completions", body)
    await call.until(lambda call: bool(call.sent))
    assert b'"processed_tokens":2' in call.sent[0] and len(call.sent) == 1
    engine.on_step = lambda request, step: None
    engine.gate.set()
    await call.done()


async def test_echo_and_several_prompts(serve: Serve) -> None:
    body = {"prompt": ["ab", "cdef"], "echo": True, "stream": True, "stream_options": {"include_progress": True}}
    chunks = events((await serve(ScriptedEngine(progresses)).post("/v1/completions", json=body)).content)
    texts = ["", ""]
    last = [0, 0]
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        if "prompt_progress" in chunk:
            assert not choice["text"]
            last[choice["index"]] = chunk["prompt_progress"]["processed_tokens"]
    assert texts == ["abxyz", "cdefxyz"] and last == [2, 4]


async def test_a_whole_answer_has_none(serve: Serve) -> None:
    body = {"prompt": "a", "stream_options": {"include_progress": True}}
    assert error_of(await serve().post("/v1/completions", json=body), 400)["param"] == "stream_options"
    body = {"prompt": "a", "stream": True, "stream_options": {"include_progress": "yes"}}
    assert error_of(await serve().post("/v1/completions", json=body), 400)["param"] == "stream_options.include_progress"
