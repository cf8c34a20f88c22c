"""The message for what cannot be compiled names the construct, and does not mention the compiler's input."""

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.text.grammar.build import grammar_of
from tests.doubles import byte_text


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"regex": "x("}, "unclosed group: '('"),
        ({"regex": "é[ü"}, "unclosed character class: '[ü'"),
        ({"regex": "(?=a)b"}, "look-ahead and look-behind are not supported: '(?=a)b'"),
        ({"regex": r"(a)\1"}, r"backreferences are not supported: '\\1'"),
        ({"regex": r"\bfoo"}, r"word boundaries (\b, \B) are not supported"),
        ({"regex": "a^b"}, "'^' is supported only at the ends of an expression"),
        ({"regex": "a{3,1}"}, "the first count must not be above the second: '{3,1}'"),
        ({"regex": "\\"}, "a string or an expression is not closed, or a character is not allowed"),
        ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group: '(a'"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "no output satisfies it: minimum (5) is greater than maximum (2)"),
        ({"json": {}, "whitespace_pattern": "a{,3}"}, "a count must be a number: ',3}'"),
        ({"grammar": "start: A\nA: B"}, 'line 2: unknown name: "B"'),
        ({"grammar": 'start: "a" B\nB: /(b/'}, "line 2: unclosed group: '(b'"),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "(a"}}}, "unclosed group: '(a'"),
    ],
)  # fmt: skip
def test_complaints(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammar_of(wish, byte_text().vocabulary)
    assert raised.value.message.partition(" cannot be compiled: ")[2] == words
