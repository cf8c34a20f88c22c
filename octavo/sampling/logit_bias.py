"""logit_bias, allowed_token_ids and bad_words: changes to a row's logits before penalties, on any device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.messages import SamplingParams

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of one row."""

    bias_ids: Ints  # [K]
    biases: NDArray[np.float32]  # [K]
    allowed: Ints | None  # None: all
    bad_words: tuple[tuple[int, ...], ...]  # token ids

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> "Edits | None":
        """Edits for `params`; None: no change. Ids outside the vocabulary cannot be sampled and need no edit."""
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
        allowed = params.allowed_token_ids
        words = tuple(word for word in params.bad_word_ids if word and 0 <= word[-1] < vocab_size)
        if not bias and allowed is None and not words:
            return None
        return cls(
            np.array([*bias], dtype=np.int64),
            np.array([*bias.values()], dtype=np.float32),
            None if allowed is None else _within(allowed, vocab_size),
            words,
        )


def _within(tokens: Sequence[int], vocab_size: int) -> Ints:
    """The ids of the vocabulary among `tokens`, sorted, each once."""
    ids = np.array(tokens, dtype=np.int64)
    return np.unique(ids[(ids >= 0) & (ids < vocab_size)])


def apply(
    logits: torch.Tensor,  # [S, V], changed in place
    tokens: torch.Tensor,  # [rows, W] the token table
    edits: Mapping[int, Edits],  # by row
    prompt_lens: Ints,  # by row
    rows: Ints,  # [S]
    lens: Ints,  # [S] tokens each row holds
) -> None:
    """Apply the edits without waiting for a GPU and without a copy of the logits."""
    device = logits.device
    bias_at, bias_ids, biases = [], [], []
    words: list[_Word] = []
    for at, row in enumerate(rows.tolist()):
        own = edits.get(row)
        if own is None:
            continue
        if own.allowed is not None:
            kept = _to_device(own.allowed, device)
            values = logits[at].index_select(0, kept)
            logits[at].fill_(-torch.inf).index_copy_(0, kept, values)
        bias_at.append(np.full(len(own.bias_ids), at))
        bias_ids.append(own.bias_ids)
        biases.append(own.biases)
        room = int(lens[at] - prompt_lens[row])  # bad words are matched in the output only
        words += [_Word(at, row, int(lens[at]), word) for word in own.bad_words if len(word) - 1 <= room]
    if any(map(len, biases)):
        # A row has each id once, so no place is written twice.
        there, ids, added = (_to_device(np.concatenate(column), device) for column in (bias_at, bias_ids, biases))
        logits.index_put_((there, ids), (logits[there, ids].float() + added).to(logits.dtype))
    if words:
        _ban(logits, tokens, words)


@dataclass(frozen=True, slots=True)
class _Word:
    at: int  # of its row in the logits
    row: int
    len: int  # tokens in the row
    ids: tuple[int, ...]


def _ban(logits: torch.Tensor, tokens: torch.Tensor, words: Sequence[_Word]) -> None:
    """Ban the last token of each word whose other tokens are the end of its row."""
    device = logits.device
    longest = max(len(word.ids) for word in words) - 1
    prefixes = np.full((len(words), longest), -1, dtype=np.int64)  # [P, L] right-aligned; -1: any token
    cells = np.zeros((len(words), longest), dtype=np.int64)  # [P, L] cells of the token table
    for number, word in enumerate(words):
        size = len(word.ids) - 1
        prefixes[number, longest - size :] = word.ids[:-1]
        end = word.row * tokens.shape[1] + word.len
        cells[number, longest - size :] = np.arange(end - size, end)
    # Several words of a row may end with the same token: one match bans it.
    places, place_of = np.unique(
        [(word.at, word.ids[-1]) for word in words], axis=0, return_inverse=True
    )  # [U, 2], [P]
    wanted = _to_device(prefixes, device)
    held = tokens.view(-1)[_to_device(cells, tokens.device)].to(device)
    matches = ((held == wanted) | (wanted < 0)).all(-1).float()
    num_matches = matches.new_zeros(len(places)).index_add_(0, _to_device(place_of.reshape(-1), device), matches)
    at, ids = _to_device(np.ascontiguousarray(places.T), device)
    logits.index_put_((at, ids), logits[at, ids].masked_fill(num_matches > 0, -torch.inf))


def _to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(values)
    # torch reuses pinned memory only after the copy out of it is done.
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
