"""Vocabulary for grammars: the bytes that each token adds to a text, the control tokens, and the end-of-sequence tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NUM_BYTES = 256


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

    def alone(self) -> "Vocabulary":
        """Return a copy with every token's bytes stored, which does not keep the tokenizer alive."""
        pieces = [self.spell(i) for i in range(self.size)]
        spell = lambda token_id: pieces[token_id] if 0 <= token_id < len(pieces) else b""  # noqa: E731
        return Vocabulary(self.size, spell, self.special_ids, self.eos_ids)

    @cached_property
    def stand_in(self) -> "LLTokenizer":
        """A small tokenizer of single bytes and the control tokens: enough to check a grammar, and faster to build than the
        full one."""
        tokens = [self.spell(i) if i in self.special_ids else b"" for i in range(self.size)]
        free = [i for i in range(len(tokens)) if i not in self.special_ids][:_NUM_BYTES]
        free += range(len(tokens), len(tokens) + _NUM_BYTES - len(free))
        tokens += [b""] * (free[-1] + 1 - len(tokens))
        for byte, at in enumerate(free):
            tokens[at] = bytes([byte])
        return tokenizer_of(tokens, self.special_ids, self.eos_ids)

    def tokenizer(self, size: int) -> "LLTokenizer":
        """Build the full tokenizer for a model with `size` logits. This takes a moment."""
        tokens = [self.spell(i) if i < self.size else b"" for i in range(size)]
        special = frozenset(i for i in self.special_ids if i < size)
        return tokenizer_of(tokens, special, [i for i in self.eos_ids if i < size])


def tokenizer_of(tokens: Sequence[bytes], special_ids: frozenset[int], eos_ids: Sequence[int]) -> "LLTokenizer":
    from llguidance import LLTokenizer

    return LLTokenizer(_Words(tokens, special_ids, eos_ids), eos_token=list(eos_ids))  # type: ignore[arg-type]


class _Words:
    """The tokenizer interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: frozenset[int], eos_ids: Sequence[int]) -> None:
        # A token that adds nothing could be sampled forever. As a control token that no grammar names, it never is.
        empty = [i for i, token in enumerate(tokens) if not token]
        self.tokens = [token or b"<[%d]>" % i for i, token in enumerate(tokens)]
        self.special_token_ids = sorted({*special_ids, *empty, *eos_ids})
        self.eos_token_id = eos_ids[0]

    def __call__(self, text: str) -> list[int]:
        """Called only for forced text, which our grammars disable."""
        raise AssertionError("grammars are compiled without forcing")
