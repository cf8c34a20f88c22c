"""/tokenize and /detokenize speak vLLM's shapes and agree with what a generation would be given."""

from typing import Any

import msgspec
import pytest

from tests.doubles import CHAT_TEMPLATE, EOS, REPORT, TURN, ScriptedEngine, byte_text
from tests.server.conftest import Serve, error_of

HI = [{"role": "user", "content": "hi <|end|>"}]


async def test_a_prompt(serve: Serve) -> None:
    answer = (await serve().post("/tokenize", json={"prompt": "h é<|end|>", "model": "byte-model"})).json()
    ids = [*"h é".encode(), EOS]
    assert answer == {"count": 5, "max_model_len": 256, "tokens": ids, "token_strs": None}
    named = (await serve().post("/tokenize", json={"prompt": "h é<|end|>", "return_token_strs": True})).json()
    assert named["token_strs"] == ["h", "Ġ", "Ã", "©", "<|end|>"]


async def test_messages_are_what_a_chat_gives_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine)
    await client.post("/v1/chat/completions", json={"messages": HI})
    answer = (await client.post("/tokenize", json={"messages": HI, "add_special_tokens": False})).json()
    assert answer["tokens"] == engine.requests[0].prompt_ids and answer["count"] == len(answer["tokens"])
    bare = (await client.post("/tokenize", json={"messages": HI, "add_generation_prompt": False})).json()
    assert answer["tokens"] == [*bare["tokens"], TURN, *b"assistant: "]


async def test_tools_and_variables_are_part_of_it(serve: Serve) -> None:
    engine = ScriptedEngine(report=msgspec.structs.replace(REPORT, max_model_len=4096))
    client = serve(engine, byte_text(CHAT_TEMPLATE + "{{ mood }}"))
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": HI, "tools": tools, "chat_template_kwargs": {"mood": "calm"}}
    await client.post("/v1/chat/completions", json=body)
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == engine.requests[0].prompt_ids and bytes(answer["tokens"][-4:]) == b"calm"
    for name in ("tools", "chat_template_kwargs"):
        error = error_of(await client.post("/tokenize", json={"prompt": "x", name: body[name]}), 400)
        assert error["param"] == name


async def test_a_text_beyond_the_context_is_counted(serve: Serve) -> None:
    answer = (await serve().post("/tokenize", json={"prompt": "a" * 50_000})).json()
    assert answer["count"] == 50_000 > answer["max_model_len"]


async def test_there_and_back(serve: Serve) -> None:
    client = serve()
    for text in ("", "h é 😀\n", "a<|turn|>b"):
        tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    long = (await client.post("/detokenize", json={"tokens": [97] * 30_000, "odd": 1})).json()
    assert long == {"prompt": "a" * 30_000, "ignored_fields": ["odd"]}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "string"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "boolean"),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": True},
            "add_generation_prompt",
            "only supported with messages",
        ),
        ("/tokenize", {"messages": []}, "messages", "empty"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "one of"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens", "template"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": "a"}, "tokens", "array"),
        ("/detokenize", {"tokens": [1, 2.5]}, "tokens[1]", "integer"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens[1]", "tokens[1] is 258; token ids go from 0 to 257"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "tokens[0] is -1"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]", "token ids go from"),
    ],
)
async def test_bad_input_is_named(serve: Serve, path: str, body: dict[str, Any], param: str, words: str) -> None:
    error = error_of(await serve().post(path, json=body), 400)
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})])
async def test_another_model(serve: Serve, path: str, body: dict[str, Any]) -> None:
    error_of(await serve().post(path, json={**body, "model": "other"}), 404)


async def test_tokenizer_info(serve: Serve) -> None:
    info = (await serve().get("/tokenizer_info")).json()
    assert (info["vocab_size"], info["model_max_length"], info["eos_token"]) == (258, 256, "<|end|>")
    assert info["eos_token_ids"] == [256] and info["all_special_ids"] == [256, 257] and info["bos_token"] is None
    assert info["chat_template"].startswith("{% for message in messages %}") and info["tokenizer_class"]
