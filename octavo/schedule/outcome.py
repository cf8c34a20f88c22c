"""A step's result, seen from the requests that were in it."""

from collections.abc import Iterator
from typing import NamedTuple

from octavo.messages import Candidates, Finish, FinishReason, StepPlan, StepResult
from octavo.schedule.request import Request


class Arrivals(NamedTuple):
    """A result's columns. Each holds the values of those sampling rows that have one, in the plan's order."""

    tokens: Iterator[int]
    vectors: Iterator[bytes]
    candidates: Iterator[Candidates]

    @classmethod
    def of(cls, result: StepResult) -> "Arrivals":
        return cls(iter(result.tokens), iter(result.vectors), iter(result.candidates))


def sampling_of(plan: StepPlan, requests: list[Request]) -> list[Request]:
    """The requests whose tokens a step's result holds, in that order."""
    return [r for r, samples in zip(requests, plan.samples, strict=True) if samples and r.pooling is None]


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
    return Finish(reason, stop_token, request.num_cached, request.num_preemptions)
