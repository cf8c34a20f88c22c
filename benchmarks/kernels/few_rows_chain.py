"""All kernels of a model's layers at one row but attention's, in one CUDA graph: torch alone, ours, and ours overlapping.
Shapes and random weights only. Part of `python -m benchmarks.kernels.few_rows`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import distance, microseconds, replayed, share
from octavo.kernels.triton.attention.qk_norm_rope_store import qk_norm_rope_store
from octavo.kernels.triton.gemm.skinny import choose, few_rows_linear
from octavo.kernels.triton.gemm.skinny_vector import VectorChoice, vector_product

EPSILON = 1e-6
PAGE = 16
# Tried for each product in turn, with the rule's choices for the others.
CHOICES = (
    VectorChoice(8, 4, 3), VectorChoice(4, 4, 4), VectorChoice(8, 2, 4), VectorChoice(4, 1, 4), VectorChoice(2, 1, 8),
    VectorChoice(8, 8, 2),
)  # fmt: skip
PRODUCTS = ("qkv", "output", "gate up", "down")


@dataclass(frozen=True)
class Dimensions:
    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    has_head_norms: bool

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """[rows, columns] of each weight of a layer."""
        all_heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        queries = self.num_heads * self.head_size
        return {
            "qkv": (all_heads, self.hidden),
            "output": (self.hidden, queries),
            "gate up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def layer_numbers(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes.values())


@dataclass
class Layer:
    weights: dict[str, torch.Tensor]
    norms: torch.Tensor  # [2, hidden]
    head_norms: torch.Tensor | None  # [2, D]
    kv: torch.Tensor  # [1, 2, Hkv, PAGE, D]


Choices = dict[str, VectorChoice]


def make_layers(size: Dimensions, pool: torch.Tensor, num_layers: int) -> list[Layer]:
    """Make layers whose weights lie one behind the other in the pool."""
    layers, at = [], 0
    for _ in range(num_layers):
        weights = {}
        for name, (rows, columns) in size.shapes.items():
            weights[name] = pool[at : at + rows * columns].view(rows, columns)
            at += rows * columns
        norms = torch.ones(2, size.hidden, dtype=pool.dtype, device=pool.device)
        head_norms = norms.new_ones(2, size.head_size) if size.has_head_norms else None
        kv = norms.new_zeros(1, 2, size.num_kv_heads, PAGE, size.head_size)
        layers.append(Layer(weights, norms, head_norms, kv))
    return layers


def chosen(size: Dimensions, num_processors: int) -> Choices:
    """Return the tiles that few_rows_linear chooses for one row."""
    found = {}
    for name, (rows, columns) in size.shapes.items():
        choice = choose(1, rows // 2 if name == "gate up" else rows, columns, name == "gate up", num_processors)
        assert isinstance(choice, VectorChoice)
        found[name] = choice
    return found


def our_layer(
    size: Dimensions,
    layer: Layer,
    x: torch.Tensor,
    rotation: torch.Tensor,
    slots: torch.Tensor,
    choices: Choices,
    pdl: bool,
) -> None:
    """Run one layer with our kernels. Changes x [1, hidden]."""
    first, second = ((weight, EPSILON) for weight in layer.norms)
    q_norm, k_norm = layer.head_norms if layer.head_norms is not None else (None, None)

    def product(name: str, inputs: torch.Tensor, n: int, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
        out = x if norm is None else torch.empty((1, n), dtype=x.dtype, device=x.device)
        residual, gated = (x if norm is None else None), ("silu" if name == "gate up" else "")
        vector_product(inputs, layer.weights[name], out, residual, None, norm, gated, choices[name], pdl)
        return out

    heads = product("qkv", x, size.shapes["qkv"][0], first)
    split = heads.view(1, -1, size.head_size)
    qk_norm_rope_store(
        split, size.num_heads, size.num_kv_heads, rotation, q_norm, k_norm, EPSILON, layer.kv, slots, pdl=pdl
    )
    product("output", heads[:, : size.num_heads * size.head_size], size.hidden, None)
    inner = product("gate up", x, size.inner, second)
    product("down", inner, size.hidden, None)


def torch_layer(
    size: Dimensions, layer: Layer, x: torch.Tensor, rotation: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Run one layer with cuBLAS and plain torch, without our kernels."""
    q_size = size.num_heads * size.head_size
    normed = F.rms_norm(x, x.shape[-1:], layer.norms[0], EPSILON)
    heads = F.linear(normed, layer.weights["qkv"]).view(1, -1, size.head_size)
    q, k, v = heads.split((size.num_heads, size.num_kv_heads, size.num_kv_heads), dim=1)
    if layer.head_norms is not None:
        q = F.rms_norm(q, q.shape[-1:], layer.head_norms[0], EPSILON)
        k = F.rms_norm(k, k.shape[-1:], layer.head_norms[1], EPSILON)
    both = torch.cat((q, k), dim=1).float().unflatten(-1, (-1, 2))
    turned = torch.view_as_real(torch.view_as_complex(both) * torch.view_as_complex(rotation)[:, None]).flatten(-2)
    turned = turned.to(x.dtype)
    layer.kv[0, 0].index_copy_(1, slots, turned[:, size.num_heads :].transpose(0, 1))
    layer.kv[0, 1].index_copy_(1, slots, v.transpose(0, 1))
    x = x + F.linear(turned[:, : size.num_heads].reshape(1, q_size), layer.weights["output"])
    gate_up = F.linear(F.rms_norm(x, x.shape[-1:], layer.norms[1], EPSILON), layer.weights["gate up"])
    gate, up = gate_up.chunk(2, dim=1)
    return x + F.linear(F.silu(gate) * up, layer.weights["down"])


def compile_layer(size: Dimensions, choices: Choices, pdl: bool) -> None:
    """A job for compile_all: one layer's launches over memory that is never touched."""
    pool = torch.empty(size.layer_numbers, dtype=torch.bfloat16, device="cuda")
    layer = make_layers(size, pool, 1)[0]
    our_layer(size, layer, pool.new_empty(1, size.hidden), *_step(size, pool.device), choices, pdl)


def _step(size: Dimensions, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.linspace(0, 3, size.head_size // 2, device=device)[None]
    rotation = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).contiguous()
    return rotation, torch.tensor([3], device=device)


def compile_jobs(size: Dimensions, num_processors: int) -> list[Callable[[], None]]:
    rule = chosen(size, num_processors)
    jobs = [partial(compile_layer, size, rule, pdl) for pdl in (False, True)]
    return jobs + [partial(compile_layer, size, dict.fromkeys(PRODUCTS, choice), True) for choice in CHOICES]


def run(size: Dimensions, pool: torch.Tensor, num_processors: int, is_rehearsal: bool) -> None:
    layers = make_layers(size, pool, size.num_layers)
    rotation, slots = _step(size, pool.device)
    start = torch.randn(1, size.hidden, device=pool.device).to(pool.dtype)
    rule = chosen(size, num_processors)

    def ours(choices: Choices, pdl: bool) -> torch.Tensor:
        x = start * 1  # a kernel, not a copy: only kernels can be overlapped
        for layer in layers:
            our_layer(size, layer, x, rotation, slots, choices, pdl)
        return x

    def plain() -> torch.Tensor:
        x = start
        for layer in layers:
            x = torch_layer(size, layer, x, rotation, slots)
        return x

    print(f"\n{size.name}, one row, {len(layers)} layers without attention; µs per layer")
    out = ours(rule, False)
    error = distance(out, plain())
    print(f"  error against torch {error:.1e}", "" if error < 1e-1 else "WRONG")
    times = [microseconds([call], is_rehearsal) / len(layers) for call in (plain, partial(ours, rule, False))]
    floor = share(2 * size.layer_numbers, 1.0) / 100
    print(f"  reading the weights {floor:.2f}   torch {times[0]:.2f}   ours {times[1]:.2f}", flush=True)
    if not is_rehearsal:
        sweep(ours, rule, len(layers))


def sweep(ours: Callable[[Choices, bool], torch.Tensor], rule: Choices, num_layers: int) -> None:
    """Time, with overlapping launches, the rule's choices, then each product's alternatives with the others unchanged."""

    def per_layer(choices: Choices) -> float:
        return microseconds([partial(ours, choices, True)], False) / num_layers

    def same(choices: Choices) -> bool:
        """Return whether overlapping changes no bit in twenty replays."""
        return torch.equal(replayed(partial(ours, choices, True), 20), ours(choices, False))

    best, best_time = dict(rule), per_layer(rule)
    print(f"  ours with PDL {best_time:.2f}, the same result: {same(rule)}   {_named(rule)}", flush=True)
    for name in PRODUCTS:
        times = {choice: per_layer(rule | {name: choice}) for choice in CHOICES}
        print(f"    {name:<8}" + "".join(f"  {tuple(choice)} {time:.2f}" for choice, time in times.items()), flush=True)
        quickest = min(times, key=times.__getitem__)
        if times[quickest] < best_time:
            best[name] = quickest
    print(f"  best of each {per_layer(best):.2f}, the same result: {same(best)}   {_named(best)}", flush=True)


def _named(choices: Choices) -> str:
    return ", ".join(f"{name} {tuple(choice)}" for name, choice in choices.items())


def host_microseconds(size: Dimensions, pool: torch.Tensor) -> float:
    """Return the host's microseconds for one launch outside a graph."""
    import time

    x = torch.randn(1, size.hidden, device=pool.device).to(pool.dtype)
    rows, columns = size.shapes["qkv"]
    weight = pool[: rows * columns].view(rows, columns)
    norm = (torch.ones(columns, dtype=pool.dtype, device=pool.device), EPSILON)
    few_rows_linear(x, weight, norm=norm)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        few_rows_linear(x, weight, norm=norm)
    spent = (time.perf_counter() - begin) / 200 * 1e6
    torch.cuda.synchronize()
    return spent
