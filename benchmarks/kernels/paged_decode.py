"""Paged decode attention on a GPU: checks it, sweeps configurations over batch sizes and contexts, prints the best of each.
`python -m benchmarks.kernels.paged_decode [--quick]`

Times are of one call inside a CUDA graph of many, over page tables that together exceed the L2 cache, planning excluded."""

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from benchmarks.kernels.timing import microseconds
from octavo.kernels.triton.attention.decode_plan import DecodeConfig, DecodeWork, decode_config, num_chunks
from octavo.kernels.triton.attention.paged_decode import DecodeAttention

CEILING = 4.26e12  # bytes per second, read, measured
MATRIX = 795e12  # bfloat16 operations per second, measured
PAGE, HEAD = 16, 128
LAYOUTS = ((16, 8), (32, 8))
COLD_BYTES = 160e6  # least bytes that one replay reads: several times the L2 cache
CONFIGS = [
    DecodeConfig(tile, warps, stages)
    for tile, warps, stages in (
        *((32, 1, 4), (32, 2, 3), (32, 2, 5), (32, 4, 4)),
        *((64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3)),
        *((128, 4, 2), (128, 4, 3), (128, 8, 3)),
    )
]
PREFIX_CONFIGS = [
    replace(DecodeConfig(), prefix_rows=rows, prefix_tile=tile, prefix_warps=warps, prefix_stages=stages)
    for rows, tile, warps, stages in (
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3)),
        *((128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)),
    )
]


@dataclass(frozen=True)
class Variant:
    """One way to run a shape."""

    config: DecodeConfig
    chunks: int = 0  # 0: chosen by the rule
    min_chunk: int = 64
    pdl: bool = False
    splits: int = 0

    def __str__(self) -> str:
        c = self.config
        parts = [f"t{c.tile} w{c.num_warps} s{c.num_stages}"]
        parts += [f"chunks {self.chunks}"] * bool(self.chunks) + [f"min {self.min_chunk}"] * (self.min_chunk != 64)
        return " ".join(parts + ["pdl"] * self.pdl)


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    num_rows: int
    context: int

    def bytes(self, kv: torch.Tensor) -> float:
        return self.num_rows * self.context * self.num_kv_heads * HEAD * 2 * kv.element_size()


class Bench:
    """The KV stores, and the kernels compiled and timed over them."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.stores = {"bf16": self._store(65536, torch.bfloat16), "fp8": self._store(65536, torch.float8_e4m3fn)}
        self.attention = {heads: DecodeAttention(512, *heads, HEAD, self.device, 1024) for heads in LAYOUTS}
        self.failures: dict[str, str] = {}

    def _store(self, num_pages: int, dtype: torch.dtype) -> torch.Tensor:
        kv = torch.empty((num_pages, 2, 8, PAGE, HEAD), dtype=dtype, device=self.device)
        for part in kv.split(4096):
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=self.device))
        return kv

    def tables(self, num_pages: int, num_rows: int, width: int, count: int) -> list[torch.Tensor]:
        """Return `count` page tables [B, M]; a page is reused only once all have been used."""
        needed = num_rows * width
        order = torch.cat(
            [torch.randperm(num_pages, device=self.device) for _ in range(-(-needed * count // num_pages))]
        )
        return list(order[: needed * count].int().view(count, num_rows, width))

    # ── correctness ─────────────────────────────────────────────────────────────────────────────────────

    def check(self, heads: tuple[int, int], store: str, variant: Variant, prefix: int = 0) -> float:
        """Return the relative error over rows of many lengths. Uses its own instance: checks run concurrently."""
        torch.cuda.set_device(0)
        kv = self.stores[store]
        lengths = (
            [0, 1, 15, 16, 17, 333, 600, 1000] if not prefix else [prefix, prefix + 1, 0, prefix + 300, prefix + 77]
        )
        attention = DecodeAttention(len(lengths), *heads, HEAD, self.device, 1024)
        q = torch.randn((len(lengths), heads[0] + 2 * heads[1], HEAD), device=self.device).bfloat16()[:, : heads[0]]
        table = self.tables(len(kv), len(lengths), -(-max(lengths) // PAGE), 1)[0].clone()
        table[:, : prefix // PAGE] = table[0, : prefix // PAGE].clone()
        reference = _reference(q, kv, table, lengths)
        shared = torch.tensor([prefix], dtype=torch.int32, device=self.device) if prefix else None
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        worst = 0.0
        for chunks in {1, variant.chunks or 33}:
            out = torch.full((len(lengths), heads[0] * HEAD), float("nan"), device=self.device).bfloat16()
            work = attention.plan(seq_lens, chunks=chunks, prefix_len=shared, pdl=variant.pdl)
            self._call(attention, work, variant, q, kv, table, out)
            error = float((out.float() - reference).norm() / reference.norm())
            worst = max(worst, error if math.isfinite(error) else math.inf)
        return worst

    def compile(
        self, jobs: Iterable[tuple[tuple[int, int], str, Variant, int]]
    ) -> set[tuple[tuple[int, int], str, Variant]]:
        """Compile and check all jobs at once, on all cores. Return those that are correct."""
        good, worst = set(), 0.0
        with ThreadPoolExecutor(16) as pool:
            futures = {job: pool.submit(self.check, *job) for job in jobs}
            for job, future in futures.items():
                try:
                    error = future.result()
                    worst = max(worst, error)
                    if error > 1e-2:
                        raise ArithmeticError(f"relative error {error:.2e}")
                    good.add(job[:3])
                except Exception as error:
                    self.failures[f"{job[0]} {job[1]} {job[2]} prefix {job[3]}"] = f"{type(error).__name__}: {error}"[
                        :200
                    ]
        print(f"{len(good)} of {len(futures)} variants compiled and right; largest relative error {worst:.2e}")
        return good

    # ── speed ───────────────────────────────────────────────────────────────────────────────────────────

    def _call(
        self,
        attention: DecodeAttention,
        work: DecodeWork,
        variant: Variant,
        q: torch.Tensor,
        kv: torch.Tensor,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        attention.run(
            *(work, q, kv, table, out),
            scale=HEAD**-0.5,
            config=variant.config,
            prefix_splits=variant.splits,
            pdl=variant.pdl,
        )

    def time(self, shape: Shape, store: str, variant: Variant, tables: list[torch.Tensor], prefix: int = -1) -> float:
        """Return the seconds of one call. prefix −1: without a separate phase for a shared prefix."""
        kv = self.stores[store]
        heads = (shape.num_heads, shape.num_kv_heads)
        attention = self.attention[heads]
        q = torch.randn((shape.num_rows, sum(heads) + heads[1], HEAD), device=self.device).bfloat16()[:, : heads[0]]
        out = torch.empty((shape.num_rows, heads[0] * HEAD), dtype=torch.bfloat16, device=self.device)
        seq_lens = torch.full((shape.num_rows,), shape.context, dtype=torch.int32, device=self.device)
        shared = torch.tensor([prefix], dtype=torch.int32, device=self.device) if prefix >= 0 else None
        work = attention.plan(seq_lens, chunks=variant.chunks, min_chunk=variant.min_chunk, prefix_len=shared)
        return _graph_seconds(
            [lambda table=table: self._call(attention, work, variant, q, kv, table, out) for table in tables]
        )

    def try_time(
        self, shape: Shape, store: str, variant: Variant, tables: list[torch.Tensor], prefix: int = -1
    ) -> float:
        try:
            return self.time(shape, store, variant, tables, prefix)
        except Exception as error:
            self.failures[f"{shape} {store} {variant}"] = f"{type(error).__name__}: {error}"[:200]
            return math.inf

    def tables_for(self, shape: Shape, store: str) -> list[torch.Tensor]:
        kv = self.stores[store]
        calls = min(160, max(3, math.ceil(COLD_BYTES / shape.bytes(kv))))
        return self.tables(len(kv), shape.num_rows, -(-shape.context // PAGE), calls)


def _graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    return microseconds(list(calls), is_rehearsal=False) * 1e-6


def _reference(q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out = torch.zeros(q.shape, device=q.device)
    for row, length in enumerate(lengths):
        if length:
            cells = (
                kv[table[row, : -(-length // PAGE)].long()].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            )
            keys, values = cells.repeat_interleave(q.shape[1] // kv.shape[2], dim=1)
            scores = torch.einsum("hd,hld->hl", q[row].float(), keys) * HEAD**-0.5
            out[row] = torch.einsum("hl,hld->hd", scores.softmax(dim=-1), values)
    return out.flatten(1)


def _variants_beside(shape: Shape, best: Variant) -> list[Variant]:
    """Return variants of the best configuration: other cuts where there are few rows, dependent launch everywhere."""
    found = [replace(best, pdl=True)]
    if shape.num_rows <= 64:
        found += [replace(best, chunks=chunks) for chunks in (16, 66, 132) if chunks != num_chunks(shape.num_rows, 8)]
    if shape.num_rows <= 8:
        found += [replace(best, min_chunk=size) for size in (32, 128, 256)]
    return found


def sweep(bench: Bench, shapes: list[Shape], store: str, good: set[tuple[tuple[int, int], str, Variant]]) -> None:
    """Find the best of all configurations for each shape, then the best of other cuts with that configuration."""
    print(
        f"\n{store}: heads    B context |     µs  TB/s  share | best configuration            | as shipped    | in order"
    )
    shares: dict[str, dict[DecodeConfig, list[float]]] = defaultdict(lambda: defaultdict(list))
    for shape in shapes:
        heads = (shape.num_heads, shape.num_kv_heads)
        tables = bench.tables_for(shape, store)
        floor = shape.bytes(bench.stores[store]) / CEILING
        seconds = {
            variant: bench.try_time(shape, store, variant, tables)
            for variant in map(Variant, CONFIGS)
            if (heads, store, variant) in good
        }
        seconds = {variant: value for variant, value in seconds.items() if math.isfinite(value)}
        if not seconds:
            continue
        group = "B <= 8" if shape.num_rows <= 8 else "B <= 64" if shape.num_rows <= 64 else "B > 64"
        for variant, value in seconds.items():
            shares[group][variant.config].append(floor / value)
        order = sorted(seconds, key=seconds.__getitem__)
        shipped = seconds.get(Variant(decode_config(bench.stores[store], shape.num_rows)), math.inf)
        for variant in _variants_beside(shape, order[0]):
            seconds[variant] = bench.try_time(shape, store, variant, tables)
        best = min(seconds, key=seconds.__getitem__)
        others = "; ".join(
            f"{str(v).removeprefix(str(order[0])).strip() or v} {seconds[v] * 1e6:.1f}"
            for v in (*order[1:3], *[v for v in seconds if v not in order])
        )
        print(
            f"{heads[0]:>9}/{heads[1]} {shape.num_rows:>5} {shape.context:>7} | {seconds[best] * 1e6:>6.1f}"
            f" {floor * CEILING / seconds[best] / 1e12:>5.2f} {floor / seconds[best]:>6.1%} | {best!s:<29}"
            f" | {shipped * 1e6:>6.1f} {floor / shipped:>5.0%} | {order[0]} {seconds[order[0]] * 1e6:.1f}; {others}",
            flush=True,
        )
    for group, by_config in shares.items():
        means = {config: math.exp(statistics.fmean(map(math.log, values))) for config, values in by_config.items()}
        ranking = sorted(means, key=means.__getitem__, reverse=True)[:5]
        print(f"  {group}: geometric mean of shares: " + "; ".join(f"{Variant(c)} {means[c]:.1%}" for c in ranking))


def sweep_prefix(bench: Bench, heads: tuple[int, int], rows: int = 256, prefix: int = 2048, suffix: int = 96) -> None:
    """Time a shared prefix with and without its own phase."""
    shape = Shape(*heads, rows, prefix + suffix)
    own = Shape(*heads, rows, suffix).bytes(bench.stores["bf16"])
    once = Shape(*heads, 1, prefix).bytes(bench.stores["bf16"])
    floor = (own + once) / CEILING + 4 * rows * heads[0] * prefix * HEAD / MATRIX
    tables = bench.tables(len(bench.stores["bf16"]), rows, -(-shape.context // PAGE), 4)
    for table in tables:
        table[:, : prefix // PAGE] = table[0, : prefix // PAGE].clone()
    without = bench.try_time(shape, "bf16", Variant(DecodeConfig()), tables)
    suffixes = [table[:, prefix // PAGE :] for table in tables]
    only = bench.try_time(Shape(*heads, rows, suffix), "bf16", Variant(DecodeConfig()), suffixes)
    seconds = {
        (config, splits, pdl): bench.try_time(shape, "bf16", Variant(config, splits=splits, pdl=pdl), tables, prefix)
        for config in PREFIX_CONFIGS
        for splits in (8, 4, 2, 1)  # the largest first: scratch memory is allocated once
        for pdl in (False, True)
    }
    print(
        f"\nshared prefix {prefix} + {suffix}, B {rows}, heads {heads}: floor {floor * 1e6:.1f} µs, without its own phase"
        f" {without * 1e6:.1f}, the suffixes alone {only * 1e6:.1f}; the best of the phase and the rows together:"
    )
    for config, splits, pdl in sorted(seconds, key=seconds.__getitem__)[:6]:
        value = seconds[config, splits, pdl]
        print(
            f"  {value * 1e6:>6.1f} µs ({floor / value:.0%} of the floor): queries {config.prefix_rows}, keys"
            f" {config.prefix_tile}, warps {config.prefix_warps}, stages {config.prefix_stages}, splits {splits}"
            + ", pdl"
            * pdl
        )


def skewed(bench: Bench) -> None:
    """Time 256 rows of 500 tokens and, last, one of 32,768 against the same bytes evenly spread."""
    heads = LAYOUTS[0]
    attention, kv = DecodeAttention(257, *heads, HEAD, bench.device), bench.stores["bf16"]
    table = torch.randint(len(kv), (257, 2048), dtype=torch.int32, device=bench.device)
    q = torch.randn((257, heads[0], HEAD), device=bench.device).bfloat16()
    out = torch.empty((257, heads[0] * HEAD), dtype=torch.bfloat16, device=bench.device)
    lengths = torch.tensor([500] * 256 + [32768], dtype=torch.int32, device=bench.device)
    for name, seq_lens in (("even", torch.full_like(lengths, int(lengths.sum()) // 257)), ("skewed", lengths)):
        work = attention.plan(seq_lens)
        value = _graph_seconds([lambda work=work: attention.run(work, q, kv, table, out, scale=HEAD**-0.5)] * 4)
        share = int(seq_lens.sum()) * heads[1] * HEAD * 4 / CEILING / value
        print(f"{name} lengths, {int(seq_lens.sum())} tokens in 257 rows: {value * 1e6:.1f} µs, {share:.1%}")
    value = _graph_seconds([lambda: bool(attention.plan(lengths))] * 20)
    print(f"planning 257 rows: {value * 1e6:.1f} µs, once a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few shapes only")
    quick = parser.parse_args().quick
    began = time.perf_counter()
    bench = Bench()
    jobs = [
        (heads, store, Variant(config, pdl=pdl), 0)
        for store, layouts in (("bf16", LAYOUTS), ("fp8", LAYOUTS[:1]))
        for heads in layouts
        for config in CONFIGS
        for pdl in (False, True)
    ]
    jobs += [
        (heads, "bf16", Variant(config, pdl=p), 1024) for heads in LAYOUTS for config in PREFIX_CONFIGS for p in (0, 1)
    ]
    good = bench.compile(jobs)
    print(f"compiled after {time.perf_counter() - began:.0f} s")
    batches = (1, 32, 256) if quick else (1, 8, 32, 64, 128, 256, 512)
    contexts = (256, 1000) if quick else (256, 600, 1000, 4096)
    shapes = [Shape(*heads, rows, context) for heads in LAYOUTS for rows in batches for context in contexts]
    shapes += [Shape(*heads, rows, 32768) for heads in LAYOUTS for rows in (1, 16)]
    sweep(bench, shapes, "bf16", good)
    sweep(bench, [Shape(16, 8, 1, 4096), Shape(16, 8, 256, 1000)], "fp8", good)
    for heads in LAYOUTS:
        sweep_prefix(bench, heads)
    skewed(bench)
    for name, failure in bench.failures.items():
        print(f"failed: {name}: {failure}")
    print(f"done after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
