"""Beam search, best_of, priority and repetition detection at the two endpoints: what the engine is asked, and what is refused."""

from typing import Any

import msgspec
import pytest

from octavo.messages import Finish, GenerateRequest, Logprobs, RepetitionDetectionParams, TokenDelta
from tests.doubles import EOS, REPORT, ScriptedEngine
from tests.server.conftest import Serve, error_of, events

CHAT = {"messages": [{"role": "user", "content": "a"}]}
PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": CHAT}


def beams(request: GenerateRequest) -> list[list[TokenDelta]]:
    """As the engine answers a search: all beams in one step, at its end."""
    texts = [b"best", b"next", b"last"]
    return [
        [
            TokenDelta(request.id, index, [*texts[index], EOS], Finish("stop", EOS, cumulative_logprob=-1.0 - index))
            for index in range(request.params.n)
        ]
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_beams_come_at_the_end(serve: Serve, path: str, stream: bool) -> None:
    engine = ScriptedEngine(beams, report=REPORT)
    wishes = {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.5, "early_stopping": "never"}
    response = await serve(engine).post(path, json={**PATHS[path], **wishes, "max_tokens": 8, "stream": stream})
    assert response.status_code == 200
    (asked,) = engine.requests
    params = asked.params
    assert (params.use_beam_search, params.n, params.best_of) == (True, 2, 3)
    assert (params.length_penalty, params.early_stopping, params.temperature) == (0.5, "never", 0.0)
    if stream:
        texts = {0: "", 1: ""}
        for event in events(response.content):
            for choice in event.get("choices", ()):
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        assert texts == {0: "best", 1: "next"}
    else:
        found = [choice.get("text") or choice["message"]["content"] for choice in response.json()["choices"]]
        assert found == ["best", "next"]


async def test_what_says_how_to_draw_is_named_back_beside_beams(serve: Serve) -> None:
    engine = ScriptedEngine(beams, report=REPORT)
    body: dict[str, Any] = {
        "prompt": "a",
        "use_beam_search": True,
        "temperature": 0.7,
        "top_p": 0.5,
        "top_k": 5,
        "seed": 3,
    }
    response = await serve(engine).post("/v1/completions", json=body)
    assert response.json()["ignored_fields"] == ["temperature", "top_p", "top_k"]
    body |= {"temperature": 0, "top_p": 1, "top_k": -1}
    assert "ignored_fields" not in (await serve(engine).post("/v1/completions", json=body)).json()
    alone = {"prompt": "a", "length_penalty": 2.0, "early_stopping": True}
    assert (await serve().post("/v1/completions", json=alone)).json()["ignored_fields"] == [
        "length_penalty",
        "early_stopping",
    ]
    idle = {"prompt": "a", "repetition_detection": {"min_count": 3}}
    assert (await serve().post("/v1/completions", json=idle)).json()["ignored_fields"] == ["repetition_detection"]
    error = error_of(await serve(strict_fields=True).post("/v1/completions", json=alone), 400)
    assert error["param"] == "length_penalty" and "use_beam_search" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("wishes", "param", "words"),
    [
        ({"use_beam_search": True, "stop": ["x"]}, "stop", "not supported with use_beam_search"),
        ({"use_beam_search": True, "presence_penalty": 1.0}, "presence_penalty", "not supported with use_beam_search"),
        (
            {"use_beam_search": True, "repetition_penalty": 1.2},
            "repetition_penalty",
            "not supported with use_beam_search",
        ),
        ({"use_beam_search": True, "logit_bias": {"5": 1.0}}, "logit_bias", "not supported with use_beam_search"),
        ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words", "not supported with use_beam_search"),
        (
            {"use_beam_search": True, "allowed_token_ids": [1]},
            "allowed_token_ids",
            "not supported with use_beam_search",
        ),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "use_beam_search", "response_format"),
        ({"use_beam_search": True, "stop_token_ids": [*range(17)]}, "stop_token_ids", "at most 16"),
        ({"use_beam_search": True, "n": 5}, "n", "at most 4 for a beam search, half of the rows (--max-num-seqs 8)"),
        ({"use_beam_search": True, "best_of": 5}, "best_of", "at most 4 for a beam search"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "between -10 and 10"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping", 'true, false or "never"'),
        ({"use_beam_search": 1}, "use_beam_search", "boolean"),
        ({"best_of": 1, "n": 2}, "best_of", "at least n (2)"),
        ({"best_of": 129}, "best_of", "at most 128 (--max-n)"),
        ({"best_of": 2, "stream": True}, "best_of", "leave stream or best_of out"),
        ({"priority": 1}, "priority", "must be 0 here, got 1: this server runs with --scheduling-policy fcfs"),
        ({"priority": 2**63}, "priority", "64-bit integer"),
        ({"priority": "high"}, "priority", "integer"),
        (
            {"repetition_detection": {"max_pattern_size": 1025}},
            "repetition_detection.max_pattern_size",
            "from 0 to 1024",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}},
            "repetition_detection.min_pattern_size",
            "from 0 to 4, at most max_pattern_size; got 5",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 1}},
            "repetition_detection.min_count",
            "from 2 to 1024: how often the pattern must repeat; got 1",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 4}},
            "repetition_detection.min_count",
            "from 2 to 1024: how often the pattern must repeat; it is not given",
        ),
        ({"repetition_detection": {"min_count": "x"}}, "repetition_detection.min_count", "integer"),
    ],
)
async def test_bad_input_is_refused_by_name(
    serve: Serve, path: str, wishes: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(await serve().post(path, json={**PATHS[path], **wishes}), 400)
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("path", PATHS)
async def test_a_search_that_can_never_have_its_pages_is_refused(serve: Serve, path: str) -> None:
    engine = ScriptedEngine(report=msgspec.structs.replace(REPORT, num_pages=40))
    wishes = {"use_beam_search": True, "n": 4, "max_tokens": 200}
    error = error_of(await serve(engine).post(path, json={**PATHS[path], **wishes}), 400)
    assert error["param"] == "n" and "KV pages, but there are only 40" in error["message"], error


async def test_a_priority_reaches_an_engine_that_has_them(serve: Serve) -> None:
    engine = ScriptedEngine(report=msgspec.structs.replace(REPORT, scheduling_policy="priority"))
    for path, body in PATHS.items():
        assert (await serve(engine).post(path, json={**body, "priority": -3})).status_code == 200
    assert [request.priority for request in engine.requests] == [-3, -3]
    error = error_of(await serve().post("/v1/embeddings", json={"input": "a", "priority": 2}), 400)
    assert error["param"] == "priority" and "--scheduling-policy fcfs" in error["message"]


async def test_the_best_of_several_prompts_choices_are_kept(serve: Serve) -> None:
    def script(request: GenerateRequest) -> list[list[TokenDelta]]:
        assert request.params.n == 3 and request.params.logprobs == 0
        means = [-2.0, -0.5, -1.0]
        return [
            [
                TokenDelta(request.id, index, [ord("a") + index], logprobs=(Logprobs(1, [97 + index], [mean]),)),
                TokenDelta(request.id, index, [EOS], Finish("stop", EOS), logprobs=(Logprobs(1, [EOS], [mean]),)),
            ]
            for index, mean in enumerate(means)
        ]

    body = {"prompt": ["x", "y"], "n": 2, "best_of": 3}
    answer = (await serve(ScriptedEngine(script)).post("/v1/completions", json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "b"),
        (1, "c"),
        (2, "b"),
        (3, "c"),
    ]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 2, "what was made is what it costs"


@pytest.mark.parametrize("path", PATHS)
async def test_a_loop_says_so(serve: Serve, path: str) -> None:
    def script(request: GenerateRequest) -> list[list[TokenDelta]]:
        wanted = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
        assert request.params.repetition_detection == wanted
        return [[TokenDelta(request.id, 0, [*b"aaa"], Finish("repetition"))]]

    loops = {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}}
    answer = (await serve(ScriptedEngine(script)).post(path, json={**PATHS[path], **loops})).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
