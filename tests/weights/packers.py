"""Weights quantised and packed as each method defines it, value by value, with the values they represent. Independent of Octavo's
readers."""

import json
from collections.abc import Callable

import torch
from torch import Tensor

Parts = dict[str, Tensor]  # suffix after the module's name → tensor
Packer = Callable[[Tensor], tuple[Parts, Tensor]]  # weight [N, K] → parts, and the weight they represent

# The 16 levels of nf4, and any 256 for the scales of scales.
NF4_TABLE = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4_TABLE += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]


def words(numbers: list[list[int]], bits: int, order: list[int] | None = None) -> Tensor:
    """Pack rows of integers into rows of int32, 32 / bits to a word, the lowest bits first. `order`: which number goes where."""
    count = 32 // bits
    packed = []
    for row in numbers:
        packed.append([])
        for first in range(0, len(row), count):
            word = 0
            for place in range(count):
                number = row[first + (place if order is None else order[place])]
                assert 0 <= number < 1 << bits
                word |= number << bits * place
            packed[-1].append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(packed, dtype=torch.int32)


def cut(weight: Tensor, group_of: Tensor, bits: int, is_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K], zeros [N, G], scales [N, G] in float16; the zero is the middle for all groups, or each group's own, from 1."""
    most = (1 << bits) - 1
    num_groups = int(group_of.max()) + 1
    scales, zeros = torch.zeros(len(weight), num_groups), torch.zeros(len(weight), num_groups)
    for group in range(num_groups):
        mine = weight[:, group_of == group]
        if is_centred:
            scales[:, group], zeros[:, group] = mine.abs().amax(1) / (most / 2), (most + 1) // 2
        else:
            scales[:, group] = (mine.amax(1) - mine.amin(1)) / most
            zeros[:, group] = (-mine.amin(1) / scales[:, group]).round().clamp(1, most)
    scales = scales.half()
    codes = (weight / scales.float()[:, group_of] + zeros[:, group_of]).round().clamp(0, most)
    return codes.int(), zeros.int(), scales


def meant(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def gptq(bits: int = 4, group: int = 32, is_centred: bool = True, is_ordered: bool = False, version: int = 1) -> Packer:
    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        width = weight.shape[1]
        group_of = torch.arange(width) // group
        if is_ordered:
            group_of = group_of[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
        codes, zeros, scales = cut(weight, group_of, bits, is_centred)
        stored = zeros - 1 if version == 1 else zeros
        return {
            "qweight": words(codes.tolist(), bits).t(),
            "qzeros": words(stored.t().tolist(), bits),
            "scales": scales.t(),
            "g_idx": group_of.int(),
        }, meant(codes, zeros, scales, group_of)

    return pack


def awq(group: int = 32) -> Packer:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        group_of = torch.arange(weight.shape[1]) // group
        codes, zeros, scales = cut(weight, group_of, 4, is_centred=False)
        parts = {
            "qweight": words(codes.t().tolist(), 4, order),
            "qzeros": words(zeros.t().tolist(), 4, order),
            "scales": scales.t(),
        }
        return parts, meant(codes, zeros, scales, group_of)

    return pack


def packed_integers(bits: int = 4, group: int = 32, is_centred: bool = True) -> Packer:
    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        group_of = torch.arange(weight.shape[1]) // group
        codes, zeros, scales = cut(weight, group_of, bits, is_centred)
        parts = {
            "weight_packed": words(codes.tolist(), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_centred:
            parts["weight_zero_point"] = words(zeros.t().tolist(), bits).t()
        return parts, meant(codes, zeros, scales, group_of)

    return pack


def int8_rows(dtype: torch.dtype = torch.bfloat16) -> Packer:
    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / 127).to(dtype)
        numbers = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale.float()

    return pack


def float8(scale_name: str, block: tuple[int, int] | None) -> Packer:
    """`block`: rows and columns that share a scale, 0: all of them; None: one scale without dimensions."""

    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        num_rows, width = weight.shape
        high, wide = (block[0] or num_rows, block[1] or width) if block else (num_rows, width)
        scale = torch.empty(-(-num_rows // high), -(-width // wide))
        numbers, decoded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for row in range(len(scale)):
            for column in range(scale.shape[1]):
                at = (slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide))
                scale[row, column] = weight[at].abs().max() / 448
                numbers[at] = (weight[at] / scale[row, column]).to(torch.float8_e4m3fn)
                decoded[at] = numbers[at].float() * scale[row, column]
        return {"weight": numbers, scale_name: scale if block else scale[0, 0], "input_scale": torch.ones(1)}, decoded

    return pack


def four_bits(block: int = 64, nested: int = 0) -> Packer:
    """bitsandbytes' nf4; `nested`: number of blocks whose scales share a scale, 0: scales are not packed."""

    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        table, values = torch.tensor(NF4_TABLE), weight.reshape(-1)
        absmax = values.view(-1, block).abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
        parts: Parts = {"weight.quant_map": table}
        if nested:
            nested_table = torch.linspace(-1, 1, 256)
            offset = float(absmax.mean())
            groups = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % nested)).view(-1, nested)
            nested_absmax = groups.abs().amax(1)
            each = nested_absmax.repeat_interleave(nested)[: len(absmax)]
            codes = ((absmax - offset) / each)[:, None].sub(nested_table).abs().argmin(1)
            parts |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": nested_absmax}
            parts |= {"weight.nested_quant_map": nested_table}
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
            absmax = nested_table[codes] * each + offset
        else:
            parts["weight.absmax"] = absmax
        codes = (values.view(-1, block) / absmax[:, None]).reshape(-1)[:, None].sub(table).abs().argmin(1)
        pairs = codes.view(-1, 2)
        parts["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
        text = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return parts, (table[codes].view(-1, block) * absmax[:, None]).view(weight.shape)

    return pack


def int8_largest(weight: Tensor) -> tuple[Parts, Tensor]:
    """bitsandbytes' int8."""
    largest = weight.abs().amax(1)
    numbers = (weight * 127 / largest[:, None]).round().to(torch.int8)
    parts = {"weight": numbers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, numbers.float() * (largest / 127)[:, None]
