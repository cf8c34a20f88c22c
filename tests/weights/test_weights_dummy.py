"""Random weights: the same for the same seed and name, others otherwise, and small."""

import torch
from torch import nn

from octavo.weights.dummy import init_dummy


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, extra: bool = False) -> None:
        super().__init__()
        if extra:
            self.before = nn.Linear(3, 3, dtype=dtype)
        self.first = nn.Linear(64, 64, dtype=dtype)
        self.second = nn.Linear(64, 64, dtype=dtype)
        self.register_buffer("table", torch.arange(4.0))
        self.count = nn.Parameter(torch.tensor([7]), requires_grad=False)


def filled(seed: int, dtype: torch.dtype = torch.float32, extra: bool = False) -> Small:
    model = Small(dtype, extra)
    init_dummy(model, seed)
    return model


def test_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    one = filled(0)
    torch.manual_seed(2)
    again = filled(0, extra=True)
    assert torch.equal(one.first.weight, again.first.weight) and torch.equal(one.second.bias, again.second.bias)
    assert not torch.equal(one.first.weight, one.second.weight)
    assert not torch.equal(one.first.weight, filled(1).first.weight)


def test_values_are_small_and_spread() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = filled(3, dtype).first.weight
        assert weight.dtype == dtype and weight.requires_grad
        assert 0.015 < weight.float().std().item() < 0.025 and weight.float().abs().max().item() < 0.2


def test_what_is_no_weight_stays() -> None:
    model = filled(0)
    assert model.table.tolist() == [0, 1, 2, 3] and model.count.item() == 7
    assert torch.equal(torch.get_rng_state(), (init_dummy(model, 5), torch.get_rng_state())[1]), "no global draw"
