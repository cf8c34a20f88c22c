"""GuardedMatcher: a matcher that also keeps the items of arrays different (`uniqueItems`), which no grammar can express.

A token is ruled out if it completes an item that equals an earlier one, or begins one that can only become such: after items "a" and
"b", of a list that allows "a", "b" and "bc", a `b` may follow a quote, and an `a` may not. Whether an item can still become different is
asked of the grammar, byte by byte along the earlier items that begin alike; at the first byte that leads away from them it can.

Only tokens that could break the rule are looked at: those that contain the end of an item, and those along earlier items."""

import ctypes
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from octavo.sampling.grammar.bitmask import WORD, Words, clear_bits, tokens_of
from octavo.sampling.grammar.matcher import Matcher
from octavo.sampling.grammar.schema_places import Places, marked_schemas
from octavo.sampling.grammar.spelling import Speller
from octavo.sampling.grammar.unique_items import Level, Mode, State, Tag, UniqueItems, UniqueItemsInTags, begun
from octavo.text.tokenize.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SPACES = b" \t\r\n"
_FEW = 64  # tokens that may follow: all are looked at
_MAX_MASKS = 300  # masks for the question whether one item can become different; then it is said to be so
_LONGEST = 48  # bytes of a token that runs along an earlier item
STUCK = "no item is possible that differs from the others of its array (uniqueItems)"

_DIGITS = b"0123456789"
_USUAL = b"ae01A"  # of strings: bytes that are tried before all that may follow are asked for
# All bytes that may follow outside strings, by what is being written; white space changes nothing.
_POSSIBLE: dict[Mode, bytes] = {
    Mode.VALUE: b'"' + _DIGITS + b"{[-tfn]",
    Mode.NUMBER: _DIGITS + b".,]}",
    Mode.LITERAL: b"",  # there is one way to continue
    Mode.AFTER: b",]}",
    Mode.BEFORE_KEY: b'"}',
    Mode.COLON: b":",
}


class TokenKinds:
    """The tokens of a vocabulary by what they may do to an item. The constructor looks at every token and takes a while."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.spell = vocabulary.spell
        self.vocab_size = vocab_size
        self.single: dict[int, int] = {}  # byte → its token
        self.first = np.zeros(vocab_size, dtype=np.uint8)  # byte of each token; 0: it is a control token
        self._unspaced: dict[bytes, int] = {}
        self._spaced: dict[bytes, list[int]] = {}  # without its white space → tokens
        with_space: list[tuple[int, bytes]] = []
        num_bits = -(-vocab_size // WORD) * WORD
        kinds = {name: bytearray(num_bits) for name in _KINDS}
        for token in range(min(vocab_size, vocabulary.size)):
            piece = vocabulary.spell(token)
            if not piece or token in vocabulary.special_ids:
                continue
            self.first[token] = piece[0]
            if len(piece) == 1:
                self.single.setdefault(piece[0], token)
            if len(piece) <= _LONGEST:
                if len(squeezed := piece.translate(None, _SPACES)) < len(piece):
                    self._spaced.setdefault(squeezed, []).append(token)
                    with_space.append((token, piece))
                else:
                    self._unspaced[piece] = token
            if _MARKS.isdisjoint(piece):
                continue
            for name, expression in _KINDS.items():
                if expression.search(piece):
                    kinds[name][token] = 1
        self.speller = Speller([*((token, piece) for piece, token in self._unspaced.items()), *with_space])
        self._kinds: dict[str, Words] = {
            name: np.packbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.int32)
            for name, bits in kinds.items()
        }

    def kind(self, mode: Mode, is_in_unique: bool) -> Words:
        """The tokens that may complete an item."""
        if not is_in_unique:
            return self._kinds["opening"]
        in_string = (Mode.STRING, Mode.ESCAPE, Mode.KEY, Mode.KEY_ESCAPE)
        return self._kinds["string" if mode in in_string else "number" if mode == Mode.NUMBER else "other"]

    def fewest_tokens(self, text: bytes) -> list[int]:
        return self.speller.fewest_tokens(text)

    def num_tokens(self, text: bytes) -> int:
        return len(self.fewest_tokens(text))

    def along(self, text: bytes) -> Iterator[int]:
        """Tokens that are beginnings of a text, whatever white space they have."""
        squeezed = text[: 2 * _LONGEST].translate(None, _SPACES)
        for end in range(1, min(len(squeezed), _LONGEST) + 1):
            yield from self._spaced.get(squeezed[:end], ())
        for end in range(1, min(len(text), _LONGEST) + 1):
            if (token := self._unspaced.get(text[:end])) is not None:
                yield token


_KINDS = {
    "string": re.compile(rb'"'),
    "number": re.compile(rb"[,\]}\s]|[eE]"),
    "other": re.compile(rb'[,\]}]|".*"|[0-9](\s|[eE])|true|false|null', re.S),
    "opening": re.compile(rb"\[.*,|\[.*[0-9][eE]", re.S),
}
_MARKS = frozenset(b'",]}[ \t\r\neE')  # a token with none of these is of no kind


def guarded(matcher: Matcher, grammar: str, kinds: TokenKinds) -> Matcher:
    """The matcher, guarded if its grammar has arrays whose items must differ. It must be at its beginning."""
    found = marked_schemas(grammar)
    if not found:
        return matcher

    def size(frame: Sequence[str | int]) -> int:
        return sum(len(part.encode()) if isinstance(part, str) else len(kinds.spell(part)) for part in frame)

    if not found[0].trigger:
        one = found[0]
        return GuardedMatcher(matcher, UniqueItems(Places(one.schema).root(), size(one.before), size(one.after)), kinds)
    tags = [
        Tag(
            one.trigger.encode(),
            "".join(map(str, one.before)).encode(),
            Places(one.schema).root(),
            size(one.after),
        )
        for one in found
    ]
    return GuardedMatcher(matcher, UniqueItemsInTags(tags), kinds)


def compiled_part(matcher: Matcher) -> "LLMatcher":
    """The compiler's own matcher, without the guard."""
    return cast("LLMatcher", matcher.inner if isinstance(matcher, GuardedMatcher) else matcher)


class GuardedMatcher:
    def __init__(self, inner: Matcher, rule: UniqueItems, kinds: TokenKinds, state: State | None = None) -> None:
        self.inner = inner
        self._rule, self._kinds = rule, kinds
        self._state = state or rule.start()
        self._is_stuck = False

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        self.inner.unsafe_compute_mask_ptr(trg_pointer, trg_byte_size)
        words = (ctypes.c_int32 * (trg_byte_size // 4)).from_address(trg_pointer)
        self.narrow(np.ctypeslib.as_array(words))

    def narrow(self, bits: Words) -> None:
        """Remove from `bits`, the mask of the inner matcher, the tokens after which no answer would be valid."""
        state = self._state
        if not state.is_in_unique and (state.level is not None and state.level.place is None):
            return
        found = self._looked_at(state, bits)
        known: dict[_Begun, bool] = {}
        banned = [token for token in found if not self._fits(token, known)]
        if banned:
            clear_bits(bits, np.array(banned, dtype=np.int64))
            self._is_stuck = not bits.any()

    def consume_token(self, token: int) -> bool:
        return self.consume_tokens([token])

    def consume_tokens(self, tokens: list[int]) -> bool:
        if not self.inner.consume_tokens(tokens):
            return False
        state = self._after(self._state, tokens)
        if state is None:
            self._is_stuck = True
            return False
        self._state = state
        return True

    def validate_tokens(self, tokens: list[int]) -> int:
        num_valid = self.inner.validate_tokens(tokens)
        if not num_valid:
            return 0
        states: list[State] = [self._state]
        for token in tokens[:num_valid]:
            if (state := self._after(states[-1], [token])) is None:
                break
            states.append(state)
        while len(states) > 1 and not self._can_differ(states[-1], tokens[: len(states) - 1]):
            states.pop()
        return len(states) - 1

    def deep_copy(self) -> "GuardedMatcher":
        return GuardedMatcher(self.inner.deep_copy(), self._rule, self._kinds, self._state)

    def reset(self) -> bool:
        self._state, self._is_stuck = self._rule.start(), False
        return self.inner.reset()

    def is_accepting(self) -> bool:
        return self.inner.is_accepting()

    def is_stopped(self) -> bool:
        return self._is_stuck or self.inner.is_stopped()

    def is_error(self) -> bool:
        return self._is_stuck or self.inner.is_error()

    def stop_reason(self) -> str:
        return STUCK if self._is_stuck else self.inner.stop_reason()

    def get_error(self) -> str:
        return STUCK if self._is_stuck else self.inner.get_error()

    def _after(self, state: State, tokens: Sequence[int]) -> State | None:
        return self._rule.after(state, b"".join(map(self._kinds.spell, tokens)))

    def _looked_at(self, state: State, bits: Words) -> set[int]:
        """Tokens of a mask that may break the rule."""
        vocab_size = self._kinds.vocab_size
        if np.count_nonzero(bits) <= _FEW and len(tokens := tokens_of(bits, vocab_size)) <= _FEW:
            return {*tokens.tolist()}
        found = {*tokens_of(bits & self._kinds.kind(state.mode, state.is_in_unique), vocab_size).tolist()}
        words = bits.view(np.uint32)
        for level in state.open_items:
            assert level.items is not None
            start = begun(state, level)
            for item in level.items.beginning_with(start):
                for token in self._kinds.along(item[len(start) :]):
                    if token not in found and words[token // WORD] >> np.uint32(token % WORD) & 1:
                        found.add(token)
        return found

    def _fits(self, token: int, known: "dict[_Begun, bool]") -> bool:
        state = self._after(self._state, [token])
        return state is not None and self._can_differ(state, [token], known)

    # ── whether an item that was begun can become different from all others ──

    def _can_differ(self, state: State, tokens: list[int], known: "dict[_Begun, bool] | None" = None) -> bool:
        """`tokens`: lead from here to `state`, and the grammar allows them. `known`: answers to the same question of other tokens."""
        known = {} if known is None else known
        for level in state.open_items:
            if level.place is None or level.place.is_free:
                continue
            start = begun(state, level)
            assert level.items is not None
            if level.place.values is not None:
                if not level.items.can_become_other(start, level.place.values):
                    return False
                continue
            key = (level.depth, len(level.items.values), state.mode, start)
            if key not in known:
                known[key] = self._leads_away(state, level, tokens)
            if not known[key]:
                return False
        return True

    def _leads_away(self, state: State, level: Level, tokens: list[int]) -> bool:
        """Whether the grammar has a way to complete an item of `level` that is none of the earlier ones."""
        waiting, num_masks = [(state, tokens)], 0
        while waiting:
            state, tokens = waiting.pop()
            found = _level_at(state, level.depth)
            if found is None or found.items is None or found.start < 0:
                return True
            start = begun(state, found)
            following = {item[len(start)] for item in found.items.beginning_with(start) if len(item) > len(start)}
            is_number = state.mode == Mode.NUMBER
            if not following and not (is_number and start in found.items.spelled):
                return True
            if state.mode in _POSSIBLE:
                away = [byte for byte in _POSSIBLE[state.mode] if _is_away(byte, state, found, following)]
                if self._asks(tokens, away):
                    return True
                more = [byte for byte in _POSSIBLE[state.mode] or following if byte not in away]
                onward = [byte for byte in more if self._asks(tokens, [byte])]
            else:
                if self._asks(tokens, [byte for byte in _USUAL if byte not in following]):
                    return True
                num_masks += 1
                onward = self._next_bytes(tokens)
                if num_masks > _MAX_MASKS or any(byte not in following for byte in onward):
                    return True
            for byte in onward:
                after = self._rule.after(state, bytes((byte,)))
                if after is not None and not (is_number and len(tokens) > _LONGEST):  # zeros without end
                    waiting.append((after, [*tokens, self._kinds.single[byte]]))
        return False

    def _asks(self, tokens: list[int], among: list[int]) -> bool:
        """Whether one of these bytes may follow the tokens."""
        single = self._kinds.single
        paths = ([*tokens, single[byte]] for byte in among if byte in single)
        return any(self.inner.validate_tokens(path) == len(path) for path in paths)

    def _next_bytes(self, tokens: list[int]) -> list[int]:
        """Bytes that may follow the tokens, without white space."""
        after, bits = self.inner.deep_copy(), np.empty_like(self._kinds.kind(Mode.STRING, True))
        if not after.consume_tokens(tokens):
            return []
        after.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        found = np.unique(self._kinds.first[tokens_of(bits, self._kinds.vocab_size)]).tolist()
        return [byte for byte in found if byte in self._kinds.single and byte not in _SPACES]


_Begun = tuple[int, int, Mode, bytes]


def _is_away(byte: int, state: State, level: Level, following: set[int]) -> bool:
    """Whether a byte leads away from all earlier items. `following`: the bytes with which those go on that begin alike."""
    assert level.items is not None
    if state.mode != Mode.NUMBER:
        return byte not in following
    after = state._replace(written=state.written + bytes((byte,)))
    return byte in _DIGITS and next(level.items.beginning_with(begun(after, level)), None) is None


def _level_at(state: State, depth: int) -> Level | None:
    level = state.level
    while level is not None and level.depth > depth:
        level = level.around
    return level if level is not None and level.depth == depth else None
