"""No stage of a pipeline waits for work in steady decode: the real loop and scheduler over stages of a known pace, on a virtual clock."""

from collections import deque
from collections.abc import Callable

import pytest

from octavo.cache import KVCache
from octavo.engine.build import build_engine
from octavo.messages import EngineReport, GenerateRequest, SamplingParams, StepPlan, StepResult
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler

STAGE_S = 0.010  # that a stage takes for a plan
HOST_S = 0.002  # that the engine takes to commit one and make the next


class VirtualPipeline:
    """An executor whose stages compute one plan at a time, in order, each when the stage before has passed it on."""

    overlap = True

    def __init__(self, num_stages: int) -> None:
        self.now = 0.0
        self.free_at = [0.0] * num_stages
        self.busy: list[list[tuple[float, float, int]]] = [
            [] for _ in range(num_stages)
        ]  # (from, to, step) of each stage
        self._steps: deque[tuple[StepPlan, float]] = deque()

    def clock(self) -> float:
        return self.now

    def start(self) -> EngineReport:
        raise NotImplementedError

    def submit(self, plan: StepPlan) -> None:
        self.now += HOST_S
        ready = self.now
        for stage, busy in enumerate(self.busy):
            began = max(ready, self.free_at[stage])
            ready = self.free_at[stage] = began + STAGE_S
            busy.append((began, ready, plan.step))
        self._steps.append((plan, ready))

    def collect(self) -> StepResult:
        plan, ready = self._steps.popleft()
        self.now = max(self.now, ready)
        return StepResult(plan.step, [7] * sum(plan.samples))

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def decode(num_stages: int, num_rows: int, num_tokens: int = 60) -> VirtualPipeline:
    report = EngineReport("none", "float32", 32, 256, 64, 512, 16, 4096, 0, 0, 1, num_stages=num_stages)
    scheduler = Scheduler(KVCache(4096, 16), 64, 512, num_stages=num_stages)
    pipeline = VirtualPipeline(num_stages)
    loop = build_engine(scheduler, pipeline, EngineMetrics("none", report), pipeline.clock).loop
    for number in range(num_rows):
        loop.add(GenerateRequest(str(number), [1, 2, 3], SamplingParams(seed=1, max_tokens=num_tokens), []))
    while loop.has_work:
        loop.step()
    return pipeline


def idle_share(pipeline: VirtualPipeline) -> float:
    """The largest share of the time that a stage had nothing to do, between the first and the last tenth of the plans."""
    shares = []
    for busy in pipeline.busy:
        middle = busy[len(busy) // 10 : -len(busy) // 10]
        shares.append(1 - sum(end - began for began, end, _ in middle) / (middle[-1][1] - middle[0][0]))
    return max(shares)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [2, 3, 8])
def test_no_stage_waits_once_there_are_two_rows_for_each(num_stages: int, times: int) -> None:
    if times * num_stages > 64:
        pytest.skip("more rows than there are")
    assert idle_share(decode(num_stages, times * num_stages)) < 1e-6


def test_with_fewer_rows_than_stages_some_wait() -> None:
    assert idle_share(decode(4, 2)) > 0.4


def test_a_pipeline_gives_its_tokens_as_fast_as_its_slowest_stage() -> None:
    """As many tokens take as long in 4 stages of a quarter of the work as the stages can pass on: no plan is left out."""
    pipeline = decode(4, 16, num_tokens=50)
    plans = pipeline.busy[-1]
    assert plans[-1][1] - plans[0][0] < (len(plans) + 4) * STAGE_S * 1.02
    assert len(plans) <= 5 * 52  # 5 groups of rows, each once for a token
