"""Paged decode attention against plain float32 torch: lengths, groups, head sizes, chunks, windows, shared prefixes."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton.attention.decode_plan import DecodeConfig, num_chunks, num_prefix_splits
from octavo.kernels.triton.attention.paged_decode import DecodeAttention
from tests.interpreter import cases

SMALL = DecodeConfig(tile=16, num_warps=4, num_stages=2, prefix_rows=16, prefix_tile=16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


# A padding row's query is NaN here: numpy warns about that, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass
class Case:
    """Rows over a store in which every cell is written: a cell outside a row holds another row's values or garbage."""

    lengths: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0
    prefix: int = 0  # tokens that all rows share
    garbage: float = 50.0
    seed: int = 0

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, H, D] (a view of wider rows), kv, page_table, seq_lens."""
        draw = torch.Generator().manual_seed(self.seed)
        rows, width = len(self.lengths), max(1, max(-(-length // self.page_size) for length in self.lengths))
        num_pages = rows * width + 3
        table = torch.randperm(num_pages, generator=draw)[: rows * width].view(rows, width).int()
        table[:, : self.prefix // self.page_size] = table[0, : self.prefix // self.page_size].clone()
        heads = torch.randn((rows, self.num_heads + 2 * self.num_kv_heads, self.head_size), generator=draw)
        kv = torch.full((num_pages, 2, self.num_kv_heads, self.page_size, self.head_size), self.garbage)
        for row, length in enumerate(self.lengths):
            for position in range(length):
                cell = torch.randn((2, self.num_kv_heads, self.head_size), generator=draw)
                kv[int(table[row, position // self.page_size]), :, :, position % self.page_size] = cell
            if length == 0:
                heads[row] = float("nan")  # a padding row's query must not matter
        return (
            heads.to(device, self.dtype)[:, : self.num_heads],
            kv.to(self.kv_dtype or self.dtype).to(device),
            table.to(device),
            torch.tensor(self.lengths, dtype=torch.int32, device=device),
        )


def expected(case: Case, q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """The expected result [B, H * D] in float32, one row at a time."""
    out = torch.zeros(q.shape, device=q.device)
    group = case.num_heads // case.num_kv_heads
    for row, length in enumerate(case.lengths):
        if length == 0:
            continue
        pages = page_table[row, : -(-length // case.page_size)].long()
        cells = kv[pages].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # [2, Hkv, L, D]
        if case.window:
            cells = cells[:, :, -case.window :]
        keys, values = cells.repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,hld->hl", q[row].float(), keys) * case.head_size**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        out[row] = torch.einsum("hl,hld->hd", scores.softmax(dim=-1), values)
    return out.flatten(1)


def check(
    case: Case,
    device: torch.device,
    *,
    chunks: int = 1,
    min_chunk: int = 16,
    shared: int | None = None,
    splits: int = 0,
    config: DecodeConfig = SMALL,
    times: int = 1,
) -> None:
    """Run the case and compare; each repetition finds the previous one's values in scratch memory."""
    q, kv, page_table, seq_lens = case.tensors(device)
    attention = DecodeAttention(len(case.lengths) + 2, *q.shape[1:2], case.num_kv_heads, case.head_size, device, chunks)
    prefix_len = None if shared is None else torch.tensor([shared], dtype=torch.int32, device=device)
    reference = expected(case, q, kv, page_table)
    for _ in range(times):
        out = torch.full((len(case.lengths), case.num_heads * case.head_size + 5), float("nan"), device=device).to(
            q.dtype
        )
        target = out[:, : case.num_heads * case.head_size]
        work = attention.plan(seq_lens, window=case.window, prefix_len=prefix_len, chunks=chunks, min_chunk=min_chunk)
        attention.run(
            work,
            q,
            kv,
            page_table,
            target,
            scale=case.head_size**-0.5,
            softcap=case.softcap,
            config=config,
            prefix_splits=splits,
        )
        assert out[:, case.num_heads * case.head_size :].isnan().all(), "wrote beyond its rows"
        error = (target.float() - reference).norm() / reference.norm().clamp(min=1e-9)
        assert error < TOLERANCE[case.dtype], error
        for row, length in enumerate(case.lengths):
            if length == 0:
                assert (target[row] == 0).all()


@pytest.mark.parametrize("chunks", cases([1, 2, 5], 1, 5))
def test_lengths_around_pages_and_chunks(device: torch.device, chunks: int) -> None:
    check(Case([1, 3, 0, 4, 5, 63]), device, chunks=chunks, times=2)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), cases([(2, 2), (2, 1), (6, 2), (4, 1), (8, 1), (20, 1)], (2, 2), (6, 2), (20, 1))
)
def test_any_group(device: torch.device, num_heads: int, num_kv_heads: int) -> None:
    check(Case([33, 7], num_heads=num_heads, num_kv_heads=num_kv_heads), device, chunks=2)


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    cases(
        product([64, 80, 128], [torch.float16, torch.bfloat16]),
        *((64, torch.float16), (80, torch.bfloat16), (128, torch.bfloat16)),
    ),
)
def test_head_sizes_and_types(device: torch.device, head_size: int, dtype: torch.dtype) -> None:
    check(Case([40, 9], head_size=head_size, dtype=dtype), device, chunks=2)


@pytest.mark.parametrize("page_size", cases([1, 2, 16, 32], 1, 32))
def test_page_sizes_below_and_above_a_tile(device: torch.device, page_size: int) -> None:
    check(Case([37, page_size - 1, page_size], page_size=page_size), device, chunks=3)


@pytest.mark.parametrize("window", cases([1, 5, 17, 100], 1, 17))
def test_window_counts_the_last_positions(device: torch.device, window: int) -> None:
    check(Case([1, 16, 50, 0], window=window), device, chunks=3)


@pytest.mark.parametrize("softcap", cases([0.5, 30.0], 0.5))
def test_softcap(device: torch.device, softcap: float) -> None:
    check(Case([20, 45], softcap=softcap), device, chunks=3)
    check(Case([20, 45], softcap=softcap, prefix=16), device, chunks=2, shared=16)


@pytest.mark.parametrize("dtype", cases([torch.bfloat16, torch.float16, torch.float32], torch.bfloat16))
def test_eight_bit_store(device: torch.device, dtype: torch.dtype) -> None:
    check(Case([40, 9, 0], dtype=dtype, kv_dtype=torch.float8_e4m3fn), device, chunks=2)


@pytest.mark.parametrize(
    ("garbage", "dtype"),
    cases([(3e38, torch.float32), (-3e38, torch.bfloat16), (65504.0, torch.float16)], (-3e38, torch.bfloat16)),
)
def test_cells_that_are_not_the_rows_do_not_matter(device: torch.device, garbage: float, dtype: torch.dtype) -> None:
    check(Case([1, 6, 21, 0], garbage=garbage, dtype=dtype), device, chunks=2)
    check(Case([9, 14, 8, 0], garbage=garbage, dtype=dtype, prefix=8), device, shared=8)


@pytest.mark.parametrize(("chunks", "splits"), cases([(1, 1), (1, 2), (3, 5)], (1, 2), (3, 5)))
def test_shared_prefix(device: torch.device, chunks: int, splits: int) -> None:
    """One row ends with the prefix, one is padding, one is long."""
    check(Case([40, 43, 0, 95, 60], prefix=40), device, chunks=chunks, shared=40, splits=splits, times=2)


@pytest.mark.parametrize("num_heads", cases([1, 3, 4], 3))
def test_shared_prefix_with_groups_across_tiles_of_queries(device: torch.device, num_heads: int) -> None:
    check(Case([20] * 9, num_heads=num_heads, num_kv_heads=1, prefix=16, dtype=torch.bfloat16), device, shared=16)


def test_a_prefix_of_length_zero_is_none(device: torch.device) -> None:
    check(Case([5, 0, 33]), device, chunks=2, shared=0, splits=2)


def test_a_shared_prefix_in_eight_bits(device: torch.device) -> None:
    check(Case([24, 19], prefix=16, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn), device, shared=16)


def test_default_configuration_and_rules(device: torch.device) -> None:
    case = Case([130, 1, 64], dtype=torch.bfloat16, page_size=16)
    q, kv, page_table, seq_lens = case.tensors(device)
    attention = DecodeAttention(3, case.num_heads, case.num_kv_heads, case.head_size, device)
    out = torch.empty((3, case.num_heads * case.head_size), dtype=q.dtype, device=device)
    attention.run(attention.plan(seq_lens), q, kv, page_table, out, scale=case.head_size**-0.5)
    reference = expected(case, q, kv, page_table)
    assert (out.float() - reference).norm() / reference.norm() < TOLERANCE[q.dtype]


def items_of(
    attention: DecodeAttention, lengths: list[int], device: torch.device, **options: int
) -> tuple[list[list[int]], int]:
    work = attention.plan(torch.tensor(lengths, dtype=torch.int32, device=device), **options)
    items = work.items[: work.num_items].tolist()
    return [item[:5] for item in items if item[0] >= 0], work.num_items


@pytest.mark.parametrize("seed", cases(range(3), 0))
def test_items_cover_each_row_once_in_about_equal_shares(device: torch.device, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(40, generator=draw) ** 6 * 40000).int().tolist()
    lengths[3] = 0
    attention = DecodeAttention(40, 8, 4, 64, device)
    items, num_items = items_of(attention, lengths, device)
    assert len(items) <= num_items == 40 + num_chunks(40, 4)
    share = -(-sum(lengths) // num_chunks(40, 4)) + 16
    for row, length in enumerate(lengths):
        mine = [item for item in items if item[0] == row]
        assert [item[1] for item in mine] == [0, *(item[2] for item in mine[:-1])] and mine[-1][2] == length
        assert all(item[3:] == [items.index(mine[0]), len(mine)] for item in mine)
        assert all(item[2] - item[1] <= max(share, 64) for item in mine)


def test_one_long_row_among_many_short_ones_is_spread(device: torch.device) -> None:
    attention = DecodeAttention(65, 16, 8, 128, device)
    items, _ = items_of(attention, [500] * 20 + [32768] + [500] * 44, device)
    assert [sum(item[0] == row for item in items) for row in range(65)] == [1] * 20 + [17] + [1] * 44


def test_rows_at_the_limit_of_their_number_of_items(device: torch.device) -> None:
    """Every row has one key more than its share: the largest possible number of items."""
    attention = DecodeAttention(8, 2, 2, 64, device, 128)
    items, num_items = items_of(attention, [16 * 16 + 1] * 8, device, chunks=128, min_chunk=16)
    assert len(items) == 8 * 9 <= num_items


def test_few_prefix_splits_and_enough() -> None:
    splits = {rows: num_prefix_splits(rows, 16, 8) for rows in (1, 8, 64, 256, 1024)}
    assert splits == {1: 16, 8: 16, 64: 8, 256: 2, 1024: 1}


def test_a_prefix_under_a_window_is_refused(device: torch.device) -> None:
    attention = DecodeAttention(1, 2, 2, 64, device)
    length = torch.tensor([16], dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match="sliding window"):
        attention.plan(length, window=4, prefix_len=length)


def test_a_wider_tile_and_more_warps_change_nothing(device: torch.device) -> None:
    check(Case([100, 31, 0, 17]), device, chunks=4, config=replace(SMALL, tile=64, num_warps=8, num_stages=3))


@pytest.mark.parametrize(("num_heads", "head_size"), cases([(8, 128), (4, 64)], (8, 128)))
def test_more_parts_than_are_merged_at_once(device: torch.device, num_heads: int, head_size: int) -> None:
    """One warp merges one part of eight heads of 128 at a time, four of four heads of 64."""
    case = Case([150], num_heads=num_heads, num_kv_heads=1, head_size=head_size)
    check(case, device, chunks=10, config=replace(SMALL, num_warps=1))
