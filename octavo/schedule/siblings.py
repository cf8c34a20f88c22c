"""Siblings: the open sequences of one response, and which of them is its primary.

A response's sequences are all choices of all its prompts; a beam search counts as one. The oldest that is open is the primary.
Primaries are served first come, first served, before all other sequences (policy.py), so a response takes one place in the queue,
however many sequences it has. When a primary ends, the next sibling becomes primary and takes a new place, behind all primaries
there are."""

from collections import OrderedDict

from octavo.schedule.request import Request


class Siblings:
    def __init__(self) -> None:
        self._open: dict[str, OrderedDict[int, Request]] = {}  # response → its open sequences, oldest first

    def join(self, request: Request) -> None:
        """Add a new sequence, behind all that its response has."""
        sequences = self._open.setdefault(request.response_id, OrderedDict())
        request.num_siblings_ahead = len(sequences)
        request.gives_way = bool(sequences)
        sequences[request.sequence] = request

    def restore(self, request: Request) -> None:
        """Add a sequence of a snapshot, which has its place already. To be called in the order of their sequences."""
        self._open.setdefault(request.response_id, OrderedDict())[request.sequence] = request

    def leave(self, request: Request) -> Request | None:
        """A sequence has ended. Returns the one that becomes primary, if this one was."""
        sequences = self._open.get(request.response_id)
        if sequences is None or sequences.pop(request.sequence, None) is None:
            return None  # a beam: only the leader of its search is counted
        if not sequences:
            del self._open[request.response_id]
            return None
        return next(iter(sequences.values())) if request.is_primary else None
