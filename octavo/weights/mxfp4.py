"""Safetensors files some of whose weights are MXFP4: 4-bit floats, 32 of which share a power of two, in two tensors each.
Knows nothing of models: NAME_blocks and NAME_scales come out as NAME, a matrix of all their rows, whatever is stacked in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.weights.safetensors_files import SafetensorsFiles

if TYPE_CHECKING:
    import torch

    from octavo.quants import Quants, Weight

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16  # of 32 weights
_ROWS_AT_ONCE = 4096  # bounds what is held of them in between


class Mxfp4Files:
    has_packed, packing = True, "MXFP4"

    def __init__(self, folder: Path) -> None:
        self._files = SafetensorsFiles(folder)
        self.num_bytes, self.stored_dtype = self._files.num_bytes, self._files.stored_dtype
        entries = self._files.entries
        self._packed = [name.removesuffix(_BLOCKS) for name in entries if name.endswith(_BLOCKS)]
        for name in self._packed:
            blocks, scales = entries[name + _BLOCKS], entries.get(name + _SCALES)
            if scales is None:
                raise ConfigError(f"{blocks.path}: {name}{_BLOCKS} lacks its {name}{_SCALES}: fetch the files again")
            is_pair = blocks.type == scales.type == "U8" and blocks.shape == (*scales.shape, _BLOCK_BYTES)
            if not is_pair or len(scales.shape) < 2:
                raise ConfigError(
                    f"{blocks.path}: {name} is no MXFP4 weight: {_BLOCKS} {blocks.type} {list(blocks.shape)} do not go with "
                    f"{_SCALES} {scales.type} {list(scales.shape)}"
                )

    def held_bytes(self, itemsize: int) -> int:
        from octavo.quants.exact import held_bytes

        sizes = [math.prod(self._files.entries[name + _BLOCKS].shape) * 2 for name in self._packed]
        return self._files.held_bytes(itemsize) + sum(held_bytes("MXFP4", size, itemsize) for size in sizes)

    def tensors(
        self, device: torch.device | str, dtype: torch.dtype, keep_packed: bool = False
    ) -> Iterator[tuple[str, Weight]]:
        """As the files have them; a packed one comes with the second of its two tensors."""
        halves: dict[str, torch.Tensor] = {}
        packed = set(self._packed)
        for name, tensor in self._files.tensors(device, dtype):
            ending = _BLOCKS if name.endswith(_BLOCKS) else _SCALES
            whole = name.removesuffix(ending)
            if whole not in packed:
                yield name, tensor
            elif (other := halves.pop(whole, None)) is None:
                halves[whole] = tensor.clone()  # a reader may write the next tensor over it
            else:
                blocks, scales = (tensor, other) if ending == _BLOCKS else (other, tensor)
                weight = _joined(blocks, scales)
                yield whole, weight if keep_packed else _decoded(weight, dtype)


def _joined(blocks: torch.Tensor, scales: torch.Tensor) -> Quants:
    """blocks [..., G, 16] and scales [..., G] → rows of quants. A block's bytes hold neighbours, a quant's those 16 apart."""
    import torch

    from octavo.quants import Quants

    num_groups = scales.shape[-1]
    blocks, scales = blocks.reshape(-1, num_groups, _BLOCK_BYTES), scales.reshape(-1, num_groups)
    rows = torch.empty(len(scales), num_groups, 1 + _BLOCK_BYTES, dtype=torch.uint8, device=blocks.device)
    rows[:, :, 0] = scales
    for first in range(0, len(scales), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        codes = torch.stack((blocks[some] & 15, blocks[some] >> 4), dim=-1).flatten(-2)  # [n, G, 32]
        rows[some, :, 1:] = codes[:, :, :_BLOCK_BYTES] | codes[:, :, _BLOCK_BYTES:] << 4
    return Quants("MXFP4", rows.flatten(1))


def _decoded(weight: Quants, dtype: torch.dtype) -> torch.Tensor:
    import torch

    decoded = torch.empty(weight.shape, dtype=dtype, device=weight.stored.device)
    for first in range(0, len(decoded), _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, len(decoded) - first)
        decoded[first : first + count] = weight.narrow_rows(first, count).dequantise()
    return decoded
