"""Pack integers and their scales into quants of a type that has a kernel. Nothing is rounded; the caller makes sure that all
numbers fit."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quants import Quants


def q4_0(scales: Tensor, codes: Tensor) -> Quants:
    """scales [N, K / 32] float16, codes [N, K] uint8 below 16 → weights of scale · (code − 8)."""
    halves = codes.view(len(codes), -1, 2, 16)
    return _rows("Q4_0", _bytes_of(scales), halves[:, :, 0] | halves[:, :, 1] << 4)


def q5_0(scales: Tensor, codes: Tensor) -> Quants:
    """scales [N, K / 32] float16, codes [N, K] uint8 below 32 → weights of scale · (code − 16)."""
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    fifth = ((codes >> 4).view(len(codes), -1, 4, 8) << places).sum(dim=3, dtype=torch.uint8)
    halves = (codes & 15).view(len(codes), -1, 2, 16)
    return _rows("Q5_0", _bytes_of(scales), fifth, halves[:, :, 0] | halves[:, :, 1] << 4)


def q8_0(scales: Tensor, numbers: Tensor) -> Quants:
    """scales [N, K / 32] float16, numbers [N, K] int8 → weights of scale · number."""
    return _rows("Q8_0", _bytes_of(scales), numbers.view(torch.uint8).view(len(numbers), -1, 32))


def fp8(scales: Tensor, numbers: Tensor) -> Quants:
    """scales [N, K / 32] float32, numbers [N, K] float8_e4m3fn → weights of scale · number."""
    steps = scales.contiguous().view(torch.uint8).view(*scales.shape, 4)
    return _rows("FP8", steps, numbers.contiguous().view(torch.uint8).view(len(numbers), -1, 32))


def q6_k(outer: Tensor, scales: Tensor, codes: Tensor) -> Quants:
    """outer [N, K / 256] float16, scales [N, K / 16] int8, codes [N, K] uint8 below 64 → outer · scale · (code − 32)."""
    parts = codes.view(len(codes), -1, 2, 4, 32)  # two halves of four parts
    low = (parts[:, :, :, :2] & 15 | (parts[:, :, :, 2:] & 15) << 4).flatten(2)  # 128 bytes
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device).view(4, 1)
    top = (parts >> 4 << shifts).sum(dim=3, dtype=torch.uint8).flatten(2)  # 64 bytes
    return _rows("Q6_K", low, top, scales.view(torch.uint8).view(len(codes), -1, 16), _bytes_of(outer))


def iq2_wide(outer: Tensor, scales: Tensor, nibbles: Tensor) -> Quants:
    """outer [N, K / 256] float16, scales [N, K / 32] int8, nibbles [N, K / 2] uint8, with the first 16 of each 32 codes in the
    low nibbles → outer / 8 · scale · IQ2_WIDE_LEVELS[code]."""
    small, codes = (part.view(torch.uint8).view(*outer.shape, -1) for part in (scales, nibbles))
    return _rows("IQ2_WIDE", _bytes_of(outer), small, codes)


def _bytes_of(scales: Tensor) -> Tensor:
    """[N, G] float16 → [N, G, 2] uint8."""
    assert scales.dtype == torch.float16
    return scales.contiguous().view(torch.uint8).view(*scales.shape, 2)


def _rows(type: str, *fields: Tensor) -> Quants:
    """Join fields of [N, quants in a row, bytes of the field], given in their order within a quant."""
    return Quants(type, torch.cat(fields, dim=2).flatten(1))
