"""Products with weights in groups (GGUF's types, 8-bit integers and floats) on a GPU: checks every kernel against float32, then times
tiles against cuBLAS with 16-bit weights. `python -m benchmarks.kernels.groups [check] [few] [many] [--seconds 90]`.

Times are of one call inside a CUDA graph of many, over enough copies of the weights that L2 holds none of them."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
    "1"  # the processes that compile are forks, which must find CUDA untouched
)
IS_REHEARSAL = not torch.cuda.is_available()
if IS_REHEARSAL:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from benchmarks.kernels import timing  # noqa: E402
from benchmarks.kernels.timing import distance  # noqa: E402
from octavo.kernels.triton.gemm.groups_decode import decoded  # noqa: E402
from octavo.kernels.triton.gemm.groups_few import FewChoice, few_product  # noqa: E402
from octavo.kernels.triton.gemm.groups_layout import Groups  # noqa: E402
from octavo.kernels.triton.gemm.groups_tile import TileChoice, tile_product  # noqa: E402

HALF = torch.bfloat16
DEVICE = "cpu" if IS_REHEARSAL else "cuda"


class Shape(NamedTuple):
    name: str
    n: int
    k: int


SHAPES = [Shape("qkv", 6144, 4096), Shape("gate_up", 28672, 4096), Shape("down", 4096, 14336)]
KINDS = ("Q4_K", "Q8_0", "Q6_K", "FP8")
FEW = [FewChoice(4, 4, 2), FewChoice(8, 4, 2), FewChoice(4, 2, 2), FewChoice(4, 8, 2), FewChoice(2, 4, 4)]
READING = [TileChoice(64, 128, 16, 1, 4, 4), TileChoice(64, 128, 16, 2, 4, 4), TileChoice(32, 128, 16, 1, 4, 4)]
MANY = [
    TileChoice(64, 128, 64, 1, 4, 3), TileChoice(64, 128, 64, 2, 4, 3), TileChoice(128, 64, 128, 1, 8, 3), TileChoice(128, 128, 128, 1, 8, 3),
    TileChoice(64, 128, 128, 1, 4, 3),
]  # fmt: skip
if IS_REHEARSAL:
    SHAPES, FEW, READING, MANY = [Shape("tiny", 64, 512)], FEW[:1], READING[:1], MANY[:1]


def make(kind: str, n: int, k: int) -> Groups:
    def codes(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 256, (n, width), dtype=torch.uint8, device=DEVICE).view(dtype)

    def halves(width: int, size: float) -> torch.Tensor:
        return (torch.rand(n, width, device=DEVICE) + 0.5).mul_(size).half()

    match kind:
        case "Q4_K":
            scales, minimums = (codes(k // 32, torch.uint8) & 63 for _ in range(2))
            outer = halves(k // 256, 1e-4)
            return Groups(codes(k // 2, torch.uint8), scales.view(torch.int8), 32, 0, outer, minimums, -8 * outer)
        case "Q8_0":
            return Groups(codes(k, torch.int8), halves(k // 32, 3e-4), 32)
        case "Q6_K":
            numbers = (codes(k, torch.uint8) & 63).view(torch.int8) - 32
            return Groups(numbers, codes(k // 16, torch.int8), 16, 0, halves(k // 256, 1e-5))
        case _:
            numbers = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn)
            return Groups(numbers, torch.rand(n, k // 128, device=DEVICE).add_(0.5).mul_(0.02), 128)


def call(way: FewChoice | TileChoice, x: torch.Tensor, weight: Groups, out: torch.Tensor) -> None:
    if isinstance(way, FewChoice):
        few_product(x, weight, out, None, None, way, not IS_REHEARSAL)
    else:
        tile_product(x, weight, out, None, None, way, not IS_REHEARSAL)


def ways(rows: int) -> list[FewChoice | TileChoice]:
    if rows <= 4:
        return [*FEW, *READING]
    return [*READING] if rows <= 16 else [*MANY]


def compile_one(way: FewChoice | TileChoice, kind: str, k: int, rows: int) -> None:
    weight = make(kind, 128, k)
    call(
        way, torch.zeros(rows, k, dtype=HALF, device=DEVICE), weight, torch.zeros(rows, 128, dtype=HALF, device=DEVICE)
    )


def check() -> None:
    worst = 0.0
    for kind in KINDS:
        weight = make(kind, 192, 512 if IS_REHEARSAL else 4096)
        k = weight.shape[1]
        plain = weight.decode()
        if not torch.equal(decoded(weight, HALF), plain.to(HALF)):
            print("WRONG decoding", kind)
        for rows in (1, 3, 16, 100):
            x = torch.randn(rows, k, device=DEVICE).to(HALF)
            wanted = F.linear(x.float(), plain)
            for way in ways(rows):
                out = torch.full((rows, 192), float("nan"), device=DEVICE, dtype=HALF)
                try:
                    call(way, x, weight, out)
                except Exception as error:
                    print("FAILED", kind, way, rows, f"{type(error).__name__}: {error}"[:200], flush=True)
                    continue
                error_size = distance(out, wanted)
                worst = max(worst, error_size) if error_size == error_size else float("inf")
                if not error_size < 5e-3:
                    print("WRONG", kind, way, rows, error_size, flush=True)
    print(f"largest relative error {worst:.2e}", flush=True)


def copies(kind: str, shape: Shape) -> list[Groups]:
    first = make(kind, shape.n, shape.k)
    number = 1 if IS_REHEARSAL else max(2, -(-timing.COLD_BYTES // first.nbytes))
    more = []
    for _ in range(number - 1):
        tensors = {name: getattr(first, name) for name in ("codes", "scales", "outer", "minimums", "outer_minimums")}
        more.append(
            replace(first, **{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()})
        )
    return [first, *more]


def measure(row_counts: tuple[int, ...], seconds: float) -> None:
    for shape in SHAPES:
        plain = [
            torch.randn(shape.n, shape.k, device=DEVICE).mul_(0.02).to(HALF) for _ in range(1 if IS_REHEARSAL else 2)
        ]
        inputs = {rows: torch.randn(rows, shape.k, device=DEVICE).to(HALF) for rows in row_counts}
        cublas = {
            rows: timing.microseconds(
                timing.at_least([partial(F.linear, x, weight) for weight in plain], 8), IS_REHEARSAL
            )
            for rows, x in inputs.items()
        }
        for kind in KINDS:
            weights = copies(kind, shape)
            us = timing.microseconds([partial(decoded, weight, HALF) for weight in weights], IS_REHEARSAL)
            print(f"{shape.name:8}{kind:5} decoding {us:.1f} us", flush=True)
            for rows, x in inputs.items():
                if timing.elapsed() > seconds:
                    print("out of time")
                    return
                out = torch.zeros(rows, shape.n, device=DEVICE, dtype=HALF)
                found: dict[FewChoice | TileChoice, float] = {}
                for way in ways(rows):
                    calls: list[Callable[[], object]] = [partial(call, way, x, weight, out) for weight in weights]
                    try:
                        found[way] = timing.microseconds(timing.at_least(calls, 8), IS_REHEARSAL)
                    except Exception as error:
                        print("  failed", way, f"{type(error).__name__}: {error}"[:160])
                best = sorted(found.items(), key=lambda item: item[1])
                shown = "  ".join(
                    f"{'f' if len(way) == 3 else 't'}{','.join(map(str, way))} {us:.1f}" for way, us in best[:3]
                )
                us = best[0][1] if best else float("nan")
                print(
                    f"{shape.name:8}{kind:5}{rows:5} rows  cuBLAS {cublas[rows]:7.1f}  {timing.share(weights[0].nbytes, us):3.0f} % "
                    f"{2 * rows * shape.n * shape.k / us / 1e6:4.0f} TFLOP/s  {shown}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["check", "few", "many"])
    parser.add_argument("--seconds", type=float, default=90.0)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    rows = (1, 4, 16) if "few" in arguments.parts else ()
    rows += (64, 256) if "many" in arguments.parts else ()
    if not IS_REHEARSAL:
        checked = [(way, kind, 4096, count) for kind in KINDS for count in (1, 3, 16, 100) for way in ways(count)]
        timed = [
            (way, kind, k, count) for kind in KINDS for k in (4096, 14336) for count in rows for way in ways(count)
        ]
        jobs: list[Callable[[], object]] = [partial(compile_one, *job) for job in dict.fromkeys(checked + timed)]
        timing.compile_all(jobs, chunksize=2)
    if "check" in arguments.parts:
        check()
        print(f"{timing.elapsed():.1f} s", flush=True)
    if rows:
        measure(rows, arguments.seconds)
    print(f"{timing.elapsed():.1f} s")


if __name__ == "__main__":
    main()
