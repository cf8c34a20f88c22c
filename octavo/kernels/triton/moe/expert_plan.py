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
_GROUP = 8, 4  # tokens that a program takes, and its warps
_ONE_PROGRAM = 8192  # pairs times experts up to which one program plans everything


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
    places: torch.Tensor  # [P] int32: pair → place
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
    of the floats, so that taken logits and NaN can rank below all others. Returns which were taken, [ROWS, E_PADDED]."""
    IS_SHORT: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
    # Bits of float32 that logits of 16 bits leave zero: without them an order and an expert fit 32 bits, which reduces in half of the time.
    SHIFT: tl.constexpr = (16 if logits.dtype.element_ty == tl.bfloat16 else 13) if IS_SHORT else 0
    LOWEST: tl.constexpr = -(1 << (31 - SHIFT))
    PLACES: tl.constexpr = 4096 if IS_SHORT else 65536
    ROWS: tl.constexpr = token.shape[0]
    expert = tl.arange(0, E_PADDED)[None, :]
    slot = tl.arange(0, K_PADDED)[None, :]
    is_token = (token < num_tokens)[:, None]
    place = logits + token.to(tl.int64)[:, None] * stride + expert
    logit = tl.load(place, mask=is_token & (expert < E), other=float("-inf")).to(tl.float32) + 0.0
    logit = tl.where(is_token, logit, 0.0)
    is_number = logit == logit
    bits = logit.to(tl.int32, bitcast=True) >> SHIFT
    rank = tl.where(is_number, tl.where(bits >= 0, bits, bits ^ (0x7FFFFFFF >> SHIFT)), LOWEST + 1)
    rank = tl.where(expert < E, rank, LOWEST)
    # One reduction finds the largest and its expert: of equal ones the first.
    if IS_SHORT:
        key = rank * PLACES + (PLACES - 1 - expert)
    else:
        key = rank.to(tl.int64) * PLACES + (PLACES - 1 - expert)
    powers = tl.zeros([ROWS, K_PADDED], tl.float32)
    experts = tl.zeros([ROWS, K_PADDED], tl.int32)
    taken = tl.zeros([ROWS, E_PADDED], tl.int32)
    top = tl.zeros([ROWS, 1], tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    for number in tl.static_range(K):
        best = tl.max(key, axis=1)[:, None]
        ordered = (best >> (12 if IS_SHORT else 16)).to(tl.int32)
        value = tl.where(ordered >= 0, ordered, ordered ^ (0x7FFFFFFF >> SHIFT)) << SHIFT
        value = value.to(tl.float32, bitcast=True)
        if number == 0:
            top = value
        power = tl.exp(value - top)
        total += power
        powers = tl.where(slot == number, power, powers)
        experts = tl.where(slot == number, PLACES - 1 - (best & (PLACES - 1)).to(tl.int32), experts)
        is_best = key == best
        taken = tl.where(is_best & is_token, 1, taken)
        key = tl.where(is_best, LOWEST * PLACES, key)
    if not NORMALISED:
        # Sums of integers do not depend on their order, and so not on the number of rows.
        share = tl.exp(logit - top)
        share = tl.where(share == share, share, 0.0) * 4294967296.0
        total = tl.sum(share.to(tl.int64), axis=1)[:, None].to(tl.float32) * (1.0 / 4294967296.0)
    # A NaN among the logits makes all of the token's weights NaN.
    broken = tl.sum(tl.where(is_number, 0.0, float("nan")), axis=1)
    at = token[:, None] * K + slot
    mask = is_token & (slot < K)
    tl.store(weights + at, powers / total + broken[:, None], mask=mask)
    tl.store(chosen + at, experts, mask=mask)
    return taken


@triton.jit(do_not_specialize=["num_tokens"])
def _route(  # type: ignore[no-untyped-def]
    logits, weights, chosen, counts, stride, num_tokens, E: tl.constexpr, K: tl.constexpr, NORMALISED: tl.constexpr,
    E_PADDED: tl.constexpr, K_PADDED: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of a group of ROWS tokens, and count the group's pairs of each expert: counts [groups, E]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    taken = _choose(logits, weights, chosen, stride, token, num_tokens, E, K, NORMALISED, E_PADDED, K_PADDED)
    expert = tl.arange(0, E_PADDED)
    tl.store(counts + tl.program_id(0) * E + expert, tl.sum(taken, axis=0), mask=expert < E)


@triton.jit
def _store_blocks(blocks, block, num_blocks, counts, starts, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Describe blocks number block [N]; counts and starts [E]: pairs of each expert, and its first place."""
    expert = tl.arange(0, counts.shape[0])
    own_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(own_blocks, axis=0)
    number = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), axis=1)  # of the block's expert
    is_used = block < tl.sum(own_blocks)
    is_mine = expert[None, :] == number[:, None]
    # Its expert's pairs before the block.
    before = (block - tl.sum(tl.where(is_mine, (ends - own_blocks)[None, :], 0), axis=1)) * BLOCK_M
    rows = tl.minimum(tl.sum(tl.where(is_mine, counts[None, :], 0), axis=1) - before, BLOCK_M)
    at = blocks + block * FIELDS
    mask = block < num_blocks
    tl.store(at, tl.where(is_used, number, -1), mask=mask)
    tl.store(at + 1, tl.sum(tl.where(is_mine, starts[None, :], 0), axis=1) + before, mask=mask)
    tl.store(at + 2, rows, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _plan_all(  # type: ignore[no-untyped-def]
    logits,
    weights,
    chosen,
    order,
    places,
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
    place = tl.sum(is_its * (tl.cumsum(is_its, axis=0) - 1 + starts[None, :]), axis=1)
    tl.store(order + place, pair, mask=is_pair)
    tl.store(places + pair, place, mask=is_pair)
    _store_blocks(blocks, tl.arange(0, BLOCKS_PADDED), num_blocks, counts, starts, BLOCK_M)


@triton.jit(do_not_specialize=["num_tokens", "num_groups", "num_blocks"])
def _place(  # type: ignore[no-untyped-def]
    chosen,  # [T, K]
    counts,  # [groups, E]
    order,  # [P]
    places,  # [P]
    blocks,  # [num_blocks, FIELDS]
    num_tokens,
    num_groups,
    num_blocks,
    E: tl.constexpr,
    K: tl.constexpr,
    E_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place one group's pairs, in order, behind those of the groups before it; then write a share of the blocks."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own_group = tl.program_id(0)
    expert = tl.arange(0, E_PADDED)
    totals = tl.zeros([E_PADDED], tl.int32)
    earlier = tl.zeros([E_PADDED], tl.int32)
    for first in range(0, num_groups, 32):
        group = first + tl.arange(0, 32)
        mask = (group < num_groups)[:, None] & (expert < E)[None, :]
        some = tl.load(counts + group[:, None] * E + expert[None, :], mask=mask, other=0)
        totals += tl.sum(some, axis=0)
        earlier += tl.sum(tl.where((group < own_group)[:, None], some, 0), axis=0)
    starts = tl.cumsum(totals, axis=0) - totals
    token = own_group * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    taken = tl.zeros([ROWS, E_PADDED], tl.int32)
    for number in tl.static_range(K):
        its_expert = tl.load(chosen + token * K + number, mask=is_token, other=-1)
        taken += (its_expert[:, None] == expert[None, :]).to(tl.int32)
    # A token's experts differ: its pair of an expert comes after those of the tokens before it.
    before = tl.cumsum(taken, axis=0) - taken + (starts + earlier)[None, :]
    for number in tl.static_range(K):
        pair = token * K + number
        its_expert = tl.load(chosen + pair, mask=is_token, other=-1)
        place = tl.sum(tl.where(its_expert[:, None] == expert[None, :], before, 0), axis=1)
        tl.store(order + place, pair, mask=is_token)
        tl.store(places + pair, place, mask=is_token)
    for first in range(own_group * 32, num_blocks, tl.num_programs(0) * 32):
        _store_blocks(blocks, first + tl.arange(0, 32), num_blocks, totals, starts, BLOCK_M)


_launch_route, _launch_place, _launch_plan = Launcher(_route), Launcher(_place), Launcher(_plan_all)


def plan_experts(logits: torch.Tensor, num_chosen: int, is_normalised: bool, tiles: Tiles | None = None) -> ExpertPlan:
    """logits [T, E] → each token's experts, and blocks of pairs of one expert. Everything stays on the device."""
    num_tokens, num_experts = logits.shape
    tiles = tiles or choose_tiles(num_tokens * num_chosen, num_experts, logits.dtype, logits.device)
    return replace(plan_blocks(logits, num_chosen, is_normalised, tiles.block_m, pdl=True), tiles=tiles)


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
    order, places = (torch.empty(num_pairs, dtype=torch.int32, device=logits.device) for _ in range(2))
    blocks = torch.empty((num_blocks, FIELDS.value), dtype=torch.int32, device=logits.device)
    assert 0 < num_chosen <= num_experts <= 4096 and logits.stride(1) == 1
    plan = ExpertPlan(weights, chosen, order, places, blocks, None)
    if num_tokens == 0:
        return plan
    padded, padded_chosen = triton.next_power_of_2(num_experts), triton.next_power_of_2(num_chosen)
    padded_tokens, padded_blocks = triton.next_power_of_2(num_tokens), triton.next_power_of_2(num_blocks)
    padded_pairs = triton.next_power_of_2(num_pairs)
    size = max(padded_pairs, padded_blocks) * padded
    pdl = pdl and starts_early(logits.device)
    early = {"launch_pdl": True} if pdl else {}
    if size <= _ONE_PROGRAM:
        _launch_plan(
            (1, 1, 1),
            (logits, weights, chosen, order, places, blocks, logits.stride(0), num_tokens, num_blocks),
            (
                num_experts, num_chosen, is_normalised, padded, padded_chosen, padded_tokens, padded_pairs,
                padded_blocks, block_m, pdl,
            ),
            {"num_warps": 1 if size <= 1024 else 4 if size <= 4096 else 8} | early,
        )  # fmt: skip
        return plan
    is_large = num_tokens > 2048 and padded <= 256  # of 512 experts 64 rows take more shared memory than most GPUs have
    rows, num_warps = (64, 16) if is_large else _GROUP
    num_groups = -(-num_tokens // rows)
    counts = torch.empty((num_groups, num_experts), dtype=torch.int32, device=logits.device)
    _launch_route(
        (num_groups, 1, 1),
        (logits, weights, chosen, counts, logits.stride(0), num_tokens),
        (num_experts, num_chosen, is_normalised, padded, padded_chosen, rows, pdl),
        {"num_warps": num_warps} | early,
    )
    _launch_place(
        (num_groups, 1, 1),
        (chosen, counts, order, places, blocks, num_tokens, num_groups, num_blocks),
        (num_experts, num_chosen, padded, block_m, rows, pdl),
        {"num_warps": num_warps} | early,
    )
    return plan
