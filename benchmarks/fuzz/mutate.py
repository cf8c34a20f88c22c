"""Mutations of bytes, and of JSON values."""

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 64 * 2**10
_NUMBERS = (0, 1, 2, 7, 8, 16, 32, 64, 100, 127, 128, 255, 256, 1000, 4095, 4096, 32767, 32768, 65535, 65536)
_EDGES = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = (
    "", " ", "\n", "\0", "\x1b", "\u2028", "\ud800", "\U0010ffff", "é", "0", "-1", "null", "true", "NaN", "1e999",
    "a" * 300, "../x", "%00", "<s>", "{{ x }}", "\\", '"', "[]", "{}",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, 1e308, float("inf"), float("nan"),
    [], {}, [[]], [None], {"": None},
)  # fmt: skip


def mutate(dice: random.Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    """Change `data` in one to eight places. `words`: pieces that the format knows; `others`: to splice with."""
    changed = bytearray(data)
    for _ in range(1 << dice.randrange(4)):
        _change(dice, changed, words, others)
    return bytes(changed[:MAX_BYTES])


def _change(dice: random.Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]) -> None:
    at = dice.randrange(len(data) + 1)
    span = min(len(data) - at, dice.choice((1, 2, 4, 8, 16, 64, 256, 4096)))
    match dice.randrange(11):
        case 0 if data:
            at = dice.randrange(len(data))
            data[at] ^= 1 << dice.randrange(8)
        case 1 if data:
            data[dice.randrange(len(data))] = dice.choice((0, 1, 10, 13, 32, 34, 44, 58, 92, 127, 128, 255, 65, 48))
        case 2:
            del data[at : at + span]
        case 3:
            data[at:at] = data[at : at + span] * dice.choice((1, 1, 2, 16))
        case 4:
            data[at:at] = dice.randbytes(dice.choice((1, 2, 8, 32)))
        case 5:
            format = dice.choice(("<B", "<H", "<I", "<Q", ">H", ">I", ">Q"))
            number = dice.choice((*_NUMBERS, *_EDGES)) % (1 << 8 * struct.calcsize(format))
            data[at : at + struct.calcsize(format)] = struct.pack(format, number)
        case 6:
            data[at : at + dice.choice((0, span))] = str(dice.choice((*_NUMBERS, *_EDGES))).encode()
        case 7 | 8 if words:
            data[at : at + dice.choice((0, 0, span))] = dice.choice(words)
        case 9 if others:
            other = dice.choice(others)
            start = dice.randrange(len(other) + 1)
            data[at : at + span] = other[start : start + dice.choice((1, 8, 64, 1024))]
        case 10:
            del data[at:]
        case _:
            data[at:at] = dice.choice(_TEXTS).encode("utf-8", "surrogatepass")


def mutate_json(dice: random.Random, value: Any, words: Sequence[str]) -> Any:
    """Return a copy of a JSON value with a few of its members changed."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        value = _changed(dice, value, words)
    return value


def _changed(dice: random.Random, value: Any, words: Sequence[str]) -> Any:
    """Walk down at random, and change what is there."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        match dice.randrange(12):
            case 0:
                del value[key]
            case 1 if words:
                value[dice.choice(words)] = value.pop(key)
            case 2 if words:
                value[dice.choice(words)] = _new(dice, words)
            case _:
                value[key] = _changed(dice, value[key], words)
        return value
    if isinstance(value, list) and value and dice.random() < 0.85:
        at = dice.randrange(len(value))
        match dice.randrange(8):
            case 0:
                del value[at]
            case 1:
                value[at:at] = [copy.deepcopy(value[at]) for _ in range(dice.choice((1, 2, 40)))]
            case 2:
                value.insert(at, _new(dice, words))
            case _:
                value[at] = _changed(dice, value[at], words)
        return value
    if isinstance(value, str) and dice.random() < 0.6:
        at = dice.randrange(len(value) + 1)
        return value[:at] + dice.choice((*_TEXTS, *words)) + value[at + dice.choice((0, 1, 5)) :]
    if isinstance(value, int | float) and dice.random() < 0.6:
        return dice.choice((*_NUMBERS, *_EDGES, -1, 0.5, 1e308))
    if dice.random() < 0.2:
        return [value] if dice.random() < 0.5 else {dice.choice(words) if words else "x": value}
    return _new(dice, words)


def _new(dice: random.Random, words: Sequence[str]) -> Any:
    return copy.deepcopy(
        dice.choice((*_VALUES, *_TEXTS, *words))
    )  # a list that is changed later must be in one place alone
