"""Native attention against the reference backend, and against itself: other threads, other batch mates, other chunks."""

import random

import pytest
import torch

from octavo.attention.base import LayerHeads
from octavo.attention.reference import ReferenceAttention
from octavo.attention.turn import HeadNorms
from octavo.batch import Batch
from octavo.kernels.cpu.attention import attend, new_pages, page_bytes, turn_and_store
from octavo.kernels.cpu.build import NoCompiler, library_path
from octavo.kernels.cpu.library import Threads, use_isa
from octavo.kernels.cpu.library import isa as chosen_isa
from tests.models.batches import Row, make_batch

try:
    library_path()
except NoCompiler as missing:
    pytest.skip(str(missing), allow_module_level=True)

ISAS = ["avx512vnni", "avx2", "portable"]
HEADS = [(1, 1, 8), (4, 4, 16), (9, 3, 64), (30, 1, 32), (6, 2, 40), (4, 2, 128), (2, 1, 256)]
MIXES = {
    "one decode": [(0, 1)],
    "long decodes": [(900, 1), (2, 1), (127, 1), (128, 1), (300, 1), (0, 1)],
    "one prompt": [(0, 23)],
    "one long prompt": [(0, 300)],
    "everything": [(5, 1), (700, 1), (1, 1), (0, 16), (116, 30), (400, 3), (0, 2)],
}


@pytest.fixture(scope="module", params=[2])
def pool(request):
    made = Threads(request.param)
    yield made
    made.close()


@pytest.fixture(params=ISAS)
def isa(request, pool):
    before = chosen_isa()
    if not use_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    use_isa(before)


class NativeAttention:
    """The backend that is to come, as far as a test needs it."""

    def __init__(self, pool: Threads, is_int8: bool = False) -> None:
        self.pool, self.is_int8 = pool, is_int8

    def bind(self, num_pages: int, page_size: int, layer: LayerHeads, stale: float) -> None:
        """Every cell holds `stale`: int8 pages that many in codes of 100."""
        self.pages = new_pages(num_pages, layer.num_kv_heads, layer.head_size, page_size, self.is_int8)
        if not self.is_int8:
            self.pages.store.fill_(stale)
            return
        num_codes = 2 * layer.num_kv_heads * page_size * layer.head_size
        num_scales = 2 * layer.num_kv_heads * page_size
        self.pages.store[:, :num_codes] = 100
        scales = torch.full((num_scales,), stale / 100).view(torch.uint8)
        self.pages.store[:, num_codes : num_codes + 4 * num_scales] = scales

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        norms = layer.norms
        turn_and_store(
            self.pool, heads, layer.num_heads, self.pages, batch.slots, rotation,
            (norms.q, norms.k) if norms else None, norms.epsilon if norms else 0.0,
        )  # fmt: skip
        return attend(
            self.pool, heads, layer.num_heads, self.pages, batch.query_start, batch.seq_lens, batch.page_table,
            layer.scale, layer.window, layer.softcap,
        )  # fmt: skip


def layer_of(heads: tuple[int, int, int], **options) -> LayerHeads:
    return LayerHeads(0, *heads, heads[2] ** -0.5, **options)


def bound(backend, layer: LayerHeads, num_pages: int, page_size: int, stale: float = 50.0):
    if isinstance(backend, ReferenceAttention):
        backend.bind([torch.full((num_pages, page_size, 2, layer.num_kv_heads, layer.head_size), stale)], 64)
    else:
        backend.bind(num_pages, page_size, layer, stale)
    return backend


def outputs(backend, layer, mix, page_size: int, seed: int, broken_share: float = 0.0, is_turned: bool = False):
    """Fill the rows' pages, then all rows' step together."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_pages = 2 + sum(-(-(before + count) // page_size) for before, count in mix)
    pages = rng.sample(range(1, num_pages), num_pages - 1)
    rows = [Row([0] * 2000, [pages.pop() for _ in range(-(-(before + count) // page_size))]) for before, count in mix]
    bound(backend, layer, num_pages, page_size)

    def step(steps):
        batch = make_batch(steps, page_size)
        shape = (batch.num_tokens, layer.num_heads + 2 * layer.num_kv_heads, layer.head_size)
        heads = torch.randn(shape, generator=generator)
        kv = heads[:, layer.num_heads :]
        for value in (torch.nan, torch.inf, -torch.inf):
            kv.masked_fill_(torch.rand(kv.shape, generator=generator) < broken_share, value)
        angles = batch.positions[:, None, None].float() * torch.linspace(0.1, 1.0, layer.head_size // 2)
        return backend.run(layer, heads, torch.polar(torch.ones_like(angles), angles) if is_turned else None, batch)

    for row, (before, _) in zip(rows, mix, strict=True):
        if before:
            step([(row, before)])
    return step([(row, count) for row, (_, count) in zip(rows, mix, strict=True)])


@pytest.mark.parametrize("page_size", [1, 16, 20])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mix", MIXES)
def test_equals_the_reference(isa, pool, mix, heads, page_size) -> None:
    layer = layer_of(heads)
    found = outputs(NativeAttention(pool), layer, MIXES[mix], page_size, seed=3)
    expected = outputs(ReferenceAttention(), layer, MIXES[mix], page_size, seed=3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 40)])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (7, 0.0), (200, 0.0), (0, 2.0), (130, 30.0)])
def test_window_and_soft_cap(isa, pool, heads, window, softcap) -> None:
    layer = layer_of(heads, window=window, softcap=softcap)
    found = outputs(NativeAttention(pool), layer, MIXES["everything"], 16, seed=4)
    expected = outputs(ReferenceAttention(), layer, MIXES["everything"], 16, seed=4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 40), (4, 4, 16)])
def test_norms_and_rotation_and_broken_numbers(isa, pool, heads) -> None:
    torch.manual_seed(1)
    norms = HeadNorms(torch.rand(heads[2]) + 0.5, torch.rand(heads[2]) + 0.5, 1e-5)
    for layer, broken in ((layer_of(heads, norms=norms), 0.0), (layer_of(heads), 0.01)):
        found = outputs(NativeAttention(pool), layer, MIXES["everything"], 16, 5, broken, is_turned=True)
        expected = outputs(ReferenceAttention(), layer, MIXES["everything"], 16, 5, broken, is_turned=True)
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 40)])
@pytest.mark.parametrize("page_size", [4, 16])
def test_int8_pages_are_near(isa, pool, heads, page_size) -> None:
    layer = layer_of(heads)
    found = outputs(NativeAttention(pool, is_int8=True), layer, MIXES["everything"], page_size, seed=6)
    expected = outputs(ReferenceAttention(), layer, MIXES["everything"], page_size, seed=6)
    torch.testing.assert_close(found, expected, atol=4e-2, rtol=0)
    assert (found - expected).square().mean().sqrt() < 6e-3 * expected.square().mean().sqrt() + 3e-3


def walk(pool: Threads, is_int8: bool, layer: LayerHeads, tokens, cuts, stale: float, seed: int) -> list[torch.Tensor]:
    """Rows' tokens through random steps with one another: each row's outputs, whatever the steps were."""
    rng, page_size = random.Random(seed), 16
    lengths = [len(part) for part in tokens]
    num_pages = 1 + sum(-(-length // page_size) for length in lengths)
    pages = rng.sample(range(num_pages), num_pages)
    rows = [Row([0] * length, [pages.pop() for _ in range(-(-length // page_size))]) for length in lengths]
    backend = bound(NativeAttention(pool, is_int8), layer, num_pages, page_size, stale)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    while unfinished := [index for index, row in enumerate(rows) if row.computed < lengths[index]]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        steps = [(index, min(rng.choice(cuts), lengths[index] - rows[index].computed)) for index in chosen]
        steps = [s for s in steps if s[1] == 1] + [s for s in steps if s[1] > 1]  # as make_batch sorts them
        heads = torch.cat([tokens[index][rows[index].computed :][:count] for index, count in steps])
        output = backend.run(
            layer, heads.clone(), None, make_batch([(rows[i], count) for i, count in steps], page_size)
        )
        for (index, _), part in zip(steps, output.split([count for _, count in steps]), strict=True):
            found[index].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("window", [0, 50])
def test_bits_depend_on_neither_threads_nor_batch_mates_nor_chunks(isa, is_int8, window) -> None:
    heads = (9, 3, 64)
    layer = layer_of(heads, window=window)
    generator = torch.Generator().manual_seed(9)
    tokens = [torch.randn(length, 15, 64, generator=generator) for length in (310, 40, 1, 150)]
    pools = [Threads(num) for num in (1, 2, 3)]
    try:
        expected = [walk(pools[0], is_int8, layer, [one], [len(one)], 0.0, 0)[0] for one in tokens]
        for seed, cuts in enumerate([[1], [1, 2, 7], [400], [1, 30, 64], [16, 100], [9]]):
            for pool in pools:
                stale = [0.0, 1e30, 90.0][seed % 3]
                found = walk(pool, is_int8, layer, tokens, cuts, stale, seed)
                assert all(map(torch.equal, found, expected)), f"seed {seed}, cuts {cuts}"
    finally:
        for pool in pools:
            pool.close()


def test_padding_writes_nowhere_and_its_output_is_zero(isa, pool) -> None:
    layer = layer_of((4, 2, 16))
    backend = bound(NativeAttention(pool), layer, 3, 16, 7.0)
    batch = make_batch([(Row([0], [1]), 1), (Row([0], [2]), 1)], 16)
    batch.slots[1], batch.seq_lens[1] = -1, 0
    output = backend.run(layer, torch.randn(2, 8, 16), None, batch)
    assert (output[1] == 0).all() and output[0].abs().sum() > 0
    assert (backend.pages.store[[0, 2]] == 7.0).all() and not (backend.pages.store[1] == 7.0).all()


@pytest.mark.parametrize("is_int8", [False, True])
def test_whole_pages_may_be_copied_along_dimension_0(isa, pool, is_int8) -> None:
    layer, page_size = layer_of((9, 3, 64)), 16
    backend = bound(NativeAttention(pool, is_int8), layer, 9, page_size)
    heads = torch.randn(50, 15, 64)
    row = Row([0] * 50, [1, 2, 3, 4])
    expected = backend.run(layer, heads.clone(), None, make_batch([(row, 50)], page_size))
    backend.pages.store[5:9] = backend.pages.store[1:5].clone()
    backend.pages.store[1:5] = 0
    moved = Row([0] * 50, [5, 6, 7, 8], computed=49)
    found = backend.run(layer, heads[49:].clone(), None, make_batch([(moved, 1)], page_size))
    assert torch.equal(found, expected[49:])


def test_pages_of_codes_begin_on_cache_lines() -> None:
    assert page_bytes(3, 64, 16, is_int8=False) == 2 * 3 * 16 * 64 * 4
    assert page_bytes(3, 64, 16, is_int8=True) == 2 * 3 * 16 * (64 + 4)
    assert page_bytes(1, 8, 1, is_int8=True) == 64
    assert page_bytes(3, 40, 5, is_int8=True) == 1344  # 1,320 used
