"""y = x · Wᵀ with weights in groups (`groups_layout`) that stay packed: which kernel, and with which tiles, for a number of rows and a
shape. A few rows: `groups_few`. More, up to some hundred: `groups_tile`. Else the weight is decoded to 16 bits and torch multiplies."""

from functools import cache

import torch

from octavo.kernels.triton.gemm.groups_decode import decoded
from octavo.kernels.triton.gemm.groups_few import FewChoice, few_product
from octavo.kernels.triton.gemm.groups_layout import Groups
from octavo.kernels.triton.gemm.groups_tile import TileChoice, tile_product
from octavo.kernels.triton.gemm.invariant import invariant_linear
from octavo.kernels.triton.gemm.skinny import num_processors
from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS
from octavo.kernels.triton.runtime.batch_sizes import captured_size
from octavo.kernels.triton.runtime.chip import starts_early

FEW_ROWS = 4
MANY_ROWS = 256  # with more, decoding takes less than what torch's product gains


def group_linear(
    x: torch.Tensor,
    weight: Groups,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
    is_fixed: bool = False,
) -> None:
    """x [M, K] · weight [N, K]ᵀ + bias + residual into out [M, N], summed in float32 and rounded once. out may be columns of a wider
    tensor; residual is None or the same tensor as out. is_fixed: a row's bits do not depend on the other rows."""
    num_rows, k = x.shape
    n = weight.shape[0]
    assert weight.shape[1] == k and out.shape == (num_rows, n)
    if not num_rows:
        return
    pdl = pdl and starts_early(x.device)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    if is_fixed:
        more = None if residual is None else residual.contiguous()
        y = invariant_linear(x, decoded(weight, x.dtype), bias=bias, residual=more, pdl=pdl)
        if y.data_ptr() != out.data_ptr():
            out.copy_(y)
        return
    choice = choose(num_rows, n, k, weight.group_size, num_processors(x.device))
    match choice:
        case FewChoice():
            few_product(x, weight, out, residual, bias, choice, pdl)
        case TileChoice():
            tile_product(x, weight, out, residual, bias, choice, pdl)
        case None:
            plain = decoded(weight, x.dtype)
            if residual is not None:
                if bias is not None:
                    out.add_(bias)
                out.addmm_(x, plain.t())
            elif bias is not None:
                torch.addmm(bias, x, plain.t(), out=out)
            else:
                torch.mm(x, plain.t(), out=out)


@cache
def choose(num_rows: int, n: int, k: int, group_size: int, processors: int) -> FewChoice | TileChoice | None:
    """None: decode the weight."""
    num_rows = captured_size(num_rows)
    if num_rows > MANY_ROWS:
        return None
    if num_rows <= FEW_ROWS:
        return FewChoice(4, 4, 2) if num_rows <= 2 else FewChoice(2, 4, 2)
    block_k = 128 if group_size % 128 == 0 or 128 % group_size == 0 else group_size & -group_size
    rows = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    block_n = 64 if rows <= 64 else 128
    tiles = -(-n // block_n) * -(-num_rows // rows)
    split = 1
    while (
        tiles * split * 2 <= 2 * processors
        and split * 2 <= min(8, k // (4 * block_k))
        and tiles * split * 2 * block_n * rows <= SCRATCH_NUMBERS
        and tiles <= MAX_SHARED_TILES
    ):
        split *= 2
    return TileChoice(block_n, block_k, rows, split, 4 if rows <= 64 else 8, 3)


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows that together use every kernel that up to max_rows rows may use."""
    return [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, MANY_ROWS + 1) if count <= max_rows]
