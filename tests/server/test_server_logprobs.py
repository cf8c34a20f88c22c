"""Logprobs, token ids and echoes over HTTP: OpenAI's and vLLM's shapes, streamed and whole, and what is refused."""

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from octavo.messages import Finish, GenerateRequest, Logprobs, TokenDelta
from octavo.server.generate import offload
from tests.doubles import EOS, TURN, ScriptedEngine
from tests.server.conftest import Serve, error_of, events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "xé"},
}
ANSWER = [*"aé".encode(), EOS]


def entry(token: int, count: int) -> Logprobs:
    """Numbers that can be told apart: the likeliest are the tokens 98, 99 …"""
    ids = [token, *range(98, 98 + count)]
    return Logprobs(3, ids, [-token / 1024, *(-(at + 1) / 8 for at in range(count))])


def scored(request: GenerateRequest) -> list[list[TokenDelta]]:
    """One token a step; each choice gets the same."""
    params, steps = request.params, []
    for at, token in enumerate(ANSWER):
        finish = Finish("stop", EOS) if token == EOS else None
        own = () if params.logprobs is None else (entry(token, params.logprobs),)
        of_prompt: tuple[Logprobs, ...] = ()
        if at == 0 and params.prompt_logprobs is not None:
            of_prompt = tuple(entry(token, params.prompt_logprobs) for token in request.prompt_ids[1:])
        steps += [
            [TokenDelta(request.id, index, [token], finish, b"", own, of_prompt if index == 0 else ())]
            for index in range(params.n)
        ]
    return steps


def shown(token: str, logprob: float, *spelled: int) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(spelled)}


async def test_chat(serve: Serve) -> None:
    client = serve(ScriptedEngine(scored))
    body = {**BODIES[CHAT], "logprobs": True, "top_logprobs": 2}
    (choice,) = (await client.post(CHAT, json=body)).json()["choices"]
    top = [shown("b", -0.125, 98), shown("c", -0.25, 99)]
    # A token that is but a part of a character has its own bytes, and no text that could be shown.
    expected = [
        {**shown("a", -97 / 1024, 97), "top_logprobs": top},
        {**shown("\ufffd", -0xC3 / 1024, 0xC3), "top_logprobs": top},
        {**shown("\ufffd", -0xA9 / 1024, 0xA9), "top_logprobs": top},
        {**shown("<|end|>", -0.25, *b"<|end|>"), "top_logprobs": top},
    ]
    assert choice["logprobs"] == {"content": expected, "refusal": None}
    assert choice["message"]["content"] == "aé"
    chunks = events((await client.post(CHAT, json={**body, "stream": True})).content)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert [*chain.from_iterable(chunk["logprobs"]["content"] for chunk in streamed if chunk["logprobs"])] == expected
    assert "".join(chunk["delta"].get("content", "") for chunk in streamed) == "aé"
    (choice,) = (await client.post(CHAT, json={**BODIES[CHAT], "logprobs": True})).json()["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[]] * 4
    (choice,) = (await client.post(CHAT, json={**BODIES[CHAT], "logprobs": False, "top_logprobs": 0})).json()["choices"]
    assert choice["logprobs"] is None


async def test_completions(serve: Serve) -> None:
    client = serve(ScriptedEngine(scored))
    body = {**BODIES[COMPLETIONS], "logprobs": 1}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    expected = {
        "text_offset": [0, 1, 1, 2],  # é is two tokens
        "token_logprobs": [-97 / 1024, -0xC3 / 1024, -0xA9 / 1024, -0.25],
        "tokens": ["a", "\ufffd", "\ufffd", "<|end|>"],
        "top_logprobs": [
            {"a": -97 / 1024, "b": -0.125},
            {"\ufffd": -0xC3 / 1024, "b": -0.125},
            {"\ufffd": -0xA9 / 1024, "b": -0.125},
            {"<|end|>": -0.25, "b": -0.125},
        ],
    }
    assert choice["logprobs"] == expected and choice["text"] == "aé"
    chunks = events((await client.post(COMPLETIONS, json={**body, "stream": True})).content)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [*chain.from_iterable(part[name] for part in parts)] for name in expected} == expected
    (choice,) = (await client.post(COMPLETIONS, json={**body, "logprobs": 0})).json()["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {"a": -97 / 1024}


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(serve: Serve, stream: bool) -> None:
    engine = ScriptedEngine(scored)
    client = serve(engine)
    body = {
        "prompt": ["xé", [121, 122]],
        "echo": True,
        "logprobs": 1,
        "n": 2,
        "return_token_ids": True,
        "stream": stream,
    }
    response = await client.post(COMPLETIONS, json=body)
    choices = (
        [choice for chunk in events(response.content) for choice in chunk["choices"]]
        if stream
        else response.json()["choices"]
    )
    for index, (prompt, ids) in enumerate([("xé", [*"xé".encode()]), ("yz", [121, 122])] * 2):
        at = (index % 2) * 2 + index // 2
        own = [choice for choice in choices if choice["index"] == at]
        assert "".join(choice["text"] for choice in own) == prompt + "aé"
        assert [*chain.from_iterable(choice["token_ids"] for choice in own)] == [*ids, *ANSWER]
        assert [choice.get("prompt_token_ids") for choice in own] == [ids, *[None] * (len(own) - 1)]
        logprobs = [*chain.from_iterable(choice["logprobs"]["token_logprobs"] for choice in own)]
        assert logprobs == [None, *(-token / 1024 for token in [*ids[1:], *ANSWER])]
        offsets = [*chain.from_iterable(choice["logprobs"]["text_offset"] for choice in own)]
        of_prompt = [0, 1, 1] if prompt == "xé" else [0, 1]
        assert offsets == [*of_prompt, 2, 3, 3, 4]
    assert engine.requests[0].params.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_control_tokens_of_a_prompt_are_echoed_with_their_places(serve: Serve, stream: bool) -> None:
    body = {"prompt": [EOS, TURN, 120, EOS], "echo": True, "logprobs": 0, "stream": stream}
    response = await serve(ScriptedEngine(scored)).post(COMPLETIONS, json=body)
    if stream:
        choices = [choice for chunk in events(response.content) for choice in chunk["choices"]]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "<|end|><|turn|>x<|end|>aé"
    offsets = [*chain.from_iterable(choice["logprobs"]["text_offset"] for choice in choices)]
    assert offsets == [0, 7, 15, 16, 23, 24, 24, 25]


async def test_tokens_as_ids(serve: Serve) -> None:
    client = serve(ScriptedEngine(scored))
    wish = {"return_tokens_as_token_ids": True}
    (choice,) = (await client.post(COMPLETIONS, json={"prompt": "x", "logprobs": 1, "echo": True, **wish})).json()[
        "choices"
    ]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["token_id:120", "token_id:97", "token_id:195", "token_id:169", f"token_id:{EOS}"]
    assert logprobs["top_logprobs"][1] == {"token_id:97": -97 / 1024, "token_id:98": -0.125}
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3] and choice["text"] == "xaé"
    body = {**BODIES[CHAT], "logprobs": True, "top_logprobs": 1, **wish}
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    streamed = events((await client.post(CHAT, json={**body, "stream": True})).content)
    for tokens in (
        whole,
        [token for chunk in streamed for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]],
    ):
        assert [token["token"] for token in tokens] == logprobs["tokens"][1:]
        assert tokens[0]["top_logprobs"] == [{"token": "token_id:98", "logprob": -0.125, "bytes": [98]}]


async def test_tokens_by_id(serve: Serve) -> None:
    """The engine returns what was asked for: see tests/engine/test_engine_logprobs.py."""
    engine = ScriptedEngine(scored)
    client = serve(engine)
    for path, logprobs in ((COMPLETIONS, 0), (CHAT, True)):
        body = {**BODIES[path], "logprob_token_ids": [5, 6], "logprobs": logprobs}
        assert (await client.post(path, json=body)).status_code == 200
        assert engine.requests[-1].params.logprob_token_ids == (5, 6) and engine.requests[-1].params.logprobs == 0
        for wrong, words in (
            ({"logprobs": None}, "needs logprobs"),
            ({"logprob_token_ids": [258]}, "258"),
            ({"logprob_token_ids": [-1]}, "-1"),
            ({"logprob_token_ids": [1] * 129}, "at most 128"),
            ({"logprobs": 2} if path == COMPLETIONS else {"top_logprobs": 2}, "instead of the most likely"),
            ({"use_beam_search": True, "n": 2}, "not supported with use_beam_search"),
        ):
            error = error_of(await client.post(path, json={**body, **wrong}), 400)
            assert error["param"].startswith("logprob_token_ids") and words in error["message"]


async def test_scores_of_a_prompt_that_nobody_asked_for_are_null(serve: Serve) -> None:
    client = serve(ScriptedEngine(scored))
    completion = (await client.post(COMPLETIONS, json={"prompt": "x", "prompt_logprobs": None})).json()
    chat = (await client.post(CHAT, json=BODIES[CHAT])).json()
    assert completion["choices"][0]["prompt_logprobs"] is None and chat["prompt_logprobs"] is None


async def test_an_echo_alone(serve: Serve) -> None:
    """As evaluation harnesses score a text: nothing is generated that anyone sees."""
    body = {"prompt": "xyz", "echo": True, "max_tokens": 0, "logprobs": 2}
    answer = (await serve(ScriptedEngine(scored)).post(COMPLETIONS, json=body)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "xyz" and choice["logprobs"]["tokens"] == ["x", "y", "z"]
    assert choice["logprobs"]["token_logprobs"][0] is None and len(choice["logprobs"]["top_logprobs"][1]) == 3
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 3


async def test_prompt_logprobs(serve: Serve) -> None:
    client = serve(ScriptedEngine(scored))
    (choice,) = (await client.post(COMPLETIONS, json={"prompt": "xy", "prompt_logprobs": 1})).json()["choices"]
    own = {"logprob": -121 / 1024, "rank": 3, "decoded_token": "y"}
    best = {"logprob": -0.125, "rank": 1, "decoded_token": "b"}
    assert choice["prompt_logprobs"] == [None, {"121": own, "98": best}] and choice["logprobs"] is None
    answer = (await client.post(CHAT, json={**BODIES[CHAT], "prompt_logprobs": 0, "return_token_ids": True})).json()
    assert answer["prompt_token_ids"][0] == TURN and answer["choices"][0]["token_ids"] == ANSWER
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][1] == {"117": {"logprob": -117 / 1024, "rank": 3, "decoded_token": "u"}}


async def test_what_is_said_in_bulk_is_the_same(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lists are made in a thread and encoded item by item: nobody can see it."""
    client = serve(ScriptedEngine(scored))
    asked = [
        (COMPLETIONS, {**BODIES[COMPLETIONS], "prompt_logprobs": 2}),
        (COMPLETIONS, {**BODIES[COMPLETIONS], "echo": True, "logprobs": 2, "n": 2}),
        (COMPLETIONS, {**BODIES[COMPLETIONS], "echo": True, "logprobs": 2, "stream": True}),
        (CHAT, {**BODIES[CHAT], "prompt_logprobs": 2}),
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("/detokenize", {"tokens": [*b"hello"]}),
    ]

    num_threads = 0

    async def answers() -> list[Any]:
        found = []
        for path, body in asked:
            num_before = num_threads
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            if body.get("stream"):  # how many tokens an event has is a matter of time
                choices = [chunk["choices"][0] for chunk in events(response.content)]
                tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
                found.append({"text": "".join(choice["text"] for choice in choices), "tops": tops})
                assert num_threads - num_before <= 1 < len(choices), "the first event alone has much to say"
            else:
                found.append({**response.json(), "id": 0, "created": 0})
        return found

    in_one_go = await answers()

    async def count(work: Callable[[], Any]) -> Any:
        nonlocal num_threads
        num_threads += 1
        return await asyncio.get_running_loop().run_in_executor(None, work)

    monkeypatch.setattr(offload, "LONG_LIST", 1)
    monkeypatch.setattr(offload.ANSWERS, "run", count)
    assert await answers() == in_one_go
    assert num_threads >= len(asked)


async def test_sampling_fields_reach_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine(scored)
    fields = {
        "logit_bias": {"97": -100, "98": 2.5},
        "allowed_token_ids": [97, 98],
        "bad_words": ["ab"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 2,
    }
    for path, body in BODIES.items():
        assert (await serve(engine).post(path, json={**body, **fields})).json()["choices"][0][
            "text" if "prompt" in body else "message"
        ]
        request = engine.requests[-1]
        assert request.params.logit_bias == {97: -100.0, 98: 2.5} and request.params.allowed_token_ids == (97, 98)
        assert [list(word) for word in request.params.bad_word_ids] == [[97, 98]]
        assert len(request.prompt_ids) == 2
    (choice,) = (await serve(engine).post(COMPLETIONS, json={"prompt": "x", **fields})).json()["choices"]
    assert choice["text"] == "aé<|end|>"
    (choice,) = (
        await serve(engine).post(COMPLETIONS, json={"prompt": "x", "stop": ["é"], "include_stop_str_in_output": True})
    ).json()["choices"]
    assert choice["text"] == "aé" and choice["stop_reason"] == "é"
    long = {"prompt": "x" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 10}
    assert (await serve(engine).post(COMPLETIONS, json=long)).status_code == 200
    assert len(engine.requests[-1].prompt_ids) == 246


async def test_the_side_that_is_cut(serve: Serve) -> None:
    engine = ScriptedEngine(scored)
    client = serve(engine)
    for side, kept in (("left", "ef"), ("right", "ab"), (None, "ef")):
        body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": side}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert bytes(engine.requests[-1].prompt_ids).decode() == kept
    answer = (await client.post(COMPLETIONS, json={"prompt": "abc", "truncation_side": "right"})).json()
    assert answer["ignored_fields"] == ["truncation_side"]
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "abc", "truncation_side": "middle"}), 400)
    assert error["param"] == "truncation_side" and "'left' or 'right'" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs to be true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        (CHAT, {"logprobs": 1}, "logprobs", "boolean"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "between 0 and 20"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "integer"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not supported with stream"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CHAT, {"logit_bias": {"7": 1, "a": 1}}, "logit_bias", 'token ids, not "a"'),
        (
            CHAT,
            {"logit_bias": {"7": 1, "258": 1}},
            "logit_bias.258",
            "has the token id 258; token ids go from 0 to 257",
        ),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5", "of the token id 5 must be between -100 and 100"),
        (CHAT, {"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        (CHAT, {"allowed_token_ids": [7, 258]}, "allowed_token_ids[1]", "0 to 257"),
        (CHAT, {"bad_words": ["a"] * 257}, "bad_words", "at most 256"),
        (CHAT, {"bad_words": [""]}, "bad_words[0]", "256 characters"),
        (CHAT, {"truncate_prompt_tokens": 256}, "truncate_prompt_tokens", "1 to 255"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 to 255"),
    ],
)
async def test_mistakes_are_named(serve: Serve, path: str, fields: dict[str, Any], param: str, words: str) -> None:
    engine = ScriptedEngine(scored)
    error = error_of(await serve(engine).post(path, json={**BODIES[path], **fields}), 400)
    assert error["param"] == param and words in error["message"] and engine.requests == []
