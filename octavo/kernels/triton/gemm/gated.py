"""act(gate) * up of x · Wᵀ in one launch on compute capability 9.0: when it pays, and with which tiles. The kernel is in
`gated_hopper`, which is imported only for those GPUs."""

from functools import cache
from typing import NamedTuple

import torch

from octavo.kernels.triton.gemm.skinny import num_processors
from octavo.kernels.triton.runtime.batch_sizes import captured_size
from octavo.kernels.triton.runtime.chip import is_hopper
from octavo.kernels.triton.runtime.launch import knows_gluon

BLOCK_K = 64  # numbers of K in a panel: 128 bytes
SHARED_BYTES = 227 * 1024 - 1024  # minus room for barriers and the compiler's needs
TRADE_BYTES = 4096  # shared memory in which threads exchange results before storing them
MAX_STAGES = 8
ACTIVATIONS = ("silu", "gelu_tanh")

FEW_ROWS = 8  # with fewer, `skinny` is faster
READING_ROWS = 128  # up to here the time is that of reading W
MANY_ROWS = 4096  # beyond, cuBLAS is near the GPU's limit unless the weight is small
# Outputs times K. cuBLAS with a separate gate loses most when the product takes only a few µs.
SMALL, LARGE = 1 << 23, 1 << 25
LEAST_FULL = 0.84  # share of the computed numbers that are results


class Tile(NamedTuple):
    block_m: int  # rows of x: 64 or 128
    block_n: int  # rows of W: half of gate, half of up

    @property
    def outputs(self) -> int:
        return self.block_n // 2

    @property
    def sides(self) -> int:
        """2: the two consumers split the rows of W; 1: the rows of x. One matrix instruction takes 64 rows of x."""
        return 2 if self.block_m == 64 else 1

    @property
    def widths(self) -> tuple[int, int]:
        """Rows of W of one consumer in its two products. Tensor sizes are powers of two: 192 is 128 and 64."""
        width = self.block_n // self.sides
        wide = min(256, 1 << (width.bit_length() - 1))
        return wide, width - wide

    @property
    def stages(self) -> int:
        each = (self.block_m + self.block_n) * BLOCK_K * 2
        return min(MAX_STAGES, max((SHARED_BYTES - TRADE_BYTES) // each, min(4, SHARED_BYTES // each)))

    @property
    def trades(self) -> bool:
        """Whether threads exchange results, in groups that hold 32 outputs, to store 16 bytes each. Not if a fourth stage
        takes the shared memory."""
        has_room = self.stages * (self.block_m + self.block_n) * BLOCK_K * 2 <= SHARED_BYTES - TRADE_BYTES
        return has_room and self.piece >= 32

    @property
    def piece(self) -> int:
        """Rows of W per copy: all copies have one size."""
        wide, narrow = self.widths
        return (narrow or wide) // 2

    def num_tiles(self, num_rows: int, n: int) -> int:
        return -(-num_rows // self.block_m) * -(-n // self.outputs)


# The tiles, of nine tried, that were fastest for some shape; each is a kernel to compile.
TILES = (Tile(64, 128), Tile(64, 256), Tile(128, 128), Tile(128, 192), Tile(128, 256))
_TILE_COST = 8192  # fixed cost of a tile, in numbers of block_m · block_n


@cache
def choose_tile(num_rows: int, n: int, processors: int) -> Tile:
    """The tile with the shortest time, independent of K: all multiprocessors compute one tile each, round after round. If
    reading W dominates, small tiles keep more reads in flight."""
    if num_rows <= TILES[0].block_m:
        return TILES[0]

    def cost(tile: Tile) -> tuple[int, int, int]:
        rounds = -(-tile.num_tiles(num_rows, n) // processors)
        padded = -(-num_rows // tile.block_m) * tile.block_m
        return rounds * (tile.block_m * tile.block_n + _TILE_COST), padded, tile.block_m + tile.block_n

    return min(TILES, key=cost)


def pays(num_rows: int, n: int, k: int, processors: int) -> bool:
    """Whether this beats both cuBLAS with a separate gate and `skinny` for n outputs, as measured by
    `benchmarks/kernels/gated.py` on an H200 for the shapes of 0.6B, 1.7B, 4B and 8B models."""
    num_rows = captured_size(num_rows)
    if num_rows < FEW_ROWS:
        return False
    if n * k <= SMALL:
        return True
    if n * k < LARGE:
        return num_rows <= READING_ROWS or (num_rows <= MANY_ROWS and _fullness(num_rows, n, processors) >= LEAST_FULL)
    # cuBLAS is near the GPU's limit here, and a round that is half empty costs more than the fused gate saves.
    if num_rows <= READING_ROWS:
        return num_rows > 32
    return 192 < num_rows <= 256 and _fullness(num_rows, n, processors) >= LEAST_FULL


def _fullness(num_rows: int, n: int, processors: int) -> float:
    """Results as a share of all numbers that the multiprocessors compute in whole rounds of whole tiles."""
    tile = choose_tile(num_rows, n, processors)
    rounds = -(-tile.num_tiles(num_rows, n) // processors)
    return num_rows * n / (rounds * processors * tile.block_m * tile.outputs)


@cache
def _can_run(device: torch.device, dtype: torch.dtype) -> bool:
    return is_hopper(device) and dtype in (torch.bfloat16, torch.float16) and knows_gluon()


def fits(weight: torch.Tensor, name: str) -> bool:
    """Whether there is a kernel for this GPU, type, activation and shape. Rows of x, W and results must be aligned to 16
    bytes."""
    width, k = weight.shape
    return name in ACTIVATIONS and width % 16 == 0 == k % 8 and _can_run(weight.device, weight.dtype)


def gated_pays(num_rows: int, weight: torch.Tensor, name: str) -> bool:
    """Whether `gated_linear` supports this weight and is the fastest way."""
    width, k = weight.shape
    return fits(weight, name) and pays(num_rows, width // 2, k, num_processors(weight.device))


def gated_linear(x: torch.Tensor, weight: torch.Tensor, name: str, *, pdl: bool = False) -> torch.Tensor:
    """x [M, K], weight [2 N, K] with the rows of gate, then of up → [M, N] of name(gate) * up, summed in float32 and rounded
    once. pdl: start reading the weight before the previous kernel has ended."""
    from octavo.kernels.triton.gemm.gated_hopper import product  # needs Gluon, which other GPUs do not

    assert fits(weight, name)
    processors = num_processors(x.device)
    return product(x, weight, name, choose_tile(x.shape[0], weight.shape[0] // 2, processors), processors, pdl)


def gated_row_counts(weight: torch.Tensor, name: str, max_rows: int) -> list[int]:
    """Row counts that together use every kernel that up to max_rows rows may use. Tiles change at multiples of 64."""
    n, processors = weight.shape[0] // 2, num_processors(weight.device)
    found: dict[Tile, int] = {}
    for end in range(64, max_rows + 64, 64):
        num_rows = min(end, max_rows)
        if gated_pays(num_rows, weight, name):
            found.setdefault(choose_tile(num_rows, n, processors), num_rows)
    return list(found.values())
