"""Prompts beside running streams, case by case. test_scheduler_properties.py has the rules over random workloads."""

import math

import pytest

from octavo.cache import KVCache
from octavo.messages import GenerateRequest, PoolingParams, SamplingParams, StepResult
from octavo.messages.speculation import SpeculationSettings
from octavo.schedule import Scheduler
from octavo.schedule.drafts.lengths import speculation
from octavo.schedule.request import SCORED_COST
from octavo.schedule.results import Planned
from octavo.schedule.stall_limit import (
    AUTO_OVERHEAD,
    AUTO_SECONDS,
    AUTO_STEPS,
    MIN_PROMPT_TOKENS,
    MIN_SHARE,
    UNKNOWN_PART,
    StallLimit,
)
from octavo.schedule.step_costs import StepCosts, shape_of

COSTS = StepCosts(0.010, 0.001, 0.001, 0.0, 0.0)  # a step of one row: 11 ms; 100 tokens of a prompt: 100 ms
LIMIT = StallLimit(0.061)  # 50 tokens of a prompt beside one row


class Engine:
    def __init__(self, limit: StallLimit | None = LIMIT, costs: StepCosts | None = COSTS, budget: int = 512) -> None:
        self.scheduler = Scheduler(KVCache(4096, 16, 64), 32, budget, stall_limit=limit)
        if costs is not None:
            self.scheduler.learn(costs)

    def add(self, name: str, prompt_len: int, max_tokens: int = 500, first: int = 1, **options) -> None:
        prompt = list(range(first, first + prompt_len))
        self.scheduler.add(GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0), [], **options))

    def stream(self, name: str = "stream") -> None:
        """A request that has its first token."""
        self.add(name, 8, first=10_000 + 100 * len(name))
        self.step()

    def step(self) -> dict[str, int]:
        """Tokens computed by request."""
        return computed(self.planned())

    def planned(self) -> Planned:
        planned = self.scheduler.plan()
        plan = planned.plan
        sampling = [request for request, samples in zip(planned.requests, plan.samples, strict=True) if samples]
        vectors = [b"v" for request in sampling if request.pooling is not None]
        if not plan.is_empty:
            self.scheduler.commit(plan, StepResult(plan.step, [7] * (len(sampling) - len(vectors)), vectors))
        return planned


def computed(planned: Planned) -> dict[str, int]:
    return {request.id: count for request, count in zip(planned.requests, planned.plan.counts, strict=True)}


@pytest.mark.parametrize(
    ("setting", "limit"), [("auto", StallLimit(0.0)), (0, None), (0.0, None), (80, StallLimit(0.08))]
)
def test_the_setting(setting, limit):
    assert StallLimit.of(setting) == limit


def test_auto_is_the_largest_of_three():
    auto = StallLimit.of("auto")
    assert auto.within(StepCosts(0.001, 0, 0, 0, 0), 0.01) == AUTO_SECONDS
    assert auto.within(StepCosts(0.001, 0, 0, 0, 0), 0.1) == AUTO_STEPS * 0.1
    assert auto.within(StepCosts(0.02, 0, 0, 0, 0), 0.021) == AUTO_OVERHEAD * 0.02
    assert StallLimit(0.03).within(StepCosts(1, 0, 0, 0, 0), 5.0) == 0.03


def test_a_prompt_beside_a_stream_is_computed_in_parts():
    engine = Engine()
    engine.stream()
    engine.add("long", 120)
    planned = engine.planned()
    assert computed(planned) == {"stream": 1, "long": 50}
    assert planned.capped.id == "long" and planned.limit_seconds == LIMIT.seconds
    assert engine.step() == {"stream": 1, "long": 50}
    assert engine.step() == {"stream": 1, "long": 20}
    planned = engine.planned()
    assert computed(planned) == {"stream": 1, "long": 1} and planned.capped is None


def test_without_a_limit_it_is_not():
    engine = Engine(limit=None)
    engine.stream()
    engine.add("long", 400)
    planned = engine.planned()
    assert computed(planned) == {"stream": 1, "long": 400} and planned.capped is None


def test_before_costs_are_known_prompts_get_a_part_of_the_budget():
    """Where requests always wait, all steps would be as large as can be, and nothing could be learned from them."""
    engine = Engine(costs=None)
    engine.stream()
    engine.add("a", 200)
    engine.add("b", 200, first=700)
    planned = engine.planned()
    assert computed(planned) == {"stream": 1, "a": 511 // UNKNOWN_PART}
    assert planned.capped.id == "a" and planned.limit_seconds == 0, "not known"
    engine.scheduler.learn(COSTS)
    assert engine.step() == {"stream": 1, "a": 50}


def test_without_a_stream_it_is_not():
    """Nor beside requests that have no token yet, vectors, or beam searches, whose tokens come at the end."""
    engine = Engine()
    engine.add("long", 700)
    assert engine.step() == {"long": 512}
    engine.add("other", 300, first=2000)
    assert engine.step() == {"long": 188, "other": 300}
    engine = Engine()
    params = SamplingParams(n=2, best_of=2, use_beam_search=True, max_tokens=50, seed=0)
    engine.scheduler.add(GenerateRequest("search", [1, 2, 3], params, []))
    engine.scheduler.plan()  # its scores are not needed here
    engine.add("long", 300)
    assert computed(engine.scheduler.plan()) == {"long": 300}


def test_more_rows_and_more_context_leave_less_time():
    costs = StepCosts(0.010, 0.001, 0.001, 0.0001, 0.00001)
    engine = Engine(StallLimit(0.1), costs)
    engine.stream()
    engine.add("a", 400)
    parts = []
    while (count := engine.step().get("a", 0)) > 1:
        parts.append(count)
    assert parts[:-1] == sorted(parts[:-1], reverse=True) and parts[0] > 1.5 * parts[-2], "positions cost time"
    few = Engine(StallLimit(0.1), COSTS)
    many = Engine(StallLimit(0.1), COSTS)
    few.stream()
    for number in range(20):
        many.stream("s" * (number + 1))
    for engine in (few, many):
        engine.add("a", 400)
    assert few.step()["a"] == 89 and many.step()["a"] == 70


def test_the_oldest_prompt_always_advances():
    """Where a step takes longer than the limit anyway, prompts get a quarter of its time, and at least a few tokens."""
    engine = Engine(StallLimit(0.001))
    engine.stream()
    engine.add("a", 100)
    engine.add("b", 100, first=500)
    planned = engine.planned()
    assert computed(planned) == {"stream": 1, "a": MIN_PROMPT_TOKENS} and planned.head_waits_for == "streams"
    slow = StepCosts(1.0, 0.0, 0.001, 0.0, 0.0)
    engine = Engine(StallLimit(0.001), slow)
    engine.stream()
    engine.add("a", 500)
    assert engine.step()["a"] == pytest.approx(MIN_SHARE * 1000, abs=2)


def test_order_of_arrival_stays():
    """A younger prompt gets what older ones leave, and nothing once one of them was cut, though it would be cheaper."""
    engine = Engine(StallLimit(0.06), StepCosts(0.01, 0.0, 0.0, 0.0, 0.00005))  # positions alone cost
    engine.stream()
    engine.add("a", 200)
    engine.add("b", 4, first=700)
    planned = engine.planned()
    assert set(computed(planned)) == {"stream", "a"} and planned.head.id == "b"
    while "a" in (counts := engine.step()) and counts["a"] > 1:
        assert "b" not in counts or engine.scheduler.choices("a")[0].has_output
    engine = Engine()
    engine.stream()
    engine.add("a", 20)
    engine.add("b", 100, first=700)
    assert engine.step() == {"stream": 1, "a": 20, "b": 30}


def test_no_scrap_of_a_prompt_takes_a_row():
    engine = Engine()
    engine.stream()
    engine.add("a", 40)
    engine.add("b", 100, first=700)
    planned = engine.planned()
    assert computed(planned) == {"stream": 1, "a": 40} and planned.head_waits_for == "streams"


def test_prompts_leave_streams_their_tokens_of_the_budget():
    """An older prompt, whose grammar came late, is planned before younger streams; they get their tokens all the same."""
    engine = Engine(StallLimit(10.0), budget=40)
    engine.scheduler.add(
        GenerateRequest("old", list(range(200)), SamplingParams(max_tokens=5, seed=0, grammar="g"), [])
    )
    for number in range(10):
        engine.stream("s" * (number + 1))
    engine.scheduler.prepared({"g": 0})
    counts = engine.step()
    assert counts["old"] == 30 and sum(name.startswith("s") for name in counts) == 10


def test_who_enters_computes_something_though_its_context_is_long():
    """A prefix that is found makes tokens dearer than was thought when the request was admitted."""
    costs = StepCosts(0.001, 0.0, 0.001, 0.0, 0.0001)
    engine = Engine(StallLimit(0.04), costs)
    engine.add("first", 640, max_tokens=1)
    while not engine.scheduler.is_idle:
        engine.step()
    engine.stream()
    engine.add("a", 17, first=2000, max_tokens=1)
    engine.add("b", 700)  # 640 of them are in the prefix cache
    planned = engine.planned()
    if "b" in computed(planned):
        assert computed(planned)["b"] == MIN_PROMPT_TOKENS
    else:
        assert planned.head_waits_for == "streams"
    assert all(request.id in computed(planned) for request in planned.admitted)


@pytest.mark.parametrize(
    ("limit_ms", "most"), [(0, math.inf), (61.0, 0.061), ("auto", 8 * 0.030), (1.0, (1 + MIN_SHARE) * 0.038)]
)
def test_drafts_keep_to_the_limit(limit_ms: float | str, most: float):
    """Eight streams that repeat themselves: without a limit a step verifies as much as there is room for."""
    costs = StepCosts(0.030, 0.001, 0.001, 0.0, 0.0)
    scheduler = Scheduler(
        KVCache(4096, 16, 0), 256, 512, stall_limit=StallLimit.of(limit_ms),
        speculation=speculation(SpeculationSettings("ngram", 60)),
    )  # fmt: skip
    scheduler.learn(costs)
    for number in range(8):
        params = SamplingParams(max_tokens=2000, seed=0)
        scheduler.add(GenerateRequest(f"s{number}", [7] * 40, params, []))
    longest = num_drafted = 0.0
    for _ in range(40):
        plan = scheduler.plan().plan
        runs = [1 + len(draft.tokens) for draft in plan.drafts]
        num_tokens = sum(runs) + len(plan.rows) - len(runs)
        if plan.drafts:
            longest = max(longest, costs.seconds(shape_of(plan, sum(plan.counts))))
            num_drafted += sum(runs) - len(runs)
        scheduler.commit(plan, StepResult(plan.step, [7] * num_tokens, runs=runs))
    assert num_drafted > 0 and longest <= most + 1e-9
    assert longest > (0.25 if limit_ms == 0 else 0.9 * most), "and use it"


def test_what_must_be_computed_whole_is():
    """It goes first in a step of its own, and waits only for older prompts."""
    engine = Engine()
    engine.stream()
    whole = {"pooling": PoolingParams("last"), "needs_one_step": True}
    engine.add("a", 60)
    engine.add("whole", 300, max_tokens=1, first=700, **whole)
    planned = engine.planned()
    assert computed(planned) == {"stream": 1, "a": 50} and planned.head_waits_for == "streams"
    assert engine.step() == {"stream": 1, "a": 10}
    assert engine.step() == {"stream": 1, "a": 1, "whole": 300}


def test_what_comes_back_from_host_pages_does_not_wait():
    """Its next token is one row; others compute prompts meanwhile."""
    engine = Engine()
    scheduler = engine.scheduler
    for name in ("stream", "swapped"):
        engine.stream(name)
    request = scheduler.choices("swapped")[0]
    planned = scheduler.plan()
    scheduler._preempt(request, planned.plan, planned)
    assert request.is_swapped
    scheduler.commit(planned.plan, StepResult(planned.plan.step, [7] * 2))
    engine.add("a", 300)
    counts = engine.step()
    assert counts["swapped"] == 1 and counts["a"] == 49


def test_scored_prompts_get_less():
    """Logprobs of prompt tokens take as much of the time as they take of the budget."""
    engine = Engine()
    engine.stream()
    params = SamplingParams(max_tokens=2, seed=0, prompt_logprobs=1)
    engine.scheduler.add(GenerateRequest("scored", list(range(300)), params, []))
    assert computed(engine.scheduler.plan())["scored"] == 50 // SCORED_COST


def test_an_infinite_allowance_is_none():
    engine = Engine()
    engine.add("a", 700)
    engine.step()
    assert math.isinf(engine.scheduler._allowance.limit)
