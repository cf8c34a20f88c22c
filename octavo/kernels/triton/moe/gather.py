"""Rows of a step in the order of places: a tile of rows is then one piece of memory, which the copy engine can fetch."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.runtime.launch import Launcher


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    x,  # [T, DEPTH], rows stride apart
    order,  # [P]: place → pair
    out,  # [P, DEPTH]
    stride,
    K: tl.constexpr,  # pairs of a token
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    token = (tl.load(order + place) // K).to(tl.int64)
    for start in tl.static_range(0, DEPTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + token * stride + column, mask=column < DEPTH, other=0.0)
        tl.store(out + place * DEPTH + column, numbers, mask=column < DEPTH)


_launch = Launcher(_gather)


def gather(x: torch.Tensor, order: torch.Tensor, num_chosen: int, pdl: bool) -> torch.Tensor:
    """x [T, D] → [P, D] by place."""
    assert x.stride(1) == 1 and len(order) == len(x) * num_chosen
    out = torch.empty((len(order), x.shape[1]), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(x.shape[1]), 4096)
    options: dict[str, int | bool] = {"num_warps": 4}
    if pdl:
        options["launch_pdl"] = True
    _launch((len(order), 1, 1), (x, order, out, x.stride(0)), (num_chosen, x.shape[1], block, pdl), options)
    return out
