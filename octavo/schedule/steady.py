"""Steady stretches: plans in which every row computes its next token and nothing else happens. A simulation takes many of them in one
jump (decision 055).

jump() leaves the scheduler and its cache as so many calls of plan() and commit() would. Why it may: between two inputs, a plan depends
on the scheduler alone. If the last plan advanced every running row by one token and neither admitted nor preempted, the next one does the same,
one position further, until a row reaches its last token, a growing row finds no page, or what keeps the queue's head out changes. The
first is known beforehand. Pages are taken and published by the cache itself, in the order of the steps, so the other two are seen when
they come. The head waits for a row or for budget as long as the rows stay the same; for pages as long as none becomes free, which
nothing here does, and as long as no page is published that it could share.

tests/schedule/test_steady.py compares plans with jumps to plans without, step by step, over random workloads."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from octavo.schedule.request import Request
from octavo.schedule.results import Planned
from octavo.schedule.scheduler import Scheduler


class Growth(NamedTuple):
    """A row got a page in one of the steps of a jump."""

    step: int  # 0: the first of them
    row: int
    entry: int
    page: int


class Jump(NamedTuple):
    num_steps: int
    growths: list[Growth]  # in the order of the plans


NextTokens = Callable[[Request, int], list[int]]
"""(request, count) → the tokens that it samples next. None of them is one of its stop tokens."""


def steady_steps(scheduler: Scheduler, last: Planned) -> int:
    """How many plans may follow that are like `last`, for all that is known before they take pages. `last`: the last plan that was made;
    since then nothing was added, aborted or learned. At most one plan is in flight: `last`. 0: the next plan may be another."""
    plan, running = last.plan, scheduler.rows.running
    if last.num_tokens != len(running) or last.requests != running or not running or False in plan.samples:
        return 0
    if last.admitted or last.returned or last.forking or last.forked or last.queued or plan.moves or plan.enters:
        return 0
    if scheduler.num_stages > 1 or scheduler.speculation is not None or scheduler._watched or scheduler.rows.left:
        return 0
    num_in_flight = len(scheduler._in_flight)
    if num_in_flight > 1 or (num_in_flight and scheduler._in_flight[0] is not last):
        return 0
    if not _head_stays(scheduler, last):
        return 0
    most = 1 << 62
    page_size = scheduler.cache.page_size
    for request in running:
        if request.special is not None or request.pending != num_in_flight or not request.capacity:
            return 0
        if request.computed != len(request.tokens) - 1 + num_in_flight:  # a part of its prompt, of one token
            return 0
        if request.computed - num_in_flight - request.num_published >= page_size:
            return 0
        most = min(most, request.max_len - len(request.tokens) - 1)
    if (
        len(scheduler.cache.windows) > 1 or scheduler.cache.windows[0]
    ):  # growing may free pages that a window has passed
        most = min(most, *(request.capacity - request.computed for request in running))
    return max(most, 0)


def _head_stays(scheduler: Scheduler, last: Planned) -> bool:
    """Whether the queue's head, if there is one, keeps waiting while all rows grow."""
    head, cache = scheduler.rows.waiting.head(), scheduler.cache
    if head is None:
        return True
    if head is not last.head or head.order < scheduler.rows.running[-1].order:
        return False
    if last.head_waits_for == "pages":
        if any(cache.windows) or head.special is not None:  # with windows, pages may become free
            return False
        # Since the plan was made, a commit may have published a page that the head can share.
        spare = len(scheduler.rows.running) // 2 * len(cache.windows)
        return cache.num_missing(head.sequence, head.tokens, reuse=head.may_reuse) + spare > 0
    return last.head_waits_for in ("rows", "budget")


def jump(scheduler: Scheduler, last: Planned, num_steps: int, next_tokens: NextTokens) -> Jump:
    """Take up to `num_steps` steps, which steady_steps() allows, at once. Fewer if pages run out before, or a page is published that the
    queue's head could share."""
    cache, running = scheduler.cache, scheduler.rows.running
    page_size, pool = cache.page_size, scheduler.cache.pool
    depth = len(scheduler._in_flight)
    starts = [(len(request.tokens), request.computed) for request in running]
    # (step, 0: a row needs a page before it, 1: a row has filled a page in it, number of the row): the order in which it happens
    events: list[tuple[int, int, int]] = []
    if pool.num_pages:
        for at, request in enumerate(running):
            first = request.capacity - request.computed
            events += [(step, 0, at) for step in range(first, num_steps, page_size)]
    num_growths = len(events)
    for at, request in enumerate(running):
        request.tokens += next_tokens(request, num_steps)
        if cache.prefix_caching:
            first = request.num_published + page_size + depth - request.computed - 1
            events += [(step, 1, at) for step in range(first, num_steps, page_size)]
    events.sort()
    growths: list[Growth] = []
    wanted = _wanted_key(scheduler, last)
    is_scarce = num_growths > pool.num_free
    begun = -1  # the last step whose pages were counted
    for at_event, (step, kind, at) in enumerate(events):
        if step >= num_steps:
            break
        request = running[at]
        if kind:
            computed = starts[at][1] + step + 1 - depth
            cache.publish(request.sequence, request.tokens, computed)
            if wanted is not None and wanted in pool.index:
                # All of this step's pages are still published: the next plan comes after.
                num_steps, wanted = step + 1, None
        else:
            if is_scarce and step > begun:
                begun = step
                if _num_growths(events, at_event) > pool.num_free:
                    num_steps = step
                    break
            position = starts[at][1] + step
            grown = cache.extend(request.sequence, position, position + 1)
            assert grown is not None
            growths.append(Growth(step, request.row, grown[0].entries[0], grown[0].pages[0]))
    for request, (length, computed) in zip(running, starts, strict=True):
        del request.tokens[length + num_steps :]
        request.computed = computed + num_steps
        request.capacity = cache.capacity(request.sequence) if pool.num_pages else request.capacity
        end = request.computed - depth
        if end - request.num_published >= page_size:
            request.num_published = end // page_size * page_size
    scheduler.num_steps += num_steps
    if depth and num_steps:
        _move_plan(last, num_steps, growths)
    return Jump(num_steps, growths)


def _num_growths(events: list[tuple[int, int, int]], first: int) -> int:
    """Pages that the step of this event takes. It is the first of its step."""
    step = events[first][0]
    end = first
    while end < len(events) and events[end][:2] == (step, 0):
        end += 1
    return end - first


def _wanted_key(scheduler: Scheduler, last: Planned) -> bytes | None:
    """The key of the first page that the queue's head does not find, if it waits for pages: with it, it would need fewer."""
    head, cache = last.head, scheduler.cache
    if head is None or last.head_waits_for != "pages" or head.is_swapped or not head.may_reuse:
        return None
    if not cache.prefix_caching:
        return None
    return cache.next_key(head.sequence, head.tokens, head.params.prefix_space)


def _move_plan(last: Planned, num_steps: int, growths: list[Growth]) -> None:
    """The plan in flight is the last one of the jump now."""
    plan, new = last.plan, [growth for growth in growths if growth.step == num_steps - 1]
    last.plan = msgspec.structs.replace(
        plan,
        step=plan.step + num_steps,
        leaves=[],
        starts=[start + num_steps for start in plan.starts],
        page_rows=[growth.row for growth in new],
        page_entries=[growth.entry for growth in new],
        page_ids=[growth.page for growth in new],
        page_groups=[],
    )
