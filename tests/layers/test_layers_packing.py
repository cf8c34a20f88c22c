"""Packed weights give the plain product's numbers, and their rows can be read back."""

import pytest
import torch
import torch.nn.functional as F

from octavo.weights.methods.onednn import PackedRows, can_pack, pack, packed_linear, packed_linear_add

SHAPES = [(960, 576), (49, 64), (512, 64), (1000, 48), (17, 5)]


def weight_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    weight = (torch.randn(shape) * 0.1).to(dtype)
    if not can_pack(weight.device, dtype):
        pytest.skip(f"this CPU does not multiply packed {dtype}")
    return weight


@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_equal_plain_ones(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    weight = weight_of(shape, dtype)
    x, bias = torch.randn(num_rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    residual = torch.randn(num_rows, shape[0]).to(dtype)
    plain = F.linear(x.float(), weight.float(), bias.float())
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 2e-2}
    packed = pack(weight)
    for found, expected in (
        (packed_linear(x, packed, bias), plain),
        (packed_linear(x, packed, None), plain - bias.float()),
        (packed_linear(x, packed, bias, "gelu_tanh"), F.gelu(plain, approximate="tanh")),
        (packed_linear_add(x, packed, bias, residual), plain + residual.float()),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, **tolerance)


@pytest.mark.parametrize("shape", [(49152 // 16, 576), (512, 64), (1000, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_back_from_packed_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weight_of(shape, dtype)
    rows = PackedRows.of(pack(weight), weight)
    if rows is None:
        pytest.skip("this CPU's layout is not a known one: the embedding keeps a copy of its own")
    ids = torch.tensor([0, 1, shape[0] - 1, 77, 77])
    assert torch.equal(rows[ids], weight[ids])
    everything = torch.arange(shape[0])
    assert torch.equal(rows[everything], weight)


def test_an_unknown_layout_is_noticed() -> None:
    weight = weight_of((512, 64), torch.float32)
    assert PackedRows.of(pack(weight), weight.flip(0)) is None
