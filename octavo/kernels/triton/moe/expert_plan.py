"""Route a step's tokens to experts, on the device: choose experts, sort (token, expert) pairs by expert, and form blocks of
pairs. The host never waits for the device.

The number of blocks depends only on the number of tokens; unneeded ones are marked. So one captured graph serves every
routing."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.runtime.chip import shared_bytes, starts_early
from octavo.kernels.triton.runtime.launch import Launcher

FIELDS = tl.constexpr(4)  # int32 numbers per block. Three are used: expert, its first place, its number of rows
_ONE_PROGRAM = 16384  # pairs times experts up to which one program plans everything


class Tiles(NamedTuple):
    """How the products are tiled. Changes only speed."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The routing of a step's tokens. P = T · K (token, expert) pairs; a pair's "place" is its index in the order by
    expert."""

    weights: torch.Tensor  # [T, K] float32
    chosen: torch.Tensor  # [T, K] int32
    order: torch.Tensor  # [P] int32: place → pair
    blocks: torch.Tensor  # [blocks, FIELDS] int32; expert −1: nothing to do
    tiles: Tiles | None  # None: for kernels that have tiles of their own
    is_part: bool = False  # some pairs' experts are not here: their outputs count as zeros

    def part(self, first: int, count: int) -> "ExpertPlan":
        """The plan for experts first … first + count − 1 alone, which are counted from 0 in it."""
        expert = self.blocks[:, :1]
        is_here = (expert >= first) & (expert < first + count)
        blocks = torch.cat((torch.where(is_here, expert - first, -1), self.blocks[:, 1:]), dim=1)
        return replace(self, blocks=blocks, is_part=True)


def choose_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Choose tiles by the average number of rows per expert: with few, the time is that of reading weights. The fastest of
    those that `benchmarks/kernels/int4.py experts` measured on an H200 for Qwen3-30B-A3B in bfloat16."""
    if dtype == torch.float32:
        tiles = Tiles(16, 32, 32, 4, 2)
    elif num_pairs <= 8 * num_experts:
        tiles = Tiles(16, 64, 128, 4, 4)
    elif num_pairs <= 128 * num_experts:
        tiles = Tiles(64, 64, 64, 4, 3)
    else:
        tiles = Tiles(128, 128, 64, 8, 3)
    return fitting(tiles, dtype, device)


def fitting(tiles: Tiles, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Limit the stages to the shared memory: a stage holds rows, gate and up for one block of K."""
    step_bytes = (tiles.block_m + 2 * tiles.block_n) * tiles.block_k * dtype.itemsize
    return tiles._replace(num_stages=max(1, min(tiles.num_stages, shared_bytes(device) // step_bytes)))


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits,  # [T, E], rows stride apart
    weights,  # [T, K] float32
    chosen,  # [T, K] int32
    stride,
    token,  # [ROWS]
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALISED: tl.constexpr,
    E_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    """Find the K largest of each token's logits, one after the other; of equal ones the first. Compares integers in the order
    of the floats, so that taken logits and NaN can rank below all others."""
    LOWEST: tl.constexpr = -0x80000000
    ROWS: tl.constexpr = token.shape[0]
    expert = tl.arange(0, E_PADDED)[None, :]
    slot = tl.arange(0, K_PADDED)[None, :]
    is_token = (token < num_tokens)[:, None]
    place = logits + token.to(tl.int64)[:, None] * stride + expert
    logit = tl.load(place, mask=is_token & (expert < E), other=float("-inf")).to(tl.float32) + 0.0
    logit = tl.where(is_token, logit, 0.0)
    is_number = logit == logit
    bits = logit.to(tl.int32, bitcast=True)
    rank = tl.where(is_number, tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF), LOWEST + 1)
    rank = tl.where(expert < E, rank, LOWEST)
    tops = tl.full([ROWS, K_PADDED], float("-inf"), tl.float32)
    experts = tl.zeros([ROWS, K_PADDED], tl.int32)
    for number in tl.static_range(K):
        best = tl.argmax(rank, axis=1, tie_break_left=True)[:, None]
        largest = tl.max(tl.where(expert == best, logit, float("-inf")), axis=1)[:, None]
        tops = tl.where(slot == number, largest, tops)
        experts = tl.where(slot == number, best, experts)
        rank = tl.where(expert == best, LOWEST, rank)
    top = tl.max(tops, axis=1)[:, None]
    powers = tl.exp(tops - top)  # 0 beyond the last
    total = tl.sum(powers, axis=1) if NORMALISED else tl.sum(tl.exp(logit - top), axis=1)
    # A NaN among the logits makes all of the token's weights NaN.
    broken = tl.sum(tl.where(is_number, 0.0, float("nan")), axis=1)
    at = token[:, None] * K + slot
    mask = is_token & (slot < K)
    tl.store(weights + at, powers / total[:, None] + broken[:, None], mask=mask)
    tl.store(chosen + at, experts, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _route(  # type: ignore[no-untyped-def]
    logits, weights, chosen, stride, num_tokens, E: tl.constexpr, K: tl.constexpr, NORMALISED: tl.constexpr,
    E_PADDED: tl.constexpr, K_PADDED: tl.constexpr,
):  # fmt: skip
    """Choose one token's experts."""
    token = tl.program_id(0) + tl.arange(0, 1)
    _choose(logits, weights, chosen, stride, token, num_tokens, E, K, NORMALISED, E_PADDED, K_PADDED)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _plan_all(  # type: ignore[no-untyped-def]
    logits,
    weights,
    chosen,
    order,
    blocks,
    stride,
    num_tokens,
    num_blocks,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALISED: tl.constexpr,
    E_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
    T_PADDED: tl.constexpr,
    P_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose, sort and form blocks in one program, for few pairs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _choose(logits, weights, chosen, stride, tl.arange(0, T_PADDED), num_tokens, E, K, NORMALISED, E_PADDED, K_PADDED)
    tl.debug_barrier()  # what other threads chose
    expert = tl.arange(0, E_PADDED)
    pair = tl.arange(0, P_PADDED)
    is_pair = pair < num_tokens * K
    its_expert = tl.load(chosen + pair, mask=is_pair, other=-1)
    is_its = (its_expert[:, None] == expert[None, :]).to(tl.int32)
    counts = tl.sum(is_its, axis=0)
    starts = tl.cumsum(counts, axis=0) - counts
    places = tl.sum(is_its * (tl.cumsum(is_its, axis=0) - 1 + starts[None, :]), axis=1)
    tl.store(order + places, pair, mask=is_pair)
    own_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(own_blocks, axis=0)
    block = tl.arange(0, BLOCKS_PADDED)
    number = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), axis=1)  # of the block's expert
    is_used = block < tl.sum(own_blocks)
    is_mine = expert[None, :] == number[:, None]
    before = (
        block - tl.sum(tl.where(is_mine, (ends - own_blocks)[None, :], 0), axis=1)
    ) * BLOCK_M  # its pairs before the block
    rows = tl.minimum(tl.sum(tl.where(is_mine, counts[None, :], 0), axis=1) - before, BLOCK_M)
    at = blocks + block * FIELDS
    mask = block < num_blocks
    tl.store(at, tl.where(is_used, number, -1), mask=mask)
    tl.store(at + 1, tl.sum(tl.where(is_mine, starts[None, :], 0), axis=1) + before, mask=mask)
    tl.store(at + 2, rows, mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(chosen, counts, num_pairs, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the pairs of one expert."""
    count = 0
    for start in range(0, num_pairs, AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
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
    AT_ONCE: tl.constexpr,  # pairs that a program handles together
):
    """Write one expert's pairs, in order, behind those of the experts before it; then its blocks."""
    expert = tl.program_id(0)
    others = tl.arange(0, E_PADDED)
    all_counts = tl.load(counts + others, mask=others < E, other=0)
    all_blocks = (all_counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(others < expert, all_counts, 0))
    count = tl.sum(tl.where(others == expert, all_counts, 0))
    first_block = tl.sum(tl.where(others < expert, all_blocks, 0))
    own_blocks = tl.sum(tl.where(others == expert, all_blocks, 0))
    place = start
    for at in range(0, num_pairs, AT_ONCE):
        pair = at + tl.arange(0, AT_ONCE)
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


_launch_route, _launch_count, _launch_place = Launcher(_route), Launcher(_count), Launcher(_place)
_launch_plan = Launcher(_plan_all)


def plan_experts(logits: torch.Tensor, num_chosen: int, is_normalised: bool, tiles: Tiles | None = None) -> ExpertPlan:
    """logits [T, E] → each token's experts, and blocks of pairs of one expert. Everything stays on the device."""
    num_tokens, num_experts = logits.shape
    tiles = tiles or choose_tiles(num_tokens * num_chosen, num_experts, logits.dtype, logits.device)
    return replace(plan_blocks(logits, num_chosen, is_normalised, tiles.block_m), tiles=tiles)


def plan_blocks(
    logits: torch.Tensor, num_chosen: int, is_normalised: bool, block_m: int, pdl: bool = False
) -> ExpertPlan:
    """plan_experts for kernels that have tiles of their own, of block_m rows. pdl: the next kernel may start before this one
    has ended, and waits for it inside."""
    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * num_chosen
    num_blocks = min(num_pairs, num_experts) + num_pairs // block_m  # the most that any routing needs
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=logits.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=logits.device)
    blocks = torch.empty((num_blocks, FIELDS.value), dtype=torch.int32, device=logits.device)
    assert 0 < num_chosen <= num_experts and logits.stride(1) == 1
    plan = ExpertPlan(weights, chosen, order, blocks, None)
    if num_tokens == 0:
        return plan
    padded, padded_chosen = triton.next_power_of_2(num_experts), triton.next_power_of_2(num_chosen)
    padded_tokens, padded_blocks = triton.next_power_of_2(num_tokens), triton.next_power_of_2(num_blocks)
    padded_pairs = triton.next_power_of_2(num_pairs)
    size = max(padded_pairs, padded_blocks) * padded
    if size <= _ONE_PROGRAM:
        pdl = pdl and starts_early(logits.device)
        options = {"num_warps": 1 if size <= 1024 else 4 if size <= 4096 else 8}
        if pdl:
            options["launch_pdl"] = True
        _launch_plan(
            (1, 1, 1),
            (logits, weights, chosen, order, blocks, logits.stride(0), num_tokens, num_blocks),
            (
                num_experts, num_chosen, is_normalised, padded, padded_chosen, padded_tokens, padded_pairs,
                padded_blocks, block_m, pdl,
            ),
            options,
        )  # fmt: skip
        return plan
    counts = torch.empty(num_experts, dtype=torch.int32, device=logits.device)
    at_once, num_warps = (1024, 4) if num_pairs <= 4096 else (8192, 16)
    _launch_route(
        (num_tokens, 1, 1),
        (logits, weights, chosen, logits.stride(0), num_tokens),
        (num_experts, num_chosen, is_normalised, padded, padded_chosen),
        {"num_warps": 1},
    )
    _launch_count((num_experts, 1, 1), (chosen, counts, num_pairs), (at_once,), {"num_warps": num_warps})
    _launch_place(
        (num_experts, 1, 1),
        (chosen, counts, order, blocks, num_pairs, num_blocks),
        (num_experts, padded, block_m, at_once),
        {"num_warps": num_warps},
    )
    return plan
