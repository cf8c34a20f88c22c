"""Decode weights in groups (`groups_layout`): all rows, for products with so many rows that torch's product outweighs the decoding, or
some, as an embedding's."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.groups_codes import as_number, load_codes, load_steps
from octavo.kernels.triton.gemm.groups_layout import Groups
from octavo.kernels.triton.runtime.launch import Launcher

_BLOCK_BYTES = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    codes, scales, outer, minimums, outer_minimums,
    ids,  # [count] rows of the weight; None: row i is row i
    out,  # [count, K]
    factor,
    K: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    HAS_NIBBLES: tl.constexpr = codes.dtype.element_ty == tl.uint8
    EACH: tl.constexpr = 32 if HAS_NIBBLES else 16
    BYTES: tl.constexpr = K // 2 if HAS_NIBBLES else K
    LANES: tl.constexpr = BLOCK_BYTES // 16
    target = tl.program_id(0).to(tl.int64)
    row = target
    if ids is not None:
        row = tl.load(ids + target).to(tl.int64)
    byte = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    loaded = load_codes(codes + row * BYTES + byte, byte < BYTES, "")
    group, is_there = lane * EACH // GROUP, lane * 16 < BYTES
    scale = load_steps(scales, outer, row, group, is_there, K // GROUP, GROUP)[:, None]
    if HAS_NIBBLES:
        low = tl.reshape(as_number(loaded & 15, ZERO), (LANES, 16)) * scale
        high = tl.reshape(as_number(loaded >> 4, ZERO), (LANES, 16)) * scale
    else:
        low = tl.reshape(as_number(loaded, ZERO), (LANES, 16)) * scale
        high = low
    if minimums is not None:
        minimum = load_steps(minimums, outer_minimums, row, group, is_there, K // GROUP, GROUP)[:, None]
        low += minimum
        high += minimum
    column = byte // 16 * 32 + byte % 16 if HAS_NIBBLES else byte
    place = out + target * K + column
    low = tl.reshape(low.to(out.dtype.element_ty), (BLOCK_BYTES,))
    if ids is not None:
        low = (low.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(place, low, mask=byte < BYTES)
    if HAS_NIBBLES:
        high = tl.reshape(high.to(out.dtype.element_ty), (BLOCK_BYTES,))
        if ids is not None:
            high = (high.to(tl.float32) * factor).to(out.dtype.element_ty)
        tl.store(place + 16, high, mask=byte < BYTES)


_launch_decode = Launcher(_decode)


def decoded(weight: Groups, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] in the type of the products, rounded once."""
    return _launch(weight, None, weight.shape[0], dtype, 1.0)


def looked_up(weight: Groups, ids: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """ids [T] → the rows, rounded, times factor, rounded again as a table in 16 bits would: [T, K]."""
    return _launch(weight, ids, len(ids), dtype, factor)


def _launch(weight: Groups, ids: torch.Tensor | None, count: int, dtype: torch.dtype, factor: float) -> torch.Tensor:
    k = weight.shape[1]
    out = torch.empty((count, k), dtype=dtype, device=weight.codes.device)
    if count:
        block = min(_BLOCK_BYTES, triton.next_power_of_2(weight.codes.shape[1]))
        _launch_decode(
            (count, triton.cdiv(weight.codes.shape[1], block), 1),
            (*weight.tensors, ids, out, factor),
            (k, weight.group_size, weight.zero, block),
            {"num_warps": max(1, block // 512)},
        )
    return out
