"""Runs the inline assembly of Gluon kernels on numpy arrays: the instructions that the products of few rows use, all lanes of all warps at
once. A register is an array [warps, 32] of 32 bits."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Register = np.ndarray[Any, np.dtype[np.uint32]]


def run(assembly: str, constraints: str, args: list[Register], pack: int) -> Register:
    """`inline_asm_elementwise` for tensors [warps · 32 · pack], of which a lane has `pack` neighbours: the result's bits."""
    lanes = args[0].size // (32 * pack)
    split = [np.ascontiguousarray(arg).view(np.uint32).reshape(lanes, 32, pack) for arg in args]
    operands = [part[:, :, number] for part in split for number in range(pack)]
    kinds = constraints.split(",")
    num_outputs = sum(kind.startswith("=") for kind in kinds)
    assert num_outputs == pack and len(kinds) == pack + len(operands)
    registers = {f"${pack + number}": operand for number, operand in enumerate(operands)}
    for line in re.split(r"[;\n]", assembly):
        _step(line.strip().strip("{}").strip() if "mma" not in line and "{lo" not in line else line.strip(), registers)
    return np.stack([registers[f"${number}"] for number in range(pack)], axis=-1).reshape(-1)


def _step(line: str, registers: dict[str, Register]) -> None:
    if not line or line.startswith(".reg"):
        return
    name, rest = line.split(None, 1)
    like = next(iter(registers.values()))

    def read(word: str) -> Register:
        if word.startswith("0f"):
            return np.full_like(like, int(word[2:], 16))
        if word.startswith("0x") or word.isdigit():
            return np.full_like(like, int(word, 0))
        return registers[word]

    if name.startswith("mma"):
        groups = [[part.strip() for part in group.split(",")] for group in re.findall(r"{([^}]*)}", rest)]
        is_bf16 = ".bf16." in name
        for word, result in zip(groups[0], _mma(*([read(word) for word in group] for group in groups[1:]), is_bf16=is_bf16), strict=True):  # fmt: skip
            registers[word] = result
        return
    if rest.startswith("{lo, hi}"):
        bits = read(rest.split(",")[2].strip())
        registers["lo"], registers["hi"] = bits & 0xFFFF, bits >> 16
        return
    target, *words = (word.strip() for word in rest.split(","))
    registers[target] = _OPERATIONS[name](*(read(word) for word in words))


def _f32(bits: Register) -> np.ndarray:
    return bits.view(np.float32)


def _bits(numbers: np.ndarray) -> Register:
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32)


def _halves(bits: Register, kind: torch.dtype = torch.float16) -> np.ndarray:
    """The two 16-bit floats of a register, [warps, 32, 2] float32."""
    pair = torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(kind).float()
    return pair.numpy().reshape(*bits.shape, 2)


def _joined(pairs: np.ndarray, kind: torch.dtype = torch.float16) -> Register:
    numbers = torch.from_numpy(np.ascontiguousarray(pairs, np.float32)).to(kind).view(torch.int16).numpy()
    return numbers.view(np.uint32).reshape(pairs.shape[:-1])


def _of_8_bits(bits: Register) -> Register:
    codes = torch.from_numpy(np.stack([bits & 0xFF, bits >> 8 & 0xFF], axis=-1).astype(np.uint8))
    return _joined(codes.view(torch.float8_e4m3fn).float().numpy())


def _to_pair(high: Register, low: Register) -> Register:
    with np.errstate(over="ignore"):
        return _joined(np.stack([_f32(low), _f32(high)], axis=-1))


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    assert (table == 0xEA).all()
    return a & b | c


_BF16 = torch.bfloat16
_OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "shr.u32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: a << count,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "mul.lo.u32": lambda a, b: a * b,
    "shf.r.wrap.b32": lambda low, high, count: low >> count | high << (32 - count),
    "neg.f32": lambda a: _bits(-_f32(a)),
    "fma.rn.f32": lambda a, b, c: _bits(_f32(a).astype(np.float64) * _f32(b) + _f32(c)),
    "cvt.f32.f16": lambda a: _bits(_halves(a)[..., 0]),
    "cvt.rn.f16x2.e4m3x2": _of_8_bits,
    "cvt.rn.f16x2.f32": _to_pair,
    "sub.f16x2": lambda a, b: _joined(_halves(a) - _halves(b)),
    "sub.bf16x2": lambda a, b: _joined(_halves(a, _BF16) - _halves(b, _BF16), _BF16),
    "mul.f16x2": lambda a, b: _joined(_halves(a) * _halves(b)),
    "mul.rn.bf16x2": lambda a, b: _joined(_halves(a, _BF16) * _halves(b, _BF16), _BF16),
    "mul.bf16x2": lambda a, b: _joined(_halves(a, _BF16) * _halves(b, _BF16), _BF16),
    "min.NaN.f16x2": lambda a, b: _joined(np.minimum(_halves(a), _halves(b))),
    "max.NaN.f16x2": lambda a, b: _joined(np.maximum(_halves(a), _halves(b))),
}


def _mma(a: list[Register], b: list[Register], start: list[Register], is_bf16: bool) -> list[Register]:
    """m16n8k16: lane 4 g + q has rows g and g + 8 and columns 2 q, 2 q + 1 and eight more of a block."""
    kind = _BF16 if is_bf16 else torch.float16
    warps = a[0].shape[0]
    left = np.zeros((warps, 2, 8, 2, 8), np.float32)  # half of rows, row, half of columns, column
    for number, bits in enumerate(a):
        left[:, number % 2, :, number // 2] = _halves(bits, kind).reshape(warps, 8, 8)
    right = np.zeros((warps, 8, 2, 8), np.float32)  # n, half of k, k
    for number, bits in enumerate(b):
        right[:, :, number] = _halves(bits, kind).reshape(warps, 8, 8)
    sums = left.reshape(warps, 16, 16) @ right.reshape(warps, 8, 16).transpose(0, 2, 1)
    parts = sums.reshape(warps, 2, 32, 2)
    return [_bits(parts[:, number // 2, :, number % 2] + _f32(bits)) for number, bits in enumerate(start)]
