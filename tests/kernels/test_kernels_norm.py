"""RMSNorm kernels against torch's, in float32."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels.triton.elementwise.norm import rms_norm

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (5, 1), (2, 1030)])
def test_rms_norm(rows, size, dtype, device):
    torch.manual_seed(rows * size)
    x = (torch.randn(rows, size, device=device) * 3).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    expected = F.rms_norm(x.float(), (size,), weight.float(), 1e-5)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert error(out, expected) < TOLERANCE[dtype]


def test_many_rows_share_a_program_and_the_last_program_is_not_full(device):
    x = torch.randn(259, 16, device=device)
    weight = torch.randn(16, device=device)
    assert error(rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6)) < 1e-6


def test_rounds_once(device):
    """Rounding before the weight is applied and again after it would often be off by one step."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, device=device).half()
    weight = torch.randn(64, device=device).half()
    expected = F.rms_norm(x.float(), (64,), weight.float(), 1e-6).half()
    twice = F.rms_norm(x.float(), (64,), None, 1e-6).half() * weight
    assert (twice != expected).float().mean() > 0.1, "the case does not tell the two apart"
    assert (rms_norm(x, weight, 1e-6) != expected).float().mean() < 0.02  # the last bit of a sum may differ


def test_rows_of_a_wider_tensor_into_a_given_one(device):
    wide = torch.randn(3, 80, device=device)
    weight = torch.randn(48, device=device)
    out = torch.empty(3, 48, device=device)
    assert rms_norm(wide[:, 16:64], weight, 1e-6, out) is out
    assert error(out, F.rms_norm(wide[:, 16:64], (48,), weight, 1e-6)) < 1e-6


def test_no_rows(device):
    weight = torch.ones(8, device=device)
    assert rms_norm(torch.empty(0, 8, device=device), weight, 1e-6).shape == (0, 8)
