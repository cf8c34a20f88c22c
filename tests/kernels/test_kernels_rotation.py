"""The rotary factors against torch's, at positions up to the longest contexts."""

import pytest
import torch

from octavo.kernels.triton.elementwise.rotation import rotation


@pytest.mark.parametrize("half", [4, 40, 64])
def test_equals_torch(device, half):
    positions = torch.tensor([0, 1, 2, 77, 4095, 131071], device=device)
    frequencies = (500000.0 ** -(torch.arange(half, dtype=torch.float32) / half)).to(device)
    found = rotation(positions, frequencies, 1.25)
    angles = positions.float()[:, None] * frequencies  # rounded to float32, as in the kernel
    expected = 1.25 * torch.stack((angles.double().cos(), angles.double().sin()), dim=-1)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)


def test_pairs_that_do_not_turn_are_not_stretched(device):
    found = rotation(torch.tensor([3, 90], device=device), torch.tensor([0.5, 0.0, 0.0], device=device), 1.25)
    assert found[:, 1:].tolist() == [[[1.0, 0.0]] * 2] * 2
