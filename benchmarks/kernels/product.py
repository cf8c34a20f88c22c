"""Matrix products of the specialised kernel against cuBLAS: checks every variant, times it over many shapes, prints the best.
Knows nothing of the engine. `python -m benchmarks.kernels.product`

Times are of one call inside a CUDA graph, each call with other weights than the calls before it, so that none are cached.
The kernel waits on barriers in shared memory: it runs in a process of its own, which is ended where nothing moves on."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels.candidates.product_hopper import product
from benchmarks.kernels.candidates.product_hopper_plan import Choice, plan
from octavo.kernels.activation import gate_mul

MATRIX, MEMORY = 795e12, 4.26e12  # bfloat16 operations and bytes per second, measured
PROCESSORS = 132
MODULE = "benchmarks.kernels.product"
MARK = "RESULT "
COLD_BYTES = 128 << 20  # of weights that are read between two reads of the same
NUM_TRIED = 9  # variants of each shape
COMPILERS = 12
PATIENCE = 15  # seconds without a result

ROWS = (64, 128, 192, 256, 384, 512, 1024, 8192)
TILES = [(64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 192), (128, 256), (256, 128), (256, 192)]
SPLITS = (1, 0, 2, 3, 4, 6, 8)


class Shape(NamedTuple):
    name: str
    n: int  # outputs
    k: int
    kind: str  # plain, residual or gated

    @property
    def width(self) -> int:
        return 2 * self.n if self.kind == "gated" else self.n

    @property
    def weight_bytes(self) -> int:
        return 2 * self.width * self.k


SHAPES = [
    Shape("8B qkv", 6144, 4096, "plain"),
    Shape("8B o", 4096, 4096, "residual"),
    Shape("8B gate-up", 14336, 4096, "gated"),
    Shape("8B down", 4096, 14336, "residual"),
    Shape("0.6B qkv", 4096, 1024, "plain"),
    Shape("0.6B o", 1024, 2048, "residual"),
    Shape("0.6B gate-up", 3072, 1024, "gated"),
    Shape("0.6B down", 1024, 3072, "residual"),
]
POINTS = [(shape, rows) for shape in SHAPES for rows in ROWS]


def guess(shape: Shape, rows: int, choice: Choice) -> float:
    """Seconds, roughly: which variants are worth a measurement."""
    work = plan(rows, shape.n, shape.k, choice, shape.kind == "gated", PROCESSORS)
    rounds = -(-work.whole // work.num_programs)
    panels = rounds * work.depth + -(-work.shared * work.depth // work.num_programs)
    compute = choice.block_m * choice.block_n * 64 * 2 / (MATRIX / PROCESSORS)
    copies = (choice.block_m + choice.block_n) * 128 / (7e12 / max(work.num_programs, 66))
    took = max(panels * max(compute, copies), shape.weight_bytes / MEMORY)
    if work.shared:
        parts = work.num_programs / work.shared
        took += 1e-6 + (1 + max(2.0, parts)) * choice.block_m * choice.block_n * 4 / (4e12 / PROCESSORS)
    return took + 2e-6


def candidates(shape: Shape, rows: int, num_tried: int = NUM_TRIED) -> list[Choice]:
    found: dict[tuple[object, ...], Choice] = {}
    for tile in TILES:
        # Tiles much taller than x would multiply nothing with W.
        if tile[0] > 64 and tile[0] >= 2 * rows:
            continue
        for split in SPLITS:
            for group in (8, 16) if rows > 2048 else (8,):
                choice = Choice(*tile, split, group)
                work = plan(rows, shape.n, shape.k, choice, shape.kind == "gated", PROCESSORS)
                if work.num_programs <= PROCESSORS:
                    found.setdefault((tile, work, group), choice)
    return sorted(found.values(), key=lambda choice: guess(shape, rows, choice))[:num_tried]


def compiled(choice: Choice, kind: str) -> tuple[object, ...]:
    """Variants that are one kernel."""
    return choice.block_m, choice.block_n, kind


class Inputs:
    """x, weights in so many copies that none is cached when its turn comes, and where results go."""

    def __init__(self, shape: Shape, rows: int, pool: torch.Tensor, copies: int = 0) -> None:
        self.shape, self.rows = shape, rows
        torch.manual_seed(rows)
        copies = copies or max(2, -(-COLD_BYTES // shape.weight_bytes))
        self.weights = [
            pool[index * shape.width * shape.k : (index + 1) * shape.width * shape.k].view(shape.width, shape.k)
            for index in range(copies)
        ]
        self.x = torch.randn(rows, shape.k, device="cuda", dtype=pool.dtype)
        self.residual = torch.randn(rows, shape.n, device="cuda", dtype=pool.dtype)

    def cublas(self, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.shape.kind == "residual":
            return residual.addmm_(self.x, weight.t())
        y = F.linear(self.x, weight)
        return gate_mul(y, "silu", pdl=True) if self.shape.kind == "gated" else y

    def ours(self, choice: Choice, weight: torch.Tensor, residual: torch.Tensor, pdl: bool = True) -> torch.Tensor:
        has_residual = self.shape.kind == "residual"
        return product(
            self.x, weight, choice, residual=residual if has_residual else None, is_gated=self.shape.kind == "gated",
            pdl=pdl,
        )  # fmt: skip

    def expected(self, weight: torch.Tensor) -> torch.Tensor:
        """In float32, over some rows where there are many."""
        rows = self.some_rows()
        y = self.x[rows].float() @ weight.float().t()
        if self.shape.kind == "gated":
            gate, up = y.chunk(2, 1)
            return F.silu(gate) * up
        return y + self.residual[rows].float() if self.shape.kind == "residual" else y

    def some_rows(self) -> torch.Tensor:
        every = max(1, self.rows // 500)
        return torch.arange(0, self.rows, every, device="cuda")

    def check(self, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], want: torch.Tensor) -> float:
        """‖out − expected‖ / ‖expected‖, or infinity where two calls differ in any bit."""
        first, second = (call(self.weights[0], self.residual.clone()) for _ in range(2))
        if not torch.equal(first, second):
            return float("inf")
        out = first[self.some_rows()].float()
        return ((out - want).norm() / want.norm()).item()

    def seconds(self, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], budget: float = 0.02) -> float:
        """Of one call: median over replays of a graph that goes once through all weights."""
        residual = self.residual.clone()
        call(self.weights[0], residual)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                call(weight, residual)
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times: list[float] = []
        until = time.perf_counter() + budget
        while len(times) < 3 or (time.perf_counter() < until and len(times) < 15):
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1000 / len(self.weights))
        return statistics.median(times)


def make_pool() -> torch.Tensor:
    most = max(max(2, -(-COLD_BYTES // shape.weight_bytes)) * shape.weight_bytes for shape in SHAPES)
    torch.manual_seed(0)
    return torch.empty(most // 2, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)


def report(point: int, name: str, took: float, note: str) -> None:
    line = {"point": point, "name": name, "us": took * 1e6, "note": note}
    print(MARK + json.dumps(line), flush=True)


class Watch:
    """Ends this process where nothing moves on: a kernel that waits for ever takes no signal."""

    def __init__(self) -> None:
        self.at, self.since = "", time.monotonic()
        threading.Thread(target=self._look, daemon=True).start()

    def __call__(self, at: str) -> None:
        self.at, self.since = at, time.monotonic()

    def _look(self) -> None:
        while True:
            time.sleep(1)
            if time.monotonic() - self.since > PATIENCE:
                print(f"HUNG {self.at}", flush=True)
                os._exit(3)


def compile_share(share: int) -> None:
    """Every COMPILERS-th kernel, once, on a small product: it lies in Triton's cache afterwards."""
    kernels: dict[tuple[object, ...], tuple[Choice, str]] = {}
    for shape, rows in POINTS:
        for choice in candidates(shape, rows):
            kernels.setdefault(compiled(choice, shape.kind), (choice, shape.kind))
    small = torch.randn(2 * 336 * 1000, device="cuda", dtype=torch.bfloat16)
    watch = Watch()
    for choice, kind in list(kernels.values())[share::COMPILERS]:
        watch(f"{kind} {choice}")
        try:
            for split in (1, 2, 0):
                for rows in (1, 77, 513):
                    shape = Shape(
                        "small", 336, 1000, kind
                    )  # outputs divide by 16, as all that matter do: no other kernel
                    inputs = Inputs(shape, rows, small, copies=1)
                    tried = choice._replace(split=split)
                    error = inputs.check(
                        lambda w, r, inputs=inputs, tried=tried: inputs.ours(tried, w, r),  # type: ignore[misc]
                        inputs.expected(inputs.weights[0]),
                    )
                    if not error < 1e-2:
                        print(f"WRONG {kind} {tried}: error {error:.3g} with {rows} rows", flush=True)
        except Exception as fault:
            print(f"FAILED {kind} {choice}: {type(fault).__name__}: {fault}"[:400], flush=True)


def measure_cublas() -> None:
    pool = make_pool()
    for point, (shape, rows) in enumerate(POINTS):
        inputs = Inputs(shape, rows, pool)
        report(point, "cuBLAS", inputs.seconds(inputs.cublas), "")


def measure_ours(first_point: int, skipped: list[str]) -> None:
    watch = Watch()
    pool = make_pool()
    for point, (shape, rows) in enumerate(POINTS):
        if point < first_point:
            continue
        inputs = Inputs(shape, rows, pool)
        want = inputs.expected(inputs.weights[0])
        for choice in candidates(shape, rows):
            name = f"{shape.kind} {choice.block_m}x{choice.block_n}"
            if name in skipped:
                continue
            watch(name)
            try:
                error = inputs.check(lambda w, r, inputs=inputs, choice=choice: inputs.ours(choice, w, r), want)  # type: ignore[misc]
                took = inputs.seconds(lambda w, r, inputs=inputs, choice=choice: inputs.ours(choice, w, r))  # type: ignore[misc]
                report(point, repr(tuple(choice)), took, "" if error < 1e-2 else f"WRONG {error:.3g}")
            except Exception as fault:
                print(f"FAILED {shape.name} {rows} {choice}: {type(fault).__name__}: {fault}"[:300], flush=True)


def run_part(words: list[str], limit: float) -> list[str]:
    """A part in a process of its own; what it printed before a timeout counts."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", MODULE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        text, fate = child.communicate(timeout=limit)[0], f"exit {child.returncode}"
    except subprocess.TimeoutExpired:
        child.kill()
        text, fate = child.communicate()[0], f"TIMEOUT after {limit:.0f} s"
    lines = text.splitlines()
    others = [line for line in lines if not line.startswith(MARK)]
    print(
        "\n".join([f"part {' '.join(words)}: {fate}, {time.perf_counter() - began:.1f} s", *others[-20:]]), flush=True
    )
    return lines


def compile_all() -> None:
    began = time.perf_counter()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, "--part", "compile", "--share", str(share)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for share in range(COMPILERS)
    ]  # fmt: skip
    for share, child in enumerate(children):
        try:
            text = child.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            text = child.communicate()[0] + "TIMEOUT"
        if text.strip() or child.returncode:
            print(f"compiler {share} (exit {child.returncode}): {text.strip()[-1500:]}", flush=True)
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)


def measure_all_ours(limit: float) -> list[str]:
    """Where a variant hangs, the next process goes on without it."""
    lines: list[str] = []
    skipped: list[str] = []
    first, until = 0, time.perf_counter() + limit
    while time.perf_counter() < until - 5 and len(skipped) < 3:
        words = ["--part", "ours", "--from", str(first), *(f"--skip={name}" for name in skipped)]
        new = run_part(words, until - time.perf_counter())
        lines += new
        hung = [line.removeprefix("HUNG ") for line in new if line.startswith("HUNG ")]
        if not hung:
            break
        skipped += hung
        first = max([first, *(json.loads(line.removeprefix(MARK))["point"] for line in new if line.startswith(MARK))])
    return lines


def show(lines: list[str]) -> None:
    """One line per shape and number of rows, then what goes into the table of `product_hopper_plan`."""
    results = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    table: dict[Shape, list[str]] = {}
    print(
        f"\n{'shape':14}{'rows':>6}{'cuBLAS':>9}{'ours':>9}{'gain':>7}{'TFLOP/s':>9}{'memory':>8}  block_m, block_n, split, group"
    )
    for point, (shape, rows) in enumerate(POINTS):
        mine = [r for r in results if r["point"] == point]
        wrong = [r for r in mine if r["note"]]
        ours = sorted((r for r in mine if r["name"] != "cuBLAS" and not r["note"]), key=lambda r: r["us"])
        theirs = [r["us"] for r in mine if r["name"] == "cuBLAS"]
        for r in wrong:
            print(f"{shape.name:14}{rows:6}  {r['name']}: {r['note']}")
        if not ours or not theirs:
            continue
        best, took = ours[0], ours[0]["us"] * 1e-6
        rate = 2 * rows * shape.width * shape.k / took / 1e12
        share = (shape.weight_bytes + 2 * rows * (shape.k + shape.n)) / took / MEMORY
        rest = ", ".join(f"{r['name']} {r['us']:.1f}" for r in ours[1:3])
        print(
            f"{shape.name:14}{rows:6}{theirs[0]:9.1f}{best['us']:9.1f}{theirs[0] / best['us']:7.2f}{rate:9.0f}{share:8.0%}"
            f"  {best['name']}; then {rest}"
        )
        choice = f"Choice{best['name']}" if best["us"] < 0.98 * theirs[0] else "None"
        table.setdefault(shape, []).append(f"({rows}, {choice})")
    print("\nMEASURED:")
    for shape, entries in table.items():
        print(f"    ({shape.n}, {shape.k}, {shape.kind == 'gated'}): ({', '.join(entries)},),")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["compile", "cublas", "ours"])
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--limit", type=float, default=45, help="seconds for all of the kernel's measurements")
    given = parser.parse_args()
    if given.part == "compile":
        compile_share(given.share)
    elif given.part == "cublas":
        measure_cublas()
    elif given.part == "ours":
        measure_ours(given.first, given.skip)
    else:
        compile_all()
        show(run_part(["--part", "cublas"], 30) + measure_all_ours(given.limit))


if __name__ == "__main__":
    main()
