"""Prefill attention over pages and over whole prompts against plain float32 torch, in Triton's interpreter or on a GPU."""

import random
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton.attention.paged_prefill import Tile, choose_tile, paged_prefill, plan_tiles
from tests.interpreter import cases

SMALL = Tile(block_m=16, block_n=16, num_warps=4, num_stages=1)
MIDDLE = Tile(block_m=32, block_n=16, num_warps=4, num_stages=1)
SPECIALISED = Tile(block_m=128, block_n=128, num_warps=12, num_stages=2, is_specialised=True)
HUGE = 3e38  # finite in bfloat16: a possible value in another row's cell
HALF = torch.bfloat16


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]  # (cells before this step, query tokens)
    heads: tuple[int, int, int] = (4, 2, 64)  # query heads, KV heads, head size
    page_size: int = 16
    first_row: int = 0
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    tile: Tile = SMALL
    spare: int = 0  # numbers between a token's heads and the next token's


def make_step(case: Case, device: torch.device, seed: int):
    """heads [T, H + 2 Hkv, D], pages full of garbage except for the rows' own cells, page table."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    (num_heads, num_kv_heads, size), kv_dtype = case.heads, case.kv_dtype or case.dtype
    num_tokens = sum(count for _, count in case.rows)
    all_heads = num_heads + 2 * num_kv_heads
    store = torch.randn(num_tokens, all_heads * size + case.spare, generator=generator).to(case.dtype)
    heads = store[:, : all_heads * size].unflatten(1, (all_heads, size))
    widths = [-(-(before + count) // case.page_size) for before, count in case.rows]
    free = rng.sample(range(1, sum(widths) + 3), sum(widths))
    garbage = min(HUGE, torch.finfo(kv_dtype).max)
    pages = torch.full((sum(widths) + 3, 2, num_kv_heads, case.page_size, size), garbage).to(kv_dtype)
    page_table = torch.zeros(len(case.rows), max(widths), dtype=torch.int32)
    token = 0
    for row, (before, count) in enumerate(case.rows):
        own = torch.tensor([free.pop() for _ in range(widths[row])])
        page_table[row, : widths[row]] = own.int()
        kv = torch.randn(before + count, 2, num_kv_heads, size, generator=generator).to(case.dtype)
        kv[before:] = heads[token : token + count, num_heads:].unflatten(1, (2, num_kv_heads))
        position = torch.arange(before + count)
        pages[own[position // case.page_size], :, :, position % case.page_size] = kv.to(kv_dtype)
        token += count
    heads = store.to(device)[:, : all_heads * size].unflatten(1, (all_heads, size))
    return heads, pages.to(device), page_table.to(device)


def expected(case: Case, heads: torch.Tensor, pages: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    (num_heads, num_kv_heads, size), out, token = case.heads, [], 0
    for row, (before, count) in enumerate(case.rows):
        position = torch.arange(before + count, device=heads.device)
        own = page_table[row].long()[position // case.page_size]
        cells = pages[own, :, :, position % case.page_size].float()  # [S, 2, Hkv, D]
        k, v = cells.repeat_interleave(num_heads // num_kv_heads, dim=2).unbind(1)  # [S, H, D]
        q = heads[token : token + count, :num_heads].float()
        scores = torch.einsum("thd,shd->hts", q, k) * size**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        back = position[before:, None] - position[None, :]  # [t, S]: distance of a cell behind the query
        is_seen = (back >= 0) & ((back < case.window) if case.window else torch.ones_like(back, dtype=torch.bool))
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hts,shd->thd", weights, v).flatten(1))
        token += count
    return torch.cat(out)


def check(
    case: Case, device: torch.device, has_no_prefix: bool = False, tolerance: float = 2e-5, seed: int = 0
) -> None:
    heads, pages, page_table = make_step(case, device, seed)
    counts = [count for _, count in case.rows]
    group = case.heads[0] // case.heads[1]
    plan = plan_tiles(counts, [sum(row) for row in case.rows], case.first_row, case.tile.tokens(group))
    plan = np.concatenate([plan, np.zeros((1, 4), np.int32)])  # padding of the list must be harmless
    out = torch.full((heads.shape[0], case.heads[0] * case.heads[2]), 7.0, dtype=case.dtype, device=device)
    paged_prefill(
        heads, pages, page_table, torch.from_numpy(plan).to(device), out, case.tile,
        scale=case.heads[2] ** -0.5, window=case.window, softcap=case.softcap, has_no_prefix=has_no_prefix,
    )  # fmt: skip
    skipped = sum(counts[: case.first_row])
    want = expected(case, heads, pages, page_table)[skipped:]
    assert (out[:skipped] == 7.0).all()
    assert ((out[skipped:].float() - want).norm() / want.norm()).item() < tolerance


ROWS = {
    "one token": ((0, 1),),
    "one token each": ((0, 1), (15, 1), (16, 1), (17, 1)),
    "prompt": ((0, 23),),
    "to the page's end": ((0, 16), (0, 32), (16, 16)),
    "chunk behind a prefix": ((13, 11), (32, 5), (1, 40)),
    "unequal": ((0, 3), (40, 9), (0, 37), (5, 1), (31, 2)),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_sees_its_own_cells_up_to_its_position(rows, device):
    check(Case(rows), device)


@pytest.mark.parametrize("group", cases([1, 2, 3, 4, 8, 20], 1, 3, 20))
def test_any_group(group, device):
    check(Case(((5, 9),), heads=(2 * group, 2, 64), tile=MIDDLE if group < 20 else SMALL), device)


@pytest.mark.parametrize("size", cases([64, 80, 128, 256], 80, 256))
def test_any_head_size(size, device):
    check(Case(((5, 20),), heads=(2, 1, size)), device)


@pytest.mark.parametrize("page_size", cases([1, 4, 32], 1, 32))
def test_any_page_size(page_size, device):
    check(Case(((5, 20), (0, 33)), heads=(2, 1, 64), page_size=page_size), device)


@pytest.mark.parametrize("window", cases([1, 2, 7, 16, 33, 100], 1, 7, 33))
def test_window(window, device):
    check(Case(((0, 50), (40, 3), (61, 20)), heads=(2, 1, 64), window=window, tile=MIDDLE), device)


def test_soft_cap(device):
    check(Case(((0, 20), (9, 7)), softcap=1.5), device)
    check(Case(((9, 7),), softcap=1.5, window=6), device)


def test_rows_before_the_first_are_left_alone(device):
    check(Case(((30, 1), (2, 1), (0, 21), (4, 5)), first_row=2), device)


def test_tokens_may_lie_apart(device):
    check(Case(((3, 18), (0, 2)), spare=32), device)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(HALF, HALF), (torch.float16, torch.float16), (HALF, torch.float8_e4m3fn), (torch.float32, torch.float8_e4m3fn)],
    ids=str,
)
def test_dtypes(dtype, kv_dtype, device):
    case = Case(((0, 20), (37, 9)), heads=(4, 2, 64), dtype=dtype, kv_dtype=kv_dtype)
    check(case, device, tolerance=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("rows", [((0, 1), (0, 16)), ((0, 33), (0, 2), (0, 37))], ids=["short", "long"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [0, 9])
def test_whole_prompts_from_the_heads(rows, group, window, device):
    case = Case(rows, heads=(2 * group, 2, 64), dtype=HALF, spare=16, window=window, tile=MIDDLE)
    check(case, device, has_no_prefix=True, tolerance=1e-2)


@pytest.mark.parametrize(("size", "max_query_len"), cases(product([64, 128], [16, 40]), (64, 40), (128, 16)))
def test_the_chosen_tile(size, max_query_len, device):
    tile = choose_tile(size, 2, 16, HALF, HALF)
    rows = ((0, max_query_len), (130, 3))
    check(Case(rows, heads=(4, 2, size), dtype=HALF, tile=tile), device, tolerance=1e-2)


# Many more tiles than processors, so that each program walks through several; block edges at 128; rows of one token.
WHOLE = ((0, 1), (0, 127), (0, 128), (0, 129), (0, 700), *((0, 40 + n) for n in range(100)))
CHUNKS = ((127, 1), (128, 1), (200, 64), (5, 130), (1000, 33), (0, 300), *((64 + 7 * n, 20) for n in range(100)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [WHOLE, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("heads", [(4, 2, 128), (8, 2, 64), (3, 1, 128), (2, 2, 128), (16, 1, 64)], ids=str)
def test_the_specialised_kernel(rows, heads, device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")
    case = Case(rows, heads=heads, dtype=torch.bfloat16, tile=SPECIALISED, first_row=1, spare=64)
    check(case, device, tolerance=1e-2)
    if rows is WHOLE:
        check(case, device, has_no_prefix=True, tolerance=1e-2)


def test_the_specialised_kernel_is_chosen_only_where_it_fits():
    def is_chosen(size=128, group=4, page_size=16, dtype=HALF, kv_dtype=HALF, **rest):
        rest = {"capability": (9, 0)} | rest
        return choose_tile(size, group, page_size, dtype, kv_dtype, **rest).is_specialised

    assert is_chosen() and is_chosen(size=64, group=3) and is_chosen(page_size=256)
    assert not is_chosen(capability=(8, 0)) and not is_chosen(capability=(10, 0)) and not is_chosen(needs_general=True)
    assert not is_chosen(size=80) and not is_chosen(size=256) and not is_chosen(group=71) and not is_chosen(page_size=4)
    assert not is_chosen(kv_dtype=torch.float8_e4m3fn)
    assert not is_chosen(dtype=torch.float32, kv_dtype=torch.float32)


def test_a_plan_covers_every_token_once_and_starts_with_the_heaviest():
    query_lens, seq_lens = [1, 1, 70, 64, 5], [9, 1, 70, 500, 5]
    plan = plan_tiles(query_lens, seq_lens, 2, 32)
    covered = np.concatenate([np.arange(token, token + min(count, 32)) for _, token, _, count in plan])
    assert sorted(covered) == list(range(2, 141))
    assert [tuple(tile) for tile in plan[:2]] == [(3, 104, 468, 32), (3, 72, 436, 64)]
    ends = plan[:, 2] + np.minimum(plan[:, 3], 32)
    assert (np.diff(ends) <= 0).all()
    assert plan_tiles([1, 1], [4, 4], 2, 32).shape == (0, 4)
