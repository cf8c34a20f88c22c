"""What steps cost, measured in a running loop, and handed to its scheduler."""

import random

import pytest

from octavo.cache import KVCache
from octavo.engine.cost_meter import CostMeter
from octavo.engine.loop import EngineLoop
from octavo.messages import (
    FROM_MODEL,
    Draft,
    DraftWork,
    GenerateRequest,
    Logprobs,
    PageMove,
    SamplingParams,
    StepPlan,
    StepResult,
)
from octavo.observe.step_observer import Observers, StepObserver, StepTimes
from octavo.schedule import Scheduler
from octavo.schedule.results import Committed
from octavo.schedule.stall_limit import AUTO_SECONDS, AUTO_STEPS, StallLimit
from octavo.schedule.step_costs import NO_COSTS, ONE_ROW, StepCosts, StepShape, shape_of


class Device:
    """Computes nothing, and takes a step's true time by its own clock."""

    overlap = False

    def __init__(self, true: StepCosts) -> None:
        self.now, self._true = 0.0, true

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        self.now += self._true.seconds(shape_of(self._plan, sum(self._plan.counts)))
        return StepResult(self._plan.step, [7] * sum(self._plan.samples))


class Steps(StepObserver):
    def __init__(self) -> None:
        self.seconds: list[float] = []  # of steps that computed streams and prompts
        self.learned: list[StepCosts] = []

    def costs_learned(self, costs: StepCosts, now: float) -> None:
        self.learned.append(costs)

    def committed(self, committed: Committed, times: StepTimes) -> None:
        if 1 in committed.plan.counts and committed.num_tokens > len(committed.plan.rows):
            self.seconds.append(times.compute_seconds)


TRUE = StepCosts(0.006, 0.0006, 0.0004, 3e-7, 2.8e-7)


def serve(limit_ms: float | str, device: Device | None = None) -> tuple[list[float], float, int]:
    """Twenty streams and prompts of all lengths beside them. Returns (seconds of the mixed steps after the first prompts, seconds of
    all, how often costs were learned)."""
    device, meter, steps = device or Device(TRUE), CostMeter(), Steps()
    scheduler = Scheduler(KVCache(8192, 16, 0, False), 64, 512, stall_limit=StallLimit.of(limit_ms))
    loop = EngineLoop(scheduler, device, Observers([meter, steps], lambda: device.now), meter)
    for number in range(20):
        loop.add(GenerateRequest(f"s{number}", [number] * 100, SamplingParams(max_tokens=900, seed=0), []))
    number = 0
    while scheduler.has("s0"):
        if number < 12 and len(scheduler.running) + len(scheduler.waiting) < 22:
            prompt = [100 + number] * (128, 600, 1500, 4000)[number % 4]
            loop.add(GenerateRequest(f"p{number}", prompt, SamplingParams(max_tokens=10, seed=0), []))
            number += 1
        loop.step()
    assert scheduler.costs is steps.learned[-1]
    return steps.seconds[20:], device.now, len(steps.learned)


def test_steps_keep_to_the_limit_that_was_asked_for():
    """The cost of steps is not known to the scheduler, and yet it keeps to the limit, for short and long prompts."""
    unlimited, seconds, num_learned = serve(0)
    assert max(unlimited) > 0.5 and num_learned > 5
    for limit_ms in (60.0, 100.0):
        limited, limited_seconds, _ = serve(limit_ms)
        within = sorted(limited)
        assert within[int(0.98 * len(within))] < 1.1 * limit_ms / 1e3
        assert within[len(within) // 2] > 0.8 * limit_ms / 1e3, "and uses it"
    limited, limited_seconds, _ = serve("auto")
    stream_seconds = TRUE.step + 20 * TRUE.row + 20 * 300 * TRUE.context
    assert sorted(limited)[int(0.98 * len(limited))] < 1.1 * max(AUTO_SECONDS, AUTO_STEPS * stream_seconds)
    assert limited_seconds < 1.05 * seconds, "the same work in about the same time"


class Shaky(Device):
    """Takes up to 1.4 times as long as it should, more often than not a little longer."""

    def __init__(self, true: StepCosts) -> None:
        super().__init__(true)
        self._dice = random.Random(3)

    def collect(self) -> StepResult:
        before = self.now
        result = super().collect()
        self.now += (self.now - before) * self._dice.choice((0.0, 0.0, 0.02, 0.04, 0.05, 0.1, 0.15, 0.2, 0.25, 0.4))
        return result


def test_a_machine_whose_steps_vary_keeps_to_the_limit_as_well():
    """What is foreseen is the usual time. Nine of ten steps keep to the limit, not half of them."""
    within = sorted(serve(60.0, Shaky(TRUE))[0])
    assert within[int(0.88 * len(within))] < 0.0605 and within[len(within) // 2] > 0.8 * 0.06
    steady = serve(60.0)[1]
    assert serve(60.0, Shaky(TRUE))[1] < 1.3 * steady, "it takes 1.12 times as long by itself"


def test_what_no_shape_explains_is_left_out():
    meter = CostMeter()
    step = StepPlan(0, [], [], [], [0], [0], [9], [True], [], [], [])
    moving = StepPlan(0, [], [], [PageMove("in", 1, 2)], [0], [0], [9], [True], [], [], [])
    empty = StepPlan(0, [], [], [], [], [], [], [], [], [], [])
    scored = StepResult(0, [7], prompt_logprobs=[[Logprobs(0, [], [])]])
    for plan, result in ((moving, StepResult(0, [7])), (step, scored), (empty, StepResult(0, []))):
        meter.committed(Committed(plan, result, sum(plan.counts), [], [], [], []), StepTimes(1.0, 5.0))
    assert len(meter._samples) == 0 and meter.take() is None
    decode = StepPlan(0, [], [], [], [0], [9], [1], [True], [], [], [])
    for plan in (step, decode):
        meter.committed(Committed(plan, StepResult(0, [7]), sum(plan.counts), [], [], [], []), StepTimes(1.0, 0.5))
    assert meter.take() is not None and meter.take() is None, "handed on once"


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_step_timed_before_the_first_request_tells_the_constant_from_the_rows(is_timed: bool):
    """All steps have 31 or 32 rows, and their times vary by more than a row takes."""
    meter, dice = CostMeter(TRUE.seconds(ONE_ROW) if is_timed else 0.0), random.Random(5)
    costs = NO_COSTS
    for number in range(600):
        num_rows, num_more = 32 - number % 2, dice.choice((0, 0, 0, 127, 200))
        counts = [num_more + 1] + [1] * (num_rows - 1)
        starts = [0 if num_more else 200] + [dice.randrange(128, 256) for _ in counts[1:]]
        plan = StepPlan(number, [], [], [], list(range(num_rows)), starts, counts, [True] * num_rows, [], [], [])
        seconds = TRUE.seconds(shape_of(plan, sum(counts))) * dice.uniform(0.93, 1.07)
        result = StepResult(number, [7] * num_rows)
        meter.committed(Committed(plan, result, sum(counts), [], [], [], []), StepTimes(1.0, seconds))
        costs = meter.take() or costs
    decode = TRUE.seconds(StepShape(32, 0, 32 * 192, 0))
    assert costs.seconds(StepShape(32, 0, 32 * 192, 0)) == pytest.approx(decode, rel=0.1)
    if is_timed:
        assert costs.step == pytest.approx(TRUE.step, rel=0.2)
        assert StallLimit(0.0).within(costs, decode) < 3 * decode
    else:
        assert costs.step > 1.5 * TRUE.step, "nothing tells them apart: the trial step is needed"


def test_a_shape_that_the_last_fit_calls_free_has_no_ratio():
    """Steps whose time grew with the looked-back positions alone, as on a disturbed machine: a fit may find no other cost. A step beside
    whose prompt a row looks back at nothing is then foreseen to take no time."""
    meter = CostMeter()
    costs = NO_COSTS
    for number, (starts, counts, seconds) in enumerate(
        (([0, 10], [8, 1], 0.001), ([72, 0], [1, 1], 0.1), ([0, 0], [9, 1], 0.002))
    ):
        plan = StepPlan(number, [], [], [], [0, 1], starts, counts, [True] * 2, [], [], [])
        shape = shape_of(plan, sum(counts))
        if number == 2:
            assert costs.context > 0 and costs.seconds(shape) == 0
        meter.committed(
            Committed(plan, StepResult(number, [7, 7]), sum(counts), [], [], [], []), StepTimes(1.0, seconds)
        )
        costs = meter.take() or costs
    assert list(meter._ratios) == [] and len(meter._samples) == 3, "the step is a sample all the same"


def test_a_meter_that_is_dropped_hands_on_nothing():
    meter = CostMeter()
    meter.new_costs = TRUE
    meter.dropped()
    assert meter.take() is None


def test_what_the_host_takes_alone_is_known_by_the_number_of_rows():
    """Steps without drafts overlap with their plans; with drafts a step waits for 0.1 ms and 10 µs for each row."""
    meter, now, costs = CostMeter(), 0.0, NO_COSTS
    for number in range(400):
        num_rows = (4, 40, 200)[number % 3]
        is_prompt, has_drafts = number % 10 == 0, number % 4 == 0
        counts = [30 if is_prompt and not row else 1 for row in range(num_rows)]
        drafts = [Draft(1, [7, 7])] if has_drafts and not is_prompt else []
        if drafts:
            counts[1] += 2
        plan = StepPlan(
            number,
            [],
            [],
            [],
            list(range(num_rows)),
            [50] * num_rows,
            counts,
            [True] * num_rows,
            [],
            [],
            [],
            drafts=drafts,
        )
        seconds = TRUE.seconds(shape_of(plan, sum(counts)))
        now += seconds + (1e-4 + 1e-5 * num_rows if drafts else 0.0) + (3.0 if number % 50 == 7 else 0.0)
        result = StepResult(number, [7] * (sum(counts) - 29 * is_prompt))
        meter.committed(Committed(plan, result, sum(counts), [], [], [], []), StepTimes(now, seconds))
        costs = meter.take() or costs
    assert costs.host == pytest.approx(1e-4, rel=0.05) and costs.host_row == pytest.approx(1e-5, rel=0.05)
    assert costs.host_seconds(100) == pytest.approx(1.1e-3, rel=0.05)


def test_steps_of_cores_that_also_serve_are_compared_as_they_are():
    """Other processes take 0.1 ms for each row's tokens from the cores that compute. With drafts, the host plans alone for 3 ms, but a step
    takes no longer for each token that counts than without: that is seen where the host computes. After many steps without drafts, those
    with drafts are tried anew, also if they had another number of rows."""
    for host_computes, host_seconds in ((False, 0.003), (True, 0.0)):
        meter, now, costs = CostMeter(TRUE.seconds(ONE_ROW), host_computes=host_computes), 0.0, NO_COSTS
        for number in range(3000):
            is_prompt, has_drafts = number % 10 == 0, number % 4 == 0 and number < 500
            rows = 40 if number < 400 or number >= 500 else 20
            counts = [30 if is_prompt and not row else 1 for row in range(rows)]
            drafts = [Draft(1, [7, 7])] if has_drafts and not is_prompt else []
            counts[1] += 2 * len(drafts)
            plan = StepPlan(
                number, [], [], [], list(range(rows)), [50] * rows, counts, [True] * rows, [], [], [], drafts=drafts
            )
            seconds = TRUE.seconds(shape_of(plan, sum(counts))) + (0.001 if drafts else 0.004)
            now += seconds + (0.003 if drafts else 0.0)
            result = StepResult(number, [7] * (sum(counts) - 29 * is_prompt))
            meter.committed(Committed(plan, result, sum(counts), [], [], [], []), StepTimes(now, seconds))
            costs = meter.take() or costs
            if number == 399:
                assert costs.host_seconds(40) == pytest.approx(host_seconds, abs=2e-5)
        shape = StepShape(40, 0, 40 * 50, 0)
        assert costs.host_seconds(40) == 0.0
        if host_computes:  # whatever the sum of costs says
            assert costs.decode_seconds(shape) == pytest.approx(TRUE.seconds(shape) + 0.004, rel=0.02)
        else:
            assert costs.decode_seconds(shape) == costs.seconds(shape)


def test_what_steps_took_long_ago_says_nothing_of_other_numbers_of_rows():
    """At first, 60 rows take 20 ms more than the sum of their costs, because of other programs. Later steps have four and eight rows, and take
    what it says."""
    meter, now, costs = CostMeter(TRUE.seconds(ONE_ROW), host_computes=True), 0.0, NO_COSTS
    for number in range(2400):
        is_prompt, is_early = number % 10 == 0, number < 400
        rows = 60 if is_early else 4 + number % 2 * 4
        counts = [30 if is_prompt and not row else 1 for row in range(rows)]
        plan = StepPlan(number, [], [], [], list(range(rows)), [50] * rows, counts, [True] * rows, [], [], [])
        seconds = TRUE.seconds(shape_of(plan, sum(counts)))
        now += seconds + 0.02 * is_early
        meter.committed(
            Committed(plan, StepResult(number, [7] * rows), sum(counts), [], [], [], []), StepTimes(now, seconds)
        )
        costs = meter.take() or costs
        if number == 399:
            assert costs.decode_seconds(StepShape(60, 0, 3000, 0)) > TRUE.seconds(StepShape(60, 0, 3000, 0)) + 0.018
    for rows in (4, 8):
        shape = StepShape(rows, 0, 50 * rows, 0)
        assert costs.decode_seconds(shape) == pytest.approx(TRUE.seconds(shape), rel=0.03)


def test_what_a_draft_model_takes_is_apart():
    """Steps are measured without it; a pass costs a share of a step with as many tokens. At first, what a trial took."""
    meter = CostMeter(0.009, 0.016, 0.0036)
    scheduler = Scheduler(KVCache(64, 16, 0, False), 8, 512)
    true, pass_seconds = StepCosts(0.008, 0.001, 0.0005, 0.0, 0.0), 0.25
    shares = []
    for number in range(1200):
        is_drafting = number % 2 and not 120 < number < 1100
        drafts = [Draft(0, [FROM_MODEL] * 4, 16)] if is_drafting else []
        counts, has_prompt = [5 if drafts else 1, 1], number % 7 == 0
        drafts, counts = ([], [9, 1]) if has_prompt else (drafts, counts)
        plan = StepPlan(number, [], [], [], [0, 1], [9, 9], counts, [True, True], [], [], [], drafts=drafts)
        drafted = [number % 3] * len(drafts)  # fewer than planned
        seconds = true.seconds(shape_of(plan, sum(counts), drafted))
        work = DraftWork(4, 4, 0, 0, pass_seconds * (4 * true.step + 4 * true.row)) if drafts else None
        result = StepResult(number, [7, 7], runs=[1] * len(drafts), drafted=drafted, draft_work=work)
        total = seconds + (0.0 if work is None else work.seconds)
        meter.committed(Committed(plan, result, sum(counts), [], [], [], []), StepTimes(0.0, total))
        if (costs := meter.take()) is not None:
            scheduler.learn(costs)
            shares.append((costs.draft, costs.draft_low))
            if number == 1101:
                assert shares[-1][0] == shares[-1][1], "measured again: the next plan knows"
        if number == 120:
            assert shares[0] == pytest.approx((0.4, 0.4), rel=0.05) and shares[-1][0] == pytest.approx(0.25, rel=0.05)
            assert 0.2 < shares[-1][1] < 0.26, "and fades a little from draft to draft"
        if number == 1099:
            was = pass_seconds
            assert shares[-1] == pytest.approx((was, was / 4), rel=0.1), "it was not asked for long: it may be tried"
            pass_seconds = 0.1
        if number == 1103:
            assert shares[-1][0] == pytest.approx(0.1, rel=0.1), "it had been held up: the first measurement tells"
    assert shares[-1][0] == pytest.approx(0.1, rel=0.1) and 0.08 < shares[-1][1] < 0.11
    assert scheduler.costs.step == pytest.approx(true.step, rel=0.1)
    assert scheduler.costs.row == pytest.approx(true.row, rel=0.3)
