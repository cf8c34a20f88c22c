"""OpenAI's published schemas, and the openai client's own types, as judges of responses and of their streams."""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

DOCUMENT = json.loads((Path(__file__).parent / "openai_responses_schema.json").read_text())

# What the Open Responses specification requires on top: clients written for either are to find all of it.
OPEN_RESPONSES = {
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
}
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **DOCUMENT})


@functools.cache
def _schema_of_event() -> dict[str, str]:
    names = [
        option["$ref"].rsplit("/")[-1] for option in DOCUMENT["components"]["schemas"]["ResponseStreamEvent"]["anyOf"]
    ]
    return {DOCUMENT["components"]["schemas"][name]["properties"]["type"]["enum"][0]: name for name in names}


def check(name: str, value: object) -> None:
    _validator(name).validate(value)


def check_response(body: dict[str, Any]) -> dict[str, Any]:
    check("Response", body)
    assert body.keys() >= OPEN_RESPONSES, OPEN_RESPONSES - body.keys()
    Response.model_validate(body)
    return body


def check_event(event: dict[str, Any]) -> dict[str, Any]:
    check(_schema_of_event()[event["type"]], event)
    _EVENTS.validate_python(event)
    if "response" in event:
        check_response(event["response"])
    return event


def typed_events(body: bytes) -> list[dict[str, Any]]:
    """Every event of a response's stream, each of them checked, the stream as a whole put together and compared."""
    blocks = body.decode().removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = check_event(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    _check_story(events)
    return events


def _check_story(events: list[dict[str, Any]]) -> None:
    """What was added up is what the last event says."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")
    items: list[dict[str, Any]] = []
    text = ""
    is_open = False
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            assert not is_open and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text, is_open = "", True
            continue
        assert is_open and event["output_index"] == len(items) - 1
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        if event["type"].endswith(".delta"):
            assert event["delta"], "an empty delta says nothing"
            text += event["delta"]
        elif event["type"] in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == text
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == text and event["name"] == items[-1]["name"]
        elif event["type"] == "response.content_part.done":
            assert event["part"]["text"] == text
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == items[-1]["id"] and event["item"]["type"] == items[-1]["type"]
            items[-1], is_open = event["item"], False
    if events[-1]["type"] != "response.failed":
        assert not is_open and events[-1]["response"]["output"] == items
