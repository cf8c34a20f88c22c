"""Sampling on a CPU by native kernels: all rows of a step in one call. The tokens are those of the torch sampler, except
that they may differ where a uniform falls within a millionth of the border between two tokens."""

import numpy as np
import torch

from octavo.kernels.cpu.library import check
from octavo.kernels.cpu.native import Native
from octavo.kernels.cpu.sampling import Records, choose, fill_uniforms, new_records
from octavo.sampling import min_tokens
from octavo.sampling.grammar.masks import Masks
from octavo.sampling.state import Ints, SamplingState


def sample(
    native: Native,
    logits: torch.Tensor,  # [S, V] float32; changed for rows with penalties, a mask or a ban on stop ids
    tokens: torch.Tensor,  # [rows, W] the token table
    state: SamplingState,
    rows: Ints,  # [S]
    lens: Ints,  # [S]
    out: torch.Tensor,  # [S] int64
    masks: Masks | None = None,
) -> None:
    early = lens < state.min_len[rows]
    if early.any():  # before penalties: they leave -inf as it is
        min_tokens.apply(logits, state, early.nonzero()[0], rows)
    records = new_records(len(rows))
    records["is_greedy"] = greedy = state.greedy[rows]
    if not greedy.all():
        records["temperature"] = state.temperature[rows]
        records["top_k"] = state.top_k[rows]
        records["top_p"] = state.top_p[rows]
        records["min_p"] = state.min_p[rows]
        fill_uniforms(records, state.seed[rows], np.ascontiguousarray(lens))
    if masks is not None:
        check(masks.num_words == -(-logits.shape[1] // 32), "masks must have a bit for each token")
        records["mask"][masks.at] = masks.addresses()
    penalised = state.penalised[rows]
    if penalised.any():
        at = penalised.nonzero()[0]
        records[at] = _with_penalties(records[at], tokens, state, rows[at], lens[at])
    choose(native.threads, logits, records, out)


def _with_penalties(records: Records, tokens: torch.Tensor, state: SamplingState, rows: Ints, lens: Ints) -> Records:
    is_right = tokens.dtype == torch.int32 and tokens.stride(1) == 1
    check(is_right and lens.max() <= tokens.shape[1], "tokens must be int32, as long as the longest row")
    records["tokens"] = tokens.data_ptr() + rows * (4 * tokens.stride(0))
    records["prompt_len"] = state.prompt_len[rows]
    records["len"] = lens
    records["repetition"] = state.repetition[rows]
    records["frequency"] = state.frequency[rows]
    records["presence"] = state.presence[rows]
    return records
