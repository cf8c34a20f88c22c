"""What a rank does with a GPU's memory while its engine sleeps: weights go to pinned memory and come back; KV pages are freed, and are zero
when they come back. On a CPU the weights stay where they are, and pages are given back by number (Pages.give_back)."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch

from octavo.device import Device
from octavo.layers.model import DecoderModel
from octavo.weights.methods.base import Held


def tensors_of(model: DecoderModel) -> Iterator[torch.Tensor]:
    """Every tensor that a model's layers and the weights they hold refer to; one may come up several times. A tensor that is held in another
    way stays on the device, which costs memory, and nothing else."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        for value in vars(module).values():
            yield from _tensors_in(value)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case list() | tuple():
            for each in value:
                yield from _tensors_in(each)
        case Held():
            for each in vars(value).values():
                yield from _tensors_in(each)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from _tensors_in(getattr(value, field.name))


_PART_BYTES = 2**28
"""Copied between two calls of `moved`: a tenth of a second over PCIe, and longer where pinned memory is to be found first."""


class OffloadedMemory:
    """Memory of a device that is freed for a while. Tensors stay valid: each storage, which views share, is emptied and filled again, at
    another address. So nothing that has kept an address may be used afterwards: captured graphs are dropped."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []  # and its bytes on the host
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # and its size

    @property
    def num_bytes(self) -> int:
        """That are not on the device."""
        return sum(host.nbytes for _, host in self._kept) + sum(size for _, size in self._emptied)

    def keep(self, tensors: Iterable[torch.Tensor], moved: Callable[[], None]) -> None:
        """Copy what these tensors hold to the host, and free it on the device. `moved`: called now and then meanwhile."""
        num_bytes = 0
        for storage in _storages(tensors):
            host = self._device.pinned((storage.nbytes(),), torch.uint8)
            host.copy_(_bytes_of(storage), non_blocking=True)
            self._kept.append((storage, host))
            num_bytes = self._tell(num_bytes + host.nbytes, moved)
        self._device.synchronize()
        for storage, _ in self._kept:
            storage.resize_(0)

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free what these tensors hold. It will be zero."""
        for storage in _storages(tensors):
            self._emptied.append((storage, storage.nbytes()))
            storage.resize_(0)

    def bring_back(self, moved: Callable[[], None]) -> None:
        num_bytes = 0
        for storage, host in self._kept:
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)
            num_bytes = self._tell(num_bytes + host.nbytes, moved)
        for storage, size in self._emptied:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._device.synchronize()
        self._kept, self._emptied = [], []
        self._device.release_pinned()

    def _tell(self, num_bytes: int, moved: Callable[[], None]) -> int:
        """Call `moved` once so much is copied, not only queued. → bytes since the last call."""
        if num_bytes < _PART_BYTES:
            return num_bytes
        self._device.synchronize()
        moved()
        return 0


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory behind these tensors, each once; none that is empty."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
