"""The lines of a batch's input, OpenAI's {custom_id, method, url, body}: read one at a time into a request or an error.

Lines are hostile input of any size. Only known members are taken out of them: building a dictionary of all members of a line takes
hundreds of bytes and a microsecond for each, and a line has room for millions."""

import hashlib
from collections.abc import Iterator
from typing import BinaryIO, TypeVar

import msgspec

from octavo.messages.params import choice_seed

MAX_CUSTOM_ID_LEN = 512
KEYS = ("custom_id", "method", "url", "body")
ROOM_AROUND_BODY = 64 * 1024
"""Bytes that a line may have beyond its body's limit, for the other keys and white space."""
T = TypeVar("T")
_SKIPPED = 1 << 20  # bytes read at once while a line that is too long is skipped


class Line(msgspec.Struct, frozen=True):
    number: int  # from 1
    custom_id: str
    url: str
    body: bytes
    ignored: tuple[str, ...] = ()  # keys besides the four

    @property
    def limits_its_wait(self) -> bool:
        """Whether the request sets max_queue_ms: then a 429 is its answer and it is not retried."""
        return bytes(_decode(self.body, _Body, "body").max_queue_ms) != b"null"


class BadLine(msgspec.Struct, frozen=True):
    number: int
    code: str
    message: str
    param: str | None = None
    custom_id: str | None = None  # None: it could not be read


class Rules(msgspec.Struct, frozen=True):
    """What a line may ask for. `seeded`: the routes whose requests take a seed."""

    urls: tuple[str, ...]
    max_body_bytes: int
    is_strict: bool = False
    seeded: frozenset[str] = frozenset()
    seed: int | None = None  # requests without a seed get one made from this and their custom_id; None: they get none
    max_lines: int = 0  # of the input, with empty ones; 0: no limit


class _Members(msgspec.Struct, frozen=True):
    """The members of a line as they are written. Empty: absent."""

    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


class _OnlyMembers(_Members, frozen=True, forbid_unknown_fields=True):
    """A line that has no others."""


class _Body(msgspec.Struct, frozen=True):
    """The members of a body that matter here."""

    stream: msgspec.Raw = msgspec.Raw(b"false")
    seed: msgspec.Raw = msgspec.Raw(b"null")
    max_queue_ms: msgspec.Raw = msgspec.Raw(b"null")


def read_lines(file: BinaryIO, rules: Rules) -> Iterator[Line | BadLine]:
    """Parse the file with one line in memory at a time. Empty lines are skipped but counted."""
    longest = rules.max_body_bytes + ROOM_AROUND_BODY
    number = 0
    while raw := file.readline(longest + 1):
        number += 1
        if rules.max_lines and number > rules.max_lines:
            yield BadLine(number, "too_many_lines", f"the input has more than {rules.max_lines} lines")
            return
        if len(raw) > longest and not raw.endswith(b"\n"):
            while (more := file.readline(_SKIPPED)) and not more.endswith(b"\n"):
                pass
            yield BadLine(number, "line_too_long", f"line {number} is longer than the limit of {longest} bytes")
            continue
        text = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).strip()
        if text:
            yield parse_line(number, text, rules)


def parse_line(number: int, text: bytes, rules: Rules) -> Line | BadLine:
    try:
        return _parse(number, text, rules)
    except _Bad as bad:
        return BadLine(number, bad.code, f"line {number}: {bad.message}", bad.param, bad.custom_id)


class _Bad(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code, self.message, self.param = code, message, param
        self.custom_id: str | None = None


def _parse(number: int, text: bytes, rules: Rules) -> Line:
    members, ignored = _members(text)
    custom_id = _string(members.custom_id, "custom_id")
    if not custom_id or len(custom_id) > MAX_CUSTOM_ID_LEN:
        raise _Bad("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID_LEN} characters", "custom_id")
    try:
        return _request(number, custom_id, members, ignored, rules)
    except _Bad as bad:
        bad.custom_id = custom_id
        raise


def _members(text: bytes) -> tuple[_Members, tuple[str, ...]]:
    """The members of a line, and the names of those that are not known."""
    try:
        return msgspec.json.decode(text, type=_OnlyMembers), ()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        members = _decode(text, _Members, "it")
    if len(text) - len(bytes(members.body)) > ROOM_AROUND_BODY:
        raise _Bad("line_too_long", f"it has more than {ROOM_AROUND_BODY} bytes beside its body")
    names = _decode(text, dict[str, msgspec.Raw], "it")
    return members, tuple(name[:100] for name in names if name not in KEYS)


def _request(number: int, custom_id: str, members: _Members, ignored: tuple[str, ...], rules: Rules) -> Line:
    method, url = _string(members.method, "method"), _string(members.url, "url")
    if method != "POST":
        raise _Bad("invalid_method", f"method must be POST, got {method[:20]!r}", "method")
    if url not in rules.urls:
        raise _Bad("invalid_url", f"url must be {' or '.join(rules.urls)}, got {url[:60]!r}", "url")
    body = bytes(members.body)
    if not body:
        raise _Bad("missing_required_parameter", "body is missing", "body")
    if ignored and rules.is_strict:
        raise _Bad("unknown_parameter", f"unknown key {ignored[0]!r}", ignored[0])
    return Line(number, custom_id, url, _body(body, custom_id, url, rules), ignored[:64])


def _body(raw: bytes, custom_id: str, url: str, rules: Rules) -> bytes:
    if len(raw) > rules.max_body_bytes:
        raise _Bad("request_too_large", f"body is over the limit of {rules.max_body_bytes} bytes", "body")
    known = _decode(raw, _Body, "body")
    if bytes(known.stream) not in (b"false", b"null"):
        raise _Bad(
            "invalid_value", "body.stream: responses of a batch are not streamed: leave stream out", "body.stream"
        )
    if rules.seed is None or url not in rules.seeded or bytes(known.seed) != b"null":
        return raw
    members = _decode(raw, dict[str, msgspec.Raw], "body")
    return msgspec.json.encode({**members, "seed": msgspec.Raw(str(_seed(rules.seed, custom_id)).encode())})


def _seed(base: int, custom_id: str) -> int:
    """Derive a seed from the custom_id, not from the line's position: a run that is resumed samples the same answers."""
    digest = hashlib.blake2b(custom_id.encode(), digest_size=7).digest()
    return choice_seed(base, int.from_bytes(digest))


def _decode(text: bytes, type: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.ValidationError:
        raise _Bad("invalid_json_line", f"{what} must be a JSON object", None if what == "it" else what) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = str(error).splitlines()[0][:200].removeprefix("JSON is malformed: ")
        raise _Bad("invalid_json_line", f"{what} is not valid JSON: {words}", None if what == "it" else what) from None


def _string(raw: msgspec.Raw, name: str) -> str:
    if not bytes(raw):
        raise _Bad("missing_required_parameter", f"{name} is missing", name)
    try:
        value = msgspec.json.decode(raw, type=str)
        value.encode()  # a lone surrogate is valid JSON but not text
    except (msgspec.MsgspecError, UnicodeError):
        raise _Bad("invalid_type", f"{name} must be a string", name) from None
    return value
