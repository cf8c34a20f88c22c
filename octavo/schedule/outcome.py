"""A step's result, seen from the requests that were in it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo.messages import Candidates, Finish, FinishReason, StepPlan, StepResult
from octavo.schedule.request import Request


class Arrivals(NamedTuple):
    """A result's columns. Each holds the values of those sampling rows that have one, in the plan's order."""

    tokens: Iterator[int]
    vectors: Iterator[bytes]
    candidates: Iterator[Candidates]
    runs: Iterator[int]  # numbers of tokens

    @classmethod
    def of(cls, result: StepResult) -> "Arrivals":
        return cls(iter(result.tokens), iter(result.vectors), iter(result.candidates), iter(result.runs))


def runs_of(plan: StepPlan, result: StepResult) -> dict[int, int]:
    """How many tokens each row with a draft got, by its index in the plan."""
    return {draft.at: run for draft, run in zip(plan.drafts, result.runs, strict=True)}


def sampling_of(plan: StepPlan, requests: Sequence[Request], result: StepResult) -> list[Request]:
    """The request of each of a result's tokens, in that order."""
    runs = runs_of(plan, result)
    sampling: list[Request] = []
    for at, (request, samples) in enumerate(zip(requests, plan.samples, strict=True)):
        if samples and request.pooling is None:
            sampling += [request] * runs.get(at, 1)
    return sampling


def finish_after(request: Request, token: int, is_loop: bool = False) -> Finish | None:
    """Why the token is the request's last, if it is. `is_loop`: it completes a repetition."""
    reason: FinishReason
    stop_token = None
    if token in request.stop_ids and len(request.tokens) >= request.min_len:
        reason, stop_token = "stop", token
    elif len(request.tokens) >= request.max_len:
        reason = "length"
    elif is_loop and len(request.tokens) >= request.min_len:
        reason = "repetition"
    else:
        return None
    return Finish(
        reason,
        stop_token,
        request.num_cached,
        request.num_preemptions,
        num_drafted_tokens=request.num_drafted,
        num_accepted_tokens=request.num_accepted,
    )
