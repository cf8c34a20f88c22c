"""Tools with the official openai client against the real model: calls that must come, streamed and whole, and their results."""

import json

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]}},
            "required": ["city"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = [{"role": "user", "content": "Weather in Paris?"}]


class GetWeather(BaseModel):
    city: str
    days: int


@pytest.fixture
def ask(client, model):
    return client, {"model": model, "max_tokens": 120, "temperature": 0}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_come(ask, choice):
    client, options = ask
    wish = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, **options}
    whole = client.chat.completions.create(**wish).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    for call in whole.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather" and arguments.keys() <= {"city", "unit"} and "city" in arguments
        assert call.id and call.type == "function"
    with client.chat.completions.stream(**wish) as stream:
        final = stream.get_final_completion().choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == calls
    assert final.finish_reason == "tool_calls"
    with client.chat.completions.create(**wish, stream=True) as chunks:
        deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    for at, (name, arguments) in enumerate(calls):  # a name and an id once, then arguments alone
        own = [delta for delta in deltas if delta.index == at]
        assert [delta.id for delta in own if delta.id] == [own[0].id]
        assert [delta.function.name for delta in own if delta.function.name] == [name]
        assert "".join(delta.function.arguments or "" for delta in own) == arguments


def test_a_tool_from_a_model_class(ask):
    client, options = ask
    tool = openai.pydantic_function_tool(GetWeather)
    answer = client.chat.completions.parse(messages=QUESTION, tools=[tool], tool_choice="required", **options)
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather)


def test_results_go_back_and_words_come(ask):
    client, options = ask
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is 20 degrees and sunny."},
    ]
    answer = client.chat.completions.create(messages=messages, tools=[WEATHER], tool_choice="none", **options)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    auto = client.chat.completions.create(messages=messages, tools=[WEATHER], **options).choices[0]
    assert auto.message.content or auto.message.tool_calls


def test_json_that_max_tokens_would_cut_is_ended(ask):
    client, options = ask
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "Reply with a JSON object with key a"}],
        response_format={"type": "json_object"},
        **{**options, "max_tokens": 40},
    ).choices[0]
    assert isinstance(json.loads(answer.message.content), dict)
