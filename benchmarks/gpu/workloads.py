"""The five loads every engine is compared on: prompts of token ids and output lengths, a function of the seed alone.
The draws and their order are fixed: another order would be another load."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

_LOWEST_ID, _HIGHEST_ID = 1000, 29_999  # inside every vocabulary that is compared, above the special tokens


class Item(NamedTuple):
    """One request. Its first `shared_len` tokens are the same in every request of the load."""

    prompt: list[int]
    output_len: int
    shared_len: int = 0


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_LOWEST_ID, _HIGHEST_ID + 1) for _ in range(count)]


def _mixed(rng: random.Random, num: int, shortest: int, longest: int) -> list[Item]:
    """Draw prompt and output lengths uniformly between the two. A request's length is drawn before its ids."""
    return [Item(_ids(rng, rng.randint(shortest, longest)), rng.randint(shortest, longest)) for _ in range(num)]


def _equal(rng: random.Random, num: int, prompt_len: int, output_len: int) -> list[Item]:
    return [Item(_ids(rng, prompt_len), output_len) for _ in range(num)]


def _shared_prefix(rng: random.Random, num: int, prefix_len: int, suffix_len: int, output_len: int) -> list[Item]:
    prefix = _ids(rng, prefix_len)
    return [Item(prefix + _ids(rng, suffix_len), output_len, prefix_len) for _ in range(num)]


_KINDS: dict[str, tuple[Callable[..., list[Item]], tuple[int, ...]]] = {
    "single_stream": (_equal, (1, 128, 256)),
    "mixed": (_mixed, (256, 100, 1024)),
    "decode_heavy": (_equal, (512, 128, 512)),
    "prefill_heavy": (_equal, (64, 4096, 1)),
    "shared_prefix": (_shared_prefix, (256, 2048, 64, 64)),
}
NAMES = tuple(_KINDS)


def make(name: str, seed: int, scale: float = 1.0) -> list[Item]:
    """`scale` shrinks the number of requests and all lengths, for a rehearsal on a small machine."""
    draw, sizes = _KINDS[name]
    return draw(random.Random(seed), *(max(1, round(size * scale)) for size in sizes))


def counts_inputs(name: str) -> bool:
    """Return whether the load's figure is input tokens per second; otherwise it is output tokens per second."""
    return name == "prefill_heavy"


def folded(items: Sequence[Item], vocab_size: int) -> list[Item]:
    """Map ids that the vocabulary lacks to ids that it has. Without such ids, nothing changes."""
    if vocab_size > _HIGHEST_ID:
        return list(items)
    return [item._replace(prompt=[token % vocab_size for token in item.prompt]) for item in items]
