"""Ends an answer with a grammar before max_tokens would cut it in the middle: closes its brackets in the tokens that are left.
Knows nothing of rows or requests. Of JSON it knows only which characters close, and which open, something new.

How many tokens an end takes is tried out: from where the answer stands, the token that closes most is taken again and again
until the grammar would let it end. That is done seldom while there is room, and at every token where there is little. First
tokens that open something are ruled out, so that a text or a number may go on; then only the end that was found is left. It
follows from the answer's tokens alone, so an answer that left its row and came back ends in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = NDArray[np.int32]

_LOOKS_FROM = 192  # tokens before the limit: an answer that ends on its own before that costs nothing
_LONGEST_END = 192
_OPENS_NOTHING = 16  # tokens more than its end takes: from here on nothing new is opened
_ENDS = 4  # tokens more than its end takes: from here on it ends; half a character takes three to complete
_GROWTH = 4  # by so many tokens an end comes nearer with each token of an answer, as a rule at most
_NEVER = 1 << 20
_SIGNS = b"@:/.-+0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # in the order in which they are tried
_WORD = 32


@dataclass(slots=True)
class Closing:
    """Of one row."""

    looks_at: int = _LOOKS_FROM  # tokens left when its end is looked for next
    end: list[int] = field(default_factory=list)  # what is left to say, once it is ending


class Ends:
    """Of one vocabulary. Takes a moment to make."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._text_signs: list[int] = []  # what may come within a text, and not all of it anywhere else
        # [3, V] the lower, the nearer an end: outside of a text; within one, where all but a quote goes on with it; and within one
        # that needs a certain character before it may end, as addresses do.
        self._ranks = np.full((3, vocab_size), _NEVER, dtype=np.int32)
        opens = np.zeros(-(-vocab_size // _WORD) * _WORD, dtype=np.uint8)
        blank = np.zeros_like(opens)
        for token in range(min(vocab_size, vocabulary.size)):
            if token not in vocabulary.special_ids and (piece := vocabulary.spell(token)):
                self._ranks[:, token] = _rank(piece), _text_rank(piece, b""), _text_rank(piece, _SIGNS)
                opens[token] = _opens(piece)
                blank[token] = not piece.strip()
                if piece in (b"}", b"q"):
                    self._text_signs.append(token)
        self._opens: Words = np.packbits(opens, bitorder="little").view(np.int32)
        self._blank: Words = np.packbits(blank, bitorder="little").view(np.int32)
        self._eos_ids = [token for token in vocabulary.eos_ids if token < vocab_size]
        self._bits: Words = np.empty_like(self._opens)

    def restrict(self, closing: Closing, matcher: "LLMatcher", bits: Words, num_left: int) -> bool:
        """Of the tokens that `matcher` leaves, those that lead to an end in time; `num_left` with this one. True: it is the last."""
        if closing.end:
            return self._say(closing, bits)
        if num_left > closing.looks_at:
            return False
        end = self._find(matcher)
        if end is None or len(end) > num_left:  # it may come nearer yet
            closing.looks_at = num_left - _GROWTH
            return False
        room = num_left - len(end)
        if not end:
            closing.looks_at = num_left - 1
            if num_left == 1:
                _leave(bits, self._eos_ids)
            return False
        if room > _OPENS_NOTHING:
            closing.looks_at = num_left - max(1, (room - _OPENS_NOTHING) // _GROWTH)
            return False
        closing.looks_at = num_left - 1
        if room > _ENDS:
            harmless = bits & ~self._opens
            if (harmless & ~self._blank).any():  # else it could only wait, where a comma or a bracket is due
                bits[:] = harmless
            else:
                _leave(bits, end[:1])
            return False
        closing.end = end
        return self._say(closing, bits)

    def recall(self, closing: Closing, matcher: "LLMatcher", tokens: Sequence[int], num_left: int) -> bool:
        """What restrict() came to before each of `tokens`, when it was asked elsewhere; `num_left` before the first. The matcher
        takes them in. False: it does not."""
        quiet = max(0, num_left - _LOOKS_FROM)  # before that nothing is looked for
        if quiet and not matcher.consume_tokens(list(tokens[:quiet])):
            return False
        for number, token in enumerate(tokens[quiet:], quiet):
            self.restrict(closing, matcher, np.full_like(self._opens, -1), num_left - number)
            if not matcher.consume_token(token):
                return False
        return True

    def _say(self, closing: Closing, bits: Words) -> bool:
        _leave(bits, [closing.end.pop(0)])
        return not closing.end

    def _find(self, matcher: "LLMatcher") -> list[int] | None:
        """Tokens after which the answer may end. None: none were found."""
        for text_ranks in self._ranks[1:]:
            if (found := self._try(matcher.deep_copy(), text_ranks)) is not None:
                return found
        return None

    def _try(self, matcher: "LLMatcher", text_ranks: NDArray[np.int32]) -> list[int] | None:
        found: list[int] = []
        while not matcher.is_accepting():
            matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
            is_text = allowed[self._text_signs].all()
            ranks = np.where(allowed, text_ranks if is_text else self._ranks[0], _NEVER)
            token = int(ranks.argmin())
            if ranks[token] == _NEVER or len(found) == _LONGEST_END or not matcher.consume_token(token):
                return None
            found.append(token)
        return found


def _rank(piece: bytes) -> int:
    size = min(len(piece), 60)
    if _opens(piece):
        return 800 + size
    if any(byte in b" \t\r\n" for byte in piece):
        return 900 + size  # after what opens: a comma may be asked for, and space leads nowhere
    if not piece.strip(b'"}]'):
        return -size if piece[:1] in b"}]" else 100 if piece == b'""' else 101 + size
    if not piece.strip(b'"}],:'):
        return 200 - size
    return 300 if piece.isdigit() else 400 - size


def _text_rank(piece: bytes, signs: bytes) -> int:
    if piece[:1] == b'"' and not piece.strip(b'"}]'):
        return -len(piece)
    return signs.index(piece) if len(piece) == 1 and piece in signs else max(_rank(piece), 400)


def _opens(piece: bytes) -> bool:
    return any(byte in b"{[,\\" for byte in piece)


def _leave(bits: Words, tokens: list[int]) -> None:
    bits[:] = 0
    for token in tokens:
        bits.view(np.uint32)[token // _WORD] |= np.uint32(1 << token % _WORD)
