"""FileLayout: how all numbers of an adapter's file go to their places in memory, in one call.

Adapters of one base mostly have the same matrices in the same order. To look at each of hundreds of them takes Python some 20 ms, in which steps
wait for the lock of the interpreter. So where each number comes from is found once for files that are alike: by holding an adapter whose
numbers are their own places in the file."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.worker.host_copies import Form

TAIL_BYTES = 512  # of zeros behind a file's bytes: two units of the widest type
_UNITS = (32, 16, 8, 4, 2, 1)  # numbers that are moved at a time
_ROWS_AT_A_TIME = 8192
_MOST_UNITS = 4_000_000  # 32 MB for a layout


class FileLayout(NamedTuple):
    form: Form  # without scales
    pairs: NDArray[np.int64]  # of each part in the form's table: the number of its pair in the file, whose scale it has
    unit: int  # numbers
    sources: NDArray[
        np.intp
    ]  # of each unit of the adapter's memory: the unit of the file; the one after the last is zeros

    @property
    def nbytes(self) -> int:
        return self.sources.nbytes + self.form.table.nbytes

    def fill(self, image: NDArray[np.uint8], read: NDArray[np.uint8], itemsize: int) -> None:
        """`read`: a file's bytes, and TAIL_BYTES of zeros. Both have numbers of this size."""
        whole: Any = np.dtype((np.void, self.unit * itemsize))
        np.take(_as(read, whole), self.sources, out=_as(image, whole), mode="clip")  # another mode would copy twice

    def with_scales(self, scales: NDArray[np.float32]) -> Form:
        """The form of an adapter with these scales: of each pair, or one for all."""
        table = self.form.table.copy()
        each = scales[self.pairs] if len(scales) > 1 else np.full(len(self.pairs), scales[0])
        table[self.form.is_used, 5] = each.view(np.int32)
        return self.form._replace(table=table)


def layout_from(form: Form, origins: NDArray[np.int32], num_numbers: int) -> FileLayout | None:
    """`form`: of an adapter whose scales are the numbers of its pairs. `origins`: of each of its numbers, that of the file's number that it is, counted
    from 1; 0: none. None: single numbers go their own ways, so that the layout would take much memory."""
    pairs = form.table[form.is_used, 5].astype(np.int32).view(np.float32).astype(np.int64)
    for unit in _UNITS:
        if len(origins) // unit > _MOST_UNITS:
            break
        rows = origins.reshape(-1, unit)
        first = rows[:, 0]
        if not ((first[first > 0] - 1) % unit).any() and _are_runs(rows):
            zeros = -(-num_numbers // unit)
            return FileLayout(form, pairs, unit, np.where(first > 0, (first - 1) // unit, zeros).astype(np.intp))
    return None


def _are_runs(rows: NDArray[np.int32]) -> bool:
    """Whether each row counts up from its first number, or is zeros. In parts, which stay in the cache."""
    steps = np.arange(rows.shape[1], dtype=np.int32)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        some = rows[start : start + _ROWS_AT_A_TIME]
        if not np.array_equal(some, some[:, :1] + steps * (some[:, :1] > 0)):
            return False
    return True


def _as(memory: NDArray[np.uint8], dtype: Any) -> NDArray[Any]:
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
