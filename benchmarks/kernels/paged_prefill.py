"""Prefill attention on a GPU: checks every variant against float32, times it over many shapes, prints the best of each.
`python -m benchmarks.kernels.paged_prefill`

Times are of one call inside a CUDA graph. The specialised kernel waits on barriers in shared memory: it runs in a process
of its own, so that a hang costs a timeout and not the other results."""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.kernels.triton.attention import paged_prefill_hopper
from octavo.kernels.triton.attention.paged_prefill import Tile, paged_prefill, plan_tiles

MATRIX = 795e12  # bfloat16 operations per second, measured
PAGE, HEAD = 16, 128
LAYOUTS = ((32, 8), (16, 8))
SPECIALISED_LIMIT = 75  # seconds
MARK = "RESULT "

Rows = list[tuple[int, int]]  # (cells before this step, query tokens)


@dataclass(frozen=True)
class Shape:
    name: str
    rows: Rows
    is_shared: bool = False  # all rows share the prefix's pages

    @property
    def has_no_prefix(self) -> bool:
        return all(before == 0 for before, _ in self.rows)

    def operations(self, num_heads: int) -> float:
        seen = sum(count * before + count * (count + 1) / 2 for before, count in self.rows)
        return 4 * seen * num_heads * HEAD


MIXED = random.Random(0)
SHAPES = [
    Shape("4 x 4096", [(0, 4096)] * 4),
    Shape("2 x 8192", [(0, 8192)] * 2),
    Shape("64 x 128", [(0, 128)] * 64),
    Shape("16 x 1024", [(0, 1024)] * 16),
    Shape("32 x 100-1024", [(0, MIXED.randint(100, 1024)) for _ in range(32)]),
    Shape("255 x 64 + 2048", [(2048, 64)] * 255),
    Shape("255 x 64 + 2048 shared", [(2048, 64)] * 255, is_shared=True),
    Shape("2048 at 32k", [(30720, 2048)]),
]


@dataclass(frozen=True)
class Variant:
    has_no_prefix: bool
    tile: Tile
    in_turn: bool = False

    def __str__(self) -> str:
        tile, kind = self.tile, "whole" if self.has_no_prefix else "pages"
        if tile.is_specialised:
            return f"ws {kind} n{tile.block_n} s{tile.num_stages}{' in turn' if self.in_turn else ''}"
        return f"{kind} {tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"


PLAIN = [
    *(Variant(False, Tile(*numbers)) for numbers in ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))),
    *(Variant(True, Tile(*numbers)) for numbers in ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))),
]
SPECIALISED = [
    Variant(has_no_prefix, Tile(128, block_n, 12, stages, is_specialised=True), in_turn)
    for has_no_prefix in (True, False)
    for block_n, stages, in_turn in ((128, 2, False), (128, 2, True), (64, 4, False), (64, 4, True))
]


class Step:
    """Heads, pages and page table of one shape and layout, filled as in a step."""

    def __init__(self, shape: Shape, layout: tuple[int, int]) -> None:
        self.shape, (self.num_heads, self.num_kv_heads) = shape, layout
        device, num_kv_heads = torch.device("cuda"), layout[1]
        torch.manual_seed(0)
        counts = [count for _, count in shape.rows]
        self.lens = [before + count for before, count in shape.rows]
        all_heads = self.num_heads + 2 * num_kv_heads
        self.heads = torch.randn(sum(counts), all_heads, HEAD, device=device, dtype=torch.bfloat16)
        widths = [-(-length // PAGE) for length in self.lens]
        own = torch.randperm(sum(widths), dtype=torch.int32) + 1
        self.page_table = torch.zeros(len(widths), max(widths), dtype=torch.int32)
        for row, pages in enumerate(own.split(widths)):
            self.page_table[row, : widths[row]] = pages
        if shape.is_shared:
            self.page_table[:, : shape.rows[0][0] // PAGE] = self.page_table[0, : shape.rows[0][0] // PAGE]
        self.page_table = self.page_table.to(device)
        size = (sum(widths) + 1, 2, num_kv_heads, PAGE, HEAD)
        self.pages = torch.randn(size, device=device, dtype=torch.bfloat16)
        token = 0
        for row, (before, count) in enumerate(shape.rows):
            position = torch.arange(before, before + count, device=device)
            page = self.page_table[row].long()[position // PAGE]
            kv = self.heads[token : token + count, self.num_heads :].unflatten(1, (2, num_kv_heads))
            self.pages[page, :, :, position % PAGE] = kv
            token += count
        self.out = torch.empty(sum(counts), self.num_heads * HEAD, device=device, dtype=torch.bfloat16)
        self.plans: dict[int, torch.Tensor] = {}

    def call(self, variant: Variant) -> Callable[[], None]:
        tokens = variant.tile.tokens(self.num_heads // self.num_kv_heads)
        if tokens not in self.plans:
            plan = plan_tiles([count for _, count in self.shape.rows], self.lens, 0, tokens)
            self.plans[tokens] = torch.from_numpy(plan).cuda()
        tensors = (self.heads, self.pages, self.page_table, self.plans[tokens], self.out)
        scale, tile = HEAD**-0.5, variant.tile
        if not tile.is_specialised:
            return lambda: paged_prefill(*tensors, tile, scale=scale, has_no_prefix=variant.has_no_prefix)
        return lambda: paged_prefill_hopper.launch(
            *tensors, scale=scale, has_no_prefix=variant.has_no_prefix, block_n=tile.block_n, num_stages=tile.num_stages,
            in_turn=variant.in_turn,
        )  # fmt: skip

    def error(self) -> float:
        """Return ‖out − reference‖ / ‖reference‖ in float32, over the first, the middle and the last row."""
        worst = 0.0
        for row in {0, len(self.lens) // 2, len(self.lens) - 1}:
            before, count = self.shape.rows[row]
            first = sum(count for _, count in self.shape.rows[:row])
            position = torch.arange(self.lens[row], device="cuda")
            cells = self.pages[self.page_table[row].long()[position // PAGE], :, :, position % PAGE]
            is_future = position[None, :] > position[before:, None]
            group, wanted = self.num_heads // self.num_kv_heads, []
            for head in range(self.num_kv_heads):
                q = self.heads[first : first + count, head * group : (head + 1) * group].float()
                k, v = cells[:, 0, head].float(), cells[:, 1, head].float()
                scores = torch.einsum("tgd,sd->gts", q, k) * HEAD**-0.5
                wanted.append(torch.einsum("gts,sd->tgd", scores.masked_fill_(is_future, -torch.inf).softmax(-1), v))
            want = torch.cat(wanted, 1).flatten(1)
            worst = max(worst, ((self.out[first : first + count] - want).norm() / want.norm()).item())
        return worst


def seconds(call: Callable[[], object], budget: float = 0.05) -> float:
    """Return the seconds of one call, inside a graph of about a millisecond of calls; the median of several replays."""
    call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    repeats = max(1, min(20, math.ceil(1.0 / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    times, until = [], time.perf_counter() + budget
    while len(times) < 3 or (time.perf_counter() < until and len(times) < 20):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / repeats)
    return statistics.median(times)


def report(shape: Shape, layout: tuple[int, int], name: str, took: float, note: str) -> None:
    line = {"shape": shape.name, "heads": layout[0], "name": name, "us": took * 1e6, "note": note}
    line["tflops"] = shape.operations(layout[0]) / took / 1e12
    print(MARK + json.dumps(line), flush=True)


def compile_all(variants: list[Variant]) -> dict[str, str]:
    """Run each variant on a small step, many at a time. Return the failures."""

    def attempt(layout: tuple[int, int], variant: Variant) -> str:
        before = 0 if variant.has_no_prefix else 200
        step = Step(Shape("small", [(before, 150), (0, 20)]), layout)
        try:
            step.call(variant)()
            torch.cuda.synchronize()
            error = step.error()
            return "" if error < 1e-2 else f"error {error:.3g} on a small step"
        except Exception as fault:
            return f"{type(fault).__name__}: {fault}"[:300]

    with ThreadPoolExecutor(16) as pool:
        found = {(layout, variant): pool.submit(attempt, layout, variant) for layout in LAYOUTS for variant in variants}
    return {f"{layout[0]} {variant}": word for (layout, variant), job in found.items() if (word := job.result())}


def measure(variants: list[Variant]) -> None:
    began = time.perf_counter()
    failed = compile_all(variants)
    for name, word in failed.items():
        print(f"FAILED {name}: {word}", flush=True)
    print(f"compiled {2 * len(variants)} in {time.perf_counter() - began:.1f} s", flush=True)
    for shape in SHAPES:
        for layout in LAYOUTS:
            step = Step(shape, layout)
            for variant in variants:
                if (variant.has_no_prefix and not shape.has_no_prefix) or f"{layout[0]} {variant}" in failed:
                    continue
                try:
                    step.out.fill_(math.nan)
                    step.call(variant)()
                    error = step.error()
                    took = seconds(step.call(variant))
                    report(shape, layout, str(variant), took, f"error {error:.1e}{'' if error < 1e-2 else ' WRONG'}")
                except Exception as fault:
                    print(f"FAILED {shape.name} {layout} {variant}: {fault}"[:300], flush=True)
    step = Step(SHAPES[2], LAYOUTS[0])
    for variant in variants[:: len(variants) // 2]:
        if f"{LAYOUTS[0][0]} {variant}" not in failed:
            print(f"host time of a launch, {variant}: {host_microseconds(step.call(variant)):.0f} us", flush=True)


def host_microseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        call()
    took = (time.perf_counter() - began) / 20 * 1e6
    torch.cuda.synchronize()
    return took


def measure_torch() -> None:
    """Time scaled dot product attention where all rows are equally long, and cuDNN for rows of any length."""
    for shape in SHAPES:
        if not shape.has_no_prefix:
            continue
        for layout in LAYOUTS:
            step, count = Step(shape, layout), shape.rows[0][1]
            q, k, v = step.heads.split((layout[0], layout[1], layout[1]), 1)
            if len({count for _, count in shape.rows}) == 1:
                by_row = [part.unflatten(0, (-1, count)).transpose(1, 2) for part in (q, k, v)]
                for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                    for note in ("grouped", "repeated"):
                        try:
                            took = time_sdpa(by_row, backend, note == "repeated")
                        except Exception as fault:
                            print(f"FAILED torch {name} {note}: {fault}".splitlines()[0][:200], flush=True)
                        else:
                            report(shape, layout, f"torch {name}", took, note)
                            break
            try:
                measure_cudnn_ragged(shape, layout, step, q, k, v)
            except Exception as fault:
                print(f"FAILED cudnn ragged {shape.name} {layout}: {fault}".splitlines()[0][:200], flush=True)


def time_sdpa(by_row: list[torch.Tensor], backend: SDPBackend, is_repeated: bool) -> float:
    q, k, v = by_row
    if is_repeated:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    with sdpa_kernel(backend):
        return seconds(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        )


def measure_cudnn_ragged(
    shape: Shape, layout: tuple[int, int], step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    counts = torch.tensor([0, *(count for _, count in shape.rows)], device="cuda")
    starts, longest = counts.cumsum(0).int(), int(counts.max())

    def call() -> torch.Tensor:
        return torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, starts, starts, longest, longest, False, 0.0, True, False, scale=HEAD**-0.5
        )[0]

    torch.cuda.synchronize()
    began = time.perf_counter()
    out = call()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    step.out.copy_(out.flatten(1))
    report(shape, layout, "cudnn ragged", seconds(call), f"first call {first * 1e3:.0f} ms, error {step.error():.1e}")


def show(lines: list[str]) -> None:
    """One block per shape and layout, fastest first."""
    results = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    for shape in SHAPES:
        for num_heads, num_kv_heads in LAYOUTS:
            mine = [r for r in results if (r["shape"], r["heads"]) == (shape.name, num_heads)]
            print(f"\n{shape.name}, {num_heads}/{num_kv_heads} heads of {HEAD}")
            for r in sorted(mine, key=lambda r: r["us"]):
                share = r["tflops"] / (MATRIX / 1e12)
                print(f"  {r['name']:28} {r['us']:9.1f} us {r['tflops']:6.0f} TFLOP/s {share:4.0%}  {r['note']}")


def run_part(part: str, limit: float) -> list[str]:
    """Run a part in a process of its own. Lines printed before a timeout count."""
    command = [sys.executable, "-m", "benchmarks.kernels.paged_prefill", "--part", part]
    try:
        done = subprocess.run(command, timeout=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text, fate = done.stdout, f"exit {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        text, fate = expired.stdout or b"", f"TIMEOUT after {limit} s"
    lines = text.decode(errors="replace").splitlines()
    words = [line for line in lines if not line.startswith(MARK)]
    print("\n".join([f"part {part}: {fate}", *words[-25:]]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["plain", "specialised", "torch"])
    parts: dict[str, Callable[[], None]] = {
        "plain": lambda: measure(PLAIN),
        "specialised": lambda: measure(SPECIALISED),
        "torch": measure_torch,
    }
    if part := parser.parse_args().part:
        parts[part]()
        return
    show([line for name in parts for line in run_part(name, SPECIALISED_LIMIT)])


if __name__ == "__main__":
    main()
