"""Kernels are chosen by a step's captured size, so the choice is the same with and without graphs."""

import pytest

from octavo.kernels.triton.gemm import gated, skinny
from octavo.kernels.triton.runtime.batch_sizes import captured_size, ladder

SHAPES = [(3072, 1024), (6144, 2048), (9728, 2560), (14336, 4096), (576, 1536), (151936, 1024)]


@pytest.mark.parametrize("max_rows", [1, 7, 32, 100, 256, 1000])
def test_rows_and_the_size_they_are_padded_to_are_of_one_size(max_rows):
    sizes = ladder(max_rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        padded = next(size for size in sizes if size >= rows)
        assert captured_size(rows) == captured_size(padded) >= padded


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_padding_changes_no_kernel(n, k, is_gated):
    for rows in range(1, 513):
        padded = captured_size(rows)
        assert skinny.pays(rows, n, k, is_gated) == skinny.pays(padded, n, k, is_gated)
        assert gated.pays(rows, n, k, 132) == gated.pays(padded, n, k, 132)
        if padded <= skinny.MAX_ROWS:
            assert skinny.choose(rows, n, k, is_gated, 132) == skinny.choose(padded, n, k, is_gated, 132)
