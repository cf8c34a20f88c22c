"""JSON is counted in its bytes before it is decoded: the same count as of what decoding gives, whatever the strings hold."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import Field, InvalidRequest, TooLarge
from octavo.server.schema import json_size
from octavo.server.schema.json_size import BRACKETS, MAX_DIGITS, NAME, OUTSIDE, STRING, check_json

AWKWARD = st.text(alphabet='"\\[]{},:a0é\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | AWKWARD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(AWKWARD, inner, max_size=4),
    max_leaves=25,
)


def count(value: Any) -> int:
    """Every comma counts for one."""
    match value:
        case str():
            return STRING
        case list():
            return BRACKETS + max(0, len(value) - 1) + sum(map(count, value))
        case dict():
            own = BRACKETS + max(0, len(value) - 1) + (NAME + STRING) * len(value)
            return own + sum(map(count, value.values()))
        case _:
            return 0


def depth(value: Any) -> int:
    match value:
        case list():
            return 1 + max(map(depth, value), default=0)
        case dict():
            return 1 + max(map(depth, value.values()), default=0)
        case _:
            return 0


@given(VALUES, st.integers(1, 20), st.booleans(), st.sampled_from([None, 1]))
def test_the_count_is_that_of_the_decoded_value(value: Any, step: int, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body, flags=re.DOTALL)
    num, levels = count(value) + len(outside) // OUTSIDE, depth(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "_STEP", step)  # cuts fall into strings and escapes
        check_json(body, num, levels)
        if num and levels:
            with pytest.raises(TooLarge, match=rf"more than {num - 1} JSON values.*--max-json-items"):
                check_json(body, num - 1, levels)
            with pytest.raises(InvalidRequest, match=rf"deeper than {levels - 1} levels.*--max-json-depth"):
                check_json(body, num, levels - 1)


@pytest.mark.parametrize("number", ["9" * (MAX_DIGITS + 1), "-1" + "0" * MAX_DIGITS, "0." + "1" * (MAX_DIGITS + 1)])
def test_long_numbers_are_refused(number: str) -> None:
    with pytest.raises(InvalidRequest, match="128 digits"):
        check_json(f'{{"a": [1, {number}]}}'.encode(), 100, 10)
    check_json(f'{{"a": [1, "{number}", {"9" * MAX_DIGITS}]}}'.encode(), 100, 10)  # in a string it is text


def test_text_that_is_no_json_is_left_to_the_decoder() -> None:
    for body in (b"", b'"', b'"\\', b"}}]]", b'{"a": "\\', b"\xff\xfe", b'\\"[[[['):
        check_json(body, 100, 10)


def test_an_error_about_a_field_names_it() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_json(b"[[[[]]]]", 100, 2, Field("tools", 0, "x"))
    assert refusal.value.param == "tools[0].x" and refusal.value.message.startswith("tools[0].x is nested")
