"""Read the tensors of a GGUF file: decoded on the target device, or packed as they are. The model family's module
translates names and layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile, TensorEntry
from octavo.quants import PACKED_TYPES, PLAIN_TYPES, Quants, QuantSizes, SameWeight, Weight, dequantise
from octavo.quants.exact import held_bytes
from octavo.weights.formats.safetensors_files import all_wanted

# A tensor that a layer computes with. Some old files also hold RoPE frequencies, which follow from the metadata.
_LAYER = re.compile(r"blk\.\d+\.(?!attn_rot_embd\b)")


class GGUFTensors:
    """A reader of GGUF tensors. `family` provides gguf_name(name) -> str | None (None: not a weight of the model) and
    gguf_fix(name, tensor, config). If it sets GGUF_ROWS_STAY_WHOLE, its gguf_fix only moves whole rows and accepts Quants."""

    def __init__(self, file: GGUFFile, family: ModuleType, config: dict[str, Any]) -> None:
        self._file, self._family, self._config = file, family, config
        for name in file.tensors:
            if _LAYER.match(name) and family.gguf_name(name) is None:
                raise ConfigError(
                    f"{file.path}: {name[:80]!r} is no tensor of this architecture's layers that Octavo supports: "
                    "without it answers would be wrong"
                )
        self._plan = [
            (translated, entry)
            for entry in sorted(file.tensors.values(), key=lambda entry: (entry.path, entry.offset))
            if (translated := family.gguf_name(entry.name)) is not None
        ]
        for _, entry in self._plan:
            _require_decodable(file, entry)
        self.num_bytes = sum(entry.num_bytes for _, entry in self._plan)
        self.packed_types = frozenset(entry.type for _, entry in self._plan if self._stays_packed(entry))
        self.stored_dtype = _stored_dtype([entry for _, entry in self._plan])
        types = {entry.type for _, entry in self._plan if entry.type in PACKED_TYPES}
        self.packing_label = ", ".join(sorted(types))

    def held_bytes(self, itemsize: int, sizes: QuantSizes) -> int:
        return sum(
            held_bytes(entry.type if self._stays_packed(entry) else "", math.prod(entry.shape), itemsize, sizes)
            for _, entry in self._plan
        )

    def tensors(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        keep_packed: bool = False,
        is_wanted: Callable[[str], bool] = all_wanted,
    ) -> Iterator[tuple[str, Weight]]:
        """Yield (name, weight). A weight may be a view of the file: copy what you keep. None has more than two dimensions."""
        if str(device) == "meta":
            for name, entry in self._plan:
                yield name, self._fixed(name, torch.empty(_matrix(entry.shape), dtype=dtype, device="meta"))
            return
        # A private mapping: bytes are read when they are decoded, and writes never reach the file.
        path, mapped = None, torch.empty(0, dtype=torch.uint8)
        for name, entry in self._plan:
            if not is_wanted(name):
                continue
            if entry.path != path:
                path, size = entry.path, entry.path.stat().st_size
                mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            packed = mapped[entry.offset : entry.offset + entry.num_bytes].to(device)
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
    """Flatten stacked matrices (experts) into one matrix with all their rows."""
    return shape if len(shape) < 3 else (math.prod(shape[:-1]), shape[-1])


def _require_decodable(file: GGUFFile, entry: TensorEntry) -> None:
    if entry.type not in (*PLAIN_TYPES, *PACKED_TYPES):
        raise ConfigError(
            f"{file.path}: tensor {entry.name} is stored as {entry.type}, which cannot be read; "
            f"pass a file that uses only {' '.join([*PLAIN_TYPES, *PACKED_TYPES])}"
        )


def _stored_dtype(entries: list[TensorEntry]) -> str:
    """The arithmetic type of most of the bytes. Quants were made from 16-bit weights, whose range only bfloat16 surely
    holds."""
    names = {"F32": "float32", "F16": "float16"}
    shares: dict[str, int] = {}
    for entry in entries:
        name = names.get(entry.type, "bfloat16")
        shares[name] = shares.get(name, 0) + entry.num_bytes
    return max(shares, key=lambda name: shares[name], default="float32")
