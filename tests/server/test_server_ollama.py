"""Ollama's API: chat, generate, embeddings, models, pulls; fields that are honoured, refused or named back; keys and limits."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from octavo.server.dialects.ollama.request import read_keep_alive
from octavo.weights.sources.store import Store
from tests.doubles import REPORT, AsgiCall, ScriptedEngine, byte_text, never_ends, says
from tests.registry import Registry, registry
from tests.server.conftest import Serve
from tests.server.test_server_llama_cpp import FILL, fill_text
from tests.weights.gguf_writer import Packed, write_gguf

HI = [{"role": "user", "content": "hi"}]
KEYS = {"api_key": "user-key,other-key", "admin_key": "admin-key"}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "byte-model", "messages": HI, "stream": False, **more}


def generate(**more: Any) -> dict[str, Any]:
    return {"model": "byte-model", "prompt": "abc", "stream": False, **more}


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n") and "\n\n" not in response.text
    return [json.loads(line) for line in response.text.splitlines()]


def refusal(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    return str(response.json()["error"])


async def prompt_of(serve: Serve, path: str, body: dict[str, Any], **options: Any) -> str:
    """The prompt that the engine gets."""
    engine = ScriptedEngine()
    response = await serve(engine, **options).post(path, json=body)
    assert response.status_code == 200, response.text
    return byte_text().decode(engine.requests[0].prompt_ids, skip_special_tokens=False)


# --- answers ---


async def test_a_chat_is_streamed_in_lines_unless_it_is_not(serve: Serve) -> None:
    client = serve(ScriptedEngine(says("hello")))
    streamed = lines(await client.post("/api/chat", json={"model": "byte-model", "messages": HI}))
    assert [line["message"]["content"] for line in streamed] == ["h", "e", "l", "l", "o", ""]
    assert [line["done"] for line in streamed] == [False] * 5 + [True]
    assert all(line["model"] == "byte-model" and line["created_at"].endswith("Z") for line in streamed)
    whole = (await client.post("/api/chat", json=chat())).json()
    assert whole["message"] == {"role": "assistant", "content": "hello"}
    for last in (streamed[-1], whole):
        assert (last["done_reason"], last["eval_count"], last["load_duration"]) == ("stop", 6, 0)
        assert last["prompt_eval_count"] == len("<|turn|>user: hi\n<|turn|>assistant: ") - 2 * 7
        assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] - 2 > 0


async def test_generate_is_a_turn_or_a_raw_prompt(serve: Serve) -> None:
    client = serve(ScriptedEngine(says("hello")))
    streamed = lines(await client.post("/api/generate", json={"model": "byte-model", "prompt": "x"}))
    assert "".join(line["response"] for line in streamed) == "hello" and streamed[-1]["done_reason"] == "stop"
    assert (await client.post("/api/generate", json=generate())).json()["response"] == "hello"
    assert await prompt_of(serve, "/api/generate", generate()) == "<|turn|>user: abc\n<|turn|>assistant: "
    with_system = generate(system="be brief")
    assert "<|turn|>system: be brief\n<|turn|>user: abc" in await prompt_of(serve, "/api/generate", with_system)
    assert await prompt_of(serve, "/api/generate", generate(raw=True)) == "abc"
    both = await client.post("/api/generate", json=generate(raw=True, system="x"))
    assert "raw" in refusal(both)


async def test_a_suffix_is_put_after_the_gap(serve: Serve, tmp_path: Path) -> None:
    report = msgspec.structs.replace(REPORT, vocab_size=REPORT.vocab_size + len(FILL))
    engine, text = ScriptedEngine(says("x"), report), fill_text(tmp_path, *FILL)
    client = serve(engine, text)
    for more in ({"suffix": "def"}, {"suffix": "def", "raw": True}, {"prompt": "", "suffix": "def"}):
        body = generate(**more)
        assert (await client.post("/api/generate", json=body)).json()["response"] == "x"
        request = engine.requests[-1]
        expected = f"<|fim_prefix|>{body['prompt']}<|fim_suffix|>def<|fim_middle|>"
        assert text.decode(request.prompt_ids, skip_special_tokens=False) == expected
        assert {text.token_id(name) for name in FILL} <= set(request.params.stop_token_ids)
    assert "suffix leaves out" in refusal(await client.post("/api/generate", json=generate(suffix="x", system="y")))
    assert "tokens; the context holds 256" in refusal(
        await client.post("/api/generate", json=generate(suffix="x" * 300))
    )
    assert "insert" in (await client.post("/api/show", json={"model": "byte-model"})).json()["capabilities"]


async def test_a_name_may_have_the_default_tag_and_another_is_not_found(serve: Serve) -> None:
    client = serve()
    for name in ("byte-model", "byte-model:latest", "hf.co/byte-model", "BYTE-model"):
        response = await client.post("/api/chat", json=chat(model=name))
        assert response.status_code == 200 and response.json()["model"] == name
    assert "byte-model" in refusal(await client.post("/api/chat", json=chat(model="llama3.2")), 404)
    assert "no such route: POST /api/create; there are no Modelfiles" in refusal(
        await client.post("/api/create", json={}), 404
    )


async def test_a_request_without_a_prompt_loads_what_is_loaded(serve: Serve) -> None:
    client = serve()
    for path in ("/api/chat", "/api/generate"):
        loaded = (await client.post(path, json={"model": "byte-model", "keep_alive": -1})).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
        assert "unload" in refusal(await client.post(path, json={"model": "byte-model", "keep_alive": "0s"}))


async def test_options_become_sampling_parameters(serve: Serve) -> None:
    engine = ScriptedEngine()
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["x"], "num_predict": 9,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repeat_penalty": 1.2, "num_ctx": 64, "repeat_last_n": -1,
    }  # fmt: skip
    response = await serve(engine).post("/api/chat", json=chat(options=options))
    assert response.status_code == 200 and "ignored_fields" not in response.json(), response.text
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 7, 0.1, 3)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.2)
    assert (params.max_tokens, list(params.stop)) == (9, ["x"])
    await serve(engine).post("/api/chat", json=chat(options={"top_k": 3}))
    params = engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 3, 0.9), "Ollama's own defaults"
    for num_predict in (-1, -2, 0, 10_000):
        await serve(engine := ScriptedEngine()).post("/api/chat", json=chat(options={"num_predict": num_predict}))
        request = engine.requests[0]
        assert request.params.max_tokens == REPORT.max_model_len - len(request.prompt_ids), "as much as there is room"
    await serve(engine := ScriptedEngine()).post(
        "/api/chat", json=chat(options={"seed": -1, "repeat_last_n": 0, "repeat_penalty": 1.5})
    )
    assert engine.requests[0].params.seed != -1 and engine.requests[0].params.repetition_penalty == 1


async def test_what_has_no_effect_is_named_back_and_refused_in_strict_mode(serve: Serve) -> None:
    body = chat(
        keep_alive="5m",
        think=True,
        colour=1,
        shift=True,
        options={"num_ctx": 4096, "num_gpu": 3, "repeat_last_n": 64, "x": 1},
    )
    named = {
        "keep_alive", "think", "colour", "shift", "options.num_ctx", "options.num_gpu", "options.repeat_last_n", "options.x",
    }  # fmt: skip
    client = serve()
    assert set((await client.post("/api/chat", json=body)).json()["ignored_fields"]) == named
    first, *others = lines(await client.post("/api/chat", json=body | {"stream": True}))
    assert set(first["ignored_fields"]) == named and not any("ignored_fields" in line for line in others)
    strict = serve(strict_fields=True)
    for name, value in (("keep_alive", "5m"), ("think", True), ("colour", 1), ("options", {"num_ctx": 4096})):
        assert name in refusal(await strict.post("/api/chat", json=chat(**{name: value})))
    assert (await strict.post("/api/chat", json=chat(keep_alive=-1))).status_code == 200


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature must be between 0 and 100"),
        ("/api/chat", {"options": {"top_p": 0}}, "options.top_p"),
        ("/api/chat", {"options": {"num_ctx": 0}}, "options.num_ctx must be at least 1"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat = 2 is not supported"),
        ("/api/chat", {"options": {"stop": ["x"] * 65}}, "options.stop has 65 entries"),
        ("/api/chat", {"options": {"stop": ["x" * 2000]}}, "options.stop"),
        ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"options": []}, "options"),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive must be a number of seconds or a duration"),
        ("/api/chat", {"keep_alive": True}, "keep_alive"),
        ("/api/chat", {"think": "hard"}, "think must be true, false or one of 'low'"),
        ("/api/chat", {"format": "xml"}, 'format must be "json" or a JSON schema'),
        ("/api/chat", {"format": {"type": "nonsense"}}, "format: #/type"),
        ("/api/chat", {"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ("/api/chat", {"logprobs": True, "top_logprobs": 99}, "top_logprobs must be between 0 and 20"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "tool_name": "f"}]}, "messages[0].tool_name is only"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0]"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls must be a list"),
        ("/api/chat", {"messages": "hi"}, "messages"),
        ("/api/chat", {"truncate": False, "messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ("/api/generate", {"prompt": "x" * 300}, "prompt has"),
        ("/api/generate", {"prompt": "x" * 300, "raw": True}, "prompt has"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"suffix": "x"}, "suffix: this model cannot fill in the middle"),
        ("/api/generate", {"suffix": 3}, "suffix"),
        ("/api/generate", {"images": ["aaaa"]}, "images"),
        ("/api/generate", {"prompt": 3}, "prompt"),
        ("/api/embed", {"input": 3}, "input must be a string or a list of strings"),
        ("/api/embed", {"input": [[1]]}, "input must be a string or a list of strings"),
        ("/api/embed", {"input": []}, "input is empty"),
        ("/api/embed", {"input": "x" * 300, "truncate": False}, "input"),
        ("/api/embeddings", {"prompt": ""}, "prompt is empty"),
    ],
)  # fmt: skip
async def test_wrong_fields_are_named(serve: Serve, path: str, more: dict[str, Any], words: str) -> None:
    base: dict[str, Any] = {"/api/chat": chat(), "/api/generate": generate()}.get(path, {"model": "byte-model"})
    engine = ScriptedEngine()
    assert words in refusal(await serve(engine).post(path, json={**base, **more}))
    assert not engine.requests


async def test_a_long_chat_loses_its_oldest_turns(serve: Serve) -> None:
    turns = [{"role": "system", "content": "S"}]
    for number in range(20):
        turns += [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "yes"}]
    prompt = await prompt_of(serve, "/api/chat", chat(messages=[*turns, *HI]))
    assert prompt.startswith("<|turn|>system: S\n") and prompt.endswith("<|turn|>user: hi\n<|turn|>assistant: ")
    assert "question 19" in prompt and "question 0\n" not in prompt


async def test_the_assistants_last_words_are_continued(serve: Serve) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    assert (await prompt_of(serve, "/api/chat", chat(messages=messages))).endswith("<|turn|>assistant: Well,")


async def test_a_format_becomes_a_grammar(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for format in ("json", schema):
        for path, body in (("/api/chat", chat()), ("/api/generate", generate()), ("/api/generate", generate(raw=True))):
            engine = ScriptedEngine(says('{"a": 1}'))
            response = await serve(engine).post(path, json={**body, "format": format})
            assert response.status_code == 200 and engine.requests[0].params.grammar, response.text
    engine = ScriptedEngine()
    assert (await serve(engine).post("/api/chat", json=chat(format=""))).status_code == 200
    assert not engine.requests[0].params.grammar


THINKING = (
    "{% for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}{% endfor %}<|turn|>assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


async def test_thoughts_are_apart_and_can_be_switched_off(serve: Serve) -> None:
    text = byte_text(THINKING)
    assert text.formats.thinking is not None
    said = says("<think>so</think>yes")
    client = serve(ScriptedEngine(said), text)
    assert (await client.post("/api/chat", json=chat())).json()["message"] == {
        "role": "assistant", "content": "yes", "thinking": "so",
    }  # fmt: skip
    streamed = lines(await client.post("/api/chat", json=chat(stream=True, think=True)))
    assert "".join(line["message"].get("thinking", "") for line in streamed) == "so"
    assert "".join(line["message"]["content"] for line in streamed) == "yes"
    assert (await client.post("/api/generate", json=generate(think=True))).json()["thinking"] == "so"
    quiet = ScriptedEngine(says("yes"))
    await serve(quiet, text).post("/api/chat", json=chat(think=False))
    assert text.decode(quiet.requests[0].prompt_ids, skip_special_tokens=False).endswith("<think></think>")
    hidden = (await serve(ScriptedEngine(said), text).post("/api/chat", json=chat(think=False))).json()["message"]
    assert "thinking" not in hidden


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]


async def test_tools_are_called_and_their_results_come_back(serve: Serve) -> None:
    report = msgspec.structs.replace(REPORT, max_model_len=4096)
    said = says('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    client = serve(ScriptedEngine(said, report))
    whole = (await client.post("/api/chat", json=chat(tools=TOOLS))).json()
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "add", "arguments": {"a": 1}} and call["id"]
    assert whole["done_reason"] == "stop" and whole["message"]["content"] == ""
    streamed = lines(await client.post("/api/chat", json=chat(tools=TOOLS, stream=True)))
    calls = [line["message"]["tool_calls"] for line in streamed if "tool_calls" in line["message"]]
    assert [[one["function"] for one in some] for some in calls] == [[call["function"]]]
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": n, "arguments": {"n": n}}} for n in "ab"],
        },
        {"role": "tool", "tool_name": "b", "content": "of b"},
        {"role": "tool", "content": "of a"},
    ]
    engine = ScriptedEngine(report=report)
    response = await serve(engine).post("/api/chat", json=chat(tools=TOOLS, messages=messages))
    assert response.status_code == 200, response.text
    prompt = byte_text().decode(engine.requests[0].prompt_ids)
    assert "of b" in prompt and "of a" in prompt and '"n": "a"' in prompt


async def test_logprobs(serve: Serve) -> None:
    from octavo.messages import Finish, GenerateRequest, Logprobs, TokenDelta

    def scored(request: GenerateRequest) -> list[list[TokenDelta]]:
        assert request.params.logprobs == 1
        entry = Logprobs(1, [ord("a"), ord("b")], [-0.5, -1.0])
        return [[TokenDelta(request.id, 0, [ord("a")], Finish("length"), logprobs=(entry,))]]

    for path, body in (("/api/chat", chat()), ("/api/generate", generate()), ("/api/generate", generate(raw=True))):
        response = await serve(ScriptedEngine(scored)).post(path, json={**body, "logprobs": True, "top_logprobs": 1})
        assert response.status_code == 200, response.text
        (entry,) = response.json()["logprobs"]
        assert (entry["token"], entry["logprob"]) == ("a", -0.5) and entry["top_logprobs"][0]["token"] == "b"
        assert response.json()["done_reason"] == "length"


async def test_an_error_in_a_stream_is_its_last_line(serve: Serve) -> None:
    engine = ScriptedEngine(never_ends)
    client = serve(engine)
    body = json.dumps(chat(stream=True)).encode()
    call = AsgiCall(client.app, "POST", "/api/chat", body)  # type: ignore[attr-defined]
    await call.until(lambda call: bool(call.sent))
    engine.die("gone")
    await call.done()
    last = json.loads(b"".join(call.sent).splitlines()[-1])
    assert last.keys() == {"error"} and last["error"]


async def test_a_client_that_leaves_ends_its_request(serve: Serve) -> None:
    engine = ScriptedEngine(never_ends)
    client = serve(engine)
    call = AsgiCall(client.app, "POST", "/api/chat", json.dumps(chat(stream=True)).encode())  # type: ignore[attr-defined]
    await call.until(lambda call: bool(call.sent))
    call.leave()
    await call.done()
    assert engine.aborts


async def test_keep_alives_are_lines_that_change_nothing(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine, sse_keep_alive_interval=0.01)
    engine.gate.clear()
    call = AsgiCall(client.app, "POST", "/api/chat", json.dumps(chat(stream=True)).encode())  # type: ignore[attr-defined]
    await call.until(lambda call: len(call.sent) >= 2)
    engine.gate.set()
    await call.done()
    found = [json.loads(line) for line in b"".join(call.sent).splitlines()]
    assert found[0]["message"] == {"role": "assistant", "content": ""} and not found[0]["done"]
    assert "".join(line["message"]["content"] for line in found) == "hello"


@pytest.mark.parametrize(
    ("value", "lasts"),
    [
        (None, None),
        (0, 0),
        (300, 300),
        (-1, -1),
        ("5m", 1),
        ("1h30m", 1),
        ("0", 0),
        ("0s", 0),
        ("-1m", -1),
        ("1.5h", 1),
    ],
)
def test_durations(value: object, lasts: float | None) -> None:
    assert read_keep_alive(value) == lasts


# --- embeddings ---


async def test_embeddings(serve: Serve) -> None:
    import struct

    from octavo.messages import Finish, GenerateRequest, TokenDelta

    def vector(request: GenerateRequest) -> list[list[TokenDelta]]:
        numbers = struct.pack("<2f", len(request.prompt_ids), 0.5)
        return [[TokenDelta(request.id, 0, [], Finish("stop"), vector=numbers)]]

    client = serve(ScriptedEngine(vector, msgspec.structs.replace(REPORT, hidden_size=2)))
    body = (await client.post("/api/embed", json={"model": "byte-model", "input": ["a", "abc"]})).json()
    assert (
        body["embeddings"] == [[1.0, 0.5], [3.0, 0.5]] and body["prompt_eval_count"] == 4 and body["total_duration"] > 0
    )
    one = (await client.post("/api/embed", json={"model": "byte-model", "input": "x" * 300})).json()
    assert one["embeddings"][0][0] <= REPORT.max_model_len, "it is cut"
    old = (await client.post("/api/embeddings", json={"model": "byte-model", "prompt": "ab", "keep_alive": 5})).json()
    assert old == {"embedding": [2.0, 0.5], "ignored_fields": ["keep_alive"]}


# --- models ---

TINY = {
    "general.architecture": "llama",
    "general.file_type": 15,
    "general.license": "mit",
    "tokenizer.ggml.tokens": ["a"] * 99,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    with registry() as opened:
        weights = [Packed("t", (4, 4), "F32", bytes(64))]
        data = write_gguf(tmp_path / "m.gguf", TINY, weights).read_bytes()  # type: ignore[arg-type]
        opened.repositories["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": data + bytes(10_000)}
        for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", opened.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
        yield opened


async def test_models_are_pulled_listed_shown_and_deleted(serve: Serve, hub: Registry) -> None:
    client = serve()
    (served,) = (await client.get("/api/tags")).json()["models"]
    assert served["name"] == served["model"] == "byte-model" and len(served["digest"]) == 64
    data = hub.repositories["org/tiny-GGUF"]["tiny-Q4_K_M.gguf"]
    pulled = lines(await client.post("/api/pull", json={"model": "hf.co/org/tiny-GGUF:Q4_K_M", "insecure": True}))
    assert pulled[0] == {"status": "pulling manifest", "ignored_fields": ["insecure"]}
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    assert {
        "status": "pulling tiny-Q4_K_M.gguf",
        "digest": digest,
        "total": len(data),
        "completed": len(data),
    } in pulled
    assert pulled[-1] == {"status": "success"}
    assert (await client.post("/api/pull", json={"name": "org/tiny-GGUF", "stream": False})).json() == {
        "status": "success"
    }
    _, entry = (await client.get("/api/tags")).json()["models"]
    assert entry["name"] == "org/tiny-GGUF:Q4_K_M" and entry["size"] == len(data)
    assert entry["details"]["quantization_level"] == "Q4_K_M" and entry["details"]["family"] == "llama"
    shown = (await client.post("/api/show", json={"model": "org/tiny-GGUF:Q4_K_M"})).json()
    assert shown["model_info"]["general.parameter_count"] == 16 and shown["license"] == "mit"
    assert "tokenizer.ggml.tokens" not in shown["model_info"], "long lists are left out"
    pulled = refusal(await client.post("/api/chat", json=chat(model="org/tiny-GGUF:Q4_K_M")), 404)
    assert "is pulled, but not loaded" in pulled and pulled.endswith("octavo serve org/tiny-GGUF:Q4_K_M")
    other = refusal(await client.post("/api/generate", json=generate(model="hf.co/org/other:Q8_0", keep_alive=-1)), 404)
    assert "not found" in other and other.endswith("which pulls it: octavo serve org/other:Q8_0")
    library = refusal(await client.post("/api/chat", json=chat(model="llama3.2")), 404)
    assert "'byte-model'" in library and library.endswith("names of the hub, owner/name:tag")
    gone = await client.request("DELETE", "/api/delete", json={"model": "org/tiny-GGUF:Q4_K_M"})
    assert gone.status_code == 200 and Store().models() == []
    assert "not found" in refusal(await client.request("DELETE", "/api/delete", json={"model": "org/tiny-GGUF"}), 404)
    assert "being served" in refusal(await client.request("DELETE", "/api/delete", json={"model": "byte-model:latest"}))
    assert "model is missing" in refusal(await client.request("DELETE", "/api/delete", json={}))
    assert "not found" in refusal(await client.post("/api/show", json={"model": "../../etc"}), 404)


async def test_the_served_model_is_described(serve: Serve) -> None:
    client = serve()
    shown = (await client.post("/api/show", json={"model": "byte-model", "verbose": True})).json()
    assert "message.role" in shown["template"] and shown["capabilities"] == ["completion", "tools"]
    assert shown["ignored_fields"] == ["verbose"]
    (one,) = (await client.get("/api/ps")).json()["models"]
    assert one["context_length"] == REPORT.max_model_len and one["expires_at"].startswith("2318")
    assert (await client.get("/api/version")).json().keys() == {"version", "octavo"}


async def test_pulls_that_fail_say_why(serve: Serve, hub: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve()
    assert lines(await client.post("/api/pull", json={"model": "llama3.2"}))[-1]["error"].startswith(
        "there is no model"
    )
    assert "there is no model" in refusal(await client.post("/api/pull", json={"model": "org/x", "stream": False}))
    for name in ("", "../x", "/etc/passwd", "http://evil.example/x/y"):
        assert "is not the name of a model" in refusal(await client.post("/api/pull", json={"model": name}))
    hub.spoilt.add("tiny-Q4_K_M.gguf")
    assert "SHA-256" in refusal(await client.post("/api/pull", json={"model": "org/tiny-GGUF", "stream": False}))
    limited = serve(max_model_store_bytes=1000)
    body = {"model": "org/tiny-GGUF", "stream": False}
    assert "--max-model-store-bytes" in refusal(await limited.post("/api/pull", json=body))
    assert "--max-model-store-bytes 0" in refusal(await serve(max_model_store_bytes=0).post("/api/pull", json=body))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "cannot be reached" in refusal(await client.post("/api/pull", json=body), 500)


async def test_a_client_that_leaves_ends_its_pull(serve: Serve, hub: Registry) -> None:
    hub.repositories["org/tiny-GGUF"]["tiny-Q4_K_M.gguf"] = bytes(8 * 2**20)
    hub.pause.clear()
    client = serve()
    body = json.dumps({"model": "org/tiny-GGUF"}).encode()
    call = AsgiCall(client.app, "POST", "/api/pull", body)  # type: ignore[attr-defined]
    await call.until(lambda call: b'"completed"' in b"".join(call.sent))
    call.leave()
    await call.done()
    hub.pause.set()
    from octavo.server.dialects.ollama.pull import PULLS

    await PULLS.run(lambda: None)  # it has one thread: the pull has ended
    assert Store().models() == [] and list(Store().root.rglob("*.part")), "the next pull continues it"


async def test_only_an_admin_changes_the_models_of_a_server_with_keys(serve: Serve, hub: Registry) -> None:
    client = serve(**KEYS)
    body = {"model": "org/tiny-GGUF", "stream": False}
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        assert "API key" in refusal(await client.request(method, path, json=body), 401)
        user = {"Authorization": "Bearer user-key"}
        assert "only an admin key" in refusal(await client.request(method, path, json=body, headers=user), 403)
        one = serve(api_key="only-key")  # which all clients may have
        only = {"Authorization": "Bearer only-key"}
        assert "--admin-key" in refusal(await one.request(method, path, json=body, headers=only), 403)
    admin = {"Authorization": "Bearer admin-key"}
    assert (await client.post("/api/pull", json=body, headers=admin)).status_code == 200
    assert (await client.request("DELETE", "/api/delete", json=body, headers=admin)).status_code == 200
    user = {"Authorization": "Bearer user-key"}
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert (await client.get(path)).status_code == 401 and (await client.get(path, headers=user)).status_code == 200


async def test_pages_of_other_sites_reach_none_of_it(serve: Serve, hub: Registry) -> None:
    client = serve()
    evil = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete"), ("POST", "/api/chat"), ("GET", "/api/tags")):
        assert "evil.example" in refusal(await client.request(method, path, json={}, headers=evil), 403)
    assert "not known as" in refusal(await client.get("/api/tags", headers={"Host": "rebound.example"}), 403)


async def test_budgets_hold_for_these_routes(serve: Serve) -> None:
    client = serve(max_messages=2, max_tools=1, max_body_bytes=2000)
    assert "--max-messages" in refusal(await client.post("/api/chat", json=chat(messages=HI * 3)))
    assert "--max-tools" in refusal(await client.post("/api/chat", json=chat(tools=TOOLS * 2)))
    assert "--max-body-bytes" in refusal(await client.post("/api/generate", json=generate(prompt="x" * 3000)), 413)
    deep = b'{"model": "byte-model", "format": ' + b'{"a":' * 150 + b"1" + b"}" * 151
    assert "--max-json-depth" in refusal(await client.post("/api/chat", content=deep))
    limited = await client.post("/api/chat", json=chat(deadline_ms=0))
    assert "deadline_ms" in refusal(limited)
