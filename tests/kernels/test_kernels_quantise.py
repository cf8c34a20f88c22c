"""Rows quantised to 8 bits against the same in plain torch: on a GPU, or in Triton's interpreter."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

quantise = pytest.importorskip("octavo.kernels.triton.elementwise.quantise")

SIZES = [(1, 16), (3, 96), (5, 1024), (300, 40)]  # 300 rows: several rows in a program, and the last program not full


@pytest.fixture(autouse=True)
def _infinities_are_no_warning() -> Iterator[None]:
    """Ignore numpy's warnings in the interpreter, such as for exp(100); a GPU gives none."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def rows_of(num_rows: int, size: int, device: torch.device) -> torch.Tensor:
    """Rows of very different norms, one of them zeros; a slice, so that rows have gaps between them."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, size + 8, generator=generator) * torch.logspace(-3, 2, num_rows)[:, None]
    x[num_rows // 2] *= num_rows == 1
    return x.to(device, torch.bfloat16)[:, :size]


def check(found: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> None:
    numbers, scales = found
    assert numbers.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert numbers.shape == expected.shape and scales.shape == (expected.shape[0], 1)
    torch.testing.assert_close(
        scales, expected.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448, rtol=1e-5, atol=0
    )
    # Three bits of mantissa: within half of 1/8 of the value, or of the smallest step, 2**-9, where that is larger.
    nearest = torch.maximum(expected.abs() / 16, scales * 2.0**-10)
    assert ((numbers.float() * scales - expected).abs() <= nearest * 1.001).all()


@pytest.mark.parametrize("shape", SIZES)
def test_rows_keep_four_bits_of_their_numbers(shape: tuple[int, int], device: torch.device) -> None:
    x = rows_of(*shape, device)
    check(quantise.quantise_rows(x), x.float())


@pytest.mark.parametrize("shape", SIZES)
def test_norm_first(shape: tuple[int, int], device: torch.device) -> None:
    x = rows_of(*shape, device)
    weight = torch.linspace(-1, 2, shape[1], device=device, dtype=torch.bfloat16)
    check(quantise.rms_norm_fp8(x, weight, 1e-5), F.rms_norm(x.float(), shape[1:], weight.float(), 1e-5))


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SIZES)
def test_gate_first(shape: tuple[int, int], name: str, device: torch.device) -> None:
    gate_up = rows_of(shape[0], 2 * shape[1], device)
    gate, up = gate_up.float().chunk(2, dim=1)
    activated = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
    check(quantise.silu_mul_fp8(gate_up, name), activated * up)


def test_no_rows(device: torch.device) -> None:
    numbers, scales = quantise.quantise_rows(torch.empty(0, 32, device=device))
    assert numbers.shape == (0, 32) and scales.shape == (0, 1)


def test_a_broken_row_breaks_no_other(device: torch.device) -> None:
    x = rows_of(4, 64, device)
    expected = quantise.quantise_rows(x)
    x = x.clone()
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    numbers, scales = quantise.quantise_rows(x)
    for row in (0, 3):
        assert torch.equal(numbers[row].float(), expected[0][row].float()) and scales[row] == expected[1][row]
