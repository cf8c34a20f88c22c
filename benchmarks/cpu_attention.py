"""Times native attention of one layer (rotate, store, attend) against octavo's torch_cpu backend and against reading memory,
and the elementwise kernels, in µs: `python -m benchmarks.cpu_attention [--threads 2] [--shapes 9/3/64,…] [--only decode]`."""

import argparse
import random
import time
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass

import torch

from octavo.attention.base import LayerHeads
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.batch import Batch
from octavo.kernels.cpu import elementwise
from octavo.kernels.cpu.attention import (
    AttentionCall,
    LayerPages,
    QkNormRopeCall,
    functions,
    new_pages,
    qk_norm_rope_store,
)
from octavo.kernels.cpu.library import Kind, Threads, isa, library

SHAPES = ["9/3/64", "14/2/64", "32/4/64", "12/2/128"]  # heads, KV heads, head size: SmolLM2-135M's first
PAGE = 16
LAYERS = 12  # layers used in turn, so that a layer's pages are as cold as in a step of a model
ROUNDS = 7


@dataclass(frozen=True)
class Load:
    name: str
    rows: list[tuple[int, int]]  # (tokens before this step, tokens in it)
    num_shared: int = 0  # tokens that all rows have in common


LOADS = {
    "decode": [
        *(Load(f"1 row at {context}", [(context - 1, 1)]) for context in (128, 1024, 4096)),
        *(Load(f"{num} rows at {context}", [(context - 1, 1)] * num) for num in (8, 32) for context in (128, 256, 512)),
        Load("16 rows at 600, 512 shared", [(599, 1)] * 16, 512),
    ],
    "prompt": [
        *(Load(f"prompt of {count}", [(0, count)]) for count in (128, 512)),
        *(Load(f"prompt of {count} after 512", [(512, count)]) for count in (128, 512)),
        Load("8 rows at 256, prompt of 128", [(255, 1)] * 8 + [(0, 128)]),
    ],
}


def batch_of(load: Load) -> tuple[Batch, int]:
    """Return (batch, number of pages). Pages lie in random order."""
    lengths = [before + count for before, count in load.rows]
    num_shared = load.num_shared // PAGE
    num_pages = num_shared + sum(-(-length // PAGE) - num_shared for length in lengths) + 1
    free = random.Random(1).sample(range(1, num_pages), num_pages - 1)
    shared = [free.pop() for _ in range(num_shared)]
    table = torch.zeros(len(lengths), -(-max(lengths) // PAGE), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for row, (before, count) in enumerate(load.rows):
        pages = [*shared, *(free.pop() for _ in range(-(-lengths[row] // PAGE) - num_shared))]
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        positions += range(before, before + count)
        slots += [pages[position // PAGE] * PAGE + position % PAGE for position in range(before, before + count)]
        starts.append(len(positions))
    counts = [count for _, count in load.rows]
    batch = Batch(
        torch.tensor(positions), torch.tensor(positions), torch.tensor(slots), torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32), table, torch.tensor(starts[1:]) - 1, max(counts), max(lengths),
        counts.count(1), counts, lengths,
    )  # fmt: skip
    return batch, num_pages


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the fastest round of each call: noise only ever adds time. Rounds alternate, so that noise affects all calls."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(0.02 / (time.perf_counter() - start)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            found[name].append((time.perf_counter() - start) / repeats[name] * 1e6)
    return {name: min(times) for name, times in found.items()}


class Native:
    """The two calls of a layer, for several layers, prepared beforehand as an executor does."""

    def __init__(self, pool: Threads, heads: tuple[int, int, int], batch: Batch, num_pages: int, dtype: torch.dtype):
        num_heads, num_kv_heads, size = heads
        self.pool, self.num_tokens = pool, batch.num_tokens
        self.heads = torch.randn(batch.num_tokens, num_heads + 2 * num_kv_heads, size)
        self.rotation = torch.randn(batch.num_tokens, size // 2, 2)
        self.output = torch.empty(batch.num_tokens, num_heads * size)
        self.batch = batch  # keeps alive the tensors that the calls point to
        self.layers = [self._filled(new_pages(num_pages, num_kv_heads, size, PAGE, dtype)) for _ in range(LAYERS)]
        self.stores = [QkNormRopeCall() for _ in self.layers]
        self.attentions = [AttentionCall() for _ in self.layers]
        for pages, turn, attention in zip(self.layers, self.stores, self.attentions, strict=True):
            for call in (turn, attention):
                call.pages, call.page_stride = pages.store.data_ptr(), pages.stride
                call.num_heads, call.num_kv_heads, call.head_size, call.page_size = num_heads, num_kv_heads, size, PAGE
                call.is_int8, call.is_float16 = pages.is_int8, pages.is_float16
            turn.heads, turn.token_stride = self.heads.data_ptr(), self.heads.stride(0)
            turn.rotation, turn.slots = self.rotation.data_ptr(), batch.slots.data_ptr()
            turn.num_tokens = batch.num_tokens
            attention.queries, attention.query_stride = self.heads.data_ptr(), self.heads.stride(0)
            attention.output, attention.output_stride = self.output.data_ptr(), self.output.stride(0)
            attention.query_start, attention.seq_lens = batch.query_start.data_ptr(), batch.seq_lens.data_ptr()
            attention.page_table, attention.table_stride = batch.page_table.data_ptr(), batch.page_table.stride(0)
            attention.num_rows, attention.scale = batch.num_rows, size**-0.5

    def _filled(self, pages: LayerPages) -> LayerPages:
        slots = torch.arange(len(pages.store) * PAGE)
        qk_norm_rope_store(
            self.pool, torch.randn(len(slots), *self.heads.shape[1:]), self.num_heads(pages), pages, slots
        )
        return pages

    def num_heads(self, pages: LayerPages) -> int:
        return self.heads.shape[1] - 2 * pages.num_kv_heads

    def run(self) -> None:
        store, attend = functions().octavo_qk_norm_rope_store, functions().octavo_attention
        for one, other in zip(self.stores, self.attentions, strict=True):
            store(self.pool.pointer, byref(one))
            attend(self.pool.pointer, byref(other))


def attention(pool: Threads, heads: tuple[int, int, int], load: Load) -> None:
    num_heads, num_kv_heads, size = heads
    batch, num_pages = batch_of(load)
    natives = [Native(pool, heads, batch, num_pages, dtype) for dtype in (torch.float32, torch.float16, torch.int8)]
    plain = TorchCpuAttention()
    plain.bind([torch.randn(num_pages, 2, num_kv_heads, PAGE, size) for _ in range(LAYERS)], 64)
    plain.plan(batch)
    layers = [LayerHeads(index, *heads, size**-0.5) for index in range(LAYERS)]
    angles = torch.randn(batch.num_tokens, 1, size // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)

    def torch_cpu() -> None:
        for layer in layers:
            plain.run(layer, natives[0].heads, rotation, batch)

    def read() -> None:
        for pages in natives[0].layers:
            library().octavo_read_all(pool.pointer, pages.store.data_ptr(), pages.store.nbytes)

    times = microseconds(
        {"32": natives[0].run, "16": natives[1].run, "8": natives[2].run, "torch": torch_cpu, "read": read}
    )
    us = {name: time / LAYERS for name, time in times.items()}
    seen = sum((before + count / 2) * count for before, count in load.rows)
    rate = seen * num_heads * size * 4 / us["32"] / 1e3
    print(
        f"{load.name:>30} {us['32']:9.1f} {us['16']:9.1f} {us['8']:9.1f} {us['torch']:9.1f} {us['torch'] / us['32']:6.1f} ×"
        f" {us['read']:9.1f} {rate:9.0f}"
    )


def between(pool: Threads, num_rows: int) -> None:
    x, gate_up, weight = torch.randn(num_rows, 576), torch.randn(num_rows, 3072), torch.randn(576)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {
        "rms_norm": (
            lambda: elementwise.rms_norm(pool, x, weight, 1e-5),
            lambda: torch.nn.functional.rms_norm(x, (576,), weight, 1e-5),
        ),
        "rms_norm_prepare": (lambda: elementwise.rms_norm_prepare(pool, x, weight, 1e-5, Kind.CODES8), None),
        "silu_mul": (
            lambda: elementwise.silu_mul(pool, gate_up),
            lambda: torch.nn.functional.silu(gate_up[:, :1536]) * gate_up[:, 1536:],
        ),
    }
    for name, (native, plain) in pairs.items():
        times = microseconds({"native": native} | ({"torch": plain} if plain else {}))
        beside = f"{times['torch']:9.1f}" if plain else "        –"
        print(f"{name:>30} rows {num_rows:4} {times['native']:9.1f} {beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default=SHAPES[0], help=f"heads/KV heads/head size, or all: {', '.join(SHAPES)}")
    parser.add_argument("--only", choices=[*LOADS, "between"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pool = Threads(options.threads)  # not pinned: torch's threads would inherit this thread's CPU mask
    print(f"{options.threads} threads, {isa()}; a layer, µs. read: all of its pages of 32 bits; GFLOP/s with those")
    for shape in SHAPES if options.shapes == "all" else options.shapes.split(","):
        if options.only == "between":
            break
        names = (shape, "32 bit", "16 bit", "8 bit", "torch_cpu", "ratio", "read", "GFLOP/s")
        print("{:>30} {:>9} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9}".format(*names))
        num_heads, num_kv_heads, size = map(int, shape.split("/"))
        for load in [load for kind, loads in LOADS.items() if options.only in (None, kind) for load in loads]:
            attention(pool, (num_heads, num_kv_heads, size), load)
    for num_rows in (1, 8, 32) if options.only in (None, "between") else ():
        between(pool, num_rows)


if __name__ == "__main__":
    main()
