"""Encodes a long text in windows, so that the memory it takes does not grow with its length.

The `tokenizers` library takes about 350 bytes for every word that it cuts out of a text, and a digit may be a word. A text is
therefore cut between two words, and each cut is tested: the tokens of the text after it, up to the end of the window, must be
those that the window ends with. A cut that fails the test is not used."""

import re
from collections.abc import Callable, Iterator

from octavo.errors import InvalidRequest

Encode = Callable[[str], list[int]]

WINDOW = 64 * 1024  # characters
OVERLAP = 4 * 1024  # characters after a cut that are encoded twice, to test it
MAX_WORD = 256 * 1024
"""Characters of a text without a place to cut: a run of letters and digits, or of anything else."""

_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")
_AFTER_WORD = re.compile(r"(?<=\w)(?=\W)")
_MAX_TESTED = 3  # cuts of each kind, in one window


def encode_in_windows(encode: Encode, encode_rest: Encode, text: str, max_ids: int | None = None) -> list[int]:
    """The ids of `text`, without special tokens around it. `encode_rest`: as `encode`, for text that is not at the beginning.
    `max_ids`: stop when there are more; the ids are then incomplete."""
    ids: list[int] = []
    start = 0
    while len(text) - start > WINDOW + OVERLAP:
        end = _next_cut(encode, text, start, encode_rest, ids)
        if end == start:  # every cut has failed its test
            break
        start, encode = end, encode_rest
        if max_ids is not None and len(ids) > max_ids:
            return ids
    return ids + encode(text[start:]) if start < len(text) else ids


def _next_cut(encode: Encode, text: str, start: int, encode_rest: Encode, ids: list[int]) -> int:
    """Add the ids from `start` to the next cut, and return the cut. `start`: there is none that passes its test."""
    size, has_cuts = WINDOW, False
    while True:
        window = text[start : start + size + OVERLAP]
        if cuts := list(_cuts(window, len(window) - OVERLAP)):
            has_cuts = True
            found = encode(window)
            for cut in cuts:
                rest = encode_rest(window[cut:])
                if rest and found[-len(rest) :] == rest:
                    ids += found[: -len(rest)]
                    return start + cut
        if size >= MAX_WORD or len(window) < size + OVERLAP:
            break
        size *= 2
    if not has_cuts and len(window) == size + OVERLAP:
        raise InvalidRequest(
            f"the text has more than {MAX_WORD} characters without a boundary between words, from character {start} on"
        )
    return start


def _cuts(window: str, end: int) -> Iterator[int]:
    """Places to cut, the best ones first: between two words, then after a word; of each kind the last ones before `end`."""
    for pattern in (_BETWEEN_WORDS, _AFTER_WORD):
        num_left = _MAX_TESTED
        for last in range(end, 0, -OVERLAP):
            first = max(1, last - OVERLAP)
            places = [found.start() for found in pattern.finditer(window, first, last + 1) if found.start() < last]
            yield from places[: -num_left - 1 : -1]
            num_left -= len(places)
            if num_left <= 0:
                break
