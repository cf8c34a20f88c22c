"""Counts what a JSON text holds before it is decoded: values, depth, digits of a number.

Decoding takes up to a hundred times the memory of the text, and holds the GIL until it is done. The count goes over the bytes in
short steps, between which other threads run, and stops at the first limit that is passed. It does not check the syntax."""

import itertools

from octavo.errors import Field, InvalidRequest, TooLarge

MAX_DIGITS = 128
"""Digits of a number: the time to convert an integer grows with the square of its length."""

# How many values each part counts for. A number counts for one; these take as long to decode as several numbers.
BRACKETS = 2  # a list or an object
STRING = 2  # a string, be it a value or a name
NAME = 5  # a name, besides being a string
OUTSIDE = 32  # bytes outside of strings (digits, white space) that count for one value

_STEP = 64 * 1024  # bytes: about a millisecond
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_CHANGE = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}  # of the depth
_DIGITS_ALIKE = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else byte for byte in range(256))
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


def check_json(body: bytes, max_items: int, max_depth: int, what: str | Field = "the request body") -> None:
    """Raise TooLarge or InvalidRequest if a JSON text has more values than `max_items`, or is nested deeper. `what`: the text's name
    in errors, or its field."""
    num_items = depth = start = num_quotes = num_outside = 0
    while start < len(body):
        step = body[start : _end_of_step(body, start + _STEP)]
        start += len(step)
        if b"\\" in step:
            step = step.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = step.split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        num_outside += len(outside)
        num_opened = outside.count(b"[") + outside.count(b"{")
        num_items += outside.count(b",") + BRACKETS * num_opened + NAME * outside.count(b":")
        if num_items + STRING * (num_quotes // 2) + num_outside // OUTSIDE > max_items:
            raise TooLarge(what + f" has more than {max_items} JSON values, which is the limit (--max-json-items)")
        if depth + num_opened > max_depth:
            changes = map(_CHANGE.__getitem__, outside.translate(None, _NOT_BRACKETS))
            if max(itertools.accumulate(changes, initial=depth)) > max_depth:
                raise InvalidRequest(what + f" is nested deeper than {max_depth} levels, the limit (--max-json-depth)")
        depth += num_opened - outside.count(b"]") - outside.count(b"}")
        if len(outside) > MAX_DIGITS and _LONG_NUMBER in outside.translate(_DIGITS_ALIKE):
            raise InvalidRequest(what + f" has a number of more than {MAX_DIGITS} digits")


def _end_of_step(body: bytes, end: int) -> int:
    """`end`, or one more where an escape sequence would be cut."""
    step = body[max(0, end - _STEP) : end]
    return end + (len(step) - len(step.rstrip(b"\\"))) % 2
