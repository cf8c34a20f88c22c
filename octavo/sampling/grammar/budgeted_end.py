"""End an answer with a grammar before max_tokens cuts it: close its strings and brackets within the remaining tokens.

The number of tokens that an end takes is found by search: from the current state of the grammar, take the token that closes
most, again and again, until the grammar accepts. The search runs rarely while there is room, and at every token near the
limit. As the room shrinks, first tokens that open something new are banned, so that a string or number may go on. Then, if
the grammar allows only a few tokens, each is tried and those that leave an end in reach stay allowed, so that the model still
chooses; if it allows many, only the end that was found is allowed. All of this follows from the answer's tokens alone, so an
answer ends in the same way after a preemption.

The end found last is followed while the answer goes along it, and it is searched for again where the answer may have left it
for good (known_end.py). The search runs within a step that all rows share, so it must be cheap. Validating one token takes less
than a microsecond, computing the mask of all tokens tens to hundreds of microseconds. The search therefore validates single
tokens, and tokens that were forced once, such as the rest of a property name, are tried first. If no end is in reach, for
example because a schema requires 100 items in 100 tokens, the next search comes when half of the remaining tokens are used, so
that all searches together cost about twice the first. Near the limit the search is given up if the end is farther away than the
answer can get; other paths are tried if there is a choice.

If even the shortest answer of a grammar takes many tokens, it is found once, before any row needs it (shortest()). Its length
says how early to search, and it is the map for all later searches. The code knows no JSON except which characters close and
which open something."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from octavo.sampling.grammar.bitmask import WORD, Ints, Words, is_set, keep_only, tokens_of
from octavo.sampling.grammar.closing_rank import SIGNS, opens, rank_of, text_rank
from octavo.sampling.grammar.guarded_matcher import compiled_part
from octavo.sampling.grammar.known_end import SPACES, KnownEnd, KnownEnds
from octavo.sampling.grammar.matcher import Matcher
from octavo.sampling.grammar.proposals import Proposals, Spell, proposals_of
from octavo.sampling.grammar.shortest_completion import CONTEXT, LONGEST, ShortestCompletion
from octavo.sampling.grammar.spelling import Speller

if TYPE_CHECKING:
    from octavo.text.tokenize.vocabulary import Vocabulary

_Groups = list[tuple[list[int], list[int]]]  # the single-byte token of a first byte, and the tokens that begin with it

_LOOKS_FROM = (
    192  # tokens left at the first search, more for long ends: an answer that stops on its own earlier costs nothing
)
_LONGEST_TEXT = 32  # tokens in one string on the path to an end; then characters that some strings require are tried
_OPENS_NOTHING = 16  # tokens left beyond those of the end: from here on nothing new is opened
_ENDS = 4  # tokens left beyond those of the end: from here on it ends; a partial character takes three to complete
_NEAR = 8  # tokens left: from here on search at every token, and on other paths too
_FEW = 64  # tokens that are tried one by one
_LOOKED_FOR = 16  # of those: the number that may need a search for their end, …
_LEAST_LOOKED_FOR = 3  # … and with an end of thousands of tokens
_GROWTH = 4  # an end comes nearer by at most about this many tokens with each token of an answer
_MAX_CIRCLES = 8  # consecutive tokens that needed a full mask: tokens that close or are forced need none
_MAX_MASKS = 256  # full masks in failed searches of one answer: some take tenths of a millisecond each
_MAX_LOOKS = (
    192  # full masks in the search for a grammar's shortest answer: a request waits for it, as for its compilation
)
_MANY_MISSES = 8  # … one after another: then half of the remaining tokens are used before the next
_NEVER = 1 << 20
_NO_LIMIT = 1 << 62
# Per order of ranks: tokens below a rank of _CLOSE close something and are tried first; then those below a rank of _TRIED, and
# as many more; only then the full mask is computed. They have the lowest ranks, so the first one that may follow is the one
# that the full mask would give: digits, and in strings ASCII characters.
_CLOSE = (300, 0, 0)
_TRIED = ((300, 10), (400, 64), (len(SIGNS), 0))
# Characters that may lead out of a repetition, as the "!" of [a-z]+![0-9]+ does, in the order in which they are tried.
_ONWARD = b"01,: " + bytes(sorted({*range(33, 127)} - {*b'01,:"]}'}, key=lambda byte: (chr(byte).isalnum(), byte)))
_REPEATS = 3  # consecutive tokens that neither close nor are forced: then a way out of a repetition is searched
_TURNS = 12  # of those characters: the number that is followed for a second step
_MAX_OBJECTS = 2  # of an answer whose ends are tried again
_NESTS = re.compile(rb"[\[{]")
_STRING_SIGNS = frozenset(b'"\\')  # signs with a meaning of their own within a string
_ONWARD_FROM = 32  # tokens left: such a search takes tenths of a millisecond, and earlier there is still time
_MAX_ONWARD = 4  # such searches on one path to an end


class _Miss(Enum):
    """The reason why no end was found."""

    FAR = "it takes more tokens"
    TEXT = "a text comes to none"
    LOST = "it goes in circles, or nothing leads on"


@dataclass(slots=True)
class BudgetedEnd:
    """The state of one row's answer."""

    looks_at: int = _LOOKS_FROM  # tokens left at the next search for an end
    end: list[int] = field(default_factory=list)  # remaining tokens of the end, once the answer must end
    known: KnownEnd | None = None  # the end found last
    known_at: int = -1  # tokens left when that was known to be one; −1: none was found in this answer
    last: int = -1  # the token generated last; −1: there was none, or several since the last call
    # Tokens that an end takes at most, about, since the answer has left `known`. 0: it has not.
    num_away: int = 0
    has_begun: bool = False  # since then, a value
    objects: list[bytes] = field(default_factory=list)  # texts from the beginning of an object to the end found there
    # Tokens that the last call allowed, near the limit → the end that is in reach after each. One of them comes next.
    fits: dict[int, KnownEnd] = field(default_factory=dict)
    fits_at: int = -1  # tokens left at that call
    place: int = 0  # in the text of the shortest answer: the end found last goes on there
    is_regular: bool = False  # what follows a value does not depend on what the value is
    num_masks: int = 0  # full masks in failed searches, and tokens found to be forced
    # Context → the token that was forced after it, such as the rest of a property name.
    spelled: dict[tuple[int, ...], int] = field(default_factory=dict)
    shortest: ShortestCompletion | None = None  # of its grammar, if that is long
    is_far: bool = False  # near the limit, and the end is out of reach
    is_cut: bool = False  # the limit has banned tokens that the grammar allows
    num_missed: int = _MANY_MISSES  # searches without success since an end was found
    proposals: Proposals | None = None  # of its grammar
    growth: int = _GROWTH  # an end moves away by at most about this many tokens with each token of an answer

    @staticmethod
    def of(
        shortest: ShortestCompletion | None,
        proposals: Proposals | None = None,
        growth: int = 0,
        *,
        is_regular: bool = False,
    ) -> "BudgetedEnd":
        """The state at the beginning of an answer, given its grammar's shortest completion."""
        growth = max(growth, _GROWTH)
        if shortest is None:
            return BudgetedEnd(_LOOKS_FROM + growth, proposals=proposals, growth=growth, is_regular=is_regular)
        looks_from = max(_LOOKS_FROM, shortest.looks_from, len(shortest.tokens) + 2 * growth + 32)
        map_to_end = shortest if shortest.looks_from > _LOOKS_FROM else None  # a short one is of no use later on
        return BudgetedEnd(
            looks_from,
            known=shortest.known,
            shortest=map_to_end,
            num_missed=0,
            proposals=proposals,
            growth=growth,
            is_regular=is_regular,
        )


class Ends:
    """Finds ends with the tokens of one vocabulary. The constructor looks at every token and takes a while."""

    def __init__(self, vocabulary: "Vocabulary", vocab_size: int, speller: Speller | None = None) -> None:
        """`speller`: of the same vocabulary; None: one is made."""
        self._vocab_size = vocab_size
        self._spell = vocabulary.spell
        self._text_signs: list[int] = []  # tokens that may all follow only inside a string
        # [3, V] ranks, the lower, the nearer to an end: outside strings; inside a string, where all but a quote continues it;
        # inside a string that requires certain characters before it may end, such as an address.
        ranks = [[_NEVER] * vocab_size for _ in range(3)]
        opening, blank, leaving, partial = (bytearray(-(-vocab_size // WORD) * WORD) for _ in range(4))
        single: dict[bytes, int] = {}
        self._pieces = [b""] * (vocab_size + 1)  # bytes of each token; empty: it is a control token, or −1 for none
        for token in range(min(vocab_size, vocabulary.size)):
            if token not in vocabulary.special_ids and (piece := vocabulary.spell(token)):
                rank = rank_of(piece)
                ranks[0][token] = rank
                ranks[1][token] = text_rank(piece, b"", rank)
                ranks[2][token] = text_rank(piece, SIGNS, rank)
                opening[token] = opens(piece)
                blank[token] = not piece.strip()
                leaving[token] = opening[token] and opens(piece.partition(b'"')[2])
                partial[token] = not piece.isascii() and not _is_text(piece)
                if len(piece) == 1:
                    single.setdefault(piece, token)
                self._pieces[token] = piece
                if piece in (b"}", b"q"):
                    self._text_signs.append(token)
        self._ranks = np.array(ranks, dtype=np.int32)
        self._known_ends = KnownEnds(
            speller or Speller((token, piece) for token, piece in enumerate(self._pieces) if piece)
        )
        self._opens: Words = np.packbits(np.frombuffer(opening, np.uint8), bitorder="little").view(np.int32)
        # Tokens that end a string and begin something after it.
        self._leaves: Words = np.packbits(np.frombuffer(leaving, np.uint8), bitorder="little").view(np.int32)
        self._blank: Words = np.packbits(np.frombuffer(blank, np.uint8), bitorder="little").view(np.int32)
        # Tokens that begin or end within a character.
        self._partial: Words = np.packbits(np.frombuffer(partial, np.uint8), bitorder="little").view(np.int32)
        self._eos_ids = [token for token in vocabulary.eos_ids if token < vocab_size]
        self._bits: Words = np.empty_like(self._opens)
        self._bits_at = self._bits.ctypes.data
        self._num_masks = 0  # full masks computed in searches that left a choice: they take most of the time
        self._num_spelled = 0  # … that left one forced text
        self._max_looks = _NO_LIMIT  # of both kinds together
        self._joined_at = 0  # in the text of a shortest answer: where the end found last goes on
        self._content = ~(self._opens | self._blank)
        self._comma = [single[b","]] if b"," in single else []
        self._quote = [single[b'"']] if b'"' in single else []
        self._openers = [single[sign] for sign in (b",", b"[", b"{") if sign in single]
        self._closers = [self._tried(order, single, -_NEVER, below, 0) for order, below in enumerate(_CLOSE)]
        self._goers = [
            self._tried(order, single, _CLOSE[order], below, more) for order, (below, more) in enumerate(_TRIED)
        ]
        self._single = {piece[0]: token for piece, token in single.items()}
        self._onward_ids = [[single[sign]] for sign in (bytes([byte]) for byte in _ONWARD) if sign in single]
        self._closing_ids = [[single[sign]] for sign in (b'"', b"}", b"]") if sign in single]

    def _tried(self, order: int, single: dict[bytes, int], least: int, below: int, more: int) -> _Groups:
        """Tokens of a range of ranks, grouped by first byte: if that byte may not follow, none of them may."""
        ranks = self._ranks[order]
        groups: dict[int, list[int]] = {}
        begin, end = int((ranks < least).sum()), int((ranks < below).sum()) + more
        for token in np.argsort(ranks, kind="stable")[begin:end].tolist():
            if ranks[token] < _NEVER:
                groups.setdefault(single.get(self._spell(token)[:1], token), []).append(token)
        return [([first], tokens) for first, tokens in groups.items()]

    def proposals(self, grammar: str, spell: Spell) -> Proposals:
        """Ways to come nearer to an end where nothing can be closed."""
        return proposals_of(grammar, self._single, spell)

    def shortest(self, matcher: Matcher, proposals: Proposals | None = None) -> ShortestCompletion | None:
        """Find the shortest answer of the grammar, with `matcher` at its beginning. None: it is too long or too hard to find. May
        run in another thread than restrict()."""
        own = copy.copy(self)
        own._bits = np.empty_like(self._bits)
        own._bits_at = own._bits.ctypes.data
        own._num_masks, own._num_spelled, own._max_looks = 0, 0, _MAX_LOOKS
        found = own._find(BudgetedEnd(proposals=proposals), matcher, LONGEST)
        return ShortestCompletion(found) if found else None

    def restrict(self, ending: BudgetedEnd, matcher: Matcher, bits: Words, num_left: int) -> bool:
        """Keep in `bits`, the mask of `matcher`, only tokens that lead to an end in time. `num_left`: tokens left, this one
        included. True: this token is the last, because of the limit."""
        if ending.end:
            return self._next_of_end(ending, bits)
        if num_left > ending.looks_at:
            return False
        # Where a single token may begin a part that takes more than the room, each is looked at.
        zone = max(_OPENS_NOTHING, ending.growth)
        known = self._follow(ending, matcher, num_left)
        if known is not None and num_left - (ending.num_away or len(known)) > zone:
            ending.looks_at = num_left - 1
            return False
        before = self._num_masks + self._num_spelled
        end = None if ending.is_far else self._end_of(ending, matcher, num_left)
        room = num_left - len(end or ())
        ending.num_missed = ending.num_missed + 1 if end is None else 0
        pause = _pause(end, room - zone, num_left, ending.growth, ending.num_missed)
        if end is not None and end.has_text:  # it is followed
            pause = 1
        ending.looks_at = max(num_left - pause, min(_NEAR, num_left - 1))
        if end is None:
            if num_left <= _NEAR:
                self._make_do(ending, matcher, bits, num_left)
            ending.num_masks += self._num_masks + self._num_spelled - before
            if ending.num_masks > max(_MAX_MASKS, len(ending.shortest.tokens) if ending.shortest else 0):
                ending.looks_at = 0
            return False
        if room > (zone if end else _ENDS):
            return False
        if room > _ENDS:
            is_text = self._is_text(matcher)
            if ending.growth > _GROWTH and not is_text:
                allowed = tokens_of(bits, self._vocab_size)
                # `}` and `},` are one text, but the second begins another item.
                if len(allowed) > 1 and (self._forced(allowed) < 0 or (bits & self._opens).any()):
                    self._narrow(ending, bits, self._fitting(ending, matcher, bits, end, num_left))
                return False
            if room > _OPENS_NOTHING and is_text:
                bits &= ~self._leaves  # within a string nothing is begun, unless a token ends it
                return False
            harmless = bits & ~self._opens
            if is_text and (characters := harmless & ~self._partial).any():  # within a character no end is found
                harmless = characters
            if (harmless & ~self._blank).any():  # else only space could follow, where a comma or a bracket is due
                bits[:] = harmless
            else:
                keep_only(bits, end.first(1))
            return False
        if not end:
            return self._may_end(ending, matcher, bits, num_left)
        if len(end) > 1 and len(tokens_of(bits, self._vocab_size)) > _FEW:
            ending.end, ending.is_cut = list(end.tokens()), True
            return self._next_of_end(ending, bits)
        self._narrow(ending, bits, self._fitting(ending, matcher, bits, end, num_left))
        return False

    def recall(self, ending: BudgetedEnd, matcher: Matcher, tokens: Sequence[int], num_left: int) -> bool:
        """Repeat the restrict() calls before each of `tokens`, which were generated earlier; `num_left`: tokens left before the
        first. The matcher consumes the tokens. False: it rejects one."""
        quiet = max(0, num_left - ending.looks_at)  # tokens before the first search
        if quiet and not matcher.consume_tokens(list(tokens[:quiet])):
            return False
        bits = np.empty_like(self._opens)
        for number, token in enumerate(tokens[quiet:], quiet):
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self.restrict(ending, matcher, bits, num_left - number)
            if not matcher.consume_token(token):
                return False
            ending.last = token
        return True

    def _make_do(self, ending: BudgetedEnd, matcher: Matcher, bits: Words, num_left: int) -> None:
        """Handle a failed search near the limit: if there is a choice, another path may lead to an end."""
        if not ending.is_far:  # it is if there is a clear path to an end that is longer than that
            way = self._try(ending, matcher.deep_copy(), 2, _GROWTH * num_left, _LONGEST_TEXT)
            ending.is_far = way is _Miss.FAR
        visible = bits & ~self._blank  # space brings no end nearer
        is_text = np.count_nonzero(visible) > _FEW
        if ending.is_far and (is_text or self._forced(tokens_of(visible, self._vocab_size)) >= 0):
            return
        if fitting := self._fitting(ending, matcher, visible if visible.any() else bits, None, num_left):
            ending.is_far = False
            self._narrow(ending, bits, fitting)
        elif is_text:  # the string must be longer than the tokens left
            ending.looks_at = 0

    def _next_of_end(self, ending: BudgetedEnd, bits: Words) -> bool:
        keep_only(bits, [ending.end.pop(0)])
        return not ending.end

    def _may_end(self, ending: BudgetedEnd, matcher: Matcher, bits: Words, num_left: int) -> bool:
        """Handle an answer that may end here and soon must: it may continue with tokens that leave an end in reach."""
        others = tokens_of(bits, self._vocab_size, self._eos_ids)
        if not len(others):  # the grammar ends here; it counts as cut if the limit has steered the answer here
            return ending.is_cut
        fitting = self._fitting(ending, matcher, bits, None, num_left)
        if not fitting:
            keep_only(bits, self._eos_ids)
            return True
        ends = [token for token in self._eos_ids if is_set(bits, token)]
        self._narrow(ending, bits, [*fitting, *ends])
        return False

    def _narrow(self, ending: BudgetedEnd, bits: Words, tokens: list[int]) -> None:
        ending.is_cut |= len(tokens_of(bits, self._vocab_size)) > len(tokens)
        keep_only(bits, tokens)

    def _fitting(
        self, ending: BudgetedEnd, matcher: Matcher, bits: Words, end: KnownEnd | None, num_left: int
    ) -> list[int]:
        """Tokens after which an end is still in reach, among the first _FEW that `bits` allows: common tokens have low ids.
        `end`: a known end, whose first token is one of them. The end after each is noted: a search may not find it again."""
        fitting = [] if end is None else end.first(1)
        fits, ending.fits_at = ending.fits, num_left
        num_looked_for, most = 0, self._num_masks + 2 * _LOOKED_FOR
        # A search for a long end takes longer.
        most_looked_for = max(_LEAST_LOOKED_FOR, min(_LOOKED_FOR, _LOOKED_FOR * _LOOKS_FROM // max(1, len(end or ()))))
        for token in tokens_of(bits, self._vocab_size, [*self._eos_ids, *fitting])[:_FEW].tolist():
            if end and (beside := self._beside(end, matcher, token, num_left - 1)) is not None:
                fitting.append(token)
                fits[token] = beside
                continue
            after = matcher.deep_copy()
            if not after.consume_token(token):  # its bit was set for a stop token, not by the grammar
                continue
            if not after.is_accepting() and not self._stays(ending, end, matcher, after, token, num_left):
                num_looked_for += 1
                if num_left == 1 or num_looked_for > most_looked_for or self._num_masks > most:
                    continue
                if (found := self._find(ending, after, num_left - 1, end)) is None:
                    continue
                fits[token] = self._known_end(found)
            fitting.append(token)
        return fitting

    def _stays(
        self, ending: BudgetedEnd, end: KnownEnd | None, matcher: Matcher, after: Matcher, token: int, num_left: int
    ) -> bool:
        """Whether a known end that is not followed by its text stays an end after a token. `after`: has consumed it."""
        if end is None or end.has_text or not 0 < len(end) < num_left:
            return False
        if ending.is_regular and is_set(self._blank, token) and not self._is_text(matcher):
            return _may_follow(end.first(2), after)
        return self.is_end(end.tokens(), after)

    def _follow(self, ending: BudgetedEnd, matcher: Matcher, num_left: int) -> KnownEnd | None:
        """Follow the known end by the token generated last. Where the answer leaves it, it mostly comes back behind the value that it
        writes, so that a search can wait while there is room for what the value may take. None: the end cannot be followed, or a search
        now spares others: a new object has many values, each of which would lead away from this end."""
        known, last = ending.known, ending.last
        if known is None or ending.known_at != num_left + 1 or last < 0 or not known.has_text:
            return None
        ending.known_at = num_left
        piece = self._pieces[last]
        if not ending.num_away:
            after = known.after(last, piece)
            if after is None:
                after = self._goes_on(ending, known, matcher, last, piece)
            if after is not None:
                ending.known = after
                return after
        for end in known.back(piece):
            if self.is_end(end.tokens(), matcher):
                ending.known, ending.num_away = end, 0
                return end
        if not ending.num_away:
            tail = next(iter(known.tails()), None) if ending.is_regular else known
            ending.num_away, ending.has_begun = _NEVER if tail is None else len(tail), False
        # An item that follows another takes its place; one within another adds to it.
        begins = _NESTS.search(piece) or (not ending.has_begun and (b'"' in piece or opens(piece)))
        ending.num_away += ending.growth if begins else _GROWTH
        ending.has_begun |= bool(begins)
        return None if b"{" in piece or b":" in piece else known

    def _goes_on(
        self, ending: BudgetedEnd, known: KnownEnd, matcher: Matcher, token: int, piece: bytes
    ) -> KnownEnd | None:
        """The known end, if it stays the same because a string goes on, or what is left of it behind white space."""
        if known.closes_value and _STRING_SIGNS.isdisjoint(piece):
            stays = _may_follow(known.first_two, matcher) if ending.is_regular else self.is_end(known.tokens(), matcher)
            return known if stays else None
        squeezed = piece.translate(None, SPACES)
        if len(squeezed) == len(piece):
            return None
        rest = known.after(token, squeezed) if squeezed else known
        return rest if rest is not None and len(rest) and self.is_end(rest.tokens(), matcher) else None

    def _end_of(self, ending: BudgetedEnd, matcher: Matcher, num_left: int) -> KnownEnd | None:
        """The rest of the end found last, or one beside it. Else search."""
        if matcher.is_accepting():
            return KnownEnd(())
        end = self._still_known(ending, matcher, num_left)
        if end is None and ending.fits:
            end = self._fitting_end(ending, num_left)
        ending.fits = {}
        if end is None:
            end = self._like_earlier(ending, matcher, num_left)
        if end is None:
            self._joined_at = ending.place
            found = self._find(ending, matcher, num_left, ending.known)
            ending.place = self._joined_at  # an answer never goes back
            if found is None and num_left <= _NEAR:  # every token counts: leave a repetition after one token
                thrifty = self._try(ending, matcher.deep_copy(), 2, num_left, num_left, repeats=1)
                found = None if isinstance(thrifty, _Miss) else thrifty
            if found is not None:
                end = self._known_end(found)
                if b"{" in (piece := self._pieces[ending.last]) and end.has_text:
                    ending.objects = [piece[piece.rindex(b"{") :] + end.text, *ending.objects[: _MAX_OBJECTS - 1]]
        if end is None:  # the known one cannot be followed from here, but what follows a value may still be as before
            ending.known_at = -1
        else:
            ending.known, ending.known_at, ending.num_away = end, num_left, 0
        return end

    def _known_end(self, tokens: list[int]) -> KnownEnd:
        return self._known_ends.of_tokens(tokens, b"" if self._has_control(tokens) else self._text_of(tokens))

    def _fitting_end(self, ending: BudgetedEnd, num_left: int) -> KnownEnd | None:
        """The end for which the token generated last was allowed. None: it was allowed for another reason."""
        end = ending.fits.get(ending.last) if ending.fits_at == num_left + 1 else None
        return end if end is not None and 0 < len(end) <= num_left else None

    def _like_earlier(self, ending: BudgetedEnd, matcher: Matcher, num_left: int) -> KnownEnd | None:
        """The end that was found when an object was begun earlier in this answer, if it is one here, as with the next item of a list."""
        piece = self._pieces[ending.last]
        if b"{" not in piece and b"," not in piece:
            return None
        for text in ending.objects:
            sizes = range(min(len(piece), len(text)), 0, -1)
            num_begun = next((size for size in sizes if text.startswith(piece[-size:])), 0)
            end = self._known_ends.of_text(text[num_begun:])
            if end is not None and 0 < len(end) <= num_left and self.is_end(end.tokens(), matcher):
                return end
        return None

    def _still_known(self, ending: BudgetedEnd, matcher: Matcher, num_left: int) -> KnownEnd | None:
        """The end found last, if it is one here, or an end beside it. None: there is none of at most so many tokens."""
        known = ending.known
        if known is None:
            return None
        if ending.known_at == num_left:  # it was followed
            if not ending.num_away:
                return known if 0 < len(known) <= num_left else None
            return self._beside(known, matcher, ending.last, num_left, is_taken=True)
        if ending.known_at == num_left + 1 and ending.last >= 0:
            after = known.after(ending.last, self._pieces[ending.last])
            if after is not None:
                return after if 0 < len(after) <= num_left else None
        return self._still_known_by_tokens(ending, known, matcher, num_left)

    def _still_known_by_tokens(
        self, ending: BudgetedEnd, known: KnownEnd, matcher: Matcher, num_left: int
    ) -> KnownEnd | None:
        """An end may take thousands of tokens, so all of them are validated only where it is not clear without: while a string goes on or
        white space comes in a grammar where what follows a value does not depend on it."""
        if ending.is_regular and ending.known_at == num_left + 1 and len(known) <= num_left:
            first = known.first(2)
            is_space = ending.last >= 0 and is_set(self._blank, ending.last) and not self._is_text(matcher)
            if is_space and _may_follow(first, matcher):
                return known
            is_in_string = _STRING_SIGNS.isdisjoint(self._spell(ending.last)) and self._spell(first[0])[:1] == b'"'
            if is_in_string and self._is_text(matcher):
                return known if _may_follow(first, matcher) else None
        return known if 0 < len(known) <= num_left and self.is_end(known.tokens(), matcher) else None

    def _beside(
        self, known: KnownEnd, matcher: Matcher, token: int, longest: int, *, is_taken: bool = False
    ) -> KnownEnd | None:
        """The end of at most `longest` tokens that is left of a known one after `token`, or that leads to one of its tails: a string, a
        number or white space goes on, or was begun. None: that takes a search. `is_taken`: the matcher has consumed the token."""
        piece = self._pieces[token]
        before = [] if is_taken else [token]
        if not is_taken and (after := known.after(token, piece)) is not None:
            return after if len(after) <= longest else None
        if not piece:
            return None
        for end in known.beside(piece):
            if len(end) <= longest and self.is_end([*before, *end.tokens()], matcher):
                return end
        for tail in known.tails():
            if len(tail) <= longest and self.is_end([*before, *tail.tokens()], matcher):
                return tail
            if len(tail) < longest and self.is_end([*before, *self._quote, *tail.tokens()], matcher):
                return self._known_ends.joined(b'"', tail)
        return None

    def is_end(self, end: list[int], matcher: Matcher) -> bool:
        """Whether the answer may end after these tokens. Validating them takes a tenth of the time of consuming them."""
        if not self._eos_ids:
            after = matcher.deep_copy()
            return _may_follow(end, matcher) and after.consume_tokens(end) and after.is_accepting()
        compiled = compiled_part(matcher)  # a guard does not know the end of an answer
        is_end = compiled.validate_tokens([*end, self._eos_ids[0]]) > len(end)
        return is_end and (compiled is matcher or _may_follow(end, matcher))

    def _find(
        self, ending: BudgetedEnd, matcher: Matcher, longest: int, known: KnownEnd | None = None
    ) -> list[int] | None:
        """Search for at most `longest` tokens after which the answer may end. None: not found. `known`: an end whose tails it may lead
        to."""
        if known is not None and known.has_text:
            found = self._try(ending, matcher.deep_copy(), 2, longest, _LONGEST_TEXT, tails=known.tails())
            if not isinstance(found, _Miss):
                return found
        # The shortest answer may be a detour from here: with few tokens left, search without it too.
        for shortest in [ending.shortest] + [None] * (ending.shortest is not None and longest <= _LOOKS_FROM):
            for text_order, longest_text in ((2, _LONGEST_TEXT), (1, _LONGEST_TEXT), (2, longest)):
                found = self._try(ending, matcher.deep_copy(), text_order, longest, longest_text, shortest)
                if not isinstance(found, _Miss):
                    return found
                if found is not _Miss.TEXT:
                    break
        return None

    def _try(
        self,
        ending: BudgetedEnd,
        matcher: Matcher,
        text_order: int,
        longest: int,
        longest_text: int,
        shortest: ShortestCompletion | None = None,
        repeats: int = _REPEATS,
        tails: Sequence[KnownEnd] = (),
    ) -> list[int] | _Miss:
        found: list[int] = []
        seen: set[object] = set()
        num_in_text = num_circles = num_not_closing = num_onward = 0
        most = longest if ending.proposals is None else longest + longest // 4 + 4  # fewer tokens may spell the same
        while not matcher.is_accepting():
            if found and tails and (tail := self._fitting_tail(tails, matcher)) is not None:
                found += tail.tokens()
                break
            if len(found) >= most:
                return _Miss.TEXT if num_in_text else _Miss.FAR
            before, spelled, is_text = self._num_masks, self._num_spelled, False
            after = tuple(found[-CONTEXT:])
            token = ending.spelled.get(after, -1)
            if token < 0 or not matcher.validate_tokens([token]):
                is_text = all(matcher.validate_tokens([sign]) for sign in self._text_signs)
                if shortest and not is_text and (place := shortest.join(matcher, ending.place)) >= 0:
                    self._joined_at, way = place, shortest.way(self._text_of(found), place)
                    return way if 0 < len(way) <= longest else _Miss.FAR
                order = text_order if is_text else 0
                token = _first_of(self._closers[order], matcher)
                way = self._way_on(ending, matcher, token, is_text, longest - len(found))
                if not way and token < 0 and shortest:
                    way = shortest.rest(matcher, after, longest - len(found))
                if way:
                    if not matcher.consume_tokens(way):
                        return _Miss.LOST
                    found += way
                    num_in_text = num_circles = num_not_closing = 0
                    continue
                num_not_closing = num_not_closing + 1 if token < 0 else 0
                may_repeat = num_not_closing == repeats or (num_not_closing > repeats and not is_text)
                if may_repeat and longest <= _ONWARD_FROM and num_onward < _MAX_ONWARD:
                    num_onward += 1
                    token = self._onward(matcher, seen, is_text)
                token = self._nearest(ending, matcher, order, after) if token < 0 else token
                num_not_closing -= self._num_spelled > spelled
            num_in_text = num_in_text + 1 if is_text else 0
            num_circles = num_circles + 1 if self._num_masks > before else 0
            if num_in_text > longest_text:
                return _Miss.TEXT
            is_lost = num_circles > _MAX_CIRCLES or self._num_masks + self._num_spelled > self._max_looks
            if token < 0 or is_lost or not matcher.consume_token(token):
                return _Miss.TEXT if num_in_text else _Miss.LOST
            found.append(token)
        if len(found) > longest and ending.proposals is not None and not self._has_control(found):
            found = ending.proposals.spell(self._text_of(found)) or found
        return found if len(found) <= longest else _Miss.FAR

    def _fitting_tail(self, tails: Sequence[KnownEnd], matcher: Matcher) -> KnownEnd | None:
        """Of the ends that may follow a value, the first that fits here."""
        for tail in tails:
            if matcher.validate_tokens(tail.first(1)) and self.is_end(tail.tokens(), matcher):
                return tail
        return None

    def _has_control(self, tokens: list[int]) -> bool:
        """Whether there are control tokens among them: no text stands for those."""
        return not all(self._pieces[token] for token in tokens)

    def _text_of(self, tokens: list[int]) -> bytes:
        return b"".join(map(self._spell, tokens))

    def _way_on(self, ending: BudgetedEnd, matcher: Matcher, token: int, is_text: bool, longest: int) -> list[int]:
        """A proposal where nothing closes. `token`: the one that would be taken. Empty: there is none, or a comma is due."""
        closes = token >= 0 and (is_text or self._spell(token)[:1] != b'"')  # a quote may also begin a string
        if closes or ending.proposals is None:
            return []
        is_comma_due = token < 0 and not is_text and self._comma and matcher.validate_tokens(self._comma)
        return [] if is_comma_due else ending.proposals.first(matcher, longest, is_text)

    def _is_text(self, matcher: Matcher) -> bool:
        return all(matcher.validate_tokens([sign]) for sign in self._text_signs)

    def _forced(self, tokens: Ints) -> int:
        """The longest of the tokens if the others are prefixes of it, as with the rest of a name. −1: there is a choice."""
        if not 0 < len(tokens) <= _FEW:
            return -1
        longest = max(tokens.tolist(), key=lambda token: len(self._spell(token)))
        return longest if all(self._spell(longest).startswith(self._spell(token)) for token in tokens.tolist()) else -1

    def _mask(self, matcher: Matcher) -> Words:
        matcher.unsafe_compute_mask_ptr(self._bits_at, self._bits.nbytes)
        return self._bits

    def _onward(self, matcher: Matcher, seen: set[object], is_text: bool) -> int:
        """A way out of a repetition: a character after which something closes, or else one after which other characters may
        follow than at any place seen so far. −1: there is none."""
        may = [sign for sign in self._onward_ids if matcher.validate_tokens(sign)]
        after = [matcher.deep_copy() for _ in may]
        for sign, then in zip(may, after, strict=True):
            then.consume_tokens(sign)
            if then.is_accepting() or any(then.validate_tokens(closing) for closing in self._closing_ids):
                return sign[0]
        if not is_text:  # in a string almost any character may follow any other
            seen.add(tuple(sign[0] for sign in may))
            for sign, then in zip(may[:_TURNS], after, strict=False):
                then_may = tuple(other[0] for other in self._onward_ids if then.validate_tokens(other))
                if then_may not in seen:
                    return sign[0]
        return -1

    def _nearest(self, ending: BudgetedEnd, matcher: Matcher, order: int, after: tuple[int, ...]) -> int:
        """Of the tokens that may follow and do not close, the one nearest to an end by this order of ranks. −1: there is none.
        A forced token is noted, because lists repeat it. (The library could return all forced bytes at once, but its lexer is
        shared by the whole grammar and may run into its limits on long ones.)"""
        if order == 0 and self._comma and matcher.validate_tokens(self._comma):
            return self._comma[0]  # nothing closes, so a comma is due; a number need not go on
        if (token := _first_of(self._goers[order], matcher)) >= 0:  # the usual case
            return token
        bits = self._mask(matcher)
        allowed = tokens_of(bits, self._vocab_size)
        if (token := self._forced(allowed)) >= 0:
            self._num_spelled += 1
            if len(after) == CONTEXT:
                ending.spelled[after] = token
            return token
        self._num_masks += 1
        if not (bits & self._content).any():  # between two items, for example: a comma, a bracket or space
            for token in self._openers:
                if is_set(bits, token):
                    return token
        ranks = self._ranks[order][allowed]
        return int(allowed[ranks.argmin()]) if len(ranks) and ranks.min() < _NEVER else -1


def _first_of(groups: _Groups, matcher: Matcher) -> int:
    for first, tokens in groups:
        if matcher.validate_tokens(first):
            for token in tokens:
                if token == first[0] or matcher.validate_tokens([token]):
                    return token
    return -1


def _may_follow(tokens: list[int], matcher: Matcher) -> bool:
    return matcher.validate_tokens(tokens) == len(tokens)


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _pause(end: KnownEnd | None, room: int, num_left: int, growth: int, num_missed: int) -> int:
    """Tokens until the next search. `room`: tokens left, without those of the end and those that a part may take. A search may
    fail at one place, as within a character, so the next one comes soon; the more have failed, the later."""
    if end is None:
        return max(1, min(num_left // 2, 1 << (2 * min(num_missed - 1, _MANY_MISSES))))
    return max(1, room // (growth + 1)) if end else 1
