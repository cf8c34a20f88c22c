"""Find the likeliest continuations of beams, with the model's own logprobs."""

from dataclasses import dataclass

import torch

from octavo.messages import Candidates
from octavo.sampling import ranking
from octavo.sampling.logprobs import IMPOSSIBLE
from octavo.sampling.state import Ints, SamplingState

_CHUNK = 32  # beams held in float64 at a time


@dataclass(slots=True)
class FoundCandidates:
    """The candidates of P beams, grouped by number of candidates K; on the device, or being copied to the host."""

    places: list[list[int]]  # for each K: the beams' places among the step's samples
    token_ids: list[torch.Tensor]  # [p, K] int64, likeliest first
    logprobs: list[torch.Tensor]  # [p, K] float32

    def sent_home(self) -> "FoundCandidates":
        """Start asynchronous copies to the host; on a CPU the tensors are returned as they are."""
        ids, logprobs = (
            [part.to("cpu", non_blocking=True) for part in parts] for parts in (self.token_ids, self.logprobs)
        )
        return FoundCandidates(self.places, ids, logprobs)

    def entries(self) -> list[Candidates]:
        found: dict[int, Candidates] = {}
        for places, ids, logprobs in zip(self.places, self.token_ids, self.logprobs, strict=True):
            found |= zip(places, map(Candidates, ids.tolist(), logprobs.tolist()), strict=True)
        return [found[place] for place in sorted(found)]


def find(logits: torch.Tensor, state: SamplingState, rows: Ints) -> FoundCandidates | None:
    """Find candidates in the unchanged logits [S, V] of the rows [S]. None: none of the rows is a beam."""
    beams = [(at, state.num_candidates[row]) for at, row in enumerate(rows.tolist()) if row in state.num_candidates]
    if not beams:
        return None
    found = FoundCandidates([], [], [])
    # One K at a time: the order of equal logits must not depend on the K of other beams.
    for count in sorted({count for _, count in beams}):
        chosen = [at for at, its_count in beams if its_count == count]
        there = torch.tensor(chosen)
        there = there.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else there
        parts = [_best(logits.index_select(0, there[at : at + _CHUNK]), count) for at in range(0, len(there), _CHUNK)]
        ids, logprobs = (torch.cat(columns) for columns in zip(*parts, strict=True))
        found.places.append(chosen)
        found.token_ids.append(ids)
        found.logprobs.append(logprobs)
    return found


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [p, V] → (token ids, logprobs) [p, count]."""
    logits = logits.float()
    total = ranking.log_sum(logits)  # [p, 1]
    values, ids = ranking.best(logits, min(count, logits.shape[1]))
    logprobs = (values.double() - total).float().nan_to_num_(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
    return ids, logprobs.clamp_(min=IMPOSSIBLE)
