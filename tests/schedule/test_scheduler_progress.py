"""How far a prompt is: reported for requests that asked, step by step, with numbers that add up."""

import random

from octavo.cache import KVCache
from octavo.messages import GenerateRequest, PrefillProgress, SamplingParams, StepPlan, StepResult, TokenDelta
from octavo.schedule import Scheduler


def request(name: str, prompt_len: int, wants: bool = True, n: int = 1, max_tokens: int = 4) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=0, n=n)
    return GenerateRequest(name, list(range(prompt_len)), params, [], wants_progress=wants)


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [7] * sum(plan.samples))


def run(scheduler: Scheduler, depth: int = 0) -> list[TokenDelta]:
    """To the end, with `depth` plans in flight while the next is made."""
    deltas: list[TokenDelta] = []
    flying: list[StepPlan] = []
    while not scheduler.is_idle or flying:
        plan = scheduler.plan().plan
        if not plan.is_empty:
            flying.append(plan)
        while len(flying) > depth or (flying and plan.is_empty):
            done = flying.pop(0)
            deltas += scheduler.commit(done, result_of(done)).deltas
    return deltas


def reported(deltas: list[TokenDelta], name: str) -> list[PrefillProgress | list[int]]:
    return [delta.progress or delta.token_ids for delta in deltas if delta.request_id == name]


def test_chunk_by_chunk_and_then_the_tokens() -> None:
    for depth in (0, 1):
        scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
        scheduler.add(request("a", 20, max_tokens=2))
        assert reported(run(scheduler, depth), "a") == [
            PrefillProgress(8, 0),
            PrefillProgress(16, 0),
            PrefillProgress(20, 0),
            [7],
            [7],
        ]


def test_a_prefix_that_was_cached_counts_as_computed() -> None:
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
    scheduler.add(request("a", 12, wants=False))
    assert not any(delta.progress for delta in run(scheduler)), "nobody asked"
    scheduler.add(request("b", 30, max_tokens=1))
    assert reported(run(scheduler), "b") == [
        PrefillProgress(20, 12),
        PrefillProgress(28, 12),
        PrefillProgress(30, 12),
        [7],
    ]
    scheduler.add(request("c", 30, max_tokens=1))
    assert reported(run(scheduler), "c") == [PrefillProgress(30, 28), [7]]


def test_choices_have_one_prompt() -> None:
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
    scheduler.add(request("a", 12, n=3, max_tokens=1))
    deltas = run(scheduler)
    assert [(delta.index, delta.progress) for delta in deltas if delta.progress] == [
        (0, PrefillProgress(8, 0)),
        (0, PrefillProgress(12, 0)),
    ]


def test_an_abort_ends_it() -> None:
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
    scheduler.add(request("a", 20))
    plan = scheduler.plan().plan
    scheduler.abort("a")
    assert scheduler.commit(plan, result_of(plan)).deltas == []


def test_progress_ends_at_the_prompts_length_whatever_happens_meanwhile() -> None:
    """Preemptions included: what is reported is never beyond the truth, and the last number comes once, before the first token."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_preemptions = 0
    for _ in range(60):
        depth, swap = rng.randrange(2), rng.choice((0, 20))
        scheduler = Scheduler(KVCache(24, 4, num_host_pages=swap), max_rows=4, max_step_tokens=rng.randrange(4, 16))
        lens = {name: rng.randrange(1, 40) for name in "abcdef"}
        for name, prompt_len in lens.items():
            scheduler.add(request(name, prompt_len, max_tokens=rng.randrange(1, 30)))
        deltas = run(scheduler, depth)
        num_preemptions += scheduler.num_preemptions
        for name, prompt_len in lens.items():
            first, *others = reported(deltas, name)
            numbers = [first, *(each for each in others if isinstance(each, PrefillProgress))]
            assert all(isinstance(each, PrefillProgress) for each in reported(deltas, name)[: len(numbers)]), (
                "before any token"
            )
            computed = [each.num_computed for each in numbers if isinstance(each, PrefillProgress)]
            assert computed[-1] == prompt_len and max(computed[:-1], default=0) < prompt_len
            assert all(each.num_cached <= each.num_computed for each in numbers if isinstance(each, PrefillProgress))
    assert num_preemptions, "the case must be in it"
