"""Settings of API keys: a name, a weight and limits. They come from the lines of --api-key-file, or as JSON from --key-settings."""

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.errors import ConfigError, quote

ADMIN_MARK = "admin:"  # begins a line whose key is an admin key
NONE = "-"  # a column without a value
MAX_NAME_LEN = 64
MAX_COUNT = 2**53
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
_NAME = re.compile(r"[\w.@+-]+")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


class KeySettings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a key may take. A limit of 0: none."""

    name: str = ""  # in metrics and usage; its usage stays with it when the key is replaced
    weight: float = 1.0  # its share of the engine among the keys that wait (--fairness)
    rpm: int = 0  # requests a minute
    tpm: int = 0  # tokens a minute, of prompts and answers
    max_tokens_in_flight: int = 0  # of prompts and max_tokens of its open requests
    budget_tokens: int = 0  # tokens a day (UTC), of prompts and answers

    @property
    def has_limits(self) -> bool:
        return bool(self.rpm or self.tpm or self.max_tokens_in_flight or self.budget_tokens)


COLUMNS = KeySettings.__struct_fields__


class KeyFile(msgspec.Struct):
    """What a file of keys holds."""

    keys: list[str] = []
    admin_keys: list[str] = []
    settings: dict[str, KeySettings] = {}  # of those keys that have some


def read_key_file(text: str, what: str) -> KeyFile:
    """Read the lines of a file. `what`: the file, for errors. Raises ConfigError with the number of the line."""
    found = KeyFile([], [], {})
    lines: dict[str, int] = {}  # key → its line
    names: dict[str, int] = {}  # name → its line
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue

        def fail(why: str, number: int = number) -> ConfigError:
            return ConfigError(f"{what}, line {number}: {why}")

        is_admin = line.startswith(ADMIN_MARK)
        if not (line := line.removeprefix(ADMIN_MARK).strip()):
            raise fail(f"'{ADMIN_MARK}' without a key: write one behind it")
        words = line.split()
        # A key may have spaces, as it always could: only what looks like settings is read as such.
        has_settings = any(word.partition("=")[0] in COLUMNS and "=" in word for word in words[1:]) or (
            len(words) > 2 and (words[2] == NONE or words[2][0].isdigit())
        )
        key = words[0] if has_settings else line
        if "," in key:
            raise fail("the key has a comma, which would make it two: choose another key")
        if has_settings:
            settings = _settings_of(words[1:], fail)
            if key in lines:
                raise fail(f"the key is in line {lines[key]}, too: a key has one line")
            if settings.name and settings.name in names:
                raise fail(f"the name {settings.name!r} is in line {names[settings.name]}, too: names are unique")
            names[settings.name] = number
            found.settings[key] = settings
        elif key in found.settings:
            raise fail(f"the key is in line {lines[key]}, too: a key has one line")
        lines.setdefault(key, number)
        (found.admin_keys if is_admin else found.keys).append(key)
    return found


def _settings_of(words: list[str], fail: Callable[[str], ConfigError]) -> KeySettings:
    """Columns in their order, then name=value words in any order."""
    values: dict[str, Any] = {}
    is_named = False
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name in COLUMNS:
            is_named = True
        elif equals:
            raise fail(f"{quote(name)} is no setting of a key: use {', '.join(COLUMNS)}")
        elif is_named:
            raise fail(f"{quote(word)} stands behind a name=value: columns come first")
        elif at >= len(COLUMNS):
            raise fail(f"{len(words) + 1} columns; a line has at most {len(COLUMNS) + 1}: key {' '.join(COLUMNS)}")
        else:
            name, value = COLUMNS[at], word
        if name in values:
            raise fail(f"{name} is given twice")
        if value != NONE:
            values[name] = _value_of(name, value, fail)
    return KeySettings(**values)


def _value_of(name: str, value: str, fail: Callable[[str], ConfigError]) -> str | float | int:
    if name == "name":
        if len(value) > MAX_NAME_LEN or not _NAME.fullmatch(value):
            raise fail(f"name {quote(value)} must be at most {MAX_NAME_LEN} letters, digits and . _ @ + -")
        return value
    if name == "weight":
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise fail(f"weight {quote(value)} must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        return weight
    digits = value.removesuffix("/day") if name == "budget_tokens" else value
    number, unit = (digits[:-1], digits[-1:].lower()) if digits[-1:].lower() in "kmg" else (digits, "")
    if (
        not number.isascii()
        or not number.isdecimal()
        or len(number) > 16
        or not 0 < int(number) * _UNITS[unit] <= MAX_COUNT
    ):
        raise fail(f"{name} {quote(value)} must be a whole number above 0 (1000, 50k, 2M), or {NONE} for no limit")
    return int(number) * _UNITS[unit]


def encode(settings: dict[str, KeySettings]) -> str:
    return msgspec.json.encode(settings).decode()


def decode(text: str) -> dict[str, KeySettings]:
    """Of --key-settings. Raises ConfigError."""
    if not text:
        return {}
    try:
        given = msgspec.json.decode(text, type=dict[str, dict[str, str | int | float | None]])
    except (ValueError, RecursionError) as error:  # of msgspec, and where the text is not UTF-8
        raise ConfigError(f"--key-settings is no JSON object of objects, one for each key: {error}") from None
    found: dict[str, KeySettings] = {}
    for number, (key, settings) in enumerate(given.items(), 1):

        def fail(why: str, number: int = number) -> ConfigError:
            return ConfigError(f"--key-settings, key {number}: {why}")

        words = [
            f"{name}={int(value)}" if isinstance(value, float) and value.is_integer() else f"{name}={value}"
            for name, value in settings.items()
            if value not in (None, 0, "")
        ]
        if any(" " in word for word in words):
            raise fail("a value has a space in it")
        found[key] = _settings_of(words, fail)
    names = [settings.name for settings in found.values() if settings.name]
    if len(set(names)) < len(names):
        raise ConfigError("--key-settings: two keys have the same name: names are unique")
    return found
