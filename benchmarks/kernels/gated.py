"""Gated products three ways: cuBLAS and a gate, few_rows, and the specialised kernel in all its tiles. Checks and times them.
`python -m benchmarks.kernels.gated [--seconds 40]`, on compute capability 9.0.

Times are of one call inside a CUDA graph, each with other weights than the ones before, so that none are cached. The table
marks the fastest way and the one that the rules in `octavo/kernels` choose; below it are the rules that should change."""

import argparse
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import at_least, cold, compile_all, distance, elapsed, microseconds, share
from octavo.kernels.triton.elementwise.activation import gate_mul
from octavo.kernels.triton.gemm import gated, skinny
from octavo.kernels.triton.gemm.gated import TILES, Tile
from octavo.kernels.triton.gemm.gated_hopper import product
from octavo.kernels.triton.gemm.skinny_tile import MAX_ROWS

PROCESSORS = 132
ROWS = (8, 16, 32, 33, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 8192)
PATIENCE = 15  # seconds without a result: a kernel that never ends takes no signal
WORTH = 1.03  # a smaller gain does not justify another rule


class Shape(NamedTuple):
    name: str
    n: int  # outputs: half of the weight's rows
    k: int

    @property
    def num_bytes(self) -> int:
        return 4 * self.n * self.k


SHAPES = [
    Shape("0.6B", 3072, 1024),
    Shape("1.7B", 6144, 2048),
    Shape("4B", 9728, 2560),
    Shape("8B", 14336, 4096),
]


def by_cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gate_mul(F.linear(x, weight), "silu", pdl=True)


def by_few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return skinny.few_rows_linear(x, weight, gated="silu", pdl=True)


def by_tile(tile: Tile, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return product(x, weight, "silu", tile, PROCESSORS, pdl=True)


Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BY_TILE: dict[str, Way] = {f"{tile.block_m}x{tile.block_n}": partial(by_tile, tile) for tile in TILES}
COLUMNS = ["cuBLAS", "few_rows", *BY_TILE]


def ways(rows: int) -> dict[str, Way]:
    found: dict[str, Way] = {"cuBLAS": by_cublas}
    if rows <= MAX_ROWS:
        found["few_rows"] = by_few_rows
    # Tiles twice as tall as x would multiply padding.
    return found | {name: way for name, way in BY_TILE.items() if rows > 64 or name.startswith("64x")}


def taken(shape: Shape, rows: int) -> str:
    """Return the way that layers use."""
    if gated.pays(rows, shape.n, shape.k, PROCESSORS):
        return best_tile(shape, rows)
    return "few_rows" if skinny.pays(rows, 2 * shape.n, shape.k, True) else "cuBLAS"


def best_tile(shape: Shape, rows: int) -> str:
    """Return the rule's tile."""
    tile = gated.choose_tile(rows, shape.n, PROCESSORS)
    return f"{tile.block_m}x{tile.block_n}"


def compile_way(shape: Shape, rows: int, way: Way) -> None:
    """A job for compile_all, over memory that is never touched."""
    weight = torch.empty(2 * shape.n, shape.k, dtype=torch.bfloat16, device="cuda")
    way(weight.new_empty(rows, shape.k), weight)


def compile_jobs() -> list[Callable[[], object]]:
    """Return one job for each kernel: tiles are the same for all shapes, few_rows has others for each K and power of two."""
    jobs: list[Callable[[], object]] = [partial(compile_way, SHAPES[0], 128, way) for way in BY_TILE.values()]
    jobs += [partial(compile_way, SHAPES[0], rows, by_cublas) for rows in (64, 128)]
    few: dict[tuple[object, ...], Callable[[], object]] = {}
    for shape in SHAPES:
        for rows in filter(lambda rows: rows <= MAX_ROWS, ROWS):
            choice = skinny.choose(rows, shape.n, shape.k, True, PROCESSORS)
            few[shape, choice, (rows - 1).bit_length()] = partial(compile_way, shape, rows, by_few_rows)
    return jobs + list(few.values())


def expected_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ weight.float().t()).chunk(2, 1)
    return F.silu(gate) * up


class Watch:
    """Ends this process when there is no progress for PATIENCE seconds."""

    def __init__(self) -> None:
        self.at, self.since = "", time.monotonic()
        threading.Thread(target=self._look, daemon=True).start()

    def __call__(self, at: str) -> None:
        self.at, self.since = at, time.monotonic()

    def _look(self) -> None:
        while True:
            time.sleep(1)
            if time.monotonic() - self.since > PATIENCE:
                print(f"HUNG: {self.at}", flush=True)
                os._exit(3)


def measure(shape: Shape, rows: int, pool: torch.Tensor, watch: Watch) -> tuple[dict[str, float], list[str]]:
    """Return the µs of each way that gives the right result, and messages about the others."""
    count = shape.num_bytes // 2
    weights = cold(lambda index: pool[index * count : (index + 1) * count].view(-1, shape.k), shape.num_bytes, False)
    x = torch.randn(rows, shape.k, device=pool.device).to(pool.dtype)
    some = torch.arange(0, rows, max(1, rows // 500), device=pool.device)  # checks a sample where there are many rows
    expected = expected_of(x[some], weights[0])
    times: dict[str, float] = {}
    notes = []
    for name, way in ways(rows).items():
        watch(f"{shape.name} {rows} {name}")
        try:
            first, second = way(x, weights[0]), way(x, weights[0])
            error = distance(first[some], expected)
            if error > 5e-3 or not torch.equal(first, second):
                notes.append(f"{name} WRONG, error {error:.1e}, the same twice: {torch.equal(first, second)}")
                continue
            calls: list[Callable[[], object]] = [partial(way, x, weight) for weight in weights]
            times[name] = microseconds(at_least(calls, 20 if rows <= 1024 else 2), False)
        except Exception as fault:  # one failing way must not end the run
            notes.append(f"{name} {type(fault).__name__}: {str(fault).splitlines()[0][:100]}")
    return times, notes


def line_of(shape: Shape, rows: int, times: dict[str, float]) -> str:
    """Mark the fastest way with * and the rules' choice with <."""
    best, rule = min(times, key=times.__getitem__), taken(shape, rows)
    line = f"{shape.name:5}{rows:6}"
    for name in COLUMNS:
        mark = ("*" if name == best else "") + ("<" if name == rule else "")
        line += f"{times[name]:>9.1f}{mark:2}" if name in times else " " * 9 + f"{mark:2}"
    others = min((times[name] for name in ("cuBLAS", "few_rows") if name in times), default=float("nan"))
    ours = min((times[name] for name in BY_TILE if name in times), default=float("nan"))
    by_rule = times.get(best_tile(shape, rows), float("nan"))
    return f"{line}{others / by_rule:7.2f}{others / ours:7.2f}{share(shape.num_bytes, times[best]):6.0f} %"


def advice(shape: Shape, rows: int, times: dict[str, float]) -> str:
    """Return the change that the rule needs; empty if none."""
    rule, best = taken(shape, rows), min(times, key=times.__getitem__)
    if rule not in times:
        return f"{shape.name} {rows}: {rule} is taken and was not measured"
    gain = times[rule] / times[best]
    if gain < WORTH:
        return ""
    where = f"{shape.name} {rows}: {best} instead of {rule}, {gain:.2f} × as fast"
    if best in BY_TILE:
        return where + (" (choose_tile)" if rule in BY_TILE else f" (pays: n · k = 2^{_log2(shape):.1f}, {rows} rows)")
    return where + (" (pays: not here)" if rule in BY_TILE else " (few_rows.pays)")


def _log2(shape: Shape) -> float:
    return float(torch.tensor(float(shape.n * shape.k)).log2())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="begin nothing more after this long")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    compile_all(compile_jobs(), chunksize=1)
    torch.manual_seed(0)
    copies = max(len(cold(lambda _: torch.empty(0), shape.num_bytes, False)) * shape.num_bytes for shape in SHAPES)
    pool = torch.empty(copies // 2, dtype=torch.bfloat16, device="cuda").uniform_(-0.04, 0.04)
    watch = Watch()
    print(
        f"{elapsed():5.1f} s  ready. µs; * the fastest, < what the rules take; gain of the rule's tile and of the best"
    )
    print(f"{'':5}{'rows':>6}" + "".join(f"{name:>9}  " for name in COLUMNS) + "   rule   best  memory", flush=True)
    lines = []
    for shape in SHAPES:
        for rows in ROWS:
            if elapsed() > arguments.seconds:
                lines.append(f"{shape.name} {rows}: no time left")
                continue
            times, notes = measure(shape, rows, pool, watch)
            print(line_of(shape, rows, times) if times else f"{shape.name} {rows}", *notes, sep="\n      ", flush=True)
            lines += [advice(shape, rows, times)] if times else []
    print(f"{elapsed():5.1f} s  what the rules should say otherwise:", *filter(None, lines), sep="\n  ")


if __name__ == "__main__":
    main()
