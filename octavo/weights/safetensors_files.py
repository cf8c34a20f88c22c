"""Safetensors files, one or many, as a stream of named tensors: mapped on a CPU, read ahead for a GPU.
Knows nothing of models; until tensors() is called, nothing of torch either."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from octavo.errors import ConfigError
from octavo.weights.folder import WeightFiles, find_weights

if TYPE_CHECKING:
    import torch

    from octavo.device import Device
    from octavo.weights.ring import Region

# stored type → (bytes in an element, torch's name, the arithmetic type that holds it; "" for what is no weight)
_TYPES = {
    "F64": (8, "float64", "float32"), "F32": (4, "float32", "float32"),
    "F16": (2, "float16", "float16"), "BF16": (2, "bfloat16", "bfloat16"),
    "I64": (8, "int64", ""), "I32": (4, "int32", ""), "I16": (2, "int16", ""), "I8": (1, "int8", ""),
    "U8": (1, "uint8", ""), "BOOL": (1, "bool", ""),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """What a header says of one tensor."""

    type: str  # of _TYPES
    shape: tuple[int, ...]
    path: Path

    @property
    def arithmetic(self) -> str:
        """The arithmetic type that holds it; "": it is no weight by itself."""
        return _TYPES[self.type][2]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _TYPES[self.type][0]


class SafetensorsFiles:
    """Headers are read, and sizes checked, on construction: a damaged file is refused before memory is taken."""

    has_packed, packing = False, ""

    def __init__(self, folder: Path) -> None:
        files = find_weights(folder)
        self._plan: list[tuple[Path, tuple[str, ...]]] = []
        self.entries: dict[str, Entry] = {}
        for path in files.paths:
            with _opened(path, "numpy") as file:
                names = _wanted(file, path, files)
                for name in names:
                    if name in self.entries:
                        first = self.entries[name].path
                        raise ConfigError(f"{name} is both in {first} and in {path}: keep one of the files")
                    self.entries[name] = _entry(file, path, name)
            self._plan.append((path, names))
        self.num_bytes = sum(entry.num_bytes for entry in self.entries.values())
        bytes_of: Counter[str] = Counter()
        for entry in self.entries.values():
            bytes_of[entry.arithmetic] += entry.num_bytes
        del bytes_of[""]
        if not bytes_of:
            raise ConfigError(f"{folder} holds safetensors files without a weight in them: fetch them again")
        self.stored_dtype = bytes_of.most_common(1)[0][0]

    def held_bytes(self, itemsize: int) -> int:
        return sum(math.prod(entry.shape) * itemsize for entry in self.entries.values() if entry.arithmetic)

    def tensors(
        self, device: torch.device | str, dtype: torch.dtype, keep_packed: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What is not floating point keeps its type. A tensor may be a view of the file: copy what you keep.
        `keep_packed` changes nothing: none of these files holds packed weights."""
        from octavo.device import device_of

        if str(device) == "meta":
            return self._outlines(dtype)

        place = device_of(device)
        return self.read_ahead(place, dtype) if place.is_cuda else self._mapped(dtype)

    def _mapped(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for path, names in self._plan:
            with _opened(path, "pt") as file:
                for name in names:
                    tensor: torch.Tensor = file.get_tensor(name)
                    yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _outlines(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for name, entry in self.entries.items():
            stored: torch.dtype = getattr(torch, _TYPES[entry.type][1])
            kind = dtype if stored.is_floating_point else stored
            yield name, torch.empty(entry.shape, dtype=kind, device="meta")

    def read_ahead(
        self, device: Device, dtype: torch.dtype, chunk_bytes: int = 0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same through a ring of pinned buffers, on to any device. `chunk_bytes`: of one buffer; 0: as it is best."""
        from octavo.weights import ring

        regions = [region for path, names in self._plan for region in _regions(path, names)]
        for name, tensor in ring.read_ahead(regions, device, chunk_bytes or ring.CHUNK_BYTES):
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _opened(path: Path, framework: str) -> Any:
    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        raise ConfigError(f"{path} is truncated or corrupt ({error}): fetch it again") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _regions(path: Path, names: tuple[str, ...]) -> list[Region]:
    """Where each tensor lies, in the file's order: a length, a JSON header, then the bytes. It was checked when opened."""
    import torch

    from octavo.weights.ring import Region

    with open(path, "rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_len))
    regions = []
    for name in names:
        entry = header[name]
        dtype: torch.dtype = getattr(torch, _TYPES[entry["dtype"]][1])
        regions.append(Region(name, path, 8 + header_len + entry["data_offsets"][0], dtype, tuple(entry["shape"])))
    return sorted(regions, key=lambda region: region.offset)


def _wanted(file: Any, path: Path, files: WeightFiles) -> tuple[str, ...]:
    there = tuple(file.keys())
    if files.names is None:
        return there
    wanted = files.names[path]
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise ConfigError(f"{path} lacks the tensor {missing[0]} that the index puts there: fetch both again")
    return wanted


def _entry(file: Any, path: Path, name: str) -> Entry:
    found = file.get_slice(name)
    stored = found.get_dtype()
    if stored not in _TYPES:
        raise ConfigError(
            f"{path}: tensor {name} is stored as {stored}, which cannot be read; "
            "pass a checkpoint in F32, F16 or BF16, or a GGUF file"
        )
    return Entry(stored, tuple(found.get_shape()), path)
