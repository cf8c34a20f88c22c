"""The official openai and anthropic clients, unchanged, at /v1/responses and /v1/messages: real processes, the real model."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.servers import Server

pytestmark = pytest.mark.model

GREEDY = {"temperature": 0}  # the newest client has no argument for it
QUESTION = "What is the capital of Germany? Answer in one word."


_opened = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    with _opened:
        yield


def openai_client(server: Server) -> openai.OpenAI:
    return _opened.enter_context(
        openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0, timeout=120)
    )


def anthropic_client(server: Server) -> anthropic.Anthropic:
    return _opened.enter_context(
        anthropic.Anthropic(base_url=server.base, api_key="unused", max_retries=0, timeout=120)
    )


@pytest.fixture
def name(server: Server) -> str:
    return openai_client(server).models.list().data[0].id


class TestResponses:
    def test_whole_and_streamed_are_one_answer(self, server: Server, name: str) -> None:
        client = openai_client(server)
        asked: dict[str, Any] = {"model": name, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
        whole = client.responses.create(**asked)
        assert "Berlin" in whole.output_text and whole.usage is not None and whole.usage.output_tokens > 0
        with client.responses.stream(**asked) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output_text == whole.output_text
        with client.responses.create(**asked, stream=True) as events:
            streamed = [*events]
        assert streamed[0].type == "response.created" and streamed[-1].type == "response.completed"
        assert "".join(event.delta for event in streamed if event.type == "response.output_text.delta") == "".join(
            deltas
        )

    def test_any_process_continues_what_any_other_kept(self, server: Server, name: str) -> None:
        """Every client opens a connection of its own, and the two API processes take them in turn."""
        first = openai_client(server).responses.create(
            model=name, input="My name is Ann.", temperature=0, max_output_tokens=16
        )
        asked: dict[str, Any] = {"model": name, "input": "What is my name?", "temperature": 0, "max_output_tokens": 16}
        answers = [
            openai_client(server).responses.create(previous_response_id=first.id, **asked).output_text for _ in range(4)
        ]
        assert len(set(answers)) == 1, answers
        for _ in range(4):
            client = openai_client(server)
            assert client.responses.retrieve(first.id) == first
            items = client.responses.input_items.list(first.id).data
            assert [item.content[0].text for item in items] == ["My name is Ann."]  # type: ignore[union-attr]
        openai_client(server).responses.delete(first.id)
        for _ in range(4):
            with pytest.raises(openai.NotFoundError):
                openai_client(server).responses.create(previous_response_id=first.id, **asked)

    def test_an_answer_in_a_shape(self, server: Server, name: str) -> None:
        class Capital(BaseModel):
            country: str
            capital: str

        asked: dict[str, Any] = {"model": name, "input": "Germany and its capital, as JSON.", "temperature": 0}
        answer = openai_client(server).responses.parse(text_format=Capital, max_output_tokens=200, **asked)
        assert isinstance(answer.output_parsed, Capital)

    def test_a_tool_is_called_and_its_result_is_read(self, server: Server, name: str) -> None:
        client = openai_client(server)
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tool: Any = {"type": "function", "name": "get_weather", "parameters": schema, "strict": True}
        asked: dict[str, Any] = {"model": name, "tools": [tool], "temperature": 0, "max_output_tokens": 120}
        first = client.responses.create(input="Weather in Paris?", tool_choice="required", **asked)
        calls = [item for item in first.output if item.type == "function_call"]
        assert calls and isinstance(json.loads(calls[0].arguments)["city"], str)
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"} for call in calls
        ]
        second = client.responses.create(
            input=results, previous_response_id=first.id, **{**asked, "tool_choice": "none"}
        )
        assert second.output_text and all(item.type == "message" for item in second.output)

    def test_errors_are_the_clients_own(self, server: Server, name: str) -> None:
        client = openai_client(server)
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(model=name, input="a", background=True)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_none")
        assert client.responses.input_tokens.count(model=name, input="hi").input_tokens > 2


class TestMessages:
    def test_whole_and_streamed_are_one_answer(self, server: Server, name: str) -> None:
        client = anthropic_client(server)
        messages: Any = [{"role": "user", "content": QUESTION}]
        asked: dict[str, Any] = {"model": name, "messages": messages, "system": "Be brief.", "max_tokens": 24}
        whole = client.messages.create(extra_body=GREEDY, **asked)
        assert "Berlin" in whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens")  # type: ignore[union-attr]
        with client.messages.stream(extra_body=GREEDY, **asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
        assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
        counted = client.messages.count_tokens(model=name, messages=messages, system="Be brief.").input_tokens
        assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

    def test_a_tool_is_called_and_its_result_is_read(self, server: Server, name: str) -> None:
        client = anthropic_client(server)
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tools: Any = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": schema}]
        messages: Any = [{"role": "user", "content": "Weather in Paris?"}]
        choice: Any = {"type": "tool", "name": "get_weather"}
        first = client.messages.create(
            model=name, max_tokens=120, extra_body=GREEDY, messages=messages, tools=tools, tool_choice=choice
        )
        (call,) = (block for block in first.content if block.type == "tool_use")
        assert first.stop_reason == "tool_use" and isinstance(call.input["city"], str)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
        messages = [*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(
            model=name, max_tokens=40, extra_body=GREEDY, messages=messages, tools=tools, tool_choice={"type": "none"}
        )
        assert second.content[0].type == "text" and second.content[0].text

    def test_errors_are_the_clients_own(self, server: Server, name: str) -> None:
        client = anthropic_client(server)
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "a"}])
        assert caught.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="image"):
            source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
            content: Any = [{"type": "image", "source": source}]
            client.messages.create(model=name, max_tokens=5, messages=[{"role": "user", "content": content}])
