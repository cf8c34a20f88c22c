"""Parses the tools and the tool choice of a request, and builds the JSON schema of an output that must call a tool. Dialects
convert their tools to OpenAI's form first.

If a call is required, the output consists of {"name", "arguments"} objects: each in the frame of the model's own format if that
writes calls in this way, otherwise in one list, which the parser `plain_json` reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.text.grammar.schema_tree import rebuilt

_TOOLS, _CHOICE = Field("tools"), Field("tool_choice")
_MAX_NAME = 64  # characters, as in OpenAI's API
_ADD_PROPERTIES = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "$dynamicRef",
                   "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "minProperties"}  # fmt: skip
"""Keywords that may allow further properties of an object, directly or through another schema."""
_DEPENDENT = {"dependentSchemas", "dependencies"}
_COMBINING = {"allOf", "oneOf", "not", "if", "then", "else", "propertyNames", "contains", *_DEPENDENT}
"""Keywords whose schemas apply together with others to the same value, or are no constraints by themselves."""
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_WITHIN = {"items", "prefixItems", "additionalProperties", "additionalItems", "anyOf"}
_OF_OBJECTS = {
    "properties",
    "required",
    "allOf",
    "oneOf",
    "if",
    "not",
    "dependentSchemas",
    "dependencies",
    "dependentRequired",
}
"""Keywords beside anyOf or $ref that are about the same object."""


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema whose type is object
    strict: bool


class ToolChoice(msgspec.Struct, frozen=True):
    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None  # the tool's name, if the mode is "named"
    parallel: bool = True  # more than one call is allowed

    @property
    def is_enforced(self) -> bool:
        return self.mode in ("required", "named")


NO_CALLS = ToolChoice("none")


def parse_tools(value: object) -> list[Tool]:
    """Parse `tools` of OpenAI's chat API: [{"type": "function", "function": {"name", "description", "parameters"}}]."""
    if not isinstance(value, list):
        raise InvalidRequest(_TOOLS + " must be a list")
    tools = [_tool(entry, _TOOLS / at) for at, entry in enumerate(value)]
    names: set[str] = set()
    for at, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidRequest(_TOOLS / at / "function" / "name" + f" {tool.name!r} is used twice")
        names.add(tool.name)
    return tools


def _tool(entry: object, where: Field) -> Tool:
    if not isinstance(entry, Mapping):
        raise InvalidRequest(where + " must be an object")
    if (kind := entry.get("type")) != "function":
        raise Unsupported(where / "type" + f" is {repr(kind)[:60]}; only 'function' is supported")
    function, where = entry.get("function"), where / "function"
    if not isinstance(function, Mapping):
        raise InvalidRequest(where + " must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not _is_allowed_name(name):
        raise InvalidRequest(where / "name" + f" must be 1 to {_MAX_NAME} letters, digits, '_', '-' or '.'")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(where / "description" + " must be a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(where / "strict" + " must be true or false")
    return Tool(name, description or "", _parameters(function.get("parameters"), where / "parameters"), bool(strict))


def _is_allowed_name(name: str) -> bool:
    return name.isascii() and all(character.isalnum() or character in "_-." for character in name)


def _parameters(schema: object, where: Field) -> dict[str, Any]:
    if schema is None:  # a tool without parameters
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(where + " must be a JSON schema, an object")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(where / "type" + " must be 'object': arguments are passed by name")
    return {"type": "object", **schema}


def parse_tool_choice(value: object, tools: Sequence[Tool], parallel: bool = True) -> ToolChoice:
    """Parse `tool_choice` of OpenAI's chat API. None: auto if there are tools."""
    match value:
        case None:
            return ToolChoice("auto" if tools else "none", parallel=parallel)
        case "none":
            return ToolChoice("none", parallel=parallel)
        case "auto":
            return ToolChoice("auto" if tools else "none", parallel=parallel)
        case "required":
            if not tools:
                raise InvalidRequest(_CHOICE + " is 'required', but there are no tools")
            return ToolChoice("required", parallel=parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            if not any(tool.name == name for tool in tools):
                raise InvalidRequest(_CHOICE + f" names {name[:60]!r}, which is not in " + _TOOLS)
            return ToolChoice("named", name, parallel=False)
        case _:
            raise InvalidRequest(
                _CHOICE
                + ' must be \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": …}} or allowed_tools'
            )


def allowed_tools(tools: list[Tool], choice: object) -> tuple[list[Tool], object]:
    """Resolve a choice of `allowed_tools`: the tools that the model may call, and the choice among these. Another choice stays as it
    is."""
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*chosen]}} if (
            chosen
        ):
            by_name = {tool.name: tool for tool in tools}
            names: dict[str, None] = {}
            for at, entry in enumerate(chosen):
                where = _CHOICE / "allowed_tools" / "tools" / at
                match entry:
                    case {"type": "function", "function": {"name": str(name)}}:
                        if name not in by_name:
                            raise InvalidRequest(where + f" names {name[:60]!r}, which is not in " + _TOOLS)
                        names[name] = None
                    case _:
                        raise InvalidRequest(where + ' must be {"type": "function", "function": {"name": …}}')
            return [by_name[name] for name in names], mode
        case {"type": "allowed_tools"}:
            raise InvalidRequest(
                _CHOICE
                + ' must be {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [at least one]}}'
            )
    return tools, choice


def schemas_by_name(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """The tools' parameter schemas by name, for the parsers."""
    return {tool.name: tool.parameters for tool in tools}


def calls_schema(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any] | None:
    """Schema of an output that is a list of calls. None: the choice does not require a call."""
    if not choice.is_enforced:
        return None
    chosen = [tool for tool in tools if choice.mode == "required" or tool.name == choice.name]
    assert chosen, "parse_tool_choice lets no such choice pass"
    places = [f"tool_{at}" for at in range(len(chosen))]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, place in zip(chosen, places, strict=True)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        "$defs": {place: _moved(_closed(tool.parameters), place) for tool, place in zip(chosen, places, strict=True)},
    }
    return schema if choice.parallel else {**schema, "maxItems": 1}


def call_schema(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any] | None:
    """Schema of a single call. None: the choice does not require a call."""
    schema = calls_schema(tools, choice)
    return None if schema is None else {**schema["items"], "$defs": schema["$defs"]}


def _closed(schema: Mapping[str, Any]) -> Any:
    """Forbid additional properties where a schema lists properties and does not mention others. The function has no parameter for
    them, and a model that only has to satisfy the schema would keep inventing them. Schemas that are combined with others stay as they
    are: their values may have the others' properties, and a condition or an alternative of oneOf would mean something else."""
    kept = _combined(schema)

    def close(part: Any) -> Any:
        if not isinstance(part, Mapping) or id(part) in kept:
            return part
        found = dict(part)
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                found[key] = {name: close(inner) for name, inner in value.items()}
            elif key in _WITHIN:
                found[key] = [*map(close, value)] if isinstance(value, list) else close(value)
        is_open = "properties" in part and part.keys().isdisjoint(_ADD_PROPERTIES)
        return {**found, "additionalProperties": False} if is_open else found

    return close(schema)


def _combined(root: Mapping[str, Any]) -> set[int]:
    """Ids of the schemas that apply to values to which others apply too, and of those within them."""
    found: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        part, is_combined = waiting.pop()
        if isinstance(part, list):
            waiting += [(inner, is_combined) for inner in part]
        if not isinstance(part, Mapping) or id(part) in found:
            continue
        if is_combined:
            found.add(id(part))
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                waiting += [(inner, is_combined) for inner in value.values()]
            elif key in _COMBINING:
                inner = [*value.values()] if key in _DEPENDENT and isinstance(value, Mapping) else value
                waiting.append((inner, True))
            elif key in _WITHIN:
                waiting.append((value, is_combined or (key == "anyOf" and not part.keys().isdisjoint(_OF_OBJECTS))))
        if "$ref" in part and (is_combined or not part.keys().isdisjoint(_OF_OBJECTS)):
            waiting.append((_target(root, part["$ref"]), True))
    return found


def _target(root: Mapping[str, Any], reference: object) -> Any:
    """What a reference leads to; all definitions, if that is not clear."""
    target: Any = root
    for step in reference[2:].split("/") if isinstance(reference, str) and reference.startswith("#/") else ():
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, Mapping) else None
    if target is not None and isinstance(reference, str) and reference.startswith("#") and "/" in reference:
        return target
    if reference == "#":
        return root
    holders = [root.get(key) for key in ("$defs", "definitions")]
    return [part for holder in holders if isinstance(holder, Mapping) for part in holder.values()]


def _moved(schema: dict[str, Any], place: str) -> Any:
    """Rewrite the references of a schema that becomes `$defs/place` of another: "#" now means that place."""

    def move(part: dict[str, Any]) -> dict[str, Any]:
        match part.get("$ref"):
            case str(target) if target == "#" or target.startswith("#/"):
                return {**part, "$ref": f"#/$defs/{place}{target[1:]}"}
        return part

    return rebuilt(schema, move)


def template_form(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools in the form that chat templates expect."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]
