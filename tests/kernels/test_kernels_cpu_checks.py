"""What would make C read past the end of a tensor is refused, also by `python -O`, which drops asserts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.cpu import library
from octavo.kernels.cpu.library import BadCall, Kind
from tests.native import native

FOLDER = Path(library.__file__).parent
WRAPPERS = ("library", "attention", "experts", "sampling", "elementwise", "ops", "native")


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_wrapper_relies_on_asserts(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("wrong", [-1, 20, 2**40, -(2**62)])
def test_an_id_beyond_the_table_is_not_read(wrong: int) -> None:
    kernels = native()
    weight = library.pack(kernels.threads, torch.randn(20, 32), Kind.FLOAT32)
    ids = torch.tensor([0, 19, wrong, 3])
    with pytest.raises(BadCall, match="20 columns"):
        weight.columns(ids)
    with pytest.raises(BadCall, match="EMBED"):
        kernels.embed(ids, weight)
    with pytest.raises(BadCall, match="EMBED"):
        kernels.add_positions(torch.zeros(4, 32), ids, torch.randn(20, 32))
    with pytest.raises(BadCall, match="GATHER"):
        kernels.gather(torch.randn(20, 32), torch.tensor([wrong]))


SCRIPT = """
import torch
from octavo.kernels.cpu import library, sampling
from octavo.kernels.cpu.library import BadCall, Kind, Threads
from octavo.kernels.cpu.native import Native

native = Native(1)
threads = native.threads
weight = library.pack(threads, torch.randn(32, 64), Kind.FLOAT32)
x = library.prepare(threads, torch.randn(3, 64), Kind.FLOAT32)
records = sampling.new_records(3)
calls = [
    lambda: weight.columns(torch.tensor([32])),
    lambda: native.embed(torch.tensor([32]), weight),
    lambda: library.pack(threads, torch.zeros(3, 33, dtype=torch.uint8), Kind.CODES8),
    lambda: library.pack_quantised(threads, torch.zeros(3, 33), Kind.CODES8),
    lambda: library.product(threads, x, weight, torch.zeros(2, 32)),
    lambda: library.product(threads, x, weight, torch.zeros(3, 32), bias=torch.zeros(31)),
    lambda: native.linear(torch.randn(3, 63), [weight]),
    lambda: native.linear(torch.randn(3, 64), [weight], bias=torch.zeros(31)),
    lambda: sampling.choose(threads, torch.zeros(4, 9), records, torch.zeros(4, dtype=torch.int64)),
    lambda: sampling.choose(threads, torch.zeros(3, 9), records, torch.zeros(3, dtype=torch.int32)),
]
for number, call in enumerate(calls):
    try:
        call()
    except BadCall:
        continue
    raise SystemExit(f"call {number} was not refused")
print("refused", len(calls), __debug__)
"""


def test_without_asserts_wrong_calls_are_refused() -> None:
    native()  # skips the test where there are no kernels
    run = subprocess.run([sys.executable, "-O", "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "refused 10 False", run.stdout + run.stderr
