"""A GGUF adapter, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from octavo.weights.adapters.adapter_file import AdapterFile, Pair, check_count

if TYPE_CHECKING:
    from torch import Tensor

_MATRIX = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<side>[ab])")


class GGUFAdapter(AdapterFile):
    """Modules have their GGUF names: a family translates them."""

    def __init__(self, path: Path) -> None:
        self._file = file = GGUFFile(path)
        metadata = file.metadata
        if metadata.get("general.type") != "adapter":
            raise ConfigError(f"{path} is a GGUF file of a model, not of an adapter (general.type)")
        if metadata.get("adapter.type") != "lora":
            raise ConfigError(
                f"{path}: adapter.type is {str(metadata.get('adapter.type'))[:40]!r}; only lora is supported"
            )
        alpha = metadata.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ConfigError(f"{path}: adapter.lora.alpha is {str(alpha)[:40]!r}; it must be a number")
        self.architecture = str(metadata.get("general.architecture", ""))
        sides: dict[str, dict[str, str]] = {}
        for name in file.tensors:
            found = _MATRIX.fullmatch(name)
            if found is None:
                raise ConfigError(f"{path}: {name[:80]!r} is not a matrix of a LoRA adapter of attention or MLP")
            sides.setdefault(found["module"], {})[found["side"]] = name
        self._tensors = sides
        check_count(path, len(sides))
        super().__init__(path, {module: self._pair(module, float(alpha)) for module in sorted(sides)})

    @property
    def base(self) -> str:
        return str(self._file.metadata.get("general.base_model.0.name", ""))

    @property
    def places(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, entry.type, tuple(entry.shape)) for name, entry in self._file.tensors.items()]

    def contents(self) -> Iterator[memoryview]:
        return map(self._file.bytes_of, self._file.tensors)

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        return self._read(self._tensors[name]["a"]), self._read(self._tensors[name]["b"])

    def _read(self, tensor: str) -> Tensor:
        import torch

        from octavo.quants import dequantise

        entry = self._file.tensors[tensor]
        packed = torch.frombuffer(bytearray(self._file.bytes_of(tensor)), dtype=torch.uint8)
        return dequantise(packed, entry.type).view(entry.shape)

    def _pair(self, module: str, alpha: float) -> Pair:
        sides = self._tensors[module]
        if len(sides) != 2:
            raise ConfigError(f"{self._file.path} has only lora_{next(iter(sides))} of {module}: it is incomplete")
        down, up = self._file.tensors[sides["a"]], self._file.tensors[sides["b"]]
        if down.type not in ("F32", "F16", "BF16", "Q8_0") or up.type not in ("F32", "F16", "BF16", "Q8_0"):
            raise ConfigError(
                f"{self._file.path}: {module} is stored as {down.type} and {up.type}; F32, F16, BF16 and Q8_0 are supported"
            )
        if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or not all(down.shape + up.shape):
            raise ConfigError(
                f"{self._file.path}: {module} has shapes {list(down.shape)} and {list(up.shape)}: no two matrices of one rank"
            )
        rank = down.shape[0]
        return Pair(rank, down.shape[1], up.shape[0], alpha / rank if alpha else 1.0)
