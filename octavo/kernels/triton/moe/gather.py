"""Rows of a step in the order of places: a tile of rows is then one piece of memory, which the copy engine can fetch."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.runtime.launch import Launcher

_BLOCK = 1024  # numbers of a row: 16 bytes a thread


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    x,  # [T, DEPTH], rows stride apart
    places,  # [P]: pair → place
    out,  # [P, DEPTH]
    stride,
    K: tl.constexpr,  # pairs of a token
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a part of a token's row to all of its places: it is read once."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < DEPTH
    numbers = tl.load(x + token * stride + column, mask=mask, other=0.0)
    for number in tl.static_range(K):
        place = tl.load(places + token * K + number).to(tl.int64)
        tl.store(out + place * DEPTH + column, numbers, mask=mask)


_launch = Launcher(_gather)


def gather(x: torch.Tensor, places: torch.Tensor, num_chosen: int, pdl: bool) -> torch.Tensor:
    """x [T, D], places [T · K] of pairs → [P, D] by place."""
    num_tokens, depth = x.shape
    assert x.stride(1) == 1 and len(places) == num_tokens * num_chosen
    out = torch.empty((len(places), depth), dtype=x.dtype, device=x.device)
    options: dict[str, int | bool] = {"num_warps": 4}
    if pdl:
        options["launch_pdl"] = True
    _launch(
        (num_tokens, -(-depth // _BLOCK), 1), (x, places, out, x.stride(0)), (num_chosen, depth, _BLOCK, pdl), options
    )
    return out
