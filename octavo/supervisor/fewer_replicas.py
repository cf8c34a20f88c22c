"""Which replicas are stopped when there are more than wanted, also during a rolling restart. Pure.

Those with the highest numbers go. One that takes requests goes only when another one does, so that a fleet never is without."""

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Standing(NamedTuple):
    """A replica that is not being removed."""

    number: int
    is_ready: bool
    takes_requests: bool  # it is ready, and every API process sends it requests


def numbers_to_stop(live: Sequence[Standing], target: int, to_restart: Collection[int]) -> list[int]:
    """Replicas to drain and stop now; the caller asks again later. `to_restart`: those that a rolling restart has not come to. One that is
    not ready is stopped at once: it serves no request, and may never be ready."""
    left, stopped = sorted(live), list[int]()
    while len(left) > target:
        *others, last = left
        is_covered = any(each.takes_requests for each in others)
        # The only one that is left has yet to be restarted: meanwhile, this one takes the requests.
        is_cover = len(others) == 1 and others[0].number in to_restart
        if last.is_ready and (not is_covered or is_cover):
            break
        stopped.append(last.number)
        left = others
    return stopped


def next_to_restart(live: Sequence[Standing], target: int, to_restart: Collection[int]) -> int | None:
    """The next replica of a rolling restart. One that will be stopped is not restarted before. None: there is none."""
    kept = {each.number for each in sorted(live)[:target]}
    return next((number for number in to_restart if number in kept), None)
