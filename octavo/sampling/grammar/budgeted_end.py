"""Ends an answer with a grammar before max_tokens would cut it in the middle: closes its brackets in the tokens that are left.
Knows nothing of rows or requests. Of JSON it knows only which characters close, and which open, something new.

How many tokens an end takes is tried out: from where the answer stands, the token that closes most is taken again and again
until the grammar would let it end. That is done seldom while there is room, and at every token where there is little. First
tokens that open something are ruled out, so that a text or a number may go on. Then, where few tokens are left, each is tried:
those stay that leave an end in reach, so that a short answer is the model's own. Where many are, only the end that was found
is left. It follows from the answer's tokens alone, so an answer that left its row and came back ends in the same way.

All of this happens beside a step that others share, so it has to be little. To ask whether one token may follow takes less than a
microsecond, a look at all tokens tens to hundreds of them: the way to an end is made of such questions, and what had to follow
once, as the rest of a name, is tried first. Where no end is in reach, as when a schema wants 100 items in 100 tokens, it is
looked for again when half of the tokens are gone, so that all looks together go about twice the way of the first. Close to the
limit it is given up when it is farther away than an answer could come by then; other ways are tried where there is a choice.

Where the shortest answer there is takes many tokens, it is found once, before any row needs it (shortest()): by its length is known
how early to look, and it is the map by which all ends after that are found."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from octavo.sampling.grammar.bitmask import WORD, Ints, Words, is_set, leave, tokens_of
from octavo.sampling.grammar.closing_rank import SIGNS, opens, rank_of, text_rank
from octavo.sampling.grammar.shortest_completion import CONTEXT, LONGEST, ShortestCompletion

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from octavo.text.tokenize.vocabulary import Vocabulary

_Groups = list[tuple[list[int], list[int]]]  # the token of a byte, and tokens that begin with it

_LOOKS_FROM = 192  # tokens before the limit, more for long ends: an answer that stops on its own before costs nothing
_LONGEST_TEXT = 32  # tokens within one text, on the way to an end: then the characters that some texts need are tried
_OPENS_NOTHING = 16  # tokens more than its end takes: from here on nothing new is opened
_ENDS = 4  # tokens more than its end takes: from here on it ends; half a character takes three to complete
_NEAR = 8  # tokens before the limit: every token is looked at, and other ends than the first that comes to mind
_FEW = 64  # tokens that are tried one by one
_LOOKED_FOR = 8  # of them: those whose end takes more than looking
_GROWTH = 4  # by so many tokens an end comes nearer with each token of an answer, as a rule at most
_MAX_CIRCLES = 8  # looks at all tokens one after the other: whatever closes or is forced needs none
_MAX_MASKS = 256  # looks at all tokens in vain, of one answer: some take tenths of a millisecond each
_MAX_LOOKS = 192  # at all tokens, for a grammar's shortest answer: a request waits for it, as for its compiler
_NEVER = 1 << 20
_NO_LIMIT = 1 << 62
# Of each order, tokens that are tried on the way to an end before all are looked at: those that close, of lower ranks; then those
# of lower ranks, and so many more. They are the nearest, so that the first that may follow is what a look at all would have found:
# digits, and in texts the signs of ASCII.
_CLOSE = (300, 0, 0)
_TRIED = ((300, 10), (400, 64), (len(SIGNS), 0))
# Signs that may lead out of what repeats, as the second part of [a-z]+![0-9]+ does, in the order in which they are tried.
_ONWARD = b"01,: " + bytes(sorted({*range(33, 127)} - {*b'01,:"]}'}, key=lambda byte: (chr(byte).isalnum(), byte)))
_REPEATS = 3  # tokens one after the other that neither close nor are forced
_TURNS = 12  # of those signs, that are followed a second step
_ONWARD_FROM = 32  # tokens before the limit: to look for such a way out takes tenths of a millisecond, and before that there is time
_MAX_ONWARD = 4  # such looks, on one way to an end


class _Miss(Enum):
    """Why no end was found."""

    FAR = "it takes more tokens"
    TEXT = "a text comes to none"
    LOST = "it goes in circles, or nothing leads on"


@dataclass(slots=True)
class BudgetedEnd:
    """Of one row."""

    looks_at: int = _LOOKS_FROM  # tokens left when its end is looked for next
    end: list[int] = field(default_factory=list)  # what is left to say, once it is ending
    known: list[int] = field(default_factory=list)  # the end that was found last
    num_masks: int = 0  # looks in vain, at all tokens or at one after the other
    # What had to follow some tokens, as the rest of a name.
    spelled: dict[tuple[int, ...], int] = field(default_factory=dict)
    shortest: ShortestCompletion | None = None  # of its grammar, where that is long
    is_far: bool = False  # its end, close to the limit
    is_cut: bool = False  # tokens were ruled out because of the limit, a few tokens before it

    @staticmethod
    def of(shortest: ShortestCompletion | None) -> "BudgetedEnd":
        """At the beginning of an answer whose grammar has that."""
        return (
            BudgetedEnd()
            if shortest is None
            else BudgetedEnd(shortest.looks_from, known=shortest.tokens, shortest=shortest)
        )


class Ends:
    """Of one vocabulary. Takes a moment to make."""

    def __init__(self, vocabulary: "Vocabulary", vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._spell = vocabulary.spell
        self._text_signs: list[int] = []  # what may come within a text, and not all of it anywhere else
        # [3, V] the lower, the nearer an end: outside of a text; within one, where all but a quote goes on with it; and within one
        # that needs a certain character before it may end, as addresses do.
        ranks = [[_NEVER] * vocab_size for _ in range(3)]
        opening, blank = (bytearray(-(-vocab_size // WORD) * WORD) for _ in range(2))
        single: dict[bytes, int] = {}
        for token in range(min(vocab_size, vocabulary.size)):
            if token not in vocabulary.special_ids and (piece := vocabulary.spell(token)):
                rank = rank_of(piece)
                ranks[0][token] = rank
                ranks[1][token] = text_rank(piece, b"", rank)
                ranks[2][token] = text_rank(piece, SIGNS, rank)
                opening[token] = opens(piece)
                blank[token] = not piece.strip()
                if len(piece) == 1:
                    single.setdefault(piece, token)
                if piece in (b"}", b"q"):
                    self._text_signs.append(token)
        self._ranks = np.array(ranks, dtype=np.int32)
        self._opens: Words = np.packbits(np.frombuffer(opening, np.uint8), bitorder="little").view(np.int32)
        self._blank: Words = np.packbits(np.frombuffer(blank, np.uint8), bitorder="little").view(np.int32)
        self._eos_ids = [token for token in vocabulary.eos_ids if token < vocab_size]
        self._bits: Words = np.empty_like(self._opens)
        self._bits_at = self._bits.ctypes.data
        self._num_masks = 0  # looks at all tokens so far, on the way to ends: what takes the time
        self._num_spelled = 0  # those that found one thing alone to say
        self._max_looks = _NO_LIMIT  # of both kinds, ever
        self._plain = ~(self._opens | self._blank)
        self._comma = [single[b","]] if b"," in single else []
        self._openers = [single[sign] for sign in (b",", b"[", b"{") if sign in single]
        self._closers = [self._tried(order, single, -_NEVER, below, 0) for order, below in enumerate(_CLOSE)]
        self._goers = [
            self._tried(order, single, _CLOSE[order], below, more) for order, (below, more) in enumerate(_TRIED)
        ]
        self._onward_ids = [[single[sign]] for sign in (bytes([byte]) for byte in _ONWARD) if sign in single]
        self._closing_ids = [[single[sign]] for sign in (b'"', b"}", b"]") if sign in single]

    def _tried(self, order: int, single: dict[bytes, int], least: int, below: int, more: int) -> _Groups:
        """By the byte that they begin with: where that may not follow none of them may."""
        ranks = self._ranks[order]
        groups: dict[int, list[int]] = {}
        begin, end = int((ranks < least).sum()), int((ranks < below).sum()) + more
        for token in np.argsort(ranks, kind="stable")[begin:end].tolist():
            if ranks[token] < _NEVER:
                groups.setdefault(single.get(self._spell(token)[:1], token), []).append(token)
        return [([first], tokens) for first, tokens in groups.items()]

    def shortest(self, matcher: "LLMatcher") -> ShortestCompletion | None:
        """Of the grammar at whose beginning `matcher` stands. None: it is so short, or so long, or so hard to find that nothing is to
        be gained by it. For a thread of its own, beside those that restrict() answers."""
        own = copy.copy(self)
        own._bits = np.empty_like(self._bits)
        own._bits_at = own._bits.ctypes.data
        own._num_masks, own._num_spelled, own._max_looks = 0, 0, _MAX_LOOKS
        found = own._find(BudgetedEnd(), matcher, LONGEST)
        shortest = ShortestCompletion(found) if found else None
        return shortest if shortest is not None and shortest.looks_from > _LOOKS_FROM else None

    def restrict(self, closing: BudgetedEnd, matcher: "LLMatcher", bits: Words, num_left: int) -> bool:
        """Of the tokens that `matcher` leaves, those that lead to an end in time; `num_left` with this one. True: it is the last,
        because of the limit."""
        if closing.end:
            return self._say(closing, bits)
        if num_left > closing.looks_at:
            return False
        before = self._num_masks + self._num_spelled
        end = None if closing.is_far else self._end_of(closing, matcher, num_left)
        room = num_left - len(end or ())
        closing.looks_at = max(num_left - _pause(end, room, num_left), min(_NEAR, num_left - 1))
        if end is None:
            if num_left <= _NEAR:
                self._make_do(closing, matcher, bits, num_left)
            closing.num_masks += self._num_masks + self._num_spelled - before
            if closing.num_masks > max(_MAX_MASKS, len(closing.shortest.tokens) if closing.shortest else 0):
                closing.looks_at = 0
            return False
        if room > (_OPENS_NOTHING if end else _ENDS):
            return False
        if room > _ENDS:
            harmless = bits & ~self._opens
            if (harmless & ~self._blank).any():  # else it could only wait, where a comma or a bracket is due
                bits[:] = harmless
            else:
                leave(bits, end[:1])
            return False
        if not end:
            return self._may_end(closing, matcher, bits, num_left)
        if len(end) > 1 and len(tokens_of(bits, self._vocab_size)) > _FEW:
            closing.end, closing.is_cut = list(end), True
            return self._say(closing, bits)
        self._narrow(closing, bits, self._fitting(closing, matcher, bits, end, num_left))
        return False

    def recall(self, closing: BudgetedEnd, matcher: "LLMatcher", tokens: Sequence[int], num_left: int) -> bool:
        """What restrict() came to before each of `tokens`, when it was asked elsewhere; `num_left` before the first. The matcher
        takes them in. False: it does not."""
        quiet = max(0, num_left - closing.looks_at)  # before that nothing is looked for
        if quiet and not matcher.consume_tokens(list(tokens[:quiet])):
            return False
        bits = np.empty_like(self._opens)
        for number, token in enumerate(tokens[quiet:], quiet):
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self.restrict(closing, matcher, bits, num_left - number)
            if not matcher.consume_token(token):
                return False
        return True

    def _make_do(self, closing: BudgetedEnd, matcher: "LLMatcher", bits: Words, num_left: int) -> None:
        """No end is in reach on the way that was tried. There may be another, where there is a choice."""
        if not closing.is_far:  # the way to an end is clear, and longer than that
            way = self._try(closing, matcher.deep_copy(), 2, _GROWTH * num_left, _LONGEST_TEXT)
            closing.is_far = way is _Miss.FAR
        plain = bits & ~self._blank  # space leads nowhere
        is_text = np.count_nonzero(plain) > _FEW
        if closing.is_far and (is_text or self._forced(tokens_of(plain, self._vocab_size)) >= 0):
            return
        if fitting := self._fitting(closing, matcher, plain if plain.any() else bits, [], num_left):
            closing.is_far = False
            self._narrow(closing, bits, fitting)
        elif is_text:  # it has to be longer than what is left
            closing.looks_at = 0

    def _say(self, closing: BudgetedEnd, bits: Words) -> bool:
        leave(bits, [closing.end.pop(0)])
        return not closing.end

    def _may_end(self, closing: BudgetedEnd, matcher: "LLMatcher", bits: Words, num_left: int) -> bool:
        """The answer may end here, and soon must. It may go on with what leaves it an end."""
        others = tokens_of(bits, self._vocab_size, self._eos_ids)
        if not len(others):  # the grammar's own end; whoever was led here by the limit ends by it
            return closing.is_cut
        fitting = self._fitting(closing, matcher, bits, [], num_left)
        if not fitting:
            leave(bits, self._eos_ids)
            return True
        ends = [token for token in self._eos_ids if is_set(bits, token)]
        self._narrow(closing, bits, [*fitting, *ends])
        return False

    def _narrow(self, closing: BudgetedEnd, bits: Words, tokens: list[int]) -> None:
        closing.is_cut |= len(tokens_of(bits, self._vocab_size)) > len(tokens)
        leave(bits, tokens)

    def _fitting(
        self, closing: BudgetedEnd, matcher: "LLMatcher", bits: Words, end: list[int], num_left: int
    ) -> list[int]:
        """Tokens after which an end is still in reach, of the first few that the bits leave: a vocabulary begins with what is
        common. `end`: one that is known, whose first token is among them."""
        fitting = end[:1]
        num_looked_for, most = 0, self._num_masks + 2 * _LOOKED_FOR
        for token in tokens_of(bits, self._vocab_size, [*self._eos_ids, *fitting])[:_FEW].tolist():
            after = matcher.deep_copy()
            if not after.consume_token(token):  # somebody else has set its bit
                continue
            if not after.is_accepting():
                num_looked_for += 1
                if num_left == 1 or num_looked_for > _LOOKED_FOR or self._num_masks > most:
                    continue
                if self._find(closing, after, num_left - 1) is None:
                    continue
            fitting.append(token)
        return fitting

    def _end_of(self, closing: BudgetedEnd, matcher: "LLMatcher", num_left: int) -> list[int] | None:
        """One that is known from before, if it still is one: a text goes on, and what closes it stays the same. Of a long one the
        first token may just have been said."""
        if matcher.is_accepting():
            return []
        for known in (closing.known, closing.known[1:] if closing.shortest else []):
            if 0 < len(known) <= num_left and matcher.validate_tokens(known) == len(known):
                after = matcher.deep_copy()
                if after.consume_tokens(known) and after.is_accepting():
                    closing.known = known
                    return known
        found = self._find(closing, matcher, num_left)
        if found is None and num_left <= _NEAR:  # nothing may be wasted
            thrifty = self._try(closing, matcher.deep_copy(), 2, num_left, num_left, repeats=1)
            found = None if isinstance(thrifty, _Miss) else thrifty
        closing.known = found or []
        return found

    def _find(self, closing: BudgetedEnd, matcher: "LLMatcher", longest: int) -> list[int] | None:
        """Tokens after which the answer may end, at most so many. None: none were found."""
        # A map may show a detour: where little is left the way is looked for without it too.
        for shortest in [closing.shortest] + [None] * (closing.shortest is not None and longest <= _LOOKS_FROM):
            for text_order, longest_text in ((2, _LONGEST_TEXT), (1, _LONGEST_TEXT), (2, longest)):
                found = self._try(closing, matcher.deep_copy(), text_order, longest, longest_text, shortest)
                if not isinstance(found, _Miss):
                    return found
                if found is not _Miss.TEXT:
                    break
        return None

    def _try(
        self,
        closing: BudgetedEnd,
        matcher: "LLMatcher",
        text_order: int,
        longest: int,
        longest_text: int,
        shortest: ShortestCompletion | None = None,
        repeats: int = _REPEATS,
    ) -> list[int] | _Miss:
        found: list[int] = []
        seen: set[object] = set()
        num_in_text = num_circles = num_plain = num_onward = 0
        while not matcher.is_accepting():
            if len(found) == longest:
                return _Miss.TEXT if num_in_text else _Miss.FAR
            before, spelled, is_text = self._num_masks, self._num_spelled, False
            after = tuple(found[-CONTEXT:])
            token = closing.spelled.get(after, -1)
            if token < 0 or not matcher.validate_tokens([token]):
                is_text = all(matcher.validate_tokens([sign]) for sign in self._text_signs)
                order = text_order if is_text else 0
                token = _first_of(self._closers[order], matcher)
                if token < 0 and shortest and (rest := shortest.rest(matcher, after, longest - len(found))):
                    if not matcher.consume_tokens(rest):
                        return _Miss.LOST
                    found += rest
                    num_in_text = num_circles = num_plain = 0
                    continue
                num_plain = num_plain + 1 if token < 0 else 0
                may_repeat = num_plain == repeats or (num_plain > repeats and not is_text)
                if may_repeat and longest <= _ONWARD_FROM and num_onward < _MAX_ONWARD:
                    num_onward += 1
                    token = self._onward(matcher, seen, is_text)
                token = self._nearest(closing, matcher, order, after) if token < 0 else token
                num_plain -= self._num_spelled > spelled
            num_in_text = num_in_text + 1 if is_text else 0
            num_circles = num_circles + 1 if self._num_masks > before else 0
            if num_in_text > longest_text:
                return _Miss.TEXT
            is_lost = num_circles > _MAX_CIRCLES or self._num_masks + self._num_spelled > self._max_looks
            if token < 0 or is_lost or not matcher.consume_token(token):
                return _Miss.TEXT if num_in_text else _Miss.LOST
            found.append(token)
        return found

    def _forced(self, tokens: Ints) -> int:
        """Where all are the beginnings of one text, as of a name, the longest. −1: there is a choice."""
        if not 0 < len(tokens) <= _FEW:
            return -1
        longest = max(tokens.tolist(), key=lambda token: len(self._spell(token)))
        return longest if all(self._spell(longest).startswith(self._spell(token)) for token in tokens.tolist()) else -1

    def _mask(self, matcher: "LLMatcher") -> Words:
        matcher.unsafe_compute_mask_ptr(self._bits_at, self._bits.nbytes)
        return self._bits

    def _onward(self, matcher: "LLMatcher", seen: set[object], is_text: bool) -> int:
        """What repeats is left by a sign after which something closes, or else by one after which other signs may follow than at
        any place seen so far. −1: there is none."""
        may = [sign for sign in self._onward_ids if matcher.validate_tokens(sign)]
        after = [matcher.deep_copy() for _ in may]
        for sign, then in zip(may, after, strict=True):
            then.consume_tokens(sign)
            if then.is_accepting() or any(then.validate_tokens(closing) for closing in self._closing_ids):
                return sign[0]
        if not is_text:  # there, almost all may follow almost all
            seen.add(tuple(sign[0] for sign in may))
            for sign, then in zip(may[:_TURNS], after, strict=False):
                then_may = tuple(other[0] for other in self._onward_ids if then.validate_tokens(other))
                if then_may not in seen:
                    return sign[0]
        return -1

    def _nearest(self, closing: BudgetedEnd, matcher: "LLMatcher", order: int, after: tuple[int, ...]) -> int:
        """Of the tokens that may follow and do not close, the one that is nearest to an end by this order. −1: there is none.
        What has to follow is noted, as lists want the same again and again. (The library would say at once how a text has to go
        on, all of it, however long: its lexer is the whole grammar's, and does not outlive that.)"""
        if order == 0 and self._comma and matcher.validate_tokens(self._comma):
            return self._comma[0]  # nothing closes: a number need not go on
        if (token := _first_of(self._goers[order], matcher)) >= 0:  # as a rule
            return token
        bits = self._mask(matcher)
        allowed = tokens_of(bits, self._vocab_size)
        if (token := self._forced(allowed)) >= 0:
            self._num_spelled += 1
            if len(after) == CONTEXT:
                closing.spelled[after] = token
            return token
        self._num_masks += 1
        if not (bits & self._plain).any():  # as between two items: a comma, a bracket or space
            for token in self._openers:
                if is_set(bits, token):
                    return token
        ranks = self._ranks[order][allowed]
        return int(allowed[ranks.argmin()]) if len(ranks) and ranks.min() < _NEVER else -1


def _first_of(groups: _Groups, matcher: "LLMatcher") -> int:
    for first, tokens in groups:
        if matcher.validate_tokens(first):
            for token in tokens:
                if token == first[0] or matcher.validate_tokens([token]):
                    return token
    return -1


def _pause(end: list[int] | None, room: int, num_left: int) -> int:
    """Tokens after which to look again."""
    if end is None:
        return max(1, num_left // 2)
    return max(1, (room - _OPENS_NOTHING) // _GROWTH) if end else 1
