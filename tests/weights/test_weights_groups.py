"""Weights in groups on a GPU: GGUF's types, 8-bit integers and floats, and columns out of order, held as they come."""

import pytest
import torch

pytest.importorskip("triton")

from octavo.quants import QUANT, Quants, Weight
from octavo.weights.formats.fp8_blocks import scaled, weight_of
from octavo.weights.formats.integer_groups import weight_of as integers
from octavo.weights.methods.as_groups import GROUP_SIZES
from octavo.weights.methods.base import HeldTable, HeldWeight, Use, WeightRequest
from octavo.weights.methods.registry import kept_on_gpu
from octavo.weights.methods.triton_groups import GroupWeight, round_to_8_bits
from tests.contexts import context
from tests.interpreter import mend
from tests.scalar_quants import as_tensor, random_quants

HALF = torch.bfloat16
REQUEST = WeightRequest((64, 32, 32), 256)


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


def quants(type: str, rows: int, width: int = 256) -> Quants:
    if type == "FP8":
        weight = weight_of(torch.randn(rows, width).to(torch.float8_e4m3fn), torch.rand(rows, 1) / 64, (1, width), True)
        assert isinstance(weight, Quants)
        return weight
    weights, num_bytes = QUANT[type]
    stored = as_tensor(random_quants(type, rows * width // weights, rows)).view(rows, -1)
    assert stored.shape[1] == width // weights * num_bytes
    return Quants(type, stored)


def held(parts: list[Weight], request: WeightRequest = REQUEST, kernels: str = "triton") -> HeldWeight:
    types = frozenset(part.type for part in parts if isinstance(part, Quants))
    found = context(kernels=kernels, dtype=HALF, packed_types=types).methods.linear(request)
    for number, rows in enumerate(parts):
        found.fill(number, rows)
    return found


def check(found: HeldWeight, plain: torch.Tensor) -> None:
    scale = float(plain.abs().mean())
    plain = plain.float()
    for rows in (1, 5):
        x = torch.randn(rows, plain.shape[1]).to(HALF) / scale
        wanted = x.float() @ plain.t()
        assert float((found.product(x).float() - wanted).norm() / wanted.norm()) < 5e-3
        residual = torch.randn(rows, len(plain)).to(HALF)
        added = residual.float() + wanted
        result = found.product_add(x, None, residual)
        assert result is residual and float((result.float() - added).norm() / added.norm()) < 5e-3


@pytest.mark.parametrize("type", GROUP_SIZES)
def test_every_type_is_held_without_rounding(type: str) -> None:
    torch.manual_seed(1)
    parts: list[Weight] = [quants(type, size) for size in REQUEST.part_sizes]
    found = held(parts)
    plain = torch.cat([rows.dequantise() for rows in parts if isinstance(rows, Quants)])
    check(found, plain)
    if type not in ("Q4_0", "Q5_0"):
        assert found.name == "groups"
    file = sum(rows.stored.nbytes for rows in parts if isinstance(rows, Quants))
    if type in ("Q4_1", "Q8_0", "Q4_K", "FP8"):
        assert found.nbytes <= 1.05 * file
    if type == "Q6_K":
        assert found.nbytes <= 1.35 * file


def test_parts_of_different_kinds_are_products_of_their_own() -> None:
    torch.manual_seed(2)
    parts: list[Weight] = [quants("Q4_K", 64), quants("Q4_K", 32), quants("Q6_K", 32)]
    found = held(parts)
    assert isinstance(found, GroupWeight) and len(found._parts) == 2
    check(found, torch.cat([rows.dequantise() for rows in parts if isinstance(rows, Quants)]))
    check(
        held(parts, kernels="invariant"), torch.cat([rows.dequantise() for rows in parts if isinstance(rows, Quants)])
    )


def test_a_part_that_is_not_packed_makes_all_16_bits() -> None:
    torch.manual_seed(3)
    parts: list[Weight] = [quants("Q8_0", 64), torch.randn(32, 256).to(HALF), quants("Q2_K", 32)]
    found = held(parts)
    assert found.name == "bfloat16"
    plain = [rows.dequantise().to(HALF) if isinstance(rows, Quants) else rows for rows in parts]
    check(found, torch.cat(plain))


def test_a_share_with_fewer_rows_ends_in_zeros() -> None:
    torch.manual_seed(4)
    weight = quants("Q4_K", 24)
    check(held([weight], WeightRequest((32,), 256)), torch.cat((weight.dequantise(), torch.zeros(8, 256))))


def test_columns_out_of_order_are_multiplied_in_order() -> None:
    """As GPTQ with act-order has them: in 4 bits by triton_int4, in 8 by this method."""
    torch.manual_seed(5)
    group_of = (torch.arange(256) // 64)[torch.randperm(256)]
    scales = (torch.rand(32, 4) + 0.5).half() / 16
    for bits, zero in ((4, 8), (8, 128)):
        codes = torch.randint(0, 1 << bits, (32, 256), dtype=torch.uint8)
        weight, plain = (integers(codes, zero, scales, group_of, is_kept) for is_kept in (True, False))
        assert isinstance(weight, Quants) and isinstance(plain, torch.Tensor)
        assert torch.equal(weight.dequantise(), plain) and weight.narrow_columns(0, 128) is None
        found = held([weight], WeightRequest((32,), 256))
        assert found.name == ("int4" if bits == 4 else "groups") and found.nbytes < 32 * 256 * 2
        check(found, plain)
        # Parts in two orders are decoded.
        other = integers(codes, zero, scales, group_of.flip(0), True)
        both = held([weight, other], WeightRequest((32, 32), 256))
        assert both.name == "bfloat16" and isinstance(other, Quants)
        check(both, torch.cat((plain, other.dequantise())))


def test_8_bit_floats_are_held_with_the_scales_they_come_with() -> None:
    torch.manual_seed(6)
    numbers = torch.randn(96, 256).to(torch.float8_e4m3fn)
    for shape, block in (((), (96, 256)), ((96, 1), (1, 256)), ((3, 2), (40, 128)), ((96,), (1, 256))):
        scale = torch.rand(shape) + 0.5
        weight = weight_of(numbers, scale, block, True)
        assert isinstance(weight, Quants) and weight.is_finite()
        assert torch.equal(weight.dequantise(), scaled(numbers, scale, block))
        found = held([weight], WeightRequest((96,), 256))
        groups = 2 if block == (40, 128) else 1
        assert found.nbytes == 96 * 256 + 96 * groups * 4
        check(found, scaled(numbers, scale, block))
    assert not weight_of(
        torch.full((32, 32), float("nan")).to(torch.float8_e4m3fn), torch.ones(()), (32, 32), True
    ).is_finite()  # type: ignore[union-attr]


@pytest.mark.parametrize("type", ["Q8_0", "Q6_K", "Q4_K"])
def test_a_tables_rows_are_looked_up_and_multiplied(type: str) -> None:
    torch.manual_seed(7)
    methods = context(kernels="triton", dtype=HALF, packed_types=frozenset({type})).methods
    table: HeldTable = methods.table(WeightRequest((40,), 256, Use.VOCABULARY))
    weight = quants(type, 40)
    table.fill(0, weight)
    ids = torch.tensor([3, 39, 3])
    plain = weight.dequantise()
    assert torch.equal(table.look_up(ids, 2.0), plain.to(HALF)[ids] * 2)
    assert table.nbytes < 40 * 256 * 2
    check(table.as_head(), plain)


def test_what_is_rounded_to_8_bits_is_near() -> None:
    torch.manual_seed(8)
    rows = torch.randn(64, 256)
    rows[0] = 0.0
    weight = round_to_8_bits(rows)
    steps = rows.view(64, 8, 32).abs().amax(dim=2).repeat_interleave(32, dim=1) / 127
    assert ((weight.dequantise() - rows).abs() <= 0.51 * steps + 1e-3 * rows.abs()).all()
    found = context(kernels="triton", dtype=HALF, quantization="int8").methods.linear(WeightRequest((64,), 256))
    found.fill(0, rows)
    assert found.name == "groups" and found.nbytes == 64 * 256 * 34 // 32
    check(found, weight.dequantise())


def test_a_checkpoints_types_are_kept_where_one_of_them_is_held() -> None:
    assert kept_on_gpu(frozenset({"Q4_K", "Q2_K"})) == {"Q4_K", "Q2_K"}
    assert kept_on_gpu(frozenset({"Q2_K"})) == frozenset() == kept_on_gpu(frozenset())
