"""How kernels are launched on GPUs other than the one they were measured on."""

import pytest
import torch

from octavo.kernels.triton.gemm.skinny import choose, choose_fp8
from octavo.kernels.triton.gemm.skinny_tile import TileChoice, stages_that_fit
from octavo.kernels.triton.runtime import chip

SMALL, LARGE = 101376, 232448  # shared bytes of compute capability 8.6, 8.9 and 12.0, and of 9.0


@pytest.fixture(autouse=True)
def forgetful():
    chip.starts_early.cache_clear()
    yield
    chip.starts_early.cache_clear()


@pytest.mark.parametrize(
    ("capability", "is_early"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)]
)
def test_no_kernel_starts_early_where_the_instruction_is_missing(monkeypatch, capability, is_early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chip.starts_early(torch.device("cuda", 0)) is is_early
    assert not chip.starts_early(torch.device("cpu"))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (3072, 1024), (4096, 4096), (14336, 4096), (4096, 14336)])
@pytest.mark.parametrize("num_rows", [3, 8, 16, 32, 64, 128])
def test_tiles_fit_into_the_shared_memory_there_is(num_rows, n, k, is_gated):
    choice = choose(num_rows, n, k, is_gated, 132)
    if not isinstance(choice, TileChoice):
        return
    rows = max(16, 1 << (num_rows - 1).bit_length())
    assert stages_that_fit(choice, rows, 2, 2, LARGE) == choice.num_stages  # as measured
    stages = stages_that_fit(choice, rows, 2, 2, SMALL)
    assert stages >= 2 and stages * (choice.block_n + rows) * choice.block_k * 2 <= SMALL


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336)])
@pytest.mark.parametrize("num_rows", [3, 8, 32, 64])
def test_tiles_of_weights_in_8_bits_fit_too(num_rows, n, k, is_gated):
    choice = choose_fp8(num_rows, n, k, is_gated, 132)
    if not isinstance(choice, TileChoice):
        return
    rows = max(16, 1 << (num_rows - 1).bit_length())
    assert stages_that_fit(choice, rows, 2, 1, LARGE) == choice.num_stages
    stages = stages_that_fit(choice, rows, 2, 1, SMALL)
    assert stages >= 2 and stages * (choice.block_n + rows * 2) * choice.block_k <= SMALL
