"""Random weights: the same for the same seed and name, different otherwise, and small."""

import torch

from octavo.weights.formats.dummy import dummy_tensors

SHAPES = {"first": (64, 64), "second": (64, 64), "bias": (64,)}


def made(
    seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return dict(dummy_tensors(shapes, "cpu", dtype, seed))


def test_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    one = made(0)
    torch.manual_seed(2)
    again = made(0, {"before": (3,), **SHAPES})
    assert all(torch.equal(one[name], again[name]) for name in SHAPES)
    assert not torch.equal(one["first"], one["second"])
    assert not torch.equal(one["first"], made(1)["first"])


def test_values_are_small_and_spread() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = made(3, dtype=dtype)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
        weight = tensors["first"]
        assert weight.dtype == dtype
        assert 0.015 < weight.float().std().item() < 0.025 and weight.float().abs().max().item() < 0.2


def test_nothing_is_drawn_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    made(5)
    assert torch.equal(torch.get_rng_state(), before)
