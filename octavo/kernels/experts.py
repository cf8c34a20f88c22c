"""Experts on a GPU: tokens are sent to those their logits choose, and all experts' products run in two launches.
Knows nothing of layers or ranks: tensors in, tensors out, nothing waits for the device.

Pairs of a token and an expert are sorted by expert and cut into blocks of rows of one expert, all on the device. How many
blocks are launched depends on the number of tokens alone; those that are not needed end at once. So one captured graph
serves a step whoever is sent where. Each pair's result is stored by itself and added up in a fixed order."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.kernels.launch import Launcher

FIELDS = tl.constexpr(
    4
)  # int32 numbers of a block, of which three are used: expert, its first place, its number of rows
_AT_ONCE = tl.constexpr(1024)  # pairs that a program looks at together


class Tiles(NamedTuple):
    """How the products are cut. Changes speed only."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a step's tokens go. P = T · K pairs of a token and an expert; "place": where a pair stands by expert."""

    weights: torch.Tensor  # [T, K] float32
    chosen: torch.Tensor  # [T, K] int32
    order: torch.Tensor  # [P] int32, by place: pairs
    blocks: torch.Tensor  # [blocks, FIELDS] int32; expert −1: nothing to do
    tiles: Tiles


def choose_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiles:
    """By the rows that an expert gets on average: with few the time is that of reading weights."""
    if dtype == torch.float32:
        return Tiles(16, 32, 32, 4, 2)
    if num_pairs <= 16 * num_experts:
        return Tiles(16, 64, 128, 4, 4)
    return Tiles(64, 64, 64, 4, 3)


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits,  # [T, E], rows stride apart
    weights,  # [T, K] float32
    chosen,  # [T, K] int32
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALISED: tl.constexpr,
    E_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    """The K largest of one token's logits, one after the other; of equal ones the first. By whole numbers in the order of
    the floats, so that what is taken, or no number, has a place below all that are left."""
    LOWEST: tl.constexpr = -0x80000000
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PADDED)
    slot = tl.arange(0, K_PADDED)
    logit = tl.load(logits + token * stride + expert, mask=expert < E, other=float("-inf")).to(tl.float32) + 0.0
    is_number = logit == logit
    bits = logit.to(tl.int32, bitcast=True)
    rank = tl.where(is_number, tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF), LOWEST + 1)
    rank = tl.where(expert < E, rank, LOWEST)
    tops = tl.full([K_PADDED], float("-inf"), tl.float32)
    experts = tl.zeros([K_PADDED], tl.int32)
    for place in tl.static_range(K):
        best = tl.argmax(rank, axis=0, tie_break_left=True)
        tops = tl.where(slot == place, tl.max(tl.where(expert == best, logit, float("-inf"))), tops)
        experts = tl.where(slot == place, best, experts)
        rank = tl.where(expert == best, LOWEST, rank)
    top = tl.max(tops)
    powers = tl.exp(tops - top)  # 0 behind the last
    total = tl.sum(powers) if NORMALISED else tl.sum(tl.exp(logit - top))
    # One that is no number among all of them makes the token's weights none.
    broken = tl.sum(tl.where(is_number, 0.0, float("nan")))
    at = token * K + slot
    tl.store(weights + at, powers / total + broken, mask=slot < K)
    tl.store(chosen + at, experts, mask=slot < K)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(chosen, counts, num_pairs):  # type: ignore[no-untyped-def]
    """How many pairs one expert has."""
    count = 0
    for start in range(0, num_pairs, _AT_ONCE):
        pair = start + tl.arange(0, _AT_ONCE)
        experts = tl.load(chosen + pair, mask=pair < num_pairs, other=-1)
        count += tl.sum((experts == tl.program_id(0)).to(tl.int32))
    tl.store(counts + tl.program_id(0), count)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place(  # type: ignore[no-untyped-def]
    chosen,  # [P]
    counts,  # [E]
    order,  # [P]
    blocks,  # [num_blocks, FIELDS]
    num_pairs,
    num_blocks,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One expert's pairs, in their order, behind those of the experts before it; and its blocks."""
    expert = tl.program_id(0)
    others = tl.arange(0, E_PADDED)
    all_counts = tl.load(counts + others, mask=others < E, other=0)
    all_blocks = (all_counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(others < expert, all_counts, 0))
    count = tl.sum(tl.where(others == expert, all_counts, 0))
    first_block = tl.sum(tl.where(others < expert, all_blocks, 0))
    own_blocks = tl.sum(tl.where(others == expert, all_blocks, 0))
    place = start
    for at in range(0, num_pairs, _AT_ONCE):
        pair = at + tl.arange(0, _AT_ONCE)
        is_own = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert
        number = tl.cumsum(is_own.to(tl.int32))  # from 1 on
        tl.store(order + place + number - 1, pair, mask=is_own)
        place += tl.sum(is_own.to(tl.int32))
    for at in range(0, own_blocks, 64):
        index = at + tl.arange(0, 64)
        block = blocks + (first_block + index) * FIELDS
        is_own_block = index < own_blocks
        tl.store(block, expert, mask=is_own_block)
        tl.store(block + 1, start + index * BLOCK_M, mask=is_own_block)
        tl.store(block + 2, tl.minimum(count - index * BLOCK_M, BLOCK_M), mask=is_own_block)
    if expert == E - 1:
        for at in range(first_block + own_blocks, num_blocks, 64):
            index = at + tl.arange(0, 64)
            tl.store(blocks + index * FIELDS, -1, mask=index < num_blocks)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    rows,  # [BLOCK_M] where each row begins
    is_row,
    weight,  # where the expert's first output begins
    output,  # [BLOCK_N]
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """rows · weightᵀ for these outputs; of gate and up, which lie N outputs apart, where PARTS is 2."""
    BLOCK_M: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = output.shape[0]
    column = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    is_output = output < N
    for start in range(0, DEPTH, BLOCK_K):
        k = start + column
        numbers = tl.load(rows[:, None] + k[None, :], mask=is_row[:, None] & (k < DEPTH)[None, :], other=0.0)
        place = weight + output[None, :] * DEPTH + k[:, None]  # [BLOCK_K, BLOCK_N]
        mask = is_output[None, :] & (k < DEPTH)[:, None]
        sums = tl.dot(numbers, tl.load(place, mask=mask, other=0.0), sums, input_precision="ieee")
        if PARTS == 2:
            tile = tl.load(place + N * DEPTH, mask=mask, other=0.0)
            up_sums = tl.dot(numbers, tile, up_sums, input_precision="ieee")
    return sums, up_sums


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, DEPTH], rows stride apart
    weight,  # [E, 2 · INNER, DEPTH]: gate, then up
    bias,  # [E, 2 · INNER] or None
    order,
    blocks,
    out,  # [P, INNER] by place
    stride,
    alpha,
    limit,
    offset,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = blocks + tl.program_id(0) * FIELDS
    expert = tl.load(block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(block + 1)
    row = tl.arange(0, BLOCK_M)
    is_row = row < tl.load(block + 2)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.load(order + first + row, mask=is_row, other=0) // K
    rows = x + token.to(tl.int64) * stride
    place = weight + expert * (2 * INNER * DEPTH)
    gate, up = _sums(rows, is_row, place, output, INNER, DEPTH, 2, BLOCK_K)
    if bias is not None:
        at = bias + expert * (2 * INNER) + output
        gate += tl.load(at, mask=output < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(at + INNER, mask=output < INNER, other=0.0).to(tl.float32)[None, :]
    if IS_CLAMPED:  # what is no number stays none
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    inner = gate * tl.sigmoid(alpha * gate) * (up + offset)
    target = out + (first + row).to(tl.int64)[:, None] * INNER + output[None, :]
    tl.store(target, inner.to(out.dtype.element_ty), mask=is_row[:, None] & (output < INNER)[None, :])


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    inner,  # [P, INNER] by place
    weight,  # [E, DEPTH, INNER]
    bias,  # [E, DEPTH] or None
    weights,  # [P] float32
    order,
    blocks,
    out,  # [P, DEPTH] by pair, weighted
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = blocks + tl.program_id(0) * FIELDS
    expert = tl.load(block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(block + 1)
    row = tl.arange(0, BLOCK_M)
    is_row = row < tl.load(block + 2)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = inner + (first + row).to(tl.int64) * INNER
    sums, _ = _sums(rows, is_row, weight + expert * (DEPTH * INNER), output, DEPTH, INNER, 1, BLOCK_K)
    if bias is not None:
        sums += tl.load(bias + expert * DEPTH + output, mask=output < DEPTH, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order + first + row, mask=is_row, other=0)
    sums = sums * tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * DEPTH + output[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & (output < DEPTH)[None, :])


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    pairs,  # [T, K, DEPTH]
    residual,  # [T, DEPTH] or None
    out,  # [T, DEPTH]; where residual is there, the same tensor
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < DEPTH
    total = tl.zeros([BLOCK], tl.float32)
    if residual is not None:
        total += tl.load(residual + token * DEPTH + column, mask=mask, other=0.0).to(tl.float32)
    for number in tl.static_range(K):
        total += tl.load(pairs + (token * K + number) * DEPTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * DEPTH + column, total.to(out.dtype.element_ty), mask=mask)


_launch_route, _launch_count, _launch_place = Launcher(_route), Launcher(_count), Launcher(_place)
_launch_gate_up, _launch_down, _launch_combine = Launcher(_gate_up), Launcher(_down), Launcher(_combine)


def plan(logits: torch.Tensor, num_chosen: int, is_normalised: bool, tiles: Tiles | None = None) -> Plan:
    """logits [T, E] → each token's experts, and the blocks of rows that they make. All of it stays on the device."""
    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * num_chosen
    tiles = tiles or choose_tiles(num_pairs, num_experts, logits.dtype)
    num_blocks = min(num_pairs, num_experts) + num_pairs // tiles.block_m  # at most, whoever goes where
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=logits.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=logits.device)
    blocks = torch.empty((num_blocks, FIELDS.value), dtype=torch.int32, device=logits.device)
    assert 0 < num_chosen <= num_experts and logits.stride(1) == 1
    if num_tokens:
        padded = triton.next_power_of_2(num_experts)
        _launch_route(
            (num_tokens, 1, 1),
            (logits, weights, chosen, logits.stride(0)),
            (num_experts, num_chosen, is_normalised, padded, triton.next_power_of_2(num_chosen)),
            {"num_warps": 1},
        )
        _launch_count((num_experts, 1, 1), (chosen, counts, num_pairs), (), {"num_warps": 4})
        _launch_place(
            (num_experts, 1, 1),
            (chosen, counts, order, blocks, num_pairs, num_blocks),
            (num_experts, padded, tiles.block_m),
            {"num_warps": 4},
        )
    return Plan(weights, chosen, order, blocks, tiles)


def experts(
    x: torch.Tensor,  # [T, D]
    plan: Plan,
    gate_up: tuple[torch.Tensor, torch.Tensor | None],  # [E, 2 I, D]: gate, then up; [E, 2 I] biases
    down: tuple[torch.Tensor, torch.Tensor | None],  # [E, D, I]; [E, D]
    gate: tuple[float, float, float],  # alpha, limit (0: none) and offset, as layers/experts.py has them
    residual: torch.Tensor | None,  # [T, D], changed, and returned
) -> torch.Tensor:
    """(residual +) the weighted sum of what each token's experts give, [T, D]. Sums are float32, rounded once for each product."""
    num_tokens, depth = x.shape
    num_chosen, inner_size = plan.chosen.shape[1], down[0].shape[2]
    assert gate_up[0].shape[1:] == (2 * inner_size, depth) and gate_up[0].is_contiguous() and down[0].is_contiguous()
    assert x.stride(1) == 1 and (residual is None or (residual.shape == x.shape and residual.is_contiguous()))
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if residual is None else residual
    if num_tokens == 0:
        return y
    tiles, num_blocks = plan.tiles, len(plan.blocks)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    inner = torch.empty((len(plan.order), inner_size), dtype=x.dtype, device=x.device)
    pairs = torch.empty((len(plan.order), depth), dtype=x.dtype, device=x.device)
    alpha, limit, offset = (float(number) for number in gate)
    _launch_gate_up(
        (num_blocks, -(-inner_size // tiles.block_n), 1),
        (x, *gate_up, plan.order, plan.blocks, inner, x.stride(0), alpha, limit, offset),
        (num_chosen, depth, inner_size, limit != 0.0, tiles.block_m, tiles.block_n, tiles.block_k),
        options,
    )
    _launch_down(
        (num_blocks, -(-depth // tiles.block_n), 1),
        (inner, *down, plan.weights, plan.order, plan.blocks, pairs),
        (depth, inner_size, tiles.block_m, tiles.block_n, tiles.block_k),
        options,
    )
    block = min(triton.next_power_of_2(depth), 1024)
    _launch_combine(
        (num_tokens, -(-depth // block), 1), (pairs, residual, y), (num_chosen, depth, block), {"num_warps": 4}
    )
    return y
