"""MaskSlots: shared memory in which grammar processes leave the masks of rows for their rank."""

import mmap
import os

import numpy as np

from octavo.ipc.anonymous_memory import anonymous_memory
from octavo.sampling.grammar.bitmask import WORD, Ints, Words


class MaskSlots:
    """`num_slots` masks for a vocabulary. A slot is written by one process at a time, and read once that process has said so."""

    def __init__(self, vocab_size: int, num_slots: int, fd: int = -1) -> None:
        """`fd`: of the memory of another MaskSlots; −1: new memory."""
        self._width = -(-vocab_size // WORD) + 1  # words: one that says that a process is at work, then the mask
        size = 4 * self._width * num_slots
        self.fd = anonymous_memory("octavo-masks", size) if fd < 0 else fd
        self._memory = mmap.mmap(self.fd, size)
        self._words: Words = np.frombuffer(self._memory, dtype=np.int32).reshape(num_slots, self._width)
        self._masks: list[Words] = [words[1:] for words in self._words]
        self._at = self._words.ctypes.data

    def mask(self, slot: int) -> Words:
        return self._masks[slot]

    def copies(self, slots: list[int]) -> Words:
        """[len(slots), words of a mask]"""
        return self._words[slots, 1:]

    def address(self, slot: int) -> int:
        return self._at + 4 * (slot * self._width + 1)

    def addresses(self, slots: list[int]) -> Ints:
        """[len(slots)]"""
        return np.array(slots, dtype=np.int64) * (4 * self._width) + (self._at + 4)

    @property
    def mask_bytes(self) -> int:
        return 4 * (self._width - 1)

    def mark(self, slot: int, is_busy: bool) -> None:
        """Note that a process works on the slot's row, or no longer: if it ends meanwhile, the rank reads which row it was."""
        self._words[slot, 0] = is_busy

    def is_busy(self, slot: int) -> bool:
        return bool(self._words[slot, 0])

    def close(self) -> None:
        del self._words, self._masks
        os.close(self.fd)
