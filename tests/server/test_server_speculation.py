"""`prediction` and `use_speculation`: what reaches the engine, what the usage says, and what is refused."""

import msgspec
import pytest

from octavo.messages import Finish, TokenDelta
from octavo.messages.speculation import MAX_PREDICTION, SpeculationSettings
from tests.doubles import EOS, REPORT, ScriptedEngine
from tests.server.conftest import Serve, error_of, events

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
DRAFTS = msgspec.structs.replace(REPORT, speculation=SpeculationSettings("ngram"))


def drafted(request):
    """Two choices at most, with 5 drafted tokens each, 3 of them accepted."""
    finish = Finish("stop", EOS, num_drafted_tokens=5, num_accepted_tokens=3)
    return [[TokenDelta(request.id, index, [*b"hello", EOS], finish) for index in range(request.params.n)]]


@pytest.mark.parametrize(
    "content", ["hello <|end|>", [{"type": "text", "text": "hello "}, {"type": "text", "text": "<|end|>"}]]
)
async def test_a_prediction_reaches_the_engine(serve: Serve, content) -> None:
    engine = ScriptedEngine(drafted, DRAFTS)
    body = {"messages": HI, "n": 2, "prediction": {"type": "content", "content": content}}
    response = await serve(engine).post(URL, json=body)
    assert response.status_code == 200 and "ignored_fields" not in response.json()
    assert engine.requests[0].params.prediction_ids[:6] == tuple(b"hello ")
    details = response.json()["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    last = events((await serve(ScriptedEngine(drafted, DRAFTS)).post(URL, json=streamed)).content)[-1]
    assert last["usage"]["completion_tokens_details"] == details


async def test_without_a_prediction_the_usage_says_nothing_of_drafts(serve: Serve) -> None:
    response = await serve(ScriptedEngine(drafted, DRAFTS)).post(URL, json={"messages": HI})
    assert "completion_tokens_details" not in response.json()["usage"]


async def test_a_server_that_does_not_draft_takes_it_all_the_same(serve: Serve) -> None:
    engine = ScriptedEngine(drafted)
    body = {"messages": HI, "prediction": {"type": "content", "content": "hello"}}
    assert (await serve(engine).post(URL, json=body)).status_code == 200
    assert engine.requests[0].params.prediction_ids == ()


async def test_a_long_prediction_is_cut_and_one_that_is_too_long_refused(serve: Serve) -> None:
    engine = ScriptedEngine(drafted, DRAFTS)
    body = {"messages": HI, "prediction": {"type": "content", "content": "a" * (MAX_PREDICTION + 5)}}
    assert (await serve(engine, max_text_len=100_000).post(URL, json=body)).status_code == 200
    assert len(engine.requests[0].params.prediction_ids) == MAX_PREDICTION
    error = error_of(await serve(ScriptedEngine(drafted, DRAFTS), max_text_len=1000).post(URL, json=body), 400)
    assert error["param"] == "prediction" and "at most 1000 are tokenized" in error["message"]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("hello", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "image", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}] * 1025}, "prediction.content"),
    ],
)
async def test_what_is_no_prediction_is_refused_by_name(serve: Serve, prediction, param) -> None:
    error = error_of(
        await serve(ScriptedEngine(drafted, DRAFTS)).post(URL, json={"messages": HI, "prediction": prediction}), 400
    )
    assert error["param"].startswith(param)


@pytest.mark.parametrize("url", [URL, "/v1/completions"])
async def test_a_request_may_go_without(serve: Serve, url: str) -> None:
    engine = ScriptedEngine(drafted, DRAFTS)
    what = {"messages": HI} if url == URL else {"prompt": "hi"}
    await serve(engine).post(url, json={**what, "use_speculation": False})
    await serve(engine).post(url, json=what)
    assert [request.params.use_speculation for request in engine.requests] == [False, True]
    assert (
        error_of(await serve(engine).post(url, json={**what, "use_speculation": "no"}), 400)["param"]
        == "use_speculation"
    )


async def test_a_long_list_of_wrong_parts_is_refused_by_its_length(serve: Serve) -> None:
    """Before its entries are looked at: an error for each would take seconds."""
    body = {"messages": HI, "prediction": {"type": "content", "content": [["x", 1]] * 20_000}}
    error = error_of(await serve(ScriptedEngine(drafted, DRAFTS)).post(URL, json=body), 400)
    assert error["param"] == "prediction.content" and "has 20000 entries; at most 1024" in error["message"]
