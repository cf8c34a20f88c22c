"""Sampling with logprobs, and logprobs of prompt tokens, for the rows of a step that want them."""

import numpy as np
import torch

from octavo.kernels.cpu.native import Native
from octavo.layers.model import DecoderModel
from octavo.sampling import candidates
from octavo.sampling.logprobs import Scores, keep_raw, score
from octavo.sampling.sampler import sample
from octavo.sampling.state import Ints, SamplingState
from octavo.worker.assemble import Columns
from octavo.worker.rows import RowState
from octavo.worker.step import Extras

_CHUNK = 32  # prompt positions whose logits are held at once


def sample_scored(
    logits: torch.Tensor,  # [S, V]; may be changed
    tables: RowState,
    rows: Ints,  # [S]
    lens: Ints,  # [S]
    native: Native | None = None,
    extras: Extras | None = None,
) -> tuple[torch.Tensor, Extras | None]:
    """Sample tokens [S], and add to `extras` what else rows want. Extras None: no row wants anything."""
    raw = keep_raw(logits, tables.sampling, rows)
    found = candidates.find(logits, tables.sampling, rows) if tables.sampling.num_candidates else None
    # While a GPU computes the logits, grammars advance over the tokens before them and make the masks.
    masks = tables.sampling.grammars.masks(rows, lens)
    tokens = sample(logits, tables.tokens, tables.sampling, rows, lens, native=native, masks=masks)
    if raw is not None:
        extras = extras or Extras()
        extras.scored = raw.places
        extras.scores = score(raw.logits, tokens.index_select(0, raw.at), raw.wanted, raw.asked)
    if masks is not None:
        extras = extras or Extras()
        extras.failures, extras.grammar_seconds = masks.failures, masks.seconds
        extras.last, extras.late = masks.last, masks.late
    if found is not None:
        extras = extras or Extras()
        extras.candidates = found
    return tokens, extras


def wants_prompt_scores(state: SamplingState, columns: Columns) -> bool:
    return bool(state.num_prompt_logprobs) and bool(_num_scored(state, columns).any())


def score_prompts(
    model: DecoderModel,
    hidden: torch.Tensor,  # [T, D]
    tables: RowState,
    columns: Columns,
    last: Ints,  # [B] index in T of each planned row's last token
) -> list[list[Scores]]:
    """Scores of prompt tokens, for each row that wants them: of the prompt tokens that follow those computed in this step."""
    state = tables.sampling
    counts = _num_scored(state, columns)
    found: list[list[Scores]] = []
    for at in counts.nonzero()[0].tolist():
        row, count = int(columns.rows[at]), int(counts[at])
        first = int(last[at] - columns.counts[at]) + 1  # in T
        position = int(columns.lens[at] - columns.counts[at])
        following = tables.tokens[row, position + 1 : position + 1 + count].long()
        wanted = state.num_prompt_logprobs[row]
        parts = []
        for start in range(0, count, _CHUNK):
            end = min(start + _CHUNK, count)
            logits = model.logits(hidden[first + start : first + end].contiguous())
            parts.append(score(logits, following[start:end], [wanted] * (end - start)))
        found.append(parts)
    return found


def _num_scored(state: SamplingState, columns: Columns) -> Ints:
    """[B] number of positions of each row whose logits score a next prompt token; 0 if its request does not want that."""
    wants = np.array([row in state.num_prompt_logprobs for row in columns.rows.tolist()], dtype=np.bool_)
    left = state.prompt_len[columns.rows] - 1 - (columns.lens - columns.counts)
    counts: Ints = np.where(wants, np.clip(left, 0, columns.counts), 0)
    return counts
