"""Tape: the operations of a step, recorded once over buffers for the largest step, then run for every step by one native
call.

While recording, every buffer has addresses of its own, which are never read or written. finish() computes the lifetime of
each buffer and lets buffers that are not needed at the same time share memory, so that a step stays in the cache."""

import bisect
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.cpu import ops
from octavo.kernels.cpu.library import Threads, aligned, check

_ALIGNMENT = 64
_REGION = 1 << 30  # bytes of address space reserved at a time while recording; the memory is never touched

Field = tuple[ctypes.Structure, str]  # a field of an operation that holds an address


class NotRecordable(Exception):
    """The model did something with the buffers that a tape cannot record; str() says what."""


@dataclass(slots=True)
class _Buffer:
    start: int  # address while recording
    num_bytes: int
    count: ops.Count
    first: int = -1  # index of the operation that writes it first
    last: int = -1  # index of the operation that uses it last
    offset: int = -1  # place in the final memory
    width: int = 0  # floats per row; 0: no rows (scratch)


class Tape:
    def __init__(self, max_tokens: int, max_samples: int) -> None:
        self.max_tokens = max_tokens
        # Buffers per token and per sample are distinguished by their height, so the two heights must differ.
        self.max_samples = max_samples + (max_samples == max_tokens)
        self._ops: list[ops.Op] = []
        self._fields: list[tuple[list[Field], list[Field]]] = []  # per operation: fields that it reads, and writes
        self._buffers: list[_Buffer] = []  # ascending by address
        self._inputs: list[int] = []  # addresses of buffers that are filled before a run
        self._kept: list[object] = []  # objects whose addresses the operations hold
        self._region: Any = None
        self._room_left = self._next = 0
        self._array: ctypes.Array[ops.Op]
        self._memory: Tensor

    # ── recording ───────────────────────────────────────────────────────────────────────────────────

    def buffer(self, count: ops.Count, width: int) -> Tensor:
        """A buffer [rows, width] float32 for the largest step. Computing with it in torch raises NotRecordable."""
        height = self.max_tokens if count == ops.Count.PER_TOKEN else self.max_samples
        start = self._take(height * width * 4, count, width)
        memory = (ctypes.c_float * (height * width)).from_address(start)
        return torch.frombuffer(memory, dtype=torch.float32).view(height, width).as_subclass(_Room)

    def input(self, width: int) -> Tensor:
        """A buffer [tokens, width] that is filled before each run: pass it to finish() to learn where it lies."""
        room = self.buffer(ops.Count.PER_TOKEN, width)
        self._inputs.append(room.data_ptr())
        self._note_inputs()
        return room

    def _note_inputs(self) -> None:
        """An input is in use from before the first operation on."""
        for address in self._inputs:
            buffer = self._find(address)
            assert buffer is not None
            buffer.first, buffer.last = 0, max(buffer.last, 0)

    def scratch(self, num_bytes: int) -> int:
        """The address of scratch memory for the next operation only."""
        return self._take(num_bytes, ops.Count.PER_TOKEN)

    def _take(self, num_bytes: int, count: ops.Count, width: int = 0) -> int:
        num_bytes = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > self._room_left:
            size = max(_REGION, num_bytes)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._region = mmap.mmap(-1, size, flags=flags)
            self._kept.append(self._region)
            self._next = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
            self._room_left = size
        start = self._next
        self._next += num_bytes
        self._room_left -= num_bytes
        bisect.insort(self._buffers, _Buffer(start, num_bytes, count, width=width), key=lambda buffer: buffer.start)
        return start

    def count_of(self, x: Tensor) -> ops.Count:
        buffer = self._find(x.data_ptr())
        if buffer is None:
            raise NotRecordable("an operation reads a tensor that no operation of the step wrote")
        return buffer.count

    def add(self, op: ops.Op, reads: list[Field], writes: list[Field], keep: object = None) -> None:
        """Append an operation. `keep`: other objects that it points to, which must live as long."""
        self._use(len(self._ops), reads, writes)
        self._ops.append(op)
        self._fields.append((reads, writes))
        self._kept.append(keep)

    def _use(self, index: int, reads: list[Field], writes: list[Field]) -> None:
        for fields, is_write in ((reads, False), (writes, True)):
            for structure, name in fields:
                buffer = self._buffer_of(structure, name)
                assert is_write or buffer.first >= 0, "an operation reads what none has written"
                if buffer.first < 0:
                    buffer.first = index
                buffer.last = index

    def _buffer_of(self, structure: ctypes.Structure, name: str) -> _Buffer:
        buffer = self._find(getattr(structure, name))
        assert buffer is not None, "an operation reads or writes what is no buffer"
        return buffer

    def _find(self, address: int | None) -> _Buffer | None:
        if not address:
            return None
        index = bisect.bisect_right(self._buffers, address, key=lambda buffer: buffer.start) - 1
        if index < 0 or address >= self._buffers[index].start + self._buffers[index].num_bytes:
            return None
        return self._buffers[index]

    # ── compute only sampled rows ───────────────────────────────────────────────────────────────────

    def _gather_early(self, kept: set[int]) -> dict[int, int]:
        """Gather the sampled rows right after the last attention instead of at the end. → the new place of what was gathered, by its old
        one, if that changes. `kept`: addresses of results.

        The operations between the two work row by row, and only the last row of a prompt is sampled: the others are not
        needed once their keys and values are stored. (If the conditions do not hold, the tape is not changed.)"""
        codes = [ops.Code(op.code) for op in self._ops]
        if ops.Code.GATHER not in codes or ops.Code.ATTEND not in codes:
            return {}
        begin, end = len(codes) - codes[::-1].index(ops.Code.ATTEND), codes.index(ops.Code.GATHER)
        move = self._ops[end].move
        fields = [field for reads, writes in self._fields[begin:end] for field in (*reads, *writes)]
        entering = {b.start: b for b in (self._buffer_of(*field) for field in fields) if b.first < begin}
        gathered, result = self._buffer_of(move, "x"), self._buffer_of(move, "y")
        is_same_range = (move.x, move.x_stride, move.size) == (gathered.start, move.y_stride, result.width)
        is_same_range = is_same_range and (gathered.start in entering or gathered.first >= begin)
        used_later = any(b.last > end or b.width == 0 for b in entering.values())
        # A result of all tokens is not made of some of them.
        is_kept = any(
            self._buffer_of(*field).start in kept for _, writes in self._fields[begin:end] for field in writes
        )
        if begin >= end or not is_same_range or used_later or is_kept or not _BY_ROW.issuperset(codes[begin:end]):
            return {}
        moved = {
            start: self._take(self.max_samples * b.width * 4, ops.Count.PER_SAMPLE, b.width)
            for start, b in entering.items()
        }
        for op in self._ops[begin:end]:
            op.count = ops.Count.PER_SAMPLE
        self._move_fields(begin, end, moved)
        self._move_fields(end + 1, len(codes), {result.start: moved.get(gathered.start, gathered.start)})
        gathers = [_gather(start, entering[start].width, to) for start, to in moved.items()]
        self._ops[begin : end + 1] = [*gathers, *self._ops[begin:end]]
        self._fields[begin : end + 1] = [
            *(([(g.move, "x")], [(g.move, "y")]) for g in gathers),
            *self._fields[begin:end],
        ]
        for buffer in self._buffers:
            buffer.first = buffer.last = -1
        self._note_inputs()
        for index, (reads, writes) in enumerate(self._fields):
            self._use(index, reads, writes)
        return {result.start: moved.get(gathered.start, gathered.start)}

    def _move_fields(self, begin: int, end: int, moved: dict[int, int]) -> None:
        """Make operations begin … end − 1 use other buffers; `moved`: old start → new start."""
        for structure, name in _once(self._fields[begin:end]):
            buffer = self._buffer_of(structure, name)
            to = moved.get(buffer.start, buffer.start)
            setattr(structure, name, getattr(structure, name) - buffer.start + to)

    # ── from addresses to memory ────────────────────────────────────────────────────────────────────

    def finish(self, results: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Assign memory to every buffer. Returns the results, which are valid until the next run, and then the inputs."""
        moved_to = self._gather_early({result.data_ptr() for result in results})
        addresses = [tensor.data_ptr() for tensor in (*results, *inputs)]
        found = [self._find(moved_to.get(address, address)) for address in addresses]
        for buffer in found[: len(results)]:
            assert buffer is not None and buffer.first >= 0
            buffer.last = len(self._ops)
        self._memory = aligned(_place(self._buffers))
        base = self._memory.data_ptr()
        for structure, name in _once(self._fields):
            buffer = self._buffer_of(structure, name)
            setattr(structure, name, base + buffer.offset + getattr(structure, name) - buffer.start)
        self._array = ops.array(self._ops)
        moved = []
        for result, kept in zip((*results, *inputs), found, strict=True):
            assert kept is not None
            # What was gathered early may lie in a buffer for tokens, which may be fewer than samples could be.
            memory = self._memory[kept.offset : kept.offset + min(result.nbytes, kept.num_bytes)]
            width = result.shape[1]
            numbers = memory.view(torch.float32)
            moved.append(numbers[: len(numbers) // width * width].view(-1, width))
        return moved

    @property
    def num_ops(self) -> int:
        return len(self._ops)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def run(self, threads: Threads, step: ops.Step, seconds: "ctypes.Array[ctypes.c_double] | None" = None) -> None:
        check(
            step.num_tokens <= self.max_tokens and step.num_samples <= self.max_samples,
            f"a step of {step.num_tokens} tokens and {step.num_samples} samples does not fit the tape's buffers",
        )
        ops.run(threads, self._array, step, seconds)

    def names(self) -> list[str]:
        """The name of each operation, for a profile."""
        return [ops.Code(op.code).name.lower() for op in self._ops]


# Operations whose rows are independent of each other and of the step's other inputs.
_BY_ROW = {ops.Code.LINEAR, ops.Code.GATE, ops.Code.NORM, ops.Code.CAP, ops.Code.EXPERTS}


def _gather(x: int, width: int, y: int) -> ops.Op:
    op = ops.Op(ops.Code.GATHER, ops.Count.PER_SAMPLE)
    op.move = ops.Move(x, y, width, width, width)
    return op


def _once(fields: Sequence[tuple[list[Field], list[Field]]]) -> list[Field]:
    """All fields that operations read or write, without duplicates: a field changed in place is listed twice."""
    return list({(ctypes.addressof(s), n): (s, n) for both in fields for side in both for s, n in side}.values())


def _place(buffers: list[_Buffer]) -> int:
    """Assign an offset to each used buffer such that buffers with overlapping lifetimes do not overlap. Returns the total
    number of bytes."""
    total = 0
    placed: list[_Buffer] = []
    # The largest first: they are hardest to place.
    for buffer in sorted((b for b in buffers if b.first >= 0), key=lambda b: -b.num_bytes):
        offset = 0
        meanwhile = [other for other in placed if other.first <= buffer.last and buffer.first <= other.last]
        for other in sorted(meanwhile, key=lambda b: b.offset):
            if offset + buffer.num_bytes <= other.offset:
                break
            offset = max(offset, other.offset + other.num_bytes)
        buffer.offset = offset
        placed.append(buffer)
        total = max(total, offset + buffer.num_bytes)
    return max(total, _ALIGNMENT)


_LOOKS = {
    "__get__", "__getitem__", "__len__", "as_strided", "chunk", "data_ptr", "dim", "element_size", "flatten", "is_contiguous",
    "narrow", "numel", "permute", "select", "size", "split", "squeeze", "storage_offset", "stride", "t", "transpose", "unbind",
    "unflatten", "unsqueeze", "view", "view_as_complex", "view_as_real",
}  # fmt: skip


class _Room(Tensor):
    """A buffer while recording: torch may make views of it, but not compute with it.

    (A dispatch mode would check all tensors, but adds 1.8 s to a start: it imports torch's compiler.)"""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ not in _LOOKS:
            raise NotRecordable(f"torch computes {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})
