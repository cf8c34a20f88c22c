"""min_tokens: ban the ids that would end a row until it has generated enough tokens."""

import numpy as np
import torch

from octavo.sampling.state import Ints, SamplingState


def apply(
    logits: torch.Tensor,  # [S, V], changed in place
    state: SamplingState,
    at: Ints,  # [P] indices of the logits whose rows may not end yet
    rows: Ints,  # [S] the row of each logit vector
) -> None:
    logits.view(-1)[torch.from_numpy(places(state, at, rows, logits.shape[1]))] = -torch.inf


def places(state: SamplingState, at: Ints, rows: Ints, stride: int) -> Ints:
    """Flat indices of the banned logits: at * stride + id for every stop id of the rows."""
    banned = [state.stop_ids[row] for row in rows[at].tolist()]
    counts = np.array([len(ids) for ids in banned], dtype=np.int64)
    found: Ints = np.repeat(at * stride, counts) + np.concatenate([*banned, np.zeros(0, dtype=np.int64)])
    return found
