"""Engines and ranks import torch without parts that they do not use. Code that asks for such a part later gets the whole of it."""

import subprocess
import sys

import pytest

LIGHT = """
import sys
from octavo.ipc.lazy_torch import _PARTS, lazy_torch
with lazy_torch():
    import torch
there = [part for part in _PARTS if part in sys.modules]
assert not there, there
assert (torch.ones(2, 3) @ torch.ones(3, 2)).sum() == 12
"""
LATER = """
layer = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
layer(torch.ones(2, 3)).sum().backward()
optimizer.step()
import torch.optim, torch.optim.lr_scheduler, torch._meta_registrations
from torch.utils.data import DataLoader
assert torch.optim is sys.modules["torch.optim"] and isinstance(optimizer, torch.optim.SGD)
assert len(vars(torch._meta_registrations)) > 50
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
"""
EXPORT = """
exported = torch.export.export(layer, (torch.ones(2, 3),))
assert torch.equal(exported.module()(torch.ones(2, 3)), layer(torch.ones(2, 3)))
"""
BEFORE = """
import torch, sys
from octavo.ipc.lazy_torch import _PARTS, lazy_torch
parts = {part: sys.modules[part] for part in _PARTS}
with lazy_torch():
    import torch
assert all(sys.modules[part] is module for part, module in parts.items())
"""


def run(program: str) -> None:
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_parts_that_nobody_asks_for_are_left_out() -> None:
    run(LIGHT)


def test_who_asks_later_gets_all_of_a_part() -> None:
    run(LIGHT + LATER + EXPORT)


@pytest.mark.parametrize(
    "module", ["torch._meta_registrations", "torch._refs", "torch._prims", "torch._dynamo", "torch.optim.lr_scheduler"]
)
def test_more_of_torch_may_be_imported_in_any_order(module: str) -> None:
    export = EXPORT if module == "torch._dynamo" else ""  # it takes two seconds, and imports all of them
    run(
        f"{LIGHT}import {module}\nassert sys.modules['{module}'].__spec__.loader is {module}.__loader__\n{LATER}{export}"
    )


def test_a_torch_that_is_there_already_is_left_alone() -> None:
    run(BEFORE)
