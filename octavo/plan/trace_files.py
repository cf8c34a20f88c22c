"""Reads and writes traces: Octavo's own JSONL, Mooncake's JSONL, Azure's and BurstGPT's CSV, and any CSV or JSONL with columns of the
same meaning. An error names the line and the column."""

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError, quote
from octavo.plan.trace import MAX_REQUESTS, MAX_TOKENS, Trace, TraceRequest

MAX_LINE_BYTES = 4 * 2**20
MAX_PREFIX = 100_000  # blocks of one prompt
_FIRST_KEY = "octavo_trace"  # in the first line of Octavo's own files
FORMAT = 1

# Names of columns, in lower case without spaces and underscores.
_TIMES = ("seconds", "timestamp", "arrivaltime", "arrivedat", "time")
_PROMPTS = (
    "promptlen",
    "contexttokens",
    "requesttokens",
    "inputlength",
    "inputtokens",
    "prompttokens",
    "numprompttokens",
)
_OUTPUTS = ("outputlen", "generatedtokens", "responsetokens", "outputlength", "outputtokens", "numgeneratedtokens")
_PREFIXES = ("prefix", "hashids")
_SESSIONS = ("session", "sessionid", "conversationid")
_MILLISECONDS = "hashids"  # Mooncake's times are in milliseconds


def read_trace(path: Path) -> Trace:
    """Raises ConfigError, which names the line."""
    try:
        with path.open("rb") as file:
            lines = _lines(path, file)
            return _read(path, lines)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None


def _lines(path: Path, file: Any) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that is not empty."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise _bad(path, number, f"it has more than {MAX_LINE_BYTES} bytes")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise _bad(path, number, "it is not UTF-8 text") from None
        if text:
            yield number, text


def _bad(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"--trace {path}, line {number}: {why}")


def _read(path: Path, lines: Iterator[tuple[int, str]]) -> Trace:
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"--trace {path} is empty: give a file with one request a line")
    number, text = first
    block_size = 512
    rows: Iterator[tuple[int, Mapping[str, Any]]]
    if text.startswith("{"):
        head = _object(path, number, text)
        if _FIRST_KEY in head:
            if head[_FIRST_KEY] != FORMAT:
                raise _bad(path, number, f"its format is {quote(head[_FIRST_KEY])}; this version reads format {FORMAT}")
            block_size = _whole(path, number, "block_size", head.get("block_size", 512), 1, MAX_TOKENS)
            rows = ((at, _object(path, at, line)) for at, line in lines)
        else:
            rows = _chain((number, head), ((at, _object(path, at, line)) for at, line in lines))
    else:
        names = _cells(path, number, text)
        rows = ((at, dict(zip(names, _cells(path, at, line), strict=False))) for at, line in lines)
        _check_columns(path, names)
    requests = _requests(path, rows)
    if not requests:
        raise ConfigError(f"--trace {path} has no requests")
    return Trace(path.name, requests, block_size)


def _chain(first: tuple[int, Mapping[str, Any]], rest: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[tuple[int, Mapping[str, Any]]]:  # fmt: skip
    yield first
    yield from rest


def _cells(path: Path, number: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text]))
    except csv.Error as error:  # a line's end within it, or a very long cell
        raise _bad(path, number, f"it is not CSV: {error}") from None


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _bad(path, number, "it is not JSON") from None
    if not isinstance(value, dict):
        raise _bad(path, number, "it is not a JSON object")
    return value


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "").replace(" ", "")


def _check_columns(path: Path, names: list[str]) -> None:
    plain = [_plain(name) for name in names]
    for wanted, words in ((_TIMES, "time"), (_PROMPTS, "length of prompts"), (_OUTPUTS, "length of outputs")):
        if not set(wanted) & set(plain):
            raise _bad(
                path, 1, f"no column has the {words}: name one {wanted[0]} or {wanted[1]}, got {', '.join(names)[:200]}"
            )


def _requests(path: Path, rows: Iterator[tuple[int, Mapping[str, Any]]]) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    sessions: dict[str, int] = {}
    start: float | None = None
    for number, row in rows:
        if len(requests) == MAX_REQUESTS:
            raise _bad(
                path, number, f"a trace may have {MAX_REQUESTS:,} requests; cut it with --requests, or sample it"
            )
        values = {_plain(name): value for name, value in row.items() if isinstance(name, str)}
        is_after = bool(values.get("afterprevious", False))
        seconds = _seconds(path, number, _value(path, number, values, _TIMES), 1e3 if _MILLISECONDS in values else 1.0)
        if not is_after:
            start = seconds if start is None else start
            seconds -= start
        prompt_len = _whole(path, number, "prompt length", _value(path, number, values, _PROMPTS), 0, MAX_TOKENS)
        output_len = _whole(path, number, "output length", _value(path, number, values, _OUTPUTS), 0, MAX_TOKENS)
        prefix: Any = next((values[name] for name in _PREFIXES if values.get(name)), [])
        if isinstance(prefix, str):
            prefix = prefix.split()
        if not isinstance(prefix, list) or len(prefix) > MAX_PREFIX:
            raise _bad(path, number, f"prefix must be a list of at most {MAX_PREFIX:,} whole numbers")
        blocks = [_whole(path, number, "prefix", block, 0, 2**62) for block in prefix]
        named = next((values[name] for name in _SESSIONS if values.get(name) not in (None, "", -1)), None)
        session = -1 if named is None else sessions.setdefault(str(named), len(sessions))
        if is_after and session < 0:
            raise _bad(path, number, "after_previous needs a session")
        requests.append(TraceRequest(seconds, max(1, prompt_len), max(1, output_len), blocks, session, is_after))
    ordered = [each for each in requests if not each.after_previous]
    if any(a.seconds > b.seconds for a, b in itertools.pairwise(ordered)):
        ordered.sort(key=lambda each: each.seconds)
        first = ordered[0].seconds
        ordered = [msgspec.structs.replace(each, seconds=each.seconds - first) for each in ordered]
    return [*ordered, *(each for each in requests if each.after_previous)]


def _value(path: Path, number: int, values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in values and values[name] not in (None, ""):
            return values[name]
    raise _bad(path, number, f"it has no {names[0]} (or {', '.join(names[1:4])})")


def _seconds(path: Path, number: int, value: Any, unit: float) -> float:
    """A number, or a date and a time."""
    try:
        seconds = float(value) / unit
    except (TypeError, ValueError):
        try:
            text = str(value).strip()
            whole, dot, fraction = text.partition(".")
            digits = fraction.rstrip("Z")
            seconds = datetime.fromisoformat(whole).timestamp() + (float(f"0.{digits}") if dot and digits else 0.0)
        except (ValueError, OverflowError):
            raise _bad(path, number, f"{quote(value)} is neither a number of seconds nor a time") from None
    if not math.isfinite(seconds) or abs(seconds) > 1e11:
        raise _bad(path, number, f"the time {quote(value)} is out of range")
    return seconds


def _whole(path: Path, number: int, name: str, value: Any, least: int, most: int) -> int:
    try:
        whole = int(value) if not isinstance(value, float) else int(value) if value == int(value) else None
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or isinstance(value, bool) or not least <= whole <= most:
        raise _bad(path, number, f"the {name} must be a whole number from {least} to {most}, got {quote(value)}")
    return whole


def write_trace(path: Path, trace: Trace) -> None:
    """As Octavo's own JSONL: a line about the file, then one request a line. Raises ConfigError."""
    lines = [json.dumps({_FIRST_KEY: FORMAT, "block_size": trace.block_size}).encode()]
    lines += [msgspec.json.encode(request) for request in trace.requests]
    try:
        path.write_bytes(b"\n".join(lines) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
