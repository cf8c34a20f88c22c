"""POST /v1/responses/compact: user messages and a summary, which stand for the conversation when they are sent back."""

from typing import Any

import msgspec
import pytest
from openai.types.responses import ResponseCompactionItem, ResponseUsage
from openai.types.responses.compacted_response import CompactedResponse

from octavo.server.dialects.openai_responses.compact import DEFAULT_MAX_TOKENS, INSTRUCTION
from octavo.server.dialects.openai_responses.summary import read_summary, write_summary
from tests.doubles import REPORT, Script, ScriptedEngine, says
from tests.server.conftest import Serve, error_of

URL, COMPACT = "/v1/responses", "/v1/responses/compact"
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "uno"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
    {"role": "user", "content": "two"},
]


def engine(script: Script) -> ScriptedEngine:
    return ScriptedEngine(script, msgspec.structs.replace(REPORT, max_model_len=4096))


def prompt_of(scripted: ScriptedEngine) -> str:
    return bytes(token for token in scripted.requests[-1].prompt_ids if token < 256).decode()


async def test_a_conversation_is_compacted_and_continued(serve: Serve) -> None:
    scripted = engine(says(" a summäry ", cached=2))
    client = serve(scripted)
    body = {"model": "byte-model", "input": TALK, "instructions": "be kind", "prompt_cache_key": "k"}
    answer = (await client.post(COMPACT, json=body)).json()
    *users, made = answer["output"]
    needed = {name for name, field in CompactedResponse.model_fields.items() if field.is_required()}
    assert needed <= answer.keys() and answer["object"] == "response.compaction" and answer["created_at"] > 0
    assert answer["id"].startswith("resp_") and "ignored_fields" not in answer
    ResponseUsage.model_validate(answer["usage"])
    ResponseCompactionItem.model_validate(made)
    assert [item["content"][0]["text"] for item in users] == ["one", "two"]
    assert made["type"] == "compaction" and made["id"].startswith("cmp_")
    assert read_summary(made["encrypted_content"], "") == "a summäry"
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 2 and answer["usage"]["output_tokens"] > 0
    assert scripted.requests[-1].params.max_tokens == DEFAULT_MAX_TOKENS
    text = prompt_of(scripted)
    assert text.startswith("system: be kind") and "42" in text and f"user: {INSTRUCTION}\n" in text

    following = await client.post(URL, json={"input": [*answer["output"], {"role": "user", "content": "three"}]})
    assert following.status_code == 200
    text = prompt_of(scripted)
    assert "assistant: Summary of our conversation so far:\na summäry\n" in text and text.index("two") < text.index(
        "three"
    )
    assert "uno" not in text and INSTRUCTION not in text
    # Its items are stored with the response, and can be compacted again.
    again = await client.post(COMPACT, json={"previous_response_id": following.json()["id"], "max_output_tokens": 9})
    assert [item["type"] for item in again.json()["output"]] == ["message"] * 3 + ["compaction"]
    assert "a summäry" in prompt_of(scripted) and scripted.requests[-1].params.max_tokens == 9


async def test_fields_without_effect_are_named(serve: Serve) -> None:
    answer = await serve(engine(says("a"))).post(COMPACT, json={"input": "hi", "stream": True, "service_tier": "flex"})
    assert sorted(answer.json()["ignored_fields"]) == ["service_tier", "stream"]


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "input", "give input, previous_response_id or both"),
        ({"input": "x" * 5000}, 400, "input", ""),
        ({"input": "hi", "max_output_tokens": -1}, 400, "max_output_tokens", "must be between 1"),
        ({"input": "hi", "image": {"context_compression": "enabled"}}, 400, "image", "not supported"),
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id", "no response"),
    ],
)
async def test_mistakes_are_named(serve: Serve, body: dict[str, Any], status: int, param: str, words: str) -> None:
    error = error_of(await serve(engine(says("a"))).post(COMPACT, json=body), status)
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize(
    "content", ["", "abc", "octavo-summary-1.%%%", "octavo-summary-1.gICA", "octavo-summary-2.YQ=="]
)
async def test_an_item_that_is_not_ours_is_refused(serve: Serve, content: str) -> None:
    item = {"type": "compaction", "encrypted_content": content}
    error = error_of(await serve().post(URL, json={"input": [item]}), 400)
    assert error["param"] == "input[0].encrypted_content" and "was not made by" in error["message"]


async def test_no_summary_is_an_error(serve: Serve) -> None:
    error = error_of(await serve(engine(says("  "))).post(COMPACT, json={"input": "hi"}), 500)
    assert "wrote no summary" in error["message"]


@pytest.mark.parametrize("summary", ["a", "ä🌊\n\ud800"])
def test_a_summary_is_read_as_it_was_written(summary: str) -> None:
    assert read_summary(write_summary(summary), "") == summary.replace("\ud800", "?")
