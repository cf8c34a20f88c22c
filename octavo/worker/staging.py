"""Staging: send a step's integers to the device in one copy, without waiting for the device."""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.device import Device, Event

Column = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

_ALIGNMENT = 16  # bytes, for vector loads
_NUM_BLOCKS = 6  # two steps may be in flight, with three copies each


class Staging:
    def __init__(self, device: Device) -> None:
        self.device = device
        self._blocks = [_Block(device) for _ in range(_NUM_BLOCKS)]
        self._next = 0

    def send(self, columns: Sequence[Column], into: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Send the columns to the device, with their types and shapes. On a CPU they are not copied.

        `into`: a byte buffer on the device that is filled from its start, for readers with its fixed address."""
        if not self.device.is_cuda:
            return [torch.from_numpy(column) for column in columns]
        offsets, total = _offsets(columns)
        block = self._blocks[self._next]
        self._next = (self._next + 1) % _NUM_BLOCKS
        source = block.fill(columns, offsets, total)
        if into is None:
            into = torch.empty(total, dtype=torch.uint8, device=self.device.torch_device)
        into[:total].copy_(source, non_blocking=True)
        block.sent()
        return [_view(into, column, offset) for column, offset in zip(columns, offsets, strict=True)]


class _Block:
    """Pinned memory that is overwritten only after the copy out of it is done."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = device.pinned((0,), torch.uint8)
        self._event: Event = device.event()
        self._is_used = False

    def fill(self, columns: Sequence[Column], offsets: list[int], total: int) -> torch.Tensor:
        if self._is_used:
            self._event.wait()
        if total > self._memory.numel():
            self._memory = self._device.pinned((max(total, 2 * self._memory.numel(), 4096),), torch.uint8)
        memory = self._memory.numpy()
        for column, offset in zip(columns, offsets, strict=True):
            memory[offset : offset + column.nbytes] = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        return self._memory[:total]

    def sent(self) -> None:
        self._event.record()
        self._is_used = True


def _offsets(columns: Sequence[Column]) -> tuple[list[int], int]:
    offsets, total = [], 0
    for column in columns:
        offsets.append(total)
        total += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _view(memory: torch.Tensor, column: Column, offset: int) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=column.dtype)).dtype
    return memory[offset : offset + column.nbytes].view(dtype).view(column.shape)
