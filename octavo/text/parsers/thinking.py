"""ThinkParser: splits an output into reasoning, between two marks at its beginning, and content.

Line breaks next to a mark belong to the mark. A mark later in the output is content: the model may write about marks.
"""

from dataclasses import dataclass

from octavo.text.parsers.events import Content, Event, Reasoning
from octavo.text.parsers.reader import SPACE


@dataclass(frozen=True)
class ThinkFormat:
    opening: str
    closing: str
    opens_unsaid: bool = False  # the model reasons first even if neither it nor the prompt writes the opening mark
    signs: tuple[str, ...] = ()  # a chat template that contains all of these uses this format
    rank: int = 0  # if several formats match a template, the highest rank wins
    aliases: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, str]:
        return self.opening, self.closing

    def is_open(self, prompt: str) -> bool:
        """Whether the output for this prompt begins inside the reasoning: the template may have opened or closed it."""
        end = prompt.rstrip(SPACE)
        return end.endswith(self.opening) or (self.opens_unsaid and not end.endswith(self.closing))


def held_len(text: str, mark: str) -> int:
    """Number of characters at the end of the text that may be the beginning of the mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


class ThinkParser:
    def __init__(self, format: ThinkFormat, prompt: str) -> None:
        self._format = format
        self._held = ""
        self._stage = self._opening
        self._may_be_content = not format.is_open(prompt)
        self._is_over = False
        self.has_reasoned = False  # a reasoning section has begun

    @property
    def is_past(self) -> bool:
        """Whether the reasoning, if there was any, is over: all that follows is content."""
        return self._stage in (self._after, self._content)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._held += text
        while self._stage(events):
            pass
        return events

    def finish(self) -> list[Event]:
        self._is_over = True
        return self.feed("")

    # Each stage consumes the held text as far as it is certain. True: the next stage may continue with the rest.

    def _opening(self, events: list[Event]) -> bool:
        """At the start of the output: the opening mark or, if the prompt ended with it, perhaps a second one."""
        opening, rest = self._format.opening, self._held.lstrip(SPACE)
        if rest.startswith(opening):
            self._held = rest[len(opening) :]
            self._stage = self._first
        elif opening.startswith(rest) and not self._is_over:
            return False
        else:
            self._stage = self._content if self._may_be_content else self._first
        return True

    def _first(self, events: list[Event]) -> bool:
        self.has_reasoned = True
        self._held = self._held.lstrip("\r\n")
        if not self._held:
            return False
        self._stage = self._reasoning
        return True

    def _reasoning(self, events: list[Event]) -> bool:
        text, closing = self._held, self._format.closing
        at = text.find(closing)
        if at >= 0:
            said, self._held = text[:at].rstrip("\r\n"), text[at + len(closing) :]
            self._stage = self._after
        elif self._is_over:
            said, self._held = text, ""
        else:
            certain = text[: len(text) - held_len(text, closing)].rstrip("\r\n")
            said, self._held = certain, text[len(certain) :]
        if said:
            events.append(Reasoning(said))
        return at >= 0

    def _after(self, events: list[Event]) -> bool:
        self._held = self._held.lstrip("\r\n")
        if not self._held:
            return False
        self._stage = self._content
        return True

    def _content(self, events: list[Event]) -> bool:
        if self._held:
            events.append(Content(self._held))
            self._held = ""
        return False
