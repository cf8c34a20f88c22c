"""Log-probabilities of given tokens and of the likeliest tokens, from the model's unchanged logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from octavo.messages import MAX_LOGPROBS, Logprobs
from octavo.sampling import ranking
from octavo.sampling.state import Ints, SamplingState

_CHUNK = 32  # positions held in float64 at a time
IMPOSSIBLE = -9999.0  # instead of minus infinity, which JSON cannot express


class Raw(NamedTuple):
    """The logits of rows that want logprobs, copied before sampling changes them."""

    at: torch.Tensor  # [P] int64: indices of the step's samples
    logits: torch.Tensor  # [P, V]
    wanted: list[int]  # [P] number of top logprobs
    asked: dict[int, Sequence[int]]  # index in P → the tokens whose logprobs it wants instead of the likeliest
    places: list[int]  # `at` on the host


def keep_raw(logits: torch.Tensor, state: SamplingState, rows: Ints) -> Raw | None:
    """Copy the logits of rows that want logprobs; None: there are no such rows."""
    if not state.num_logprobs:
        return None
    found = [(at, state.num_logprobs[row]) for at, row in enumerate(rows.tolist()) if row in state.num_logprobs]
    if not found:
        return None
    places = [place for place, _ in found]
    at = torch.tensor(places)
    at = at.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else at
    asked = {}
    if state.logprob_token_ids:
        of_row = [state.logprob_token_ids.get(int(rows[at])) for at, _ in found]
        asked = {place: ids for place, ids in enumerate(of_row) if ids}
    return Raw(at, logits.index_select(0, at), [wanted for _, wanted in found], asked, places)


@dataclass(slots=True)
class Scores:
    """Logprobs of P positions, on the device or being copied to the host."""

    token_ids: torch.Tensor  # [P, 1 + K] int64: the token at the position, then the likeliest, descending
    logprobs: torch.Tensor  # [P, 1 + K] float32
    ranks: torch.Tensor  # [P] int64
    wanted: list[int]  # [P] number of top logprobs
    # Index in P → tokens in place of the likeliest, and their logprobs [n] float32.
    asked: dict[int, tuple[Sequence[int], torch.Tensor]] = field(default_factory=dict)

    def sent_home(self) -> "Scores":
        """Start asynchronous copies to the host; on a CPU the tensors are returned as they are."""
        ids, logprobs, ranks = (
            values.to("cpu", non_blocking=True) for values in (self.token_ids, self.logprobs, self.ranks)
        )
        asked = {at: (tokens, values.to("cpu", non_blocking=True)) for at, (tokens, values) in self.asked.items()}
        return Scores(ids, logprobs, ranks, self.wanted, asked)

    def entries(self) -> list[Logprobs]:
        columns = zip(self.ranks.tolist(), self.token_ids.tolist(), self.logprobs.tolist(), self.wanted, strict=True)
        found = [Logprobs(rank, ids[: 1 + count], values[: 1 + count]) for rank, ids, values, count in columns]
        for at, (tokens, values) in self.asked.items():
            own = found[at]
            found[at] = Logprobs(own.rank, [own.token_ids[0], *tokens], [own.logprobs[0], *values.tolist()])
        return found


def score(
    logits: torch.Tensor,  # [P, V], not changed
    chosen: torch.Tensor,  # [P] int64: the token at each position
    wanted: list[int],  # [P]
    asked: Mapping[int, Sequence[int]] | None = None,
) -> Scores:
    """Score the positions in chunks, so that many rows of a large vocabulary need little memory beside their logits."""
    num_best = min(MAX_LOGPROBS, logits.shape[1]) if any(wanted) else 0
    ends = range(_CHUNK, len(chosen) + _CHUNK, _CHUNK)
    parts = [_score(logits[end - _CHUNK : end], chosen[end - _CHUNK : end], num_best) for end in ends]
    ids, logprobs, ranks = (torch.cat(columns) for columns in zip(*parts, strict=True))
    others = {at: (tokens, _score_tokens(logits[at : at + 1], tokens)) for at, tokens in (asked or {}).items()}
    return Scores(ids, logprobs, ranks, wanted, others)


def _score_tokens(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Logprobs [n] of these tokens at one position, from its logits [1, V]."""
    logits = logits.float()
    values = logits[0, torch.tensor(tokens, device=logits.device)].double() - ranking.log_sum(logits)[0]
    return values.float().nan_to_num_(nan=IMPOSSIBLE, neginf=IMPOSSIBLE).clamp_(min=IMPOSSIBLE)


def _score(
    logits: torch.Tensor, chosen: torch.Tensor, num_best: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token ids, logprobs, ranks) as in Scores."""
    logits = logits.float()
    chosen = chosen.clamp(0, logits.shape[1] - 1)  # a warm-up step samples nothing, and its ids are undefined
    total = ranking.log_sum(logits)  # [P, 1]
    own = logits.gather(1, chosen[:, None])  # [P, 1]
    ranks = (logits > own).sum(-1) + 1
    ids, values = chosen[:, None], own
    if num_best:
        # Always the maximum number: the order of equal logits must not depend on how many other rows want.
        best_values, best_ids = ranking.best(logits, num_best)
        ids, values = torch.cat((ids, best_ids), 1), torch.cat((values, best_values), 1)
    logprobs = (values.double() - total).float().nan_to_num_(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
    return ids, logprobs.clamp_(min=IMPOSSIBLE), ranks
