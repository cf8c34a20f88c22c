"""Token bitmasks as llguidance fills them: one bit per token of the vocabulary, 32 to a word."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.int32]  # [ceil(V / 32)]: bit i % 32 of word i // 32 belongs to token i

WORD = 32  # tokens per word
_FEW = 64  # up to this many nonzero words are unpacked one by one, instead of the whole mask


def tokens_of(bits: Words, vocab_size: int, without: Sequence[int] = ()) -> Ints:
    """The tokens whose bits are set, ascending."""
    words = np.flatnonzero(bits)
    if len(words) > _FEW:
        tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
    else:
        found = np.unpackbits(bits[words].view(np.uint8).reshape(-1, WORD // 8), axis=1, bitorder="little")
        rows, places = np.nonzero(found)
        tokens = words[rows] * WORD + places
        tokens = tokens[tokens < vocab_size]
    return tokens[~np.isin(tokens, without)] if len(without) else tokens


def is_set(bits: Words, token: int) -> bool:
    return bool(int(bits[token // WORD]) >> token % WORD & 1)


def keep_only(bits: Words, tokens: Sequence[int]) -> None:
    """Set the bits of these tokens and clear all others."""
    bits[:] = 0
    for token in tokens:
        bits.view(np.uint32)[token // WORD] |= np.uint32(1 << token % WORD)


def any_set(bits: Words, ids: Sequence[int]) -> bool:
    """Of few tokens: one by one they take a tenth of what an array of them takes."""
    return any(int(bits[token // WORD]) >> token % WORD & 1 for token in ids)


def set_bits(bits: Words, ids: Ints) -> None:
    np.bitwise_or.at(bits.view(np.uint32), ids // WORD, np.uint32(1) << (ids % WORD).astype(np.uint32))


def clear_bits(bits: Words, ids: Ints) -> None:
    np.bitwise_and.at(bits.view(np.uint32), ids // WORD, ~(np.uint32(1) << (ids % WORD).astype(np.uint32)))
