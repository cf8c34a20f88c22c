"""Beam searches, priorities and loops in the scheduler: each rule in the smallest case that shows it, pages counted."""

import random

import pytest

from octavo.cache import KVCache
from octavo.messages import Candidates, GenerateRequest, RepetitionDetectionParams, SamplingParams, StepPlan, StepResult
from octavo.schedule import POLICIES, Scheduler
from octavo.schedule.repetition import Loops


def search(name: str, prompt_len: int, width: int, max_tokens: int = 6) -> GenerateRequest:
    params = SamplingParams(use_beam_search=True, n=width, max_tokens=max_tokens, seed=0)
    return GenerateRequest(name, list(range(prompt_len)), params, [])


def plain(name: str, prompt_len: int, max_tokens: int = 8, n: int = 1, priority: int = 0) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=0, n=n)
    prompt = [ord(name) * 1000 + at for at in range(prompt_len)]
    return GenerateRequest(name, prompt, params, [], priority=priority)


def result_of(plan: StepPlan, num_beams: int = 0) -> StepResult:
    """Token 7 for everybody; each beam's likeliest are 100, 101 … Those of beams that are further down are less likely."""
    found = [Candidates([*range(100, 140)], [-0.1 * at - 0.01 * beam for at in range(40)]) for beam in range(num_beams)]
    return StepResult(plan.step, [7] * sum(plan.samples), candidates=found)


@pytest.mark.parametrize("is_search", [False, True], ids=["eight choices", "eight beams"])
def test_the_prompts_pages_are_held_once(is_search):
    """42 tokens: ten full pages of 4, and one with two tokens, which each of the eight needs for itself."""
    cache = KVCache(200, 4, prefix_caching=False)
    scheduler = Scheduler(cache, max_rows=8, max_step_tokens=100)
    assert cache.pool.num_used == 0
    scheduler.add(search("a", 42, 8, max_tokens=5) if is_search else plain("a", 42, max_tokens=5, n=8))
    used, num_computed = [], 0
    while not scheduler.is_idle:
        plan = scheduler.plan().plan
        used.append(cache.pool.num_used)
        num_computed += sum(plan.counts)
        if len(used) == 2:
            assert sum(move.kind == "copy" for move in plan.moves) == 7, "the eighth writes to the page it shared"
        scheduler.commit(plan, result_of(plan, len(plan.rows) if is_search else 0))
    # The prompt; then a page for each of the eight behind ten that all share; then a second each for its 45th token.
    assert used[:2] == [11, 10 + 8] and used[-1] <= 10 + 8 * 2 < 8 * 12
    assert cache.pool.num_used == 0
    # The prompt once, and each token of each answer but the last; a choice computes the prompt's last token for itself.
    assert num_computed == 42 + 8 * 4 + (0 if is_search else 7)


def test_a_search_sits_out_a_step_and_nobody_else_does():
    scheduler = Scheduler(KVCache(100, 4), max_rows=8, max_step_tokens=100)
    scheduler.add(plain("a", 4, max_tokens=20))
    scheduler.add(search("s", 6, 3))
    flying = [scheduler.plan().plan]
    rows = []
    for _ in range(8):
        flying.append(scheduler.plan().plan)
        rows.append(len(flying[-1].rows))
        plan = flying.pop(0)
        scheduler.commit(plan, result_of(plan, len(plan.rows) - 1))
    # The search's scores are on their way in every second step; the other request is in every step.
    assert rows == [1, 4, 1, 4, 1, 4, 1, 4]


def test_an_abort_in_the_middle_of_a_search_frees_everything():
    cache = KVCache(100, 4)
    scheduler = Scheduler(cache, max_rows=8, max_step_tokens=100)
    scheduler.add(search("s", 6, 4))
    for num_beams in (1, 4, 4):
        plan = scheduler.plan().plan
        scheduler.commit(plan, result_of(plan, num_beams))
    assert not scheduler.abort("s", 2), "a beam is no choice before the end"
    plan = scheduler.plan().plan
    assert scheduler.abort("s") and scheduler.commit(plan, result_of(plan, 4)).deltas == []
    assert cache.pool.num_used == 0 and scheduler.is_idle and len(scheduler.rows.free) == 8


def test_a_search_needs_rows_for_all_of_its_beams_and_leaves_as_a_whole():
    cache = KVCache(10, 4, prefix_caching=False)
    scheduler = Scheduler(cache, max_rows=4, max_step_tokens=100)
    scheduler.add(plain("a", 12, max_tokens=24))
    scheduler.add(search("s", 6, 3, max_tokens=10))
    deltas = []
    for _ in range(60):
        if scheduler.is_idle:
            break
        plan = scheduler.plan().plan
        num_beams = sum(plan.samples) - scheduler.has("a")
        deltas += scheduler.commit(plan, result_of(plan, num_beams)).deltas
        assert len(scheduler.running) in (0, 1, 3, 4)
    ends = {(delta.request_id, delta.index): delta.finish for delta in deltas if delta.finish is not None}
    assert ends.keys() == {("a", 0), ("s", 0), ("s", 1), ("s", 2)}
    assert scheduler.num_preemptions > 0 and ends["s", 0].num_preemptions == scheduler.num_preemptions
    assert ends["a", 0].num_preemptions == 0, "it is older"


def order_of(scheduler: Scheduler) -> list[str]:
    """Whose first token comes when."""
    seen: list[str] = []
    while not scheduler.is_idle:
        plan = scheduler.plan().plan
        for delta in scheduler.commit(plan, result_of(plan)).deltas:
            if delta.request_id not in seen:
                seen.append(delta.request_id)
    return seen


def test_priorities_move_the_queue_and_nobody_overtakes_an_equal():
    for policy, order in (("fcfs", "abcde"), ("priority", "cebda")):
        scheduler = Scheduler(KVCache(100, 4), max_rows=1, max_step_tokens=100, policy=POLICIES[policy])
        for name, priority in zip("abcde", (5, 0, -1, 0, -1), strict=True):
            scheduler.add(plain(name, 4, max_tokens=2, priority=priority))
        assert "".join(order_of(scheduler)) == order


def test_when_pages_run_out_the_lowest_priority_leaves_and_of_equals_the_youngest():
    scheduler = Scheduler(KVCache(12, 4), max_rows=4, max_step_tokens=100, policy=POLICIES["priority"])
    for name, priority in (("a", 9), ("b", 1), ("c", 9), ("d", 0)):
        scheduler.add(plain(name, 8, max_tokens=16, priority=priority))
    left = []
    while not scheduler.is_idle:
        running = {request.id for request in scheduler.running}
        preemptions = scheduler.num_preemptions
        plan = scheduler.plan().plan
        if scheduler.num_preemptions > preemptions:
            left += sorted(running - {request.id for request in scheduler.running})
        scheduler.commit(plan, result_of(plan))
    assert left[:2] == ["c", "a"] and set(left) <= {"a", "c"}


def is_loop(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """By the words of the definition."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if len(tokens) >= length and tokens[-length:] == tokens[-size:] * params.min_count:
            return True
    return False


def test_loops_are_found_when_they_are_there_and_not_before():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    r, num_found = random.Random(seed), 0
    for _ in range(400):
        most = r.randrange(1, 8)
        params = RepetitionDetectionParams(
            max_pattern_size=most, min_pattern_size=r.randrange(most + 1), min_count=r.randrange(2, 5)
        )
        loops, tokens = Loops(params), []
        for _ in range(60):
            tokens.append(r.randrange(r.choice([1, 2, 3])))
            found = loops.add(tokens[-1])
            assert found == is_loop(tokens, params), (tokens, params)
            num_found += found
    assert num_found > 100
