"""CallParser: finds tool calls in an output, in any format. It takes pieces of text and returns events, which do not depend on
how the text was cut. A call is either parsed completely, or its text is content.

Space around a call belongs to the call. Text that turns out not to be a call is content from its opening mark on, and is
searched again after that mark, so that a valid call after an invalid one is found.
"""

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo import fresh
from octavo.text.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event
from octavo.text.parsers.json_text import dump
from octavo.text.parsers.reader import SPACE, Call, Malformed, Reader, Steps

_LETTERS = string.ascii_letters + string.digits

Schemas = Mapping[str, Mapping[str, Any]]
"""The tools of a request: name → JSON schema of the parameters."""


def call_id() -> str:
    return "call_" + fresh.random_bytes(12).hex()


def short_id() -> str:
    """An id of nine letters and digits, the only form that some templates accept."""
    return "".join(_LETTERS[each % len(_LETTERS)] for each in fresh.random_bytes(9))


@dataclass(frozen=True)
class ToolFormat:
    read: Callable[[Reader, str, Schemas], Steps[None]]
    """(reader after the opening mark, the mark or "" for a bare opening, the tools): yields each call."""
    openings: tuple[str, ...] = ()  # marks that open a call anywhere
    bare: str = ""  # characters that open a call if no content came before; the reader is then before the character
    marks: tuple[str, ...] = ()  # texts that may be special tokens and must reach the parser
    signs: tuple[str, ...] = ()  # a chat template that contains all of these uses this format
    strangers: tuple[str, ...] = ()  # … unless it contains one of these
    rank: int = 0  # if several formats match a template, the highest rank wins
    new_id: Callable[[], str] = call_id
    # Text before and after a call, if the format writes {"name", "arguments"}: required calls are then written in this frame.
    frame: tuple[str, str] | None = None
    aliases: tuple[str, ...] = ()


class CallParser:
    def __init__(self, format: ToolFormat, tools: Schemas, new_id: Callable[[], str] | None = None) -> None:
        self._format = format
        self._tools = tools
        self._new_id = new_id or format.new_id
        self._opening = re.compile("|".join(map(re.escape, format.openings)) or r"(?!)")
        self._reader = Reader()
        self._section: Steps[None] | None = None  # reads calls; None: outside a section
        self._start = 0  # start of the text that becomes content if the section is malformed
        self._after_opening = 0  # end of the opening mark, where the search continues if the section is malformed
        self._can_open_bare = True
        self._after_call = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Event]:
        self._reader.text += text
        return self._run()

    def finish(self) -> list[Event]:
        self._reader.over = True
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        while self._inside(events) if self._section is not None else self._outside(events):
            pass
        if self._section is None:
            self._reader.text = self._reader.text[self._reader.at :]
            self._reader.at = 0
        return events

    def _inside(self, events: list[Event]) -> bool:
        """Advance the section by one step. False: it waits for more text."""
        assert self._section is not None
        reader = self._reader
        try:
            call = next(self._section)
        except StopIteration:
            self._section = None
            self._can_open_bare = True
        except Malformed:
            self._section = None
            reader.at = self._after_opening
            self._emit_content(events, reader.text[self._start : self._after_opening])
            self._can_open_bare = False
        else:
            if call is None:
                assert not reader.over, "a format waits for text that will not come"
                return False
            self._emit_call(events, call)
            self._start = self._after_opening = reader.at
        return True

    def _outside(self, events: list[Event]) -> bool:
        """Emit text that is certainly content. True: a section was opened."""
        reader = self._reader
        text, at = reader.text, reader.at
        rest = text[at:].lstrip(SPACE)
        if self._can_open_bare and rest and rest[0] in self._format.bare:
            reader.at = len(text) - len(rest)
            self._start, self._after_opening = at, reader.at + 1
            self._section = self._format.read(reader, "", self._tools)
            return True
        found = self._opening.search(text, at)
        if found is None:
            end = len(text) if reader.over else self._certain(text, at)
            if not (reader.over and self._after_call and not rest):
                self._emit_content(events, text[at:end])
            reader.at = end
            return False
        self._start = at + len(text[at : found.start()].rstrip(SPACE))
        self._emit_content(events, text[at : self._start])
        reader.at = self._after_opening = found.end()
        self._section = self._format.read(reader, found[0], self._tools)
        return True

    def _certain(self, text: str, at: int) -> int:
        """End of the text that cannot become part of an opening mark or of the space before one."""
        held = 0
        for opening in self._format.openings:
            for size in range(min(len(opening) - 1, len(text) - at), held, -1):
                if text.endswith(opening[:size]):
                    held = size
                    break
        return at + len(text[at : len(text) - held].rstrip(SPACE))

    def _emit_content(self, events: list[Event], text: str) -> None:
        if not text:
            return
        events.append(Content(text))
        self._after_call = False
        if text.strip(SPACE):
            self._can_open_bare = False

    def _emit_call(self, events: list[Event], call: Call) -> None:
        index = self.num_calls
        events.append(CallBegin(index, call.id or self._new_id(), call.name))
        events.append(CallArguments(index, dump(call.arguments)))
        events.append(CallEnd(index))
        self.num_calls += 1
        self._after_call = True
