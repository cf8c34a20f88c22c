"""Products with 8-bit weights on a GPU: checks them, then times rounding and product against cuBLAS in bfloat16.
`python -m benchmarks.kernels.fp8`; without a GPU a tiny rehearsal in Triton's interpreter.

Times are of one call inside a CUDA graph of many, over enough copies of weights and inputs that L2 holds none of them."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

IS_REHEARSAL = not torch.cuda.is_available()
if IS_REHEARSAL:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from benchmarks.kernels import timing  # noqa: E402
from benchmarks.kernels.timing import distance  # noqa: E402
from octavo.kernels.triton.elementwise.activation import gate_mul  # noqa: E402
from octavo.kernels.triton.elementwise.norm import rms_norm  # noqa: E402
from octavo.kernels.triton.elementwise.quantise import quantise_rows, rms_norm_fp8, silu_mul_fp8  # noqa: E402
from octavo.weights.methods.torch_fp8 import quantise  # noqa: E402

CEILING = 4.26e12  # bytes a second, read
MATRIX = 2 * 795e12  # 8-bit operations a second: twice what was measured in bfloat16
COLD_BYTES = 150_000_000  # more than twice the L2 cache
NUM_ROWS = (1, 16, 64, 256, 512, 4096)
BFLOAT16 = torch.bfloat16
START = time.monotonic()


@dataclass(frozen=True)
class Shape:
    """A product, and the operation before it: "norm", "gate" or none."""

    name: str
    n: int
    k: int
    before: str = ""


SHAPES = [
    Shape("0.6B qkv", 4096, 1024, "norm"),
    Shape("0.6B o", 1024, 2048),
    Shape("0.6B gate_up", 6144, 1024, "norm"),
    Shape("0.6B down", 1024, 3072, "gate"),
    Shape("8B qkv", 6144, 4096, "norm"),
    Shape("8B o", 4096, 4096),
    Shape("8B gate_up", 28672, 4096, "norm"),
    Shape("8B down", 4096, 14336, "gate"),
]
if IS_REHEARSAL:
    SHAPES = [Shape("tiny norm", 48, 32, "norm"), Shape("tiny", 32, 64), Shape("tiny gate", 32, 48, "gate")]
    NUM_ROWS = (1, 5)


class Case:
    """Inputs [M, K, or 2 K before a gate] and a weight, several copies of each, and the ways to multiply them."""

    def __init__(self, shape: Shape, num_rows: int, device: str, num_copies: int = 0) -> None:
        self.shape = shape
        width = shape.k * (2 if shape.before == "gate" else 1)
        num_bytes = shape.n * shape.k + num_rows * width
        copies = num_copies or (1 if IS_REHEARSAL else min(40, max(2, -(-COLD_BYTES // num_bytes))))
        weight = torch.randn(shape.n, shape.k, device=device, dtype=BFLOAT16) * 0.02
        self.weights = [weight if index == 0 else weight.clone() for index in range(copies)]
        numbers, scales = quantise(weight)
        self.scales = scales.t().contiguous()  # [1, N]
        self.numbers = [numbers if index == 0 else numbers.clone() for index in range(copies)]
        self.inputs = [torch.randn(num_rows, width, device=device, dtype=BFLOAT16) for _ in range(copies)]
        self.norm = torch.linspace(0.5, 1.5, width, device=device, dtype=BFLOAT16)
        self.rounded = [self.round(x) for x in self.inputs]

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The operation before the product, in bfloat16."""
        if self.shape.before == "norm":
            return rms_norm(x, self.norm, 1e-6)
        return gate_mul(x, "silu") if self.shape.before == "gate" else x

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The operation before the product, rounded to 8 bits."""
        if self.shape.before == "norm":
            return rms_norm_fp8(x, self.norm, 1e-6)
        return silu_mul_fp8(x) if self.shape.before == "gate" else quantise_rows(x)

    def product(self, index: int, rounded: tuple[torch.Tensor, torch.Tensor], is_fast: bool = True) -> torch.Tensor:
        x, scales = rounded
        return torch._scaled_mm(
            x, self.numbers[index].t(), scales, self.scales, out_dtype=BFLOAT16, use_fast_accum=is_fast
        )

    def each(self, call: Callable[[int], object]) -> list[Callable[[], object]]:
        return [lambda index=index: call(index) for index in range(len(self.weights))]  # type: ignore[misc]


def microseconds(calls: list[Callable[[], object]]) -> float:
    return timing.microseconds(calls, IS_REHEARSAL, replays=7)


def attempt(call: Callable[[], float]) -> float:
    """Run one variant. A failure is printed and does not stop the others."""
    try:
        return call()
    except Exception as error:
        print(f"         {type(error).__name__}: {error}".splitlines()[0][:200])
        return float("nan")


# ── is it right ─────────────────────────────────────────────────────────────────────────────────────


def check(device: str) -> None:
    print("relative errors: of the 8-bit product against float32 on the same rounded numbers (fast sums, exact sums),")
    print("and of all of it against float32 on the numbers before rounding (bfloat16's own error beside it)")
    print(f"{'':14}{'rows':>5}  {'fast':>9} {'exact':>9}   {'fp8':>7} {'bf16':>7}")
    for shape in SHAPES:
        for num_rows in NUM_ROWS[:1] if IS_REHEARSAL else (1, 17, 300):
            attempt(lambda shape=shape, num_rows=num_rows: check_one(shape, num_rows, device))  # type: ignore[misc]


def check_one(shape: Shape, num_rows: int, device: str) -> float:
    case = Case(shape, num_rows, device, num_copies=1)
    x, scales = case.rounded[0]
    exact = (x.float() * scales) @ (case.numbers[0].float() * case.scales.t()).t()
    fast, slow = (distance(case.product(0, case.rounded[0], is_fast), exact) for is_fast in (True, False))
    before = case.plain(case.inputs[0])
    expected = before.float() @ case.weights[0].float().t()
    all_of_it = distance(case.product(0, case.rounded[0]), expected)
    plain = distance(F.linear(before, case.weights[0]), expected)
    is_right = max(fast, slow) < 0.01 and all_of_it < 0.06
    print(f"{shape.name:14}{num_rows:5}  {fast:9.6f} {slow:9.6f}   {all_of_it:7.4f} {plain:7.4f}", end="")
    print("" if is_right else "   WRONG", flush=True)
    return all_of_it


# ── how long it takes ───────────────────────────────────────────────────────────────────────────────


def measure(device: str) -> None:
    print("\nµs: product in bfloat16, in 8 bits (fast sums, exact sums); with what comes before: bfloat16, 8 bits")
    print(
        f"{'':14}{'rows':>5} {'bf16':>8} {'fp8':>8} {'exact':>8} {'round':>7}   {'bf16 all':>8} {'fp8 all':>8} {'gain':>5}  of the ceiling"
    )
    for shape in SHAPES:
        for num_rows in NUM_ROWS:
            print(f"{shape.name:14}{num_rows:5}" + "".join(columns(Case(shape, num_rows, device))), flush=True)


def columns(case: Case) -> Iterator[str]:
    plain = [case.plain(x) for x in case.inputs]
    bf16 = attempt(lambda: microseconds(case.each(lambda i: F.linear(plain[i], case.weights[i]))))
    fast = attempt(lambda: microseconds(case.each(lambda i: case.product(i, case.rounded[i]))))
    slow = attempt(lambda: microseconds(case.each(lambda i: case.product(i, case.rounded[i], False))))
    rounding = attempt(lambda: microseconds(case.each(lambda i: case.round(case.inputs[i]))))
    all_bf16 = attempt(lambda: microseconds(case.each(lambda i: F.linear(case.plain(case.inputs[i]), case.weights[i]))))
    all_fp8 = attempt(lambda: microseconds(case.each(lambda i: case.product(i, case.round(case.inputs[i])))))
    yield f" {bf16:8.1f} {fast:8.1f} {slow:8.1f} {rounding:7.1f}   {all_bf16:8.1f} {all_fp8:8.1f} {all_bf16 / all_fp8:5.2f}"
    shape, num_rows = case.shape, len(case.inputs[0])
    moved = shape.n * shape.k + num_rows * (shape.k + 2 * shape.n)
    work = 2 * num_rows * shape.n * shape.k
    if work / MATRIX > moved / CEILING:
        yield f"  {work / fast / 1e6:6.0f} TFLOP/s {work / fast / 1e-6 / MATRIX:4.0%}"
    else:
        yield f"  {moved / fast / 1e6:6.2f} TB/s    {moved / fast / 1e-6 / CEILING:4.0%}"


def main() -> None:
    torch.manual_seed(0)
    device = "cpu" if IS_REHEARSAL else "cuda"
    with torch.inference_mode():
        check(device)
        print(f"{time.monotonic() - START:.1f} s")
        measure(device)
    print(f"{time.monotonic() - START:.1f} s")


if __name__ == "__main__":
    main()
