"""ChatTemplate: renders chat messages to a prompt by the model's own Jinja template. The template is not trusted: it runs in
Jinja's sandbox, within the limits of template_limits.py."""

import functools
import json
import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from octavo.errors import ConfigError, Field, InvalidRequest, Unsupported
from octavo.text.chat.template_limits import LimitedEnvironment, TemplateLimit, limited
from octavo.text.tokenize.special_token_escape import is_mark

_MAX_SOURCE = 1024 * 1024  # characters; the longest templates in use have some ten thousand
MESSAGES = Field("messages")
MAX_REQUEST_SOURCE = 32 * 1024  # characters of a request's own template: compile time grows with the length
_ASK_SECONDS = 0.2  # to find out whether a template takes a system message
_MAX_REASON = 1000  # characters of an error that a template words itself
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text for training. It does not affect a prompt: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replacement for Jinja's filter, which escapes <, > and & for HTML; models were trained on plain JSON."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(_escape, text) if ensure_ascii and not text.isascii() else text


def _escape(found: re.Match[str]) -> str:
    return found[0] if is_mark(found[0]) else json.dumps(found[0])[1:-1]


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.limit_filters()
    return environment


def _compile(environment: LimitedEnvironment, name: str, source: str) -> CodeType:
    advice = "give another one with --chat-template FILE"
    if len(source) > _MAX_SOURCE:
        raise ConfigError(f"the chat template {name!r} has {len(source):,} characters, which is too long; {advice}")
    try:
        with limited():  # Jinja evaluates constant expressions while it compiles
            return environment.compile(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {name!r} is not valid Jinja (line {error.lineno}: {error.message}); {advice}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # for example nested too deeply for Jinja or Python
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"the chat template {name!r} cannot be compiled ({reason}); {advice}") from error


class Arguments(dict[str, Any]):
    """Arguments of a tool call: a mapping for templates that look into it, JSON text for those that print or concatenate it."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


RESERVED = (
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "documents",
    "max_tokens",
    "tokenize",
)
"""Names that template variables may not have: other fields of a request, or values that the server sets."""


class ChatTemplate:
    """A model's chat templates. `sources`: template text by name. "default" is used, or "tool_use", if there is one, for a
    request with tools.

    `variables`: what templates expect besides the messages: bos_token, eos_token, …, and an operator's own. Empty `sources`: the model has no template,
    and render() raises InvalidRequest.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        self._environment = _environment()
        self._sources = dict(sources)
        self._names: dict[str, frozenset[str]] = {}  # source → names of the variables that it reads
        self.variables = dict(variables)
        self._codes: dict[str, CodeType] = {}
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            self._add(name, _compile(self._environment, name, source))

    def _add(self, name: str, code: CodeType) -> None:
        self._codes[name] = code
        self._templates[name] = Template.from_code(self._environment, code, self._environment.make_globals(None))

    @classmethod
    def of_code(cls, code: bytes, variables: Mapping[str, Any]) -> "ChatTemplate":
        """The template that has this `code`, without its source. The code is executed: call it where that may do no harm."""
        template = cls({}, variables)
        template._add("default", marshal.loads(code))
        return template

    @property
    def code(self) -> bytes:
        """The template as byte code of this Python version, which renders without being compiled again."""
        return marshal.dumps(self._codes["default"])

    @property
    def is_there(self) -> bool:
        return "default" in self._codes

    def source(self, with_tools: bool = False) -> str:
        """Text of the template that renders a request with, or without, tools. Empty: there is none."""
        return (self._sources.get("tool_use") if with_tools else None) or self._sources.get("default", "")

    @property
    def names(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return self._names_in(self.source())

    def reads(self, variable: str, with_tools: bool = False) -> bool:
        """Whether the template reads a variable of this name."""
        return variable in self._names_in(self.source(with_tools))

    def _names_in(self, source: str) -> frozenset[str]:
        if source not in self._names:
            names = self._environment.parse(source).find_all(nodes.Name)
            self._names[source] = frozenset(name.name for name in names if name.ctx == "load")
        return self._names[source]

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether a system message may come first: some templates reject one, some ignore it."""
        mark = "Octavo asks whether this is shown."
        messages = [{"role": "system", "content": mark}, {"role": "user", "content": "Hi"}]
        if not self.is_there:
            return False
        try:
            with limited(_ASK_SECONDS):
                return mark in self._templates["default"].render(self._values(messages, True, None, {}))
        except Exception:  # foreign code: any error means no
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequest(
                "this model has no chat template, so it does not support "
                + MESSAGES
                + ": send a plain prompt instead, or set a template with --chat-template FILE"
            )
        values = self._values(messages, add_generation_prompt, tools, variables)
        try:
            with limited():
                return template.render(values)
        except TemplateLimit as error:
            raise InvalidRequest(f"{error.message}: change the template or the " + MESSAGES) from error
        except MemoryError:
            raise
        except Exception as error:
            # The template is foreign code and these messages are its only input: whatever it raises is about them.
            reason = str(error)[:_MAX_REASON]
            raise InvalidRequest("the chat template rejected the " + MESSAGES + f": {reason}") from error

    def _values(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {
            **self.variables,
            "documents": None,
            **variables,
            "messages": [_with_text(message, at) for at, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools or None,
        }


def request_template(source: str, variables: Mapping[str, Any]) -> ChatTemplate:
    """Compile a request's own template. To be called in a confined process (octavo/sandbox): it takes time, and so may
    rendering."""
    check_length(source)
    try:
        return ChatTemplate({"default": source}, variables)
    except ConfigError as error:
        cause = error.__cause__
        at = f" in line {cause.lineno}" if isinstance(cause, TemplateSyntaxError) else ""
        reason = str(cause).partition("\n")[0][:_MAX_REASON] or type(cause).__name__
        raise InvalidRequest(f"chat_template is not valid Jinja{at}: {reason}", param="chat_template") from error


def check_length(source: str) -> None:
    if len(source) > MAX_REQUEST_SOURCE:
        raise InvalidRequest(
            f"chat_template has {len(source)} characters; at most {MAX_REQUEST_SOURCE} are allowed",
            param="chat_template",
        )


@dataclass(frozen=True, slots=True)
class DescribedTemplate:
    """A request's own template that was compiled in another process, where it is rendered, too."""

    text: str
    names: frozenset[str]  # of the variables that it reads
    takes_system: bool  # as ChatTemplate has it
    code: bytes  # as ChatTemplate has it: not to be executed in this process

    def source(self, with_tools: bool = False) -> str:
        return self.text

    def reads(self, variable: str, with_tools: bool = False) -> bool:
        return variable in self.names


def _with_text(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Return the message with its content as one string, as templates of text models expect it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(MESSAGES / at + " must be an object with a 'role'")
    rendered = {**message, "content": content_text(message.get("content"), at)}
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [_call(call) for call in calls]
    return rendered


def _call(call: Any) -> Any:
    match call:
        case {"function": {"arguments": dict(arguments)}}:
            return {**call, "function": {**call["function"], "arguments": Arguments(arguments)}}
        case _:
            return call


def content_text(content: Any, at: int) -> str:
    """Return the content of messages[at] as one string."""
    match content:
        case None:
            return ""
        case str():
            return content
        case [*parts]:
            return "\n".join([_part(part, MESSAGES / at / "content" / number) for number, part in enumerate(parts)])
        case _:
            raise InvalidRequest(MESSAGES / at / "content" + " must be a string or a list of parts")


def _part(part: Any, where: Field) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise InvalidRequest(where / "text" + " must be a string")
        case {"type": str(kind)}:
            raise Unsupported(
                where + f" has type {kind[:60]!r}; this model supports only text parts", param=where / "type"
            )
        case _:
            raise InvalidRequest(where + " must be an object with a 'type'")
