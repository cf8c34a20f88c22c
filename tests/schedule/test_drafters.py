"""Drafters against plain searches through the text, and lengths against what pays."""

import random
from collections import deque

import msgspec
import pytest

from octavo.cache import KVCache
from octavo.messages import FROM_GRAMMAR, FROM_MODEL, GenerateRequest, SamplingParams, StepPlan, StepResult
from octavo.messages.speculation import SpeculationSettings
from octavo.schedule import Scheduler
from octavo.schedule.drafts import ngram, suffix
from octavo.schedule.drafts.base import Offer
from octavo.schedule.drafts.grammar import GrammarDrafter
from octavo.schedule.drafts.lengths import CostSpeculation
from octavo.schedule.drafts.luck import Luck
from octavo.schedule.drafts.model import ModelDrafter
from octavo.schedule.drafts.ngram import NGramDrafter
from octavo.schedule.drafts.suffix import Automaton, SuffixDrafter
from octavo.schedule.request import Request
from octavo.schedule.step_costs import StepCosts, StepShape

DRAFTERS = [NGramDrafter, SuffixDrafter]


def longest_repeated_end(text: list[int]) -> int:
    for size in range(len(text) - 1, 0, -1):
        if any(text[at : at + size] == text[-size:] for at in range(len(text) - size)):
            return size
    return 0


def test_the_automaton_finds_the_longest_end_that_came_before():
    for seed in range(60):
        r = random.Random(seed)
        automaton, text = Automaton(), []
        for _ in range(r.randrange(2, 60)):
            token = r.randrange(r.choice([2, 3, 8]))
            text.append(token)
            automaton.add(token)
            size, place = automaton.longest()
            assert size == longest_repeated_end(text), text
            assert not size or (text[place - size : place] == text[-size:] and place < len(text)), text


@pytest.mark.parametrize("make", DRAFTERS)
def test_what_it_drafts_does_not_depend_on_when_it_is_asked(make):
    for seed in range(40):
        r = random.Random(seed)
        tokens = [r.randrange(4) for _ in range(60)]
        prediction = [r.randrange(4) for _ in range(r.choice([0, 0, 12]))]
        prompt_len = r.randrange(1, 30)
        often, once = make(prompt_len, prediction), make(prompt_len, prediction)
        for end in range(prompt_len, 61):
            often.learn(tokens[:end])
            often.drafts(r.randrange(1, 9))
        once.learn(tokens)
        assert often.drafts(8) == once.drafts(8)


@pytest.mark.parametrize("make", DRAFTERS)
def test_a_copy_is_drafted_and_a_loop_goes_on(make):
    drafter = make(6)
    drafter.learn([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert drafter.drafts(3).tokens == [4, 5, 6]
    loop = make(4)
    loop.learn([7, 8, 7, 8])
    assert loop.drafts(5).tokens == [7, 8, 7, 8, 7]
    unknown = make(3)
    unknown.learn([1, 2, 3])
    assert unknown.drafts(5) == Offer([], [])


@pytest.mark.parametrize("make", DRAFTERS)
def test_a_prediction_comes_first_and_is_found_again(make):
    prediction = [10, 11, 12, 13, 14, 15, 16]
    drafter = make(2, prediction)
    drafter.learn([1, 2])
    assert drafter.drafts(3).tokens == [10, 11, 12]
    assert drafter.drafts(99).tokens == prediction, "it ends where the prediction does"
    drafter.learn([1, 2, 10, 11, 50])
    assert drafter.drafts(3).tokens == []
    drafter.learn([1, 2, 10, 11, 50, 13, 14])
    assert drafter.drafts(9).tokens == [15, 16]


@pytest.mark.parametrize("make", DRAFTERS)
def test_a_request_that_waits_holds_nothing(make):
    drafter = make(3, list(range(1000)))
    assert not drafter._text
    drafter.learn([1, 2, 3])
    assert len(drafter._text) == 1004


@pytest.mark.parametrize(("make", "module"), [(NGramDrafter, ngram), (SuffixDrafter, suffix)])
def test_memory_is_bounded(make, module, monkeypatch):
    monkeypatch.setattr(module, "MAX_TEXT", 50)
    r = random.Random(1)
    tokens = [r.randrange(1000) for _ in range(180)]
    drafter = make(120, list(range(90)))
    for end in range(120, 181):
        drafter.learn(tokens[:end])
        assert len(drafter._text) <= 151
    again = tokens + tokens[140:145]
    drafter.learn(again)
    assert drafter.drafts(3).tokens == tokens[145:148]


def test_luck_follows_what_happens():
    luck = Luck()
    before = luck.chance(3)
    for _ in range(30):
        luck.note(3, True)
        luck.note(20, False)
    assert before < 0.5 and luck.chance(3) > 0.9 and luck.chance(2) > 0.9, "2 and 3 are one class"
    assert luck.chance(20) < 0.2 and luck.chance(5) == Luck().chance(5)


class Certain:
    """Offers the same tokens with the same chances at any time."""

    def __init__(self, *chances: float) -> None:
        self._chances = list(chances)

    def learn(self, tokens) -> None:
        pass

    def drafts(self, most: int) -> Offer:
        return Offer([5] * len(self._chances[:most]), self._chances[:most])

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        pass


def request_with(drafter: Certain | None, sequence: int = 0, prompt_len: int = 10) -> Request:
    params = SamplingParams(seed=0, max_tokens=100)
    request = Request(sequence, GenerateRequest(str(sequence), [1] * prompt_len, params, []), 0)
    request.drafter, request.computed = drafter, prompt_len
    return request


def lengths(costs: StepCosts | None, num_rows: int, *drafters: Certain, most: int = 8, room: int = 15) -> list[int]:
    rows = [(at, request_with(drafter, at)) for at, drafter in enumerate(drafters)]
    shape = StepShape(num_rows, 0, 10 * num_rows, 0)
    found = {
        draft.at: len(draft.tokens)
        for draft in CostSpeculation(SpeculationSettings("ngram", most)).choose(rows, shape, costs, room)
    }
    return [found.get(at, 0) for at in range(len(drafters))]


CPU = StepCosts(0.003, 0.001, 0.0005, 0.0, 0.0)


def test_length_by_cost_and_chance():
    """A token pays if it brings more per second than the step has: by 1.1 × 1 token in 4 ms, and a draft of 1 ms, from 0.275 on."""
    assert lengths(CPU, 1, Certain(0.25, 1.0)) == [0]
    assert lengths(CPU, 1, Certain(0.3, 0.5)) == [1], "both together have a chance of 0.15"
    assert lengths(CPU, 1, Certain(*[0.99] * 20)) == [8]
    assert lengths(CPU, 1, Certain(*[0.95] * 20), most=3) == [3]
    assert lengths(CPU, 1, Certain(*[0.95] * 20), room=2) == [2]
    assert lengths(None, 1, Certain(1.0)) == [0], "costs are not known"
    free = StepCosts(0.003, 0.0, 0.0, 0.0, 0.0)
    assert lengths(free, 1, Certain(*[0.01] * 20)) == [0], "nothing is free"


def test_at_many_rows_nothing_is_drafted():
    few = lengths(CPU, 8, *[Certain(*[0.95] * 9)] * 8, room=40)
    assert 0 < sum(few) < 8 * 8, "some pay, and not all of them"
    assert lengths(CPU, 64, *[Certain(*[1.0] * 9)] * 4) == [0] * 4
    speculation = CostSpeculation(SpeculationSettings("ngram"))
    good = [request_with(Certain(*[0.95] * 9), at) for at in range(64)]
    shape, more = StepShape(8, 0, 0, 0), StepShape(9, 0, 0, 0)
    assert speculation.wants_drain(16, good[:8], shape, CPU) and speculation.wants_drain(17, good[:8], shape, CPU)
    assert speculation.wants_drain(16, good[:9], more, CPU)
    assert not speculation.wants_drain(17, good[:9], more, CPU), "more rows are asked now and then"
    assert not speculation.wants_drain(16, good, StepShape(64, 0, 0, 0), CPU)
    assert not speculation.wants_drain(16, good[:8], shape, None), "costs are not known"


def test_a_plan_waits_for_a_result_only_where_drafts_would_pay():
    """By what is known while a step is on its way."""
    speculation, shape = CostSpeculation(SpeculationSettings("ngram")), StepShape(2, 0, 0, 0)
    for number in range(20):
        assert not speculation.wants_drain(number, [request_with(Certain(), at) for at in range(2)], shape, CPU)
        assert not speculation.wants_drain(number, [request_with(Certain(0.05), at) for at in range(2)], shape, CPU)
    rows = [request_with(Certain(), 0), request_with(Certain(0.95), 1)]
    assert speculation.wants_drain(3, rows, shape, CPU)
    rows[1].drafter = None
    assert not speculation.wants_drain(3, rows, shape, CPU), "it does not speculate"


def test_drafts_of_a_fixed_length_wait_for_no_costs():
    fixed, shape = CostSpeculation(SpeculationSettings("ngram", is_adaptive=False)), StepShape(1, 0, 0, 0)
    assert fixed.wants_drain(3, [request_with(Certain(0.05), 0)], shape, None)
    assert not fixed.wants_drain(3, [request_with(Certain(), 0)], shape, None), "there is none"
    model = CostSpeculation(SpeculationSettings("draft_model", is_adaptive=False))
    assert model.wants_drain(3, [request_with(by_model(0.1), 0)], shape, None)
    dear = StepCosts(0.0001, 0.001, 0.0005, 0.0, 0.0)
    assert fixed.wants_drain(3, [request_with(Certain(0.05), 0)], shape, dear), "whatever they cost"


def test_a_fixed_length_is_drafted_where_steps_overlap_and_a_row_is_dear():
    """As a small model on a GPU: a step of two rows takes nearly twice as long as one of a row, by what was measured."""
    speculation = CostSpeculation(SpeculationSettings("ngram", 7, is_adaptive=False))
    scheduler = Scheduler(KVCache(16, 16), max_rows=4, max_step_tokens=64, speculation=speculation)
    scheduler.learn(StepCosts(0.0001, 0.001, 0.0005, 0.0, 0.0))
    answer = list(range(100, 140))
    params = SamplingParams(seed=0, max_tokens=len(answer), prediction_ids=tuple(answer))
    scheduler.add(GenerateRequest("a", [1, 2, 3], params, []))
    in_flight: deque[StepPlan] = deque()
    tokens: list[int] = []
    while scheduler.has_work:
        planned = scheduler.plan()
        if not planned.is_empty:
            in_flight.append(planned.plan)
        for _ in range(len(in_flight) - (0 if planned.wants_drain or planned.is_empty else 1)):
            plan = in_flight.popleft()
            run = 1 + sum(len(draft.tokens) for draft in plan.drafts)
            result = StepResult(plan.step, answer[len(tokens) : len(tokens) + run], runs=[run] if plan.drafts else [])
            for delta in scheduler.commit(plan, result).deltas:
                tokens += delta.token_ids
    assert tokens == answer
    assert scheduler.num_steps < 10


def test_what_the_host_takes_counts():
    """Of 64 rows each has a draft that is worth its tokens, but not that the host plans while nothing is computed."""
    certain = [Certain(*[0.95] * 9)] * 64
    gpu = StepCosts(0.004, 0.0001, 0.0, 0.0, 0.0)
    assert sum(lengths(gpu, 64, *certain, room=64)) == 64
    assert sum(lengths(msgspec.structs.replace(gpu, host_row=0.00002), 64, *certain, room=64)) == 64
    assert sum(lengths(msgspec.structs.replace(gpu, host=0.006), 64, *certain, room=64)) == 0
    speculation, shape = CostSpeculation(SpeculationSettings("ngram")), StepShape(64, 0, 0, 0)
    rows = [request_with(each, at) for at, each in enumerate(certain)]
    assert speculation.wants_drain(16, rows, shape, gpu)
    assert not speculation.wants_drain(16, rows, shape, msgspec.structs.replace(gpu, host=0.006)), (
        "not even if all were right"
    )


def test_what_steps_take_beyond_their_costs_counts():
    """A token for each of 64 rows does not pay by the sum of the costs, but steps without drafts take longer than it says."""
    certain = [Certain(*[0.95] * 9)] * 64
    cpu = StepCosts(0.002, 0.0003, 0.0, 0.0, 0.0)
    assert sum(lengths(cpu, 64, *certain, room=64)) == 0
    assert sum(lengths(msgspec.structs.replace(cpu, beyond_row=0.0002), 64, *certain, room=64)) == 64
    assert sum(lengths(msgspec.structs.replace(cpu, beyond=0.0128), 64, *certain, room=64)) == 64


def test_nothing_is_drafted_where_the_last_fit_calls_tokens_free():
    """Costs that were fitted to disturbed steps may be of prompts or positions alone, while steps take longer than they say. A prompt of one
    token looks back at nothing."""
    for costs in (StepCosts(0.0, 0.0, 1e-4, 0.0, 0.0), StepCosts(0.0, 0.0, 0.0, 1e-4, 0.0)):
        for more in (
            costs,
            msgspec.structs.replace(costs, beyond=0.004),
            msgspec.structs.replace(costs, beyond_row=0.001),
        ):
            speculation, first = CostSpeculation(SpeculationSettings("ngram", 8)), request_with(Certain(*[0.95] * 9), 0)
            first.computed = 0
            rows = [(0, first), (1, request_with(Certain(*[0.95] * 9), 1))]
            assert speculation.choose(rows, StepShape(2, 0, 10, 0), more, 64) == []
            assert not speculation.wants_drain(16, [request for _, request in rows], StepShape(2, 0, 10, 0), more)


def test_of_many_rows_some_are_asked_first_and_less_often_in_vain():
    costs, shape = StepCosts(0.004, 0.0001, 0.0, 0.0, 0.0), StepShape(64, 0, 640, 0)
    asked: list[Certain] = []

    class Asked(Certain):
        def drafts(self, most: int) -> Offer:
            asked.append(self)
            return super().drafts(most)

    speculation = CostSpeculation(SpeculationSettings("ngram"))
    poor = [(at, request_with(Asked(0.01), at)) for at in range(64)]
    good = [(at, request_with(Asked(0.95), at)) for at in range(64)]
    [poor_rows, good_rows] = [[request for _, request in rows] for rows in (poor, good)]
    assert not any(speculation.wants_drain(number, poor_rows, shape, costs) for number in range(1, 600))
    assert len(asked) == 16 * len([16, 32, 64, 128, 256, 384, 512])
    asked.clear()
    assert not speculation.choose(poor, shape, costs, 64)
    assert len(asked) == 16
    assert not speculation.wants_drain(16, good_rows, shape, costs), "they paid too seldom"
    assert len(speculation.choose(good, shape, costs, 64)) == 64
    assert speculation.wants_drain(16, good_rows, shape, costs), "what paid is looked for again soon"
    asked.clear()
    fewer = StepShape(32, 0, 320, 0)
    assert not any(speculation.wants_drain(number, poor_rows[:32], fewer, costs) for number in range(1, 600))
    assert len(asked) == 16 * len(range(16, 600, 16)), "of 32 rows, as often as ever"
    for _ in range(5):
        assert not speculation.choose(poor[:1], StepShape(1, 0, 10, 0), costs, 64)
    assert speculation.wants_drain(3, good_rows[:1], StepShape(1, 0, 10, 0), costs), "one row is asked every time"


def test_the_likelier_row_drafts_more():
    short, long = lengths(CPU, 4, Certain(*[0.6] * 9), Certain(*[0.97] * 9))
    assert 0 <= short < long


def test_long_contexts_make_drafts_dearer():
    dear = StepCosts(0.003, 0.001, 0.0005, 0.0005, 0.0)
    assert lengths(dear, 1, Certain(*[0.5] * 9)) < lengths(CPU, 1, Certain(*[0.5] * 9))


def by_model(chance: float, num_followed: int = 9, length: int = 10) -> ModelDrafter:
    drafter = ModelDrafter()
    drafter.state = (chance, 8, length, num_followed)
    return drafter


def depths(costs: StepCosts, num_rows: int, *drafters: ModelDrafter, room: int = 15, max_len: int = 0) -> list[int]:
    rows = [(at, request_with(drafter, at)) for at, drafter in enumerate(drafters)]
    settings = SpeculationSettings("draft_model", 8, model="small", max_len=max_len)
    chosen = CostSpeculation(settings).choose(rows, StepShape(num_rows, 0, 10 * num_rows, 0), costs, room)
    assert all({*draft.tokens} == {FROM_MODEL} for draft in chosen)
    found = {draft.at: len(draft.tokens) for draft in chosen}
    return [found.get(at, 0) for at in range(len(drafters))]


WITH_MODEL = StepCosts(0.020, 0.001, 0.0005, 0.0, 0.0, draft=0.2)


def test_depth_by_cost_and_luck():
    """A pass costs 0.2 × (20 + 1) ms and its token 1 ms in the step, against 21 ms for a token: it pays from a chance of 0.28 on."""
    assert depths(WITH_MODEL, 1, by_model(0.26)) == [0]
    assert depths(WITH_MODEL, 1, by_model(0.3)) == [1]
    assert depths(WITH_MODEL, 1, by_model(0.99)) == [8]
    assert depths(WITH_MODEL, 1, by_model(0.8)) < depths(WITH_MODEL, 1, by_model(0.9))
    assert depths(WITH_MODEL, 1, by_model(0.99), room=3) == [3]
    assert depths(WITH_MODEL, 1, by_model(0.99), max_len=12) == [2], "the model cannot follow it further"
    assert depths(WITH_MODEL, 1, by_model(0.99), max_len=5) == [0]
    dear, unknown = (msgspec.structs.replace(WITH_MODEL, draft=share) for share in (0.9, 0.0))
    assert depths(dear, 1, by_model(1.0)) == [0], "as dear as the steps that it saves"
    assert depths(unknown, 1, by_model(1.0)) == [0]


def test_rows_share_a_pass():
    """One row of eight is not worth a pass; all of them are. At many rows, none is."""
    assert depths(WITH_MODEL, 8, by_model(0.8)) == [0]
    assert depths(WITH_MODEL, 8, *[by_model(0.8)] * 8, room=40) == [1] * 8
    good, bad = depths(WITH_MODEL, 2, by_model(0.95), by_model(0.3))
    assert bad < good
    assert depths(WITH_MODEL, 64, *[by_model(1.0)] * 64, room=64) == [0] * 64
    speculation = CostSpeculation(SpeculationSettings("draft_model", model="small"))
    assert speculation.wants_drain(16, [], StepShape(4, 0, 0, 0), WITH_MODEL)
    assert not speculation.wants_drain(16, [], StepShape(64, 0, 0, 0), WITH_MODEL)
    assert not speculation.wants_drain(16, [], StepShape(4, 0, 0, 0), CPU), "what a pass costs is not known"


def test_a_model_that_was_too_dear_is_tried_with_one_row():
    """By one token of the row that it can follow at the least cost. The others would have to be caught up with, for nothing most likely."""
    dear = msgspec.structs.replace(WITH_MODEL, draft=0.9, draft_low=0.9)
    rows = [by_model(0.7, followed) for followed in (0, 9, 4)]
    assert depths(dear, 3, *rows) == [0, 0, 0]
    faded = msgspec.structs.replace(dear, draft_low=0.3)
    assert depths(faded, 3, *rows) == [0, 1, 0]
    assert depths(faded, 3, by_model(0.1), by_model(0.1), by_model(0.1)) == [0, 0, 0], "it would not pay then either"
    cheap = msgspec.structs.replace(WITH_MODEL, draft=0.2, draft_low=0.1)
    assert depths(cheap, 3, *rows) == depths(WITH_MODEL, 3, *rows), "it pays as it is"
    speculation = CostSpeculation(SpeculationSettings("draft_model", model="small"))
    assert speculation.wants_drain(16, [], StepShape(6, 0, 0, 0), faded)
    assert not speculation.wants_drain(16, [], StepShape(6, 0, 0, 0), dear)


def test_a_long_way_to_catch_up_has_to_pay():
    """What it costs is shared by the drafts of the next steps, or by the few that a request has left."""
    far = [(0, request_with(by_model(0.35, 0, 600), prompt_len=600))]
    near = [(0, request_with(by_model(0.35, 599, 600), prompt_len=600))]
    speculation = CostSpeculation(SpeculationSettings("draft_model", model="small"))
    shape = StepShape(1, 0, 600, 0)
    assert speculation.choose(near, shape, WITH_MODEL, 15) and not speculation.choose(far, shape, WITH_MODEL, 15)
    cached = request_with(by_model(0.35, 0, 600), prompt_len=600)
    cached.num_cached = 590
    assert speculation.choose([(0, cached)], shape, WITH_MODEL, 15), "the prefix was computed by both"
    lucky = request_with(by_model(0.9, 0, 600), prompt_len=600)
    assert speculation.choose([(0, lucky)], shape, WITH_MODEL, 15)
    lucky.max_len = 604
    assert not speculation.choose([(0, lucky)], shape, WITH_MODEL, 15)


def test_a_models_luck():
    drafter = ModelDrafter()
    drafter.learn([1] * 10)
    first = drafter.chance
    for length in range(20, 120, 5):
        drafter.verified(length, 4, 4)
    assert drafter.chance > 0.95 and drafter.num_followed == 114
    for length in range(120, 220):
        drafter.verified(length, 4, 0)
    low = drafter.chance
    assert low < 0.05
    drafter.verified(221, 0, 0)
    assert drafter.chance == low and drafter.num_followed == 218, "it was asked, and had no draft"
    drafter.learn([1] * 222)
    assert low < drafter.chance < low + 0.02
    drafter.learn([1] * 1222)
    assert first - 0.01 < drafter.chance < first, "what was long ago is forgotten"
    other = ModelDrafter()
    other.state = drafter.state
    assert other.state == drafter.state and other.drafts(2) == Offer([FROM_MODEL] * 2, [drafter.chance] * 2)


def test_who_drafts():
    speculation = CostSpeculation(SpeculationSettings("suffix"))

    def drafts(**params) -> bool:
        source = GenerateRequest("a", [1], SamplingParams(**{"seed": 0, "max_tokens": 4, **params}), [])
        request = Request(0, source, 0)
        speculation.attach(request)
        return request.drafter is not None

    assert drafts() and drafts(prediction_ids=(4, 5)) and drafts(grammar="start: /a/")
    assert not drafts(use_speculation=False) and not drafts(use_beam_search=True)


def by_grammar(text: Offer) -> GrammarDrafter:
    class Text(Certain):
        def drafts(self, most: int) -> Offer:
            return text

    return GrammarDrafter(Text())


def test_the_text_comes_before_the_grammar_where_it_is_likely():
    nothing, likely, unlikely = Offer([], []), Offer([5, 6], [0.9, 0.9]), Offer([5, 6], [0.2, 0.9])
    assert by_grammar(likely).forced(3, 10, likely) is likely
    for offer in (nothing, unlikely):
        drafter = by_grammar(offer)
        assert drafter.forced(3, 10, offer) == Offer([FROM_GRAMMAR] * 3, [drafter.chance] * 3)
        assert drafter.forced(0, 10, offer) is offer


def test_a_grammar_that_leaves_a_choice_is_asked_less_often():
    drafter, nothing, length = by_grammar(Offer([], [])), Offer([], []), 10
    num_asked, pauses = 0, []
    while length < 1200:
        asked_at = length
        while not drafter.forced(4, length, nothing).tokens:
            length += 1
        pauses.append(length - asked_at)
        num_asked += 1
        drafter.verified(length, 0, 0, FROM_GRAMMAR)
    assert pauses[:16] == [0] * 16 and max(pauses) == 8 and num_asked < 300, pauses
    before = drafter.chance
    drafter.verified(length + 5, 4, 4, FROM_GRAMMAR)
    assert drafter.chance > before and drafter.forced(4, length + 5, nothing).tokens, "it is asked at once again"
    other = by_grammar(nothing)
    other.state = drafter.state
    assert other.state == drafter.state and other.forced(2, 999, nothing) == drafter.forced(2, 999, nothing)


def test_drafts_of_grammars_follow_what_they_were_worth():
    drafter = by_grammar(Offer([], []))
    for _ in range(40):
        drafter.verified(10, 3, 0, FROM_GRAMMAR)
    assert drafter.chance < 0.1, "the first was wrong each time"
    for _ in range(200):
        drafter.verified(10, 3, 3, FROM_GRAMMAR)
    assert drafter.chance > 0.9 and drafter.share > 0.9


def test_no_plan_waits_for_what_a_grammar_might_force():
    """It is known only in the worker: plans that are made meanwhile go on, and where drafts are looked for anyway it is asked."""
    speculation = CostSpeculation(SpeculationSettings("ngram"))
    requests = [request_with(by_grammar(Offer([], [])), number) for number in range(2)]
    shape = StepShape(2, 0, 20, 0)
    assert not speculation.wants_drain(16, requests, shape, CPU)
    drafts = speculation.choose(list(enumerate(requests)), shape, CPU, 15)
    assert [draft.tokens[0] for draft in drafts] == [FROM_GRAMMAR] * 2
