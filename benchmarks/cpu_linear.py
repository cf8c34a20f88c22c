"""Times torch's products with a weight on this CPU, by route, shape and number of rows, with cold weights.
The shapes are SmolLM2-135M's. Run: python benchmarks/cpu_linear.py --threads 2

A decode step reads every weight once, from memory. octavo/weights/methods/onednn.py uses the route that is fastest here."""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPES = {  # name: (inputs, outputs, copies: as many as the model has, so that the caches hold none of them)
    "qkv": (576, 960, 30),
    "attention out": (576, 576, 30),
    "gate and up": (576, 3072, 30),
    "down": (1536, 576, 30),
    "head": (576, 49152, 1),
}
Route = Callable[[torch.Tensor, int], torch.Tensor]


def routes(weights: list[torch.Tensor], num_rows: int) -> dict[str, Route]:
    transposed = [weight.t().contiguous() for weight in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 32) for weight in weights]
    found: dict[str, Route] = {
        "F.linear": lambda x, i: F.linear(x, weights[i]),
        "x @ transposed": lambda x, i: torch.mm(x, transposed[i]),
        "weight @ xᵀ": lambda x, i: torch.mm(weights[i], x.t()),
        "oneDNN, packed": lambda x, i: torch.ops.mkldnn._linear_pointwise(x, packed[i], None, "none", [], ""),
    }
    if torch.backends.mkl.is_available() and len(weights) > 1:
        mkl = [torch.ops.mkl._mkl_reorder_linear_weight(weight, num_rows) for weight in weights]
        found["MKL, packed"] = lambda x, i: torch.ops.mkl._mkl_linear(x, mkl[i], weights[i], None, num_rows)
    return found


def measure(route: Route, x: torch.Tensor, copies: int, repeats: int, junk: torch.Tensor) -> float:
    """Return the seconds of one product, the best of the repeats."""
    best = float("inf")
    for _ in range(repeats):
        junk.add_(1)  # evicts the weights from the caches
        start = time.perf_counter()
        for copy in range(copies):
            route(x, copy)
        best = min(best, (time.perf_counter() - start) / copies)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    junk = torch.zeros(32 * 2**20)
    print(f"{'product':<24}{'rows':>5}  " + "".join(f"{name:>18}" for name in ("route", "µs", "GFLOP/s", "GB/s")))
    for name, (inputs, outputs, copies) in SHAPES.items():
        weights = [torch.randn(outputs, inputs) for _ in range(copies)]
        for num_rows in arguments.rows:
            x = torch.randn(num_rows, inputs)
            for route_name, route in routes(weights, num_rows).items():
                seconds = measure(route, x, copies, arguments.repeats, junk)
                rates = 2 * num_rows * inputs * outputs / seconds / 1e9, 4 * inputs * outputs / seconds / 1e9
                print(
                    f"{name:<24}{num_rows:>5}  {route_name:>18}{seconds * 1e6:>18.0f}{rates[0]:>18.0f}{rates[1]:>18.1f}"
                )


if __name__ == "__main__":
    main()
