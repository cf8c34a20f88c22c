"""The chip's best rates: bytes read, and matrix products in a burst and for as long as its power allows.
A chip that works at its power limit for seconds is slower than in its first moment."""

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.show import Results, table

SUSTAINED_S = 2.0
# rows, outputs, inputs of x · Wᵀ: a square one, and those of an 8B model's layer in a decode step and in a prefill step.
SHAPES = ((8192, 8192, 8192), (512, 28672, 4096), (512, 4096, 14336), (8192, 28672, 4096))


def run(results: Results) -> None:
    figures = {"read_bytes_per_second": _read_rate(), "products": [_product(*shape) for shape in SHAPES]}
    results.put("ceilings", figures)
    print(f"reading 8 GB: {figures['read_bytes_per_second'] / 1e12:.2f} TB/s")
    rows = [
        [f"{m} x {n} x {k}", *(f"{rate / 1e12:,.0f}" for rate in (burst, sustained))]
        for (m, n, k), burst, sustained in figures["products"]  # type: ignore[attr-defined]
    ]
    print(table(("bf16 product, TFLOP/s", "first 20 after a pause", f"the last second of {SUSTAINED_S:g} s"), rows))


def _read_rate() -> float:
    numbers = torch.randn(2 * 10**9, device="cuda")
    numbers.sum()
    seconds = min(_timed(numbers.sum, 5) for _ in range(3)) / 5
    return numbers.nbytes / seconds


def _product(m: int, n: int, k: int) -> tuple[tuple[int, int, int], float, float]:
    """Return FLOP per second right after a pause, and once the chip is warm. Several weights, so that they come from memory."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    state = [0]

    def multiply() -> None:
        state[0] += 1
        torch.mm(x, weights[state[0] % 4].t(), out=out)

    multiply()
    flops = 2.0 * m * n * k
    time.sleep(1.0)
    burst = 20 * flops / _timed(multiply, 20)
    count = max(20, int(SUSTAINED_S * burst / flops / 2))
    _timed(multiply, count)
    return (m, n, k), burst, count * flops / _timed(multiply, count)


def _timed(call: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
