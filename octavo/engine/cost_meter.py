"""CostMeter: measures what steps cost, and fits StepCosts to it now and then. The loop hands new costs to the scheduler between two steps,
and observers hear of it: what steers a plan is an input on record (decisions 023, 039)."""

from octavo.observe.step_observer import StepObserver, StepTimes
from octavo.schedule.results import Committed
from octavo.schedule.step_costs import ONE_ROW, VERIFIED_ROW, StepCosts, StepSamples, shape_of

_DECODE_EVERY = 4  # of the steps without prompts, which are many and alike, one in so many is measured
_FIT_EVERY, _FIT_NEW_EVERY = 64, 4  # samples between two fits; the second after a step of a new kind


class CostMeter(StepObserver):
    def __init__(self, one_row_seconds: float = 0.0, verify_seconds: float = 0.0) -> None:
        """`one_row_seconds`: what a step of one row took before the first request; `verify_seconds`: what one of a VERIFIED_ROW took; 0:
        not measured."""
        self.new_costs: StepCosts | None = None  # not handed on yet
        self._samples = StepSamples()
        self._samples.add_trial(ONE_ROW, one_row_seconds)
        self._samples.add_trial(VERIFIED_ROW, verify_seconds)
        self._num_decodes = 0
        self._has_costs = self._has_new_kind = False
        self._num_since_fit = 0

    def committed(self, committed: Committed, times: StepTimes) -> None:
        plan, num_tokens = committed.plan, committed.num_tokens
        # Moving pages, and logits of prompt tokens, take time that no shape explains.
        if plan.moves or committed.result.prompt_logprobs or not num_tokens:
            return
        if num_tokens == len(plan.rows):
            self._num_decodes += 1
            if self._num_decodes % _DECODE_EVERY != 1:
                return
        self._has_new_kind |= self._samples.add(shape_of(plan, num_tokens), times.compute_seconds)
        self._num_since_fit += 1
        pause = (_FIT_NEW_EVERY if self._has_costs else 1) if self._has_new_kind else _FIT_EVERY
        if self._num_since_fit >= pause:
            self._num_since_fit, self._has_new_kind = 0, False
            self.new_costs = self._samples.fit()
            self._has_costs |= self.new_costs is not None

    def take(self) -> StepCosts | None:
        costs, self.new_costs = self.new_costs, None
        return costs

    def dropped(self) -> None:
        self.new_costs = None
