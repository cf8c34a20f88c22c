"""The batch sizes of captured steps. Kernels are chosen by them, with graphs and without.

A step of 7 rows is replayed as one of 8. If kernels were chosen by the actual number of rows, the same step run without a
graph would use other kernels, which sum in another order."""

from functools import cache

_FIRST = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


def ladder(max_rows: int) -> list[int]:
    """The batch sizes to capture, about an eighth apart, so that little of a batch is padding."""
    sizes = list(_FIRST)
    step = 8
    while sizes[-1] < max_rows:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_rows] + [max_rows]


@cache
def captured_size(num_rows: int) -> int:
    """The smallest size of a long ladder that holds num_rows. The same for a step and for the size it is padded to, also if
    the captured ladder ends earlier."""
    return next(size for size in ladder(2 * num_rows + 1) if size >= num_rows)
