"""Products of 1 to 8 rows by programs that stay for many outputs (`int4_stream`, `fp8_stream`): their tiles."""

from typing import NamedTuple

MAX_ROWS = 8
FP8_COLUMNS = 64  # of a warp's tile
HELD_TILES = 2  # blocks of x, 128 columns each, for which a thread has registers beside W's


class StreamChoice(NamedTuple):
    num_warps: int  # side by side along K
    pairs: int  # of eight outputs, twice, that a program computes together
    per_processor: int  # programs
    depth: int  # such outputs in a program's loop
    ahead: int  # tiles of a warp that are loaded before they are used; a multiple or a divisor of those in the loop, or there is one round


def options(choice: StreamChoice, pdl: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": choice.num_warps}
    options["maxnreg"] = min(255, 65536 // (32 * choice.num_warps * choice.per_processor) // 8 * 8)
    if pdl:
        options["launch_pdl"] = True
    return options
