"""Products with few rows, norm, rotation and gate on a GPU: checks them, times them against cuBLAS, names the best tiles.
`python -m benchmarks.kernels.few_rows [--seconds 85]`

Times are of one call inside a CUDA graph of at least twenty, over copies of the weight that exceed the L2 cache, so that
a product reads its weight from memory. Ours include the layer's norm, gate and residual; cuBLAS's are the product alone."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

if not torch.backends.cuda.is_built():  # checks the build, not the driver: workers are forked before CUDA starts
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.nn.functional as F

from benchmarks.kernels import few_rows_chain as chain
from benchmarks.kernels.few_rows_chain import EPSILON, Dimensions
from benchmarks.kernels.timing import at_least, cold, compile_all, distance, elapsed, microseconds, share
from octavo.kernels.triton.attention.qk_norm_rope_store import qk_norm_rope_store
from octavo.kernels.triton.elementwise.activation import gate_mul
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.gemm.skinny import choose, choose_tile, pays
from octavo.kernels.triton.gemm.skinny_tile import TileChoice, tile_product
from octavo.kernels.triton.gemm.skinny_vector import VectorChoice, vector_product
from octavo.kernels.triton.gemm.tall_tile import SCRATCH_NUMBERS

SMALL = Dimensions("Qwen3-0.6B shape", 28, 1024, 16, 8, 128, 3072, 151936, True)
LARGE = Dimensions("Llama-3.1-8B shape", 32, 4096, 32, 8, 128, 14336, 128256, False)
TINY = Dimensions("rehearsal", 2, 64, 4, 2, 16, 96, 70, True)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PROCESSORS = 132
VECTORS = {
    1: ((8, 4, 3), (8, 4, 2), (4, 4, 4), (8, 2, 4), (4, 1, 4), (2, 1, 8), (8, 8, 2)),
    2: ((8, 4, 2), (4, 4, 2), (4, 2, 2), (4, 1, 2)),
    4: ((8, 4, 2), (4, 4, 2), (4, 1, 3)),
    8: ((4, 4, 2), (8, 4, 1), (4, 1, 2)),
}
Choice = VectorChoice | TileChoice


class Product(NamedTuple):
    name: str
    n: int  # outputs: half of the weight's rows where gated
    k: int
    gated: str
    has_norm: bool
    has_residual: bool

    @property
    def weight_shape(self) -> tuple[int, int]:
        return (2 * self.n if self.gated else self.n, self.k)

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_shape[0] * self.k


def products_of(size: Dimensions) -> list[Product]:
    found = []
    for name, (rows, columns) in size.shapes.items():
        gated = "silu" if name == "gate up" else ""
        has_norm = name in ("qkv", "gate up")
        found.append(Product(name, rows // 2 if gated else rows, columns, gated, has_norm, not has_norm))
    return [*found, Product("head", size.vocabulary, size.hidden, "", True, False)]


def candidates(product: Product, rows: int) -> list[Choice]:
    found: list[Choice] = [choose(rows, product.n, product.k, bool(product.gated), PROCESSORS)]
    found += [VectorChoice(*numbers) for numbers in VECTORS.get(rows, ())]
    if rows >= 4:
        tile = choose_tile(rows, product.n, product.k, bool(product.gated), PROCESSORS)
        parts = 2 if product.gated else 1
        found += [tile, tile._replace(split=tile.split * 2)]
        for block_n, block_k, warps, stages in ((16, 256, 4, 4), (32, 128, 4, 5), (64, 64, 4, 6), (128, 64, 8, 4)):
            if parts * block_n > 128:
                continue
            split = 1
            while -(-product.n // block_n) * split < PROCESSORS and split < 8 and product.k >= 4 * split * block_k:
                split *= 2
            found.append(TileChoice(parts * block_n, block_k, split, warps, stages))
    padded = max(16, 1 << (rows - 1).bit_length())
    fitting = [c for c in found if isinstance(c, VectorChoice) or _fits(product, c, padded)]
    return list(dict.fromkeys(fitting))


def _fits(product: Product, choice: TileChoice, rows: int) -> bool:
    """Return whether tiles fit into shared memory, and partial sums into the scratch memory."""
    shared = choice.num_stages * (choice.block_n + rows) * choice.block_k * 2
    num_tiles = -(-product.weight_shape[0] // choice.block_n)
    partial_sums = num_tiles * choice.split * choice.block_n * rows
    return shared <= 227 * 1024 and (choice.split == 1 or partial_sums <= SCRATCH_NUMBERS)


def launch(
    product: Product, choice: Choice, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor,
    residual: torch.Tensor | None, pdl: bool,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty((x.shape[0], product.n), dtype=x.dtype, device=x.device) if residual is None else residual
    if isinstance(choice, VectorChoice):
        before = (norm, EPSILON) if product.has_norm else None
        vector_product(x, weight, out, residual, None, before, product.gated, choice, pdl)
    else:
        # With more rows the norm is a separate launch, which is not counted.
        tile_product(x, weight, out, residual, None, product.gated, choice, pdl)
    return out


def compile_product(product: Product, rows: int, choice: Choice, pdl: bool) -> None:
    """A job for compile_all, over memory that is never touched."""
    weight = torch.empty(product.weight_shape, dtype=torch.bfloat16, device="cuda")
    x, norm = weight.new_empty(rows, product.k), weight.new_empty(product.k)
    residual = weight.new_empty(rows, product.n) if product.has_residual else None
    launch(product, choice, x, weight, norm, residual, pdl)


def expected_of(
    product: Product, choice: Choice, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor:
    """Return the expected result in float32, computed a slice of the weight at a time, without the residual."""
    x = x.float()
    if product.has_norm and isinstance(choice, VectorChoice):
        x = F.rms_norm(x, x.shape[-1:], norm.float(), EPSILON)
    y = torch.cat([F.linear(x, part.float()) for part in weight.split(16384)], dim=1)
    if product.gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return y


def time_product(product: Product, rows: int, pool: torch.Tensor, is_rehearsal: bool) -> None:
    count = product.num_bytes // 2
    weights = cold(
        lambda i: pool[i * count : (i + 1) * count].view(product.weight_shape), product.num_bytes, is_rehearsal
    )
    x = torch.randn(rows, product.k, device=pool.device).to(pool.dtype)
    norm = (1 + torch.randn(product.k, device=pool.device) / 8).to(pool.dtype)
    residual = torch.randn(rows, product.n, device=pool.device).to(pool.dtype) if product.has_residual else None
    kept = residual.clone() if residual is not None else None
    calls: list[Callable[[], object]] = [partial(F.linear, x, weight) for weight in weights]
    cublas = microseconds(at_least(calls, 20), is_rehearsal)
    times: dict[Choice, float] = {}
    notes = []

    def variant(choice: Choice, pdl: bool) -> float:
        calls: list[Callable[[], object]] = [
            partial(launch, product, choice, x, weight, norm, residual, pdl) for weight in weights
        ]
        return microseconds(at_least(calls, 20), is_rehearsal)

    references: dict[bool, torch.Tensor] = {}
    for choice in candidates(product, rows):
        try:
            is_vector = isinstance(choice, VectorChoice)
            if is_vector not in references:
                references[is_vector] = expected_of(product, choice, x, weights[0], norm)
            expected = references[is_vector]
            if residual is not None and kept is not None:
                residual.copy_(kept)
                expected = expected + kept.float()
            error = distance(launch(product, choice, x, weights[0], norm, residual, False), expected)
            if error > 5e-3:
                notes.append(f"{tuple(choice)} WRONG, error {error:.1e}")
            else:
                times[choice] = variant(choice, False)
        except Exception as fault:  # one failing variant must not end the run
            notes.append(f"{tuple(choice)} {type(fault).__name__}: {str(fault).splitlines()[0][:80]}")
    report(product, rows, cublas, times, notes, variant, is_rehearsal)


def report(
    product: Product, rows: int, cublas: float, times: dict[Choice, float], notes: list[str],
    variant: Callable[[Choice, bool], float], is_rehearsal: bool,
) -> None:  # fmt: skip
    line = f"  {product.name:<8}{rows:>4} {cublas:>8.1f} {share(product.num_bytes, cublas):>4.0f} %"
    if times:
        best = min(times, key=times.__getitem__)
        rule = choose(rows, product.n, product.k, bool(product.gated), PROCESSORS)
        try:
            overlapped = times[best] if is_rehearsal else variant(rule, True)
        except Exception as fault:
            overlapped = float("nan")
            notes.append(f"pdl: {type(fault).__name__}: {str(fault).splitlines()[0][:80]}")
        line += f" {times[best]:>8.1f} {share(product.num_bytes, times[best]):>4.0f} %"
        line += f" {times.get(rule, float('nan')):>7.1f} rule {overlapped:>7.1f} pdl"
        wins, says = times[best] < cublas, pays(rows, *product.weight_shape)
        line += f"  {'wins ' if wins else 'loses'}{'' if wins == says else ' (pays says otherwise)'}"
        ranked = sorted(times.items(), key=lambda item: item[1])[:4]
        line += "  " + "  ".join(f"{_short(choice)} {time:.1f}" for choice, time in ranked)
    print(line, *(f"\n      {note}" for note in notes), flush=True)


def _short(choice: Choice) -> str:
    return ("v" if isinstance(choice, VectorChoice) else "t") + "/".join(map(str, choice))


def elementwise(
    size: Dimensions, num_tokens: int, device: torch.device, is_rehearsal: bool
) -> dict[str, tuple[list[Callable[[], object]], float]]:
    """Return calls over cold copies, and the bytes each reads and writes."""
    all_heads = size.num_heads + 2 * size.num_kv_heads
    dtype = torch.float16 if is_rehearsal else torch.bfloat16
    norm = torch.ones(size.hidden, dtype=dtype, device=device)
    head_norm = torch.ones(size.head_size, dtype=dtype, device=device) if size.has_head_norms else None
    kv = torch.zeros(-(-num_tokens // 16), 2, size.num_kv_heads, 16, size.head_size, dtype=dtype, device=device)
    slots = torch.randperm(num_tokens, device=device)
    rotation = torch.rand(num_tokens, size.head_size // 2, 2, device=device)

    def rows(width: int) -> list[torch.Tensor]:
        return cold(
            lambda _: torch.randn(num_tokens, width, device=device).to(dtype), 2 * num_tokens * width, is_rehearsal
        )

    def store_heads(heads: torch.Tensor) -> None:
        split = heads.view(num_tokens, all_heads, size.head_size)
        qk_norm_rope_store(split, size.num_heads, size.num_kv_heads, rotation, head_norm, head_norm, EPSILON, kv, slots)

    hidden, inner = 2 * num_tokens * size.hidden, 2 * num_tokens * size.inner
    heads = 2 * num_tokens * all_heads * size.head_size
    return {
        "norm": ([partial(rms_norm, x, norm, EPSILON) for x in rows(size.hidden)], 2 * hidden),
        "qk norm rope": (
            [partial(store_heads, x) for x in rows(all_heads * size.head_size)],
            2 * heads + 4 * rotation.numel(),
        ),
        "silu·mul": ([partial(gate_mul, x, "silu") for x in rows(2 * size.inner)], 3 * inner),
    }


def check_elementwise(size: Dimensions, device: torch.device, is_rehearsal: bool) -> None:
    dtype = torch.float16 if is_rehearsal else torch.bfloat16
    x = torch.randn(37, size.hidden, device=device).to(dtype)
    norm = torch.randn(size.hidden, device=device).to(dtype)
    gate_up = torch.randn(37, 2 * size.inner, device=device).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    errors = {
        "norm": distance(rms_norm(x, norm, EPSILON), F.rms_norm(x.float(), norm.shape, norm.float(), EPSILON)),
        "silu·mul": distance(gate_mul(gate_up, "silu"), F.silu(gate) * up),
    }
    wrong = [name for name, error in errors.items() if not error < 3e-3]
    print(
        f"{size.name}: errors " + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()),
        *wrong and ["WRONG", *wrong],
    )


def time_elementwise(sizes: list[Dimensions], device: torch.device, is_rehearsal: bool) -> None:
    names = "".join(f"{name:>20}" for name in ("norm", "qk norm rope", "silu·mul"))
    print(f"\n     T{names}   µs, share of 4.26 TB/s")
    for size in sizes:
        for num_tokens in (1, 5) if is_rehearsal else (1, 256, 8192):
            line = f"{num_tokens:>6}"
            for calls, num_bytes in elementwise(size, num_tokens, device, is_rehearsal).values():
                time = microseconds(at_least(calls, 20), is_rehearsal)
                line += f"{time:>13.1f} {share(num_bytes, time):>4.0f} %"
            print(f"{line}   {size.name}", flush=True)


def compile_elementwise(size: Dimensions) -> None:
    """A job for compile_all."""
    for num_tokens in (1, 256, 8192):
        for calls, _ in elementwise(size, num_tokens, torch.device("cuda"), False).values():
            calls[0]()


def all_jobs(sizes: list[Dimensions]) -> list[Callable[[], object]]:
    jobs: list[Callable[[], object]] = [partial(compile_elementwise, size) for size in sizes]
    for size in sizes:
        jobs += chain.compile_jobs(size, PROCESSORS)
    for size in sizes:
        for product in products_of(size):
            for rows in ROWS:
                jobs += [partial(compile_product, product, rows, c, False) for c in candidates(product, rows)]
                rule = choose(rows, product.n, product.k, bool(product.gated), PROCESSORS)
                jobs.append(partial(compile_product, product, rows, rule, True))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=85, help="begin nothing more after this long")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    is_rehearsal = bool(os.environ.get("TRITON_INTERPRET"))
    sizes = [TINY] if is_rehearsal else [SMALL, LARGE]
    if not is_rehearsal:
        compile_all(all_jobs(sizes))
    device = torch.device("cpu" if is_rehearsal else "cuda")
    dtype = torch.float16 if is_rehearsal else torch.bfloat16
    pool = torch.empty(max(size.num_layers * size.layer_numbers for size in sizes), dtype=dtype, device=device)
    for part in pool.split(1 << 28):
        part.uniform_(-0.04, 0.04)
    print(f"{elapsed():5.1f} s  ready", flush=True)
    for size in sizes:
        check_elementwise(size, device, is_rehearsal)
        try:
            chain.run(size, pool, PROCESSORS, is_rehearsal)
            if not is_rehearsal:
                print(f"  host: {chain.host_microseconds(size, pool):.0f} µs a launch outside a graph")
        except Exception as fault:  # the tables below are useful without it
            print(f"  chain: {type(fault).__name__}: {str(fault).splitlines()[0][:200]}")
    time_elementwise(sizes, device, is_rehearsal)
    print("\n  product rows   cuBLAS          best of ours         rule     with pdl     and the four quickest, as")
    print("  v/rows of W/warps/tiles ahead or t/rows of W/columns/programs that share them/warps/stages")
    for rows in (1, 4, 9) if is_rehearsal else ROWS:
        for size in sizes:
            if rows == ROWS[0]:
                print(f"  {size.name}: " + ", ".join(f"{p.name} {p.num_bytes / 1e6:.1f} MB" for p in products_of(size)))
            for product in products_of(size):
                if elapsed() < arguments.seconds:
                    time_product(product, rows, pool, is_rehearsal)
        print(f"{elapsed():5.1f} s", flush=True)


if __name__ == "__main__":
    main()
