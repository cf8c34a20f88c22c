"""Standard error of a server: a lost or missing stream never stops serving, and no text can forge a line of the log."""

import contextlib
import os
import re
import sys

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: line ends, and what moves a terminal's cursor
    "\u2028\u2029"  # line ends of Unicode
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"  # direction of the text, which reorders what is read
)


def escape(text: str) -> str:
    """The text with every character escaped that could end a line, drive a terminal or reorder what is read."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape_json(text: str) -> str:
    """The same for text that is JSON already, which then means the same as before."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(line: str) -> None:
    """Write one line to standard error. Ignores a full disk and a closed pipe. A single write, so that lines of several threads
    do not mix."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"octavo: {escape(line)}\n")
        sys.stderr.flush()


def hold_standard_streams() -> None:
    """Open the null device for each of the descriptors 0 to 2 that is closed. Otherwise the next file or socket opened would get
    that number, and every process that we start would write its log there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def settle_standard_error() -> None:
    """Flush standard error before the exit. If that fails, redirect it to the null device: the interpreter's own flush at exit
    would fail too and change the exit code."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
