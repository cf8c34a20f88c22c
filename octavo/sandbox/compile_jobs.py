"""The jobs that compile what clients send: grammars in all their notations, and chat templates. They run in confined processes;
prepare() runs in the fork server, once.

Imports are few: each API process that was sent a grammar has a fork server, which keeps all of them in memory."""

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.errors import Field, InvalidRequest
from octavo.text.chat.template import ChatTemplate, request_template
from octavo.text.grammar.build import BuiltGrammar, build_framed, build_schema, build_wish
from octavo.text.grammar.validate import is_valid
from octavo.text.tokenize.vocabulary import Vocabulary

MODULE = __name__
_LOADED_LATE = ("html", "jinja2.debug")  # imported by template filters and template errors when they are first used

Path = list[str | int]
"""A Field as plain data."""


class CompileSetup(msgspec.Struct, frozen=True):
    """What jobs need of the model's text."""

    size: int  # of the vocabulary; 0: it has none for grammars
    special: dict[int, bytes]  # control tokens and their names
    eos_ids: tuple[int, ...]
    variables: dict[str, str]  # for templates: bos_token, …


def prepare(data: bytes) -> Mapping[str, Callable[..., Any]]:
    """Load everything that jobs use, and return them: a job can open no file."""
    for name in _LOADED_LATE:
        importlib.import_module(name)
    setup = msgspec.msgpack.decode(data, type=CompileSetup)
    vocabulary = Vocabulary(
        setup.size, lambda token_id: setup.special.get(token_id, b""), frozenset(setup.special), setup.eos_ids
    )
    if setup.size and importlib.util.find_spec("llguidance") is not None:
        for wish in (
            {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
            {"grammar": 'root ::= "a"'},
        ):
            build_wish(wish, vocabulary)
    if importlib.util.find_spec("jsonschema_rs") is not None:
        assert is_valid({"pattern": "^a", "$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, '"a"')
    messages = [{"role": "user", "content": "a"}]
    assert request_template("{{ messages | tojson }}{{ strftime_now('%Y') }}", setup.variables).render(messages)
    return _Jobs(vocabulary, setup.variables).by_name()


class _Jobs:
    def __init__(self, vocabulary: Vocabulary, variables: Mapping[str, Any]) -> None:
        self._vocabulary, self._variables = vocabulary, variables

    def by_name(self) -> dict[str, Callable[..., Any]]:
        return {
            "wish": self.wish,
            "schema": self.schema,
            "framed": self.framed,
            "validate": self.validate,
            "template": self.template,
            "render": self.render,
        }

    def wish(self, field: Path, where: Path | None, max_bytes: int, wish: dict[str, Any]) -> BuiltGrammar:
        return _shallow(
            field,
            lambda: build_wish(
                wish,
                self._vocabulary,
                field=Field(*field),
                where=None if where is None else Field(*where),
                max_bytes=max_bytes,
            ),
        )

    def schema(self, field: Path, max_bytes: int, may_leave_out: bool, schema: object) -> BuiltGrammar:
        return _shallow(
            field,
            lambda: build_schema(
                schema, self._vocabulary, field=Field(*field), max_bytes=max_bytes, may_leave_out=may_leave_out
            ),
        )

    def framed(
        self,
        field: Path,
        max_bytes: int,
        may_leave_out: bool,
        frame: tuple[str, str],
        can_repeat: bool,
        schema: object,
    ) -> BuiltGrammar:
        return _shallow(
            field,
            lambda: build_framed(
                schema,
                frame,
                self._vocabulary,
                can_repeat=can_repeat,
                field=Field(*field),
                max_bytes=max_bytes,
                may_leave_out=may_leave_out,
            ),
        )

    def validate(self, pairs: list[tuple[Any, str]]) -> bool:
        """Whether each text is JSON that satisfies the schema beside it."""
        return all(is_valid(json.loads(schema) if isinstance(schema, str) else schema, text) for schema, text in pairs)

    def template(self, source: str) -> tuple[list[str], bool, bytes]:
        """Compile a request's chat template: names that it reads, whether it takes a system message, its code."""
        template = request_template(source, self._variables)
        return sorted(template.names), template.takes_system, template.code

    def render(
        self,
        code: bytes,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
    ) -> bytes:
        """Render a template that was compiled by such a job, as UTF-8 that may have lone surrogates."""
        template = ChatTemplate.of_code(code, self._variables)
        text = template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        return text.encode("utf-8", "surrogatepass")


def _shallow(field: Path, build: Callable[[], BuiltGrammar]) -> BuiltGrammar:
    """Build a grammar. One that exceeds Python's recursion limit is refused, not a failure of the job."""
    try:
        return build()
    except RecursionError:
        raise InvalidRequest(Field(*field) + " is nested too deeply") from None
