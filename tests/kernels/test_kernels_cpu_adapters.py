"""Adapters in the native products: the arithmetic against torch, and bits that depend on a row and its adapter alone."""

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.cpu.adapters import NO_ADAPTER, AdapterPart, AdapterRows, NativeAdapter
from octavo.kernels.cpu.library import BadCall, Kind, PackedWeight, Threads, isa, pack, pack_quantised, use_isa
from octavo.kernels.cpu.native import Native
from octavo.kernels.cpu.ops import Finish
from octavo.kernels.device_ops import NormWeights
from tests.native import native

# A product of three parts: four panels of 16 columns and half of one, two, one and a quarter.
HIDDEN, PARTS = 64, (72, 32, 20)
COLUMNS = sum(PARTS)
RANKS = (8, 16, 3, 40)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weight_of(kernels: Native, rows: torch.Tensor, kind: Kind) -> PackedWeight:
    if kind in (Kind.FLOAT32, Kind.BFLOAT16):
        return pack(kernels.threads, rows.to(torch.float32 if kind == Kind.FLOAT32 else torch.bfloat16), kind)
    return pack_quantised(kernels.threads, rows, kind)


def parts_of(rank: int, seed: int, which: tuple[int, ...] = (0, 1, 2)) -> list[AdapterPart]:
    firsts = (0, 72, 104)
    return [
        AdapterPart(
            randn(rank, HIDDEN, seed=seed + at) / 8, randn(PARTS[at], rank, seed=seed + 10 + at), firsts[at], 0.5
        )
        for at in which
    ]


def adapters(site: int, num_sites: int, dtype: torch.dtype = torch.float32) -> list[NativeAdapter]:
    """Four, of different ranks; the last changes the first and last part only."""
    which = [(0, 1, 2)] * 3 + [(0, 2)]
    return [
        NativeAdapter(Threads(1), {site: parts_of(rank, 100 * at, which[at])}, num_sites, dtype)
        for at, rank in enumerate(RANKS)
    ]


def added(x: torch.Tensor, at: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What adapter `at` adds to the product of x, computed by torch."""
    y = torch.zeros(len(x), COLUMNS)
    for part in parts_of(RANKS[at], 100 * at, (0, 2) if at == 3 else (0, 1, 2)):
        down, up = part.down.to(dtype).float(), part.up.to(dtype).float()
        y[:, part.first_column : part.first_column + len(up)] += part.scale * (x @ down.T) @ up.T
    return y


def mixed(num_rows: int) -> torch.Tensor:
    """Rows with and without adapters, some beside others with the same."""
    pattern = torch.tensor([0, NO_ADAPTER, 1, 1, 2, NO_ADAPTER, 3, 0, 0], dtype=torch.int32)
    return pattern.repeat(-(-num_rows // 9))[:num_rows].contiguous()


@pytest.mark.parametrize("kind", [Kind.FLOAT32, Kind.BFLOAT16, Kind.CODES8])
@pytest.mark.parametrize("num_rows", [1, 9, 150])
def test_equals_torch(kind: Kind, num_rows: int) -> None:
    kernels = native()
    site = kernels.new_site()
    dtype = torch.bfloat16 if kind == Kind.BFLOAT16 else torch.float32
    weight, ready = weight_of(kernels, randn(COLUMNS, HIDDEN), kind), adapters(site, kernels.num_sites, dtype)
    x, of_tokens = randn(num_rows, HIDDEN, seed=1), mixed(num_rows)
    gain = randn(HIDDEN, seed=2)
    without = kernels.linear(x, [weight], norm=NormWeights(gain, None, 1e-5), site=site)
    kernels.set_adapters(AdapterRows(ready, of_tokens))
    try:
        found = kernels.linear(x, [weight], norm=NormWeights(gain, None, 1e-5), site=site)
    finally:
        kernels.set_adapters(None)
    normed = F.rms_norm(x, (HIDDEN,), gain, 1e-5)
    for row, at in enumerate(of_tokens.tolist()):
        if at == NO_ADAPTER:
            assert torch.equal(found[row], without[row])
        else:
            expected = without[row] + added(normed[row : row + 1], at, dtype)[0]
            torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("finish", [Finish.GATED, Finish.GATED_GELU, Finish.GELU, Finish.EXACT_GELU, Finish.RELU])
def test_products_that_are_finished_after_the_adapter(finish: Finish) -> None:
    """Rows without an adapter keep their bits, though the product is stored before it is finished."""
    kernels = native()
    site = kernels.new_site()
    weight = weight_of(kernels, randn(96, HIDDEN), Kind.BFLOAT16)
    part = AdapterPart(randn(16, HIDDEN) / 8, randn(96, 16), 0, 1.0)
    adapter = NativeAdapter(Threads(1), {site: [part]}, kernels.num_sites, torch.float32)
    x, of_tokens = randn(20, HIDDEN, seed=1), torch.tensor([0, -1] * 10, dtype=torch.int32)
    without, plain = kernels.linear(x, [weight], finish=finish, site=site), kernels.linear(x, [weight])
    kernels.set_adapters(AdapterRows([adapter], of_tokens))
    try:
        found = kernels.linear(x, [weight], finish=finish, site=site)
    finally:
        kernels.set_adapters(None)
    assert torch.equal(found[1::2], without[1::2])
    y = (plain + (x @ part.down.T) @ part.up.T)[::2]
    gate, up = y.chunk(2, dim=1)
    expected = {
        Finish.GATED: lambda: F.silu(gate) * up,
        Finish.GATED_GELU: lambda: F.gelu(gate, approximate="tanh") * up,
        Finish.GELU: lambda: F.gelu(y, approximate="tanh"),
        Finish.EXACT_GELU: lambda: F.gelu(y),
        Finish.RELU: lambda: F.relu(y),
    }[finish]()
    torch.testing.assert_close(found[::2], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """Alone, in a mixed batch, or in a long run of the same adapter, by any instruction set: the same bits."""
    kernels = native()
    site = kernels.new_site()
    weight, ready = weight_of(kernels, randn(COLUMNS, HIDDEN), Kind.CODES8), adapters(site, kernels.num_sites, dtype)
    x, best = randn(150, HIDDEN, seed=3), isa()

    def run(rows: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
        kernels.set_adapters(AdapterRows(ready, of_tokens.to(torch.int32)))
        try:
            return kernels.linear(x[rows], [weight], site=site, residual=x[rows].repeat(1, 2)[:, :COLUMNS].contiguous())
        finally:
            kernels.set_adapters(None)

    everything = torch.arange(150)
    together = run(everything, mixed(150))
    for row in (0, 2, 3, 6, 77, 149):
        at = mixed(150)[row : row + 1]
        assert torch.equal(run(torch.tensor([row]), at)[0], together[row])
        assert torch.equal(run(everything, at.repeat(150))[row], together[row])
    # Single rows, which one thread computes several at a time: all kinds of groups, with rows between them that have none.
    for pattern in ([0, 1, 2, 3, 2], [1, 3, NO_ADAPTER, 2], [3, 0], [0, 1, 2]):
        for num_rows in (2, 3, 8, 13):
            of_tokens = torch.tensor(pattern, dtype=torch.int32).repeat(num_rows)[:num_rows].contiguous()
            found = run(everything[:num_rows], of_tokens)
            for row in range(num_rows):
                # In a run of the same adapter, products of many rows compute it.
                assert torch.equal(found[row], run(everything, of_tokens[row : row + 1].repeat(150))[row])
    try:
        for name in ("avx512vnni", "avx2", "neon"):
            if name != best and use_isa(name):
                assert torch.equal(run(everything, mixed(150)), together), name
    finally:
        use_isa(best)


def test_an_adapter_without_the_site_changes_nothing() -> None:
    kernels = native()
    first, second = kernels.new_site(), kernels.new_site()
    weight, x = weight_of(kernels, randn(COLUMNS, HIDDEN), Kind.BFLOAT16), randn(4, HIDDEN)
    ready = adapters(first, kernels.num_sites)
    without = kernels.linear(x, [weight], site=second)
    kernels.set_adapters(AdapterRows(ready, torch.zeros(4, dtype=torch.int32)))
    try:
        assert torch.equal(kernels.linear(x, [weight], site=second), without)
        assert not torch.equal(kernels.linear(x, [weight], site=first), without)
    finally:
        kernels.set_adapters(None)


def test_parts_of_several_forms_are_changed_when_all_are_there() -> None:
    kernels = native()
    site = kernels.new_site()
    kinds = (Kind.CODES8, Kind.FLOAT32, Kind.CODES4)
    weights = [weight_of(kernels, randn(size, HIDDEN, seed=at), kinds[at]) for at, size in enumerate(PARTS)]
    x = randn(5, HIDDEN)
    without = kernels.linear(x, weights, site=site)
    kernels.set_adapters(AdapterRows(adapters(site, kernels.num_sites), torch.full((5,), 2, dtype=torch.int32)))
    try:
        found = kernels.linear(x, weights, site=site)
    finally:
        kernels.set_adapters(None)
    torch.testing.assert_close(found, without + added(x, 2), atol=1e-4, rtol=1e-4)


def test_an_index_out_of_range_is_refused() -> None:
    kernels = native()
    site = kernels.new_site()
    weight, ready = weight_of(kernels, randn(COLUMNS, HIDDEN), Kind.FLOAT32), adapters(site, kernels.num_sites)
    for of_tokens in (torch.tensor([4], dtype=torch.int32), torch.tensor([-2], dtype=torch.int32)):
        kernels.set_adapters(AdapterRows(ready, of_tokens))
        try:
            with pytest.raises(BadCall, match="out of range"):
                kernels.linear(randn(1, HIDDEN), [weight], site=site)
        finally:
            kernels.set_adapters(None)
    with pytest.raises(BadCall, match="no product"):
        NativeAdapter(Threads(1), {7: parts_of(4, 0)}, 2, torch.float32)


def test_memory_is_its_own() -> None:
    kernels = native()
    adapter = adapters(kernels.new_site(), kernels.num_sites, torch.bfloat16)[1]
    # A: 3 parts of 16 × 64, B: 80 + 32 + 32 columns, in whole panels, × 16; two bytes each.
    assert adapter.nbytes == 2 * (3 * 16 * HIDDEN + 144 * 16)


def test_memory_is_on_huge_pages_where_these_are_nearly_full() -> None:
    def held(num_columns: int) -> NativeAdapter:
        part = AdapterPart(torch.zeros(16, 16), torch.zeros(num_columns, 16), 0, 1.0)
        return NativeAdapter(Threads(1), {0: [part]}, 1, torch.bfloat16)

    page = 2 << 20
    for num_columns, expected in ((57_000, page), (64_000, page), (50_000, 0), (66_000, 0), (125_000, 2 * page)):
        adapter, packed = held(num_columns), 32 * (16 + num_columns)
        assert adapter.nbytes == (expected or packed)
        if expected:
            assert adapter.entry.sites[0].parts[0].down % page == 0
