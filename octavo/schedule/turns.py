"""Turns: which sequence of every response leads.

A response's sequences are all choices of all its prompts; a beam search counts as one. The oldest that is open leads and has turn
0; the others have the turns after it. Leads are served first come, first served, before all others (policy.py), so a response takes
one place in the queue, however many sequences it has. When a lead ends, the next takes a new place, behind all leads there are."""

from collections import OrderedDict

from octavo.schedule.request import Request


class Turns:
    def __init__(self) -> None:
        self._open: dict[str, OrderedDict[int, Request]] = {}  # response → its open sequences, oldest first

    def join(self, request: Request) -> None:
        """Give a new sequence its turn: the one after all that its response has."""
        sequences = self._open.setdefault(request.response_id, OrderedDict())
        request.turn = len(sequences)
        request.gives_way = bool(sequences)
        sequences[request.sequence] = request

    def restore(self, request: Request) -> None:
        """Take in a sequence that has its turn already. To be called in the order of their sequences."""
        self._open.setdefault(request.response_id, OrderedDict())[request.sequence] = request

    def leave(self, request: Request) -> Request | None:
        """A sequence has ended. Returns the one that leads its response from now on, where that is another."""
        sequences = self._open.get(request.response_id)
        if sequences is None or sequences.pop(request.sequence, None) is None:
            return None  # a beam: only the leader of its search is counted
        if not sequences:
            del self._open[request.response_id]
            return None
        return next(iter(sequences.values())) if request.turn == 0 else None
