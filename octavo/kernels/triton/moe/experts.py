"""The products of all experts in two launches on a GPU, over the blocks of rows from expert_plan.py. The host never waits for
the device.

Each (token, expert) pair has its own result; a third launch adds them up in a fixed order."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.moe.expert_plan import FIELDS, ExpertPlan, Tiles, plan_experts
from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

__all__ = ["ExpertTensors", "experts", "plan_experts"]


class ExpertTensors(NamedTuple):
    """The weights [E, N, K] of all experts. MXFP4: two numbers per byte, the low halves of 16 bytes first, and scales."""

    numbers: torch.Tensor  # [E, N, K] in the type of the activations; MXFP4: uint8 [E, N, K / 2]
    scales: torch.Tensor | None = None  # MXFP4: uint8 [E, N, K / 32]
    bias: torch.Tensor | None = None  # [E, N]

    def check(self, num_outputs: int, depth: int) -> None:
        width = depth if self.scales is None else depth // 2
        assert self.numbers.shape[1:] == (num_outputs, width) and self.numbers.is_contiguous()
        if self.scales is not None:
            assert (
                depth % 32 == 0 and self.scales.shape[1:] == (num_outputs, depth // 32) and self.scales.is_contiguous()
            )


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    rows,  # [BLOCK_M] pointers to the rows
    is_row,
    weight,  # points to the expert's first output
    output,  # [BLOCK_N]
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """rows · weightᵀ for these outputs; with PARTS = 2, of gate and of up, which lie N outputs apart."""
    BLOCK_M: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = output.shape[0]
    column = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    is_output = output < N
    for start in range(0, DEPTH, BLOCK_K):
        k = start + column
        numbers = tl.load(rows[:, None] + k[None, :], mask=is_row[:, None] & (k < DEPTH)[None, :], other=0.0)
        place = weight + output[None, :] * DEPTH + k[:, None]  # [BLOCK_K, BLOCK_N]
        mask = is_output[None, :] & (k < DEPTH)[:, None]
        sums = tl.dot(numbers, tl.load(place, mask=mask, other=0.0), sums, input_precision="ieee")
        if PARTS == 2:
            tile = tl.load(place + N * DEPTH, mask=mask, other=0.0)
            up_sums = tl.dot(numbers, tile, up_sums, input_precision="ieee")
    return sums, up_sums


@triton.jit
def _fp4(code, scale):  # type: ignore[no-untyped-def]
    """4-bit floats (sign, two bits of exponent, one of mantissa) times 2 ** (scale − 127), exactly, as float32: assembled
    from bits."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    size = tl.where(exponent == 0, mantissa * (126 << 23), ((exponent + 126) << 23) | (mantissa << 22))
    power = tl.where(scale == 0, 1 << 22, scale << 23)  # the lowest power is subnormal
    number = size.to(tl.float32, bitcast=True) * power.to(tl.float32, bitcast=True)
    return tl.where((code & 8) != 0, -number, number)


@triton.jit
def _power(scale):  # type: ignore[no-untyped-def]
    """2 ** (scale − 127) as bfloat16, assembled from bits. The lowest is subnormal."""
    return tl.where(scale == 0, 1 << 6, scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _fp4_tiles(codes, scale, is_there, dtype: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decode the low halves of the bytes and the high halves, [BLOCK_K / 2, BLOCK_N] each. scale [BLOCK_K / 32, BLOCK_N]."""
    both = tl.load(codes, mask=is_there, other=0)
    groups: tl.constexpr = scale.shape[0]
    outputs: tl.constexpr = scale.shape[1]
    if ASM and dtype == tl.bfloat16:
        # Sign, exponent and mantissa are put into the places of bfloat16's, which makes 2 ** −126 times the number. m is
        # 2 ** 126, z is −0: all GPUs with bfloat16 have this instruction, and not all have one that only multiplies.
        power = tl.broadcast_to(_power(scale)[:, None, :], (groups, 16, outputs)).reshape(groups * 16, outputs)
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, t, u, m, z;
            mov.b32 m, 0x7E807E80;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 t, a, 12; and.b32 t, t, 0x80008000; shl.b32 u, a, 6; lop3.b32 t, u, 0x01C001C0, t, 0xEA;
            fma.rn.bf16x2 t, t, m, z; fma.rn.bf16x2 $0, t, $5, z;
            shl.b32 t, b, 12; and.b32 t, t, 0x80008000; shl.b32 u, b, 6; lop3.b32 t, u, 0x01C001C0, t, 0xEA;
            fma.rn.bf16x2 t, t, m, z; fma.rn.bf16x2 $1, t, $6, z;
            shl.b32 t, a, 8; and.b32 t, t, 0x80008000; shl.b32 u, a, 2; lop3.b32 t, u, 0x01C001C0, t, 0xEA;
            fma.rn.bf16x2 t, t, m, z; fma.rn.bf16x2 $2, t, $5, z;
            shl.b32 t, b, 8; and.b32 t, t, 0x80008000; shl.b32 u, b, 2; lop3.b32 t, u, 0x01C001C0, t, 0xEA;
            fma.rn.bf16x2 t, t, m, z; fma.rn.bf16x2 $3, t, $6, z;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [both, power],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return low, high
    else:
        both = both.to(tl.int32)
        every = tl.broadcast_to(scale[:, None, :], (groups, 16, outputs)).reshape(groups * 16, outputs)
        return _fp4(both & 15, every).to(dtype), _fp4(both >> 4, every).to(dtype)


@triton.jit
def _fp4_sums(  # type: ignore[no-untyped-def]
    rows, is_row, codes, scales, output,
    N: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """_sums for MXFP4 weights: 16 bytes hold 32 values of K that share a scale, the first 16 in their low halves. No tile has
    to be shuffled: low and high halves are multiplied with their own columns."""
    BLOCK_M: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = output.shape[0]
    dtype: tl.constexpr = rows.dtype.element_ty
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    is_output = output < N
    for start in range(0, DEPTH // 2, BLOCK_K // 2):
        byte = start + tl.arange(0, BLOCK_K // 2)
        columns = rows[:, None] + (byte // 16 * 32 + byte % 16)[None, :]
        is_number = is_row[:, None] & (byte < DEPTH // 2)[None, :]
        low_numbers = tl.load(columns, mask=is_number, other=0.0)
        high_numbers = tl.load(columns + 16, mask=is_number, other=0.0)
        is_there = is_output[None, :] & (byte < DEPTH // 2)[:, None]
        code = codes + output[None, :] * (DEPTH // 2) + byte[:, None]
        # One scale for each group: it is spread over its bytes after it is loaded.
        group = start // 16 + tl.arange(0, BLOCK_K // 32)
        has_scale = is_output[None, :] & (group < DEPTH // 32)[:, None]
        place = scales + output[None, :] * (DEPTH // 32) + group[:, None]
        scale = tl.load(place, mask=has_scale, other=0).to(tl.int32)
        low, high = _fp4_tiles(code, scale, is_there, dtype, ASM)
        sums = tl.dot(low_numbers, low, sums, input_precision="ieee")
        sums = tl.dot(high_numbers, high, sums, input_precision="ieee")
        if PARTS == 2:
            scale = tl.load(place + N * (DEPTH // 32), mask=has_scale, other=0).to(tl.int32)
            low, high = _fp4_tiles(code + N * (DEPTH // 2), scale, is_there, dtype, ASM)
            up_sums = tl.dot(low_numbers, low, up_sums, input_precision="ieee")
            up_sums = tl.dot(high_numbers, high, up_sums, input_precision="ieee")
    return sums, up_sums


@triton.jit
def _expert_sums(  # type: ignore[no-untyped-def]
    rows, is_row, weight, scales, expert, output,
    N: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    if scales is None:
        return _sums(rows, is_row, weight + expert * (PARTS * N * DEPTH), output, N, DEPTH, PARTS, BLOCK_K)
    else:
        codes = weight + expert * (PARTS * N * DEPTH // 2)
        scales += expert * (PARTS * N * DEPTH // 32)
        return _fp4_sums(rows, is_row, codes, scales, output, N, DEPTH, PARTS, BLOCK_K, ASM)


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, DEPTH], rows stride apart
    weight,  # [E, 2 · INNER, DEPTH]: gate, then up; MXFP4: bytes [E, 2 · INNER, DEPTH / 2]
    scales,  # [E, 2 · INNER, DEPTH / 32] of MXFP4, or None
    bias,  # [E, 2 · INNER] or None
    order,
    blocks,
    out,  # [P, INNER] by place
    stride,
    alpha,
    limit,
    offset,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,  # False: in the interpreter, which runs no assembly
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = blocks + tl.program_id(0) * FIELDS
    expert = tl.load(block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(block + 1)
    row = tl.arange(0, BLOCK_M)
    is_row = row < tl.load(block + 2)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.load(order + first + row, mask=is_row, other=0) // K
    rows = x + token.to(tl.int64) * stride
    gate, up = _expert_sums(rows, is_row, weight, scales, expert, output, INNER, DEPTH, 2, BLOCK_K, ASM)
    if bias is not None:
        at = bias + expert * (2 * INNER) + output
        gate += tl.load(at, mask=output < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(at + INNER, mask=output < INNER, other=0.0).to(tl.float32)[None, :]
    if IS_CLAMPED:  # by comparisons, so that NaN stays NaN
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    inner = gate * tl.sigmoid(alpha * gate) * (up + offset)
    target = out + (first + row).to(tl.int64)[:, None] * INNER + output[None, :]
    tl.store(target, inner.to(out.dtype.element_ty), mask=is_row[:, None] & (output < INNER)[None, :])


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    inner,  # [P, INNER] by place
    weight,  # [E, DEPTH, INNER]; MXFP4: bytes [E, DEPTH, INNER / 2]
    scales,  # [E, DEPTH, INNER / 32] of MXFP4, or None
    bias,  # [E, DEPTH] or None
    weights,  # [P] float32
    order,
    blocks,
    out,  # [P, DEPTH] by pair, weighted
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,  # False: in the interpreter, which runs no assembly
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = blocks + tl.program_id(0) * FIELDS
    expert = tl.load(block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(block + 1)
    row = tl.arange(0, BLOCK_M)
    is_row = row < tl.load(block + 2)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = inner + (first + row).to(tl.int64) * INNER
    sums, _ = _expert_sums(rows, is_row, weight, scales, expert, output, DEPTH, INNER, 1, BLOCK_K, ASM)
    if bias is not None:
        sums += tl.load(bias + expert * DEPTH + output, mask=output < DEPTH, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order + first + row, mask=is_row, other=0)
    sums = sums * tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * DEPTH + output[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & (output < DEPTH)[None, :])


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    pairs,  # [T, K, DEPTH]
    weights,  # [T, K] float32, or None: the pairs have theirs
    residual,  # [T, DEPTH] or None
    out,  # [T, DEPTH]; the same tensor as residual, if there is one
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < DEPTH
    total = tl.zeros([BLOCK], tl.float32)
    if residual is not None:
        total += tl.load(residual + token * DEPTH + column, mask=mask, other=0.0).to(tl.float32)
    for number in tl.static_range(K):
        pair = tl.load(pairs + (token * K + number) * DEPTH + column, mask=mask, other=0.0).to(tl.float32)
        total += pair if weights is None else pair * tl.load(weights + token * K + number)
    tl.store(out + token * DEPTH + column, total.to(out.dtype.element_ty), mask=mask)


_launch_gate_up, _launch_down, _launch_combine = Launcher(_gate_up), Launcher(_down), Launcher(_combine)


def experts(
    x: torch.Tensor,  # [T, D]
    plan: ExpertPlan,
    gate_up: ExpertTensors,  # [E, 2 I, D]: gate, then up
    down: ExpertTensors,  # [E, D, I]
    gate: tuple[float, float, float],  # alpha, limit (0: none) and offset: gate · sigmoid(alpha · gate) · (up + offset)
    residual: torch.Tensor | None,  # [T, D], changed and returned
) -> torch.Tensor:
    """(residual +) the weighted sum of the outputs of each token's experts, [T, D]. Sums are float32, rounded once per
    product."""
    num_tokens, depth = x.shape
    num_chosen, inner_size = plan.chosen.shape[1], gate_up.numbers.shape[1] // 2
    gate_up.check(2 * inner_size, depth)
    down.check(depth, inner_size)
    assert x.stride(1) == 1 and (residual is None or (residual.shape == x.shape and residual.is_contiguous()))
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if residual is None else residual
    if num_tokens == 0:
        return y
    tiles = plan.tiles
    assert tiles is not None
    # torch's kernels, which make a plan's part, do not wait for those before them: what follows them may not start early.
    pdl = starts_early(x.device) and not plan.is_part
    inner = gate_up_product(x, plan, gate_up, gate, tiles, pdl)
    pairs = (torch.zeros if plan.is_part else torch.empty)((len(plan.order), depth), dtype=x.dtype, device=x.device)
    _launch_down(
        (len(plan.blocks), -(-depth // tiles.block_n), 1),
        (inner, *down, plan.weights, plan.order, plan.blocks, pairs),
        (depth, inner_size, tiles.block_m, tiles.block_n, tiles.block_k, x.is_cuda, pdl),
        _options(tiles, pdl),
    )
    combine(pairs, None, residual, y, num_chosen, pdl)
    return y


def gate_up_product(
    x: torch.Tensor,  # [T, D]
    plan: ExpertPlan,
    gate_up: ExpertTensors,  # [E, 2 I, D]: gate, then up
    gate: tuple[float, float, float],
    tiles: Tiles,
    pdl: bool,
) -> torch.Tensor:
    """[P, I] by place."""
    inner_size, depth = gate_up.numbers.shape[1] // 2, x.shape[1]
    inner = torch.empty((len(plan.order), inner_size), dtype=x.dtype, device=x.device)
    alpha, limit, offset = (float(number) for number in gate)
    _launch_gate_up(
        (len(plan.blocks), -(-inner_size // tiles.block_n), 1),
        (x, *gate_up, plan.order, plan.blocks, inner, x.stride(0), alpha, limit, offset),
        (
            plan.chosen.shape[1], depth, inner_size, limit != 0.0, tiles.block_m, tiles.block_n, tiles.block_k, x.is_cuda, pdl,
        ),
        _options(tiles, pdl),
    )  # fmt: skip
    return inner


def _options(tiles: Tiles, pdl: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return options | {"launch_pdl": True} if pdl else options


def combine(
    pairs: torch.Tensor,  # [T · K, D]
    weights: torch.Tensor | None,  # [T, K] float32; None: the pairs are weighted
    residual: torch.Tensor | None,  # [T, D]
    y: torch.Tensor,  # [T, D]; the same tensor as residual, if there is one
    num_chosen: int,
    pdl: bool,
) -> None:
    """(residual +) the sum of each token's pairs, into y."""
    num_tokens, depth = y.shape
    block = min(triton.next_power_of_2(depth), 1024)
    options: dict[str, int | bool] = {"num_warps": 4}
    if pdl:
        options["launch_pdl"] = True
    _launch_combine(
        (num_tokens, -(-depth // block), 1), (pairs, weights, residual, y), (num_chosen, depth, block, pdl), options
    )
