"""Shape: what a route gives back, for the OpenAPI document. An endpoint's module names its routes' in SHAPES.
Knows nothing of the document. Beside it, the schemas of fields whose values are checked by hand."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WithJsonSchema

from octavo.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Shape:
    answer: Any = None  # a msgspec type; None: no JSON
    media: tuple[str, ...] = ()  # of answers that are no JSON
    form: dict[str, Any] | None = None  # what a multipart body holds, as a JSON schema
    error: dict[str, Any] | None = None  # where a dialect has error bodies of its own
    leads_to: tuple[str, ...] = ()  # routes whose path takes the id of this answer


EVENTS = ("text/event-stream",)

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
}

Prompts = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]})
]
"""A string, a list of strings, a list of token ids, a list of lists of token ids."""
Stops = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {**_TEXTS, "minItems": 0}, {"type": "null"}]})]
Messages = Annotated[list[dict[str, Any]], WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]

_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_TEXT_OR_PARTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}
_FUNCTION = {"name": _NAME, "description": {"type": "string"}}


def _list_of(properties: dict[str, Any], required: list[str]) -> WithJsonSchema:
    item = {"type": "object", "properties": properties, "required": required}
    return WithJsonSchema({"anyOf": [{"type": "array", "items": item}, {"type": "null"}]})


def _function(**others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**_FUNCTION, **others}, "required": ["name"]}


Tools = Annotated[
    list[Any] | None,
    _list_of(
        {"type": {"enum": ["function"]}, "function": _function(parameters={"type": "object"})}, ["type", "function"]
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "properties": {"type": {"enum": ["function"]}, "function": _function()},
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]
# Anthropic's
Turns = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT_OR_PARTS},
                "required": ["role", "content"],
            },
            "minItems": 1,
        }
    ),
]
System = Annotated[Any, WithJsonSchema({"anyOf": [*_TEXT_OR_PARTS["anyOf"], {"type": "null"}]})]
TurnTools = Annotated[
    list[dict[str, Any]] | None, _list_of({**_FUNCTION, "input_schema": {"type": "object"}}, ["name", "input_schema"])
]


def ranges(server: ServerConfig) -> dict[str, dict[str, Any]]:
    """What SamplingParams and the server's limits allow, field by field, where it is a number."""
    logprobs = {"minimum": 0, "maximum": server.max_logprobs}
    return {
        "temperature": {"minimum": 0, "maximum": 100},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
        "top_k": {"minimum": -1},
        "n": {"minimum": 1, "maximum": server.max_n},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "min_tokens": {"minimum": 0},
        "stream_interval": {"minimum": 1},
        **{name: {"minimum": 1} for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")},
        **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), logprobs),
    }
