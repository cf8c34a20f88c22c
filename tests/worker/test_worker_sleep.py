"""Memory of a device that is freed and comes back: with tensors on a CPU, whose storages behave as a GPU's do."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from octavo.device import Device
from octavo.weights.methods.base import Held
from octavo.worker import sleep
from octavo.worker.sleep import HostChunks, OffloadedMemory, tensors_of


class _Weight(Held):
    def __init__(self, codes: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.codes, self.parts = codes, parts

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    @property
    def name(self) -> str:
        return "codes"


def offloaded_memory() -> OffloadedMemory:
    """With chunks that storages fill in part, exactly, and several of."""
    device = Device("cpu")
    return OffloadedMemory(device, HostChunks(device, chunk_bytes=100, pause=0.0))


class _Layers(nn.Module):
    """A parameter, a buffer, weights that a method holds, one of which is tied, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(64))
        self.part = self.table[16:32]
        shared = torch.randint(0, 255, (128,), dtype=torch.uint8)
        self.head, self.embedding = _Weight(shared, [torch.randn(3), torch.randn(5)]), _Weight(shared, [])


def test_weights_come_back_bit_by_bit_and_take_no_memory_meanwhile() -> None:
    layers, offloaded = _Layers(), offloaded_memory()
    tensors = list(tensors_of(layers))  # type: ignore[arg-type]
    before = [tensor.clone() for tensor in tensors]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 6
    num_bytes = sum(
        storage.nbytes() for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values()
    )
    for _ in range(2):
        offloaded.keep(tensors, lambda: None)
        assert offloaded.num_bytes == num_bytes and all(not tensor.untyped_storage().nbytes() for tensor in tensors)
        offloaded.bring_back(lambda: None)
        assert not offloaded.num_bytes
        assert all(torch.equal(now, was) for now, was in zip(tensors, before, strict=True))
    layers.table[20] = 7.0
    assert layers.part[4] == 7.0, "views still share their memory"
    assert layers.head.codes.data_ptr() == layers.embedding.codes.data_ptr(), "and so do tied weights"


def test_pages_come_back_as_zeros() -> None:
    together = torch.ones(4, 3, 8)
    stores, offloaded = list(together.unbind(1)), offloaded_memory()
    offloaded.drop(stores)
    assert offloaded.num_bytes == together.nbytes and not together.untyped_storage().nbytes()
    offloaded.bring_back(lambda: None)
    assert together.shape == (4, 3, 8) and not together.any()
    stores[1][2] = 5.0
    assert together[2, 1].eq(5.0).all()


def test_who_watches_hears_of_every_part_that_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "_PART_BYTES", 1000)
    offloaded, calls = offloaded_memory(), []
    offloaded.keep([torch.zeros(100) for _ in range(10)], lambda: calls.append("kept"))
    offloaded.bring_back(lambda: calls.append("back"))
    # 4,000 bytes of host memory that is found, and as many that are copied.
    assert calls == ["kept"] * 8 + ["back"] * 4


def test_host_memory_is_freed_afterwards_unless_it_is_wanted_again() -> None:
    chunks = HostChunks(Device("cpu"), chunk_bytes=100, pause=3600.0)
    offloaded, numbers = OffloadedMemory(chunks._device, chunks), torch.arange(250, dtype=torch.uint8)
    offloaded.keep([numbers], lambda: None)
    is_read = threading.Event()
    host, offloaded._host = offloaded._host, [*offloaded._host]
    chunks.give_back(host, is_read.wait)
    assert not chunks.num_unused, "the device still reads them"
    is_read.set()
    while chunks.num_unused < 3:
        time.sleep(0.001)
    assert {chunks.take().data_ptr() for _ in range(3)} == {chunk.data_ptr() for chunk in host}

    quick = HostChunks(Device("cpu"), chunk_bytes=100, pause=0.0)
    for _ in range(3):
        quick.give_back([quick.take(), quick.take()], lambda: None)
    quick.settle()
    assert not quick.num_unused


EXITS_WHILE_MEMORY_IS_FREED = """
import torch
from octavo.device import Device
from octavo.worker.sleep import HostChunks

side = torch.rand(500, 500, dtype=torch.float64)

class SlowDevice(Device):
    def unpin(self, memory):
        torch.mm(side, side)  # native code that lets other threads run, as a driver's does

chunks = HostChunks(SlowDevice("cpu"), chunk_bytes=64, pause=0.0)
chunks.give_back([chunks.take() for _ in range(2000)], lambda: None)
while chunks.num_unused in (0, 2000):
    pass
print(chunks.num_unused > 0)
"""


def test_a_process_may_exit_while_host_memory_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS_WHILE_MEMORY_IS_FREED], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
