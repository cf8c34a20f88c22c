"""The policy `cache_aware` of sglang-router, by its documentation and with its defaults, beside ours: a tree of the
prompts that were sent, which does not know what replicas have evicted, and the number of requests in progress as
load."""

from octavo.cache.page_keys import keys_of

CACHE_THRESHOLD = 0.3  # share of a prompt that must be known for its replica to be chosen
BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD = (
    64,
    1.5,
)  # requests more, and times as many, from which on the shortest queue is chosen


class ApproximateTree:
    def __init__(self, root: bytes, page_size: int, num_replicas: int) -> None:
        """Prompts are compared by pages instead of by characters: a prefix differs by less than a page."""
        self._root, self._page_size = root, page_size
        self._known: list[set[bytes]] = [set() for _ in range(num_replicas)]
        self._open = [0] * num_replicas
        self._places: dict[str, int] = {}

    def choose(self, name: str, prompt: list[int]) -> int:
        keys = keys_of(self._root, prompt, self._page_size)
        most, least = max(self._open), min(self._open)
        if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
            chosen = self._open.index(least)
        else:
            matches = [
                next((at for at, key in enumerate(keys) if key not in known), len(keys)) for known in self._known
            ]
            best = max(range(len(matches)), key=matches.__getitem__)
            if matches[best] * self._page_size > CACHE_THRESHOLD * len(prompt):
                chosen = best
            else:
                chosen = min(range(len(self._known)), key=lambda each: len(self._known[each]))
        self._known[chosen].update(keys)
        self._open[chosen] += 1
        self._places[name] = chosen
        return chosen

    def ended(self, name: str) -> None:
        self._open[self._places.pop(name)] -= 1
