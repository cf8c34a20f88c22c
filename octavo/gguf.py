"""The GGUF container: metadata and the tensor directory of a memory-mapped file. quants/ decodes the packed bytes."""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4  # ggml's own limit
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)
MOST_PARTS = 1000

# type id → (name, elements in a block, bytes in a block)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # torch order: outermost first
    type: str  # a name in TYPES
    offset: int  # bytes from the start of the file
    num_bytes: int
    path: Path  # the file: a model may be split into several


class GGUFFile:
    """An open GGUF file. `metadata` maps keys to str, int, float, bool or lists of those; `tensors` maps names to entries."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(path, "rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise ConfigError(f"{path} is not a GGUF file: it has only {self.size} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{path} is truncated or corrupt near byte {self._at} of {self.size}: fetch it again"
            ) from error

    def bytes_of(self, name: str) -> memoryview:
        entry = self.tensors[name]
        return memoryview(self._map)[entry.offset : entry.offset + entry.num_bytes]

    def join_parts(self) -> None:
        """Add the tensors of the other parts of a model that is split into several files, of which this is the first. Raises
        ConfigError if a part is missing or belongs to another model."""
        count = self.metadata.get("split.count", 1)
        if count in (0, 1):
            return
        paths = part_paths(self.path)
        if not isinstance(count, int) or len(paths) != count:
            raise ConfigError(
                f"{self.path} is one of {count} parts, but is not named so: give it its name …-00001-of-{count:05}.gguf back"
                if isinstance(count, int)
                else f"{self.path} is corrupt: split.count is {count!r}; fetch it again"
            )
        if self.metadata.get("split.no", 0) != 0:
            raise ConfigError(f"{self.path} is not the first part of its model: its name was changed; fetch it again")
        for number, path in enumerate(paths[1:], 1):
            part = GGUFFile(path)
            if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
                raise ConfigError(f"{path} is not part {number + 1} of {count} of its model: fetch it again")
            if both := part.tensors.keys() & self.tensors.keys():
                raise ConfigError(f"{path} and another part both hold the tensor {min(both)[:80]!r}: fetch them again")
            self.tensors |= part.tensors
        wanted = self.metadata.get("split.tensors.count", len(self.tensors))
        if wanted != len(self.tensors):
            raise ConfigError(
                f"{self.path} and its other parts hold {len(self.tensors)} of {wanted} tensors: fetch them again"
            )

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ConfigError(f"{self.path} is not a GGUF file: it starts with {self._map[:4]!r}")
        self._at = 4
        version, num_tensors, num_keys = self._scalar("<I"), self._scalar("<Q"), self._scalar("<Q")
        if version not in (2, 3):
            raise ConfigError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                raise ConfigError(f"{self.path} is corrupt: it names {key[:80]!r} twice; fetch it again")
            self.metadata[key] = self._value(self._scalar("<I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise ConfigError(f"{self.path} is corrupt: general.alignment is {alignment}; fetch it again")
        base = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in entries:
            if name in self.tensors:
                raise ConfigError(f"{self.path} is corrupt: it names the tensor {name[:80]!r} twice; fetch it again")
            self.tensors[name] = self._placed(name, shape, kind, base + offset)
        self._require_apart()

    def _require_apart(self) -> None:
        before: TensorEntry | None = None
        for entry in sorted(self.tensors.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
            if before is not None and entry.offset < before.offset + before.num_bytes:
                raise ConfigError(
                    f"{self.path} is corrupt: the tensors {before.name[:80]!r} and {entry.name[:80]!r} overlap; fetch it again"
                )
            before = entry

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        if kind not in TYPES:
            raise ConfigError(f"{self.path}: tensor {name} has the unknown type {kind}")
        type_name, block, block_bytes = TYPES[kind]
        # Blocks never cross a row. Decoders reinterpret bytes in place, which needs the alignment that the format promises.
        if 0 in shape or (shape[-1] if shape else 1) % block or offset % 8:
            raise ConfigError(
                f"{self.path} is corrupt: tensor {name} ({type_name}, {shape}) is misplaced; fetch it again"
            )
        end = offset + math.prod(shape) // block * block_bytes
        if end > self.size:
            raise ConfigError(
                f"{self.path} is truncated: tensor {name} ends at byte {end}, the file has {self.size}: fetch it again"
            )
        return TensorEntry(name, shape, type_name, offset, end - offset, self.path)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("<I")
        if num_dims > _MOST_DIMS:
            raise ConfigError(
                f"{self.path} is corrupt: the tensor {name[:80]!r} has {num_dims} dimensions; fetch it again"
            )
        dims = [self._scalar("<Q") for _ in range(num_dims)]
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
            if item == _STRING:
                return self._strings(count)
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ConfigError(f"{self.path} is corrupt near byte {self._at}: unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._map, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has 100,000 strings, and every process reads it: one tight loop halves the time to open a file.
        unpack, data, at, end = struct.Struct("<Q").unpack_from, self._map, self._at, self.size
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                raise IndexError
            strings.append(data[start:at].decode("utf-8", errors="surrogateescape"))
        self._at = at
        return strings


def part_paths(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to, by their names: the file itself, unless it is named as one of several parts.
    They may not exist."""
    named = _PART.fullmatch(path.name)
    if named is None or not 1 <= int(named["number"]) <= int(named["total"]) <= MOST_PARTS:
        return [path]
    total = int(named["total"])
    return [path.with_name(f"{named['stem']}-{number:05}-of-{total:05}{path.suffix}") for number in range(1, total + 1)]
