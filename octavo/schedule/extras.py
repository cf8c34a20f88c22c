"""What a few requests want beside tokens: logprobs of what a step computed, and the progress of their prompt. None of this runs in a
step without such a request."""

from collections.abc import Iterator, Sequence

import msgspec

from octavo.messages import Logprobs, Progress, StepPlan, StepResult, TokenDelta
from octavo.schedule.request import Request


def take_scores(plan: StepPlan, requests: Sequence[Request], result: StepResult) -> dict[int, Logprobs]:
    """Hand every request the logprobs of its prompt. Returns those of the sampled tokens, by the request's sequence."""
    tokens, prompts = iter(result.logprobs), iter(result.prompt_logprobs)
    found = {}
    for request, start, samples in zip(requests, plan.starts, plan.samples, strict=True):
        params = request.params
        if params.prompt_logprobs is not None and start < request.prompt_len - 1:
            request.take_scores(start, next(prompts))
        if samples and params.logprobs is not None and not params.use_beam_search:
            found[request.sequence] = next(tokens)
    return found


def scored(delta: TokenDelta, request: Request, scores: dict[int, Logprobs]) -> TokenDelta:
    """The delta with its token's logprobs, and those of the prompt that have not been sent yet."""
    own = scores.get(request.sequence)
    of_prompt, request.prompt_logprobs = tuple(request.prompt_logprobs), []
    return msgspec.structs.replace(delta, logprobs=() if own is None else (own,), prompt_logprobs=of_prompt)


def progress_of(
    plan: StepPlan, requests: Sequence[Request], epochs: Sequence[int], watched: set[int]
) -> Iterator[TokenDelta]:
    """A delta without tokens for each watched request that the plan advanced. `watched`: sequences of requests whose prompt is not
    computed yet. A step whose work a preemption has undone since counts as no progress."""
    for request, epoch, start, count in zip(requests, epochs, plan.starts, plan.counts, strict=True):
        if request.sequence not in watched:
            continue
        end = min(start + count, request.prompt_len)
        if end == request.prompt_len:
            watched.discard(request.sequence)
        elif epoch != request.epoch:
            continue
        yield TokenDelta(request.id, request.index, [], progress=Progress(end, request.num_cached))
