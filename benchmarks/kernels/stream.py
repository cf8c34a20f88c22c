"""Products of 1 to 8 rows with 4-bit weights and 8-bit floats (`int4_stream`, `fp8_stream`): checks them against float32, then times them
against the kernels that are chosen without them, for the shapes of an 8B model; for 4 bits, against other tiles of `int4_few`, too.
`python -m benchmarks.kernels.stream [check] [time] [layer] [--kind int4] [--group 32]`; needs a GPU of compute capability 9.0. Times are of one call
inside a CUDA graph of many, over enough copies of the weights that L2 holds none."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.kernels import timing
from benchmarks.kernels.int4 import SHAPES, Shape, random_weight
from benchmarks.kernels.timing import distance
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.elementwise.quantise import quantise_rows
from octavo.kernels.triton.gemm import int4, skinny
from octavo.kernels.triton.gemm.fp8_stream import fp8_stream
from octavo.kernels.triton.gemm.int4 import int4_linear
from octavo.kernels.triton.gemm.int4_few import FewChoice, few_product
from octavo.kernels.triton.gemm.int4_layout import Int4Tensor, decode, make_room
from octavo.kernels.triton.gemm.int4_stream import int4_stream
from octavo.kernels.triton.gemm.skinny import few_rows_linear
from octavo.kernels.triton.gemm.stream import StreamChoice

PROCESSORS = 132
ROWS = (1, 2, 4, 8)
INT4 = [
    StreamChoice(16, 1, 1, 2, 4), StreamChoice(16, 1, 1, 1, 2), StreamChoice(16, 2, 1, 1, 2),
]  # fmt: skip
INT4_ONCE = [StreamChoice(8, 1, 2, 1, 4), StreamChoice(8, 1, 2, 1, 4, True)]
INT4_DEEP = [StreamChoice(8, 1, 2, 1, 7), StreamChoice(8, 1, 2, 1, 7, True), StreamChoice(16, 2, 1, 1, 4)]
FP8 = [
    StreamChoice(16, 1, 1, 2, 8), StreamChoice(16, 1, 1, 1, 4), StreamChoice(16, 1, 1, 1, 4, True), StreamChoice(16, 1, 1, 2, 8, True),
]  # fmt: skip
FP8_ONCE = [StreamChoice(8, 1, 2, 1, 6), StreamChoice(8, 1, 2, 1, 6, True)]
FP8_DEEP = [StreamChoice(8, 1, 2, 1, 7), StreamChoice(8, 1, 2, 1, 7, True), StreamChoice(16, 2, 1, 1, 4)]
# `int4_few` has 254 registers for down, and leaves no room for programs of the next launch: these have 80 to 178, and wait less for x
# and for chains of matrix instructions.
FEW = [FewChoice(1, 4, 8, 2, 2), FewChoice(1, 4, 8, 8, 2), FewChoice(1, 8, 4, 4, 2)]
FEW_DEEP = [
    FewChoice(1, 4, 14, 2, 2),
    FewChoice(1, 4, 7, 2, 2),
    FewChoice(1, 4, 10, 3, 2),
    FewChoice(1, 8, 4, 2, 2),
    FewChoice(1, 8, 7, 2, 2),
]
HALF = {"int4": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Fp8:
    numbers: torch.Tensor  # [N, K]
    scales: torch.Tensor  # [N]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


Weight = Int4Tensor | Fp8
Way = StreamChoice | FewChoice
Call = Callable[[], object]


def ways(kind: str, shape: Shape) -> list[Way]:
    held, once, deep = (INT4, INT4_ONCE, INT4_DEEP) if kind == "int4" else (FP8, FP8_ONCE, FP8_DEEP)
    streams: list[Way] = [
        *(deep if shape.k > 8192 else held if shape.gated else held[:2] + (held[2:3] if kind == "fp8" else []) + once)
    ]
    return streams if kind == "fp8" else streams + (FEW_DEEP if shape.k > 8192 else FEW)


def make(kind: str, n: int, k: int, is_gated: bool, group: int = 128, half: torch.dtype | None = None) -> Weight:
    if kind == "int4":
        return random_weight(n, k, group, half or HALF[kind], is_gated)
    numbers = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    return Fp8(numbers, torch.rand(n, device="cuda").add_(0.5).mul_(0.02))


def copy(weight: Weight) -> Weight:
    if isinstance(weight, Fp8):
        return Fp8(weight.numbers.clone(), weight.scales)
    rest = [getattr(weight, name) for name in Int4Tensor.__slots__[2:]]
    return Int4Tensor(weight.codes.clone(), weight.scales.clone(), *rest)


def call(way: Way, x: torch.Tensor, weight: Weight, out: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None,
         gated: str, in_fragments: bool, processors: int = PROCESSORS) -> None:  # fmt: skip
    if isinstance(weight, Fp8):
        assert isinstance(way, StreamChoice)
        fp8_stream(x, weight.numbers, weight.scales, out, residual, bias, gated, way, processors, True)
    elif isinstance(way, FewChoice):
        few_product(x, weight, out, residual, bias, gated, way, True, in_fragments)
    else:
        int4_stream(x, weight, out, residual, bias, gated, way, processors, True, in_fragments)


def old(
    x: torch.Tensor,
    weight: Weight,
    residual: torch.Tensor | None,
    gated: str,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """By the kernel that would be chosen without these."""
    with patch.object(int4, "choose_int4", return_value=None), patch.object(skinny, "streamed", return_value=None):
        if isinstance(weight, Fp8):
            return few_rows_linear(
                x, weight.numbers, norm=norm, residual=residual, gated=gated or None, pdl=True, scales=weight.scales
            )
        return int4_linear(x, weight, norm=norm, residual=residual, gated=gated or None, pdl=True)


def by_torch(x: torch.Tensor, weight: Fp8) -> torch.Tensor:
    rounded, scales = quantise_rows(x)
    return torch._scaled_mm(
        rounded, weight.numbers.t(), scales, weight.scales.view(1, -1), out_dtype=x.dtype, use_fast_accum=True
    )


# ── is it right ─────────────────────────────────────────────────────────────────────────────────────

CHECKS = [
    (kind, way, k, group, half, gated, extra)
    for kind, k, choices in (
        ("int4", 4096, INT4 + INT4_ONCE + FEW), ("int4", 14336, INT4_DEEP + FEW_DEEP), ("fp8", 4096, FP8 + FP8_ONCE), ("fp8", 14336, FP8_DEEP),
    )
    for way in choices
    for group, half, gated, extra in (
        (128, torch.float16, "", True), (128, torch.float16, "silu", False), (128, torch.bfloat16, "silu", True), (32, torch.bfloat16, "", False),
    )
    if not (k > 8192 and gated)
]  # fmt: skip


def check() -> None:
    worst: dict[str, float] = {}
    for kind, way, k, group, half, gated, extra in CHECKS:
        torch.manual_seed(k + group)
        weight = make(kind, 448, k, bool(gated), group, half)
        exact = exact_of(weight)
        for rows, fragments in ((1, False), (3, not extra), (8, False)):
            try:
                error = check_one(
                    way, weight, exact, rows, half, gated, extra, fragments and kind == "int4" and k < 8192
                )
            except Exception as failure:
                print("FAILED", kind, way, k, group, half, gated, rows, f"{type(failure).__name__}: {failure}"[:300], flush=True)  # fmt: skip
                break
            worst[kind] = max(worst.get(kind, 0.0), error if error == error else float("inf"))
            if not error < 6e-3:
                print("WRONG", kind, way, k, group, half, gated, rows, fragments, f"{error:.2e}", flush=True)
    print("largest relative errors:", {kind: f"{error:.2e}" for kind, error in worst.items()}, flush=True)


def exact_of(weight: Weight) -> torch.Tensor:
    return (
        weight.numbers.double() * weight.scales.double()[:, None]
        if isinstance(weight, Fp8)
        else decode(weight).double()
    )


def check_one(way: Way, weight: Weight, exact: torch.Tensor, rows: int, half: torch.dtype, gated: str, extra: bool,
              in_fragments: bool) -> float:  # fmt: skip
    num_outputs, k = exact.shape
    x = (torch.randn(rows, k, device="cuda") / (float(exact.std()) * k**0.5)).to(half)
    # rms_norm leaves columns in the order that threads need.
    ones = torch.ones(k, dtype=half, device="cuda")
    given = rms_norm(x, ones, 0.0, in_fragments=True) if in_fragments else x
    x = rms_norm(x, ones, 0.0) if in_fragments else x
    bias = torch.randn(num_outputs, device="cuda").to(half) if extra else None
    width = num_outputs // 2 if gated else num_outputs
    has_residual = extra and not gated
    residual = torch.randn(rows, width, device="cuda").to(half) if has_residual else None
    out = torch.full((rows, width), float("nan"), device="cuda", dtype=half) if residual is None else residual.clone()
    call(way, given, weight, out, out if has_residual else None, bias, gated, in_fragments, processors=3)
    y = x.double() @ exact.t()
    y = y if bias is None else y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    y = y if residual is None else y + residual.double()
    torch.cuda.synchronize()
    return distance(out, y)


# ── how long it takes ───────────────────────────────────────────────────────────────────────────────


def name_of(way: Way) -> str:
    return ("few " if isinstance(way, FewChoice) else "") + ",".join(map(str, way))


def weights_of(kind: str, shape: Shape, group: int) -> list[Weight]:
    first = make(kind, shape.n, shape.k, bool(shape.gated), group)
    return [first, *(copy(first) for _ in range(max(1, timing.COLD_BYTES // first.nbytes)))]


def time_shape(kind: str, shape: Shape, group: int, best: dict[tuple[str, str, int], Way | None]) -> None:
    weights = weights_of(kind, shape, group)
    width = shape.n // 2 if shape.gated else shape.n
    for rows in ROWS:
        x = torch.randn(rows, shape.k, device="cuda").mul_(0.05).to(HALF[kind])
        out = torch.zeros(rows, width, device="cuda", dtype=HALF[kind])
        residual = out if shape.has_residual else None
        fragments = kind == "int4" and not shape.has_residual
        found: dict[Way | str, float] = {}
        jobs: list[tuple[Way | str, list[Call]]] = [
            ("old", [partial(old, x, w, residual, shape.gated) for w in weights])
        ]
        if kind == "fp8" and rows > 1:
            jobs.append(("torch", [partial(by_torch, x, w) for w in weights if isinstance(w, Fp8)]))
        for way in ways(kind, shape):
            jobs.append((way, [partial(call, way, x, w, out, residual, None, shape.gated, fragments) for w in weights]))
        for way, calls in jobs:
            try:
                found[way] = timing.microseconds(timing.at_least(calls, 8), False)
            except Exception as error:
                print("  failed", kind, shape.name, way, rows, f"{type(error).__name__}: {error}"[:160], flush=True)
        ranked = sorted((us, way) for way, us in found.items() if not isinstance(way, str))
        if ranked:
            best[kind, shape.name, rows] = ranked[0][1] if ranked[0][0] < found.get("old", 1e9) else None
        shown = "  ".join(f"{name_of(way)} {us:.1f}" for us, way in ranked)
        names = "  ".join(f"{way} {us:.1f}" for way, us in found.items() if isinstance(way, str))
        limit = weights[0].nbytes / timing.CEILING * 1e6
        print(f"{kind:5}{shape.name:8}{rows:3} rows  bytes {limit:5.1f}  {names}   new: {shown}", flush=True)


def time_layer(kind: str, rows: int, group: int, best: dict[tuple[str, str, int], Way | None]) -> None:
    """The four products of a layer one after the other, with the norms that a step has there."""
    half = HALF[kind]
    copies = 2 if kind == "int4" else 1
    layers = [
        {shape.name: make(kind, shape.n, shape.k, bool(shape.gated), group) for shape in SHAPES} for _ in range(copies)
    ]
    x = torch.randn(rows, 4096, device="cuda").to(half)
    attended = torch.randn(rows, 4096, device="cuda").mul_(0.05).to(half)
    ones = torch.ones(4096, dtype=half, device="cuda")

    def step(layer: dict[str, Weight], is_new: bool) -> None:
        gated = attended
        for shape in SHAPES:
            weight = layer[shape.name]
            choice = best.get((kind, shape.name, rows)) if is_new else None
            residual = x if shape.has_residual else None
            norm = None if shape.has_residual else (ones, 1e-5)
            given = x if norm is not None else attended if shape.k == 4096 else gated
            if choice is None:
                gated = old(given, weight, residual, shape.gated, norm)
                continue
            if norm is not None:
                given = rms_norm(given, *norm, pdl=True, in_fragments=kind == "int4")
            width = shape.n // 2 if shape.gated else shape.n
            gated = torch.empty(rows, width, device="cuda", dtype=half) if residual is None else residual
            call(choice, given, weight, gated, residual, None, shape.gated, kind == "int4" and norm is not None)

    times = {
        is_new: timing.microseconds([partial(step, layer, is_new) for layer in layers] * 4, False)
        for is_new in (False, True)
    }
    print(f"{kind:5}{rows:3} rows, a layer: old {times[False]:.1f}  new {times[True]:.1f} us", flush=True)


def compile_one(kind: str, way: Way | None, k: int, group: int, half: torch.dtype, gated: str, has_residual: bool,
                has_bias: bool, in_fragments: bool, num_outputs: int = 0) -> None:  # fmt: skip
    num_outputs = num_outputs or 128
    n = num_outputs // 2 if gated else num_outputs
    weight: Weight = Fp8(
        torch.empty(num_outputs, k, dtype=torch.float8_e4m3fn, device="cuda"), torch.ones(num_outputs, device="cuda")
    )
    if kind == "int4":
        weight = make_room(num_outputs, k, group, half, torch.device("cuda"), bool(gated))
    x = torch.zeros(1, k, dtype=half, device="cuda")
    out = torch.zeros(1, n, dtype=half, device="cuda")
    bias = torch.zeros(num_outputs, dtype=half, device="cuda") if has_bias else None
    if way is None:
        for rows in ROWS:
            y = torch.zeros(rows, n, dtype=half, device="cuda") if has_residual else None
            old(torch.zeros(rows, k, dtype=half, device="cuda"), weight, y, gated)
        return
    call(way, x, weight, out, out if has_residual else None, bias, gated, in_fragments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["check", "time", "layer"])
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument(
        "--group", type=int, default=128, help="columns of 4-bit weights that share a scale, when they are timed"
    )
    parser.add_argument("--kind", choices=tuple(HALF), help="only these weights are timed")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    jobs: list[tuple[object, ...]] = []
    if "check" in arguments.parts:
        for kind, way, k, group, half, gated, extra in CHECKS:
            fragments = (False, True) if kind == "int4" and k < 8192 and not extra else (False,)
            jobs += [(kind, way, k, group, half, gated, extra and not gated, extra, f) for f in fragments]
    kinds = (arguments.kind,) if arguments.kind else tuple(HALF)
    if "time" in arguments.parts:
        for kind in kinds:
            for shape in SHAPES:
                rest = (shape.k, arguments.group, HALF[kind], shape.gated, shape.has_residual, False)
                in_fragments = kind == "int4" and not shape.has_residual
                jobs += [(kind, way, *rest, in_fragments) for way in ways(kind, shape)]
                jobs.append((kind, None, *rest, in_fragments, shape.n))
    timing.compile_all([partial(compile_one, *job) for job in dict.fromkeys(jobs)], chunksize=1)  # type: ignore[arg-type]
    if "check" in arguments.parts:
        check()
        print(f"{timing.elapsed():.1f} s", flush=True)
    best: dict[tuple[str, str, int], Way | None] = {}
    if "time" in arguments.parts:
        for shape in sorted(SHAPES, key=lambda shape: -shape.n * shape.k):
            for kind in kinds:
                if timing.elapsed() < arguments.seconds:
                    time_shape(kind, shape, arguments.group, best)
    if "layer" in arguments.parts:
        for kind in kinds:
            for rows in ROWS:
                if timing.elapsed() < arguments.seconds + 5:
                    time_layer(kind, rows, arguments.group, best)
    print(f"{timing.elapsed():.1f} s")


if __name__ == "__main__":
    main()
