"""Targets: parsers of a model's answer. A client chooses the answer's text by a grammar, so it is foreign text, too."""

import random
from collections.abc import Callable
from functools import partial

from benchmarks.fuzz.target import Target
from octavo.text.parsers import (
    AnswerParser,
    CollectedEvents,
    reasoning_format,
    reasoning_formats,
    tool_format,
    tool_formats,
)

_TOOLS = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}}},
    "get-time": {"type": "object", "properties": {}},
}
_SEEDS = (
    'a <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> b',
    '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
    '<|python_tag|>{"name": "f", "parameters": {"b": "x"}}',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]',
    '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "[f(a=1, b='x\\n', c=[1, {'k': None}]), get-time()]",
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>x</parameter>\n</function>\n</tool_call>",
    '[{"name": "f", "arguments": {"a": 1}}]',
    "<think>so\n</think>\n\nHello <think>again</think>",
    "[THINK]so[/THINK]Hello",
)


def _run(new: Callable[[], AnswerParser], data: bytes) -> None:
    """Parse the text whole and in pieces: the answers must be equal, and nothing is lost."""
    text = data.decode("utf-8", "replace")
    dice = random.Random(len(data))
    whole, parts = CollectedEvents(), CollectedEvents()
    parser = new()
    whole.collect(parser.feed(text))
    whole.collect(parser.finish())
    parser, at = new(), 0
    while at < len(text):
        step = dice.choice((1, 1, 2, 5, 40))
        parts.collect(parser.feed(text[at : at + step]))
        at += step
    parts.collect(parser.finish())
    if (whole.content, whole.reasoning, whole.calls) != (parts.content, parts.reasoning, parts.calls):
        raise AssertionError(f"whole {whole!r} but in pieces {parts!r}"[:300])


def _target(name: str, new: Callable[[], AnswerParser], marks: tuple[str, ...]) -> Target:
    words = (
        *marks,
        '{"name": "f", "arguments": {',
        "}}",
        "\\u0041",
        '"',
        "[",
        "]",
        "\n",
        "f(",
        "a=",
        "```",
        "=",
        ">",
        "\\",
    )
    return Target(name, [seed.encode() for seed in _SEEDS], partial(_run, new), (), words)


def _tools(name: str) -> Target:
    format = tool_format(name)
    return _target(f"answer {name}", lambda: AnswerParser(format, _TOOLS, new_id=lambda: "id"), format.marks)


def _reasoning(name: str) -> Target:
    format, calls = reasoning_format(name), tool_format("hermes")
    return _target(f"answer {name}", lambda: AnswerParser(calls, _TOOLS, format, "", new_id=lambda: "id"), format.marks)


TARGETS: dict[str, Callable[[], Target]] = {
    **{f"answer-{name}": partial(_tools, name) for name in tool_formats()},
    **{f"thinking-{name}": partial(_reasoning, name) for name in reasoning_formats()},
}
