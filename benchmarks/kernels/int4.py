"""Products with 4-bit weights on a GPU: checks every kernel against float32, then times their tiles against cuBLAS with 16-bit
weights. `python -m benchmarks.kernels.int4 [check] [few] [many] [rows] [experts]`; needs a GPU of compute capability 9.0.

Times are of one call inside a CUDA graph of many, over enough copies of the weights that L2 holds none of them."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels import timing
from benchmarks.kernels.timing import distance
from octavo.kernels.triton.elementwise.activation import gate_mul
from octavo.kernels.triton.gemm import int4_decode, int4_few, int4_hopper
from octavo.kernels.triton.gemm.gated import gated_linear, gated_pays
from octavo.kernels.triton.gemm.int4 import choose
from octavo.kernels.triton.gemm.int4_few import FewChoice
from octavo.kernels.triton.gemm.int4_hopper import Tile
from octavo.kernels.triton.gemm.int4_layout import Int4Tensor, decode, make_room, store
from octavo.kernels.triton.gemm.skinny import few_rows_linear, pays
from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS
from octavo.kernels.triton.moe.expert_plan import Tiles, plan_experts
from octavo.kernels.triton.moe.experts import ExpertTensors, experts

HALF = torch.float16
PROCESSORS = 132


class Shape(NamedTuple):
    name: str
    n: int
    k: int
    gated: str = ""
    has_residual: bool = False


SHAPES = (
    Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096, has_residual=True),
    Shape("gate_up", 28672, 4096, "silu"),
    Shape("down", 4096, 14336, has_residual=True),
)
FEW = [
    FewChoice(*choice)
    for choice in ((1, 4, 8), (1, 2, 16), (1, 2, 8), (2, 4, 4), (2, 4, 8), (1, 8, 4), (1, 4, 6), (2, 2, 8))
]
DEEP = [
    FewChoice(*choice)
    for choice in ((1, 16, 2), (1, 16, 4), (1, 16, 7), (1, 8, 8), (1, 8, 14), (1, 4, 14), (2, 8, 7), (1, 4, 28))
]
READING = [Tile(16, 1, s, 8, 3) for s in (1, 2, 4)] + [Tile(16, 1, s, 12, 2) for s in (1, 2)]
MANY = [
    Tile(32, 1, 2, 8, 2), Tile(32, 1, 4, 8, 2), Tile(64, 1, 1, 8, 1), Tile(64, 1, 1, 5, 2), Tile(64, 1, 2, 5, 2), Tile(64, 2, 1, 8, 1),
    Tile(64, 2, 2, 8, 1), Tile(128, 1, 1, 5, 1), Tile(128, 2, 1, 5, 1), Tile(128, 2, 2, 5, 1), Tile(128, 1, 2, 5, 1), Tile(128, 2, 4, 5, 1), Tile(256, 2, 1, 3, 1), Tile(32, 1, 1, 8, 2), Tile(64, 1, 4, 5, 2),
]  # fmt: skip


def random_weight(n: int, k: int, group: int, dtype: torch.dtype, is_gated: bool, device: str = "cuda") -> Int4Tensor:
    weight = make_room(n, k, group, dtype, torch.device(device), is_gated)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    zeros = torch.randint(4, 12, (n, k // group), device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.5).mul_(0.005).half()
    store(weight, 0, codes, zeros, scales)
    return weight


def call(way: FewChoice | Tile, x: torch.Tensor, weight: Int4Tensor, out: torch.Tensor, residual: torch.Tensor | None,
         bias: torch.Tensor | None, gated: str, pdl: bool = True, in_fragments: bool = False) -> None:  # fmt: skip
    if isinstance(way, FewChoice):
        int4_few.few_product(x, weight, out, residual, bias, gated, way, pdl, in_fragments)
    else:
        int4_hopper.product(x, weight, out, residual, bias, gated, way, PROCESSORS, pdl)


def compile_one(
    way: FewChoice | Tile, k: int, group: int, dtype: torch.dtype, gated: str, residual: bool, bias: bool
) -> None:
    weight = make_room(128, k, group, dtype, torch.device("cuda"), bool(gated))
    n = 64 if gated else 128
    x = torch.zeros(8, k, dtype=dtype, device="cuda")
    out = torch.zeros(8, n, dtype=dtype, device="cuda")
    more = torch.zeros(128, dtype=dtype, device="cuda") if bias else None
    call(way, x, weight, out, out if residual else None, more, gated, True, not residual and k % 128 == 0)


CHECKS = [
    (way, n, k, group, dtype, gated, extra)
    for way, rows in (
        (FewChoice(1, 8, 2), 0), (FewChoice(2, 4, 1), 0), (Tile(16, 1, 4, 8, 2), 0), (Tile(64, 2, 2, 5, 1), 0),
        (Tile(256, 2, 1, 3, 1), 0), (Tile(128, 1, 1, 4, 1), 0),
    )
    for n, k, group, dtype, gated, extra in (
        (256, 1024, 128, torch.float16, "", False), (256, 1024, 128, torch.bfloat16, "silu", True),
        (384, 960, 32, torch.bfloat16, "", True), (256, 1088, 64, torch.float16, "silu", False),
    )
]  # fmt: skip


def check() -> None:
    worst = 0.0
    for way, n, k, group, dtype, gated, extra in CHECKS:
        torch.manual_seed(n + k)
        weight = random_weight(n, k, group, dtype, bool(gated))
        plain = decode(weight)
        for rows in (1, 3, 8) if isinstance(way, FewChoice) else (1, 17, 130, 300):
            x = torch.randn(rows, k + 8, device="cuda").to(dtype)[:, :k]
            bias = torch.randn(n, device="cuda").to(dtype) if extra else None
            width = n // 2 if gated else n
            residual = torch.randn(rows, width, device="cuda").to(dtype) if extra else None
            out = (
                torch.full((rows, width), float("nan"), device="cuda", dtype=dtype)
                if residual is None
                else residual.clone()
            )
            try:
                call(way, x, weight, out, None if residual is None else out, bias, gated)
            except Exception as error:
                print("FAILED", way, n, k, group, dtype, gated, rows, f"{type(error).__name__}: {error}"[:300])
                break
            y = x.float() @ plain.t()
            y = y if bias is None else y + bias.float()
            if gated:
                gate, up = y.chunk(2, dim=1)
                y = F.silu(gate) * up
            y = y if residual is None else y + residual.float()
            error_size = distance(out, y)
            worst = max(worst, error_size) if error_size == error_size else float("inf")
            if not error_size < 5e-3:
                print("WRONG", way, n, k, group, dtype, gated, rows, error_size, flush=True)
    print(f"largest relative error {worst:.2e}")


def copies(shape: Shape, group: int = 128) -> list[Int4Tensor]:
    first = random_weight(shape.n, shape.k, group, HALF, bool(shape.gated))
    number = max(2, -(-timing.COLD_BYTES // first.nbytes))
    more = [
        Int4Tensor(
            first.codes.clone(), first.scales.clone(), *(getattr(first, name) for name in Int4Tensor.__slots__[2:])
        )
        for _ in range(number - 1)
    ]
    return [first, *more]


def time_ways(
    shape: Shape, weights: list[Int4Tensor], ways: list[FewChoice | Tile], rows: int
) -> dict[FewChoice | Tile, float]:
    x = torch.randn(rows, shape.k, device="cuda").to(HALF)
    width = shape.n // 2 if shape.gated else shape.n
    out = torch.zeros(rows, width, device="cuda", dtype=HALF)
    residual = out if shape.has_residual else None
    found: dict[FewChoice | Tile, float] = {}
    for way in ways:
        calls: list[Callable[[], object]] = [
            partial(call, way, x, weight, out, residual, None, shape.gated, True, residual is None)
            for weight in weights
        ]
        try:
            found[way] = timing.microseconds(timing.at_least(calls, 8), False)
        except Exception as error:
            print("  failed", shape.name, way, rows, f"{type(error).__name__}: {error}"[:160])
    return found


def cublas(shape: Shape, rows: int) -> float:
    number = max(2, -(-timing.COLD_BYTES // (shape.n * shape.k * 2)))
    weights = [torch.randn(shape.n, shape.k, device="cuda").mul_(0.02).to(HALF) for _ in range(number)]
    x = torch.randn(rows, shape.k, device="cuda").to(HALF)
    return timing.microseconds(timing.at_least([partial(F.linear, x, weight) for weight in weights], 8), False)


def show(shape: Shape, rows: int, found: dict[FewChoice | Tile, float], other: float) -> None:
    best = sorted(found.items(), key=lambda item: item[1])
    num_bytes, flops = shape.n * shape.k * (0.5 + 4 / 128), 2 * rows * shape.n * shape.k
    shown = "  ".join(f"{_words(way)} {us:.1f}" for way, us in best[:4])
    us = best[0][1]
    print(
        f"{shape.name:8}{rows:6}  cuBLAS {other:8.1f}   {timing.share(num_bytes, us):4.0f} % {flops / us / 1e6:5.0f} TFLOP/s   {shown}"
        f"   … {_words(best[-1][0])} {best[-1][1]:.1f}",
        flush=True,
    )


def _words(way: FewChoice | Tile) -> str:
    return ("f" if isinstance(way, FewChoice) else "t") + ",".join(map(str, way))


def few() -> None:
    for shape in SHAPES:
        weights = copies(shape)
        for rows in (1, 2, 4, 8, 16):
            ways = [*((DEEP if shape.k > 8192 else FEW) if rows <= 8 else []), *READING]
            show(shape, rows, time_ways(shape, weights, ways, rows), cublas(shape, rows))


def many() -> None:
    for shape in SHAPES:
        weights = copies(shape)
        us = timing.microseconds(
            timing.at_least([partial(int4_decode.decoded, weight) for weight in weights], 4), False
        )
        print(f"{shape.name:8}decoding {us:.1f} us, {timing.share(shape.n * shape.k * 2.53, us):.0f} % of bandwidth")
        for rows in (32, 64, 128, 256, 512, 1024, 4096):
            ways = [tile for tile in MANY if tile.rows <= max(64, rows) and (rows <= 128 or tile.rows >= 64)]
            ways = [
                tile
                for tile in ways
                if tile.split == 1 or shape.n // 64 * -(-rows // tile.rows) * 64 * tile.rows * tile.split <= 1 << 22
            ]
            show(shape, rows, time_ways(shape, weights, ways, rows), cublas(shape, rows))


# ── by rows, against what layers do with 16 bits ────────────────────────────────────────────────────

BY_ROWS = [
    Tile(64, 2, 1, 8, 1), Tile(64, 1, 1, 5, 2), Tile(64, 1, 2, 5, 2), Tile(128, 1, 1, 5, 2), Tile(128, 1, 1, 5, 1), Tile(128, 1, 2, 5, 1), Tile(128, 2, 1, 5, 1),
    Tile(128, 2, 2, 5, 1), Tile(256, 2, 1, 3, 1), Tile(256, 2, 2, 3, 1),
]  # fmt: skip


def with_16_bits(shape: Shape, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if shape.has_residual:
        return out.addmm_(x, weight.t())
    if not shape.gated:
        return F.linear(x, weight)
    if gated_pays(len(x), weight, shape.gated):
        return gated_linear(x, weight, shape.gated, pdl=True)
    if pays(len(x), shape.n, shape.k, is_gated=True):
        return few_rows_linear(x, weight, gated=shape.gated, pdl=True)
    return gate_mul(F.linear(x, weight), shape.gated, pdl=True)


def by_rows() -> None:
    for shape in SHAPES:
        weights = copies(shape)
        number = max(2, -(-timing.COLD_BYTES // (shape.n * shape.k * 2)))
        plain = [torch.randn(shape.n, shape.k, device="cuda").mul_(0.02).to(HALF) for _ in range(number)]
        for rows in (96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024, 2048):
            x = torch.randn(rows, shape.k, device="cuda").to(HALF)
            out = torch.zeros(rows, shape.n, device="cuda", dtype=HALF)
            calls = [partial(with_16_bits, shape, x, weight, out) for weight in plain]
            other = timing.microseconds(timing.at_least(calls, 8), False)
            found = time_ways(shape, weights, [tile for tile in BY_ROWS if _fits(tile, shape, rows)], rows)
            ranked = sorted(found.items(), key=lambda item: item[1])
            choice = choose(rows, shape.n // 64, shape.k // 128, bool(shape.gated), PROCESSORS, False)
            taken = "decoded" if choice is None else "t" + ",".join(map(str, choice[1:]))
            shown = "  ".join(f"{_words(way)} {us:.1f}" for way, us in ranked[:6])
            print(f"{shape.name:8}{rows:6}  16 bits {other:7.1f}  chosen {taken}   {shown}", flush=True)


def _fits(tile: Tile, shape: Shape, rows: int) -> bool:
    """Whether it is worth a try, and shares of K have room."""
    if (
        tile.rows > max(64, 2 * rows)
        or (rows >= 256 and tile.rows == 64)
        or (rows > 256 and tile.split > 1 and shape.gated)
    ):
        return False
    tiles = shape.n // 64 // tile.sides * -(-rows // tile.rows)
    return tile.split == 1 or (
        tiles * tile.split * 64 * tile.sides * tile.rows <= SCRATCH_NUMBERS and tiles <= MAX_SHARED_TILES
    )


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────

EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768, False), "gpt-oss-20b": (32, 4, 2880, 2880, True)}
FEW_TILES = [
    Tiles(16, 64, 128, 4, 4), Tiles(16, 32, 256, 4, 4), Tiles(16, 64, 256, 4, 3), Tiles(16, 128, 128, 4, 3), Tiles(16, 128, 64, 4, 4),
    Tiles(16, 32, 128, 2, 5), Tiles(16, 64, 64, 4, 5),
]  # fmt: skip
MANY_TILES = [
    Tiles(64, 64, 64, 4, 3), Tiles(64, 128, 64, 4, 3), Tiles(64, 128, 64, 8, 3), Tiles(128, 64, 64, 4, 3), Tiles(128, 64, 64, 8, 4),
    Tiles(128, 128, 64, 8, 3), Tiles(32, 128, 64, 4, 4), Tiles(128, 128, 32, 8, 4),
]  # fmt: skip


def expert_weights(num: int, rows: int, width: int, is_packed: bool) -> ExpertTensors:
    if not is_packed:
        return ExpertTensors(torch.empty(num, rows, width, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02))
    codes = torch.randint(0, 256, (num, rows, width // 2), device="cuda", dtype=torch.uint8)
    return ExpertTensors(codes, torch.full((num, rows, width // 32), 120, device="cuda", dtype=torch.uint8))


def compile_experts(tiles: Tiles, name: str) -> None:
    _, chosen, depth, inner, is_packed = EXPERTS[name]
    gate_up, down = expert_weights(8, 2 * inner, depth, is_packed), expert_weights(8, depth, inner, is_packed)
    x, logits = (torch.zeros(2, size, device="cuda", dtype=torch.bfloat16) for size in (depth, 8))
    experts(x, plan_experts(logits, chosen, True, tiles), gate_up, down, (1.0, 0.0, 0.0), torch.zeros_like(x))


def time_experts() -> None:
    for name, (num, _, depth, inner, is_packed) in EXPERTS.items():
        gate_up, down = expert_weights(num, 2 * inner, depth, is_packed), expert_weights(num, depth, inner, is_packed)
        for tokens in (1, 8, 64, 256, 512, 8192):
            time_tokens(name, tokens, gate_up, down)


def time_tokens(name: str, tokens: int, gate_up: ExpertTensors, down: ExpertTensors) -> None:
    num, chosen, depth, inner, is_packed = EXPERTS[name]
    x = torch.randn(tokens, depth, device="cuda").bfloat16()
    logits = torch.randn(tokens, num, device="cuda").bfloat16()
    out = torch.zeros_like(x)

    def step(tiles: Tiles) -> None:
        experts(x, plan_experts(logits, chosen, True, tiles), gate_up, down, (1.0, 0.0, 0.0), out)

    found = {}
    for tiles in FEW_TILES if tokens <= 64 else FEW_TILES[:3] + MANY_TILES if tokens <= 512 else MANY_TILES:
        try:
            found[tiles] = timing.microseconds([partial(step, tiles)] * (8 if tokens <= 512 else 2), False)
        except Exception as error:
            print("  failed", name, tiles, tokens, f"{type(error).__name__}: {error}"[:160])
    plan = timing.microseconds([partial(plan_experts, logits, chosen, True, FEW_TILES[0])] * 8, False)
    reached = num * (1 - (1 - chosen / num) ** tokens)
    best = sorted(found.items(), key=lambda item: item[1])
    us = best[0][1]
    each = 3 * depth * inner * (0.53125 if is_packed else 2)
    print(
        f"{name} {tokens:5} tokens: plan {plan:.1f} us; {timing.share(reached * each, us):3.0f} % of bandwidth, "
        f"{6 * tokens * chosen * depth * inner / us / 1e6:5.0f} TFLOP/s; "
        + "  ".join(f"{','.join(map(str, tiles))} {us:.0f}" for tiles, us in best),
        flush=True,
    )


def main() -> None:
    parts = sys.argv[1:] or ["check", "few", "many", "experts"]
    torch.set_grad_enabled(False)
    jobs: list[Callable[[], object]] = []
    if "check" in parts:
        jobs += [
            partial(compile_one, way, k, group, dtype, gated, extra, extra)
            for way, n, k, group, dtype, gated, extra in CHECKS
        ]
    ways = (FEW + DEEP + READING if "few" in parts else []) + (MANY if "many" in parts else [])
    ways += [tile for tile in BY_ROWS if tile not in ways] if "rows" in parts else []
    for way in ways:
        for shape in SHAPES:
            is_few = isinstance(way, FewChoice)
            if (is_few and (shape.k > 8192) == (way in DEEP)) or (not is_few and shape.name in ("qkv", "o", "gate_up")):
                jobs.append(partial(compile_one, way, shape.k, 128, HALF, shape.gated, shape.has_residual, False))
    if "experts" in parts:
        jobs += [partial(compile_experts, tiles, name) for name in EXPERTS for tiles in FEW_TILES + MANY_TILES]
    timing.compile_all(jobs, chunksize=2)
    for name, part in (("check", check), ("few", few), ("many", many), ("rows", by_rows), ("experts", time_experts)):
        if name in parts:
            print(f"\n{timing.elapsed():.1f} s  {name}", flush=True)
            part()
    print(f"{timing.elapsed():.1f} s")


if __name__ == "__main__":
    main()
