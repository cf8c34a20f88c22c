"""Single rules of the scheduler, each in the smallest case that shows it."""

from typing import Any

from octavo.cache import KVCache
from octavo.messages import GenerateRequest, PoolingParams, SamplingParams, StepPlan, StepResult
from octavo.schedule import Scheduler


def request(name: str, prompt_len: int, max_tokens: int = 8, n: int = 1) -> GenerateRequest:
    prompt = [ord(name) * 1000 + i for i in range(prompt_len)]
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0, n=n), stop_ids=[])


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [7] * sum(plan.samples))


def test_decodes_and_a_prefill_chunk_share_a_step():
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=6)
    scheduler.add(request("a", 3))
    plan = scheduler.plan().plan
    scheduler.commit(plan, result_of(plan))
    scheduler.add(request("b", 20))
    plan = scheduler.plan().plan
    assert (plan.starts, plan.counts, plan.samples) == ([3, 0], [1, 5], [True, False])


def test_the_next_step_is_planned_while_one_is_in_flight():
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
    scheduler.add(request("a", 3))
    first = scheduler.plan().plan
    second = scheduler.plan().plan  # the token that the first samples is not known here
    assert (second.starts, second.counts, second.samples) == ([3], [1], [True])
    scheduler.commit(first, result_of(first))
    (delta,) = scheduler.commit(second, result_of(second)).deltas
    assert delta.token_ids == [7]


def test_a_waiting_head_says_what_it_waits_for():
    scheduler = Scheduler(KVCache(8, 4), max_rows=2, max_step_tokens=100)
    scheduler.add(request("a", 12))
    scheduler.add(request("b", 24))
    scheduler.plan()
    assert scheduler.head_waits_for == "pages"
    scheduler = Scheduler(KVCache(100, 4), max_rows=1, max_step_tokens=100)
    scheduler.add(request("a", 12))
    scheduler.add(request("b", 12))
    scheduler.plan()
    assert scheduler.head_waits_for == "rows"
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=12)
    scheduler.add(request("a", 12))
    scheduler.add(request("b", 12))
    scheduler.plan()
    assert scheduler.head_waits_for == "budget"


def test_a_small_request_does_not_overtake_a_large_one():
    scheduler = Scheduler(KVCache(8, 4), max_rows=4, max_step_tokens=100)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 16))
    scheduler.add(request("c", 2))
    plan = scheduler.plan().plan
    assert len(plan.rows) == 1 and len(scheduler.waiting) == 2


def test_requests_of_one_step_share_the_pages_of_an_equal_prefix():
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=100)
    prompt = list(range(17))
    for name in "ab":
        scheduler.add(GenerateRequest(name, prompt, SamplingParams(seed=0), stop_ids=[]))
    plan = scheduler.plan().plan
    assert plan.counts == [17, 1]
    first, second = plan.enters
    assert first.pages[0][:4] == second.pages[0][:4] and first.pages[0][4] != second.pages[0][4]


def test_choices_share_the_prompt_and_copy_the_page_they_write_to():
    cache = KVCache(100, 4)
    scheduler = Scheduler(cache, max_rows=4, max_step_tokens=100)
    scheduler.add(request("a", 10, n=3))
    plan = scheduler.plan().plan
    assert plan.counts == [10] and len(plan.enters) == 3
    assert cache.pool.num_used == 3  # three choices, one prompt
    scheduler.commit(plan, result_of(plan))
    plan = scheduler.plan().plan
    assert plan.starts == [10, 9, 9]
    assert [(move.kind, move.source) for move in plan.moves] == [("copy", 2), ("copy", 2)]


def test_an_abort_frees_row_and_pages_before_the_next_step():
    cache = KVCache(100, 4)
    scheduler = Scheduler(cache, max_rows=1, max_step_tokens=100)
    scheduler.add(request("a", 30))
    scheduler.plan()
    scheduler.add(request("b", 30))
    assert scheduler.abort("a") and not scheduler.abort("a")
    assert cache.pool.num_used == 0
    plan = scheduler.plan().plan
    assert [enter.row for enter in plan.enters] == [0] and plan.leaves == [0]


def test_swapped_tokens_are_not_computed_again():
    cache = KVCache(6, 4, num_host_pages=10)
    scheduler = Scheduler(cache, max_rows=2, max_step_tokens=100)
    scheduler.add(request("a", 11, max_tokens=8))
    scheduler.add(request("b", 10, max_tokens=4))
    computed = 0
    moves = []
    while not scheduler.is_idle:
        plan = scheduler.plan().plan
        computed += sum(plan.counts)
        moves += [move.kind for move in plan.moves]
        scheduler.commit(plan, result_of(plan))
    assert scheduler.num_preemptions == 1 and moves == ["out"] * 3 + ["in"] * 3
    assert computed == (11 + 7) + (10 + 3)


def test_waiting_requests_cost_a_step_nothing():
    """Not a timing: the head alone is looked at, however long the queue is."""
    scheduler = Scheduler(KVCache(100, 4), max_rows=1, max_step_tokens=100)
    for i in range(1000):
        scheduler.add(GenerateRequest(f"r{i}", [1, 2, 3], SamplingParams(seed=0), stop_ids=[]))

    class Watched(dict[int, Any]):
        num_looks = 0

        def get(self, key: int, default: Any = None) -> Any:
            Watched.num_looks += 1
            return super().get(key, default)

    scheduler.waiting._waiting = Watched(scheduler.waiting._waiting)
    scheduler.plan()
    scheduler.plan()
    assert Watched.num_looks <= 4 and len(scheduler.waiting) == 999


def embedding(name: str, prompt: list[int], needs_one_step: bool = True) -> GenerateRequest:
    params = SamplingParams(max_tokens=1, seed=0)
    return GenerateRequest(name, prompt, params, [], pooling=PoolingParams("mean"), needs_one_step=needs_one_step)


def test_what_must_be_computed_whole_waits_for_a_step_with_room_and_nobody_overtakes_it():
    scheduler = Scheduler(KVCache(100, 4), max_rows=8, max_step_tokens=10)
    scheduler.add(request("a", 4, max_tokens=2))
    scheduler.add(embedding("e", list(range(9))))
    scheduler.add(request("b", 1))
    plan = scheduler.plan().plan
    assert (plan.counts, scheduler.head_waits_for) == ([4], "budget")
    scheduler.commit(plan, result_of(plan))
    plan = scheduler.plan().plan  # one token of a, and all nine of e: there is no room left for b
    assert (plan.counts, plan.samples) == ([1, 9], [True, True])
    deltas = scheduler.commit(plan, StepResult(plan.step, [7], [b"vector"])).deltas
    assert [(delta.request_id, delta.token_ids, delta.vector) for delta in deltas] == [
        ("a", [7], b""),
        ("e", [], b"vector"),
    ]
    assert deltas[1].finish is not None and deltas[1].finish.reason == "stop"
    assert not scheduler.has("e")


def test_what_must_be_computed_whole_takes_nothing_from_the_prefix_cache_and_offers_its_pages():
    cache = KVCache(100, 4)
    scheduler = Scheduler(cache, max_rows=8, max_step_tokens=100)
    prompt = list(range(17))
    for at, needs_one_step in enumerate((True, True, False)):
        scheduler.add(embedding(f"e{at}", prompt, needs_one_step))
        plan = scheduler.plan().plan
        assert plan.counts == [17 if needs_one_step else 1]
        (delta,) = scheduler.commit(plan, StepResult(plan.step, [], [b"v"])).deltas
        assert delta.finish is not None and delta.finish.num_cached_tokens == (0 if needs_one_step else 16)
    assert cache.pool.num_used == 0


def test_a_model_that_keeps_nothing_needs_no_pages():
    scheduler = Scheduler(KVCache(0, 4), max_rows=2, max_step_tokens=30)
    for name in "abc":
        scheduler.add(embedding(name, list(range(8))))
    plan = scheduler.plan().plan
    assert (plan.counts, scheduler.head_waits_for) == ([8, 8], "rows")
    assert all(entering.pages == [[]] for entering in plan.enters)
    assert scheduler.plan().plan.is_empty  # they are sated: nothing more is computed of them
    scheduler.commit(plan, StepResult(plan.step, [], [b"a", b"b"]))
    plan = scheduler.plan().plan
    (delta,) = scheduler.commit(plan, StepResult(plan.step, [], [b"c"])).deltas
    assert delta.vector == b"c" and scheduler.is_idle
