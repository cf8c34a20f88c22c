"""Record calls of the native library with the memory that they read and write, so that replay_native_calls.cpp can make them
again on another machine.

A recording is a file of commands. Numbers are int64, names have their length in a byte before them.
  I name                                  use an instruction set
  M memory address-mod-64 size bytes      memory, from now on with these contents
  A memory offset target target-offset    write an address into memory
  C name arguments                        call a function: N integer, F float bits, P memory offset, T threads
  R memory offset size                    write these bytes of memory to the file of results
Functions with a result write it to the file of results, too, as an int64."""

import bisect
import ctypes
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import attention, elementwise, library, ops, sampling
from octavo.kernels.cpu.experts import ExpertsCall
from octavo.kernels.cpu.library import Threads

WITH_RESULT = {
    "octavo_read_columns", "octavo_attention", "octavo_qk_norm_rope_store", "octavo_run", "octavo_read_all",
}  # fmt: skip
WITHOUT_RESULT = {
    "octavo_pack", "octavo_pack_quantised", "octavo_prepare", "octavo_product", "octavo_products", "octavo_rms_norm",
    "octavo_rms_norm_add", "octavo_cap", "octavo_silu_mul", "octavo_rms_norm_prepare", "octavo_uniforms", "octavo_sample",
}  # fmt: skip
BODIES = {  # the member of an operation's union
    ops.Code.EMBED: "embed", ops.Code.ROTATE: "rotate", ops.Code.LINEAR: "linear", ops.Code.GATE: "gate",
    ops.Code.QK_NORM_ROPE_STORE: "qk_norm_rope", ops.Code.ATTEND: "attention", ops.Code.GATHER: "move",
    ops.Code.NORM: "move", ops.Code.EXPERTS: "experts", ops.Code.CAP: "cap",
}  # fmt: skip


@dataclass
class Memory:
    id: int
    start: int
    size: int
    keep: object  # so that its address is not used again
    known: bytes | None = None  # the contents that the replaying side has, or has computed itself


@dataclass
class Result:
    """What a replay must give: a number, or a tensor, exactly or nearly."""

    name: str
    expected: int | torch.Tensor
    is_exact: bool = True


class Recorder:
    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.results: list[Result] = []
        self.called: set[str] = set()
        self._commands = bytearray()
        self._memories: list[Memory] = []  # ascending by address
        self._num_memories = 0

    @contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Record the calls inside. Every address that a call gets comes from Tensor.data_ptr, or was made known."""
        loaded = library.library()
        for declare in (elementwise.functions, sampling.functions, attention.functions, ops._function):
            declare.cache_clear()  # another test may have loaded the library anew: arguments are declared for each
            declare()
        ops._function.cache_clear()
        data_ptr = torch.Tensor.data_ptr

        def noted(tensor: torch.Tensor) -> int:
            if type(tensor) is torch.Tensor:  # a tape's buffers have addresses that are never used
                storage = tensor.untyped_storage()
                self._know(storage.data_ptr(), storage.nbytes(), storage)
            return data_ptr(tensor)

        noted.__name__ = "data_ptr"  # a tape's buffers refuse what they do not know by its name
        try:
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "data_ptr", noted)
                patched.setattr(library, "_arena", library.aligned)  # weights must not share a tensor of 32 MB
                for name in WITH_RESULT | WITHOUT_RESULT:
                    patched.setattr(loaded, name, _Recorded(self, name, getattr(loaded, name)))
                yield
        finally:
            ops._function.cache_clear()

    def know(self, array: np.ndarray) -> None:
        self._know(array.ctypes.data, array.nbytes, array)

    def result(self, name: str, tensor: torch.Tensor, is_exact: bool = True) -> None:
        assert tensor.is_contiguous(), name
        memory, offset = self._find(tensor.data_ptr())
        self._write("R", memory.id, offset, tensor.nbytes)
        self.results.append(Result(name, tensor.clone(), is_exact))

    def save(self, path: Path, isa: str) -> None:
        path.write_bytes(b"I" + _named(isa) + self._commands)

    # ── commands ────────────────────────────────────────────────────────────────────────────────────

    def _write(self, command: str, *numbers: int) -> None:
        self._commands += command.encode() + struct.pack(f"<{len(numbers)}q", *numbers)

    def _know(self, start: int, size: int, keep: object) -> None:
        index = bisect.bisect_right(self._memories, start, key=lambda memory: memory.start)
        if index and self._memories[index - 1].start == start:
            assert self._memories[index - 1].size == size
        elif size:
            self._memories.insert(index, Memory(self._new_id(), start, size, keep))

    def _new_id(self) -> int:
        self._num_memories += 1
        return self._num_memories

    def _find(self, address: int) -> tuple[Memory, int]:
        index = bisect.bisect_right(self._memories, address, key=lambda memory: memory.start) - 1
        memory = self._memories[index]
        assert index >= 0 and address < memory.start + memory.size, f"nobody knows what is at {address:#x}"
        return memory, address - memory.start

    def call(self, name: str, function, arguments: Sequence[object]) -> int:
        self.called.add(name)
        used: list[Memory] = []
        words = bytearray()
        for kind, argument in zip(function.argtypes, arguments, strict=True):
            words += self._argument(kind, argument, used)
        if name in ("octavo_sample", "octavo_uniforms"):
            for memory in used:
                if isinstance(memory.keep, np.ndarray) and memory.keep.dtype == sampling.RECORD:
                    self._send_records(memory, used)
        for memory in used:
            self._send(memory)
        self._commands += b"C" + _named(name) + words
        returned: int = function(*arguments)
        for memory in used:
            memory.known = ctypes.string_at(memory.start, memory.size)
        if name in WITH_RESULT:
            self.results.append(Result(name, returned))
        return returned

    def _argument(self, kind: type, argument: object, used: list[Memory]) -> bytes:
        if kind is ctypes.c_float:
            return b"F" + struct.pack("<fi", argument, 0)
        if kind is not ctypes.c_void_p and not issubclass(kind, ctypes._Pointer):
            return b"N" + struct.pack("<q", argument)
        if argument is None:
            return b"N" + struct.pack("<q", 0)
        if argument == self.threads.pointer:
            return b"T" + struct.pack("<q", self.threads.num_threads)
        if isinstance(argument, int):
            memory, offset = self._find(argument)
            used.append(memory)
            return b"P" + struct.pack("<qq", memory.id, offset)
        record = getattr(argument, "_obj", argument)  # of byref()
        assert isinstance(record, ctypes.Structure | ctypes.Array)
        return b"P" + struct.pack("<qq", self._send_record(record, used), 0)

    def _send(self, memory: Memory) -> None:
        now = ctypes.string_at(memory.start, memory.size)
        if now != memory.known:  # new, or changed by others than native calls
            self._write("M", memory.id, memory.start % 64, memory.size)
            self._commands += now
            memory.known = now

    def _send_record(self, record: ctypes.Structure | ctypes.Array, used: list[Memory]) -> int:
        """Send the contents of a structure or an array of them, and what it points to. Returns its id."""
        start, size, id = ctypes.addressof(record), ctypes.sizeof(record), self._new_id()
        self._write("M", id, 0, size)
        self._commands += ctypes.string_at(start, size)
        for one in record if isinstance(record, ctypes.Array) else [record]:
            for address, target in self._addresses(one, used):
                self._write("A", id, address - start, *target)
        return id

    def _addresses(self, record: ctypes.Structure, used: list[Memory]) -> Iterator[tuple[int, tuple[int, int]]]:
        """Where in the record an address lies, and what it is the address of."""
        if isinstance(record, ops.Op):
            yield from self._addresses(getattr(record, BODIES[ops.Code(record.code)]), used)
            return
        for name, kind in record._fields_:
            value, place = getattr(record, name), ctypes.addressof(record) + getattr(type(record), name).offset
            if isinstance(value, ctypes.Structure):
                yield from self._addresses(value, used)
            elif isinstance(value, ctypes._Pointer):  # to products, several of them
                count = record.num_experts if isinstance(record, ExpertsCall) else record.num_products
                if value:
                    array = ctypes.cast(value, ctypes.POINTER(library.Product * count)).contents
                    yield place, (self._send_record(array, used), 0)
            elif kind is ctypes.c_void_p and value:
                memory, offset = self._find(value)
                used.append(memory)
                self._send(memory)
                yield place, (memory.id, offset)

    def _send_records(self, memory: Memory, used: list[Memory]) -> None:
        """Parameters of sampling hold addresses."""
        self._send(memory)
        records = memory.keep
        assert isinstance(records, np.ndarray)
        for row, record in enumerate(records):
            for name in ("tokens", "mask"):
                if record[name]:
                    target, offset = self._find(int(record[name]))
                    used.append(target)
                    self._send(target)
                    place = row * sampling.RECORD.itemsize + sampling.RECORD.fields[name][1]
                    self._write("A", memory.id, place, target.id, offset)


class _Recorded:
    """A function of the library that records its calls."""

    def __init__(self, recorder: Recorder, name: str, function) -> None:
        self._recorder, self._name, self._function = recorder, name, function

    def __call__(self, *arguments: object) -> int:
        return self._recorder.call(self._name, self._function, arguments)


def _named(name: str) -> bytes:
    return bytes([len(name)]) + name.encode()


def replayed(command: Sequence[str], recorder: Recorder, isa: str, folder: Path) -> list[int | torch.Tensor]:
    """Make the calls again with a replaying program and an instruction set → what they give, as in recorder.results."""
    recording, given = folder / f"recording-{isa}", folder / f"results-{isa}"
    recorder.save(recording, isa)
    ran = subprocess.run(
        [*command, str(recording), str(given)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, f"status {ran.returncode}: {ran.stderr}"
    content, found = given.read_bytes(), []
    for result in recorder.results:
        expected = result.expected
        size = 8 if isinstance(expected, int) else expected.nbytes
        part, content = content[:size], content[size:]
        if isinstance(expected, int):
            found.append(struct.unpack("<q", part)[0])
        else:
            found.append(torch.frombuffer(bytearray(part), dtype=expected.dtype).view(expected.shape))
    assert not content
    return found
