"""act(gate) * up against torch's, in float32."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.errors import ConfigError
from octavo.kernels.triton.elementwise.activation import gate_mul

PLAIN = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("rows", "inner"), [(1, 8), (3, 37), (2, 600), (66, 5)])
def test_gate_and_up(rows, inner, name, device):
    torch.manual_seed(inner)
    gate_up = torch.randn(rows, 2 * inner, device=device) * 2
    expected = PLAIN[name](gate_up[:, :inner]) * gate_up[:, inner:]
    assert error(gate_mul(gate_up, name), expected) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-3), (torch.float16, 5e-4)], ids=str)
def test_computes_in_float32_and_rounds_once(dtype, tolerance, device):
    gate_up = torch.randn(4, 64, device=device).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    out = gate_mul(gate_up, "silu")
    assert out.dtype == dtype
    assert error(out, F.silu(gate) * up) < tolerance


def test_rows_of_a_wider_tensor(device):
    wide = torch.randn(3, 50, device=device)
    part = wide[:, 10:30]
    assert error(gate_mul(part, "silu"), F.silu(part[:, :10]) * part[:, 10:]) < 1e-5


def test_no_rows(device):
    assert gate_mul(torch.empty(0, 8, device=device), "silu").shape == (0, 4)


def test_names_what_it_has(device):
    with pytest.raises(ConfigError, match="silu, gelu_tanh, gelu"):
        gate_mul(torch.zeros(1, 2, device=device), "relu")
