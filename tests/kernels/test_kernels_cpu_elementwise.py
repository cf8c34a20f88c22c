"""Native norms, gates, quantising, the largest logit and rows of a table against torch, on any number of threads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.cpu import elementwise
from octavo.kernels.cpu.build import NoCompiler, library_path
from octavo.kernels.cpu.library import Kind, Threads, use_isa
from octavo.kernels.cpu.library import isa as chosen_isa
from tests.native import ISAS

try:
    library_path()
except NoCompiler as missing:
    pytest.skip(str(missing), allow_module_level=True)

RECORD = np.dtype([("codes", "i1", 32), ("scale", "f4"), ("scaled_sum", "f4"), ("minus_sum", "i4"), ("unused", "i4")])


@pytest.fixture(scope="module")
def pools():
    made = [Threads(num) for num in (1, 2, 3)]
    yield made
    for pool in made:
        pool.close()


@pytest.fixture(params=ISAS)
def isa(request, pools):
    before = chosen_isa()
    if not use_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    use_isa(before)


def on_all(pools, call):
    """Return the result, after checking that it is the same on any number of threads."""
    first, *others = [call(pool) for pool in pools]
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("size", [8, 20, 576, 1000])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rms_norm(isa, pools, rows, size) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, size) * 5, torch.randn(size)
    found = on_all(pools, lambda pool: elementwise.rms_norm(pool, x, weight, 1e-5))
    torch.testing.assert_close(found, F.rms_norm(x, (size,), weight, 1e-5), atol=1e-6, rtol=1e-5)
    alone = [elementwise.rms_norm(pools[0], row[None], weight, 1e-5) for row in x]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("size", [5, 64, 1000])
def test_a_norm_is_added(isa, pools, size) -> None:
    torch.manual_seed(size)
    x, weight, y = torch.randn(9, size), torch.randn(size), torch.randn(9, size)
    normed = elementwise.rms_norm(pools[0], x, weight, 1e-5)

    def added(pool):
        into = y.clone()
        elementwise.rms_norm_add(pool, x, weight, 1e-5, into)
        return into

    assert torch.equal(on_all(pools, added), y + normed)


@pytest.mark.parametrize("size", [5, 64, 17_000])
def test_numbers_are_capped(isa, pools, size) -> None:
    torch.manual_seed(size)
    x = torch.randn(3, size) * 50
    x[0, :2] = torch.tensor([float("inf"), float("-inf")])

    def capped(pool):
        changed = x.clone()
        elementwise.cap(pool, changed, 30.0)
        return changed

    torch.testing.assert_close(on_all(pools, capped), 30 * torch.tanh(x / 30), atol=1e-5, rtol=1e-5)
    x[1, 3] = float("nan")
    assert capped(pools[0]).isnan().sum() == 1


@pytest.mark.parametrize("size", [8, 20, 1536])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_silu_mul(isa, pools, rows, size) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * size) * 10
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.0])
    found = on_all(pools, lambda pool: elementwise.silu_mul(pool, x))
    torch.testing.assert_close(found, F.silu(x[:, :size]) * x[:, size:], atol=1e-6, rtol=1e-5)


def quantised(
    pool: Threads, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, tile_rows: int = 1
) -> torch.Tensor:
    """Records [T * D / 32, 48]: 32 codes, scale, scaled sum, minus sum, unused."""
    return elementwise.rms_norm_prepare(pool, x, weight, epsilon, Kind.CODES8, tile_rows).view(-1, 48)


def check_records(records: torch.Tensor, x: torch.Tensor) -> None:
    """Check the records row by row."""
    found = records.numpy().view(RECORD)[:, 0]
    groups = x.numpy().reshape(-1, 32)
    largest = np.abs(groups).max(1)
    assert np.allclose(found["scale"], largest / 127, rtol=1e-5)
    assert np.array_equal(found["minus_sum"], -found["codes"].astype(int).sum(1))
    assert np.allclose(found["scaled_sum"], found["scale"] * found["codes"].astype(int).sum(1), rtol=1e-6)
    error = np.abs(found["codes"] * found["scale"][:, None] - groups)
    assert (error <= 0.501 * found["scale"][:, None] + 1e-6).all()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_quantised(isa, pools, rows) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 576) * 4, torch.rand(576) + 0.5
    x[0, :32] = 0.0
    check_records(on_all(pools, lambda pool: quantised(pool, x, None, 0.0)), x)
    normed = elementwise.rms_norm(pools[0], x, weight, 1e-5)
    records = on_all(pools, lambda pool: quantised(pool, x, weight, 1e-5))
    check_records(records, normed)
    # In tiles: the same records in another order.
    tiled = on_all(pools, lambda pool: quantised(pool, x, weight, 1e-5, tile_rows=4))
    num_tiles, expected = -(-rows // 4), []
    by_row = records.view(rows, 18, 48)
    for tile in range(num_tiles):
        expected.append(
            by_row[rows * tile // num_tiles : rows * (tile + 1) // num_tiles].transpose(0, 1).reshape(-1, 48)
        )
    assert torch.equal(tiled, torch.cat(expected))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_broken_stays_broken_in_its_own_group(isa, pools, value) -> None:
    x = torch.randn(2, 64)
    x[0, 40] = value
    found = quantised(pools[0], x, None, 0.0).numpy().view(RECORD)[:, 0]
    assert np.isnan(found["scale"]).tolist() == [False, True, False, False]
