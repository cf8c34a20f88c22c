"""What a few requests want beside tokens: logprobs of what a step computed, and the progress of their prompt. None of this runs in a
step without such a request."""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from octavo.messages import Logprobs, PrefillProgress, StepPlan, StepResult, TokenDelta
from octavo.schedule.request import Request
from octavo.schedule.results import runs_of


def take_scores(plan: StepPlan, requests: Sequence[Request], result: StepResult) -> dict[int, tuple[Logprobs, ...]]:
    """Hand every request the logprobs of its prompt. Returns those of the sampled tokens, by the request's sequence."""
    tokens, prompts = iter(result.logprobs), iter(result.prompt_logprobs)
    found: dict[int, tuple[Logprobs, ...]] = {}
    runs = runs_of(plan, result)
    for at, (request, start, samples) in enumerate(zip(requests, plan.starts, plan.samples, strict=True)):
        params = request.params
        if params.prompt_logprobs is not None and start < request.prompt_len - 1:
            request.take_scores(start, next(prompts))
        if samples and params.logprobs is not None and not params.use_beam_search:
            found[request.sequence] = tuple(islice(tokens, runs.get(at, 1)))
    return found


def scored(delta: TokenDelta, request: Request, scores: dict[int, tuple[Logprobs, ...]]) -> TokenDelta:
    """The delta with its tokens' logprobs, and those of the prompt that have not been sent yet."""
    own = scores.get(request.sequence, ())[: len(delta.token_ids)]
    before, of_prompt = request.send_scores()
    return msgspec.structs.replace(delta, logprobs=own, prompt_logprobs=of_prompt, num_scored=before)


def prompt_scores(plan: StepPlan, requests: Sequence[Request]) -> Iterator[TokenDelta]:
    """A delta without tokens for each request that has new logprobs of its prompt, and samples no token in this step to go with
    them. They are sent as they come: those of a long prompt are too much for one message."""
    for request, samples in zip(requests, plan.samples, strict=True):
        if request.prompt_logprobs and not samples and not request.params.use_beam_search and not request.is_finished:
            before, of_prompt = request.send_scores()
            yield TokenDelta(request.id, request.index, [], prompt_logprobs=of_prompt, num_scored=before)


def prefill_progress(
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
        yield TokenDelta(request.id, request.index, [], progress=PrefillProgress(end, request.num_cached))
