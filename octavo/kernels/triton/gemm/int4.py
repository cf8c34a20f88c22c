"""y = x · Wᵀ with 4-bit weights that stay packed: which kernel, and with which tiles, for a number of rows and a shape.

One to eight rows: `int4_stream` where `stream` says that it is faster. One to four rows: `int4_few`. More, up to some hundred:
`int4_hopper`, where there is such a chip. Else the weight is decoded to 16 bits and torch multiplies."""

from functools import cache

import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.kernels.triton.elementwise.activation import gate_mul
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.gemm.int4_decode import decoded
from octavo.kernels.triton.gemm.int4_layout import Int4Tensor
from octavo.kernels.triton.gemm.skinny import num_processors
from octavo.kernels.triton.gemm.stream import StreamChoice, can_run, choose_int4
from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS
from octavo.kernels.triton.runtime.batch_sizes import captured_size
from octavo.kernels.triton.runtime.chip import starts_early

ACTIVATIONS = ("silu", "gelu_tanh")
FEW_ROWS = 4
READING_ROWS = 64  # up to here the time is that of reading W
MANY_ROWS = 2048  # with more, decoding takes less than what torch's product gains, unless a gate comes after

# Rows, groups of 64 outputs, stages, programs per processor, and clocks for a block of K, as measured on an H200.
_TILES = ((64, 1, 5, 2, 950), (128, 1, 5, 1, 800), (128, 2, 5, 1, 1375), (256, 2, 3, 1, 2500))
# Where a rule of clocks is wrong: a tile of which many rows lie beyond the last was slower than a full one. By groups of 64 outputs and blocks
# of K: from how many rows, up to how many, and the fastest tile, as above.
_MEASURED = {
    (64, 32): ((65, 128, (64, 1, 2, 5, 2)), (129, 192, (64, 1, 1, 5, 2))),
    (64, 112): ((129, 192, (128, 2, 2, 5, 1)),),
}
_ALONE = 620  # clocks of the first with one program per processor
_ENDS = 4  # blocks whose time beginning and end of a tile take


def int4_linear(
    x: torch.Tensor,
    weight: Int4Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: str | None = None,
    pdl: bool = False,
    is_fixed: bool = False,
) -> torch.Tensor:
    """x [M, K], weight [N, K] → [M, N], summed in float32 and rounded once.

    norm: (weight [K], epsilon) of an RMSNorm of x before the product. residual [M, N]: the product is added to it in place,
    and it is returned. gated: the weight holds gate and up; the result [M, N/2] is the named activation of gate, times up.
    is_fixed: a row's bits do not depend on the other rows. pdl: start reading the weight before the previous kernel has ended."""
    if gated is not None and gated not in ACTIVATIONS:
        raise ConfigError(f"activation {gated!r} has no kernel; use one of {', '.join(ACTIVATIONS)}")
    assert gated is None or weight.is_interleaved
    num_rows = x.shape[0]
    n = weight.num_outputs // 2 if gated else weight.num_outputs
    pdl = pdl and starts_early(x.device)
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_rows, n))
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device) if residual is None else residual
    if num_rows == 0:
        return out
    streamed: StreamChoice | None = None
    choice: Choice | None = None
    if can_run(x.device) and weight.num_columns % 8 == 0:
        across, depth = weight.codes.shape[:2]
        processors = num_processors(x.device)
        if not is_fixed:
            streamed = choose_int4(num_rows, weight.num_outputs, weight.num_columns, weight.group_size, processors)
        if streamed is None:
            choice = choose(num_rows, across, depth, gated is not None, processors, is_fixed)
    is_few = streamed is not None or (choice is not None and choice[0] == "few")
    in_fragments = is_few and norm is not None and weight.num_columns % 128 == 0
    if norm is not None:
        x = rms_norm(x, *norm, is_fixed=is_fixed, pdl=pdl, in_fragments=in_fragments)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    if streamed is not None:
        from octavo.kernels.triton.gemm.int4_stream import int4_stream  # needs Gluon

        int4_stream(x, weight, out, residual, bias, gated or "", streamed, num_processors(x.device), pdl, in_fragments)
    elif choice is None:
        return _by_torch(x, weight, bias, residual, gated)
    elif choice[0] == "few":
        from octavo.kernels.triton.gemm.int4_few import FewChoice, few_product  # needs Gluon

        few_product(x, weight, out, residual, bias, gated or "", FewChoice(*choice[1:]), pdl, in_fragments)
    else:
        from octavo.kernels.triton.gemm.int4_hopper import Tile, product  # needs Gluon

        product(x, weight, out, residual, bias, gated or "", Tile(*choice[1:]), num_processors(x.device), pdl)
    return out


def _by_torch(
    x: torch.Tensor, weight: Int4Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, gated: str | None
) -> torch.Tensor:
    plain = decoded(weight)
    if residual is not None:
        if bias is not None:
            residual.add_(bias)
        return residual.addmm_(x, plain.t())  # in place: the sum costs no pass of its own
    y = F.linear(x, plain, bias)
    return y if gated is None else gate_mul(y, gated)


Choice = tuple[str, int, int, int] | tuple[str, int, int, int, int, int]


@cache
def choose(num_rows: int, across: int, depth: int, is_gated: bool, processors: int, is_fixed: bool) -> Choice | None:
    """("few", *FewChoice) or ("tile", *Tile) for a weight of across · depth blocks that `int4_stream` does not take; None: decode it.
    The fastest measured by `benchmarks/kernels/int4.py` on an H200 for the shapes of an 8B model."""
    num_rows = captured_size(num_rows)
    if is_fixed:
        # The same sums for every number of rows: one kernel, and no shares of K.
        return ("tile", *_tile(num_rows, across, depth, processors, 1))
    if num_rows > MANY_ROWS and not is_gated:
        return None
    if num_rows <= FEW_ROWS:
        num_warps = min(4, 1 << (depth - 1).bit_length())
        if depth > 64:
            return "few", 1, num_warps, 14
        return ("few", 1, num_warps, 8) if num_rows <= 2 else ("few", 2, num_warps, 8)
    return ("tile", *_tile(num_rows, across, depth, processors, 8))


def _tile(num_rows: int, across: int, depth: int, processors: int, most: int) -> tuple[int, int, int, int, int]:
    """Rows, groups of 64 outputs, programs that share a tile's K (at most `most`), stages, programs per processor."""
    if num_rows <= 32:
        rows = 16 if num_rows <= 16 else 32
        split = _split(across, depth, 2 * processors, rows, most)
        return rows, 1, split, 8, 3 if rows == 16 and split > 1 else 2
    if num_rows <= READING_ROWS:
        return 64, 1, _split(across, depth, 2 * processors, 64, most), 5, 2
    for least, largest, measured in _MEASURED.get((across, depth), ()):
        if most > 1 and least <= num_rows <= largest:
            return measured

    def cost(tile: tuple[int, int, int, int, int]) -> float:
        rows, sides, _, per_processor, clocks = tile
        if across % sides:
            return float("inf")
        tiles = across // sides * -(-num_rows // rows)
        if per_processor == 2 and tiles <= processors:
            return _ALONE * (depth + _ENDS)
        if is_shared(tiles, rows, sides):
            return clocks * (depth / 2 + 3 * _ENDS)
        return -(-tiles // (processors * per_processor)) * clocks * (depth + _ENDS)

    def is_shared(tiles: int, rows: int, sides: int) -> bool:
        has_room = 2 * tiles * 64 * sides * rows <= SCRATCH_NUMBERS and tiles <= MAX_SHARED_TILES
        return most > 1 and depth >= 8 and 2 * tiles <= processors and has_room

    rows, sides, stages, per_processor, _ = min(_TILES, key=cost)
    tiles = across // sides * -(-num_rows // rows)
    split = 2 if per_processor == 1 and is_shared(tiles, rows, sides) else 1
    return rows, sides, split, stages, per_processor


def _split(across: int, depth: int, programs: int, rows: int, most: int) -> int:
    split = 1
    while split * 2 <= min(most, depth // 4) and across * split * 2 <= programs:
        split *= 2
    while split > 1 and (across * split * 64 * rows > SCRATCH_NUMBERS or across > MAX_SHARED_TILES):
        split //= 2
    return split


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows that together use every kernel that up to max_rows rows may use."""
    counts = [1, 2, 4, 8, 16, 32, 64, *range(128, min(max_rows, MANY_ROWS + 1), 64), MANY_ROWS + 1]
    return [count for count in counts if count <= max_rows]
