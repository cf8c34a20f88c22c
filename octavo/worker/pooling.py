"""Hidden states → a vector, every token's vectors, or labels' numbers, for each row that asked for them."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from octavo.layers.model import DecoderModel
from octavo.messages import PoolingParams
from octavo.messages.params import Activation
from octavo.sampling.state import Ints
from octavo.worker.assemble import Assembled


def take_pooled(
    model: DecoderModel,
    hidden: torch.Tensor,  # [T, D]
    assembled: Assembled,
    counts: Ints,  # [S] tokens of each sampled row in this step
    pooling: Mapping[int, PoolingParams],  # by row
) -> tuple[list[torch.Tensor], Assembled]:
    """The vectors of pooled rows in the plan's order, and the batch with only the other rows left to sample."""
    rows = assembled.sample_rows.tolist()
    vectors = [
        _vector(model, hidden, int(last), int(count), pooling[row])
        for row, last, count in zip(rows, assembled.sample_last, counts, strict=True)
        if row in pooling
    ]
    others = np.array([at for at, row in enumerate(rows) if row not in pooling], dtype=np.int64)
    index = torch.from_numpy(others).to(hidden.device)
    batch = dataclasses.replace(assembled.batch, sample_at=assembled.batch.sample_at[index])
    return vectors, Assembled(
        batch,
        assembled.sample_rows[others],
        assembled.sample_lens[others],
        assembled.sample_cells[index],
        assembled.sample_last[others],
        assembled.last,
        assembled.token_rows,
        assembled.positions,
    )


def _vector(model: DecoderModel, hidden: torch.Tensor, last: int, count: int, how: PoolingParams) -> torch.Tensor:
    """[D] float32; for every token's vector [T · D], for labels [L]. Each row is computed by itself, so that it does not depend on the
    rest of the step."""
    first = last + 1 - count
    match how.kind:
        case "cls" | "classify":
            states = hidden[first : first + 1]
        case "mean" | "tokens":
            states = hidden[first : last + 1]
        case "last":
            states = hidden[last : last + 1]
    if how.kind == "classify":
        return _activated(model.classify(states)[0], how.activation)
    final = model.final(states).float()
    vector = (final if how.kind == "tokens" else final.mean(dim=0))[..., : how.dimensions or None]
    return (F.normalize(vector, dim=-1) if how.normalize else vector).flatten()


def _activated(logits: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case "none":
            return logits
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(dim=0)
