"""The experts of a layer on the tensor cores of compute capability 9: plan, gather, two products with the gate in between, and a
weighted sum. The host never waits for the device, and a captured graph serves every routing."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch

from octavo.kernels.triton.moe.expert_plan import Tiles, plan_blocks
from octavo.kernels.triton.moe.experts import ExpertTensors, combine, gate_up_product
from octavo.kernels.triton.moe.few_route import route
from octavo.kernels.triton.moe.gather import gather
from octavo.kernels.triton.moe.mxfp4_layout import Mxfp4Tensor
from octavo.kernels.triton.runtime.batch_sizes import captured_size, ladder
from octavo.kernels.triton.runtime.chip import is_hopper, starts_early
from octavo.kernels.triton.runtime.launch import knows_gluon

# FewTiles of bf16_few and PackedFewTiles of mxfp4_few: those files need Gluon.
PlainFewTile = tuple[int, int, int, int, int, int, int, int]
PackedFewTile = tuple[int, int, int, int, int, int]
PackedTile = tuple[int, int, int, int, int, int]  # mxfp4_hopper.Tile: that file needs Gluon
PlainTile = tuple[int, int, int, int]  # bf16_hopper.Tile
Gate = tuple[float, float, float]  # as of `experts`


class PackedChoice(NamedTuple):
    """Tiles of the two products: they share their rows."""

    gate_up: PackedTile
    down: PackedTile


class PlainChoice(NamedTuple):
    gate_up: PlainTile
    down: PlainTile


class MixedChoice(NamedTuple):
    """Gate and up by a kernel in plain Triton, which fetches rows by their index; down from rows in the order of places."""

    gate_up: Tiles
    down: PlainTile


class Routing(NamedTuple):
    logits: torch.Tensor  # [T, E], of all experts
    num_chosen: int
    is_normalised: bool
    held: tuple[int, int] | None = None  # the first of the experts whose weights are here, and their number; None: all


class Product(Protocol):
    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor, *, is_early: bool, pdl: bool
    ) -> None: ...  # fmt: skip


@cache
def can_run(device: torch.device) -> bool:
    """Whether these kernels run here."""
    return is_hopper(device) and knows_gluon()


@cache
def choose_packed(num_tokens: int, num_chosen: int, num_experts: int, is_fixed: bool) -> PackedChoice:
    """The fastest of those that `benchmarks/kernels/experts.py` measured on an H200 for gpt-oss-20b, by the average number of rows
    per expert. Few kinds, because each is compiled. is_fixed: no two programs share K, so that a row's bits do not depend on the number
    of rows."""
    num_tokens = captured_size(num_tokens)
    rows = num_tokens * num_chosen / num_experts
    if num_tokens == 1:
        return PackedChoice((8, 8, 1, 1, 8, 3), (8, 8, 1, 1 if is_fixed else 2, 8, 3))
    if rows <= 3:
        return PackedChoice((8, 8, 1, 1, 6, 4), (8, 8, 1, 1, 6, 4))
    if rows <= 10:
        return PackedChoice((16, 16, 1, 1, 6, 4), (16, 16, 1, 1, 6, 4))
    if rows <= 24:
        return PackedChoice((32, 32, 1, 1, 6, 2), (32, 32, 1, 1, 6, 2))
    if rows <= 400:
        return PackedChoice((128, 64, 2, 1, 5, 1), (128, 64, 2, 1, 5, 1))
    return PackedChoice((256, 64, 2, 1, 3, 1), (256, 64, 2, 1, 3, 1))


@cache
def choose_plain(num_tokens: int, num_chosen: int, num_experts: int) -> PlainChoice | MixedChoice | None:
    """As choose_packed, for Qwen3-30B-A3B. None: the kernels in plain Triton."""
    rows = captured_size(num_tokens) * num_chosen / num_experts
    if rows <= 4:
        return None
    if rows <= 32:
        gate_up = Tiles(32, 64, 128, 4, 3) if rows <= 16 else Tiles(64, 64, 64, 4, 3)
        return MixedChoice(gate_up, (64, 128, 4, 2))
    return PlainChoice((128, 256, 4, 1), (128, 256, 4, 1))


_MOST_RANKED = 128  # experts, each of whose keys every program compares with all others


@cache
def choose_few_plain(
    num_tokens: int, num_chosen: int, num_experts: int, depth: int, inner_size: int
) -> PlainFewTile | None:
    """For so few tokens that most experts serve one: the tiles of `bf16_few`, as measured for Qwen3-30B-A3B. None: too many tokens, or another
    kind of shape."""
    if (
        captured_size(num_tokens) > 4
        or num_experts > _MOST_RANKED
        or not 4 < num_chosen <= 8
        or depth > 2048
        or inner_size > 1024
    ):
        return None
    return 4, 3, 6, 8, 1, 16, 128, 128


@cache
def choose_few_packed(
    num_tokens: int, num_chosen: int, num_experts: int, depth: int, inner_size: int
) -> PackedFewTile | None:
    """The same of `mxfp4_few`, as measured for gpt-oss-20b."""
    if (
        captured_size(num_tokens) > 2
        or num_experts > _MOST_RANKED
        or num_chosen != 4
        or min(depth, inner_size) < 2048
        or inner_size % 32
    ):
        return None
    return 4, 6, 168, 2, 3, 128


def row_counts(choose: Callable[[int], object], max_rows: int) -> list[int]:
    """Numbers of rows that together meet every choice for up to max_rows rows."""
    first: dict[object, int] = {}
    for count in ladder(max_rows):
        first.setdefault(choose(count), count)
    return list(first.values())


def packed_experts(
    x: torch.Tensor,  # [T, D] bfloat16
    routing: Routing,
    gate_up: Mxfp4Tensor,  # [E, 2 I, D] interleaved
    down: Mxfp4Tensor,  # [E, D, I]
    biases: tuple[torch.Tensor | None, torch.Tensor | None],  # [E, 2 I]: gate, then up; [E, D]
    gate: Gate,
    residual: torch.Tensor | None,  # [T, D], changed and returned
    choice: PackedChoice,
) -> torch.Tensor:
    """(residual +) the weighted sum of the outputs of each token's experts, [T, D]. Sums are float32, rounded once per
    product."""
    from octavo.kernels.triton.moe.mxfp4_hopper import Tile, product  # needs Gluon

    assert gate_up.num_columns == down.num_outputs == x.shape[1] and down.num_columns * 2 == gate_up.num_outputs
    first, second = Tile(*choice.gate_up), Tile(*choice.down)
    assert first.rows == second.rows
    processors = num_processors(x.device)
    products = (
        partial(product, weight=gate_up, bias=biases[0], gate=gate, tile=first, num_processors=processors),
        partial(product, weight=down, bias=biases[1], gate=None, tile=second, num_processors=processors),
    )
    return _experts(x, routing, down.num_columns, first.rows, products, residual, len(x) > 1)


def plain_experts(
    x: torch.Tensor,  # [T, D]
    routing: Routing,
    gate_up: torch.Tensor,  # [E, 2 I, D]: gate, then up
    down: torch.Tensor,  # [E, D, I]
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    gate: Gate,
    residual: torch.Tensor | None,
    choice: PlainChoice,
) -> torch.Tensor:
    """packed_experts for weights of 16 bits."""
    from octavo.kernels.triton.moe.bf16_hopper import Tile, product  # needs Gluon

    first, second = Tile(*choice.gate_up), Tile(*choice.down)
    assert first.rows == second.rows
    processors = num_processors(x.device)
    products = (
        partial(product, weight=gate_up, bias=biases[0], gate=gate, tile=first, num_processors=processors),
        partial(product, weight=down, bias=biases[1], gate=None, tile=second, num_processors=processors),
    )
    return _experts(x, routing, down.shape[2], first.rows, products, residual, True)


def plain_experts_of_few(
    x: torch.Tensor,  # [T, D] bfloat16, changed and returned
    norm: tuple[torch.Tensor, float],  # weight [D] and epsilon of an RMSNorm
    router: tuple[torch.Tensor, torch.Tensor | None],  # [E, D], [E]
    num_chosen: int,
    is_normalised: bool,
    gate_up: torch.Tensor,  # [E, 2 I, D]: gate, then up
    down: torch.Tensor,  # [E, D, I]
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    gate: Gate,
    choice: PlainFewTile,
) -> torch.Tensor:
    """x + the weighted sum of the outputs of each token's experts, of norm(x), from norm to sum in three launches."""
    from octavo.kernels.triton.moe.bf16_few import FewTiles, bf16_few  # needs Gluon

    routed = route(x, norm, *router, x.shape[1], False)
    return bf16_few(routed, num_chosen, is_normalised, gate_up, down, biases, gate, x, FewTiles(*choice))


def packed_experts_of_few(
    x: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    router: tuple[torch.Tensor, torch.Tensor | None],
    num_chosen: int,
    is_normalised: bool,
    gate_up: Mxfp4Tensor,  # [E, 2 I, D] interleaved
    down: Mxfp4Tensor,  # [E, D, I]
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    gate: Gate,
    choice: PackedFewTile,
) -> torch.Tensor:
    """plain_experts_of_few for MXFP4."""
    from octavo.kernels.triton.moe.mxfp4_few import X_SCALE, PackedFewTiles, mxfp4_few, width_for  # needs Gluon

    routed = route(x, norm, *router, width_for(x.shape[1], 1), True, X_SCALE)
    return mxfp4_few(routed, num_chosen, is_normalised, gate_up, down, biases, gate, x, PackedFewTiles(*choice))


def mixed_experts(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    gate: Gate,
    residual: torch.Tensor | None,
    choice: MixedChoice,
) -> torch.Tensor:
    """plain_experts without rows that are copied first."""
    from octavo.kernels.triton.moe.bf16_hopper import Tile, product  # needs Gluon

    num_tokens, depth = x.shape
    tiles, tile = choice.gate_up, Tile(*choice.down)
    assert tiles.block_m <= tile.rows and x.stride(1) == 1
    y = torch.empty((num_tokens, depth), dtype=x.dtype, device=x.device) if residual is None else residual
    if num_tokens == 0:
        return y
    plan = plan_blocks(routing.logits, routing.num_chosen, routing.is_normalised, tiles.block_m, pdl=True)
    if routing.held is not None:
        plan = plan.part(*routing.held)
    pdl = routing.held is None and starts_early(x.device)
    inner = gate_up_product(x, plan, ExpertTensors(gate_up, None, biases[0]), gate, tiles, pdl)
    pairs = (torch.zeros if plan.is_part else torch.empty)((len(plan.order), depth), dtype=x.dtype, device=x.device)
    processors = num_processors(x.device)
    product(inner, down, pairs, plan.order, plan.blocks, biases[1], None, tile, processors, is_early=pdl, pdl=pdl)
    combine(pairs, plan.weights, residual, y, routing.num_chosen, pdl)
    return y


def _experts(
    x: torch.Tensor,
    routing: Routing,
    inner_size: int,
    block_m: int,
    products: tuple[Product, Product],
    residual: torch.Tensor | None,
    gathers: bool,
) -> torch.Tensor:
    num_tokens, depth = x.shape
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    y = torch.empty((num_tokens, depth), dtype=x.dtype, device=x.device) if residual is None else residual
    if num_tokens == 0:
        return y
    num_chosen = routing.num_chosen
    plan = plan_blocks(routing.logits, num_chosen, routing.is_normalised, block_m, pdl=True)
    if routing.held is not None:
        plan = plan.part(*routing.held)
    # torch's kernels do not wait for those before them, so what follows them may not start early.
    pdl = routing.held is None and starts_early(x.device)
    rows = gather(x, plan.places, num_chosen, pdl) if gathers else x.contiguous()
    inner = torch.empty((len(plan.order), inner_size), dtype=x.dtype, device=x.device)
    pairs = (torch.zeros if plan.is_part else torch.empty)(
        (len(plan.order), depth), dtype=x.dtype, device=x.device
    )  # fmt: skip
    products[0](x=rows, out=inner, order=plan.order, blocks=plan.blocks, is_early=pdl and gathers, pdl=pdl)
    products[1](x=inner, out=pairs, order=plan.order, blocks=plan.blocks, is_early=pdl, pdl=pdl)
    combine(pairs, plan.weights, residual, y, num_chosen, pdl)
    return y


@cache
def num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
