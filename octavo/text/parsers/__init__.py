"""Parsers that split a model's output into content, reasoning and tool calls: the registry of formats, and which of them a chat
template uses.

`AnswerParser` parses streamed and complete outputs alike: a complete one is assembled from the same events.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType

from octavo.errors import ConfigError
from octavo.text.parsers import reasoning as reasoning_folder
from octavo.text.parsers import tools as tools_folder
from octavo.text.parsers.answer import AnswerParser, CollectedEvents, WholeCall
from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from octavo.text.parsers.thinking import ThinkFormat

__all__ = [
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CollectedEvents",
    "Content",
    "Event",
    "Reasoning",
    "Schemas",
    "ThinkFormat",
    "ToolFormat",
    "WholeCall",
    "find_reasoning_format",
    "find_tool_format",
    "reasoning_format",
    "reasoning_formats",
    "tool_format",
    "tool_formats",
]


@cache
def _modules(folder: ModuleType) -> dict[str, ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    return {name: importlib.import_module(f"{folder.__name__}.{name}") for name in names}


def tool_formats() -> dict[str, ToolFormat]:
    """All formats of tool calls by name."""
    return {name: module.FORMAT for name, module in _modules(tools_folder).items()}


def reasoning_formats() -> dict[str, ThinkFormat]:
    return {name: module.FORMAT for name, module in _modules(reasoning_folder).items()}


def tool_format(name: str) -> ToolFormat:
    """The format with this name or alias, as in --tool-call-parser."""
    formats = tool_formats()
    for own, format in formats.items():
        if name == own or name in format.aliases:
            return format
    raise _unknown("--tool-call-parser", name, formats)


def reasoning_format(name: str) -> ThinkFormat:
    """The format with this name or alias, as in --reasoning-parser."""
    formats = reasoning_formats()
    for own, format in formats.items():
        if name == own or name in format.aliases:
            return format
    raise _unknown("--reasoning-parser", name, formats)


def _unknown(flag: str, name: str, formats: Mapping[str, object]) -> ConfigError:
    shown = repr(name) if len(name) <= 60 else repr(name[:60]) + "…"
    return ConfigError(f"{flag} {shown} is not known; the known ones are {', '.join(formats)}")


def find_tool_format(template: str) -> str | None:
    """Name of the tool call format whose marks occur in a chat template. None: no known format."""
    fitting = [
        (format.rank, name)
        for name, format in tool_formats().items()
        if format.signs
        and all(sign in template for sign in format.signs)
        and not any(stranger in template for stranger in format.strangers)
    ]
    return max(fitting)[1] if fitting else None


def find_reasoning_format(template: str) -> str | None:
    """Name of the reasoning format whose marks occur in a chat template. None: no known format."""
    fitting = [
        (format.rank, name)
        for name, format in reasoning_formats().items()
        if format.signs and all(sign in template for sign in format.signs)
    ]
    return max(fitting)[1] if fitting else None
