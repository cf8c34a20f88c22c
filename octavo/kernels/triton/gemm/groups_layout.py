"""Groups: codes of 4 or 8 bits in rows, whose neighbours share a scale and perhaps a minimum, as they lie in GPU memory.

weight = scale · (code − zero) + minimum, exactly. Scales and minimums may come in two steps, as files of the K types have them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

OUTER = 256  # weights that share an outer scale


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight [N, K]. K is a multiple of the group size, and of OUTER where there are outer scales."""

    codes: Tensor  # [N, K] int8 or float8_e4m3fn; or of 4 bits, [N, K / 2] uint8: byte 16 g + j is columns 32 g + j (its low half) and 32 g + 16 + j
    scales: Tensor  # [N, K / group size], float16 or float32; int8: each times its outer scale
    group_size: int  # 16, 32, 64, …
    zero: int = 0
    outer: Tensor | None = None  # [N, K / OUTER] float16
    minimums: Tensor | None = None  # [N, K / group size] float16; uint8: each times its outer minimum
    outer_minimums: Tensor | None = None  # [N, K / OUTER] float16, mostly below 0

    @property
    def has_nibbles(self) -> bool:
        return self.codes.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_bytes = self.codes.shape
        return num_rows, num_bytes * 2 if self.has_nibbles else num_bytes

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.scales, self.outer, self.minimums, self.outer_minimums

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    @property
    def kind(self) -> tuple[object, ...]:
        """Weights of one kind and width can be joined."""
        types = (None if tensor is None else tensor.dtype for tensor in self.tensors)
        return (*types, self.group_size, self.zero)

    def decode(self) -> Tensor:
        """[N, K] float32."""
        num_rows, width = self.shape
        if self.has_nibbles:
            halves = self.codes.view(num_rows, -1, 16)
            codes = torch.cat((halves & 15, halves >> 4), dim=2).view(num_rows, width).float()
        else:
            codes = self.codes.float()
        groups = codes.view(num_rows, -1, self.group_size)
        weights = (groups - self.zero) * _stepped(self.scales, self.outer).unsqueeze(2)
        if self.minimums is not None:
            weights = weights + _stepped(self.minimums, self.outer_minimums).unsqueeze(2)
        return weights.view(num_rows, width)

    def padded(self, num_rows: int) -> Groups:
        """With rows of zeros after the last."""
        missing = num_rows - self.shape[0]
        if not missing:
            return self
        # Scales and minimums of 0, so codes may be anything.
        return self._with([_longer(tensor, missing) for tensor in self.tensors])

    def joined(self, others: list[Groups]) -> Groups:
        """The rows of these, which are of one kind."""
        assert all(other.kind == self.kind for other in others)
        columns = zip(*(each.tensors for each in (self, *others)), strict=True)
        return self._with([_joined(list(tensors)) for tensors in columns])

    def _with(self, tensors: list[Tensor | None]) -> Groups:
        codes, scales, outer, minimums, outer_minimums = tensors
        assert codes is not None and scales is not None
        return replace(self, codes=codes, scales=scales, outer=outer, minimums=minimums, outer_minimums=outer_minimums)


def _stepped(values: Tensor, outer: Tensor | None) -> Tensor:
    if outer is None:
        return values.float()
    # A product of a float16 and a byte is exact in float32.
    return values.float() * outer.float().repeat_interleave(values.shape[1] // outer.shape[1], dim=1)


def _longer(tensor: Tensor | None, num_rows: int) -> Tensor | None:
    if tensor is None:
        return None
    raw = tensor.view(torch.uint8)
    return torch.cat((raw, raw.new_zeros(num_rows, raw.shape[1]))).view(tensor.dtype)


def _joined(tensors: list[Tensor | None]) -> Tensor | None:
    raws = [
        tensor.view(torch.uint8) for tensor in tensors if tensor is not None
    ]  # 8-bit floats cannot be joined as such
    return torch.cat(raws).view(tensors[0].dtype) if raws and tensors[0] is not None else None
