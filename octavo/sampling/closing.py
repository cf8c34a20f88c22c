"""Ends an answer with a grammar before max_tokens would cut it in the middle: closes its brackets in the tokens that are left.
Knows nothing of rows or requests. Of JSON it knows only which characters close, and which open, something new.

How many tokens an end takes is tried out: from where the answer stands, the token that closes most is taken again and again
until the grammar would let it end. That is done seldom while there is room, and at every token where there is little. First
tokens that open something are ruled out, so that a text or a number may go on. Then, where few tokens are left, each is tried:
those stay that leave an end in reach, so that a short answer is the model's own. Where many are, only the end that was found
is left. It follows from the answer's tokens alone, so an answer that left its row and came back ends in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Ints = NDArray[np.int64]
Words = NDArray[np.int32]

_LOOKS_FROM = 192  # tokens before the limit: an answer that ends on its own before that costs nothing
_LONGEST_END = 192
_LONGEST_TEXT = 32  # tokens within one text, on the way to an end: then the characters that some texts need are tried
_OPENS_NOTHING = 16  # tokens more than its end takes: from here on nothing new is opened
_ENDS = 4  # tokens more than its end takes: from here on it ends; half a character takes three to complete
_NEAR = 8  # tokens before the limit: every token is looked at, and other ends than the first that comes to mind
_FEW = 64  # tokens that are tried one by one
_LOOKED_FOR = 8  # of them: those whose end takes more than looking
_TRIED = 24  # tokens that are tried, on the way to an end, before all are looked at
_GROWTH = 4  # by so many tokens an end comes nearer with each token of an answer, as a rule at most
_NEVER = 1 << 20
_SIGNS = b"@:/.-+0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # in the order in which they are tried
_WORD = 32


@dataclass(slots=True)
class Closing:
    """Of one row."""

    looks_at: int = _LOOKS_FROM  # tokens left when its end is looked for next
    end: list[int] = field(default_factory=list)  # what is left to say, once it is ending
    known: list[int] = field(default_factory=list)  # the end that was found last
    is_cut: bool = False  # tokens were ruled out because of the limit, a few tokens before it


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
        # Of each order, those that are tried before all others.
        firsts = (np.argsort(ranks, kind="stable")[:_TRIED].tolist() for ranks in self._ranks)
        self._first: list[list[int]] = [
            [token for token in first if self._ranks[0][token] < _NEVER] for first in firsts
        ]

    def restrict(self, closing: Closing, matcher: "LLMatcher", bits: Words, num_left: int) -> bool:
        """Of the tokens that `matcher` leaves, those that lead to an end in time; `num_left` with this one. True: it is the last,
        because of the limit."""
        if closing.end:
            return self._say(closing, bits)
        if num_left > closing.looks_at:
            return False
        end = self._end_of(closing, matcher, num_left)
        room = num_left - len(end or ())
        closing.looks_at = num_left - (1 if num_left <= _NEAR else _pause(end, room, num_left))
        if end is None:  # it may come nearer yet, or be another than the one that was tried
            if num_left <= _NEAR and (fitting := self._fitting(matcher, bits, [], num_left)):
                self._narrow(closing, bits, fitting)
            return False
        if room > (_OPENS_NOTHING if end else _ENDS):
            return False
        if room > _ENDS:
            harmless = bits & ~self._opens
            if (harmless & ~self._blank).any():  # else it could only wait, where a comma or a bracket is due
                bits[:] = harmless
            else:
                _leave(bits, end[:1])
            return False
        if not end:
            return self._may_end(closing, matcher, bits, num_left)
        if len(end) > 1 and len(self._tokens(bits)) > _FEW:
            closing.end, closing.is_cut = list(end), True
            return self._say(closing, bits)
        self._narrow(closing, bits, self._fitting(matcher, bits, end, num_left))
        return False

    def recall(self, closing: Closing, matcher: "LLMatcher", tokens: Sequence[int], num_left: int) -> bool:
        """What restrict() came to before each of `tokens`, when it was asked elsewhere; `num_left` before the first. The matcher
        takes them in. False: it does not."""
        quiet = max(0, num_left - _LOOKS_FROM)  # before that nothing is looked for
        if quiet and not matcher.consume_tokens(list(tokens[:quiet])):
            return False
        bits = np.empty_like(self._opens)
        for number, token in enumerate(tokens[quiet:], quiet):
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self.restrict(closing, matcher, bits, num_left - number)
            if not matcher.consume_token(token):
                return False
        return True

    def _say(self, closing: Closing, bits: Words) -> bool:
        _leave(bits, [closing.end.pop(0)])
        return not closing.end

    def _may_end(self, closing: Closing, matcher: "LLMatcher", bits: Words, num_left: int) -> bool:
        """The answer may end here, and soon must. It may go on with what leaves it an end."""
        others = self._tokens(bits, self._eos_ids)
        if not len(others):  # the grammar's own end; whoever was led here by the limit ends by it
            return closing.is_cut
        fitting = self._fitting(matcher, bits, [], num_left)
        if not fitting:
            _leave(bits, self._eos_ids)
            return True
        ends = [token for token in self._eos_ids if _is_set(bits, token)]
        self._narrow(closing, bits, [*fitting, *ends])
        return False

    def _narrow(self, closing: Closing, bits: Words, tokens: list[int]) -> None:
        closing.is_cut |= len(self._tokens(bits)) > len(tokens)
        _leave(bits, tokens)

    def _fitting(self, matcher: "LLMatcher", bits: Words, end: list[int], num_left: int) -> list[int]:
        """Tokens after which an end is still in reach, of the first few that the bits leave: a vocabulary begins with what is
        common. `end`: one that is known, whose first token is among them."""
        fitting = end[:1]
        num_looked_for = 0
        for token in self._tokens(bits, [*self._eos_ids, *fitting])[:_FEW].tolist():
            after = matcher.deep_copy()
            if not after.consume_token(token):  # somebody else has set its bit
                continue
            if not after.is_accepting():
                num_looked_for += 1
                if num_left == 1 or num_looked_for > _LOOKED_FOR or self._find(after, num_left - 1) is None:
                    continue
            fitting.append(token)
        return fitting

    def _tokens(self, bits: Words, without: Sequence[int] = ()) -> Ints:
        """Those whose bits are set, in their order."""
        words = np.flatnonzero(bits)
        if len(words) > _FEW:
            tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size])
        else:  # most have no word of theirs set: only a few need be looked at
            set_bits = np.unpackbits(bits[words].view(np.uint8).reshape(-1, _WORD // 8), axis=1, bitorder="little")
            rows, places = np.nonzero(set_bits)
            tokens = words[rows] * _WORD + places
            tokens = tokens[tokens < self._vocab_size]
        return tokens[~np.isin(tokens, without)] if len(without) else tokens

    def _end_of(self, closing: Closing, matcher: "LLMatcher", num_left: int) -> list[int] | None:
        """One that is known from before, if it still is one: a text goes on, and what closes it stays the same."""
        if matcher.is_accepting():
            return []
        known = closing.known
        if 0 < len(known) <= num_left and matcher.validate_tokens(known) == len(known):
            after = matcher.deep_copy()
            if after.consume_tokens(known) and after.is_accepting():
                return known
        found = self._find(matcher, min(_LONGEST_END, num_left))
        closing.known = found or []
        return found

    def _find(self, matcher: "LLMatcher", longest: int) -> list[int] | None:
        """Tokens after which the answer may end, at most so many. None: none were found."""
        for text_order, longest_text in ((1, _LONGEST_TEXT), (2, longest)):
            found, has_stalled = self._try(matcher.deep_copy(), text_order, longest, longest_text)
            if found is not None or not has_stalled:
                return found
        return None

    def _try(
        self, matcher: "LLMatcher", text_order: int, longest: int, longest_text: int
    ) -> tuple[list[int] | None, bool]:
        """→ the tokens, and whether it was a text that came to no end."""
        found: list[int] = []
        num_in_text = 0
        while not matcher.is_accepting():
            if len(found) == longest:
                return None, num_in_text > 0
            is_text = all(map(self._is_next, [matcher] * len(self._text_signs), self._text_signs))
            num_in_text = num_in_text + 1 if is_text else 0
            token = self._nearest(matcher, text_order if is_text else 0)
            if token < 0 or num_in_text > longest_text or not matcher.consume_token(token):
                return None, num_in_text > 0
            found.append(token)
        return found, False

    def _is_next(self, matcher: "LLMatcher", token: int) -> bool:
        return bool(matcher.validate_tokens([token]))

    def _nearest(self, matcher: "LLMatcher", order: int) -> int:
        """Of the tokens that may follow, the one that is nearest to an end by this order. −1: there is none."""
        for token in self._first[order]:  # one of them, as a rule: a look at all tokens takes longer
            if self._is_next(matcher, token):
                return token
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        allowed = self._tokens(self._bits)
        ranks = self._ranks[order][allowed]
        return int(allowed[ranks.argmin()]) if len(ranks) and ranks.min() < _NEVER else -1


def _pause(end: list[int] | None, room: int, num_left: int) -> int:
    """Tokens after which to look again."""
    if end is None:
        return max(_GROWTH, num_left // 16)
    return max(1, (room - _OPENS_NOTHING) // _GROWTH) if end else 1


def _is_set(bits: Words, token: int) -> bool:
    return bool(bits.view(np.uint32)[token // _WORD] >> np.uint32(token % _WORD) & 1)


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
