"""StallLimit: how long a step may take beside running streams, and PromptAllowance: what one plan may therefore compute of prompts.

A stream gets a token in each step, so the time between two of its tokens is the time of a step. Prompts make steps longer. With a
limit, a step computes only so much of them that it stays within it, by the measured costs of steps."""

from typing import NamedTuple

from octavo.schedule.request import Request
from octavo.schedule.step_costs import UNBOUNDED, StepCosts, StepShape

AUTO_STEPS = 2.75
"""With `auto`, a step with prompts takes so many times as long as one without. So the longest times between tokens stay
within three times the usual one, with some room for what the costs do not foresee."""
AUTO_SECONDS = 0.06
"""… but nothing is cut to stay below this: 16 tokens a second are more than people read."""
AUTO_OVERHEAD = 8
"""… nor to stay below so many times the constant part of a step. More steps repeat that part, and nothing else: where prompts take all
of the time, they lose an eighth of it at most."""
MIN_SHARE = 0.25
"""Where a step without prompts takes as long as the limit, or longer, prompts get this share of its time all the same."""
MIN_PROMPT_TOKENS = 16
"""The oldest prompt advances by so many tokens in each step, whatever the costs say. None gets fewer, unless it ends with them."""

UNKNOWN_PART = 4
"""Before costs are known, prompts beside streams get one in so many of a step's tokens. It is from steps of several sizes that costs are
learned: where the queue never empties, all others are as large as can be."""


class StallLimit(NamedTuple):
    seconds: float  # 0: auto

    @classmethod
    def of(cls, setting: float | str) -> "StallLimit | None":
        """The value of --max-inter-token-ms: milliseconds; 0: no limit (None); any text: auto."""
        if isinstance(setting, str):
            return cls(0.0)
        return cls(setting / 1000) if setting else None

    def within(self, costs: StepCosts, stream_seconds: float) -> float:
        """Seconds that a step may take that would take `stream_seconds` without prompts."""
        return self.seconds or max(AUTO_SECONDS, AUTO_STEPS * stream_seconds, AUTO_OVERHEAD * costs.step)

    def planned_within(self, costs: StepCosts, stream_seconds: float) -> float:
        """Seconds that such a step is planned to take: less than the limit, by as much as steps take longer than foreseen."""
        return self.within(costs, stream_seconds) / costs.spread

    def drafts_within(self, costs: StepCosts, shape: StepShape) -> int:
        """Drafted tokens that a step may verify beside its rows. `shape`: of the step without them."""
        seconds = costs.seconds(shape)
        left = max(self.planned_within(costs, seconds) - seconds, MIN_SHARE * seconds)
        each = costs.row + costs.context * (shape.context / max(shape.rows, 1))
        return int(min(left / each, UNBOUNDED)) if each else UNBOUNDED


class PromptAllowance:
    """What a plan may compute of prompts, handed out in the order in which they are planned: the first that has to be cut, or gets nothing,
    is the last."""

    def __init__(self, costs: StepCosts, limit: float, stream_seconds: float, tokens: int) -> None:
        """`limit`: of the step, in seconds; infinite: there is no stream. `tokens`: that the step can compute in all, less one for
        each row with one token."""
        self.limit = limit
        self._costs = costs
        self._seconds = max(limit / costs.spread - stream_seconds, MIN_SHARE * stream_seconds)
        self._tokens = max(tokens, MIN_PROMPT_TOKENS)
        self._has_begun = False  # a prompt has got its part
        self._is_spent = False
        self.capped: Request | None = None  # the one that was cut, or got nothing

    def admits(self, request: Request) -> bool:
        """Whether the first part of a request would be in the plan, for all that is known before it has pages."""
        if not self._has_begun:
            return True
        least = request.length if request.needs_one_step else min(request.length, MIN_PROMPT_TOKENS)
        if self._is_spent or self._most(0) < least:
            self._spend(request)
            return False
        return True

    def share(self, request: Request, count: int, budget: int, is_new: bool = False) -> tuple[int, int]:
        """As Request.share(), of a request that computes several tokens. (0, 0): it waits for the next step. `is_new`: it was
        admitted by this plan, and so has to be in it."""
        most = self._most(request.computed)
        if is_new or not self._has_begun:
            most = UNBOUNDED if request.needs_one_step else max(most, MIN_PROMPT_TOKENS)
        elif self._is_spent or most < min(count, MIN_PROMPT_TOKENS):
            self._spend(request)
            return 0, 0
        self._has_begun = True
        shared, cost = request.share(count, min(budget, most))
        if most < budget and shared < count:
            self._spend(request)
        self._seconds -= self._costs.chunk_seconds(request.computed, cost)
        self._tokens -= cost
        return shared, cost

    def _most(self, start: int) -> int:
        return min(self._costs.tokens_within(self._seconds, start), self._tokens)

    def _spend(self, request: Request) -> None:
        self._is_spent = True
        if self.capped is None:
            self.capped = request
