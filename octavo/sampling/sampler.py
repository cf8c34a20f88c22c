"""Sample one token per row from its logits, by the parameters in SamplingState and the tokens in the token table.

Non-finite logits still give an id of the vocabulary, by the same rule for every row: NaN counts as -inf, and +inf as the
largest finite number. A row with no logit above -inf gets token 0."""

import importlib.util

import numpy as np
import torch

from octavo.kernels.cpu.native import Native
from octavo.sampling import logit_bias, min_tokens, penalties
from octavo.sampling.backends import cpu
from octavo.sampling.draw import Draws, draw_filtered, draw_from_all
from octavo.sampling.grammar import masks as grammar
from octavo.sampling.grammar.masks import Masks
from octavo.sampling.randomness import uniforms
from octavo.sampling.state import Ints, SamplingState

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def sample(
    logits: torch.Tensor,  # [S, V]; may be changed
    tokens: torch.Tensor,  # [rows, W] the token table
    state: SamplingState,
    rows: Ints,  # [S] the row of each logit vector
    lens: Ints,  # [S] tokens in each row = position of the token to sample
    out: torch.Tensor | None = None,  # [S] int64, filled and returned
    by_kernels: bool | None = None,  # whether to use Triton; None: if the logits are on a GPU and it is installed
    native: Native | None = None,  # the native CPU kernels, if available
    masks: Masks | None = None,  # grammar masks
) -> torch.Tensor:
    """Return token ids [S] int64. Greedy rows cost only an argmax. With Triton the host does not wait for the GPU."""
    if state.edits and not state.edits.keys().isdisjoint(rows.tolist()):
        logit_bias.apply(logits, tokens, state.edits, state.prompt_len, rows, lens)
    if (logits.is_cuda and _HAS_TRITON) if by_kernels is None else by_kernels:
        from octavo.sampling.backends import triton as kernels  # needs Triton, which only a GPU machine must have

        if out is None:
            out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        kernels.sample(logits, tokens, state, rows, lens, out, masks)
        return out
    if native is not None and not logits.is_cuda:
        if out is None:
            out = torch.empty(len(rows), dtype=torch.int64)
        cpu.sample(native, logits.float().contiguous(), tokens, state, rows, lens, out, masks)
        return out
    # Without Triton the host waits for the GPU here: the rest runs in NumPy and torch on the host.
    here = logits.float().cpu()
    if masks is not None:
        grammar.apply(here, masks)
    ids = _sample(here, tokens, state, rows, lens)
    return ids.to(logits.device) if out is None else out.copy_(ids)


def _sample(logits: torch.Tensor, tokens: torch.Tensor, state: SamplingState, rows: Ints, lens: Ints) -> torch.Tensor:
    logits = _edited(logits, tokens, state, rows, lens)
    greedy = state.greedy[rows]
    if greedy.all():
        return _argmax(logits)
    result = torch.empty(len(rows), dtype=torch.int64)
    filtered = (state.top_k[rows] < state.vocab_size) | (state.top_p[rows] < 1.0)
    for group, choose in ((~greedy & filtered, draw_filtered), (~greedy & ~filtered, draw_from_all)):
        if group.any():
            at = torch.from_numpy(group.nonzero()[0])
            result[at] = choose(_mended(logits[at]), _draws(state, rows[group], lens[group]))
    if greedy.any():
        at = torch.from_numpy(greedy.nonzero()[0])
        result[at] = _argmax(logits[at])
    return result


def _edited(logits: torch.Tensor, tokens: torch.Tensor, state: SamplingState, rows: Ints, lens: Ints) -> torch.Tensor:
    """Apply every row's penalties and bans on stop ids, in place."""
    penalised = state.penalised[rows]
    if penalised.any():
        at = penalised.nonzero()[0]
        penalties.apply(logits, tokens, state, at, rows[at], lens[at])
    early = lens < state.min_len[rows]
    if early.any():
        at = early.nonzero()[0]
        min_tokens.apply(logits, state, at, rows)
    return logits


def _draws(state: SamplingState, rows: Ints, lens: Ints) -> Draws:
    columns = (
        state.temperature[rows],
        state.top_k[rows],
        state.top_p[rows],
        state.min_p[rows],
        uniforms(state.seed[rows], lens),
    )
    return Draws(*(torch.from_numpy(column) for column in columns))


def _mended(logits: torch.Tensor) -> torch.Tensor:
    """Make the maximum of every row of logits [G, V] finite and remove NaN, in place."""
    top = logits.amax(-1)  # NaN if the row holds one
    if bool(top.isfinite().all()):
        return logits
    logits.nan_to_num_(nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)
    hopeless = logits.amax(-1) == -torch.inf
    logits[:, 0].masked_fill_(hopeless, 0.0)
    return logits


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """[S] the likeliest id of each row; of equal logits the lowest id."""
    values = logits.numpy()  # NumPy's argmax is vectorised; torch takes about ten times as long on a CPU
    ids = np.argmax(values, axis=-1)  # the index of the first NaN, if there is one
    broken = np.isnan(values[np.arange(len(ids)), ids])
    if broken.any():
        ids[broken] = np.argmax(np.nan_to_num(values[broken], nan=-np.inf, posinf=np.inf, neginf=-np.inf), axis=-1)
    return torch.from_numpy(ids)
