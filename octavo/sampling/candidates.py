"""The likeliest continuations of beams, with the model's own logprobs.
Knows nothing of the search that chooses among them."""

from dataclasses import dataclass

import torch

from octavo.messages import Candidates
from octavo.sampling import ranking
from octavo.sampling.logprobs import IMPOSSIBLE
from octavo.sampling.state import Ints, SamplingState

_CHUNK = 32  # beams that are held in float64 at once


@dataclass(slots=True)
class Found:
    """Of P beams, by how many of each are looked at; on the device or on their way home."""

    places: list[list[int]]  # for each number of them: which of the P
    token_ids: list[torch.Tensor]  # [p, K] int64, in falling order
    logprobs: list[torch.Tensor]  # [p, K] float32

    def sent_home(self) -> "Found":
        """Copies to the host that nobody waits for; on a CPU they are there."""
        ids, logprobs = (
            [part.to("cpu", non_blocking=True) for part in parts] for parts in (self.token_ids, self.logprobs)
        )
        return Found(self.places, ids, logprobs)

    def entries(self) -> list[Candidates]:
        found: dict[int, Candidates] = {}
        for places, ids, logprobs in zip(self.places, self.token_ids, self.logprobs, strict=True):
            found |= zip(places, map(Candidates, ids.tolist(), logprobs.tolist()), strict=True)
        return [found[place] for place in sorted(found)]


def find(logits: torch.Tensor, state: SamplingState, rows: Ints) -> Found | None:
    """Of logits [S, V] of the rows [S], before anything changes them. None: none of the rows is a beam."""
    beams = [(at, state.num_candidates[row]) for at, row in enumerate(rows.tolist()) if row in state.num_candidates]
    if not beams:
        return None
    found = Found([], [], [])
    # Each number by itself: which of two equals comes first must not depend on how many others look at.
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
