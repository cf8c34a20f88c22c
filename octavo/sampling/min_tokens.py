"""min_tokens: until a row has given enough tokens, the ids that would end it cannot be sampled.
Knows nothing of how the token is then chosen."""

import numpy as np
import torch

from octavo.sampling.state import Ints, SamplingState


def apply(
    logits: torch.Tensor,  # [S, V], changed in place
    state: SamplingState,
    at: Ints,  # [P] the rows of `logits` that may not end yet
    rows: Ints,  # [S] the row of each
) -> None:
    logits.view(-1)[torch.from_numpy(places(state, at, rows, logits.shape[1]))] = -torch.inf


def places(state: SamplingState, at: Ints, rows: Ints, stride: int) -> Ints:
    """What those rows may not take yet: row * stride + id for every such id."""
    banned = [state.stop_ids[row] for row in rows[at].tolist()]
    counts = np.array([len(ids) for ids in banned], dtype=np.int64)
    found: Ints = np.repeat(at * stride, counts) + np.concatenate([*banned, np.zeros(0, dtype=np.int64)])
    return found
