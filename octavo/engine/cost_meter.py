"""CostMeter: measures what steps cost, and fits StepCosts to it now and then. The loop hands new costs to the scheduler between two steps,
and observers hear of it: what steers a plan is an input on record (decisions 023, 039)."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from octavo.messages import DraftWork
from octavo.observe.step_observer import StepObserver, StepTimes
from octavo.schedule.results import Committed
from octavo.schedule.step_costs import (
    ONE_ROW,
    SPREAD_SAMPLES,
    VERIFIED_ROW,
    Sample,
    StepCosts,
    StepSamples,
    StepShape,
    fit,
    learned_spread,
    shape_of,
)

_DECODE_EVERY = 4  # of the steps without prompts, which are many and alike, one in so many is measured
_FIT_EVERY, _FIT_NEW_EVERY = 64, 4  # samples between two fits; the second after a step of a new kind
_FIT_DRAFTS_EVERY = 16  # … with a draft model, whose cost decides from step to step whether it is asked
_DRAFT_SHARES = 7  # measured costs of a draft model's passes that are kept; the third lowest counts: other programs only add to them
_FADE, _LEAST_FADE = (
    0.97,
    0.25,
)  # of that cost, for each measured step without a draft: a model that was too dear once is tried again
_HOST_SAMPLES, _LEAST_HOST_SAMPLES = (
    15,
    3,
)  # of steps of about one number of rows, with drafts and without; the median of each counts
# Steps without drafts, after which those with drafts are forgotten: what was too dear once is tried again. Those without drafts say nothing of
# other numbers of rows any more.
_HOST_AGE = 1024
_LONGEST_HOST = 0.1  # seconds; after a longer pause the host had nothing to do


class _Host(NamedTuple):
    """A step of which it was measured what the host takes from it."""

    number: int  # counting steps without drafts
    rows: int
    idle_seconds: float  # in which nothing was computed before it
    shape: StepShape
    seconds: float

    def beyond(self, costs: StepCosts) -> float:
        """How much longer it took, from the commit before to its own, than the sum of its costs."""
        return self.idle_seconds + self.seconds - costs.seconds(self.shape)


class _Hosts:
    """The last such steps of about one number of rows, without drafts and with."""

    def __init__(self) -> None:
        self.plain: deque[_Host] = deque(maxlen=_HOST_SAMPLES)
        self.drafting: deque[_Host] = deque(maxlen=_HOST_SAMPLES)

    def forget(self, before: int) -> None:
        """Forget steps with drafts that have a lower number."""
        while self.drafting and self.drafting[0].number < before:
            self.drafting.popleft()


def _middle(hosts: Sequence[_Host], costs: StepCosts | None) -> float | None:
    """The median of what was measured: beyond these costs, or with nothing computed. None: that is too little to tell."""
    if len(hosts) < _LEAST_HOST_SAMPLES:
        return None
    return median(host.idle_seconds if costs is None else host.beyond(costs) for host in hosts)


def _at(hosts: Sequence[_Host], seconds: float) -> tuple[Sample, float]:
    return Sample(StepShape(round(median(host.rows for host in hosts)), 0, 0, 0), max(0.0, seconds)), 1.0


class CostMeter(StepObserver):
    def __init__(
        self,
        one_row_seconds: float = 0.0,
        verify_seconds: float = 0.0,
        draft_seconds: float = 0.0,
        host_computes: bool = False,
    ) -> None:
        """`one_row_seconds`: what a step of one row took before the first request; `verify_seconds`: what one of a VERIFIED_ROW took;
        `draft_seconds`: what a pass of the draft model took for one row; 0: not measured. `host_computes`: the cores that compute steps also
        plan them, and send their tokens."""
        self.new_costs: StepCosts | None = None  # not handed on yet
        self._samples = StepSamples()
        self._samples.add_trial(ONE_ROW, one_row_seconds)
        self._samples.add_trial(VERIFIED_ROW, verify_seconds)
        self._num_decodes = 0
        self._has_costs = self._has_new_kind = False
        self._num_since_fit = 0
        self._costs: StepCosts | None = None  # of the last fit
        # How many times as long as foreseen steps took that have a limit.
        self._ratios: deque[float] = deque(maxlen=SPREAD_SAMPLES)
        # What passes of the draft model took, for each second of steps with as many tokens.
        self._draft_shares: deque[float] = deque(maxlen=_DRAFT_SHARES)
        self._fade = 1.0
        self._before = math.inf  # when the step before was committed
        self._host_computes = host_computes
        self._hosts: dict[int, _Hosts] = {}  # by the rows of steps, as a power of two
        self._num_plain = 0  # steps without drafts
        if one_row_seconds > 0 and draft_seconds > 0:
            self._draft_shares.append(draft_seconds / one_row_seconds)

    def committed(self, committed: Committed, times: StepTimes) -> None:
        plan, num_tokens, seconds = committed.plan, committed.num_tokens, times.compute_seconds
        host_seconds, self._before = times.now - self._before - seconds, times.now
        work = committed.result.draft_work
        self._note_host(committed, host_seconds, seconds - (0.0 if work is None else work.seconds))
        if work is not None and work.passes:
            seconds -= work.seconds
            if self._note_drafts(work):
                self._hand_on(self._costs)
        # Moving pages, and logits of prompt tokens, take time that no shape explains.
        if plan.moves or committed.result.prompt_logprobs or not num_tokens:
            return
        drafted = committed.result.drafted
        if drafted and not any(drafted) and work is None:
            return  # it waited to learn that no grammar forces anything
        if num_tokens == len(plan.rows):
            self._num_decodes += 1
            if self._num_decodes % _DECODE_EVERY != 1:
                return
        shape = shape_of(plan, num_tokens, committed.result.drafted)
        if self._costs is not None and shape.more_tokens and 1 in plan.counts:
            foreseen = self._costs.seconds(shape)
            # Costs that were fitted to disturbed steps may be of positions that rows look back at, and of nothing else.
            if foreseen > 0:
                self._ratios.append(seconds / foreseen)
        self._has_new_kind |= self._samples.add(shape, seconds)
        self._num_since_fit += 1
        if work is None:
            self._fade = max(self._fade * _FADE, _LEAST_FADE)
        pause = _FIT_DRAFTS_EVERY if self._draft_shares else _FIT_EVERY
        if self._has_new_kind:
            pause = _FIT_NEW_EVERY if self._has_costs else 1
        if self._num_since_fit >= pause:
            self._num_since_fit, self._has_new_kind = 0, False
            self._hand_on(self._samples.fit())

    def _hand_on(self, costs: StepCosts | None) -> None:
        self._has_costs |= costs is not None
        if costs is not None:
            costs = msgspec.structs.replace(costs, spread=learned_spread(self._ratios))
            if self._draft_shares:
                share = sorted(self._draft_shares)[min(2, len(self._draft_shares) - 1)]
                costs = msgspec.structs.replace(costs, draft=share, draft_low=share * self._fade)
            costs = self._with_host(costs)
        self._costs = self.new_costs = costs

    def _note_host(self, committed: Committed, idle_seconds: float, seconds: float) -> None:
        """`idle_seconds`: in which nothing was computed before this step, while it was planned and the one before committed; `seconds`: in
        which it was computed, without passes of a draft model."""
        plan, num_tokens = committed.plan, committed.num_tokens
        num_rows = len(plan.rows)
        if not num_rows or plan.enters or plan.moves or idle_seconds > _LONGEST_HOST or idle_seconds == -math.inf:
            return
        if not plan.drafts:
            self._num_plain += 1
            if num_tokens > num_rows or self._num_plain % _DECODE_EVERY:
                return
        hosts = self._hosts.setdefault(num_rows.bit_length(), _Hosts())
        shape = shape_of(plan, num_tokens, committed.result.drafted)
        host = _Host(self._num_plain, num_rows, max(0.0, idle_seconds), shape, seconds)
        (hosts.drafting if plan.drafts else hosts.plain).append(host)
        if plan.drafts and len(hosts.drafting) == _LEAST_HOST_SAMPLES and self._costs is not None:
            self._hand_on(self._costs)  # so that drafts that do not pay end soon

    def _with_host(self, costs: StepCosts) -> StepCosts:
        """With what a step with drafts takes longer than others because the host works alone, by the number of rows.

        Where the host's cores compute, its work beside a step makes that step longer, as does the work of other processes for each of
        its tokens. So what counts there is how much longer than the sum of its costs a step takes from the commit before to its own: with
        drafts, and without."""
        drafting: list[tuple[Sample, float]] = []
        plain: list[tuple[Sample, float]] = []
        since = self._num_plain - _HOST_AGE
        for hosts in self._hosts.values():
            hosts.forget(since)
            usual = _middle(hosts.plain, costs if self._host_computes else None)
            if self._host_computes:
                recent = [host for host in hosts.plain if host.number >= since]
                if (beyond := _middle(recent, costs)) is not None:
                    plain.append(_at(recent, beyond))
            more = _middle(hosts.drafting, None if usual is None or not self._host_computes else costs)
            if more is not None:
                drafting.append(_at(hosts.drafting, more - (usual or 0.0)))
        alone, longer = fit(drafting), fit(plain)
        return msgspec.structs.replace(
            costs, host=alone.step, host_row=alone.row, beyond=longer.step, beyond_row=longer.row
        )

    def _note_drafts(self, work: DraftWork) -> bool:
        """Catching up is left out: it costs less for each token than a draft does. → whether this was the first measurement after a while: the
        next plan should know."""
        if self._costs is None or work.caught_up > work.tokens // 2:
            return False
        costs = self._costs
        like = costs.step * work.passes + costs.row * work.tokens + costs.context * work.context
        if like <= 0:
            return False
        share, has_faded = work.seconds / like, costs.draft_low < costs.draft
        if has_faded and share < costs.draft:  # what was measured before was held up by something
            self._draft_shares.clear()
        self._draft_shares.append(share)
        self._fade = 1.0
        return has_faded

    def take(self) -> StepCosts | None:
        costs, self.new_costs = self.new_costs, None
        return costs

    def dropped(self) -> None:
        self.new_costs = None
