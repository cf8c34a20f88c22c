"""y = x · Wᵀ for 1 to 8 rows and weights in groups (`groups_layout`): multiply-adds in float32, outside the tensor cores. `groups`
chooses when to use it.

A thread has 16 neighbouring bytes of a row of W: 16 or 32 codes of one group (or a group and its neighbour of 16 codes). It adds up their products before
the scale is applied, so that weights are not rounded. With programmatic dependent launch a program loads its first tiles
of W before it waits for the kernel that makes x."""

# Triton supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.groups_codes import as_number, load_codes, load_steps
from octavo.kernels.triton.gemm.groups_layout import Groups
from octavo.kernels.triton.runtime.launch import Launcher

MAX_ROWS = 8


class FewChoice(NamedTuple):
    block_n: int  # rows of W per program
    num_warps: int  # side by side along K, 512 bytes each
    ahead: int  # tiles loaded before the first is used


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(  # type: ignore[no-untyped-def]
    codes, scales, outer, minimums, outer_minimums, row, t,
    BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Tile t: codes [BLOCK_N, LANES · 16], then scales and minimums [BLOCK_N, LANES] of each 16 bytes."""
    byte = t * LANES * 16 + tl.arange(0, LANES * 16)
    lane = t * LANES + tl.arange(0, LANES)
    place = codes + row[:, None].to(tl.int64) * BYTES + byte[None, :]
    if BYTES % (LANES * 16) == 0:
        loaded = tl.load(place, eviction_policy="evict_first")
    else:
        loaded = load_codes(place, (byte < BYTES)[None, :], "evict_first")
    is_there = (lane * 16 < BYTES)[None, :]
    group = (lane * EACH // GROUP)[None, :]
    tile = (loaded, load_steps(scales, outer, row[:, None], group, is_there, GROUPS, GROUP))
    if minimums is not None:
        tile = tile + (load_steps(minimums, outer_minimums, row[:, None], group, is_there, GROUPS, GROUP),)
    return tile


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _few_product(  # type: ignore[no-untyped-def]
    x,  # [M, K], rows x_stride apart
    codes,  # [n, BYTES]
    scales,  # [n, GROUPS]
    outer,  # [n, K / 256] or None
    minimums,  # [n, GROUPS] or None
    outer_minimums,  # [n, K / 256] or None
    out,  # [M, n], rows out_stride apart; the same as residual, if there is one
    residual,
    bias,  # [n] or None
    num_rows,
    n,
    x_stride,
    out_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    HAS_NIBBLES: tl.constexpr = codes.dtype.element_ty == tl.uint8
    EACH: tl.constexpr = 32 if HAS_NIBBLES else 16
    BYTES: tl.constexpr = K // 2 if HAS_NIBBLES else K
    GROUPS: tl.constexpr = K // GROUP
    TILES: tl.constexpr = (BYTES + LANES * 16 - 1) // (LANES * 16)
    HELD: tl.constexpr = 2 if minimums is None else 3
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows of W beyond the last repeat the last one instead of a mask: their results are not stored.
    row = tl.minimum(output, n - 1)
    tiles = ()
    for t in tl.static_range(AHEAD):
        tiles = tiles + _load_tile(
            codes, scales, outer, minimums, outer_minimums, row, t, BYTES, GROUPS, GROUP, LANES, EACH
        )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BLOCK_N, LANES), tl.float32),)
    for t in tl.static_range(TILES):
        loaded, scale = tiles[0], tiles[1]
        byte = t * LANES * 16 + tl.arange(0, LANES * 16)
        column = byte // 16 * 32 + byte % 16 if HAS_NIBBLES else byte
        if HAS_NIBBLES:
            low, high = as_number(loaded & 15, ZERO), as_number(loaded >> 4, ZERO)
        else:
            low = as_number(loaded, ZERO)
        new_sums = ()
        for r in tl.static_range(ROWS):
            place = x + tl.minimum(r, num_rows - 1) * x_stride + column
            first = tl.load(place, mask=byte < BYTES, other=0.0).to(tl.float32)
            products = low * first[None, :]
            inputs = first
            if HAS_NIBBLES:
                second = tl.load(place + 16, mask=byte < BYTES, other=0.0).to(tl.float32)
                products += high * second[None, :]
                inputs += second
            part = tl.sum(tl.reshape(products, (BLOCK_N, LANES, 16)), 2) * scale
            if minimums is not None:
                part += tiles[2] * tl.sum(tl.reshape(inputs, (LANES, 16)), 1)[None, :]
            new_sums = new_sums + (sums[r] + part,)
        sums = new_sums
        tiles = tiles[HELD:]
        if t + AHEAD < TILES:
            tiles = tiles + _load_tile(
                codes, scales, outer, minimums, outer_minimums, row, t + AHEAD, BYTES, GROUPS, GROUP, LANES, EACH
            )
    for r in tl.static_range(ROWS):
        y = tl.sum(sums[r], 1)
        mask = (output < n) & (r < num_rows)
        if bias is not None:
            y += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)
        if residual is not None:
            y += tl.load(residual + r * out_stride + output, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + r * out_stride + output, y.to(out.dtype.element_ty), mask=mask)


_launch = Launcher(_few_product)


def few_product(
    x: torch.Tensor,
    weight: Groups,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    choice: FewChoice,
    pdl: bool,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N]; see `groups.group_linear`."""
    num_rows, k = x.shape
    n, num_bytes = weight.codes.shape
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and out.stride(1) == 1
    assert residual is None or residual.stride() == out.stride()
    lanes = min(32 * choice.num_warps, triton.next_power_of_2(triton.cdiv(num_bytes, 16)))
    ahead = min(choice.ahead, triton.cdiv(num_bytes, 16 * lanes))
    options = {"num_warps": max(1, lanes // 32)}
    if pdl:
        options["launch_pdl"] = True
    _launch(
        (triton.cdiv(n, choice.block_n), 1, 1),
        (
            x, *weight.tensors, out, residual, bias, num_rows, n, x.stride(0), out.stride(0),
        ),
        (
            k, weight.group_size, weight.zero, choice.block_n, lanes, ahead, triton.next_power_of_2(num_rows), pdl,
        ),
        options,
    )  # fmt: skip
