"""POST /v1/completions: prompts of every form, choices, usage, what reaches the engine."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.messages import EngineReport, GenerateRequest, TokenDelta
from tests.doubles import EOS, REPORT, ScriptedEngine, byte_text, says
from tests.server import running
from tests.server.conftest import Serve, error_of, events
from tests.server.test_server_llama_cpp import FILL, fill_text

URL = "/v1/completions"


async def test_whole_answer_and_usage(serve: Serve) -> None:
    engine = ScriptedEngine(says("héllo", cached=2))
    response = await serve(engine).post(URL, json={"model": "byte-model", "prompt": "abc"})
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "byte-model"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "héllo",
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,  # six bytes and the end
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["system_fingerprint"] == REPORT.system_fingerprint


async def test_what_reaches_the_engine_is_resolved(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine)
    for _ in range(2):
        await client.post(URL, json={"prompt": "abc"})
    first, second = engine.requests
    assert first.prompt_ids == list(b"abc") and first.stop_ids == [EOS]
    assert first.params.max_tokens == 16 and first.params.temperature == 1.0
    assert first.arrived > 0
    assert first.params.seed is not None and 0 <= first.params.seed < 2**63
    assert first.id != second.id and first.params.seed != second.params.seed


async def test_every_sampling_field_arrives(serve: Serve) -> None:
    engine = ScriptedEngine()
    sent = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "stop": ["x", "yz"],
        "stop_token_ids": [5, EOS, 5], "ignore_eos": True, "min_tokens": 2, "presence_penalty": 1.5,
        "frequency_penalty": -1.5, "repetition_penalty": 1.1, "n": 3,
    }  # fmt: skip
    response = await serve(engine).post(URL, json={"prompt": "abc", **sent})
    assert response.status_code == 200
    (request,) = engine.requests
    for name, value in sent.items():
        found = getattr(request.params, name)
        assert (list(found) if isinstance(found, tuple | list) else found) == value, name
    assert request.stop_ids == [5, EOS]


async def test_null_is_absent(serve: Serve) -> None:
    engine = ScriptedEngine()
    names = [
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "n",
        "stream",
    ]
    more = [
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stream_options",
        "logprobs",
        "echo",
        "suffix",
        "best_of",
        "user",
    ]
    response = await serve(engine).post(URL, json={"prompt": "abc", **dict.fromkeys(names + more)})
    assert response.status_code == 200, response.text
    assert engine.requests[0].params.max_tokens == 16


async def test_model_makers_defaults_hold_unless_the_request_says_otherwise(serve: Serve) -> None:
    engine = ScriptedEngine()
    text = byte_text(generation_config='{"temperature": 0.25, "top_k": 5}')
    client = serve(engine, text)
    await client.post(URL, json={"prompt": "abc", "top_k": 0})
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 0, 1.0)


async def test_top_k_beyond_the_vocabulary_is_no_limit(serve: Serve) -> None:
    engine = ScriptedEngine()
    response = await serve(engine).post(URL, json={"prompt": "abc", "top_k": 10**30})
    assert response.status_code == 200
    assert engine.requests[0].params.top_k == REPORT.vocab_size


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        (["ab", [99]], [[97, 98], [99]]),
    ],
)
async def test_forms_of_a_prompt(serve: Serve, prompt: object, ids: list[list[int]]) -> None:
    engine = ScriptedEngine()
    response = await serve(engine).post(URL, json={"prompt": prompt})
    assert response.status_code == 200
    assert [request.prompt_ids for request in engine.requests] == ids
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(ids)))


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_times_n(serve: Serve, stream: bool) -> None:
    def script(request: GenerateRequest) -> list[list[TokenDelta]]:
        # The later a prompt, the sooner it ends: order must come from indices, not from arrival.
        prompt = chr(request.prompt_ids[0])
        return says(f"{prompt}0" * (100 - ord(prompt)), f"{prompt}1")(request)

    engine = ScriptedEngine(script)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await serve(engine).post(URL, json={"prompt": ["a", "b", "c"], "n": 2, **options})
    texts = dict.fromkeys(range(6), "")
    if stream:
        *chunks, last = events(response.content)
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert last["choices"] == []
        usage = last["usage"]
    else:
        for choice in response.json()["choices"]:
            texts[choice["index"]] = choice["text"]
        usage = response.json()["usage"]
    assert list(texts.values()) == ["a0a0a0", "a1", "b0b0", "b1", "c0", "c1"]
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == sum(map(len, texts.values())) + 6


async def test_length_is_a_finish_reason(serve: Serve) -> None:
    response = await serve(ScriptedEngine(says("abc", reason="length"))).post(URL, json={"prompt": "x"})
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": None}, "prompt", "string or a list"),
        ({"prompt": 5}, "prompt", "string or a list"),
        ({"prompt": True}, "prompt", "string or a list"),
        ({"prompt": {"a": 1}}, "prompt", "string or a list"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt[0]", "empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": ["a", 5]}, "prompt[1]", "string or a list"),
        ({"prompt": [1, 2.5]}, "prompt[0]", "string or a list"),
        ({"prompt": [True]}, "prompt[0]", "string or a list"),
        ({"prompt": ["a"] * 1025}, "prompt", "1024"),
        ({"prompt": [1, 2, 258]}, "prompt[2]", "prompt[2] is 258"),
        ({"prompt": [1, -1]}, "prompt[1]", "prompt[1] is -1"),
        ({"prompt": [[1], [10**30]]}, "prompt[1][0]", "token ids go from 0 to 257"),
        ({"prompt": "a", "stop_token_ids": [258]}, "stop_token_ids[0]", "258"),
        ({"prompt": "a", "stop_token_ids": [0] * 1025}, "stop_token_ids", "1024"),
        ({"prompt": "a", "stop": 5}, "stop", "string or a list of strings"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop", "string or a list of strings"),
        ({"prompt": "a", "stop": [""]}, "stop", "non-empty"),
        ({"prompt": "a", "stop": ["a"] * 65}, "stop", "64"),
        ({"prompt": "a", "stop": "a" * 1025}, "stop", "1024"),
        ({"prompt": "a", "n": 129}, "n", "128"),
        ({"prompt": "a", "n": 0}, "n", "at least 1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens", "at least 1"),
        ({"prompt": "a", "max_tokens": 5.5}, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 5, "min_tokens": 6}, "min_tokens", "5"),
        ({"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "one of them"),
        ({"prompt": "a", "temperature": -1}, "temperature", "between 0 and 100"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
        ({"prompt": "a", "temperature": True}, "temperature", "number"),
        ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        ({"prompt": "a", "top_k": -2}, "top_k", "-1"),
        ({"prompt": "a", "min_p": 2}, "min_p", "between 0 and 1"),
        ({"prompt": "a", "seed": 2**63}, "seed", "64-bit"),
        ({"prompt": "a", "seed": 1.5}, "seed", "integer"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"prompt": "a", "stream": "yes"}, "stream", "boolean"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos", "boolean"),
        ({"prompt": "a", "model": 5}, "model", "string"),
        ({"prompt": "a", "stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage", "bool"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "stream"),
    ],
)  # fmt: skip
async def test_bad_values_are_named(serve: Serve, body: dict[str, object], param: str, words: str) -> None:
    engine = ScriptedEngine()
    error = error_of(await serve(engine).post(URL, json=body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert engine.requests == []


class TestContext:
    async def test_prompt_beyond_the_context(self, serve: Serve) -> None:
        error = error_of(await serve().post(URL, json={"prompt": "a" * 256}), 400)
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert error["message"].count("256") == 2

    async def test_prompt_plus_max_tokens_beyond_the_context(self, serve: Serve) -> None:
        error = error_of(await serve().post(URL, json={"prompt": "a" * 250, "max_tokens": 7}), 400)
        assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
        for number in ("256", "250", "7", "6"):
            assert number in error["message"]

    async def test_all_that_fits_is_taken(self, serve: Serve) -> None:
        engine = ScriptedEngine()
        client = serve(engine)
        assert (await client.post(URL, json={"prompt": "a" * 250, "max_tokens": 6})).status_code == 200
        assert (await client.post(URL, json={"prompt": "a" * 250})).status_code == 200
        assert [request.params.max_tokens for request in engine.requests] == [6, 6]

    async def test_the_other_name_of_max_tokens_is_named_back(self, serve: Serve) -> None:
        error = error_of(await serve().post(URL, json={"prompt": "a", "max_completion_tokens": 256}), 400)
        assert error["param"] == "max_completion_tokens" and "max_completion_tokens" in error["message"]
        error = error_of(await serve().post(URL, json={"prompt": "a", "max_completion_tokens": 0}), 400)
        assert error["param"] == "max_completion_tokens"


async def test_the_engine_counts_what_the_report_says(serve: Serve) -> None:
    report = EngineReport(**{name: getattr(REPORT, name) for name in REPORT.__struct_fields__} | {"max_num_seqs": 2})
    body = {"prompt": "a", "n": 3}
    error = error_of(await serve(ScriptedEngine(report=report)).post(URL, json={**body, "use_beam_search": True}), 400)
    assert error["param"] == "n" and "--max-num-seqs 2" in error["message"]
    response = await serve(ScriptedEngine(report=report)).post(URL, json=body)
    assert len(response.json()["choices"]) == 3, "more choices than rows wait in the queue"


@pytest.mark.parametrize(
    ("prompt", "is_beside"),
    [("é" * 30_000, True), (["é" * 300] * 100, True), (["é" * 300, [1, 2]] * 10, False), ("é", False)],
)
async def test_much_text_is_encoded_beside_the_event_loop(
    serve: Serve, prompt: str | list[str], is_beside: bool
) -> None:
    """However many prompts it comes in: 100 medium ones hold up the other streams as one long one does."""
    threads = set()

    def encode(*args: Any, **kwargs: Any) -> list[int]:
        threads.add(threading.get_ident() != threading.main_thread().ident)
        return byte_text().encode(*args, **kwargs)

    text = copy.copy(byte_text())
    text.encode = encode  # type: ignore[method-assign]
    report = EngineReport(
        **{name: getattr(REPORT, name) for name in REPORT.__struct_fields__} | {"max_model_len": 10**5}
    )
    engine = ScriptedEngine(report=report)
    assert (await serve(engine, text).post(URL, json={"prompt": prompt})).status_code == 200
    assert threads == {is_beside}
    expected = [item if isinstance(item, list) else list(item.encode()) for item in _as_list(prompt)]
    assert [request.prompt_ids for request in engine.requests] == expected


def _as_list(prompt: Any) -> list[Any]:
    return prompt if isinstance(prompt, list) else [prompt]


async def test_more_choices_than_rows_wait_for_rows(served: Callable[..., running.Served]) -> None:
    server = served(running.engine(max_num_seqs=4))
    body = {"prompt": "abc", "n": 11, "max_tokens": 5, "ignore_eos": True}
    answer = (await server.http.post(URL, json=body)).json()
    assert sorted(choice["index"] for choice in answer["choices"]) == list(range(11))
    assert {choice["text"] for choice in answer["choices"]} == {"aaaaa"} and answer["usage"]["completion_tokens"] == 55


async def test_a_suffix_is_put_after_the_gap(serve: Serve, tmp_path: Path) -> None:
    report = msgspec.structs.replace(REPORT, vocab_size=REPORT.vocab_size + len(FILL))
    engine, text = ScriptedEngine(says("x"), report), fill_text(tmp_path, *FILL)
    client = serve(engine, text)
    for stop_ids in (None, [65]):
        body = {"prompt": "abc", "suffix": "def", "stop_token_ids": stop_ids}
        assert (await client.post(URL, json=body)).json()["choices"][0]["text"] == "x"
        request = engine.requests[-1]
        expected = "<|fim_prefix|>abc<|fim_suffix|>def<|fim_middle|>"
        assert text.decode(request.prompt_ids, skip_special_tokens=False) == expected
        assert {*(stop_ids or []), *(text.token_id(name) for name in FILL)} <= set(request.params.stop_token_ids)
    for more, param in (
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"prompt": ["abc", "def"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"suffix": "x" * 300}, "prompt"),  # it is one prompt with it
        ({"suffix": 5}, "suffix"),
    ):
        error = (await client.post(URL, json={"prompt": "abc", "suffix": "def", **more})).json()["error"]
        assert error["param"] == param, error
    assert (await client.post(URL, json={"prompt": "abc", "suffix": ""})).status_code == 200
    refused = await serve().post(URL, json={"prompt": "abc", "suffix": "def"})
    assert refused.status_code == 400 and "cannot fill in the middle" in refused.json()["error"]["message"]
