"""llama.cpp's routes: completions streamed and whole, infill, templates, properties, slots; what is refused or named back."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from octavo.messages import Finish, GenerateRequest, Logprobs, TokenDelta
from octavo.server.generate.infill import fill_prompt, fill_tokens
from octavo.text import Text, load_text
from tests.doubles import REPORT, ScriptedEngine, byte_text, says, write_byte_tokenizer
from tests.server.conftest import Serve
from tests.server.running import engine as real_engine

FILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FILES = ("<|repo_name|>", "<|file_sep|>")


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert response.json().keys() == {"error"} and error.keys() == {"code", "message", "type", "param"}
    assert error["code"] == status
    return dict(error)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """llama.cpp's streams have no [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def complete(client: httpx.AsyncClient, path: str = "/completion", **body: Any) -> Any:
    response = await client.post(path, json={"prompt": "ab\n", **body})
    assert response.status_code == 200, response.text
    return events(response) if body.get("stream") else response.json()


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a_completion_is_whole_or_streamed(serve: Serve, path: str) -> None:
    client = serve(ScriptedEngine(says("hi\nyou", cached=2)))
    whole = await complete(client, path, n_predict=9)
    assert whole["content"] == "hi\nyou" and whole["tokens"] == [] and whole["stop"] is True
    assert (whole["stop_type"], whole["stopping_word"], whole["truncated"]) == ("eos", "", False)
    assert (whole["tokens_evaluated"], whole["tokens_predicted"], whole["tokens_cached"]) == (3, 7, 2)
    assert (whole["model"], whole["prompt"], whole["has_new_line"]) == ("byte-model", "ab\n", True)
    assert whole["timings"]["prompt_n"] == 1 and whole["timings"]["predicted_n"] == 7 and "error" not in whole
    *chunks, last = await complete(client, path, n_predict=9, stream=True)
    assert "".join(chunk["content"] for chunk in chunks) == "hi\nyou" and not any(chunk["stop"] for chunk in chunks)
    assert [token for chunk in chunks for token in chunk["tokens"]][:6] == [*b"hi\nyou"]
    assert [chunk["tokens_predicted"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 7][: len(chunks)]
    assert last["content"] == "" and last["stop"] is True and "timings" in last and "timings" not in chunks[0]
    same = {"stop_type", "tokens_predicted", "tokens_evaluated", "tokens_cached", "prompt", "has_new_line"}
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}


async def test_options_become_sampling_parameters(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine)
    options = {"temperature": 0.3, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.2, "seed": 4}
    more = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "ignore_eos": True, "stop": ["x", ""]}
    bias = [[97, 1.5], ["bc", -2], [100, False]]
    answer = await complete(client, n_predict=5, logit_bias=bias, **options, **more)
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.3, 7, 0.5, 0.1)
    assert (params.repetition_penalty, params.seed, params.max_tokens, params.stop) == (1.2, 4, 5, ("x",))
    assert (params.presence_penalty, params.frequency_penalty, params.ignore_eos) == (0.5, 0.25, True)
    assert params.logit_bias == {97: 1.5, 98: -2, 99: -2, 100: -100}
    shown = answer["generation_settings"]
    assert {name: shown[name] for name in options} == options and shown["n_predict"] == 5 and shown["stop"] == ["x"]
    await complete(client, temperature=-1, seed=-1, n_predict=-1, repeat_penalty=1.5, repeat_last_n=0, max_tokens=None)
    params = engine.requests[1].params
    assert (params.temperature, params.repetition_penalty) == (0, 1)
    assert params.max_tokens is None or params.max_tokens > 100
    await complete(client, max_tokens=3, logit_bias={"97": 2, "d": False})
    assert engine.requests[2].params.max_tokens == 3 and engine.requests[2].params.logit_bias == {97: 2, 100: -100}


async def test_prompts_have_several_shapes(serve: Serve) -> None:
    engine = ScriptedEngine(says("x"))
    client = serve(engine)
    shapes = {"ab": [97, 98], "ids": [97, 98], "mixed": [97, 98, 99], "object": [97], "one": [97]}
    for name, prompt in {
        "ab": "ab",
        "ids": [97, 98],
        "mixed": [97, "b", 99],
        "object": {"prompt_string": "a"},
        "one": ["a"],
    }.items():
        answer = await complete(client, prompt=prompt)
        assert answer["content"] == "x" and engine.requests[-1].prompt_ids == shapes[name], name
    several = await complete(client, prompt=["a", [98, 99], [100, "e"]], foo=1)
    assert [one["index"] for one in several] == [0, 1, 2] and [one["tokens_evaluated"] for one in several] == [1, 2, 2]
    assert all(one["ignored_fields"] == ["foo"] for one in several)
    streamed = await complete(client, prompt=["a", "b"], stream=True)
    assert sorted(chunk["index"] for chunk in streamed if chunk["stop"]) == [0, 1]
    twice = await complete(client, prompt="a", n_cmpl=2)
    assert [one["content"] for one in twice] == ["x", "x"]


@pytest.mark.parametrize("prompt", [None, 3, [], {}, [["a", 1.5]], [True], {"prompt_string": 1}, [["a"], 5]])
async def test_other_prompts_are_refused(serve: Serve, prompt: Any) -> None:
    error = refusal(await serve().post("/completion", json={"prompt": prompt}))
    assert error["message"].startswith("prompt") and error["param"].startswith("prompt")


async def test_too_many_prompts_are_refused(serve: Serve) -> None:
    assert "at most 1024" in refusal(await serve().post("/completion", json={"prompt": ["a"] * 1025}))["message"]


async def test_ends_are_named(serve: Serve) -> None:
    client = serve(ScriptedEngine(says("one two three")))
    stopped = await complete(client, stop=["two"])
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("one ", "word", "two")
    cut = await complete(serve(ScriptedEngine(says("abc", reason="length"))), n_predict=3)
    assert cut["stop_type"] == "limit" and cut["truncated"] is False


async def test_no_tokens_compute_the_prompt_alone(serve: Serve) -> None:
    client = serve(ScriptedEngine(says("a", reason="length")))
    whole = await complete(client, n_predict=0, return_tokens=True)
    assert (whole["content"], whole["tokens"], whole["tokens_predicted"]) == ("", [], 0)
    assert whole["generation_settings"]["n_predict"] == 0
    (last,) = await complete(client, n_predict=0, stream=True)
    assert last["stop"] is True and last["tokens_predicted"] == 0


def scored(request: GenerateRequest) -> list[list[TokenDelta]]:
    """Two tokens, each with the logprobs of itself and of the next id."""
    first, last = Logprobs(1, [97, 97, 98], [-0.5, -0.5, -1.0]), Logprobs(1, [98, 98, 99], [-0.25, -0.25, -2.0])
    end = TokenDelta(request.id, 0, [98], Finish("length", None), logprobs=[last])
    return [[TokenDelta(request.id, 0, [97], logprobs=[first])], [end]]


async def test_tokens_and_probabilities_come_on_request(serve: Serve) -> None:
    engine = ScriptedEngine(scored)
    client = serve(engine)
    answer = await complete(client, n_predict=2, n_probs=2, return_tokens=True)
    assert engine.requests[0].params.logprobs == 2 and answer["tokens"] == [97, 98]
    scores = answer["completion_probabilities"]
    assert scores[0] == {
        "id": 97,
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [
            {"id": 97, "token": "a", "bytes": [97], "logprob": -0.5},
            {"id": 98, "token": "b", "bytes": [98], "logprob": -1.0},
        ],
    }
    streamed = await complete(client, n_predict=2, n_probs=2, stream=True, timings_per_token=True)
    assert [score for chunk in streamed for score in chunk.get("completion_probabilities", [])] == scores
    assert all(chunk["timings"]["predicted_n"] == chunk["tokens_predicted"] for chunk in streamed)


async def test_a_whole_answer_has_the_times_of_its_tokens(served: Any) -> None:
    one = served(real_engine(seconds=0.005))
    timings = (await one.http.post("/completion", json={"prompt": "ab", "n_predict": 20, "ignore_eos": True})).json()[
        "timings"
    ]
    assert timings["predicted_ms"] >= 19 * 5  # a step a token, after the first
    assert timings["predicted_per_second"] == pytest.approx(1000 * 20 / timings["predicted_ms"])


async def test_progress_comes_on_request(served: Any) -> None:
    one = served(real_engine(max_num_batched_tokens=16))
    body = {"prompt": "ab" * 40, "n_predict": 2, "ignore_eos": True, "stream": True, "return_progress": True}
    found = [
        part["prompt_progress"]
        for part in events(await one.http.post("/completion", json=body))
        if "prompt_progress" in part
    ]
    assert found and all(part["total"] == 80 and part["time_ms"] > 0 for part in found)
    assert [part["processed"] for part in found] == sorted({part["processed"] for part in found})


async def test_fields_are_refused_or_named_back(serve: Serve) -> None:
    client = serve()
    usual = {
        "cache_prompt": True, "id_slot": -1, "mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0,
        "dynatemp_range": 0, "n_keep": 0, "min_keep": 0, "post_sampling_probs": False, "lora": [], "top_n_sigma": -1,
    }  # fmt: skip
    assert "ignored_fields" not in await complete(client, **usual)
    named = {"samplers": ["top_k"], "id_slot": 2, "n_keep": 5, "t_max_predict_ms": 500, "repeat_last_n": 64}
    assert set((await complete(client, **named))["ignored_fields"]) == set(named)
    streamed = await complete(client, stream=True, **named)
    assert set(streamed[0]["ignored_fields"]) == set(named)
    for name, value in {"mirostat": 2, "typical_p": 0.5, "dry_multiplier": 1, "xtc_probability": 0.5}.items():
        error = refusal(await client.post("/completion", json={"prompt": "a", name: value}))
        assert error["param"] == name and "not supported" in error["message"]
    strict = serve(strict_fields=True)
    assert "samplers" in refusal(await strict.post("/completion", json={"prompt": "a", "samplers": []}))["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n_probs": 21}, "n_probs"),
        ({"n_predict": 10**9}, "n_predict"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"n_cmpl": 10**6}, "n_cmpl"),
        ({"n_predict": 3, "max_tokens": 4}, "max_tokens"),
        ({"logit_bias": 3}, "logit_bias"),
        ({"logit_bias": [[97]]}, "logit_bias"),
        ({"logit_bias": [[97, "x"]]}, "logit_bias[0]"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias[0]"),
        ({"logit_bias": [[97, 1]] * 1025}, "logit_bias"),
        ({"logit_bias": [["a" * 1000, 1]] * 66}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"model": "other"}, "model"),
        ({"grammar": "root ::= ("}, "grammar"),
    ],
)
async def test_errors_name_llama_cpps_fields(serve: Serve, body: dict[str, Any], param: str) -> None:
    response = await serve().post("/completion", json={"prompt": "a", **body})
    error = refusal(response, 404 if param == "model" else 400)
    assert error["param"] == param


async def test_grammars_reach_the_sampler(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine)
    answer = await complete(client, grammar='root ::= "yes" | "no"', n_predict=20)
    assert '"yes"' in engine.requests[0].params.grammar and answer["generation_settings"]["grammar"].startswith("root")
    await complete(client, json_schema={"type": "boolean", "title": "t"}, n_predict=40)
    assert "true" in engine.requests[1].params.grammar or "boolean" in engine.requests[1].params.grammar
    await complete(client, grammar="")
    assert engine.requests[2].params.grammar == ""


# --- infill ---


def fill_text(folder: Path, *special: str) -> Text:
    write_byte_tokenizer(folder, special=special)
    return load_text(folder)


async def test_infill_puts_the_parts_between_the_models_tokens(serve: Serve, tmp_path: Path) -> None:
    report = msgspec.structs.replace(REPORT, vocab_size=REPORT.vocab_size + len(FILL))
    engine, text = ScriptedEngine(says("x"), report), fill_text(tmp_path, *FILL)
    client = serve(engine, text)
    body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 4}
    answer = (await client.post("/infill", json=body)).json()
    request = engine.requests[0]
    expected = "<|fim_prefix|>ac<|fim_suffix|>b<|fim_middle|>"
    assert text.decode(request.prompt_ids, skip_special_tokens=False) == expected == answer["prompt"]
    assert {text.token_id(name) for name in FILL} <= set(request.params.stop_token_ids) and answer["content"] == "x"
    extra = [{"filename": "f.py", "text": "import f"}, {"text": "g"}]
    await client.post("/infill", json={**body, "input_extra": extra})
    shown = text.decode(engine.requests[1].prompt_ids, skip_special_tokens=False)
    assert shown == "f.py\nimport f\ntmp\ng\n" + expected


def test_files_have_tokens_where_the_model_has_them(tmp_path: Path) -> None:
    text = fill_text(tmp_path, *FILL, *FILES)
    ids = fill_prompt(text, fill_tokens(text), "a", "b", 1000, [("f.py", "f")])
    assert text.decode(ids, skip_special_tokens=False) == (
        "<|repo_name|>myproject\n<|file_sep|>f.py\nf\n<|file_sep|>filename\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


async def test_infill_is_refused_without_these_tokens(serve: Serve) -> None:
    error = refusal(await serve().post("/infill", json={"input_prefix": "a", "input_suffix": "b"}))
    assert "cannot fill in the middle" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_suffix": "b"}, "input_prefix"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [3]}, "input_extra[0]"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "t"}] * 65}, "input_extra"),
        (
            {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "t", "filename": 1}]},
            "input_extra[0].filename",
        ),
    ],
)
async def test_infill_names_wrong_fields(serve: Serve, tmp_path: Path, body: dict[str, Any], param: str) -> None:
    response = await serve(text=fill_text(tmp_path, *FILL)).post("/infill", json=body)
    assert refusal(response)["param"] == param


# --- templates, properties, slots ---


async def test_a_template_is_applied(serve: Serve) -> None:
    client = serve()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi <|end|>"}]}
    rendered = (await client.post("/apply-template", json=body)).json()
    assert rendered == {"prompt": "<|turn|>user: hi <|end|>\n<|turn|>assistant: "}
    closed = (
        await client.post("/apply-template", json={**body, "add_generation_prompt": False, "temperature": 1})
    ).json()
    assert closed["prompt"] == "<|turn|>user: hi <|end|>\n" and closed["ignored_fields"] == ["temperature"]
    assert (
        refusal(await client.post("/apply-template", json={"messages": [{"role": "x"}]}))["param"] == "messages[0].role"
    )
    own = {**body, "chat_template": "{{ messages[0].content }}!"}
    assert "--trust-request-chat-template" in refusal(await client.post("/apply-template", json=own))["message"]
    trusting = serve(trust_request_chat_template=True)
    assert (await trusting.post("/apply-template", json=own)).json() == {"prompt": "hi <|end|>!"}


async def test_props_describe_the_server(serve: Serve) -> None:
    client = serve(text=byte_text(generation_config='{"temperature": 0.4, "top_k": 9}'))
    props = (await client.get("/props")).json()
    report = client.app.state.service.report  # type: ignore[attr-defined]
    assert props["total_slots"] == report.max_num_seqs and props["model_alias"] == "byte-model"
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == report.max_model_len
    assert (defaults["params"]["temperature"], defaults["params"]["top_k"], defaults["params"]["n_predict"]) == (
        0.4,
        9,
        -1,
    )
    assert "<|turn|>" in props["chat_template"] and props["modalities"] == {"vision": False, "audio": False}
    assert refusal(await client.post("/props", json={}), 405)["code"] == 405


BUSY = {"prompt": "ab", "n_predict": 200, "ignore_eos": True}


async def busy_slots(one: Any, path: str = "/slots", headers: dict[str, str] | None = None) -> httpx.Response:
    """The first answer in which not all slots are idle."""
    while True:
        answer = await one.http.get(path, headers=headers)
        if answer.status_code != 200 or any(slot["is_processing"] for slot in answer.json()):
            return answer  # type: ignore[no-any-return]


async def test_slots_are_the_rows_of_the_batch(served: Any) -> None:
    one = served(real_engine(), api_key="mine,other", admin_key="boss")
    mine, other, boss = ({"authorization": f"Bearer {key}"} for key in ("mine", "other", "boss"))
    idle = (await one.http.get("/slots", headers=mine)).json()
    assert len(idle) == one.app.state.service.report.max_num_seqs
    assert not any(slot["is_processing"] for slot in idle) and [slot["id"] for slot in idle] == [*range(len(idle))]
    running = asyncio.create_task(one.http.post("/completion", json=BUSY, headers=mine))
    for headers, is_shown in ((mine, True), (other, False), (boss, True)):
        slots = (await busy_slots(one, headers=headers)).json()
        (busy,) = (slot for slot in slots if slot["is_processing"])
        assert ("n_prompt_tokens" in busy) == is_shown
        if is_shown:
            assert busy["n_prompt_tokens"] == 2
            assert busy["next_token"]["n_decoded"] + busy["next_token"]["n_remain"] == 200
    assert (await one.http.get("/slots?fail_on_no_slot=1", headers=mine)).status_code == 200
    assert "fail_on_no_slot" in refusal(await one.http.get("/slots?x=1", headers=mine))["message"]
    assert refusal(await one.http.get("/slots"), 401)["code"] == 401
    assert (await running).status_code == 200


async def test_no_idle_slot_is_unavailable(served: Any) -> None:
    one = served(real_engine(max_num_seqs=1))
    running = asyncio.create_task(one.http.post("/completion", json=BUSY))
    assert "no slot is idle" in refusal(await busy_slots(one, "/slots?fail_on_no_slot=1"), 503)["message"]
    assert (await running).status_code == 200
