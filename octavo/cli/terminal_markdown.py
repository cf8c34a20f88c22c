"""TerminalMarkdown: a model's Markdown as styled text in a terminal, piece by piece as it arrives.

What is written is never taken back: only characters that may be the beginning of a mark are held until the next ones decide.
Tables are held until they end, so that their columns can be aligned. Control characters of a model never reach the terminal."""

import re
import unicodedata
from collections.abc import Callable

from octavo.cli.word_wrap import AS_IT_IS, WRAPPED, WordWrap, char_width

RESET, BOLD, DIM, ITALIC, UNDERLINE = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[3m", "\x1b[4m"
CODE, HEADING = "\x1b[36m", "\x1b[1;35m"
MAX_TABLE_LINES = 200  # of a table that is held back
FENCES = ("```", "~~~")
_UNDECIDED = re.compile(
    r"[ ]{0,3}(#{1,6}|[-*+]|>|`{1,3}|~{1,3}|\||\d{1,3}[.)]?)?[ ]?"
)  # a line's start that may be a mark
_HEADING = re.compile(r"[ ]{0,3}#{1,6}[ ]+")
_BULLET = re.compile(r"([ ]*)[-*+][ ]+")
_QUOTE = re.compile(r"[ ]{0,3}>[ ]?")
_FENCE = re.compile(r"[ ]{0,3}(```|~~~)")
_RULE = re.compile(r"[ ]{0,3}([-*_])[ ]*(\1[ ]*){2,}")
_TABLE_LINE = re.compile(r"[ ]*\|?[ ]*:?-+:?[ ]*(\|[ ]*:?-+:?[ ]*)*\|?[ ]*")


def clean(text: str) -> str:
    """The text without control characters, which could move the cursor, rename the window or type for the user."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") or c == "\u200d")


class TerminalMarkdown:
    """Returns what is to be written; `finish` returns the rest."""

    def __init__(self, columns: Callable[[], int] | None = None) -> None:
        """`columns`: of the terminal: lines are broken between words, those of code and tables are not. None: no line is broken."""
        self._wrap = None if columns is None else WordWrap(columns)
        self._held = ""  # undecided characters
        self._line = ""  # of the current line, as far as it is decided: empty at its start
        self._fence = ""  # the mark that ends the code block
        self._table: list[str] = []
        self._is_table_line = False
        self._in_code = self._in_bold = self._in_italic = False
        self._style = ""  # of the whole line

    def feed(self, text: str) -> str:
        self._held += clean(text)
        return self._wrapped(self._take(is_end=False))

    def finish(self) -> str:
        """End the answer: write what was held, and leave the terminal's style as it was."""
        rest = self._wrapped(self._finish())
        return rest + (self._wrap.finish() if self._wrap else "")

    def _wrapped(self, text: str) -> str:
        return self._wrap.feed(text) if self._wrap else text

    def _as_it_is(self, text: str) -> str:
        return f"{AS_IT_IS}{text}{WRAPPED}" if self._wrap else text

    def _finish(self) -> str:
        rest = self._take(is_end=True)
        if self._is_table_line or self._table:
            if self._line:
                self._table.append(self._line)
            rest += self._end_table().removesuffix("\n")
        rest += self._end_styles()
        self._fence, self._line, self._is_table_line = "", "", False
        return rest

    # ── lines ──

    def _take(self, is_end: bool) -> str:
        out = ""
        while self._held:
            if self._fence:
                taken = self._take_code(is_end)
            elif self._is_table_line:
                taken = self._take_table()
            elif not self._line:
                taken = self._begin_line(is_end)
            else:
                taken = self._take_inline(is_end)
            if taken is None:
                break
            out += taken
        return out

    def _begin_line(self, is_end: bool) -> str | None:
        """Decide what kind of line begins. None: more characters are needed."""
        line, newline, _ = self._held.partition("\n")
        if (
            not newline
            and not is_end
            and (_UNDECIDED.fullmatch(line) or (line[:1] in "-*_" and not line.strip("-*_ ")))
        ):
            return None
        if newline and not line.strip():
            return self._end_table() + self._drop(len(line) + 1, "\n")
        if fence := _FENCE.match(line):
            if not newline and not is_end:
                return None  # the language is written with the fence
            self._fence = fence[1]
            name = line.strip().strip("`~").strip()
            head = f"{DIM}┌─ {name}{RESET}\n" if name else f"{DIM}┌─{RESET}\n"
            return self._end_table() + self._drop(len(line) + 1, self._as_it_is(head))
        if line.lstrip().startswith("|") and len(self._table) < MAX_TABLE_LINES:
            self._is_table_line = True
            return ""
        before = self._end_table()
        if (newline or is_end) and _RULE.fullmatch(line):
            return before + self._drop(len(line) + 1, f"{DIM}{'─' * 40}{RESET}\n")
        if heading := _HEADING.match(line):
            self._style, self._line = HEADING, "#"
            return before + self._drop(heading.end(), HEADING)
        if quote := _QUOTE.match(line):
            self._style, self._line = DIM, ">"
            return before + self._drop(quote.end(), f"{DIM}│ ")
        if bullet := _BULLET.match(line):
            self._line = "-"
            return before + self._drop(bullet.end(), f"{bullet[1]}• ")
        self._line = " "
        return before

    def _take_code(self, is_end: bool) -> str | None:
        """Code is written as it is, line by line as far as a line cannot be the closing fence."""
        line, newline, _ = self._held.partition("\n")
        if not self._line:
            if not newline and not is_end and self._fence.startswith(line.strip()[:3]):
                return None
            if line.strip().startswith(self._fence) and not line.strip().strip("`~"):
                self._fence = ""
                return self._drop(len(line) + 1, f"{DIM}└─{RESET}\n" if newline else f"{DIM}└─{RESET}")
            self._line = line or " "
        if newline:
            self._line = ""
            return self._drop(len(line) + 1, self._as_it_is(f"{CODE}{line}{RESET}") + "\n")
        return self._drop(len(line), self._as_it_is(f"{CODE}{line}{RESET}"))

    # ── tables ──

    def _take_table(self) -> str | None:
        line, newline, _ = self._held.partition("\n")
        if not newline:
            self._line, self._held = self._line + line, ""
            return None
        self._table.append(self._line + line)
        self._line, self._is_table_line = "", False
        return self._drop(len(line) + 1, "")

    def _end_table(self) -> str:
        lines, self._table, self._is_table_line = self._table, [], False
        if not lines:
            return ""
        rows = [
            None if _is_rule(line) else [_plain(cell) for cell in line.strip().strip("|").split("|")] for line in lines
        ]
        filled = [row for row in rows if row is not None]
        widths = [
            max(_width(row[at]) for row in filled if at < len(row)) for at in range(max(map(len, filled), default=0))
        ]
        out = ""
        for row in rows:
            if row is None:
                out += self._as_it_is(DIM + "─┼─".join("─" * width for width in widths) + RESET) + "\n"
            else:
                cells = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=False)]
                out += self._as_it_is(f"{DIM} │ {RESET}".join(cells).rstrip()) + "\n"
        return out

    # ── within a line ──

    def _take_inline(self, is_end: bool) -> str | None:
        held = self._held
        found = re.search(r"[*`\n]", held)
        if found is None:
            self._line += held[-1]
            return self._drop(len(held), held)
        if found.start():
            before = held[: found.start()]
            self._line += before[-1]
            return self._drop(len(before), before)
        if held[0] == "\n":
            self._line = ""
            return self._drop(1, self._end_styles() + "\n")
        if held[0] == "`":
            return self._take_backtick()
        if self._in_code:
            return self._drop(1, "*")
        return self._take_stars(is_end)

    def _take_backtick(self) -> str:
        self._in_code = not self._in_code
        self._line += "`"
        return self._drop(1, CODE if self._in_code else self._restored())

    def _take_stars(self, is_end: bool) -> str | None:
        held, before = self._held, self._line[-1]
        num = len(held) - len(held.lstrip("*"))
        after = held[num : num + 1]
        if not after and not is_end:
            return None
        can_open = bool(after) and not after.isspace() and not (before.isalnum() and num == 1)
        can_close = not before.isspace() and before not in "#>-"
        is_bold, is_italic = num >= 2, num in (1, 3)
        closes = (not is_bold or self._in_bold) and (not is_italic or self._in_italic)
        if num > 3 or not (can_close if closes else can_open):
            self._line += "*"
            return self._drop(num, "*" * num)
        if is_bold:
            self._in_bold = not closes
        if is_italic:
            self._in_italic = not closes
        self._line += "*" if closes else " "
        return self._drop(num, self._restored())

    def _restored(self) -> str:
        """The style of what follows."""
        return RESET + self._style + (BOLD if self._in_bold else "") + (ITALIC if self._in_italic else "")

    def _end_styles(self) -> str:
        is_styled = bool(self._style or self._in_code or self._in_bold or self._in_italic)
        self._style, self._in_code, self._in_bold, self._in_italic = "", False, False, False
        return RESET if is_styled else ""

    def _drop(self, num: int, written: str) -> str:
        self._held = self._held[num:]
        return written


def _is_rule(line: str) -> bool:
    """Whether a line of a table separates its head: |---|:--:|."""
    return "-" in line and _TABLE_LINE.fullmatch(line) is not None


def _plain(cell: str) -> str:
    """A cell without marks: its width is that of its text."""
    return re.sub(r"\*\*|`", "", cell.strip())


def _width(text: str) -> int:
    """Columns that a text takes."""
    return sum(map(char_width, text))


class TerminalText:
    """Text for a terminal that shows no styles: Markdown stays as it is, lines are broken between words, those of code are not."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._wrap = WordWrap(columns)
        self._line = ""  # the beginning of a line that may be a fence
        self._is_decided = self._is_code = False

    def feed(self, text: str) -> str:
        return "".join(self._take(part) for part in re.findall(r"[^\n]+|\n", clean(text)))

    def finish(self) -> str:
        return self._decide() + self._wrap.finish()

    def _take(self, part: str) -> str:
        if part == "\n":
            before, self._is_decided = self._decide(), False
            return before + self._wrap.feed(part)
        if self._is_decided:
            return self._wrap.feed(part)
        self._line += part
        start = self._line.strip()[:3]
        return "" if any(fence.startswith(start) for fence in FENCES) and len(start) < 3 else self._decide()

    def _decide(self) -> str:
        """Write the beginning of a line. A fence begins or ends code, and is a line of it."""
        line, self._line = self._line, ""
        if self._is_decided:
            return self._wrap.feed(line)
        self._is_decided = True
        is_fence = _FENCE.match(line) is not None
        before = AS_IT_IS if is_fence or self._is_code else WRAPPED
        self._is_code ^= is_fence
        return self._wrap.feed(before + line)
