"""Times one layer's experts on this CPU: the native operation, torch's grouped product, a padded one and a loop over experts.
Run: python -m benchmarks.moe --threads 2

The loop is what a model's reference code does: for each expert that has tokens, gather them, three products, add them back."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo.attention.reference import ReferenceAttention
from octavo.kernels.cpu.device_ops import NativeOps
from octavo.kernels.cpu.native import Native
from octavo.kernels.torch_ops import TorchOps
from octavo.layers.context import BuildContext
from octavo.layers.experts import Experts
from octavo.parallel import Group
from octavo.weights.methods import torch_experts
from octavo.weights.methods.base import Gate, Settings
from octavo.weights.methods.registry import Methods


class Shape(NamedTuple):
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int


SHAPES = {"128 experts, 8 chosen": Shape(128, 8, 2048, 768), "32 experts, 4 chosen": Shape(32, 4, 2880, 2880)}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [T, hidden], logits [T, experts] → [T, hidden]


def build(shape: Shape, dtype: torch.dtype, native: Native | None, quantization: str = "") -> Experts:
    """Make random experts, with the same values for every implementation."""
    settings = Settings(
        torch.device("cpu"),
        torch.float32 if native else dtype,
        NativeOps(native) if native else TorchOps(),
        quantization=quantization,
        weight_dtype=dtype,
    )
    context = BuildContext(Group.single(), ReferenceAttention(), Methods(settings))
    made = Experts(shape.hidden, shape.inner, shape.num_experts, Gate(), context, bias=False)
    generator = torch.Generator().manual_seed(1)
    for expert in range(shape.num_experts):
        for part in range(2):
            made.fill_gate_up(expert, part, _random(shape.inner, shape.hidden, generator, dtype))
        made.fill_down(expert, _random(shape.hidden, shape.inner, generator, dtype))
    return made


def _random(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator).mul_(0.02).to(dtype)


def loop(experts: Experts, shape: Shape, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    held = experts.weights
    assert isinstance(held, torch_experts.PlainExperts)
    chosen, weights = torch_experts.choose(logits, shape.num_chosen, True)
    y = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], held.gate_up[expert]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, held.down[expert])
        y.index_add_(0, tokens, (out * weights[tokens, places, None]).to(x.dtype))
    return y


def padded(experts: Experts, shape: Shape, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    grouped, torch_experts.grouped_product = torch_experts.grouped_product, torch_experts.padded_product
    try:
        return experts(x, logits, shape.num_chosen, True, torch.zeros_like(x))  # type: ignore[no-any-return]
    finally:
        torch_experts.grouped_product = grouped


def ways(shape: Shape, dtype: torch.dtype, native: Native) -> dict[str, Step]:
    """Return all implementations of one precision; the last one rounds weights, as --quantization int8 does."""
    by_torch, by_native = build(shape, dtype, None), build(shape, dtype, native)
    rounded = build(shape, torch.float32, native, "int8")

    def natively(made: Experts) -> Step:
        return lambda x, logits: made(x.float(), logits.float(), shape.num_chosen, True, torch.zeros(x.shape))

    return {
        "loop": lambda x, logits: loop(by_torch, shape, x, logits),
        "torch, grouped": lambda x, logits: by_torch(x, logits, shape.num_chosen, True, torch.zeros_like(x)),
        "torch, padded": lambda x, logits: padded(by_torch, shape, x, logits),
        "native": natively(by_native),
        "native, int8": natively(rounded),
    }


def measure(
    steps: dict[str, Step], shape: Shape, num_tokens: int, dtype: torch.dtype, repeats: int
) -> dict[str, float]:
    """Return the median seconds of a step. The implementations alternate, so that noise affects all of them."""
    took: dict[str, list[float]] = {name: [] for name in steps}
    generator = torch.Generator().manual_seed(num_tokens)
    for number in range(repeats + 1):
        x = torch.randn(num_tokens, shape.hidden, generator=generator).to(dtype)
        logits = torch.randn(num_tokens, shape.num_experts, generator=generator).to(dtype)
        for name, step in steps.items():
            start = time.perf_counter()
            step(x, logits)
            if number:  # the first only warms up
                took[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    for words, shape in SHAPES.items():
        steps = ways(shape, dtype, Native(arguments.threads))
        print(
            f"\n{words}, hidden {shape.hidden}, inner {shape.inner}, {arguments.dtype}: ms of a step, times the loop's speed"
        )
        print(f"{'tokens':>6}" + "".join(f"{name:>22}" for name in steps))
        for num_tokens in arguments.tokens:
            seconds = measure(steps, shape, num_tokens, dtype, arguments.repeats)
            cells = (f"{value * 1e3:.2f} ({seconds['loop'] / value:.2f}×)" for value in seconds.values())
            print(f"{num_tokens:>6}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
