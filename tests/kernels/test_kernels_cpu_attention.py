"""Native attention against the reference backend, and against itself with other threads, batches and chunks."""

import functools
import random
from dataclasses import dataclass

import pytest
import torch

from octavo.attention.base import LayerHeads
from octavo.attention.qk_norm_rope import HeadNorms
from octavo.attention.reference import ReferenceAttention
from octavo.batch import Batch
from octavo.kernels.cpu.attention import attend, new_pages, page_bytes, qk_norm_rope_store
from octavo.kernels.cpu.build import NoCompiler, find_compiler
from octavo.kernels.cpu.library import BadCall, Threads, use_isa
from octavo.kernels.cpu.library import isa as chosen_isa
from tests.models.batches import Row, make_batch
from tests.native import ISAS

try:
    find_compiler()
except NoCompiler as missing:
    pytest.skip(str(missing), allow_module_level=True)

DTYPES = [torch.float32, torch.float16, torch.int8]
SHAPES = [  # heads, KV heads, head size; page size
    ((1, 1, 8), 16), ((4, 4, 16), 1), ((9, 3, 64), 16), ((9, 3, 64), 5), ((14, 2, 64), 64), ((30, 1, 32), 20),
    ((6, 2, 40), 16), ((12, 2, 128), 32), ((2, 1, 256), 256),
]  # fmt: skip
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
    """The native kernels as an attention backend, with the methods that these tests need."""

    def __init__(self, pool: Threads, dtype: torch.dtype = torch.float32) -> None:
        self.pool, self.dtype = pool, dtype

    def bind(self, num_pages: int, page_size: int, layer: LayerHeads, stale: float) -> None:
        """Fill every cell with `stale`; int8 pages get codes of 100 with a scale of stale / 100."""
        self.pages = new_pages(num_pages, layer.num_kv_heads, layer.head_size, page_size, self.dtype)
        if not self.pages.is_int8:
            self.pages.store.copy_(torch.tensor(stale))
            return
        num_codes = 2 * layer.num_kv_heads * page_size * layer.head_size
        num_scales = 2 * layer.num_kv_heads * page_size
        self.pages.store[:, :num_codes] = 100
        scales = torch.full((num_scales,), stale / 100).view(torch.uint8)
        self.pages.store[:, num_codes : num_codes + 4 * num_scales] = scales

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        norms = layer.norms
        qk_norm_rope_store(
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
    """Fill the rows' pages, then run one step of all rows."""
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


@functools.cache
def reference(layer: LayerHeads, mix: str, page_size: int, seed: int) -> torch.Tensor:
    return outputs(ReferenceAttention(), layer, MIXES[mix], page_size, seed)


@pytest.mark.parametrize(("heads", "page_size"), SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_equals_the_reference(isa, pool, mix, heads, page_size) -> None:
    layer = layer_of(heads)
    found = outputs(NativeAttention(pool), layer, MIXES[mix], page_size, seed=3)
    torch.testing.assert_close(found, reference(layer, mix, page_size, seed=3), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 40)])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (7, 0.0), (200, 0.0), (0, 2.0), (130, 30.0)])
def test_window_and_soft_cap(isa, pool, heads, window, softcap) -> None:
    layer = layer_of(heads, window=window, softcap=softcap)
    found = outputs(NativeAttention(pool), layer, MIXES["everything"], 16, seed=4)
    torch.testing.assert_close(found, reference(layer, "everything", 16, seed=4), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 40), (4, 4, 16)])
def test_norms_and_rotation_and_broken_numbers(isa, pool, heads) -> None:
    torch.manual_seed(1)
    norms = HeadNorms(torch.rand(heads[2]) + 0.5, torch.rand(heads[2]) + 0.5, 1e-5)
    for layer, broken in ((layer_of(heads, norms=norms), 0.0), (layer_of(heads), 0.01)):
        found = outputs(NativeAttention(pool), layer, MIXES["everything"], 16, 5, broken, is_turned=True)
        expected = outputs(ReferenceAttention(), layer, MIXES["everything"], 16, 5, broken, is_turned=True)
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "largest", "typical"), [(torch.float16, 2e-3, 2e-4), (torch.int8, 4e-2, 4e-3)])
@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 40)])
@pytest.mark.parametrize("page_size", [4, 16])
def test_narrow_pages_are_near(isa, pool, heads, page_size, dtype, largest, typical) -> None:
    layer = layer_of(heads)
    found = outputs(NativeAttention(pool, dtype), layer, MIXES["everything"], page_size, seed=6)
    error = found - reference(layer, "everything", page_size, seed=6)
    assert error.abs().max() < largest and error.square().mean().sqrt() < typical


def test_pages_of_16_bits_hold_the_nearest_numbers(isa, pool) -> None:
    generator, page_size, head_size = torch.Generator().manual_seed(2), 16, 64
    heads = torch.randn(page_size, 3, head_size, generator=generator)
    heads *= 2.0 ** torch.randint(-27, 20, heads.shape, generator=generator)
    pages = new_pages(1, 1, head_size, page_size, torch.float16)
    qk_norm_rope_store(pool, heads, 1, pages, torch.arange(page_size))
    expected = heads.clamp(-65504, 65504).half()
    keys, values = pages.store[0, :, 0]
    assert torch.equal(values.view(page_size, head_size).view(torch.int16), expected[:, 2].view(torch.int16))
    assert torch.equal(
        keys.view(head_size, page_size).T.contiguous().view(torch.int16), expected[:, 1].view(torch.int16)
    )


@dataclass
class Walker:
    """A row of a random walk. Its first `shared` tokens are those of row `parent`, whose pages it reads."""

    tokens: torch.Tensor  # [length, H + 2 Hkv, D]
    parent: int = -1
    shared: int = 0


def walk(backend: NativeAttention, layer: LayerHeads, page_size: int, walkers, cuts, stale, seed) -> list[torch.Tensor]:
    """Run the rows through random steps together. Return each row's outputs, which must not depend on the steps."""
    rng = random.Random(seed)
    num_pages = 1 + sum(-(-len(one.tokens) // page_size) for one in walkers)
    free = rng.sample(range(num_pages), num_pages)
    rows: list[Row] = []
    for one in walkers:
        pages = rows[one.parent].pages[: one.shared // page_size] if one.shared else []
        pages = pages + [free.pop() for _ in range(-(-len(one.tokens) // page_size) - len(pages))]
        rows.append(Row([0] * len(one.tokens), pages, one.shared))
    bound(backend, layer, num_pages, page_size, stale)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    while unfinished := [index for index, row in enumerate(rows) if row.computed < len(row.tokens)]:
        able = [i for i in unfinished if not walkers[i].shared or rows[walkers[i].parent].computed >= walkers[i].shared]
        chosen = rng.sample(able, rng.randint(1, len(able)) if rng.random() < 0.5 else len(able))
        steps = [(index, min(rng.choice(cuts), len(rows[index].tokens) - rows[index].computed)) for index in chosen]
        steps = [s for s in steps if s[1] == 1] + [s for s in steps if s[1] > 1]  # as make_batch sorts them
        heads = torch.cat([walkers[index].tokens[rows[index].computed :][:count] for index, count in steps])
        output = backend.run(layer, heads, None, make_batch([(rows[i], count) for i, count in steps], page_size))
        for (index, _), part in zip(steps, output.split([count for _, count in steps]), strict=True):
            found[index].append(part)
    return [torch.cat(parts) for parts in found]


def random_walkers(rng: random.Random, heads: tuple[int, int, int], page_size: int) -> list[Walker]:
    """Make some independent rows, and some that begin with the pages of the first."""
    torch.manual_seed(rng.randrange(2**31))
    width = (heads[0] + 2 * heads[1], heads[2])
    walkers = [Walker(torch.randn(rng.choice([1, 40, 150, 290]), *width)) for _ in range(rng.randint(1, 3))]
    walkers[0] = Walker(torch.randn(rng.randint(200, 300), *width))
    for _ in range(rng.choice([0, 3, 6])):
        shared = rng.randint(120 // page_size, 199 // page_size) * page_size
        own = torch.randn(rng.randint(1, 40), *width)
        walkers.append(Walker(torch.cat((walkers[0].tokens[:shared], own)), 0, shared))
    return walkers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(7))
def test_bits_depend_on_neither_threads_nor_batch_mates_nor_chunks_nor_sharing(isa, dtype, seed) -> None:
    rng = random.Random(seed)
    heads = rng.choice([(9, 3, 64), (4, 1, 16), (6, 2, 40)])
    page_size = rng.choice([16, 16, 5, 64])
    window, softcap = rng.choice([(0, 0.0), (0, 0.0), (50, 0.0), (70, 20.0), (0, 5.0)])
    layer = layer_of(heads, window=window, softcap=softcap)
    walkers = random_walkers(rng, heads, page_size)
    pools = [Threads(num) for num in (1, 2, 3)]
    try:
        alone = [
            walk(NativeAttention(pools[0], dtype), layer, page_size, [Walker(one.tokens)], [len(one.tokens)], 0.0, 0)
            for one in walkers
        ]
        for pool, cuts in zip(pools, rng.sample([[1], [1, 2, 7], [400], [1, 1, 1, 64], [9]], 3), strict=True):
            stale = rng.choice([0.0, 1e30, float("nan")])  # the second is infinite in 16 bits
            found = walk(NativeAttention(pool, dtype), layer, page_size, walkers, cuts, stale, seed)
            for one, [expected], part in zip(walkers, alone, found, strict=True):
                assert torch.equal(part.view(torch.int32), expected[one.shared :].view(torch.int32)), f"{cuts} {stale}"
    finally:
        for pool in pools:
            pool.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (14, 2, 64), (30, 1, 32)])
def test_rows_that_begin_with_the_same_pages_get_the_bits_they_get_alone(isa, pool, heads, dtype) -> None:
    """Eleven decode rows in one step; two groups of them share pages, and one group's shared part ends within a chunk."""
    generator, page_size = torch.Generator().manual_seed(5), 16
    lengths = [700, 530, 529, 513, 600, 200, 300, 150, 160, 400, 512]
    prefix = {0: list(range(32)), 1: list(range(100, 109)), 2: []}
    group = [0, 0, 0, 0, 0, 2, 1, 1, 1, 0, 0]
    layer, rows, free = layer_of(heads), [], list(range(110, 400))
    for length, shared in zip(lengths, group, strict=True):
        pages = prefix[shared][: (length - 1) // page_size]
        rows.append([*pages, *(free.pop() for _ in range(-(-length // page_size) - len(pages)))])
    backend = bound(NativeAttention(pool, dtype), layer, 400, page_size)
    shape = (heads[0] + 2 * heads[1], heads[2])
    everywhere = torch.randn(400 * page_size, *shape, generator=generator)
    qk_norm_rope_store(pool, everywhere, heads[0], backend.pages, torch.arange(400 * page_size))
    queries = torch.randn(len(rows), *shape, generator=generator)

    def attended(which: list[int]) -> torch.Tensor:
        table = torch.zeros(len(which), 50, dtype=torch.int32)
        for index, row in enumerate(which):
            table[index, : len(rows[row])] = torch.tensor(rows[row], dtype=torch.int32)
        starts = torch.arange(len(which) + 1, dtype=torch.int32)
        seq_lens = torch.tensor([lengths[row] for row in which], dtype=torch.int32)
        return attend(pool, queries[which], heads[0], backend.pages, starts, seq_lens, table, 0.1)

    together = attended(list(range(len(rows))))
    alone = torch.cat([attended([row]) for row in range(len(rows))])
    assert torch.equal(together.view(torch.int32), alone.view(torch.int32))


def test_padding_writes_nowhere_and_its_output_is_zero(isa, pool) -> None:
    layer = layer_of((4, 2, 16))
    backend = bound(NativeAttention(pool), layer, 3, 16, 7.0)
    batch = make_batch([(Row([0], [1]), 1), (Row([0], [2]), 1)], 16)
    batch.slots[1], batch.seq_lens[1] = -1, 0
    output = backend.run(layer, torch.randn(2, 8, 16), None, batch)
    assert (output[1] == 0).all() and output[0].abs().sum() > 0
    assert (backend.pages.store[[0, 2]] == 7.0).all() and not (backend.pages.store[1] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_pages_may_be_copied_along_dimension_0(isa, pool, dtype) -> None:
    layer, page_size = layer_of((9, 3, 64)), 16
    backend = bound(NativeAttention(pool, dtype), layer, 9, page_size)
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
    assert page_bytes(3, 64, 16, is_float16=True) == 2 * 3 * 16 * 64 * 2
    assert page_bytes(1, 8, 1, is_int8=True) == 64
    assert page_bytes(3, 40, 5, is_int8=True) == 1344  # 1,320 used


@pytest.mark.parametrize(("head_size", "page_size"), [(258, 16), (7, 16), (64, 257)])
def test_what_it_cannot_do_is_refused(pool, head_size, page_size) -> None:
    pages = new_pages(2, 1, head_size, page_size)
    heads, slots, one = (
        torch.randn(1, 3, head_size),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.int32),
    )
    with pytest.raises(BadCall, match="too large"):
        qk_norm_rope_store(pool, heads, 1, pages, slots)
    with pytest.raises(BadCall, match="too large"):
        attend(pool, heads, 1, pages, torch.tensor([0, 1], dtype=torch.int32), one, one[None] - 1, 1.0)
