"""Native decode attention against octavo's torch_cpu backend and against the machine's read bandwidth, and the
elementwise kernels in µs: `python -m benchmarks.cpu_attention [threads]`. One round of each in turn, the fastest counts."""

import random
import sys
import time
from collections.abc import Callable

import torch

from octavo.attention.base import LayerHeads
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.batch import Batch
from octavo.kernels.cpu import elementwise
from octavo.kernels.cpu.attention import Pages, attend, new_pages, turn_and_store
from octavo.kernels.cpu.library import Threads, isa, library

HEADS, KV_HEADS, SIZE, PAGE = 9, 3, 64, 16  # SmolLM2-135M
LAYERS = 8  # stores that take turns, so that a layer's pages are as cold as in a step of a model
ROUNDS = 7


def decode_batch(num_rows: int, context: int) -> tuple[Batch, int]:
    per_row = -(-context // PAGE)
    num_pages = num_rows * per_row + 1
    pages = random.Random(1).sample(range(1, num_pages), num_pages - 1)
    table = torch.tensor(pages, dtype=torch.int32).view(num_rows, per_row)
    slots = table[:, -1].long() * PAGE + (context - 1) % PAGE
    positions = torch.full((num_rows,), context - 1)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    lengths = torch.full((num_rows,), context, dtype=torch.int32)
    batch = Batch(
        positions, positions, slots, starts, lengths, table, starts[1:].long() - 1, 1, context, num_rows,
        [1] * num_rows, [context] * num_rows,
    )  # fmt: skip
    return batch, num_pages


def prompt_batch(count: int) -> tuple[Batch, int]:
    num_pages = -(-count // PAGE)
    positions = torch.arange(count)
    batch = Batch(
        positions, positions, positions, torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32), torch.arange(num_pages, dtype=torch.int32)[None],
        torch.tensor([count - 1]), count, count, 0, [count], [count],
    )  # fmt: skip
    return batch, num_pages


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The fastest round of each: others on the machine only ever add. Rounds alternate, so that a noisy moment meets all."""
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


def attention(pool: Threads, batch: Batch, num_pages: int, label: str) -> None:
    floats = [new_pages(num_pages, KV_HEADS, SIZE, PAGE) for _ in range(LAYERS)]
    codes = [new_pages(num_pages, KV_HEADS, SIZE, PAGE, is_int8=True) for _ in range(LAYERS)]
    everywhere = torch.arange(num_pages * PAGE)
    for pages in (*floats, *codes):
        turn_and_store(pool, torch.randn(len(everywhere), HEADS + 2 * KV_HEADS, SIZE), HEADS, pages, everywhere)
    heads = torch.randn(batch.num_tokens, HEADS + 2 * KV_HEADS, SIZE)
    rotation = torch.polar(torch.ones(batch.num_tokens, 1, SIZE // 2), torch.randn(batch.num_tokens, 1, SIZE // 2))
    plain = TorchCpuAttention()
    plain.bind([torch.randn(num_pages, 2, KV_HEADS, PAGE, SIZE) for _ in range(LAYERS)], 64)
    plain.plan(batch)
    layers = [LayerHeads(index, HEADS, KV_HEADS, SIZE, SIZE**-0.5) for index in range(LAYERS)]
    output = torch.empty(batch.num_tokens, HEADS * SIZE)

    def native(layers: list[Pages]) -> None:
        for pages in layers:
            turn_and_store(pool, heads, HEADS, pages, batch.slots, rotation)
            attend(
                pool, heads, HEADS, pages, batch.query_start, batch.seq_lens, batch.page_table, SIZE**-0.5,
                output=output,
            )  # fmt: skip

    def torch_cpu() -> None:
        for layer in layers:
            plain.run(layer, heads, rotation, batch)

    def read() -> None:
        for pages in floats:
            library().octavo_read_all(pool.pointer, pages.store.data_ptr(), pages.store.nbytes)

    times = microseconds(
        {
            "native": lambda: native(floats),
            "int8": lambda: native(codes),
            "torch": torch_cpu,
            "read": read,
        }
    )
    bytes_read = sum(batch.seq_lens_host) * 2 * KV_HEADS * SIZE * 4
    native_us, int8_us, torch_us, read_us = (times[name] / LAYERS for name in ("native", "int8", "torch", "read"))
    speed, ceiling = bytes_read / native_us / 1e3, floats[0].store.nbytes / read_us / 1e3
    print(
        f"{label:>22} {native_us:9.1f} {int8_us:9.1f} {torch_us:9.1f} {torch_us / native_us:7.1f} ×"
        f" {speed:8.1f} {ceiling:8.1f} {speed / ceiling:6.0%}"
    )


def between(pool: Threads, num_rows: int) -> None:
    x, gate_up, logits = torch.randn(num_rows, 576), torch.randn(num_rows, 3072), torch.randn(num_rows, 49152)
    weight, table, ids = torch.randn(576), torch.randn(49152, 576), torch.randint(0, 49152, (num_rows,))
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {
        "rms_norm": (
            lambda: elementwise.rms_norm(pool, x, weight, 1e-5),
            lambda: torch.nn.functional.rms_norm(x, (576,), weight, 1e-5),
        ),
        "rms_norm_quantise": (lambda: elementwise.rms_norm_quantise(pool, x, weight, 1e-5), None),
        "silu_mul": (
            lambda: elementwise.silu_mul(pool, gate_up),
            lambda: torch.nn.functional.silu(gate_up[:, :1536]) * gate_up[:, 1536:],
        ),
        "silu_mul_quantise": (lambda: elementwise.silu_mul_quantise(pool, gate_up), None),
        "argmax": (lambda: elementwise.argmax(pool, logits), lambda: logits.argmax(-1)),
        "gather_rows": (lambda: elementwise.gather_rows(pool, table, ids), lambda: table[ids]),
    }
    for name, (native, plain) in pairs.items():
        times = microseconds({"native": native} | ({"torch": plain} if plain else {}))
        beside = f"{times['torch']:9.1f}" if plain else "        –"
        print(f"{name:>22} rows {num_rows:4} {times['native']:9.1f} {beside}")


def main() -> None:
    num_threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(num_threads)
    pool = Threads(num_threads)
    print(f"{num_threads} threads, {isa()}; turn + store + attention of a layer, µs")
    print(f"{'':>22} {'native':>9} {'int8':>9} {'torch_cpu':>9} {'ratio':>9} {'GB/s':>8} {'read':>8} {'share':>6}")
    for num_rows in (1, 8, 32):
        for context in (128, 512, 2048):
            attention(pool, *decode_batch(num_rows, context), f"batch {num_rows}, context {context}")
    for count in (128, 512):
        attention(pool, *prompt_batch(count), f"prompt of {count}")
    for num_rows in (1, 8, 32):
        between(pool, num_rows)


if __name__ == "__main__":
    main()
