"""Memory of a device that is freed and comes back: with tensors on a CPU, whose storages behave as a GPU's do."""

import pytest
import torch
from torch import nn

from octavo.device import Device
from octavo.weights.methods.base import Held
from octavo.worker import sleep
from octavo.worker.sleep import OffloadedMemory, tensors_of


class _Weight(Held):
    def __init__(self, codes: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.codes, self.parts = codes, parts

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    @property
    def name(self) -> str:
        return "codes"


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
    layers, offloaded = _Layers(), OffloadedMemory(Device("cpu"))
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
    stores, offloaded = list(together.unbind(1)), OffloadedMemory(Device("cpu"))
    offloaded.drop(stores)
    assert offloaded.num_bytes == together.nbytes and not together.untyped_storage().nbytes()
    offloaded.bring_back(lambda: None)
    assert together.shape == (4, 3, 8) and not together.any()
    stores[1][2] = 5.0
    assert together[2, 1].eq(5.0).all()


def test_who_watches_hears_of_every_part_that_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "_PART_BYTES", 1000)
    offloaded, calls = OffloadedMemory(Device("cpu")), []
    offloaded.keep([torch.zeros(100) for _ in range(10)], lambda: calls.append("kept"))
    offloaded.bring_back(lambda: calls.append("back"))
    assert calls == ["kept"] * 3 + ["back"] * 3, "4,000 bytes in storages of 400"
