"""Drafts in a step: which of a step's samples count (decision 048)."""

from collections.abc import Container, Sequence
from typing import NamedTuple

import msgspec

from octavo.messages import FROM_GRAMMAR, Draft, StepPlan
from octavo.sampling.grammar.masks import Grammars


def fill_forced(plan: StepPlan, grammars: Grammars) -> StepPlan:
    """→ the plan with tokens in the drafts that it leaves to grammars, as far as these force any."""
    wanted = [draft for draft in plan.drafts if draft.tokens[:1] == [FROM_GRAMMAR]]
    if not wanted:
        return plan
    found = grammars.forced([plan.rows[each.at] for each in wanted], [plan.starts[each.at] + 1 for each in wanted])
    counts, drafts = plan.counts[:], {draft.at: draft for draft in plan.drafts}
    for draft, forced in zip(wanted, found, strict=True):
        tokens = forced[: len(draft.tokens)]
        counts[draft.at] -= len(draft.tokens) - len(tokens)
        drafts[draft.at] = Draft(draft.at, tokens)
    return msgspec.structs.replace(plan, counts=counts, drafts=list(drafts.values()))


class Drafted(NamedTuple):
    """The drafts of a step, by where they are among its samples."""

    first: list[int]  # index of the sample after the row's own last token; those after drafted tokens follow
    tokens: list[list[int]]

    @classmethod
    def of(cls, plan: StepPlan, pooled: Container[int]) -> "Drafted | None":
        """`pooled`: rows that do not sample. None: the plan has no drafts."""
        if not plan.drafts:
            return None
        found, place = cls([], []), 0
        drafts = {draft.at: draft.tokens for draft in plan.drafts}
        for at, (row, samples) in enumerate(zip(plan.rows, plan.samples, strict=True)):
            if not samples or row in pooled:
                continue
            if at in drafts:
                found.first.append(place)
                found.tokens.append(drafts[at])
                place += len(drafts[at])
            place += 1
        return found

    def runs(self, samples: Sequence[int], apart: Container[int]) -> list[int]:
        """How many samples count of each row with a draft. One counts if the one before counts and the draft had it right. `apart`:
        samples that something is to be said of (late, failed, the last): each is its row's only one, so it ends the run before
        it."""
        return [
            _run(samples[first : first + len(draft)], draft, first, apart)
            for first, draft in zip(self.first, self.tokens, strict=True)
        ]

    def kept(self, runs: Sequence[int], num_samples: int) -> list[int]:
        """The samples that count, in order."""
        kept: list[int] = []
        at = 0
        for first, draft, run in zip(self.first, self.tokens, runs, strict=True):
            kept.extend(range(at, first + run))
            at = first + 1 + len(draft)
        kept.extend(range(at, num_samples))
        return kept


def _run(samples: Sequence[int], draft: list[int], first: int, apart: Container[int]) -> int:
    run = 1
    for sample, drafted in zip(samples, draft, strict=True):
        at = first + run
        if sample != drafted or at - 1 in apart or at in apart:
            break
        run += 1
    return run
