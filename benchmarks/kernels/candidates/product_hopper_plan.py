"""Deals a matrix product's tiles out to programs, and chooses tiles by shape.
Knows nothing of tensors and launches: numbers in, numbers out.

132 processors finish together only if the work divides by 132, and tiles of a convenient size rarely do. So the tiles that
make whole rounds are dealt out whole, and the rest is shared: each program gets as many panels of K of those tiles as any
other, from the tile where the program before it stopped."""

from functools import cache
from typing import NamedTuple

BLOCK_K = 64  # numbers of K in a panel: 128 bytes
SHARED_BYTES = 227 * 1024 - 1024  # less barriers and what the compiler needs
TRADE_BYTES = 4096  # where threads trade results before they are stored
MAX_STAGES = 8
SHARED_TILES = 1024  # at most, in one launch
MAX_TILE = 256 * 192  # numbers of the result: three quarters of all registers
FEW_ROWS = 32  # up to here other kernels are faster


class Choice(NamedTuple):
    block_m: int  # rows of x: 64, 128 or 256
    block_n: int  # rows of W; of gate and of up each half of them
    split: int = 1  # programs that share a tile's K; 0: tiles beyond whole rounds are shared evenly by all programs
    group: int = 8  # tiles that follow one another down the rows of x before the next rows of W

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} {'even' if self.split == 0 else f'split {self.split}'} g{self.group}"

    @property
    def sides(self) -> int:
        """2: the two consumers take half of W's rows each; 1: half of x's. One matrix instruction takes 64 rows of x."""
        return 2 if self.block_m == 64 else 1

    @property
    def widths(self) -> tuple[int, int]:
        """Rows of W of one consumer in its two products. Tensors have powers of two: 192 are 128 and 64."""
        width = self.block_n // self.sides
        wide = min(256, 1 << (width.bit_length() - 1))
        return wide, width - wide

    @property
    def stages(self) -> int:
        each = (self.block_m + self.block_n) * BLOCK_K * 2
        return min(MAX_STAGES, max((SHARED_BYTES - TRADE_BYTES) // each, min(4, SHARED_BYTES // each)))

    def trades(self, is_gated: bool) -> bool:
        """Whether threads trade results, in groups that hold 32 outputs, to store 16 bytes each. Not where a fourth stage
        takes the room."""
        has_room = self.stages * (self.block_m + self.block_n) * BLOCK_K * 2 <= SHARED_BYTES - TRADE_BYTES
        return has_room and self.piece(is_gated) >= 32

    def piece(self, is_gated: bool) -> int:
        """Rows of W that one copy fetches: all copies are of one size."""
        wide, narrow = self.widths
        return (narrow or wide) // (2 if is_gated else 1)


class Plan(NamedTuple):
    num_programs: int
    depth: int  # panels of K
    whole: int  # tiles dealt out whole: the first ones
    shared: int  # the others

    def scratch_numbers(self, choice: Choice) -> int:
        """float32: of every program the end of one tile and the beginning of another."""
        return 2 * self.num_programs * choice.block_m * choice.block_n if self.shared else 0


def num_tiles(num_rows: int, n: int, choice: Choice, is_gated: bool) -> int:
    outputs = choice.block_n // 2 if is_gated else choice.block_n
    return -(-num_rows // choice.block_m) * -(-n // outputs)


@cache
def plan(num_rows: int, n: int, k: int, choice: Choice, is_gated: bool, num_processors: int) -> Plan:
    """For x [num_rows, k] and n outputs."""
    tiles, depth = num_tiles(num_rows, n, choice, is_gated), -(-k // BLOCK_K)
    rest = tiles % num_processors if choice.split == 0 else 0
    # Where few tiles would be shared by very many, a whole round is shared with them: fewer sums to add up.
    if rest * 4 < num_processors < tiles and rest > 0:
        rest += num_processors
    if choice.split > 1:
        # All shares begin and end where a tile does: panels divide by the split only to within one.
        split = min(choice.split, depth)
        return Plan(tiles * split, depth, 0, tiles)
    if rest * depth < num_processors:  # nothing is left over, or not even a panel for each
        return Plan(min(tiles, num_processors), depth, tiles, 0)
    return Plan(num_processors, depth, tiles - rest, rest)


# (outputs, k, gated) → up to how many rows which tiles; None: cuBLAS is faster. What `benchmarks/kernels/product.py`
# measured on an H200, weights not in its cache.
MEASURED: dict[tuple[int, int, bool], tuple[tuple[int, Choice | None], ...]] = {}


def choose(num_rows: int, n: int, k: int, is_gated: bool) -> Choice | None:
    """The fastest tiles measured for n outputs (half of W's rows where gated), or None where cuBLAS is better."""
    if num_rows > FEW_ROWS:
        for bound, choice in MEASURED.get((n, k, is_gated), ()):
            if num_rows <= bound:
                return choice
    return None
