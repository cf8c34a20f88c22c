"""Edits JSON that is encoded already, so that what is sent often, or by many endpoints, is encoded once and in one place."""

import os
from collections.abc import Callable

import msgspec

_encode = msgspec.json.Encoder().encode
_MARK = os.urandom(16).hex()  # a text that no other member holds


def add_member(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, which ends with a JSON object that is not empty, with one more member at that object's end. `value` is encoded."""
    assert body.endswith(b"}") and not body.endswith(b"{}")
    return b'%b,"%b":%b}' % (body[:-1], name.encode(), value)


def around_text(build: Callable[[str], msgspec.Struct]) -> tuple[bytes, bytes]:
    """What stands before and after a text in the JSON of what `build` makes of it. The text must come in it once."""
    before, after = _encode(build(_MARK)).split(_encode(_MARK))
    return before, after
