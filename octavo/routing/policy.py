"""Policies: which replica gets a request. A policy sees what each replica would have to do for it, and chooses by numbers alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Reason = Literal["prefix", "least_work", "round_robin", "all_saturated"]
"""Why a replica was chosen: for its pages; because it had least to do; in turn; because all were saturated and it is done first."""

NEGLIGIBLE = 0.05
"""Share of the saturation time. What a prefix saves beyond another replica's is ignored where it is less: the same few pages at the
beginning of all prompts must not hold them together."""


class Option(NamedTuple):
    """One replica, for one request."""

    seconds: float  # of work that waits there
    num_open: int  # requests that are there
    last_chosen: int  # the lower, the longer ago. Different for all.
    own_seconds: float  # that the request itself takes there, without the pages that are held
    num_held: int  # pages of the prompt that are there
    replica: int


Policy = Callable[[Sequence[Option], float], tuple[Option, Reason]]
"""(at least one option, seconds of work from which on a replica is saturated) → the choice. It depends on nothing else."""


def _quietest(options: Iterable[Option], saturation: float) -> Option:
    """The replica with the least work that waits; of those with about the same, the one with the fewest requests: they
    share its steps for as long as they produce tokens, which is no work that waits. Then the one that was chosen
    longest ago, so that a burst does not meet equal replicas in one order."""
    unit = NEGLIGIBLE * saturation or 1.0
    return min(options, key=lambda each: (each.seconds // unit, each.num_open, each.seconds, each.last_chosen))


def prefix(options: Sequence[Option], saturation: float) -> tuple[Option, Reason]:
    """The replica where the request takes least work, among those that are not saturated; the quietest among equals. So requests stay with
    their prefix until its replica is saturated, then go where there is room. If all are saturated: where its prompt is computed first."""
    free = [option for option in options if option.seconds < saturation]
    if not free:
        return min(
            options, key=lambda option: (option.seconds + option.own_seconds, option.last_chosen)
        ), "all_saturated"
    least = min([option.own_seconds for option in free]) + NEGLIGIBLE * saturation
    chosen = _quietest([option for option in free if option.own_seconds <= least], saturation)
    return chosen, "prefix" if chosen.num_held else "least_work"


def least_work(options: Sequence[Option], saturation: float) -> tuple[Option, Reason]:
    """The replica with the least work, wherever the prefix is."""
    return _quietest(options, saturation), "least_work"


def round_robin(options: Sequence[Option], saturation: float) -> tuple[Option, Reason]:
    """Each in turn, whatever there is to do."""
    return min(options, key=lambda option: option.last_chosen), "round_robin"


POLICIES: dict[str, Policy] = {"prefix": prefix, "least_work": least_work, "round_robin": round_robin}
