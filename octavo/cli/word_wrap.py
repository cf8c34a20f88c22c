"""WordWrap: breaks a stream of styled text between words, by the columns of the terminal, piece by piece as it arrives.

What is written is never taken back: the last word is held until its end is seen."""

import re
import unicodedata
from collections.abc import Callable

AS_IT_IS, WRAPPED = "\x02", "\x03"
"""Around text whose lines are not broken: code and tables. No text of a model has them: control characters are removed before."""
CLOSING = "、。，．！？：；）］｝」』】〕》〉…"  # never begin a line
TAB = 8
_PARTS = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)


def char_width(character: str) -> int:
    """Columns that a character takes."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class WordWrap:
    """Returns what is to be written; `finish` returns the rest."""

    def __init__(self, columns: Callable[[], int]) -> None:
        """`columns`: of the terminal, asked for each piece, because a window changes its size."""
        self._columns, self._limit = columns, 0
        self._column = 0  # where the cursor is
        self._gap = ""  # spaces that are written before the word, unless it begins a line
        self._word, self._width = "", 0  # with its styles
        self._is_as_it_is = False

    def feed(self, text: str) -> str:
        # One column stays free: terminals differ in what they do behind the last one.
        self._limit = self._columns() - 1
        return "".join(self._take(part) for part in _PARTS.findall(text))

    def finish(self) -> str:
        return self._end_word()

    def _take(self, part: str) -> str:
        if part in (AS_IT_IS, WRAPPED):
            before, self._is_as_it_is = self._end_word() + self._end_gap(), part == AS_IT_IS
            return before
        if part == "\n":
            before, self._gap, self._column = self._end_word(), "", 0
            return before + part
        if self._is_as_it_is:
            self._column += 0 if part[0] == "\x1b" else char_width(part)
            return part
        if part in " \t":
            before = self._end_word()
            self._gap += part
            return before
        if part[0] == "\x1b":
            self._word += part
            return ""
        return self._take_character(part)

    def _take_character(self, character: str) -> str:
        width, before = char_width(character), ""
        # Scripts of wide characters have no spaces: a line may end between any two of them.
        if width == 2 and self._width and character not in CLOSING and self._word[-1] != "\u200d":
            before = self._end_word()
        self._word += character
        self._width += width
        if self._width > self._limit:  # longer than a line: the terminal breaks it
            before += self._end_word()
        return before

    def _end_word(self) -> str:
        if not self._width:  # styles alone take no room
            word, self._word = self._word, ""
            return word
        end = self._column + self._gap_width + self._width
        if self._column and end > self._limit and self._width <= self._limit:
            before, end = "\n", self._width
        else:
            before = self._gap
        written = before + self._word
        self._column = end if end <= self._limit else end % (self._limit + 1)
        self._gap, self._word, self._width = "", "", 0
        return written

    def _end_gap(self) -> str:
        gap, self._column, self._gap = self._gap, self._column + self._gap_width, ""
        return gap

    @property
    def _gap_width(self) -> int:
        column = self._column
        for character in self._gap:
            column += TAB - column % TAB if character == "\t" else 1
        return column - self._column
