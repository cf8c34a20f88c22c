"""The products of an 8B model's layer at one row, as they are chosen, for a profiler:
`ncu --clock-control none --profile-from-start off --set full --log-file FILE python -m benchmarks.kernels.one_row`."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernels.int4 import HALF, SHAPES, Shape, random_weight
from octavo.kernels.triton.gemm.int4 import int4_linear
from octavo.kernels.triton.gemm.skinny import few_rows_linear

COLD_BYTES = 130_000_000  # more than twice the L2 cache


def calls() -> list[tuple[str, Callable[[], object]]]:
    found: list[tuple[str, Callable[[], object]]] = []
    for shape in SHAPES:
        found += [(f"int4 {shape.name}", _int4(shape)), (f"fp8 {shape.name}", _fp8(shape))]
    return found


def _int4(shape: Shape) -> Callable[[], object]:
    weight = random_weight(shape.n, shape.k, 128, HALF, bool(shape.gated))
    x = torch.randn(1, shape.k, device="cuda").to(HALF)
    residual = torch.zeros(1, shape.n, device="cuda", dtype=HALF) if shape.has_residual else None
    norm = None if shape.has_residual else (torch.ones(shape.k, device="cuda", dtype=HALF), 1e-5)
    return partial(int4_linear, x, weight, norm=norm, residual=residual, gated=shape.gated or None, pdl=True)


def _fp8(shape: Shape) -> Callable[[], object]:
    weight = torch.randn(shape.n, shape.k, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(shape.n, device="cuda").add_(0.5).mul_(0.02)
    x = torch.randn(1, shape.k, device="cuda").bfloat16()
    residual = torch.zeros(1, shape.n, device="cuda", dtype=torch.bfloat16) if shape.has_residual else None
    norm = None if shape.has_residual else (torch.ones(shape.k, device="cuda", dtype=torch.bfloat16), 1e-5)
    return partial(
        few_rows_linear, x, weight, norm=norm, residual=residual, gated=shape.gated or None, pdl=True, scales=scales
    )


def main() -> None:
    torch.set_grad_enabled(False)
    jobs = calls()
    for _, call in jobs:
        call()
    flush = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for name, call in jobs:
        flush.zero_()
        torch.cuda.synchronize()
        print(name, flush=True)
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
