"""Forced stretches: what a grammar leaves as the only way to go on from where an answer is, apart from white space.

A grammar forces bytes and not tokens: behind `{"fu` may stand `ll`, `ll_name` or `l`. So what is found here is a draft, which the model
verifies as it verifies others (decision 048). White space that a grammar leaves open is guessed as the answer itself has it, so a wrong
guess costs a draft and changes nothing."""

import re
import time
from typing import TYPE_CHECKING

import numpy as np

from octavo.sampling.grammar.bitmask import WORD, Ints, Words, any_set
from octavo.sampling.grammar.guarded_matcher import TokenKinds

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SPACES = b" \t\r\n"
_OPENING, _CLOSING = (b"{", b"["), (b"}", b"]")
_PIECES = re.compile(
    rb"[^\r\n\"A-Za-z0-9]?[A-Za-z\x80-\xff]+|\d| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?=\s\S)|\s+|.", re.S
)
"""Most vocabularies have no tokens that cross these pieces of a text."""
_MOST_BYTES = 128  # of a stretch
_MOST_SPACES = 64  # that are guessed at a place
MOST_SECONDS = 0.002  # for one stretch
MAX_TOKENS = (
    4096  # of an answer, behind which no stretches are looked for: all of its white space would have to be read
)


class Forced:
    """Finds the stretches of all grammars of a vocabulary."""

    def __init__(self, kinds: TokenKinds, eos_ids: list[int]) -> None:
        self._kinds, self._eos_ids = kinds, eos_ids
        tokens = np.array([kinds.single.get(byte, -1) for byte in range(256)], dtype=np.int64)
        self._bytes: Ints = np.flatnonzero(tokens >= 0)  # that are tokens of their own
        self._words, self._places = tokens[self._bytes] // WORD, (tokens[self._bytes] % WORD).astype(np.int32)
        self._is_space = np.isin(self._bytes, list(_SPACES))
        self._scratch: Words = np.zeros(-(-kinds.vocab_size // WORD), dtype=np.int32)

    def tokens(self, matcher: "LLMatcher", bits: Words, spacing: "Spacing", most: int) -> list[int] | None:
        """At most `most` tokens that spell the stretch which begins here. `bits`: the mask of the next token. `spacing`: of the answer so far.
        The matcher is where it was afterwards. None: it could not go back, and is not to be used any more."""
        if self._only_byte(bits) < 0:
            return []
        text, num_consumed = b"", 0
        single, deadline = self._kinds.single, time.perf_counter() + MOST_SECONDS
        spaces = spacing.copy()
        while len(text) < _MOST_BYTES and time.perf_counter() < deadline:
            piece = matcher.compute_ff_bytes()[: _MOST_BYTES - len(text)]
            if not piece:
                if text:
                    at = self._scratch.ctypes.data
                    matcher.unsafe_compute_mask_ptr(at, self._scratch.nbytes)
                    bits = self._scratch
                if (byte := self._only_byte(bits)) < 0 or matcher.is_error():
                    break
                piece = bytes([byte])
                if self._allows_space(bits):
                    piece = spaces.before(piece)[-_MOST_SPACES:] + piece
            tokens = [single.get(byte, -1) for byte in piece]
            if -1 in tokens:
                break
            num_valid = matcher.try_consume_tokens(tokens)
            num_consumed += num_valid
            text += piece[:num_valid]
            if num_valid < len(tokens):
                break
            spaces.add(piece)
        if num_consumed and (matcher.is_error() or not matcher.rollback(num_consumed)):
            return None
        tokens = []
        for piece in _PIECES.findall(text):
            tokens += self._kinds.fewest_tokens(piece)
        return tokens[:most]

    def _allowed(self, bits: Words) -> Words:
        """[bytes that are tokens] 1: it may follow."""
        return bits[self._words] >> self._places & 1

    def _only_byte(self, bits: Words) -> int:
        """The only byte but white space that may follow; −1: several may, or none, or the answer may end."""
        found = np.flatnonzero((self._allowed(bits) != 0) & ~self._is_space)
        if len(found) != 1 or any_set(bits, self._eos_ids):
            return -1
        return int(self._bytes[found[0]])

    def _allows_space(self, bits: Words) -> bool:
        return bool(self._allowed(bits)[self._is_space].any())


class Spacing:
    """The white space between the parts of JSON that an answer has had so far."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._last, self._run = (
            b"",
            b"",
        )  # the last byte that is no white space, outside strings; the white space behind it
        # Members are on lines of their own, and by how much they are indented.
        self._has_lines, self._indent = False, b"  "
        self._behind = {b":": b" ", b",": b" "}  # the last one in a line
        self._seen: dict[tuple[bytes, bytes, int], bytes] = {}  # (class of the byte before, of the one behind, depth)

    def copy(self) -> "Spacing":
        other = Spacing()
        other.num_bytes, other._depth = self.num_bytes, self._depth
        other._in_string, other._is_escaped = self._in_string, self._is_escaped
        other._last, other._run, other._seen = self._last, self._run, self._seen.copy()
        other._behind = self._behind.copy()
        other._has_lines, other._indent = self._has_lines, self._indent
        return other

    def add(self, text: bytes) -> None:
        self.num_bytes += len(text)
        for at in range(len(text)):
            byte = text[at : at + 1]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif byte == b"\\":
                    self._is_escaped = True
                elif byte == b'"':
                    self._in_string, self._last, self._run = False, byte, b""
                continue
            if byte in _SPACES:
                if len(self._run) < _MOST_SPACES:
                    self._run += byte
                continue
            self._seen[_kind(self._last), _kind(byte), self._depth] = run = self._run
            if self._last in self._behind and b"\n" not in run:
                self._behind[self._last] = run
            if self._last in _OPENING and byte not in _CLOSING:
                self._has_lines = run.startswith(b"\n")
                if self._has_lines and self._depth:
                    self._indent = run[1 : 1 + (len(run) - 1) // self._depth]
            if byte in b"{[":
                self._depth += 1
            elif byte in b"}]":
                self._depth -= 1
            self._in_string = byte == b'"'
            self._last, self._run = byte, b""

    def before(self, byte: bytes) -> bytes:
        """The white space that is still to come before this byte, as the answer had it in such a place, or as most models write it."""
        if self._in_string:
            return b""
        kinds = _kind(self._last), _kind(byte)
        seen = self._seen.get((*kinds, self._depth))
        if seen is None:
            seen = self._guess(*kinds)
        return seen[len(self._run) :] if seen.startswith(self._run) else b""

    def _guess(self, last: bytes, byte: bytes) -> bytes:
        """In a place that the answer did not have yet."""
        if last == b":":
            return self._behind[last]
        if b"\n" in self._run or self._has_lines:
            if last in _OPENING and byte in _CLOSING:
                return b""
            if last in b"{[," or byte in _CLOSING:
                return b"\n" + self._indent * (self._depth - (byte in _CLOSING))
        return self._behind.get(last, b"")


def _kind(byte: bytes) -> bytes:
    """Values are of one kind, whatever they end or begin with."""
    return byte if byte and byte in b"{}[]:," else b"v"
