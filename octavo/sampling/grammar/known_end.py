"""KnownEnd: the end of an answer that was found last, and where the answer stands on it.

After one more token the end is mostly the rest of the one known before, so it is followed instead of searched for again. A token that
spells the next characters of the end leads along it, however those are divided into tokens. Where an answer leaves the end, as with a
longer name or another number, it mostly comes back to it behind the value that it writes: the texts from there on are the end's
`tails`. Which of them fit is decided by the grammar."""

import re
from collections.abc import Iterator, Sequence

from octavo.sampling.grammar.spelling import NEVER, Speller, Spelling

LONGEST_FOLLOWED = 1024  # bytes of an end that is followed by its characters; a longer one by its tokens
_KEPT = 2**16  # bytes of all texts whose spelling is kept
_MAX_TAILS = 6
SPACES = b" \t\r\n"
_SIGNS = b",]}"  # behind a value
_STRING_OR_SIGN = re.compile(rb'"(?:[^"\\]|\\.)*"|[,\[\]{}]', re.S)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]|\\.)*"', re.S)


class KnownEnd:
    """The rest of an end: tokens from a place on, or where there is a spelling, the fewest tokens that spell its text from there on."""

    __slots__ = ("_at", "_first_two", "_rest", "_spelling", "_tails", "_tokens")

    def __init__(self, tokens: Sequence[int], spelling: Spelling | None = None, at: int = 0) -> None:
        """`tokens`: not used where there is a spelling."""
        self._tokens, self._spelling, self._at = tokens, spelling, at
        # Kept once asked for: while a value is written that is not the end's, they are asked for at every token.
        self._first_two: list[int] | None = None
        self._rest: list[int] | None = None
        self._tails: list[KnownEnd] | None = None

    def __len__(self) -> int:
        return len(self._tokens) - self._at if self._spelling is None else self._spelling.num_tokens[self._at]

    def first(self, count: int) -> list[int]:
        if self._spelling is None:
            return list(self._tokens[self._at : self._at + count])
        return self._spelling.rest(self._at, count)

    @property
    def first_two(self) -> list[int]:
        if self._first_two is None:
            self._first_two = self.first(2)
        return self._first_two

    def tokens(self) -> list[int]:
        """Not to be changed."""
        if self._rest is None:
            self._rest = self.first(NEVER)
        return self._rest

    @property
    def has_text(self) -> bool:
        return self._spelling is not None

    @property
    def text(self) -> bytes:
        """What is left of its text. Empty: it is not known."""
        return b"" if self._spelling is None else self._spelling.text[self._at :]

    @property
    def closes_value(self) -> bool:
        """Whether it begins with the quote that closes a string, and not a name: what follows a name depends on it."""
        if self._spelling is None:
            return False
        text, at = self._spelling.text, self._at
        return text.startswith(b'"', at) and not text.startswith(b'":', at)

    def after(self, token: int, piece: bytes) -> "KnownEnd | None":
        """The rest after a token that leads along it. None: the token leads away. `piece`: its bytes; empty: a control token."""
        spelling, at = self._spelling, self._at
        if spelling is None:
            is_next = at < len(self._tokens) and self._tokens[at] == token
            return KnownEnd(self._tokens, None, at + 1) if is_next else None
        is_next = bool(piece) and spelling.text.startswith(piece, at) and spelling.num_tokens[at + len(piece)] < NEVER
        return self._from(at + len(piece)) if is_next else None

    def beside(self, piece: bytes) -> "Iterator[KnownEnd]":
        """Ends that may be left after bytes that do not lead along this one: the same, where a string or white space goes on; the rest
        behind these bytes without their white space; and what follows the value, where they complete it."""
        if self._spelling is None:
            return
        text, at = self._spelling.text, self._at
        squeezed = piece.translate(None, SPACES)
        if not squeezed or _is_in_string(text, at):
            yield self
        if squeezed and len(squeezed) < len(piece) and text.startswith(squeezed, at):
            yield self._from(at + len(squeezed))
        yield from self.back(piece)

    def back(self, piece: bytes) -> "Iterator[KnownEnd]":
        """Ends that may be left after bytes that complete a value which is not the one of this end, and lead along what follows it."""
        signs = [place for place, byte in enumerate(piece) if byte in _SIGNS]
        for tail in self.tails() if signs else ():
            for place in signs:
                squeezed = piece[place:].translate(None, SPACES)
                if self._spelling is not None and self._spelling.text.startswith(squeezed, tail._at):
                    yield tail._from(tail._at + len(squeezed))

    def _from(self, at: int) -> "KnownEnd":
        return KnownEnd((), self._spelling, at)

    def tails(self) -> "list[KnownEnd]":
        """What may follow the value that is being written, the nearest first: from a comma or a bracket behind it on."""
        if self._tails is None:
            self._tails = [*self._find_tails()]
        return self._tails

    def _find_tails(self) -> "Iterator[KnownEnd]":
        if self._spelling is None:
            return
        text, at = self._spelling.text, self._at
        if _is_in_string(text, at):
            closed = _REST_OF_STRING.match(text, at)
            at = len(text) if closed is None else closed.end()
        depth = num_given = 0
        for found in _STRING_OR_SIGN.finditer(text, at):
            sign = found[0]
            if sign in b"[{":
                depth += 1
            elif depth:
                depth -= sign in b"]}"
            elif sign[:1] != b'"' and self._spelling.num_tokens[found.start()] < NEVER:
                yield self._from(found.start())
                num_given += 1
                if num_given == _MAX_TAILS:
                    return


def _is_in_string(text: bytes, at: int) -> bool:
    """Whether a place in the end of a JSON text is within a string: then an odd number of quotes follows."""
    if b"\\" not in text:
        return text.count(b'"', at) % 2 == 1
    return text[at:].replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') % 2 == 1


class KnownEnds:
    """Makes ends with the tokens of one vocabulary, and keeps the spellings of their texts."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._kept: dict[bytes, Spelling] = {}
        self._num_bytes = 0

    def of_tokens(self, tokens: list[int], text: bytes) -> KnownEnd:
        """`text`: of the tokens; empty: they are no text."""
        if not 0 < len(text) <= LONGEST_FOLLOWED:
            return KnownEnd(tokens)
        spelling = self._spelled(text)
        # Long tokens are not looked for in texts, so that the spelling may have more.
        return KnownEnd((), spelling) if spelling.num_tokens[0] <= len(tokens) else KnownEnd(tokens)

    def joined(self, text: bytes, tail: KnownEnd) -> KnownEnd | None:
        """A text, and then a tail. None: no tokens spell it."""
        return self.of_text(text + tail.text)

    def of_text(self, text: bytes) -> KnownEnd | None:
        """None: no tokens spell it."""
        spelling = self._spelled(text)
        return KnownEnd((), spelling) if spelling.num_tokens[0] < NEVER else None

    def _spelled(self, text: bytes) -> Spelling:
        if text not in self._kept:
            if self._num_bytes > _KEPT:
                self._kept.clear()
                self._num_bytes = 0
            self._kept[text] = self._speller.spell(text)
            self._num_bytes += len(text)
        return self._kept[text]
