"""Products of 1 to 8 rows by programs that stay for many outputs (`int4_stream`, `fp8_stream`): where they are fastest, and with which tiles.

The rules are what `benchmarks/kernels/stream.py` measured on an H200 for the shapes of an 8B model. Other widths are left to the kernels before."""

from functools import cache
from typing import NamedTuple

import torch

from octavo.kernels.triton.runtime.batch_sizes import captured_size
from octavo.kernels.triton.runtime.chip import is_hopper
from octavo.kernels.triton.runtime.launch import knows_gluon

MAX_ROWS = 8
FP8_COLUMNS = 64  # of a warp's tile
HELD_TILES = 2  # blocks of x, 128 columns each, for which a thread has registers beside W's


class StreamChoice(NamedTuple):
    num_warps: int  # side by side along K
    pairs: int  # of eight outputs, twice, that a program computes together
    per_processor: int  # programs
    depth: int  # such outputs in a program's loop
    ahead: int  # tiles of a warp that are loaded before they are used; a multiple or a divisor of those in the loop, or there is one round
    is_early: bool = False  # scales of outputs and the residual are loaded before the sums


def options(choice: StreamChoice, pdl: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": choice.num_warps}
    options["maxnreg"] = min(255, 65536 // (32 * choice.num_warps * choice.per_processor) // 8 * 8)
    if pdl:
        options["launch_pdl"] = True
    return options


@cache
def can_run(device: torch.device) -> bool:
    """Whether the kernels in Gluon run here."""
    return is_hopper(device) and knows_gluon()


# ── which, for up to a number of rows, on a chip of so many processors ──────────────────────────────

_WIDTH = 4096  # of x, which then has a place in registers: the only such width that was measured
_MANY_TURNS = 8  # of a program, beyond which one turn in vain at the end is little


@cache
def choose_int4(num_rows: int, num_outputs: int, k: int, group_size: int, processors: int) -> StreamChoice | None:
    """None: another kernel is faster, or was not compared."""
    num_rows = captured_size(num_rows)
    # More scales than one for 128 columns leave too few registers.
    if num_rows > MAX_ROWS or k != _WIDTH or group_size != 128 or num_outputs % 64:
        return None
    turns = -(-(num_outputs // 16) // processors)
    if turns > 2:
        if not _is_even(num_outputs, turns, processors):
            return None
        return StreamChoice(16, 1, 1, 2, 4) if _are_paired(turns) else StreamChoice(16, 1, 1, 1, 2)
    return StreamChoice(16, 1, 1, 2, 4) if num_rows == 4 and _fill_two(num_outputs, processors) else None


@cache
def choose_fp8(num_rows: int, num_outputs: int, k: int, processors: int) -> StreamChoice | None:
    """The same for weights in 8-bit floats."""
    num_rows = captured_size(num_rows)
    if not 1 < num_rows <= MAX_ROWS or num_outputs % 16:
        return None
    turns = -(-(num_outputs // 16) // processors)
    if turns > 2:
        if k != _WIDTH or not _is_even(num_outputs, turns, processors):
            return None
        return StreamChoice(16, 1, 1, 2, 8) if _are_paired(turns) else StreamChoice(16, 1, 1, 1, 4)
    # All programs run at once, two on a processor, and read x again.
    if _fill_two(num_outputs, processors) and 4096 <= k <= 16384 and k % 512 == 0:
        return StreamChoice(8, 1, 2, 1, 6 if k <= 8192 else 7)
    return None


def _are_paired(turns: int) -> bool:
    """Whether a loop of two turns wastes little."""
    return turns % 2 == 0 or turns > _MANY_TURNS


def _is_even(num_outputs: int, turns: int, processors: int) -> bool:
    """Whether most processors are busy in the last turn, too."""
    return 5 * (num_outputs // 16) >= 4 * turns * processors


def _fill_two(num_outputs: int, processors: int) -> bool:
    """Whether most processors have two of the units of 16 outputs, and none has more."""
    return 3 * processors <= 2 * (num_outputs // 16) <= 4 * processors
