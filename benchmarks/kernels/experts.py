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
from octavo.kernels.triton.moe import mxfp4_hopper, mxfp4_layout
from octavo.kernels.triton.moe.expert_plan import ExpertPlan, Tiles, fitting, plan_blocks, plan_experts
from octavo.kernels.triton.moe.experts import ExpertTensors, combine, experts
from octavo.kernels.triton.moe.gather import gather
from octavo.kernels.triton.moe.mxfp4 import Choice, choose, mxfp4_experts
from octavo.kernels.triton.moe.mxfp4_hopper import Tile

PROCESSORS = 132
FLOPS = 665e12
PACKED_BYTES = 0.53125


class Model(NamedTuple):
    name: str
    num: int
    chosen: int
    depth: int
    inner: int
    is_packed: bool
    gate: tuple[float, float, float]


MODELS = {
    "gpt-oss-20b": Model("gpt-oss-20b", 32, 4, 2880, 2880, True, (1.702, 7.0, 1.0)),
    "qwen3-30b-a3b": Model("qwen3-30b-a3b", 128, 8, 2048, 768, False, (1.0, 0.0, 0.0)),
}

# Rows of a tile → tiles to time, for gate_up and for down.
PACKED: dict[int, list[Tile]] = {
    1: [
        Tile(8, 8, 1, 1, 8, 3), Tile(8, 8, 1, 2, 8, 3), Tile(8, 8, 1, 4, 6, 4), Tile(8, 8, 1, 1, 12, 2), Tile(8, 8, 2, 2, 8, 2),
        Tile(16, 16, 1, 1, 8, 3), Tile(16, 16, 1, 2, 8, 3),
    ],
    8: [Tile(8, 8, 1, 1, 8, 3), Tile(8, 8, 2, 1, 8, 2), Tile(8, 8, 1, 1, 6, 4), Tile(16, 16, 1, 1, 8, 3)],
    64: [Tile(16, 16, 1, 1, 8, 3), Tile(16, 16, 2, 1, 8, 1), Tile(16, 16, 1, 1, 6, 4), Tile(16, 16, 2, 1, 6, 2), Tile(32, 32, 1, 1, 6, 2)],
    512: [Tile(64, 64, 1, 1, 5, 2), Tile(128, 64, 2, 1, 5, 1), Tile(128, 64, 1, 1, 3, 2), Tile(64, 64, 4, 1, 6, 1), Tile(64, 64, 2, 1, 8, 1)],
    8192: [Tile(256, 64, 2, 1, 3, 1), Tile(128, 64, 2, 1, 5, 1), Tile(128, 128, 4, 1, 4, 1)],
}  # fmt: skip


class Packed(NamedTuple):
    new: tuple[mxfp4_layout.Mxfp4Tensor, mxfp4_layout.Mxfp4Tensor]
    old: tuple[ExpertTensors, ExpertTensors]
    plain: tuple[torch.Tensor, torch.Tensor]  # [E, 2 I, D] and [E, D, I], bfloat16


def packed_weights(model: Model, num: int, device: str = "cuda") -> Packed:
    new, old, plain = [], [], []
    for rows, width, is_gate in ((2 * model.inner, model.depth, True), (model.depth, model.inner, False)):
        codes = torch.randint(0, 256, (num, rows, width // 2), device=device, dtype=torch.uint8)
        scales = torch.randint(118, 122, (num, rows, width // 32), device=device, dtype=torch.uint8)
        bias = torch.randn(num, rows, device=device).mul_(0.1).bfloat16()
        weight = mxfp4_layout.make_room(num, rows, width, torch.device(device), is_gate)
        decoded = torch.empty(num, rows, width, device=device, dtype=torch.bfloat16)
        for expert in range(num):
            mxfp4_layout.store(weight, expert, 0, codes[expert], scales[expert])
            decoded[expert] = mxfp4_layout.decode(weight, expert)
        new.append(weight)
        old.append(ExpertTensors(codes, scales, bias))
        plain.append(decoded)
    return Packed((new[0], new[1]), (old[0], old[1]), (plain[0], plain[1]))


def reference(
    model: Model, x: torch.Tensor, plan: ExpertPlan, tokens: list[int], plain: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None], residual: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The rows of some tokens in float32."""
    alpha, limit, offset = model.gate
    rows = []
    for token in tokens:
        y = residual[token].float()
        for expert, share in zip(plan.chosen[token].tolist(), plan.weights[token], strict=True):
            inner = F.linear(x[token].float(), plain[0][expert].float())
            if biases[0] is not None:
                inner += biases[0][expert].float()
            gate, up = inner.chunk(2)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out = F.linear(gate * torch.sigmoid(alpha * gate) * (up + offset), plain[1][expert].float())
            y = y + share * (out if biases[1] is None else out + biases[1][expert].float())
        rows.append(y)
    return torch.stack(rows)


def check_packed(model: Model, weights: Packed, tokens: int, choice: Choice) -> str:
    """ "": right. Two runs must give the same bits."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, model.depth, device="cuda").bfloat16()
    logits = torch.randn(tokens, model.num, device="cuda").bfloat16()
    residual = torch.randn_like(x)
    biases = weights.old[0].bias, weights.old[1].bias
    outs = [
        mxfp4_experts(
            x, logits, model.chosen, True, *weights.new, biases, model.gate, residual.clone(), choice=choice
        )
        for _ in range(3)
    ]  # fmt: skip
    some = torch.randperm(tokens)[:12].tolist()
    plan = plan_experts(logits, model.chosen, True, Tiles(64, 64, 64, 4, 3))
    expected = reference(model, x, plan, some, weights.plain, biases, residual)
    # The residual would hide errors.
    base = residual[some].float()
    error = timing.distance(outs[0][some].float() - base, expected - base)
    is_same = all(torch.equal(outs[0], out) for out in outs[1:])
    return "" if error < 1.5e-2 and is_same else f"WRONG: error {error:.2e}, the same three times: {is_same}"


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


def time_packed(model: Model, weights: Packed, tokens: int) -> None:
    some = loads(model, tokens)
    out = torch.zeros_like(some[0].x)
    biases = weights.old[0].bias, weights.old[1].bias
    reached = model.num * (1 - (1 - model.chosen / model.num) ** tokens)
    read = reached * model.depth * model.inner * PACKED_BYTES
    flops = 2 * tokens * model.chosen * model.depth * model.inner

    def limit(parts: int) -> float:
        return max(parts * read / timing.CEILING, parts * flops / FLOPS) * 1e6

    def old(load: Load) -> None:
        plan = plan_experts(load.logits, model.chosen, True, old_tiles(model, tokens))
        experts(load.x, plan, *weights.old, model.gate, out)

    def new(choice: Choice, load: Load) -> None:
        mxfp4_experts(load.x, load.logits, model.chosen, True, *weights.new, biases, model.gate, out, choice=choice)

    before = timing.microseconds([partial(old, load) for load in some], False)
    best: dict[bool, list[tuple[float, Tile]]] = {}
    for is_gate in (True, False):
        found = []
        for tile in PACKED[tokens]:
            try:
                found.append((time_product(model, weights, some, tile, is_gate), tile))
            except Exception as error:
                print("  failed", tokens, tuple(tile), f"{type(error).__name__}: {error}"[:200], flush=True)
        best[is_gate] = sorted(found)
        shown = "  ".join(f"{','.join(map(str, tile))} {us:.1f}" for us, tile in best[is_gate])
        print(f"  {'gate_up' if is_gate else 'down':8} limit {limit(2 if is_gate else 1):7.1f}  {shown}", flush=True)
    rows = sorted({tile.rows for tile in PACKED[tokens]})
    wholes: list[tuple[float, Choice]] = []
    choices = {choose(tokens, model.chosen, model.num, False)}
    for height in rows:
        pair = [next((tile for _, tile in best[is_gate] if tile.rows == height), None) for is_gate in (True, False)]
        if pair[0] is not None and pair[1] is not None:
            choices.add(Choice(tuple(pair[0]), tuple(pair[1])))
    for choice in choices:
        try:
            wrong = check_packed(model, weights, tokens, choice)
            us = timing.microseconds([partial(new, choice, load) for load in some], False)
            if wrong:
                print("  ", tokens, choice, wrong, flush=True)
            wholes.append((us if not wrong else float("inf"), choice))
        except Exception as error:
            print("  failed", tokens, choice, f"{type(error).__name__}: {error}"[:200], flush=True)
    wholes.sort(key=lambda item: item[0])
    us, choice = wholes[0]
    TABLE.append(f"{model.name:14}{tokens:6}  old {before:8.1f}  new {us:8.1f}  limit {limit(3):8.1f}  {choice}")
    print(TABLE[-1], flush=True)
    show_parts(model, some, tokens, choice.gate_up[0], out)


def show_parts(model: Model, some: list[Load], tokens: int, rows: int, out: torch.Tensor) -> None:
    plans = [plan_blocks(load.logits, model.chosen, True, rows) for load in some]
    pairs = torch.zeros(tokens * model.chosen, model.depth, device="cuda", dtype=torch.bfloat16)
    parts = {
        "plan": [partial(plan_blocks, load.logits, model.chosen, True, rows) for load in some],
        "gather": [
            partial(gather, load.x, plan.order, model.chosen, False) for load, plan in zip(some, plans, strict=True)
        ],
        "combine": [partial(combine, pairs, plan.weights, out, out, model.chosen, False) for plan in plans],
    }
    shown = "  ".join(f"{name} {timing.microseconds(calls, False):.1f}" for name, calls in parts.items())
    print(f"  {shown}", flush=True)


def time_product(model: Model, weights: Packed, some: list[Load], tile: Tile, is_gate: bool) -> float:
    weight, bias = weights.new[not is_gate], weights.old[not is_gate].bias
    calls: list[Callable[[], object]] = []
    for load in some:
        plan = plan_blocks(load.logits, model.chosen, True, tile.rows)
        x = gather(load.x, plan.order, model.chosen, False)
        if not is_gate:
            x = torch.randn(len(plan.order), model.inner, device="cuda").bfloat16()
        elif len(load.x) == 1:
            x = load.x
        out = torch.empty(len(plan.order), model.inner if is_gate else model.depth, device="cuda", dtype=torch.bfloat16)
        calls.append(
            partial(
                mxfp4_hopper.product, x, weight, out, plan.order, plan.blocks, bias, model.gate if is_gate else None,
                tile, PROCESSORS, False, False,
            )
        )  # fmt: skip
    return timing.microseconds(calls, False)


TABLE: list[str] = []


def compile_packed(model: Model, tokens: int, tile: Tile) -> None:
    """Compile one tile of both products, as the step launches it."""
    x = torch.zeros(tokens, model.depth, device="cuda", dtype=torch.bfloat16)
    logits = torch.zeros(tokens, model.num, device="cuda", dtype=torch.bfloat16)
    weights = [
        mxfp4_layout.make_room(1, rows, width, torch.device("cuda"), is_gate)
        for rows, width, is_gate in ((2 * model.inner, model.depth, True), (model.depth, model.inner, False))
    ]
    biases = (
        torch.zeros(1, 2 * model.inner, device="cuda").bfloat16(),
        torch.zeros(1, model.depth, device="cuda").bfloat16(),
    )
    mxfp4_experts(
        x, logits, model.chosen, True, weights[0], weights[1], biases, model.gate, torch.zeros_like(x),
        choice=Choice(tuple(tile), tuple(tile)),
    )  # fmt: skip
    plan = plan_blocks(logits, model.chosen, True, tile.rows)
    for is_gate in (True, False):
        width = model.depth if is_gate else model.inner
        y = torch.empty(len(plan.order), model.inner if is_gate else model.depth, device="cuda", dtype=torch.bfloat16)
        rows = 1 if is_gate and tokens == 1 else len(plan.order)
        mxfp4_hopper.product(
            torch.empty(rows, width, device="cuda", dtype=torch.bfloat16), weights[not is_gate], y, plan.order, plan.blocks,
            biases[not is_gate], model.gate if is_gate else None, tile, PROCESSORS, False, False,
        )  # fmt: skip


def compile_old(model: Model, tokens: int) -> None:
    x = torch.zeros(tokens, model.depth, device="cuda", dtype=torch.bfloat16)
    logits = torch.zeros(tokens, model.num, device="cuda", dtype=torch.bfloat16)
    sizes = (2 * model.inner, model.depth), (model.depth, model.inner)
    weights = [
        ExpertTensors(
            torch.zeros(1, rows, width // 2, device="cuda", dtype=torch.uint8),
            torch.zeros(1, rows, width // 32, device="cuda", dtype=torch.uint8),
            torch.zeros(1, rows, device="cuda", dtype=torch.bfloat16),
        )
        if model.is_packed
        else ExpertTensors(torch.zeros(1, rows, width, device="cuda", dtype=torch.bfloat16))
        for rows, width in sizes
    ]
    experts(x, plan_experts(logits, model.chosen, True, old_tiles(model, tokens)), *weights, model.gate, x)


def old_tiles(model: Model, tokens: int) -> Tiles | None:
    """As before there were other kernels; None: by the number of rows."""
    is_few = model.is_packed and tokens * model.chosen <= 16
    return fitting(Tiles(16, 32, 256, 4, 4), torch.bfloat16, torch.device("cuda", 0)) if is_few else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["gpt-oss-20b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 8192, 512, 1, 8])
    parser.add_argument("--seconds", type=float, default=150.0, help="starts nothing new after so many seconds")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    picked = [MODELS[name] for name in arguments.models]
    jobs = [
        partial(compile_packed, model, tokens, tile)
        for model in picked if model.is_packed for tokens in arguments.tokens for tile in PACKED[tokens]
    ]  # fmt: skip
    jobs += [partial(compile_old, model, tokens) for model in picked for tokens in arguments.tokens]
    timing.compile_all(jobs, chunksize=1)
    for model in picked:
        if model.is_packed:
            torch.manual_seed(1)
            weights = packed_weights(model, model.num)
            print(f"{timing.elapsed():.1f} s  weights made", flush=True)
            for tokens in arguments.tokens:
                if timing.elapsed() > arguments.seconds:
                    print("out of time")
                    break
                print(f"\n{timing.elapsed():.1f} s  {model.name}, {tokens} tokens", flush=True)
                try:
                    time_packed(model, weights, tokens)
                except Exception as error:
                    print("FAILED", tokens, f"{type(error).__name__}: {error}"[:1000], flush=True)
    print(f"\n{timing.elapsed():.1f} s; µs of a layer's experts, plan to sum")
    print("\n".join(TABLE), flush=True)


if __name__ == "__main__":
    main()
