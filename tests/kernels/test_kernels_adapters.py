"""Adapters' products on a GPU against float32 torch: mixed ranks and parts, norms, and bits that no other row changes."""

import random
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels.triton.gemm.adapters import (
    BLOCK_ROWS,
    FIELDS,
    MAX_SPLIT_ROWS,
    AdapterBlocks,
    Scratch,
    block_plan,
    expand,
    expand_gated,
    make_scratch,
    shrink,
    take_changed,
)
from tests.interpreter import cases

MAX_PARTS, MAX_RANK, NUM_SITES = 3, 48, 2


class Adapter:
    """Random matrices for the parts of one site, and the table that the kernels read."""

    def __init__(self, site, depth, parts, dtype, device, seed):
        """`parts`: (first column, number of columns, rank) of each; rank 0: it is not changed."""
        generator = torch.Generator().manual_seed(seed)
        self.parts, self.held = [], []
        table = torch.zeros(NUM_SITES, MAX_PARTS, FIELDS, dtype=torch.int64)
        for number, (first, count, rank) in enumerate(parts):
            if not rank:
                continue
            held_rank, scale = -(-rank // 16) * 16, 0.5 + number
            down, up = torch.zeros(held_rank, depth), torch.zeros(count, held_rank)
            down[:rank] = torch.randn(rank, depth, generator=generator) * depth**-0.5
            up[:, :rank] = torch.randn(count, rank, generator=generator) * rank**-0.5
            down, up = down.to(dtype).to(device), up.to(dtype).to(device)
            bits = struct.unpack("i", struct.pack("f", scale))[0]
            table[site, number] = torch.tensor([down.data_ptr(), up.data_ptr(), held_rank, first, count, bits])
            self.held += [down, up]
            self.parts.append((first, count, down.float(), up.float(), scale))
        self.table = table.to(device)

    def added(self, x):
        """To a row's product, in float32."""
        found = {}
        for first, count, down, up, scale in self.parts:
            found[first, count] = (x @ down.T @ up.T) * scale
        return found


def blocks_of(of_rows, adapters, device, spare=0):
    """`spare`: blocks without rows, as a captured graph has them."""
    order, blocks = block_plan(np.array(of_rows), [adapter.table.data_ptr() for adapter in adapters])
    blocks = np.concatenate([blocks, np.zeros((spare, 3), np.int64)])
    return AdapterBlocks(torch.from_numpy(order).to(device), torch.from_numpy(blocks).to(device))


def plain(y, x, of_rows, adapters, norm=None):
    expected, wide = y.float().clone(), x.float()
    if norm is not None:
        wide = F.rms_norm(wide, wide.shape[-1:], norm[0].float(), norm[1])
    for row, number in enumerate(of_rows):
        if number >= 0:
            for (first, count), part in adapters[number].added(wide[row]).items():
                expected[row, first : first + count] += part
    return expected


def distance(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def scratch_for(tokens, depth, dtype, device) -> Scratch:
    return make_scratch([(depth, MAX_PARTS)], tokens, MAX_RANK, MAX_PARTS, dtype, device)


def add_adapters(y, x, rows, site, num_parts, norm=None):
    scratch = scratch_for(max(len(x), len(rows.blocks)), x.shape[1], x.dtype, x.device)
    shrink(x, rows, site, num_parts, scratch, norm)
    expand(y, rows, site, num_parts, scratch)
    assert not scratch.arrived.any(), "as the next launch needs them"


def shapes(rng):
    """Ranks are mixed, parts end where no tile does, some are missing, and some rows have no adapter."""
    depth, tokens = rng.choice([24, 200, 513, 1100]), rng.choice([1, 2, 7, 19, 40])
    widths = [rng.choice([8, 60, 130, 200]) for _ in range(rng.randrange(1, 4))]
    starts = [sum(widths[:at]) for at in range(len(widths))]
    ranks = [[rng.choice([0, 1, 8, 16, 17, 40]) for _ in widths] for _ in range(rng.randrange(1, 5))]
    of_rows = [rng.randrange(-1, len(ranks)) for _ in range(tokens)]
    return depth, list(zip(starts, widths, strict=True)), ranks, of_rows


@pytest.mark.parametrize("seed", cases(range(40), *range(6)))
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)], ids=str)
def test_random_mixes(seed, dtype, limit, device):
    rng = random.Random(seed)
    depth, parts, ranks, of_rows = shapes(rng)
    torch.manual_seed(seed)
    x = (torch.randn(len(of_rows), depth) * 2).to(dtype).to(device)
    y = torch.randn(len(of_rows), sum(width for _, width in parts)).to(dtype).to(device)
    norm = ((torch.rand(depth) + 0.5).to(dtype).to(device), 1e-5) if seed % 2 else None
    adapters = [
        Adapter(seed % 2, depth, [(*part, rank) for part, rank in zip(parts, each, strict=True)], dtype, device, number)
        for number, each in enumerate(ranks)
    ]
    expected = plain(y, x, of_rows, adapters, norm)
    before = y.clone()
    rows = blocks_of(of_rows, adapters, device, spare=seed % 3)
    add_adapters(y, x, rows, seed % 2, len(parts), norm)
    assert distance(y, expected) < limit
    without = [row for row, number in enumerate(of_rows) if number < 0]
    assert torch.equal(y[without], before[without])


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_rows_bits_do_not_depend_on_the_others(has_norm, device):
    """Alone, among others, in another order, and among so many that one program sums all of K."""
    depth, width, dtype = 1100, 40, torch.bfloat16
    adapters = [Adapter(0, depth, [(0, width, rank)], dtype, device, rank) for rank in (4, 20)]
    torch.manual_seed(3)
    most = MAX_SPLIT_ROWS + 20
    x, y = (torch.randn(most, size).to(dtype).to(device) for size in (depth, width))
    norm = ((torch.rand(depth) + 0.5).to(dtype).to(device), 1e-6) if has_norm else None
    of_rows = [(row * 7) % 3 - 1 for row in range(most)]

    def run(rows):
        mine = y[rows].clone()
        blocks = blocks_of([of_rows[row] for row in rows], adapters, device)
        add_adapters(mine, x[rows].contiguous(), blocks, 0, 1, norm)
        return mine

    everything = run(list(range(most)))
    for rows in ([1], [2], list(range(5, 38)), [30, 4, 8, 1]):
        assert torch.equal(run(rows), everything[rows]), rows


@pytest.mark.parametrize("seed", cases(range(20), *range(4)))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_over_the_sums(seed, activation, device):
    """Of all rows, with an adapter and without, whether it changes gate, up, both or neither."""
    rng = random.Random(seed)
    depth, width, tokens = rng.choice([24, 600]), rng.choice([8, 130, 300]), rng.choice([1, 7, 40])
    ranks = [[rng.choice([0, 8, 17]) for _ in range(2)] for _ in range(rng.randrange(1, 4))]
    of_rows = [rng.randrange(-1, len(ranks)) for _ in range(tokens)]
    torch.manual_seed(seed)
    x, y = torch.randn(tokens, depth).to(device), torch.randn(tokens, 2 * width).to(device)
    parts = [(0, width), (width, width)]
    adapters = [
        Adapter(0, depth, [(*part, rank) for part, rank in zip(parts, each, strict=True)], x.dtype, device, number)
        for number, each in enumerate(ranks)
    ]
    rows, scratch = (
        blocks_of(of_rows, adapters, device, spare=seed % 3),
        scratch_for(tokens + 3, depth, x.dtype, device),
    )
    gate, up = plain(y, x, of_rows, adapters).chunk(2, dim=1)
    expected = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    shrink(x, rows, 0, 2, scratch)
    assert distance(expand_gated(y, rows, 0, 2, scratch, activation), expected) < 1e-5


def test_rows_of_a_changed_site_are_taken(device):
    """Those of other adapters, and without one, stay."""
    adapters = [Adapter(0, 16, [(0, 8, rank)], torch.bfloat16, device, 1) for rank in (4, 0)]
    of_rows = [0, 1, -1, 0, 0]
    target, source = torch.zeros(5, 1030, device=device), torch.ones(5, 1030, device=device)
    take_changed(target, source, blocks_of(of_rows, adapters, device, 2), 0, 1, MAX_PARTS)
    assert torch.equal(target, torch.tensor([1.0, 0, 0, 1, 1], device=device)[:, None].expand(5, 1030))


def test_blocks_hold_every_row_once():
    rng = random.Random(1)
    for _ in range(200):
        tables = rng.sample(range(1, 1000), rng.randrange(1, 6))
        of_rows = np.array([rng.randrange(-1, len(tables)) for _ in range(rng.randrange(1, 90))])
        order, blocks = block_plan(of_rows, tables)
        assert sorted(order.tolist()) == list(range(len(of_rows))) and len(blocks) <= len(of_rows)
        found = {}
        for table, first, count in blocks.tolist():
            assert 0 < count <= BLOCK_ROWS
            found |= dict.fromkeys(order[first : first + count].tolist(), table)
        assert found == {row: tables[number] if number >= 0 else 0 for row, number in enumerate(of_rows.tolist())}
