"""Draw tokens in torch: the filters top-k, top-p and min-p, then the inverse CDF in vocabulary order at a given uniform
number.

A row's token depends only on its own logits, parameters and uniform. Rows are grouped by their parameters, and nothing
computed for one row takes its size or order from another."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_CHUNK = 256  # weights per partial sum; a draw searches the partial sums, then one chunk
_TIERS = (128, 1024, 8192)  # numbers of candidates tried in turn; a row that needs more gets the whole vocabulary


@dataclass(slots=True)
class Draws:
    """The parameters of G rows; every field is [G] float64, except top_k."""

    temperature: torch.Tensor  # above 0, also when rounded to float32
    top_k: torch.Tensor  # int64; vocabulary size: no limit
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor  # in [0, 1)

    def take(self, rows: torch.Tensor) -> "Draws":
        return Draws(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])


def draw_from_all(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw one id per row [G] from logits [G, V] of rows with neither top_k nor top_p, without sorting.

    Logits: no NaN, and a finite maximum in each row."""
    weights = _weights(logits, draws)
    sums = _chunk_sums(weights)  # [G, C] float64
    cdf = sums.cumsum(-1)
    chunk = _first_above(cdf, draws.uniform * cdf[:, -1])
    below = (cdf.gather(1, chunk) - sums.gather(1, chunk)).squeeze(1)
    columns = chunk * _CHUNK + torch.arange(_CHUNK, device=logits.device)  # [G, _CHUNK]
    inner = weights.gather(1, columns.clamp(max=weights.shape[1] - 1)).masked_fill_(columns >= weights.shape[1], 0.0)
    inner_cdf = inner.double().cumsum(-1)
    index = _first_above(inner_cdf, draws.uniform * cdf[:, -1] - below)
    # Always an id of the vocabulary: an id out of range would break the next step's embedding for all rows.
    return (chunk * _CHUNK + index).squeeze(1).clamp_(max=weights.shape[1] - 1)


def draw_filtered(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw one id per row [G] from logits [G, V] of rows with top_k or top_p, sorting the vocabulary only if necessary.

    Logits: no NaN, and a finite maximum in each row."""
    vocab_size = logits.shape[1]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    todo = torch.arange(len(logits), device=logits.device)
    for num_candidates in (*(tier for tier in _TIERS if tier < vocab_size), vocab_size):
        # Rows with top_k start at a tier that surely holds their candidates, rows with only top_p at the smallest.
        unlimited = draws.top_k[todo] == vocab_size
        here = unlimited | (draws.top_k[todo] < num_candidates) | (num_candidates == vocab_size)
        chosen = todo[here]
        if len(chosen):
            ids, settled = _draw_among(logits[chosen], draws.take(chosen), num_candidates)
            tokens[chosen] = ids
            todo = torch.cat((chosen[~settled], todo[~here]))
        if not len(todo):
            break
    return tokens


def _draw_among(logits: torch.Tensor, draws: Draws, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ids [G] among the likeliest candidates; also returns [G] whether those candidates were enough."""
    values, ids = _likeliest(logits, num_candidates)  # [G, K]
    keep = kept_prefix(logits, values, draws)
    num_kept = keep.sum(-1, keepdim=True)
    # Every filter keeps a prefix of the sorted order. The candidates are enough if the prefix ends above the value of the
    # last one: then no other token, not even an equal one, could belong to it.
    settled = values.gather(1, (num_kept - 1).clamp_(min=0)).squeeze(1) > values[:, -1]
    if num_candidates == logits.shape[1]:
        settled = torch.ones_like(settled)
    ids, by_id = ids.sort(-1)
    weights = _candidate_weights(values, draws).masked_fill_(~keep, 0.0).gather(1, by_id)
    cdf = weights.cumsum(-1)
    return ids.gather(1, _first_above(cdf, draws.uniform * cdf[:, -1])).squeeze(1), settled


def kept_prefix(logits: torch.Tensor, values: torch.Tensor, draws: Draws) -> torch.Tensor:
    """[G, K] whether a candidate passes min-p, then top-k, then top-p of the remaining mass; `values` are descending."""
    vocab_size = logits.shape[1]
    weights = _candidate_weights(values, draws)
    rank = torch.arange(values.shape[1], device=values.device)
    keep = (weights >= draws.min_p[:, None]) & (rank < draws.top_k[:, None])
    weights = weights.masked_fill_(~keep, 0.0)
    cdf = weights.cumsum(-1)
    total = cdf[:, -1]
    unlimited = (draws.top_k == vocab_size).nonzero().squeeze(1)
    if len(unlimited) and values.shape[1] < vocab_size:
        total[unlimited] = _chunk_sums(_weights(logits[unlimited], draws.take(unlimited))).sum(-1)
    # A token is kept if the mass before it is below top_p, so the one that crosses is kept. 1.0 cuts nothing.
    nucleus = torch.where(draws.top_p < 1.0, draws.top_p * total, torch.inf)
    before = F.pad(cdf, (1, -1))
    return keep & (before < nucleus[:, None])


def _likeliest(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits, descending, and their ids; equal logits in ascending order of id."""
    if num_candidates == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(num_candidates, -1)
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _weights(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Unnormalised weights [G, V] float32: the likeliest token has 1, tokens below min_p have 0."""
    weights = (logits - logits.amax(-1, keepdim=True)).div_(draws.temperature[:, None].float()).exp_()
    if bool((draws.min_p > 0).any()):
        weights.masked_fill_(weights < draws.min_p[:, None], 0.0)
    return weights


def _candidate_weights(values: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Weights [G, K] float64, in the same unit as _weights."""
    return (values - values[:, :1]).div_(draws.temperature[:, None].float()).double().exp_()


def _chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of chunks, [G, C] float64: many short sums are much faster than one long running sum, and more exact."""
    vocab_size = weights.shape[1]
    aligned = vocab_size - vocab_size % _CHUNK
    sums = weights[:, :aligned].reshape(len(weights), -1, _CHUNK).sum(-1)
    if aligned < vocab_size:
        sums = torch.cat((sums, weights[:, aligned:].sum(-1, keepdim=True)), -1)
    return sums.double()


def _first_above(cdf: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """[G, 1] the first entry whose cumulative weight exceeds the threshold; never an entry of weight zero."""
    last = torch.nextafter(cdf[:, -1], torch.zeros_like(cdf[:, -1]))
    index = torch.searchsorted(cdf, torch.minimum(thresholds, last)[:, None], right=True)
    return index.clamp_(max=cdf.shape[1] - 1)
