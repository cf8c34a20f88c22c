"""y = x · Wᵀ for weights in groups (`groups_layout`) on tensor cores: W is the tall side of the product and is decoded on its
way there, rounded once to the type of x as decoding it beforehand would. `groups` chooses when to use it."""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.groups_codes import as_number, load_codes, load_steps
from octavo.kernels.triton.gemm.groups_layout import Groups
from octavo.kernels.triton.gemm.tall_tile import (
    MAX_SHARED_TILES,
    SCRATCH_NUMBERS,
    add_shares,
    leave_share,
    scratch_of,
)
from octavo.kernels.triton.runtime.launch import Launcher


class TileChoice(NamedTuple):
    block_n: int  # rows of W per program
    block_k: int  # columns
    rows: int  # of x per program
    split: int  # programs that share a tile's K
    num_warps: int
    num_stages: int


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(numbers, scale, minimum, HAS_MINIMUM: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """numbers [N, C] float32, scale and minimum [N, groups] → [N, C] in the type of x."""
    N: tl.constexpr = numbers.shape[0]
    C: tl.constexpr = numbers.shape[1]
    G: tl.constexpr = scale.shape[1]
    groups = tl.reshape(numbers, (N, G, C // G)) * scale[:, :, None]
    if HAS_MINIMUM:
        groups += minimum[:, :, None]
    return tl.reshape(groups, (N, C)).to(WIDE)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tile_product(  # type: ignore[no-untyped-def]
    x, codes, scales, outer, minimums, outer_minimums, out, residual, bias,
    scratch,  # [tiles, SPLIT, BLOCK_N, ROWS] float32, or None if SPLIT is 1
    arrivals,  # [tiles] int32, zero before and after the launch
    num_rows, n, x_stride, out_stride,
    K: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HAS_NIBBLES: tl.constexpr = codes.dtype.element_ty == tl.uint8
    WIDE: tl.constexpr = x.dtype.element_ty
    BYTES: tl.constexpr = K // 2 if HAS_NIBBLES else K
    BLOCK_BYTES: tl.constexpr = BLOCK_K // 2 if HAS_NIBBLES else BLOCK_K
    UNIT: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K  # columns of a tile that share a scale
    COUNT: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    HAS_TAIL: tl.constexpr = COUNT * SPLIT * BLOCK_K != K
    tile = tl.program_id(0)
    share = tl.program_id(1)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    place = codes + tl.minimum(output, n - 1)[:, None].to(tl.int64) * BYTES
    of_row = tl.minimum(output, n - 1)[:, None]
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inputs_of = x + tl.minimum(row, num_rows - 1)[None, :].to(tl.int64) * x_stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for t in range(COUNT):
        number = share * COUNT + t
        byte = number * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
        column = byte // 16 * 32 + byte % 16 if HAS_NIBBLES else byte
        group = (number * BLOCK_K // GROUP + tl.arange(0, BLOCK_K // UNIT))[None, :]
        is_there = group < K // GROUP
        if HAS_TAIL:
            loaded = load_codes(place + byte[None, :], (byte < BYTES)[None, :], "")
            first = tl.load(inputs_of + column[:, None], mask=(byte < BYTES)[:, None], other=0.0)
        else:
            loaded = tl.load(place + byte[None, :])
            first = tl.load(inputs_of + column[:, None])
        scale = load_steps(scales, outer, of_row, group, is_there, K // GROUP, GROUP)
        if minimums is None:
            minimum = scale
        else:
            minimum = load_steps(minimums, outer_minimums, of_row, group, is_there, K // GROUP, GROUP)
        HAS_MINIMUM: tl.constexpr = minimums is not None
        if HAS_NIBBLES:
            if HAS_TAIL:
                second = tl.load(inputs_of + column[:, None] + 16, mask=(byte < BYTES)[:, None], other=0.0)
            else:
                second = tl.load(inputs_of + column[:, None] + 16)
            low = _scaled(as_number(loaded & 15, ZERO), scale, minimum, HAS_MINIMUM, WIDE)
            high = _scaled(as_number(loaded >> 4, ZERO), scale, minimum, HAS_MINIMUM, WIDE)
            sums = tl.dot(low, first, sums, input_precision="ieee")
            sums = tl.dot(high, second, sums, input_precision="ieee")
        else:
            left = _scaled(as_number(loaded, ZERO), scale, minimum, HAS_MINIMUM, WIDE)
            sums = tl.dot(left, first, sums, input_precision="ieee")
    if SPLIT == 1:
        _finish(sums, out, residual, bias, num_rows, n, out_stride, output, row)
    else:
        tile += tl.program_id(2) * tl.num_programs(0)
        scratch += tile * (SPLIT * BLOCK_N * ROWS)
        if leave_share(sums, sums, scratch, arrivals + tile, share, SPLIT, 1, BLOCK_N, ROWS):
            sums, _ = add_shares(scratch, arrivals + tile, SPLIT, 1, BLOCK_N, ROWS)
            _finish(sums, out, residual, bias, num_rows, n, out_stride, output, row)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(sums, out, residual, bias, num_rows, n, out_stride, output, row):  # type: ignore[no-untyped-def]
    mask = (output < n)[:, None] & (row < num_rows)[None, :]
    if bias is not None:
        sums += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
    place = row[None, :].to(tl.int64) * out_stride + output[:, None]
    if residual is not None:
        sums += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)


_launch = Launcher(_tile_product)


def tile_product(
    x: torch.Tensor,
    weight: Groups,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    choice: TileChoice,
    pdl: bool,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N]; see `groups.group_linear`."""
    num_rows, k = x.shape
    n = weight.shape[0]
    assert x.stride(1) == 1 and out.stride(1) == 1 and (residual is None or residual.stride() == out.stride())
    # A tile's columns are whole groups, or lie in one.
    group = weight.group_size
    assert choice.block_k % group == 0 or group % choice.block_k == 0
    down, across = triton.cdiv(num_rows, choice.rows), triton.cdiv(n, choice.block_n)
    scratch, arrivals = None, None
    if choice.split > 1:
        scratch, arrivals = scratch_of(x.device)
        assert down * across * choice.split * choice.block_n * choice.rows <= SCRATCH_NUMBERS
        assert down * across <= MAX_SHARED_TILES
    options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
    if pdl:
        options["launch_pdl"] = True
    _launch(
        (across, choice.split, down),
        (
            x, *weight.tensors, out, residual, bias, scratch, arrivals, num_rows, n, x.stride(0), out.stride(0),
        ),
        (
            k, group, weight.zero, choice.block_n, choice.block_k, choice.rows, choice.split, pdl,
        ),
        options,
    )  # fmt: skip
