"""What the scheduler's verbs return: what each of them did, for the loop to carry out and for observers to count.

Every list belongs to its result; the scheduler writes to none of them once it has returned it."""

from typing import Literal, NamedTuple

import msgspec

from octavo.cache.pool import NO_CHANGES, PageChanges
from octavo.messages import StepPlan, StepResult, TokenDelta
from octavo.schedule.grammar_cache import GrammarJob
from octavo.schedule.request import Request

HeadWaitReason = Literal["rows", "pages", "budget", "streams"]
"""What the queue's head lacks. streams: time in a step that running streams must not wait longer for."""


class Returned(NamedTuple):
    """A request that left its row and is in the queue again."""

    request: Request
    num_computed: int  # tokens that it had computed
    is_swapped: bool  # they are on host pages; else they will be computed again


class Added(NamedTuple):
    """add(): a request was taken in."""

    awaits_grammar: bool  # it enters the queue once its grammar is ready
    jobs: list[GrammarJob]  # to be started now, in this order


class Removed(msgspec.Struct):
    """abort(): choices were taken out."""

    ended: list[Request]
    returned: list[Returned]  # choices that now go on as requests of their own
    let_in: list[Request]  # requests whose grammar is ready now: they have entered the queue
    jobs: list[GrammarJob]


class GrammarsReady(msgspec.Struct):
    """prepared(): grammars are ready."""

    grammars: dict[str, int]  # with the bytes that each takes
    let_in: list[Request]
    jobs: list[GrammarJob]


def runs_of(plan: StepPlan, result: StepResult) -> dict[int, int]:
    """How many tokens each row with a draft got, by its index in the plan."""
    return {draft.at: run for draft, run in zip(plan.drafts, result.runs, strict=True)}


class Planned(msgspec.Struct):
    """plan(): a step was decided."""

    plan: StepPlan
    requests: list[Request]  # ┐ of the plan's rows, and their epochs at that time
    epochs: list[int]  # ┘
    admitted: list[Request]  # out of the queue
    returned: list[Returned]  # preempted
    forking: list[Request]  # leaders whose prompt this plan completes
    forked: list[Request]  # their other choices, which have rows and pages of their own now
    is_empty: bool = False  # there is nothing to carry out
    num_tokens: int = 0
    queued: list[Request] = []  # choices that found no row beside their leader: each waits as a request of its own now
    head: Request | None = None  # the queue's head, where it was not admitted
    head_waits_for: HeadWaitReason | None = None
    # The first prompt that got less of this step than it has room for, or nothing, so that running streams get their next token
    # within `limit_seconds`; 0: it is not known yet what steps cost.
    capped: Request | None = None
    limit_seconds: float = 0.0
    wants_drain: bool = False  # commit it before the next plan is made, so that the next can have drafts
    pages: PageChanges = (
        NO_CHANGES  # of the prefix cache since the last result; empty if nothing listens (KVCache.watch_pages)
    )

    def sampling(self, result: StepResult) -> list[Request]:
        """The request of each of the result's tokens, in that order."""
        runs = runs_of(self.plan, result)
        sampling: list[Request] = []
        for at, (request, samples) in enumerate(zip(self.requests, self.plan.samples, strict=True)):
            if samples and request.pooling is None:
                sampling += [request] * runs.get(at, 1)
        return sampling


class Committed(msgspec.Struct):
    """commit(): a step's result was taken in."""

    plan: StepPlan
    result: StepResult
    num_tokens: int  # that the step computed
    deltas: list[TokenDelta]
    ended: list[Request]
    let_in: list[Request]
    jobs: list[GrammarJob]
    # For each of the plan's drafts: how many of its run's tokens were taken in. Fewer than came where one of them ended the request; none
    # where the request had ended before, or its mask was late.
    taken: list[int] = []
    pages: PageChanges = NO_CHANGES  # as in Planned
