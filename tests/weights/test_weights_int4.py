"""4-bit weights on a GPU: exact from what checkpoints hold, rounded with --quantization int4, and decoded where they do not fit."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.quants import Quants
from octavo.quants.writers import q4_0, q5_0
from octavo.weights.methods.base import Use, WeightRequest
from octavo.weights.methods.triton_int4 import Int4Weight, round_to_codes
from tests.contexts import context
from tests.interpreter import mend

HALF = torch.bfloat16
TYPES = frozenset({"Q4_0", "Q5_0"})
REQUEST = WeightRequest((64, 64), 256, is_gated=True)


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


def quants(kind: str, group: int = 128) -> Quants:
    """Random weights as GPTQ (Q4_0) and AWQ (Q5_0) checkpoints give them, or with 32 codes in a group."""
    scales = ((torch.rand(64, 256 // group) + 0.1) * 0.02).half().repeat_interleave(group // 32, dim=1)
    if kind == "Q4_0":
        return q4_0(scales, torch.randint(0, 16, (64, 256), dtype=torch.uint8))
    zeros = torch.randint(0, 16, (64, 256 // group)).repeat_interleave(group, dim=1)
    codes = torch.randint(0, 32 if kind == "wide" else 16, (64, 256))
    return q5_0(scales, codes.to(torch.uint8) if kind == "wide" else (codes - zeros + 16).to(torch.uint8))


def held(parts: list[Quants], **settings: object) -> Int4Weight:
    found = context(kernels="triton", dtype=HALF, packed_types=TYPES, **settings).methods.linear(REQUEST)  # type: ignore[arg-type]
    assert isinstance(found, Int4Weight)
    for part, rows in enumerate(parts):
        found.fill(part, rows)
    return found


def check(found: Int4Weight, plain: torch.Tensor) -> None:
    x, residual = torch.randn(3, 256).to(HALF), torch.randn(3, 128).to(HALF)
    y = x.float() @ plain.to(HALF).float().t()
    torch.testing.assert_close(found.product(x).float(), y, atol=0.02, rtol=2e-2)
    torch.testing.assert_close(
        found.product_add(x, None, residual.clone()).float(), y + residual.float(), atol=0.02, rtol=2e-2
    )
    gate, up = y.chunk(2, dim=1)
    gated = found.gated(x, None, None, "silu")
    if gated is None:
        gated = F.silu(gate) * up
    wanted = F.silu(gate) * up
    assert float((gated.float() - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.parametrize(("kind", "group"), [("Q4_0", 128), ("Q5_0", 128), ("Q4_0", 64), ("Q5_0", 32)])
def test_what_checkpoints_hold_stays_exact_and_packed(kind: str, group: int) -> None:
    torch.manual_seed(group)
    parts = [quants(kind, group) for _ in range(2)]
    found = held(parts)
    assert found.name == "int4" and found.nbytes == 128 * 256 // 2 + 128 * 256 // group * 4
    check(found, torch.cat([rows.dequantise() for rows in parts]))


def test_what_does_not_fit_is_held_in_16_bits() -> None:
    """Also the part that was packed before, and weights that arrive unpacked."""
    torch.manual_seed(2)
    for second in (quants("wide"), quants("Q4_0", 64)):
        parts = [quants("Q5_0"), second]
        found = held(parts)
        assert found.name == "bfloat16" and found.nbytes == 128 * 256 * 2
        check(found, torch.cat([rows.dequantise() for rows in parts]))
    found = context(kernels="triton", dtype=HALF, packed_types=TYPES).methods.linear(REQUEST)  # type: ignore[assignment]
    for part in range(2):
        found.fill(part, torch.ones(64, 256, dtype=HALF))
    assert found.name == "bfloat16"


def test_rounding_leaves_at_most_half_a_step() -> None:
    torch.manual_seed(3)
    rows = torch.randn(64, 256)
    rows[0] = 0.0
    rows[1] = rows[1].abs() + 1.0  # 0 lies outside, and is a code all the same
    codes, zeros, scales = round_to_codes(rows, 32)
    spread = scales.float().repeat_interleave(32, dim=1)
    found = (codes.float() - zeros.float().repeat_interleave(32, dim=1)) * spread
    assert ((found - rows).abs() <= spread * 0.51 + 1e-3 * rows.abs()).all() and not found[0].any()


def test_int4_is_picked_where_it_is_asked_for() -> None:
    methods = context(kernels="triton", dtype=HALF, quantization="int4").methods
    for request in (REQUEST, WeightRequest((48,), 64, Use.VOCABULARY), WeightRequest((64,), 72)):
        methods.linear(request)
    said = methods.in_words()
    assert "1 by triton_int4" in said and "triton_int4: a vocabulary stays more exact" in said
    assert "triton_int4: the product wants multiples of 8 by 32, not 64 by 72" in said
    found = held([], quantization="int4")
    torch.manual_seed(4)
    plain = torch.randn(128, 256) / 16
    for part in range(2):
        found.fill(part, plain[part * 64 : (part + 1) * 64])
    assert found.name == "int4" and found.nbytes == 128 * 256 * 5 // 8
    x = torch.randn(3, 256).to(HALF)
    wanted = x.float() @ plain.t()
    assert float((found.product(x).float() - wanted).norm() / wanted.norm()) < 0.12
