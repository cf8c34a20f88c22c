"""Adds a member to encoded JSON: what every endpoint may add is added in one place."""


def add_member(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, which ends with a non-empty JSON object, with one more member in it. `value`: encoded."""
    assert body.endswith(b"}") and not body.endswith(b"{}")
    return b'%b,"%b":%b}' % (body[:-1], name.encode(), value)
