"""Repetition, frequency and presence penalties in torch, from the token table."""

import numpy as np
import torch

from octavo.sampling.state import Floats, Ints, SamplingState


def apply(
    logits: torch.Tensor,  # [S, V] float32, changed in place
    tokens: torch.Tensor,  # [rows, W] the token table
    state: SamplingState,
    at: Ints,  # [P] indices of the logits to penalise
    rows: Ints,  # [P] their rows in the token table
    lens: Ints,  # [P] tokens in each row
) -> None:
    """Penalise in place. Repetition counts prompt and output; presence and frequency count output only."""
    vocab_size = logits.shape[1]
    flat = logits.view(-1)
    start = state.prompt_len[rows]
    repetition, frequency, presence = state.repetition[rows], state.frequency[rows], state.presence[rows]

    held = repetition != 1.0
    if held.any():
        where, factor = _held(
            tokens, vocab_size, at[held], rows[held], np.zeros_like(lens[held]), lens[held], repetition[held]
        )
        value = flat[where]
        # Duplicates in `where` write the same value, so each token is penalised once, however often it occurs.
        flat[where] = torch.where(value > 0, value / factor, value * factor)
    held = frequency != 0.0
    if held.any():
        where, amount = _held(tokens, vocab_size, at[held], rows[held], start[held], lens[held], frequency[held])
        flat.index_add_(0, where, -amount)
    held = presence != 0.0
    if held.any():
        where, amount = _held(tokens, vocab_size, at[held], rows[held], start[held], lens[held], presence[held])
        flat[where] = flat[where] - amount


def _held(
    tokens: torch.Tensor, vocab_size: int, at: Ints, rows: Ints, start: Ints, end: Ints, amount: Floats
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every token at positions [start, end): its index in the flattened logits, and its row's penalty."""
    # A pass of a draft model may end inside a prompt, with a sample that does not count.
    counts = np.maximum(end - start, 0)
    offsets = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) - np.repeat(offsets - start, counts)
    cells = np.repeat(rows * tokens.shape[1], counts) + positions
    ids = tokens.view(-1)[torch.from_numpy(cells).to(tokens.device)].long().cpu()
    where = ids + torch.from_numpy(np.repeat(at * vocab_size, counts))
    return where, torch.from_numpy(np.repeat(amount, counts).astype(np.float32))
