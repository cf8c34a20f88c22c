"""litellm: chat, streams, tools and structured output against the embedded model, as a vLLM server and as an OpenAI one."""

import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="litellm is not installed: make test-clients")

from pydantic import BaseModel  # noqa: E402

from tests.clients.conftest import MODEL  # noqa: E402

pytestmark = pytest.mark.model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Capital(BaseModel):
    country: str
    capital: str


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": base_url,
        "api_key": "unused",
        "temperature": 0,
        "max_tokens": 96,
        "timeout": 120,
        "num_retries": 0,
    }


QUESTION = [{"role": "user", "content": "Name the capital of Germany."}]


def test_chat_and_stream(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=QUESTION, **options)
    assert "Berlin" in answer.choices[0].message.content and answer.usage.completion_tokens > 0
    chunks = litellm.completion(messages=QUESTION, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


def test_a_tool_that_must_be_called(options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    wish = {"messages": messages, "tools": [WEATHER], "tool_choice": "required"}
    answer = litellm.completion(**wish, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    call = answer.message.tool_calls[0].function
    assert call.name == "get_weather" and isinstance(json.loads(call.arguments)["city"], str)
    chunks = list(litellm.completion(**wish, **options, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function
    assert (built.name, built.arguments) == (call.name, call.arguments)


def test_structured_output(options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Give France and its capital."}]
    answer = litellm.completion(messages=messages, response_format=Capital, **options)
    Capital.model_validate_json(answer.choices[0].message.content)
