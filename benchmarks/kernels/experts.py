"""Experts on a GPU of compute capability 9.0: checks every kernel against float32, then times the old kernels and the new ones
beside the limit, with uniform routing. `python -m benchmarks.kernels.experts [--models …] [--tokens …] [--seconds …]`

Times are of one call inside a CUDA graph of several, with other tokens and experts for each."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels import timing
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.moe import bf16_hopper, mxfp4_hopper, mxfp4_layout
from octavo.kernels.triton.moe.expert_plan import ExpertPlan, Tiles, fitting, plan_blocks, plan_experts
from octavo.kernels.triton.moe.experts import ExpertTensors, combine, experts
from octavo.kernels.triton.moe.gather import gather
from octavo.kernels.triton.moe.grouped import (
    MixedChoice,
    PackedChoice,
    PlainChoice,
    Routing,
    choose_packed,
    choose_plain,
    mixed_experts,
    packed_experts,
    packed_experts_of_few,
    plain_experts,
    plain_experts_of_few,
)
from octavo.kernels.triton.moe.mxfp4_layout import Mxfp4Tensor

PROCESSORS = 132
FLOPS = 665e12
Choice = PackedChoice | PlainChoice | MixedChoice
Tile = mxfp4_hopper.Tile | bf16_hopper.Tile


class Model(NamedTuple):
    name: str
    num: int
    chosen: int
    depth: int
    inner: int
    is_packed: bool
    gate: tuple[float, float, float]

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (2 * self.inner, self.depth), (self.depth, self.inner)


MODELS = {
    "gpt-oss-20b": Model("gpt-oss-20b", 32, 4, 2880, 2880, True, (1.702, 7.0, 1.0)),
    "qwen3-30b-a3b": Model("qwen3-30b-a3b", 128, 8, 2048, 768, False, (1.0, 0.0, 0.0)),
}

# Tokens of a step → tiles to time, for gate_up and for down.
PACKED: dict[int, list[tuple[int, ...]]] = {
    1: [(8, 8, 1, 1, 8, 3), (8, 8, 1, 2, 8, 3), (8, 8, 1, 4, 6, 4), (8, 8, 1, 1, 12, 2), (8, 8, 2, 2, 8, 2), (16, 16, 1, 1, 8, 3), (16, 16, 1, 2, 8, 3)],
    8: [(8, 8, 1, 1, 8, 3), (8, 8, 2, 1, 8, 2), (8, 8, 1, 1, 6, 4), (16, 16, 1, 1, 8, 3)],
    64: [(16, 16, 1, 1, 8, 3), (16, 16, 2, 1, 6, 2), (16, 16, 1, 1, 6, 4), (32, 32, 1, 1, 6, 2)],
    512: [(64, 64, 1, 1, 5, 2), (128, 64, 2, 1, 5, 1), (128, 64, 1, 1, 5, 1), (64, 64, 4, 1, 6, 1), (64, 64, 2, 1, 8, 1)],
    8192: [(256, 64, 2, 1, 3, 1), (128, 64, 2, 1, 5, 1), (128, 128, 4, 1, 4, 1)],
}  # fmt: skip
PLAIN: dict[int, list[tuple[int, ...]]] = {
    1: [],
    8: [],
    64: [(64, 128, 4, 2)],
    512: [(64, 128, 4, 2), (64, 256, 5, 1), (128, 256, 4, 1)],
    8192: [(128, 256, 4, 1), (128, 128, 6, 1), (64, 128, 4, 2)],
}


# Tiles of the kernels for few tokens: the first and, one after the other, with parts of it replaced.
FEW_PACKED: list[tuple[int, ...]] = [
    (4, 6, 168, 2, 3, 128), (4, 4, 128, 2, 3, 128), (4, 3, 128, 2, 3, 128), (8, 4, 128, 2, 3, 128), (2, 4, 128, 2, 3, 128), (1, 4, 128, 2, 3, 128),
    (4, 3, 96, 2, 3, 128), (4, 4, 128, 2, 4, 128), (4, 4, 128, 1, 4, 128), (4, 4, 128, 4, 2, 80),
    (4, 4, 128, 4, 3, 96), (4, 4, 128, 2, 2, 96),
]  # fmt: skip
FEW_PLAIN: list[tuple[int, ...]] = [
    (4, 3, 6, 8, 1, 16, 128, 128), (8, 3, 6, 8, 1, 16, 128, 128), (8, 3, 5, 8, 1, 16, 128, 128), (8, 2, 6, 8, 1, 16, 128, 128),
    (8, 1, 6, 8, 1, 16, 128, 128), (16, 3, 6, 8, 1, 16, 128, 128), (8, 6, 16, 8, 1, 16, 255, 128), (8, 3, 6, 8, 1, 24, 128, 128),
    (8, 3, 6, 8, 1, 12, 128, 128), (8, 3, 6, 4, 1, 12, 128, 80), (8, 3, 6, 16, 1, 40, 128, 255), (8, 3, 6, 8, 2, 8, 128, 64),
]  # fmt: skip


class Weights(NamedTuple):
    old: tuple[ExpertTensors, ExpertTensors]
    plain: tuple[torch.Tensor, torch.Tensor]  # [E, 2 I, D] and [E, D, I], bfloat16
    packed: tuple[Mxfp4Tensor, Mxfp4Tensor] | None

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.old[0].bias, self.old[1].bias


def make_weights(model: Model, num: int, device: str = "cuda") -> Weights:
    packed, old, plain = [], [], []
    for (rows, width), is_gate in zip(model.sizes, (True, False), strict=True):
        if not model.is_packed:
            plain.append(torch.empty(num, rows, width, device=device, dtype=torch.bfloat16).normal_(0, 0.02))
            old.append(ExpertTensors(plain[-1]))
            continue
        codes = torch.randint(0, 256, (num, rows, width // 2), device=device, dtype=torch.uint8)
        scales = torch.randint(118, 122, (num, rows, width // 32), device=device, dtype=torch.uint8)
        bias = torch.randn(num, rows, device=device).mul_(0.1).bfloat16()
        weight = mxfp4_layout.make_room(num, rows, width, torch.device(device), is_gate)
        decoded = torch.empty(num, rows, width, device=device, dtype=torch.bfloat16)
        for expert in range(num):
            mxfp4_layout.store(weight, expert, 0, codes[expert], scales[expert])
            decoded[expert] = mxfp4_layout.decode(weight, expert)
        packed.append(weight)
        old.append(ExpertTensors(codes, scales, bias))
        plain.append(decoded)
    return Weights((old[0], old[1]), (plain[0], plain[1]), (packed[0], packed[1]) if packed else None)


class Load(NamedTuple):
    x: torch.Tensor
    logits: torch.Tensor


def loads(model: Model, tokens: int) -> list[Load]:
    torch.manual_seed(tokens)
    return [
        Load(
            torch.randn(tokens, model.depth, device="cuda").bfloat16(),
            torch.randn(tokens, model.num, device="cuda").bfloat16(),
        )
        for _ in range(8 if tokens <= 512 else 2)
    ]


def run(model: Model, weights: Weights, load: Load, choice: Choice, residual: torch.Tensor) -> torch.Tensor:
    """A layer's experts by the new kernels."""
    routing = Routing(load.logits, model.chosen, True)
    if isinstance(choice, PackedChoice):
        assert weights.packed is not None
        return packed_experts(load.x, routing, *weights.packed, weights.biases, model.gate, residual, choice)
    if isinstance(choice, MixedChoice):
        return mixed_experts(load.x, routing, *weights.plain, weights.biases, model.gate, residual, choice)
    return plain_experts(load.x, routing, *weights.plain, weights.biases, model.gate, residual, choice)


def run_old(model: Model, weights: Weights, load: Load, residual: torch.Tensor) -> torch.Tensor:
    """As before there were other kernels."""
    tokens = len(load.x)
    is_few = model.is_packed and tokens * model.chosen <= 16
    tiles = fitting(Tiles(16, 32, 256, 4, 4), torch.bfloat16, load.x.device) if is_few else None
    plan = plan_experts(load.logits, model.chosen, True, tiles)
    return experts(load.x, plan, *weights.old, model.gate, residual)  # type: ignore[no-any-return]


def product(
    model: Model, weights: Weights, is_gate: bool, tile: Tile, x: torch.Tensor, out: torch.Tensor, plan: ExpertPlan
) -> None:
    which = 0 if is_gate else 1
    gate = model.gate if is_gate else None
    if isinstance(tile, mxfp4_hopper.Tile):
        assert weights.packed is not None
        mxfp4_hopper.product(
            x, weights.packed[which], out, plan.order, plan.blocks, weights.biases[which], gate, tile, PROCESSORS, False, False
        )  # fmt: skip
    else:
        bf16_hopper.product(
            x, weights.plain[which], out, plan.order, plan.blocks, weights.biases[which], gate, tile, PROCESSORS, False, False
        )  # fmt: skip


def tiles_of(model: Model, tokens: int) -> list[Tile]:
    if model.is_packed:
        return [mxfp4_hopper.Tile(*numbers) for numbers in PACKED[tokens]]
    return [bf16_hopper.Tile(*numbers) for numbers in PLAIN[tokens]]


def choice_of(gate_up: Tile, down: Tile) -> Choice:
    if isinstance(gate_up, mxfp4_hopper.Tile) and isinstance(down, mxfp4_hopper.Tile):
        return PackedChoice(tuple(gate_up), tuple(down))
    assert isinstance(gate_up, bf16_hopper.Tile) and isinstance(down, bf16_hopper.Tile)
    return PlainChoice(tuple(gate_up), tuple(down))


# ── correctness ─────────────────────────────────────────────────────────────────────────────────────


def reference(model: Model, weights: Weights, load: Load, tokens: list[int]) -> torch.Tensor:
    """The weighted sums of some tokens in float32."""
    alpha, limit, offset = model.gate
    plan = plan_experts(load.logits, model.chosen, True, Tiles(64, 64, 64, 4, 3))
    rows = []
    for token in tokens:
        y = torch.zeros(model.depth, device=load.x.device)
        for expert, share in zip(plan.chosen[token].tolist(), plan.weights[token], strict=True):
            inner = F.linear(load.x[token].float(), weights.plain[0][expert].float())
            if weights.biases[0] is not None:
                inner += weights.biases[0][expert].float()
            gate, up = inner.chunk(2)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out = F.linear(gate * torch.sigmoid(alpha * gate) * (up + offset), weights.plain[1][expert].float())
            y += share * (out if weights.biases[1] is None else out + weights.biases[1][expert].float())
        rows.append(y)
    return torch.stack(rows)


def wrong(model: Model, weights: Weights, load: Load, choice: Choice) -> str:
    """ "": right, and three runs give the same bits."""
    residual = torch.zeros_like(load.x)
    outs = [run(model, weights, load, choice, residual.clone()) for _ in range(3)]
    some = torch.randperm(len(load.x))[:12].tolist()
    error = timing.distance(outs[0][some], reference(model, weights, load, some))
    old = timing.distance(outs[0], run_old(model, weights, load, residual.clone()))
    is_same = all(torch.equal(outs[0], out) for out in outs[1:])
    is_right = error < 1.2e-2 and old < 1.5e-2 and is_same  # NaN is wrong
    return "" if is_right else f"WRONG: error {error:.2e}, against the old {old:.2e}, three times the same: {is_same}"


# ── time ────────────────────────────────────────────────────────────────────────────────────────────

TABLE: list[str] = []


def time_product(model: Model, weights: Weights, some: list[Load], tile: Tile, is_gate: bool) -> float:
    calls: list[Callable[[], object]] = []
    for load in some:
        plan = plan_blocks(load.logits, model.chosen, True, tile.rows)
        x = gather(load.x, plan.places, model.chosen, False)
        if not is_gate:
            x = torch.randn(len(plan.order), model.inner, device="cuda").bfloat16()
        elif len(load.x) == 1 and model.is_packed:
            x = load.x
        width = model.inner if is_gate else model.depth
        out = torch.empty(len(plan.order), width, device="cuda", dtype=torch.bfloat16)
        calls.append(partial(product, model, weights, is_gate, tile, x, out, plan))
    return timing.microseconds(calls, False)


def time_tokens(model: Model, weights: Weights, tokens: int) -> None:
    some = loads(model, tokens)
    out = torch.zeros_like(some[0].x)
    reached = model.num * (1 - (1 - model.chosen / model.num) ** tokens)
    read = reached * model.depth * model.inner * (0.53125 if model.is_packed else 2)
    flops = 2 * tokens * model.chosen * model.depth * model.inner

    def limit(parts: int) -> float:
        return max(parts * read / timing.CEILING, parts * flops / FLOPS) * 1e6

    before = timing.microseconds([partial(run_old, model, weights, load, out) for load in some], False)
    TABLE.append(f"{model.name:14}{tokens:6}  limit {limit(3):7.1f}  old {before:7.1f}")
    print(TABLE[-1], flush=True)
    chosen = (
        choose_packed(tokens, model.chosen, model.num, False)
        if model.is_packed
        else choose_plain(tokens, model.chosen, model.num)
    )
    choices: set[Choice] = {chosen} if chosen is not None else set()
    best: dict[bool, list[tuple[float, Tile]]] = {}
    for is_gate in (True, False):
        found: list[tuple[float, Tile]] = []
        for tile in tiles_of(model, tokens):
            try:
                found.append((time_product(model, weights, some, tile, is_gate), tile))
            except Exception as error:
                print("  failed", tokens, tuple(tile), f"{type(error).__name__}: {error}"[:200], flush=True)
        best[is_gate] = sorted(found, key=lambda item: item[0])
        shown = "  ".join(f"{','.join(map(str, tile))}: {us:.1f}" for us, tile in best[is_gate])
        print(f"  {'gate_up' if is_gate else 'down':8} limit {limit(2 if is_gate else 1):7.1f}   {shown}", flush=True)
    for height in sorted({tile.rows for _, tile in best[True]}):
        pair = [next((tile for _, tile in best[is_gate] if tile.rows == height), None) for is_gate in (True, False)]
        if pair[0] is not None and pair[1] is not None:
            choices.add(choice_of(pair[0], pair[1]))
    wholes: list[tuple[float, Choice]] = []
    for choice in choices:
        try:
            fault = wrong(model, weights, some[0], choice)
            us = timing.microseconds([partial(run, model, weights, load, choice, out) for load in some], False)
            if fault:
                print("  ", tuple(choice), f"{us:.1f}", fault, flush=True)
            else:
                wholes.append((us, choice))
        except Exception as error:
            print("  failed", tuple(choice), f"{type(error).__name__}: {error}"[:300], flush=True)
    wholes.sort(key=lambda item: item[0])
    for us, choice in wholes:
        print(f"  whole {us:.1f}  {tuple(choice)}", flush=True)
    TABLE[-1] += f"  new {wholes[0][0]:7.1f}  {tuple(wholes[0][1])}" if wholes else "  nothing new is right"
    print(TABLE[-1], flush=True)
    show_parts(model, some, out, wholes[0][1].gate_up[0] if wholes else 16)


def show_parts(model: Model, some: list[Load], out: torch.Tensor, rows: int) -> None:
    plans = [plan_blocks(load.logits, model.chosen, True, rows) for load in some]
    pairs = torch.zeros(len(out) * model.chosen, model.depth, device="cuda", dtype=torch.bfloat16)
    parts: dict[str, list[Callable[[], object]]] = {
        "plan": [partial(plan_blocks, load.logits, model.chosen, True, rows) for load in some],
        "gather": [partial(gather, load.x, plan.places, model.chosen, False) for load, plan in zip(some, plans, strict=True)],
        "combine": [partial(combine, pairs, plan.weights, out, out, model.chosen, False) for plan in plans],
    }  # fmt: skip
    print(
        "  " + "  ".join(f"{name} {timing.microseconds(calls, False):.1f}" for name, calls in parts.items()), flush=True
    )


# ── few tokens ──────────────────────────────────────────────────────────────────────────────────────


class Around(NamedTuple):
    """What is before the experts, and in the same launches for few tokens."""

    norm: torch.Tensor
    router: torch.Tensor
    bias: torch.Tensor | None


def make_around(model: Model) -> Around:
    router = torch.randn(model.num, model.depth, device="cuda").mul_(0.02).bfloat16()
    bias = torch.zeros(model.num, device="cuda", dtype=torch.bfloat16) if model.is_packed else None
    return Around(torch.ones(model.depth, device="cuda", dtype=torch.bfloat16), router, bias)


def layer_of_few(
    model: Model, weights: Weights, around: Around, x: torch.Tensor, tiles: tuple[int, ...]
) -> torch.Tensor:
    """Norm, router and experts by the kernels for few tokens: x is changed."""
    before = ((around.norm, 1e-6), (around.router, around.bias))
    if model.is_packed:
        assert weights.packed is not None
        return packed_experts_of_few(x, *before, model.chosen, True, *weights.packed, weights.biases, model.gate, tiles)  # type: ignore[arg-type]
    return plain_experts_of_few(x, *before, model.chosen, True, *weights.plain, weights.biases, model.gate, tiles)  # type: ignore[arg-type]


def layer_one_by_one(model: Model, weights: Weights, around: Around, x: torch.Tensor) -> torch.Tensor:
    """The same by a launch for each, as for more tokens."""
    normed = rms_norm(x, around.norm, 1e-6, pdl=True)
    load = Load(normed, F.linear(normed, around.router, around.bias))
    if model.is_packed:
        return run(model, weights, load, choose_packed(len(x), model.chosen, model.num, False), x)
    return run_old(model, weights, load, x)


def time_few(model: Model, weights: Weights, tokens: int) -> None:
    around = make_around(model)
    some = [load.x for load in loads(model, tokens)]
    x = some[0].clone()
    normed = rms_norm(x, around.norm, 1e-6)
    wanted = x.float() + reference(
        model, weights, Load(normed, F.linear(normed, around.router, around.bias)), [*range(tokens)]
    )
    before = timing.microseconds([partial(layer_one_by_one, model, weights, around, x.clone()) for x in some], False)
    old = timing.distance(layer_one_by_one(model, weights, around, x.clone()), wanted)
    print(f"  one by one {before:.1f}, error {old:.1e}", flush=True)
    found: list[tuple[float, tuple[int, ...]]] = []
    for tiles in FEW_PACKED if model.is_packed else FEW_PLAIN:
        try:
            outs = [layer_of_few(model, weights, around, x.clone(), tiles) for _ in range(3)]
            error, is_same = timing.distance(outs[0], wanted), all(torch.equal(outs[0], out) for out in outs)
            us = timing.microseconds(
                [partial(layer_of_few, model, weights, around, x.clone(), tiles) for x in some], False
            )
            print(f"  {us:6.1f}  {tiles}  error {error:.1e}{'' if is_same else '  NOT THE SAME'}", flush=True)
            if error < max(5e-3, 1.5 * old) and is_same:
                found.append((us, tiles))
        except Exception as error:
            print("  failed", tiles, f"{type(error).__name__}: {error}"[:300], flush=True)
    best = min(found) if found else None
    TABLE.append(f"{model.name:14}{tokens:6}  from norm to sum: one by one {before:7.1f}  few {best}")
    print(TABLE[-1], flush=True)


def compile_few(model: Model, tokens: int, tiles: tuple[int, ...] | None) -> None:
    x = torch.zeros(tokens, model.depth, device="cuda", dtype=torch.bfloat16)
    around, weights = make_around(model), small_weights(model)
    if tiles is None:
        layer_one_by_one(model, weights, around, x)
    else:
        layer_of_few(model, weights, around, x, tiles)


# ── compilation ─────────────────────────────────────────────────────────────────────────────────────


def small_weights(model: Model) -> Weights:
    """One expert's: sizes that are compiled into kernels are right."""
    plain = [torch.zeros(1, *size, device="cuda", dtype=torch.bfloat16) for size in model.sizes]
    if not model.is_packed:
        return Weights((ExpertTensors(plain[0]), ExpertTensors(plain[1])), (plain[0], plain[1]), None)
    packed = [
        mxfp4_layout.make_room(1, *size, torch.device("cuda"), is_gate)
        for size, is_gate in zip(model.sizes, (True, False), strict=True)
    ]
    old = [
        ExpertTensors(
            torch.zeros(1, rows, width // 2, device="cuda", dtype=torch.uint8),
            torch.zeros(1, rows, width // 32, device="cuda", dtype=torch.uint8),
            torch.zeros(1, rows, device="cuda", dtype=torch.bfloat16),
        )
        for rows, width in model.sizes
    ]
    return Weights((old[0], old[1]), (plain[0], plain[1]), (packed[0], packed[1]))


def compile_one(model: Model, tokens: int, tile: Tile | None) -> None:
    """Compile one tile of both products, as a step and time_product launch it; None: the old kernels and the small ones."""
    load = Load(
        torch.zeros(tokens, model.depth, device="cuda", dtype=torch.bfloat16),
        torch.zeros(tokens, model.num, device="cuda", dtype=torch.bfloat16),
    )
    weights = small_weights(model)
    if tile is None:
        run_old(model, weights, load, torch.zeros_like(load.x))
        plan = plan_blocks(load.logits, model.chosen, True, 16)
        gather(load.x, plan.places, model.chosen, False)
        pairs = torch.zeros(tokens * model.chosen, model.depth, device="cuda", dtype=torch.bfloat16)
        combine(pairs, plan.weights, load.x, load.x, model.chosen, False)
        return
    run(model, weights, load, choice_of(tile, tile), torch.zeros_like(load.x))
    plan = plan_blocks(load.logits, model.chosen, True, tile.rows)
    for is_gate in (True, False):
        width, n = (model.depth, model.inner) if is_gate else (model.inner, model.depth)
        out = torch.empty(len(plan.order), n, device="cuda", dtype=torch.bfloat16)
        rows = 1 if is_gate and tokens == 1 and model.is_packed else len(plan.order)
        x = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
        product(model, weights, is_gate, tile, x, out, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="*", choices=sorted(PACKED), default=[64, 8192, 512, 1, 8])
    parser.add_argument("--few", type=int, nargs="*", default=[1, 2, 4], help="tokens, for the kernels for few of them")
    parser.add_argument("--seconds", type=float, default=140.0, help="start nothing new after so many seconds")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    picked = [MODELS[name] for name in arguments.models]
    jobs: list[Callable[[], object]] = [
        partial(compile_one, model, tokens, tile)
        for model in picked
        for tokens in arguments.tokens
        for tile in [None, *tiles_of(model, tokens)]
    ]
    jobs += [
        partial(compile_few, model, tokens, tiles)
        for model in picked
        for tokens in arguments.few
        for tiles in [None, *(FEW_PACKED if model.is_packed else FEW_PLAIN)]
    ]
    timing.compile_all(jobs, chunksize=1)
    for model in picked:
        torch.manual_seed(1)
        weights = make_weights(model, model.num)
        print(f"{timing.elapsed():.1f} s  weights of {model.name}", flush=True)
        for tokens in arguments.few:
            print(f"\n{timing.elapsed():.1f} s  {model.name}, {tokens} tokens", flush=True)
            time_few(model, weights, tokens)
        for tokens in arguments.tokens:
            if timing.elapsed() > arguments.seconds:
                print("out of time")
                break
            print(f"\n{timing.elapsed():.1f} s  {model.name}, {tokens} tokens", flush=True)
            try:
                time_tokens(model, weights, tokens)
            except Exception as error:
                print("FAILED", tokens, f"{type(error).__name__}: {error}"[:1000], flush=True)
        del weights
        torch.cuda.empty_cache()
    print(f"\n{timing.elapsed():.1f} s; µs of a layer's experts, from plan to sum")
    print("\n".join(TABLE), flush=True)


if __name__ == "__main__":
    main()
