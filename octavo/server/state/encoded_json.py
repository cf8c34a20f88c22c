"""Edits encoded JSON: what is sent often is encoded once, and what every endpoint may add is added in one place."""

import os
from collections.abc import Callable

import msgspec

_encode = msgspec.json.Encoder().encode
_MARK = os.urandom(16).hex()  # a text that no other member holds


def add_member(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, which ends with a non-empty JSON object, with one more member in it. `value`: encoded."""
    assert body.endswith(b"}") and not body.endswith(b"{}")
    return b'%b,"%b":%b}' % (body[:-1], name.encode(), value)


def around_text(build: Callable[[str], msgspec.Struct]) -> tuple[bytes, bytes]:
    """The JSON before and after the text in what `build` makes of a text. The text must occur once."""
    before, after = _encode(build(_MARK)).split(_encode(_MARK))
    return before, after
