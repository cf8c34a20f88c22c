"""Shape: what a route returns, for the OpenAPI document (an endpoint's module lists its routes in SHAPES); and the JSON schemas
of fields whose values are checked by hand."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WithJsonSchema

from octavo.messages.params import StructuredOutputsParams
from octavo.server.schema.lists import AtMost, FirstError


@dataclass(frozen=True, slots=True)
class Shape:
    response: Any = None  # a msgspec type; None: no JSON
    media: tuple[str, ...] = ()  # of answers that are not JSON
    form: dict[str, Any] | None = None  # what a multipart body holds, as a JSON schema
    error: dict[str, Any] | None = None  # where a dialect has error bodies of its own
    leads_to: tuple[str, ...] = ()  # routes whose path takes the id of this answer


EVENTS = ("text/event-stream",)
LINES = ("application/x-ndjson",)


Schema = dict[str, Any]

# Objects that are checked by hand. A member that is not in `properties` counts as unknown (unknown.py); an object without
# properties may hold anything: a JSON schema, a call's arguments.


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required]}


def _one_of(*kinds: str) -> Schema:
    return {"enum": [*kinds]}


def _list_of(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _any_of(*forms: Schema) -> Schema:
    return {"anyOf": [*forms]}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_NULL: Schema = {"type": "null"}
_ANYTHING: Schema = {"type": "object"}
_IDS = _list_of({"type": "integer", "minimum": 0}, 1)
_TEXTS = _list_of(_TEXT, 1)
_CACHE_CONTROL = _any_of(_object(("type",), type=_one_of("ephemeral"), ttl=_one_of("5m", "1h")), _NULL)

Prompts = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _TEXTS, _IDS, _list_of(_IDS, 1)))]
"""A string, a list of strings, a list of token ids, a list of lists of token ids."""
TextOrTexts = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _TEXTS, _NULL))]
Documents = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _list_of(_any_of(_TEXT, _object(("text",), text=_TEXT)), 1)))]
Stops = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _list_of(_TEXT), _NULL))]

# ── OpenAI's: chat ──────────────────────────────────────────────────────────────────────────────────

_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_TEXT_PART = _object(("type", "text"), type=_one_of("text"), text=_TEXT, cache_control=_CACHE_CONTROL)
_REFUSAL_PART = _object(("type", "refusal"), type=_one_of("refusal"), refusal=_TEXT)
_CALL = _object(
    ("id", "type", "function"),
    id=_TEXT,
    type=_one_of("function"),
    function=_object(("name", "arguments"), name=_NAME, arguments={"const": "{}"}),
)
_MESSAGE = _object(
    ("role", "content"),
    role=_one_of("system", "developer", "user", "assistant", "tool"),
    content=_any_of(_TEXT, _list_of(_any_of(_TEXT_PART, _REFUSAL_PART)), _NULL),
    name=_MAYBE_TEXT,
    refusal=_MAYBE_TEXT,
    reasoning=_MAYBE_TEXT,
    reasoning_content=_MAYBE_TEXT,
    tool_call_id=_MAYBE_TEXT,
    tool_calls=_any_of(_list_of(_CALL), _NULL),
    cache_control=_CACHE_CONTROL,
)
_FUNCTION = {"name": _NAME, "description": _MAYBE_TEXT, "parameters": _ANYTHING, "strict": _FLAG}
_SCHEMA = {"name": _TEXT, "description": _MAYBE_TEXT, "schema": _ANYTHING, "strict": _FLAG}

_Objects = Annotated[list[dict[str, Any]], FirstError()]
Messages = Annotated[_Objects, WithJsonSchema(_list_of(_MESSAGE, 1))]
Tools = Annotated[
    list[Any] | None,
    WithJsonSchema(
        _any_of(
            _list_of(
                _object(
                    ("type", "function"),
                    type=_one_of("function"),
                    function=_object(("name",), **_FUNCTION, cache_control=_CACHE_CONTROL),
                    cache_control=_CACHE_CONTROL,
                )
            ),
            _NULL,
        )
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        _any_of(
            {"enum": ["none", "auto", "required", None]},
            _object(("type", "function"), type=_one_of("function"), function=_object(("name",), name=_NAME)),
            _object(
                ("type", "allowed_tools"),
                type=_one_of("allowed_tools"),
                allowed_tools=_object(
                    ("mode", "tools"),
                    mode=_one_of("auto", "required"),
                    tools=_list_of(
                        _object(
                            ("type", "function"), type=_one_of("function"), function=_object(("name",), name=_NAME)
                        ),
                        1,
                    ),
                ),
            ),
        )
    ),
]
Prediction = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        _any_of(
            _object(
                ("type", "content"),
                type=_one_of("content"),
                content=_any_of(_TEXT, _list_of(_object(("type", "text"), type=_one_of("text"), text=_TEXT))),
            ),
            _NULL,
        )
    ),
]
ResponseFormat = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        _any_of(
            _object(("type",), type=_one_of("text")),
            # Servers other than OpenAI's accept a schema here.
            _object(("type",), type=_one_of("json_object"), schema=_ANYTHING),
            _object(
                ("type", "json_schema"),
                type=_one_of("json_schema"),
                json_schema=_object(("name", "schema"), **_SCHEMA),
            ),
            # A language of its own, as schemas are: its parser refuses unknown members.
            _object(
                ("type",),
                type=_one_of("structural_tag"),
                structures={"type": "array"},
                triggers={"type": "array"},
                format=_ANYTHING,
            ),
            _NULL,
        )
    ),
]
"""What an answer must look like: one of several kinds, by its type."""
StructuredOutputs = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(_any_of(_object((), **{name: {} for name in StructuredOutputsParams.__annotations__}), _NULL)),
]

# ── OpenAI's: responses ─────────────────────────────────────────────────────────────────────────────

_INPUT_TEXT = _object(("type", "text"), type=_one_of("input_text"), text=_TEXT)
_OUTPUT_TEXT = _object(("type", "text"), type=_one_of("output_text"), text=_TEXT)
_ITEM = _any_of(
    _object(
        ("role", "content"),  # type is optional
        type=_one_of("message"),
        id=_TEXT,
        role=_one_of("user", "assistant", "system", "developer"),
        content=_any_of(_TEXT, _list_of(_any_of(_INPUT_TEXT, _OUTPUT_TEXT, _REFUSAL_PART))),
    ),
    _object(
        ("type", "call_id", "name", "arguments"),
        type=_one_of("function_call"),
        id=_TEXT,
        call_id=_TEXT,
        name=_NAME,
        arguments={"const": "{}"},
    ),
    _object(
        ("type", "call_id", "output"),
        type=_one_of("function_call_output"),
        id=_TEXT,
        call_id=_TEXT,
        name=_MAYBE_TEXT,
        output=_any_of(_TEXT, _list_of(_INPUT_TEXT)),
    ),
    _object(
        ("type",),
        type=_one_of("reasoning"),
        id=_TEXT,
        content=_any_of(_list_of(_object(("type", "text"), type=_one_of("reasoning_text"), text=_TEXT)), _NULL),
        summary=_list_of(_object(("type", "text"), type=_one_of("summary_text"), text=_TEXT)),
        encrypted_content=_NULL,
    ),
    _object(("type", "encrypted_content"), type=_one_of("compaction"), id=_MAYBE_TEXT, encrypted_content=_TEXT),
    _object(("type", "id"), type=_one_of("item_reference"), id=_TEXT),
)
Input = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _list_of(_ITEM, 1)))]
"""A string, or a list of items, which openai_responses/items.py reads."""
ResponseTools = Annotated[
    _Objects | None,
    WithJsonSchema(_any_of(_list_of(_object(("type", "name"), type=_one_of("function"), **_FUNCTION)), _NULL)),
]
ResponseToolChoice = Annotated[
    Any,
    WithJsonSchema(
        _any_of(
            {"enum": ["none", "auto", "required", None]},
            _object(("type", "name"), type=_one_of("function"), name=_NAME),
            _object(
                ("type", "mode", "tools"),
                type=_one_of("allowed_tools"),
                mode=_one_of("auto", "required"),
                tools=_list_of(_object(("type", "name"), type=_one_of("function"), name=_NAME), 1),
            ),
        )
    ),
]
TextFormat = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        _any_of(
            _object(("type",), type=_one_of("text", "json_object")),
            _object(("type", "name", "schema"), type=_one_of("json_schema"), **_SCHEMA),
            _NULL,
        )
    ),
]

# ── Anthropic's ─────────────────────────────────────────────────────────────────────────────────────

_TEXT_BLOCK = _TEXT_PART
_BLOCK = _any_of(
    _TEXT_BLOCK,
    _object(("type", "thinking"), type=_one_of("thinking"), thinking=_TEXT, signature=_MAYBE_TEXT),
    _object(
        ("type", "id", "name", "input"),
        type=_one_of("tool_use"),
        id=_TEXT,
        name=_NAME,
        input=_ANYTHING,
        cache_control=_CACHE_CONTROL,
    ),
    _object(
        ("type", "tool_use_id"),
        type=_one_of("tool_result"),
        tool_use_id=_TEXT,
        content=_any_of(_TEXT, _list_of(_TEXT_BLOCK)),
        is_error=_FLAG,
        cache_control=_CACHE_CONTROL,
    ),
)
Turns = Annotated[
    _Objects,
    WithJsonSchema(
        _list_of(
            _object(
                ("role", "content"),
                role=_one_of("user", "assistant"),
                content=_any_of(_TEXT, _list_of(_BLOCK, 1)),
            ),
            1,
        )
    ),
]
System = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _list_of(_TEXT_BLOCK, 1), _NULL))]
TurnTools = Annotated[
    _Objects | None,
    WithJsonSchema(
        _any_of(
            _list_of(
                _object(
                    ("name", "input_schema"),
                    type=_one_of("custom"),
                    name=_NAME,
                    description=_MAYBE_TEXT,
                    input_schema=_ANYTHING,
                    input_examples=_list_of(_ANYTHING),
                    strict=_FLAG,
                    cache_control=_CACHE_CONTROL,
                )
            ),
            _NULL,
        )
    ),
]
TurnToolChoice = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        _any_of(
            _object(("type",), type=_one_of("auto", "any", "none"), disable_parallel_tool_use=_FLAG),
            _object(("type", "name"), type=_one_of("tool"), name=_NAME, disable_parallel_tool_use=_FLAG),
            _NULL,
        )
    ),
]
OutputFormat = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(_any_of(_object(("type", "schema"), type=_one_of("json_schema"), schema=_ANYTHING), _NULL)),
]
CacheControl = Annotated[dict[str, Any] | None, WithJsonSchema(_CACHE_CONTROL)]
TurnMetadata = Annotated[dict[str, Any] | None, WithJsonSchema(_any_of(_object((), user_id=_MAYBE_TEXT), _NULL))]

# ── Ollama's ────────────────────────────────────────────────────────────────────────────────────────

_OLLAMA_CALL = _object(
    ("function",),
    id=_MAYBE_TEXT,
    type=_MAYBE_TEXT,
    function=_object(("name", "arguments"), name=_NAME, arguments=_ANYTHING, index={"type": ["integer", "null"]}),
)
OllamaMessages = Annotated[
    _Objects | None,
    WithJsonSchema(
        _any_of(
            _list_of(
                _object(
                    ("role",),
                    role=_one_of("system", "user", "assistant", "tool"),
                    content=_MAYBE_TEXT,
                    thinking=_MAYBE_TEXT,
                    tool_calls=_any_of(_list_of(_OLLAMA_CALL), _NULL),
                    tool_name=_MAYBE_TEXT,
                    tool_call_id=_MAYBE_TEXT,
                )
            ),
            _NULL,
        )
    ),
]
OllamaFormat = Annotated[Any, WithJsonSchema(_any_of({"enum": ["", "json"]}, _ANYTHING, _NULL))]
"""Empty, "json", or a JSON schema."""
OllamaThink = Annotated[
    Any, WithJsonSchema(_any_of({"type": ["boolean", "null"]}, {"enum": ["low", "medium", "high"]}))
]
Texts = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _TEXTS))]

# ── llama.cpp's ─────────────────────────────────────────────────────────────────────────────────────

_MIXED = _list_of(_any_of(_TEXT, {"type": "integer", "minimum": 0}), 1)
_PROMPT = _any_of(_TEXT, _MIXED, _object((), prompt_string=_TEXT, multimodal_data=_list_of(_TEXT)))
LlamaPrompts = Annotated[Any, WithJsonSchema(_any_of(_PROMPT, _list_of(_PROMPT, 1)))]
"""A text, a list of token ids and texts, an object with a prompt_string, or a list of such prompts."""
LlamaBias = Annotated[Any, WithJsonSchema(_any_of(_list_of({"type": "array"}), _ANYTHING, _NULL))]
MAX_EXTRA_FILES = 64  # of input_extra
LlamaFiles = Annotated[
    list[Any] | None,
    AtMost(MAX_EXTRA_FILES),
    WithJsonSchema(_any_of(_list_of(_object(("text",), filename=_MAYBE_TEXT, text=_TEXT)), _NULL)),
]
