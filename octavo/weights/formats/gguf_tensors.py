"""The tensors of a GGUF file → torch tensors, decoded where they will be used, or packed as they are.
Knows nothing of models: names and layouts are translated by the family file it is given."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile, TensorEntry
from octavo.quants import PACKED_TYPES, PLAIN_TYPES, Quants, SameWeight, Weight, dequantise
from octavo.quants.exact import held_bytes

# What a layer computes with. Frequencies of the rotation are in some old files, and follow from the metadata.
_LAYER = re.compile(r"blk\.\d+\.(?!attn_rot_embd\b)")


class GGUFTensors:
    """`family` gives gguf_name(name) -> str | None (None: not a weight of the model) and gguf_fix(name, tensor, config).
    GGUF_ROWS_STAY_WHOLE, where it has that: its gguf_fix moves whole rows at most, so that it takes Quants too."""

    def __init__(self, file: GGUFFile, family: ModuleType, config: dict[str, Any]) -> None:
        self._file, self._family, self._config = file, family, config
        for name in file.tensors:
            if _LAYER.match(name) and family.gguf_name(name) is None:
                raise ConfigError(
                    f"{file.path}: {name[:80]!r} is no tensor of this architecture's layers as they are known here: without it "
                    "answers would be wrong"
                )
        self._plan = [
            (translated, entry)
            for entry in sorted(file.tensors.values(), key=lambda entry: entry.offset)
            if (translated := family.gguf_name(entry.name)) is not None
        ]
        for _, entry in self._plan:
            _require_decodable(file, entry)
        self.num_bytes = sum(entry.num_bytes for _, entry in self._plan)
        self.has_packed = any(self._stays_packed(entry) for _, entry in self._plan)
        self.stored_dtype = _stored_dtype([entry for _, entry in self._plan])
        types = {entry.type for _, entry in self._plan if entry.type in PACKED_TYPES}
        self.packing = ", ".join(sorted(types))

    def held_bytes(self, itemsize: int) -> int:
        return sum(
            held_bytes(entry.type if self._stays_packed(entry) else "", math.prod(entry.shape), itemsize)
            for _, entry in self._plan
        )

    def tensors(
        self, device: torch.device | str, dtype: torch.dtype, keep_packed: bool = False
    ) -> Iterator[tuple[str, Weight]]:
        """A tensor, or Quants, may be a view of the file: copy what you keep. None has more than two dimensions."""
        if str(device) == "meta":
            for name, entry in self._plan:
                yield name, self._fixed(name, torch.empty(_matrix(entry.shape), dtype=dtype, device="meta"))
            return
        # A private mapping: nothing is read before it is decoded, and nothing can be written back.
        whole = torch.from_file(str(self._file.path), shared=False, size=self._file.size, dtype=torch.uint8)
        for name, entry in self._plan:
            packed = whole[entry.offset : entry.offset + entry.num_bytes].to(device)
            if keep_packed and self._stays_packed(entry):
                yield name, self._fixed(name, Quants(entry.type, packed.view(_matrix(entry.shape)[0], -1)))
            else:
                yield name, self._fixed(name, dequantise(packed, entry.type).view(_matrix(entry.shape))).to(dtype)

    def _stays_packed(self, entry: TensorEntry) -> bool:
        rows_stay_whole = getattr(self._family, "GGUF_ROWS_STAY_WHOLE", False)
        return rows_stay_whole and entry.type in PACKED_TYPES and len(entry.shape) >= 2

    def _fixed(self, name: str, weight: SameWeight) -> SameWeight:
        fixed: SameWeight = self._family.gguf_fix(name, weight, self._config)
        return fixed


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Stacked matrices, as of many experts, come as one of all their rows."""
    return shape if len(shape) < 3 else (math.prod(shape[:-1]), shape[-1])


def _require_decodable(file: GGUFFile, entry: TensorEntry) -> None:
    if entry.type not in (*PLAIN_TYPES, *PACKED_TYPES):
        raise ConfigError(
            f"{file.path}: tensor {entry.name} is stored as {entry.type}, which cannot be read; "
            f"pass a file that uses only {' '.join([*PLAIN_TYPES, *PACKED_TYPES])}"
        )


def _stored_dtype(entries: list[TensorEntry]) -> str:
    """Of the largest share of the bytes. Quants were cut from 16-bit weights, whose range only bfloat16 surely holds."""
    names = {"F32": "float32", "F16": "float16"}
    shares: dict[str, int] = {}
    for entry in entries:
        name = names.get(entry.type, "bfloat16")
        shares[name] = shares.get(name, 0) + entry.num_bytes
    return max(shares, key=lambda name: shares[name], default="float32")
