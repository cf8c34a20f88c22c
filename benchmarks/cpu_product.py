"""Compares the native products with this machine's own limits, by kind of weight, shape and number of rows.
Run: python -m benchmarks.cpu_product --threads 2

Weights are cold: calls alternate over a model's worth of copies. The ceilings are measured in the same run with the same
threads: bandwidth by reading as much memory, arithmetic by dot instructions on registers alone (a quarter of that for
float32: an instruction does 16 products, not 64). Scales cost two multiplications a group beside eight dots: no packed
product can exceed 80 % of it (73 % with minimums; less for five and six bits, which are assembled first, and for Q6_K's
two scales a group).
A shared machine is noisy: reading and multiplying alternate, a share of reading is the median of the rounds' own ratios,
and every other figure is the best of the rounds' medians. A call takes about a millisecond (wide weights are cut into
pieces): a longer one would lose its core to other processes."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from octavo.kernels.cpu import library
from octavo.kernels.cpu.library import (
    GGUF_KINDS,
    PANEL,
    QUANTS,
    Kind,
    PackedWeight,
    Threads,
    aligned,
    prepare,
    product_call,
    products,
)

SHAPES = {  # name: (inputs, outputs)
    "135M qkv": (576, 960),
    "135M attention out": (576, 576),
    "135M gate and up": (576, 3072),
    "135M down": (1536, 576),
    "135M head": (576, 49152),
    "1.1B attention out": (2048, 2048),
    "1.1B gate and up": (2048, 11264),
    "1.1B down": (5632, 2048),
}
CALL_BYTES, CALL_OPS = 16_000_000, 500_000_000  # upper limits of one timed call
KINDS = {type.lower(): kind for type, kind in GGUF_KINDS.items()}
KINDS |= {f"{name}_decoded": kind.decoded for name, kind in KINDS.items()}
KINDS |= {"bfloat16": Kind.BFLOAT16, "float32": Kind.FLOAT32}


def random_weight(threads: Threads, kind: Kind, depth: int, num_columns: int) -> PackedWeight:
    if not kind.is_packed:
        rows = torch.randn(num_columns, depth)
        return library.pack(threads, rows.bfloat16() if kind == Kind.BFLOAT16 else rows, kind)
    stored = kind.stored_as
    weights, num_bytes = QUANTS[stored]
    quants = torch.randint(0, 256, (num_columns, depth // weights, num_bytes), dtype=torch.uint8)
    halves = quants.view(torch.float16)  # [N, quants, half of the bytes]
    scale, minimum = {Kind.CODES6_NESTED: (-1, -1), Kind.CODES2_NESTED: (-2, -1)}.get(stored, (0, 1))
    if stored in (Kind.CODES4_MINIMUM, Kind.CODES5_MINIMUM, Kind.CODES4_NESTED, Kind.CODES5_NESTED, Kind.CODES2_NESTED):
        halves[..., minimum] = 0.1
    halves[..., scale] = 0.01
    return library.pack(threads, quants.flatten(1), kind)


def copies_of(threads: Threads, kind: Kind, depth: int, num_columns: int, copies: int) -> list[PackedWeight]:
    """Return copies of one weight in one piece of memory, as a model's weights are."""
    first = random_weight(threads, kind, depth, num_columns)
    size = first.memory.numel()
    whole = aligned(size * copies)
    whole.view(copies, size)[:] = first.memory
    return [PackedWeight(view, kind, num_columns, depth) for view in whole.view(copies, size)]


def pieces(weight: PackedWeight, num_columns: int) -> list[PackedWeight]:
    """Cut the weight into pieces of at most num_columns columns (a multiple of PANEL)."""
    panel = weight.memory.numel() // -(-weight.num_columns // PANEL)
    return [
        PackedWeight(
            weight.memory[start // PANEL * panel :][: num_columns // PANEL * panel],
            weight.kind,
            min(num_columns, weight.num_columns - start),
            weight.depth,
        )
        for start in range(0, weight.num_columns, num_columns)
    ]


def short_calls(weights: list[PackedWeight], num_rows: int) -> tuple[list[list[PackedWeight]], int]:
    """Return the weights of each call, about a millisecond of work, and the number of columns of a piece."""
    weight = weights[0]
    column_bytes = weight.memory.numel() / weight.num_columns
    most_ops = CALL_OPS if weight.kind.is_quantised else CALL_OPS / 4
    num_columns = int(min(CALL_BYTES / column_bytes, most_ops / (2 * num_rows * weight.depth)))
    if num_columns < weight.num_columns:
        width = max(64, num_columns // 64 * 64)
        return [[piece] for weight in weights for piece in pieces(weight, width)[: weight.num_columns // width]], width
    together = num_columns // weight.num_columns
    return [weights[at : at + together] for at in range(0, len(weights) - together + 1, together)], weight.num_columns


class Turns:
    """Runs calls in turn, so that each finds its memory cold. Keeps the best of the medians."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls, self._next, self.seconds = calls, 0, float("inf")

    def measure(self, num_calls: int) -> float:
        times = []
        for _ in range(num_calls):
            call = self._calls[self._next % len(self._calls)]
            self._next += 1
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        median = statistics.median(times)
        self.seconds = min(self.seconds, median)
        return median


def measure(threads: Threads, kind: Kind, depth: int, num_columns: int, rows: list[int], megabytes: int, rounds: int):
    """Return the bytes of a weight, the seconds to read it, and for each number of rows the seconds of the product and its share of reading."""
    size: int = library.library().octavo_packed_bytes(kind, num_columns, depth)
    weights = copies_of(threads, kind, depth, num_columns, max(2, megabytes * 1_000_000 // size))
    taken: dict[int, tuple[Turns, float]] = {}
    held = []
    for num_rows in rows:
        prepared = prepare(threads, torch.randn(num_rows, depth), kind)
        calls, width = short_calls(weights, num_rows)
        y = torch.empty(num_rows, width)
        made = [[product_call(prepared, weight, y[:, : weight.num_columns]) for weight in call] for call in calls]
        held.append((prepared, y))
        turns = Turns([partial(products, threads, call) for call in made])
        taken[num_rows] = turns, num_columns / (len(calls[0]) * width)
    whole = aligned(size * len(weights)).fill_(1)
    at_once = min(CALL_BYTES, len(whole)) // 4096 * 4096
    reading = Turns([partial(library.read_all, threads, part) for part in whole.split(at_once)[:-1] or [whole]])
    shares: dict[int, list[float]] = {num_rows: [] for num_rows in rows}
    for _ in range(rounds):
        for num_rows, (turns, parts) in taken.items():
            read = reading.measure(5) * size / at_once
            shares[num_rows].append(read / (turns.measure(5) * parts))
    found = {n: (turns.seconds * parts, statistics.median(shares[n])) for n, (turns, parts) in taken.items()}
    return size, reading.seconds * size / at_once, found


def error(threads: Threads, kind: Kind) -> float:
    weight, x = random_weight(threads, kind, 2048, 512), torch.randn(16, 2048)
    x[:, ::97] *= 30  # outliers, as real activations have
    exact = x.double() @ weight.columns(torch.arange(512)).double().T
    y = library.product(threads, prepare(threads, x, kind), weight, torch.empty(16, 512))
    return float((y - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 512])
    parser.add_argument("--kinds", nargs="+", default=[name for name in KINDS if "_decoded" not in name], choices=KINDS)
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--megabytes", type=int, default=160, help="megabytes of weights to alternate over")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--isa", default="")
    arguments = parser.parse_args()
    if arguments.isa and not library.use_isa(arguments.isa):
        parser.error(f"this CPU has no {arguments.isa}")

    torch.set_num_threads(1)
    threads = Threads(arguments.threads, first_cpu=0)
    rate = max(library.dot_rate(threads) for _ in range(50)) / 1e9
    print(f"{library.isa()}, {arguments.threads} threads; dot instructions {rate:.0f} GOP/s")
    print(f"{'':36}{'MB':>6}{'read GB/s':>10}  rows: GB/s (share of read) GOP/s (share) µs")
    for kind_name in arguments.kinds:
        ceiling = rate if KINDS[kind_name].is_quantised else rate / 4
        for shape, (depth, num_columns) in SHAPES.items():
            if arguments.shapes not in shape or depth % QUANTS.get(KINDS[kind_name].stored_as, (1, 0))[0]:
                continue
            size, read, taken = measure(
                threads, KINDS[kind_name], depth, num_columns, arguments.rows, arguments.megabytes, arguments.rounds
            )
            line = f"{kind_name:17}{shape:19}{size / 1e6:6.1f}{size / read / 1e9:10.1f} "
            for num_rows, (seconds, share) in taken.items():
                ops = 2 * num_rows * num_columns * depth / seconds / 1e9
                line += f" | {num_rows}: {size / seconds / 1e9:.1f} ({share:.0%}) {ops:.0f} ({ops / ceiling:.0%})"
                line += f" {seconds * 1e6:.0f}"
            print(line, flush=True)
    for kind_name in arguments.kinds:
        print(
            f"{kind_name:17}error against float64 with the same weights: {error(threads, KINDS[kind_name]):.1e} of the norm"
        )
    threads.close()


if __name__ == "__main__":
    main()
