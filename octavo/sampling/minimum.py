"""min_tokens: until a row has given enough tokens, the ids that would end it cannot be sampled.
Knows nothing of how the token is then chosen."""

import numpy as np
import torch

from octavo.sampling.state import Ints, SamplingState


def apply(
    logits: torch.Tensor,  # [S, V], changed in place
    state: SamplingState,
    at: Ints,  # [P] the rows of `logits` that may not end yet
    rows: Ints,  # [P] their rows
) -> None:
    banned = [state.stop_ids[row] for row in rows.tolist()]
    counts = np.array([len(ids) for ids in banned], dtype=np.int64)
    where = np.repeat(at * logits.shape[1], counts) + np.concatenate(banned)
    logits.view(-1)[torch.from_numpy(where).to(logits.device)] = -torch.inf
