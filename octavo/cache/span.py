"""How many pages a sequence holds in each group, from its length and the group's attention window."""

from collections.abc import Sequence


def first_seen(position: int, window: int, page_size: int) -> int:
    """First page-table entry that a token at `position`, or any later token, sees. `window` 0: it sees all."""
    return max(0, position - window + 1) // page_size if window else 0


def most_held(window: int, step_tokens: int, page_size: int) -> int:
    """Most pages that a step of `step_tokens` reads and writes under a window, wherever it begins in a page."""
    num_positions = window - 1 + step_tokens
    return (num_positions + page_size - 2) // page_size + 1


def pages_of(num_tokens: int, page_size: int, windows: Sequence[int], step_tokens: int) -> int:
    """Most pages that one sequence of `num_tokens` ever holds, over all groups."""
    total = -(-num_tokens // page_size)
    return sum(min(total, most_held(window, step_tokens, page_size)) if window else total for window in windows)


def pages_of_beams(
    prompt_len: int, num_tokens: int, width: int, page_size: int, windows: Sequence[int], step_tokens: int
) -> int:
    """Most pages that `width` beams ever hold. Each has `num_tokens` including the prompt; they share the prompt's full pages."""
    total, shared = -(-num_tokens // page_size), prompt_len // page_size
    return sum(
        width * min(total, most_held(window, step_tokens, page_size)) if window else shared + width * (total - shared)
        for window in windows
    )


def longest(num_pages: int, limit: int, page_size: int, windows: Sequence[int], step_tokens: int) -> int:
    """Most tokens, up to `limit`, that one sequence can have in `num_pages`: a multiple of the page size, or the limit."""
    if pages_of(limit, page_size, windows, step_tokens) <= num_pages:
        return limit
    low, high = 0, -(-limit // page_size)  # in pages: `low` fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if pages_of(middle * page_size, page_size, windows, step_tokens) <= num_pages:
            low = middle
        else:
            high = middle
    return low * page_size
