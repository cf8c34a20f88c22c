"""The GGUF container: metadata and the directory of tensors, memory-mapped.
Knows nothing of models, tokenizers, torch, or what the packed bytes mean."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

# type id → (name, elements in a block, bytes in a block)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # torch order: outermost first
    type: str  # a name of TYPES
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """An open file. `metadata` maps keys to str, int, float, bool or lists of those; `tensors` maps names to entries."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ConfigError(f"{path} is no GGUF file: it has only {size} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read_header(size)
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise ConfigError(
                f"{path} is truncated or corrupt near byte {self._at} of {size}: fetch it again"
            ) from error

    def bytes_of(self, name: str) -> memoryview:
        entry = self.tensors[name]
        return memoryview(self._map)[entry.offset : entry.offset + entry.num_bytes]

    def _read_header(self, size: int) -> None:
        if self._map[:4] != b"GGUF":
            raise ConfigError(f"{self.path} is no GGUF file: it starts with {self._map[:4]!r}")
        self._at = 4
        version, num_tensors, num_keys = self._scalar("<I"), self._scalar("<Q"), self._scalar("<Q")
        if version not in (2, 3):
            raise ConfigError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        self.metadata: dict[str, Any] = {self._string(): self._value(self._scalar("<I")) for _ in range(num_keys)}
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in entries:
            if kind not in TYPES:
                raise ConfigError(f"{self.path}: tensor {name} has the unknown type {kind}")
            type_name, block, block_bytes = TYPES[kind]
            num = 1
            for extent in shape:
                num *= extent
            entry = TensorEntry(name, shape, type_name, base + offset, num // block * block_bytes)
            if entry.offset + entry.num_bytes > size:
                raise ConfigError(
                    f"{self.path} is truncated: tensor {name} ends at byte {entry.offset + entry.num_bytes}, the file has {size}: fetch it again"
                )
            self.tensors[name] = entry

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, tuple(reversed(dims)), self._scalar("<I"), self._scalar("<Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("<I"), self._scalar("<Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                values = struct.unpack_from(f"<{count}{code[1]}", self._map, self._at)
                self._at += struct.calcsize(code) * count
                return list(values)
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ConfigError(f"{self.path} is corrupt near byte {self._at}: unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._map, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        if self._at + length > len(self._map):
            raise IndexError
        raw = self._map[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8", errors="surrogateescape")
