"""The numbers of rows that captured steps have, and kernels chosen by them: the same with graphs and without.
Knows nothing of graphs or of kernels: numbers in, numbers out.

A step of 7 rows is replayed as one of 8. Were kernels chosen by the rows alone, it would take others when it runs kernel by
kernel, which sum in another order."""

from functools import cache

_FIRST = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


def ladder(max_rows: int) -> list[int]:
    """Batch sizes that are captured: steps of an eighth or so, so that little of a batch is padding."""
    sizes = list(_FIRST)
    step = 8
    while sizes[-1] < max_rows:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_rows] + [max_rows]


@cache
def captured_size(num_rows: int) -> int:
    """The smallest size of a long ladder that holds so many rows. Sizes of a ladder that ends earlier have the same."""
    return next(size for size in ladder(2 * num_rows + 1) if size >= num_rows)
