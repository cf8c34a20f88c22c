"""Norm and router of a few tokens in one launch. What it gives, the experts' kernels for few tokens take as it is: they find their
experts themselves (`few_parts`), so that no launch plans."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher


class Routed(NamedTuple):
    normed: torch.Tensor  # [T, width] bfloat16: the norm's result, and zeros
    keys: torch.Tensor  # [T, E rounded up to a power of two] int32: a key for each expert, see _route


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    x,  # [T, D] contiguous
    norm,  # [D]
    weight,  # [E, D]
    bias,  # [E] or None
    normed,  # [T, WIDTH]
    keys,  # [T, E_PADDED]
    epsilon,
    times,  # a power of two by which the result is multiplied
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_FRAGMENTS: tl.constexpr,  # columns come in the order in which matrix instructions take them
    PDL: tl.constexpr,
):
    """One token's RMSNorm, and its key for one expert. A program after those stores the norm's result.

    A key's upper half has the logit, rounded to bfloat16 as a product's result, as an integer that is in the order of logits; the lower
    half makes the first of equal ones the largest. NaN is below all numbers, and what is no expert is below that."""
    expert = tl.program_id(0)
    token = tl.program_id(1)
    column = tl.arange(0, D_PADDED)
    mask = column < D
    row = tl.load(weight + tl.minimum(expert, E - 1) * D + column, mask=mask, other=0.0)
    scale = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    numbers = tl.load(x + token * D + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / D + epsilon)
    result = (numbers * factor * scale).to(normed.dtype.element_ty).to(tl.float32)  # rounded
    if expert == E_PADDED:
        place = column
        if IN_FRAGMENTS:
            # Of every 128 columns, 64 a + 16 b + 8 c + 2 d + e goes to 32 d + 8 b + 4 c + 2 a + e.
            place = column // 128 * 128 + column // 2 % 4 * 32 + column // 16 % 4 * 8
            place += column // 8 % 2 * 4 + column // 64 % 2 * 2 + column % 2
        tl.store(normed + token * WIDTH + place, (result * times).to(normed.dtype.element_ty), mask=column < WIDTH)
    else:
        logit = tl.sum(result * row.to(tl.float32), axis=0)
        if bias is not None:
            logit += tl.load(bias + tl.minimum(expert, E - 1)).to(tl.float32)
        logit = logit.to(tl.bfloat16).to(tl.float32) + 0.0  # no negative zero
        bits = logit.to(tl.int32, bitcast=True) >> 16
        order = tl.where(bits >= 0, bits, bits ^ 0x7FFF)
        order = tl.where(logit == logit, order, -32767)
        order = tl.where(expert < E, order, -32768)
        tl.store(keys + token * E_PADDED + expert, order * 65536 + (65535 - expert))


_launch = Launcher(_route)


def route(
    x: torch.Tensor,  # [T, D] bfloat16
    norm: tuple[torch.Tensor, float],  # weight [D] and epsilon of an RMSNorm
    router: torch.Tensor,  # [E, D]
    bias: torch.Tensor | None,  # [E]
    width: int,  # of the result's rows
    in_fragments: bool,
    times: float = 1.0,  # a power of two by which the result is multiplied
) -> Routed:
    num_tokens, depth = x.shape
    num_experts = len(router)
    assert x.is_contiguous() and router.is_contiguous() and router.shape[1] == depth <= width
    padded, padded_depth = triton.next_power_of_2(num_experts), triton.next_power_of_2(width)
    assert not in_fragments or width % 128 == 0
    normed = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    keys = torch.empty((num_tokens, padded), dtype=torch.int32, device=x.device)
    pdl = starts_early(x.device)
    _launch(
        (padded + 1, num_tokens, 1),
        (x, norm[0], router, bias, normed, keys, norm[1], times),
        (num_experts, padded, depth, padded_depth, width, in_fragments, pdl),
        {"num_warps": max(1, min(8, padded_depth // 512))} | ({"launch_pdl": True} if pdl else {}),
    )
    return Routed(normed, keys)
