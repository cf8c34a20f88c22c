"""Rows: where every open request is: in a row of the batch, in the queue, or waiting for its grammar."""

from bisect import insort
from operator import attrgetter

from octavo.schedule.policy import WaitingQueue
from octavo.schedule.request import Request

order_of = attrgetter("order")
_rank_of = attrgetter("tenant.rank")


class Rows:
    """A request is in at most one of `running`, `waiting` and `awaiting_grammar`. A choice whose prompt is computed by its leader, or
    a beam that its group's leader stands for in the queue, is in none of them."""

    def __init__(self, num_rows: int, waiting: WaitingQueue | None = None) -> None:
        """`waiting`: an empty queue; None: one in the policy's order."""
        self.running: list[Request] = []  # in the policy's order: oldest first
        self.waiting = WaitingQueue() if waiting is None else waiting
        # Requests whose grammar is still being compiled, by sequence. They block no other request and keep their place in the
        # policy's order: when the grammar is ready, they enter the queue there.
        self.awaiting_grammar: dict[int, Request] = {}
        self.free = list(range(num_rows - 1, -1, -1))  # a stack: the row that was left last is taken first
        self.left: list[int] = []  # rows that were left and that no plan has named yet

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.awaiting_grammar)

    def backlog(self, only_primaries: bool) -> tuple[int, int]:
        """How many prompts wait, and their tokens; or only those of primaries (policy.Siblings)."""
        queued = self.waiting.primaries if only_primaries else self.waiting.prompts
        held = [
            request.prompt_len
            for request in self.awaiting_grammar.values()
            if (request.is_primary if only_primaries else request.index == 0)
        ]
        return queued.num_requests + len(held), queued.num_tokens + sum(held)

    def waits(self, request: Request) -> bool:
        return request in self.waiting or request.sequence in self.awaiting_grammar

    def queue(self, request: Request) -> None:
        self.waiting.add(request)

    def hold_back(self, request: Request) -> None:
        """Keep it out of the queue until its grammar is ready."""
        self.awaiting_grammar[request.sequence] = request

    def let_in(self, request: Request) -> None:
        """Its grammar is ready: it joins the queue."""
        del self.awaiting_grammar[request.sequence]
        self.waiting.add(request)

    def seat(self, request: Request) -> None:
        """Give it a row. There must be a free one."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.row = self.free.pop()
        insort(self.running, request, key=order_of)
        if request.tenant is not None:
            request.tenant.seated(request)

    def leave(self, request: Request) -> None:
        """Take its row away. What steps in flight compute for it no longer counts: its epoch is over."""
        self.running.remove(request)
        self.left.append(request.row)
        self.free.append(request.row)
        request.row = -1
        request.epoch += 1
        if request.tenant is not None:
            request.tenant.unseated(request)

    def requeue(self, request: Request) -> None:
        """Take its row away and put it back into the queue, at the place that the policy gives it."""
        self.leave(request)
        self.waiting.add(request)

    def promote(self, request: Request, place: int) -> None:
        """Make it the primary of its response, at this place in the order. If it has a row, it keeps it."""
        is_waiting = request in self.waiting
        if is_waiting:
            self.waiting.remove(request)
        elif request.row >= 0:
            self.running.remove(request)
        request.num_siblings_ahead, request.place = 0, place
        if is_waiting:
            self.waiting.add(request)
        elif request.row >= 0:
            insort(self.running, request, key=order_of)

    def sort(self) -> None:
        """Sort what runs after the order of tenants has changed. Within a tenant it is sorted already."""
        self.running.sort(key=_rank_of)

    def restore(self, running: list[Request]) -> None:
        """These run, by a snapshot."""
        self.running = sorted(running, key=order_of)
        for request in running:
            if request.tenant is not None:
                request.tenant.seated(request)

    def remove(self, request: Request) -> None:
        """It has ended, wherever it is."""
        if request.row >= 0:
            self.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self.awaiting_grammar.pop(request.sequence, None)

    def take_left(self) -> list[int]:
        """The rows left since the last call; a plan tells the workers."""
        left, self.left = self.left, []
        return left
