"""The seam of speculation: what proposes tokens for one request, and what decides how many of them a step verifies (decision 048)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.messages import Draft
from octavo.schedule.step_costs import StepCosts, StepShape

if TYPE_CHECKING:
    from octavo.schedule.request import Request
    from octavo.schedule.stall_limit import StallLimit


class Offer(NamedTuple):
    """Tokens that may come next, and for each the chance that it does if those before it did."""

    tokens: list[int]
    chances: list[float]


class Drafter(Protocol):
    """Proposes tokens for one request. What it proposes follows from the request's tokens and from what counted of earlier drafts, both
    of which are on record: a replay proposes the same."""

    def learn(self, tokens: Sequence[int]) -> None:
        """`tokens`: all of the request, prompt and output. Those that were passed before are not looked at again."""

    def drafts(self, most: int) -> Offer:
        """At most `most` tokens that may follow those learned; none if it has no idea."""

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        """Of so many drafted tokens the first `num_right` came, which made the request `num_tokens` long. `num_drafted` 0: the worker was asked
        for a draft and had none. `source`: FROM_MODEL or FROM_GRAMMAR: what drafted; 0: the plan had the tokens."""


class Speculation(Protocol):
    """Decides which requests draft, and how much a step verifies."""

    def attach(self, request: "Request") -> None:
        """Give a new request its drafter, if it may have one."""

    def forget(self) -> None:
        """Forget the texts of requests that have ended."""

    def finished(self, request: "Request") -> None:
        """A request with a drafter has ended."""

    def choose(
        self,
        rows: Sequence[tuple[int, "Request"]],
        shape: StepShape,
        costs: StepCosts | None,
        room: int,
        limit: "StallLimit | None" = None,
    ) -> list[Draft]:
        """Drafts for some of the rows (index in the plan, request), ascending by index, `room` tokens in all. `shape`: of the step
        without drafts. A draft ends before the request's max_len. `limit`: of a step's time; a number of tokens that was asked for is not cut
        by it."""

    def wants_drain(
        self, num_steps: int, requests: Sequence["Request"], shape: StepShape, costs: StepCosts | None
    ) -> bool:
        """Whether a plan without drafts should be committed before the next one is made, so that the next can have some. `requests`: of its
        rows; asked while a step is on its way, so tokens of that step are not known."""
