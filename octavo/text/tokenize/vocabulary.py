"""Vocabulary for grammars: the bytes that each token adds to a text, the control tokens, and the end-of-sequence tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from octavo.text.tokenize.special_token_escape import any_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NUM_BYTES = 256
# Sets of tokens whose masks llguidance prepares. It asks for each set whether all of its tokens may follow, and looks at the tokens one
# by one only where they need not: words and identifiers, so that most places in patterns and formats are among the fast ones; text with
# spaces; then its own sets for any text of JSON, of which the first is white space. A token belongs to the first set that has it.
_WORDS = ["[a-z]{1,16}", "[a-zA-Z0-9]{1,16}", "[a-zA-Z0-9]{1,30}", "[a-z ]{1,10}"]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    size: int
    spell: Callable[[int], bytes]  # bytes that an id adds to a text; for a control token its name; empty: none
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]

    @cached_property
    def special_names(self) -> dict[str, int]:
        names = {self.spell(i).decode("utf-8", "replace"): i for i in sorted(self.special_ids)}
        return {name: i for name, i in names.items() if name}

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the names of control tokens in a text. None: there are none."""
        return re.compile(f"({any_of(self.special_names)})") if self.special_names else None

    def alone(self) -> "Vocabulary":
        """Return a copy with every token's bytes stored, which does not keep the tokenizer alive."""
        pieces = [self.spell(i) for i in range(self.size)]
        spell = lambda token_id: pieces[token_id] if 0 <= token_id < len(pieces) else b""  # noqa: E731
        return Vocabulary(self.size, spell, self.special_ids, self.eos_ids)

    @cached_property
    def stand_in(self) -> "LLTokenizer":
        """A small tokenizer of single bytes and the control tokens: enough to check a grammar, and faster to build than the full
        one. All other ids exist, so that a grammar can name them, and add nothing to a text."""
        named = {*self.special_ids, *self.eos_ids}
        tokens = [b""] * max(self.size, max(named) + 1, self.byte_ids[-1] + 1)
        for i in named:
            tokens[i] = self.spell(i) or _name(i)
        for byte, at in enumerate(self.byte_ids):
            tokens[at] = bytes([byte])
        return _llguidance_tokenizer(_Words(tokens, named, self.eos_ids), has_slices=False)

    @cached_property
    def byte_ids(self) -> list[int]:
        """Ids of the bytes in `stand_in`."""
        named = {*self.special_ids, *self.eos_ids}
        free = [i for i in range(_NUM_BYTES + len(named)) if i not in named]
        return free[:_NUM_BYTES]

    def tokenizer(self, size: int) -> "LLTokenizer":
        """Build the full tokenizer for a model with `size` logits. This takes a moment."""
        tokens = [self.spell(i) if i < self.size else b"" for i in range(size)]
        special = frozenset(i for i in self.special_ids if i < size)
        return tokenizer_of(tokens, special, [i for i in self.eos_ids if i < size])


def tokenizer_of(tokens: Sequence[bytes], special_ids: frozenset[int], eos_ids: Sequence[int]) -> "LLTokenizer":
    # A token that adds nothing could be sampled forever. As a control token that no grammar names, it never is.
    empty = [i for i, token in enumerate(tokens) if not token]
    named = [token or _name(i) for i, token in enumerate(tokens)]
    return _llguidance_tokenizer(_Words(named, {*special_ids, *empty, *eos_ids}, eos_ids))


def _name(token_id: int) -> bytes:
    return b"<[%d]>" % token_id


def _llguidance_tokenizer(words: "_Words", has_slices: bool = True) -> "LLTokenizer":
    """`has_slices`: prepare for fast masks, which takes time and memory once."""
    from llguidance import LLTokenizer

    space, *text = LLTokenizer.general_slices()
    slices = [space, *_WORDS, *text] if has_slices else []
    return LLTokenizer(words, eos_token=words.eos_ids, slices=slices)  # type: ignore[arg-type]


class _Words:
    """The tokenizer interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: set[int], eos_ids: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(special_ids)
        self.eos_ids = list(eos_ids)
        self.eos_token_id = eos_ids[0]

    def __call__(self, text: str) -> list[int]:
        """Called only for forced text, which our grammars disable."""
        raise AssertionError("grammars are compiled without forcing")
