"""Single rules of the scheduler, each in the smallest case that shows it."""

from typing import Any

from octavo.cache import KVCache
from octavo.messages import GenerateRequest, PoolingParams, SamplingParams, StepPlan, StepResult
from octavo.schedule import POLICIES, Scheduler
from octavo.schedule.scheduler import MAX_SIT_OUT


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
    assert Watched.num_looks <= 8 and len(scheduler.waiting) == 999


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


def late_result(plan: StepPlan, *late_rows: int) -> StepResult:
    late = [at for at, row in enumerate(plan.rows) if row in late_rows]
    return StepResult(plan.step, [7] * sum(plan.samples), late=late)


def test_a_row_whose_mask_is_late_samples_the_same_position_again():
    """The step that was in flight meanwhile does not count either. Its neighbour is in every plan."""
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
    scheduler.add(request("a", 3, max_tokens=50))
    scheduler.add(request("b", 3, max_tokens=50))
    plans = [scheduler.plan().plan]
    row, slow = plans[0].rows
    sampled = []
    for late_steps in (1, 1, 0, 0):
        plans.append(scheduler.plan().plan)
        deltas = scheduler.commit(plans[-2], late_result(plans[-2], *[slow] * late_steps)).deltas
        assert [delta.request_id for delta in deltas] == (
            ["a"] if late_steps or slow not in plans[-2].rows else ["a", "b"]
        )
        assert row in plans[-1].rows
        sampled.append(dict(zip(plans[-1].rows, plans[-1].starts, strict=True)).get(slow))
    # Planned ahead, behind a token that does not count; then not while that is in flight; then the last token of its prompt again.
    assert sampled == [3, None, 2, 3]


def test_a_late_row_sits_out_longer_each_time_and_not_at_all_alone():
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
    scheduler.add(request("a", 3, max_tokens=100))
    scheduler.add(request("b", 3, max_tokens=50))
    pauses, pause = [], 0
    while len(pauses) < 7:
        plan = scheduler.plan().plan
        _, *slow = plan.rows
        scheduler.commit(plan, late_result(plan, *slow))
        pauses += [pause] if slow else []
        pause = 0 if slow else pause + 1
    assert pauses == [0, 0, 1, 2, 4, MAX_SIT_OUT, MAX_SIT_OUT]
    scheduler.abort("a")
    for _ in range(3):
        plan = scheduler.plan().plan
        assert plan.starts == [2] and plan.counts == [1]
        scheduler.commit(plan, late_result(plan, *plan.rows))
    plan = scheduler.plan().plan
    (delta,) = scheduler.commit(plan, result_of(plan)).deltas
    assert delta.token_ids == [7] and scheduler.plan().plan.starts == [3]


def test_a_late_row_copies_the_page_that_it_shares():
    """Its last token is computed again. Meanwhile its page was published, and another request may read it."""
    cache = KVCache(100, 4)
    scheduler = Scheduler(cache, max_rows=4, max_step_tokens=16)
    scheduler.add(request("a", 8))
    plan = scheduler.plan().plan
    before = plan.enters[0].pages[0][:]
    scheduler.commit(plan, late_result(plan, *plan.rows))
    plan = scheduler.plan().plan
    assert (plan.starts, plan.counts, plan.samples) == ([7], [1], [True])
    (move,) = plan.moves
    assert (
        (move.kind, move.source) == ("copy", before[1]) and plan.page_entries == [1] and plan.page_ids == [move.target]
    )


def part(name: str, number: int, prompt_len: int = 4, **options: Any) -> GenerateRequest:
    prompt = [ord(name) * 1000 + 100 * number + i for i in range(prompt_len)]
    priority = options.pop("priority", 0)
    params = SamplingParams(**{"max_tokens": 100, "seed": 0, **options})
    return GenerateRequest(f"{name}{number}", prompt, params, [], response_id=name, part=number, priority=priority)


def names(scheduler: Scheduler) -> list[str]:
    return [request.id for request in scheduler.running]


def test_a_lead_takes_the_row_of_the_youngest_that_gives_way():
    scheduler = Scheduler(KVCache(100, 4), max_rows=3, max_step_tokens=100)
    for number in range(5):
        scheduler.add(part("a", number))
    plan = scheduler.plan().plan
    scheduler.commit(plan, result_of(plan))
    assert names(scheduler) == ["a0", "a1", "a2"]
    scheduler.add(part("b", 0))
    scheduler.add(part("b", 1))
    planned = scheduler.plan()
    assert [each.request.id for each in planned.returned] == ["a2"] and [each.id for each in planned.admitted] == ["b0"]
    assert names(scheduler) == ["a0", "b0", "a1"], "both primaries, then those that give way"
    scheduler.commit(planned.plan, result_of(planned.plan))
    assert not scheduler.plan().returned, "a second sequence takes no row from another"


def test_a_lead_is_computed_before_those_that_give_way():
    """The budget of a step goes to primaries first, also where a younger sequence has run for longer."""
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=8)
    scheduler.add(part("a", 0, prompt_len=4))
    scheduler.add(part("a", 1, prompt_len=40))
    plan = scheduler.plan().plan
    assert plan.counts == [4, 4]
    scheduler.commit(plan, result_of(plan))
    scheduler.add(part("b", 0, prompt_len=6))
    planned = scheduler.plan()
    assert [(request.id, count) for request, count in zip(planned.requests, planned.plan.counts, strict=True)] == [
        ("a0", 1),
        ("b0", 6),
        ("a1", 1),
    ]


def test_none_gives_way_in_vain():
    """A primary that needs more pages than all that give way hold: they go on, and it waits for the pages of an older primary."""
    scheduler = Scheduler(KVCache(12, 4, prefix_caching=False), max_rows=4, max_step_tokens=100)
    scheduler.add(part("a", 0, prompt_len=24))
    for number in (0, 1):
        scheduler.add(part("b", number))
    plan = scheduler.plan().plan
    scheduler.commit(plan, result_of(plan))
    scheduler.add(part("c", 0, prompt_len=44))
    planned = scheduler.plan()
    assert not planned.returned and (planned.head.id, planned.head_waits_for) == ("c0", "pages")
    scheduler.commit(planned.plan, result_of(planned.plan))
    scheduler.abort("a0")
    scheduler.abort("b0")
    planned = scheduler.plan()  # b1 is primary now, and became primary after c0 had come
    assert [each.request.id for each in planned.returned] == ["b1"] and [each.id for each in planned.admitted] == ["c0"]


def test_a_first_sequence_is_never_preempted_to_admit_another_whatever_its_priority():
    scheduler = Scheduler(KVCache(100, 4), max_rows=2, max_step_tokens=100, policy=POLICIES["priority"])
    scheduler.add(part("a", 0, priority=5))
    scheduler.add(part("b", 0, priority=5))
    plan = scheduler.plan().plan
    scheduler.commit(plan, result_of(plan))
    scheduler.add(part("c", 0, priority=-5))
    planned = scheduler.plan()
    assert not planned.returned and planned.head_waits_for == "rows"


def test_a_priority_takes_rows_from_further_sequences_of_the_same_or_a_later_one():
    scheduler = Scheduler(KVCache(100, 4), max_rows=2, max_step_tokens=100, policy=POLICIES["priority"])
    for number in (0, 1):
        scheduler.add(part("a", number, priority=0))
    plan = scheduler.plan().plan
    scheduler.commit(plan, result_of(plan))
    scheduler.add(part("l", 0, priority=1))
    assert not scheduler.plan().returned
    scheduler.add(part("s", 0, priority=0))
    planned = scheduler.plan()
    assert [each.request.id for each in planned.returned] == ["a1"]
    assert [each.id for each in planned.admitted] == ["s0"]


def test_a_search_gives_way_as_a_whole_and_takes_all_its_rows_at_once():
    beams = {"n": 2, "best_of": 2, "use_beam_search": True, "temperature": 0.0, "max_tokens": 20}
    scheduler = Scheduler(KVCache(100, 4), max_rows=4, max_step_tokens=100)
    scheduler.add(part("a", 0))
    for number in (1, 2):
        scheduler.add(part("a", number, **beams) if number == 1 else part("a", number))
    scheduler.plan()
    assert names(scheduler) == ["a0", "a1", "a1", "a2"]
    scheduler.add(part("b", 0, **beams))
    planned = scheduler.plan()
    assert [each.request.id for each in planned.returned] == ["a2", "a1"]
    assert names(scheduler) == ["a0", "b0", "b0"], "the third row is left: none enters in the step of a preemption"


def test_choices_that_find_no_row_wait_and_find_their_prompt_in_the_cache():
    scheduler = Scheduler(KVCache(100, 4), max_rows=2, max_step_tokens=100)
    scheduler.add(request("a", 9, max_tokens=2, n=4))
    planned = scheduler.plan()
    assert [each.index for each in planned.forked] == [1] and [each.index for each in planned.queued] == [2, 3]
    computed, cached = 0, set()
    while not scheduler.is_idle:
        computed += planned.num_tokens
        for delta in scheduler.commit(planned.plan, result_of(planned.plan)).deltas:
            cached |= {delta.finish.num_cached_tokens} if delta.finish is not None else set()
        planned = scheduler.plan() if not scheduler.is_idle else planned
    assert computed == 9 + 1 + 2 * (1 + 1) + 2 * (1 - 1) + 2, "the prompt is computed once"
    assert cached == {0}, "its own choices are not the cache's merit"


def test_the_queue_shows_each_request_once_wherever_it_was():
    """One that becomes primary while it waits has another place from then on."""
    scheduler = Scheduler(KVCache(100, 4), max_rows=1, max_step_tokens=100)
    for name in "ab":
        for number in range(3):
            scheduler.add(part(name, number))
    scheduler.plan()
    waiting = scheduler.waiting
    assert [each.id for each in waiting.first(10)] == ["b0", "a1", "b1", "a2", "b2"]
    scheduler.abort("a0")
    assert [each.id for each in waiting.first(10)] == ["b0", "a1", "b1", "a2", "b2"]
    scheduler.abort("b0")
    assert [each.id for each in waiting.first(10)] == ["a1", "b1", "a2", "b2"]
    assert [waiting.place(each) for each in waiting.first(10)] == [1, 2, 3, 4] and waiting.primaries.num_requests == 2


def test_a_queue_that_never_empties_forgets_old_places():
    scheduler = Scheduler(KVCache(100, 4), max_rows=1, max_step_tokens=100)
    scheduler.add(part("z", 0))
    scheduler.plan()
    for at in range(300):
        for number in range(6):
            scheduler.add(part(chr(1000 + at), number))
        if at > 2:
            for number in range(6):
                scheduler.abort(f"{chr(1000 + at - 3)}{number}")
        assert len(scheduler.waiting._heap) <= 200, "of 18 that wait, and 1,800 that did"
    head = scheduler.waiting.head()
    assert head is not None and head.id == f"{chr(1000 + 297)}0"
