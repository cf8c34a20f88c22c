"""Sampling on a GPU by Triton kernels: the host sends its numbers in one copy and waits for nothing. Imported only if logits
are on a GPU, because the kernels need Triton."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.triton.sampling import logit_edits
from octavo.kernels.triton.sampling import records as columns
from octavo.kernels.triton.sampling.draw import draw
from octavo.kernels.triton.sampling.greedy import argmax
from octavo.sampling import min_tokens
from octavo.sampling.grammar.masks import UNLIKELIEST, Masks
from octavo.sampling.randomness import uniforms
from octavo.sampling.state import Floats, Ints, SamplingState


def sample(
    logits: torch.Tensor,  # [S, V]; changed for rows with a mask or a ban on stop ids
    tokens: torch.Tensor,  # [rows, W] the token table
    state: SamplingState,
    rows: Ints,  # [S]
    lens: Ints,  # [S]
    out: torch.Tensor,  # [S] int64
    masks: Masks | None = None,
) -> None:
    if masks is not None:
        logit_edits.mask(
            logits, _to_device(masks.bits, logits.device), _to_device(masks.at, logits.device), UNLIKELIEST
        )
    penalised = state.penalised[rows]
    early = lens < state.min_len[rows]
    is_penalised, is_early = bool(penalised.any()), bool(early.any())
    if not (is_penalised or is_early) and state.greedy[rows].all():
        argmax(logits, out)
        return
    at = np.flatnonzero(penalised)
    unpenalised = np.flatnonzero(~penalised)
    nowhere: Ints = np.zeros(0, dtype=np.int64)
    banned, banned_wide = nowhere, nowhere
    if is_early:
        banned = min_tokens.places(state, np.flatnonzero(early & ~penalised), rows, logits.stride(0))
        if is_penalised:  # penalise() writes their logits into a contiguous tensor of its own
            banned_wide = min_tokens.places(state, np.flatnonzero(early[at]), rows[at], logits.shape[1])
    records, penalties, places, places_wide = _send(
        [_records(state, rows, lens, unpenalised, at), _penalties(state, rows, lens, at), banned, banned_wide],
        logits.device,
    )
    logit_edits.ban(logits, places)
    draw(logits, records[: len(unpenalised)], out)
    if is_penalised:
        prompt_lens = state.prompt_len[rows[at]]
        wide = logit_edits.penalise(
            logits,
            tokens,
            penalties,
            max_prompt_len=int(prompt_lens.max()),
            max_output_len=int((lens[at] - prompt_lens).max()),
            has_frequency=bool(state.frequency[rows[at]].any()),
        )
        logit_edits.ban(wide, places_wide)
        draw(wide, records[len(unpenalised) :], out)


def _records(state: SamplingState, rows: Ints, lens: Ints, unpenalised: Ints, penalised: Ints) -> Floats:
    """Sampling records [S, WIDTH]: first the rows sampled from the original logits, then those from penalised logits."""
    order = np.concatenate((unpenalised, penalised))
    records = state.records[rows[order]]
    records[:, columns.TARGET] = order
    records[:, columns.SOURCE] = order
    records[len(unpenalised) :, columns.SOURCE] = np.arange(len(penalised))
    records[:, columns.UNIFORM] = uniforms(state.seed[rows[order]], lens[order])
    return records


def _penalties(state: SamplingState, rows: Ints, lens: Ints, at: Ints) -> Floats:
    """Penalty records [P, WIDTH]."""
    records = np.zeros((len(at), columns.WIDTH))
    if len(at):
        there = rows[at]
        records[:, columns.PENALTY_ROW] = there
        records[:, columns.PENALTY_SOURCE] = at
        records[:, columns.PROMPT_LEN] = state.prompt_len[there]
        records[:, columns.LENGTH] = lens[at]
        records[:, columns.REPETITION] = state.repetition[there]
        records[:, columns.FREQUENCY] = state.frequency[there]
        records[:, columns.PRESENCE] = state.presence[there]
    return records


def _to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(values)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _send(parts: list[Floats | Ints], device: torch.device) -> list[torch.Tensor]:
    """Copy the parts to the device as float64, in one asynchronous copy."""
    ends = np.cumsum([part.size for part in parts]).tolist()
    # torch reuses pinned memory only after the copy out of it is done.
    host = torch.empty(ends[-1], dtype=torch.float64, pin_memory=device.type == "cuda")
    np.concatenate([part.reshape(-1) for part in parts], out=host.numpy(), casting="same_kind")
    there = host.to(device, non_blocking=True)
    return [there[end - part.size : end].view(part.shape) for part, end in zip(parts, ends, strict=True)]
