"""Values in messages: as they are while they are short, and never more than a line of what a client sent."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import Field, quote, quote_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


class Endless(list[int]):
    """A list that may be read from its start only: what is not shown costs nothing."""

    def __iter__(self) -> Any:
        yield from range(1000)
        raise AssertionError("read to the end")


@given(VALUES, st.integers(10, 80))
def test_json_is_cut(value: Any, most: int) -> None:
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    found = quote_json(value, most)
    assert len(found) <= most
    if len(whole) <= most:
        assert found == whole
    assert len(quote(value, most)) <= 4 * most + 10


def test_long_values() -> None:
    assert quote_json(Endless([0] * 10)) == "[" + ",".join(map(str, range(100)))[:56] + "..."
    assert quote("x" * 10**6) == repr("x" * 100) + "..."
    assert quote(10**5000) == quote_json(10**5000) == "an integer of 16610 bits"
    assert len(quote([["x" * 10**6] * 50] * 50)) <= 100
    assert quote((1, 2)) == "[1, 2]" and quote(("a",)) == "('a',)" and quote({"a": 1}) == '{"a":1}'


def test_a_field_of_a_long_name_is_cut() -> None:
    assert len(str(Field("a" * 10**6, 3, "b" * 10**6))) < 420
    assert str(Field("tools", 0, "function", "name")) == "tools[0].function.name"
