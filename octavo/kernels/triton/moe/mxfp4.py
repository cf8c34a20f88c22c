"""The experts of a layer whose weights are MXFP4, on the tensor cores of compute capability 9: plan, gather, two products with the
gate in between, and a weighted sum. The host never waits for the device, and a captured graph serves every routing."""

from functools import cache
from typing import NamedTuple

import torch

from octavo.kernels.triton.moe.expert_plan import plan_blocks
from octavo.kernels.triton.moe.experts import combine
from octavo.kernels.triton.moe.gather import gather
from octavo.kernels.triton.moe.mxfp4_layout import Mxfp4Tensor
from octavo.kernels.triton.runtime.batch_sizes import captured_size
from octavo.kernels.triton.runtime.chip import is_hopper, starts_early
from octavo.kernels.triton.runtime.launch import knows_gluon

TileNumbers = tuple[int, int, int, int, int, int]  # mxfp4_hopper.Tile, which needs Gluon


class Choice(NamedTuple):
    """Tiles of the two products: they share their rows."""

    gate_up: TileNumbers
    down: TileNumbers


@cache
def can_run(device: torch.device) -> bool:
    """Whether these kernels run here."""
    return is_hopper(device) and knows_gluon()


@cache
def choose(num_tokens: int, num_chosen: int, num_experts: int, is_fixed: bool) -> Choice:
    """The fastest measured by `benchmarks/kernels/experts.py` on an H200 for gpt-oss-20b, by the average number of rows per expert.
    is_fixed: no two programs share K, so that a row's bits do not depend on the number of rows."""
    num_tokens = captured_size(num_tokens)
    rows = num_tokens * num_chosen / num_experts
    if num_tokens == 1:
        return Choice((8, 8, 1, 1, 8, 3), (8, 8, 1, 1 if is_fixed else 2, 8, 3))
    if rows <= 3:
        return Choice((8, 8, 1, 1, 8, 3), (8, 8, 1, 1, 8, 3))
    if rows <= 10:
        return Choice((16, 16, 1, 1, 8, 3), (16, 16, 1, 1, 8, 3))
    if rows <= 24:
        return Choice((32, 32, 1, 1, 8, 2), (32, 32, 1, 1, 8, 2))
    if rows <= 48:
        return Choice((64, 64, 1, 1, 5, 2), (64, 64, 1, 1, 5, 2))
    if rows <= 400:
        return Choice((128, 64, 2, 1, 5, 1), (128, 64, 2, 1, 5, 1))
    return Choice((256, 64, 2, 1, 3, 1), (256, 64, 2, 1, 3, 1))


def mxfp4_experts(
    x: torch.Tensor,  # [T, D] bfloat16
    logits: torch.Tensor,  # [T, E], of all experts
    num_chosen: int,
    is_normalised: bool,
    gate_up: Mxfp4Tensor,  # [E, 2 I, D] interleaved
    down: Mxfp4Tensor,  # [E, D, I]
    biases: tuple[torch.Tensor | None, torch.Tensor | None],  # [E, 2 I]: gate, then up; [E, D]
    gate: tuple[float, float, float],  # as of `experts`
    residual: torch.Tensor | None,  # [T, D], changed and returned
    held: tuple[int, int]
    | None = None,  # the first of the experts whose weights these are, and their number; None: all
    is_fixed: bool = False,
    choice: Choice | None = None,
) -> torch.Tensor:
    """(residual +) the weighted sum of the outputs of each token's experts, [T, D]. Sums are float32, rounded once per
    product."""
    from octavo.kernels.triton.moe.mxfp4_hopper import Tile, product  # needs Gluon

    num_tokens, depth = x.shape
    inner_size = gate_up.num_outputs // 2
    assert gate_up.num_columns == down.num_outputs == depth and down.num_columns == inner_size
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    y = torch.empty((num_tokens, depth), dtype=x.dtype, device=x.device) if residual is None else residual
    if num_tokens == 0:
        return y
    choice = choice or choose(num_tokens, num_chosen, logits.shape[1], is_fixed)
    tiles = Tile(*choice.gate_up), Tile(*choice.down)
    assert tiles[0].rows == tiles[1].rows
    plan = plan_blocks(logits, num_chosen, is_normalised, tiles[0].rows, pdl=True)
    if held is not None:
        plan = plan.part(*held)
    num_pairs, processors = len(plan.order), num_processors(x.device)
    # Kernels of torch do not wait for those before them, so that what follows them may not start early.
    is_chain = held is None and starts_early(x.device)
    x = gather(x, plan.order, num_chosen, is_chain) if num_tokens > 1 else x.contiguous()
    inner = torch.empty((num_pairs, inner_size), dtype=x.dtype, device=x.device)
    pairs = (torch.zeros if plan.is_part else torch.empty)((num_pairs, depth), dtype=x.dtype, device=x.device)
    product(
        x, gate_up, inner, plan.order, plan.blocks, biases[0], gate, tiles[0], processors,
        is_chain and num_tokens > 1, is_chain,
    )  # fmt: skip
    product(inner, down, pairs, plan.order, plan.blocks, biases[1], None, tiles[1], processors, is_chain, is_chain)
    combine(pairs, plan.weights, residual, y, num_chosen, is_chain)
    return y


@cache
def num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
