"""RecentPrompts: where a prompt begins to differ from the latest ones of the same API key. It tells a client which part of its prompts defeats the
prefix cache. Prompts of other keys are never compared."""

from array import array
from collections import OrderedDict, deque
from typing import NamedTuple

MAX_OWNERS = 64  # keys; those that were not seen for longest are forgotten
MAX_COMPARED = 8  # latest prompts of a key
MAX_TOKENS = 2**20  # of all keys, 4 bytes each


class Difference(NamedTuple):
    at: int  # number of the first token that differs, counted from 0
    request_id: str  # the HTTP request with the longest beginning in common


class _Prompt(NamedTuple):
    request_id: str
    tokens: bytes


class RecentPrompts:
    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, deque[_Prompt]] = OrderedDict()
        self._num_bytes = 0

    def add(self, owner: bytes, request_id: str, prompt_ids: list[int], compare: bool) -> Difference | None:
        """Remember a prompt. `compare`: return where it differs from the earlier one that has most of its beginning. None: no token is in
        common, or it is the beginning of an earlier one."""
        tokens = array("i", prompt_ids).tobytes()
        prompts = self._owners.setdefault(owner, deque())
        self._owners.move_to_end(owner)
        found = _longest(tokens, prompts) if compare else None
        prompts.append(_Prompt(request_id, tokens))
        self._num_bytes += len(tokens)
        if len(prompts) > MAX_COMPARED:
            self._num_bytes -= len(prompts.popleft().tokens)
        while self._num_bytes > 4 * MAX_TOKENS or len(self._owners) > MAX_OWNERS:
            self._forget_oldest()
        return found

    def clear(self) -> None:
        self._owners.clear()
        self._num_bytes = 0

    def _forget_oldest(self) -> None:
        owner, prompts = next(iter(self._owners.items()))
        self._num_bytes -= len(prompts.popleft().tokens)
        if not prompts:
            del self._owners[owner]


def _longest(tokens: bytes, prompts: deque[_Prompt]) -> Difference | None:
    best, request_id = 0, ""
    for prompt in reversed(prompts):
        if best and prompt.tokens[: best + 4] != tokens[: best + 4]:  # no longer than the best: the case of most
            continue
        length = _common(tokens, prompt.tokens)
        if length > best:
            best, request_id = length, prompt.request_id
    return Difference(best // 4, request_id) if 4 <= best < len(tokens) // 4 * 4 and request_id else None


def _common(a: bytes, b: bytes) -> int:
    """Bytes at the beginning that are equal, as whole tokens. Halves the interval, so that most of it is one comparison of memory."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 4:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 8 * 4
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
