"""Random GGUF quants, and a numpy model of the CPU products: the same integers, the same float32 chain.
Independent of the kernels; weights/formats/gguf_tensors.py checks its decoding."""

from dataclasses import dataclass

import numpy as np
import torch

QUANTS = {  # weights, bytes, and where the float16 numbers are: the scale first
    "Q8_0": (32, 34, [0]), "Q4_0": (32, 18, [0]), "Q4_1": (32, 20, [0, 2]), "Q5_0": (32, 22, [0]), "Q5_1": (32, 24, [0, 2]),
    "Q4_K": (256, 144, [0, 2]), "Q5_K": (256, 176, [0, 2]), "Q6_K": (256, 210, [208]),
    "IQ4_NL": (32, 18, [0]), "IQ4_XS": (256, 136, [0]), "IQ2_WIDE": (256, 138, [0]), "Q2_K": (256, 84, [80, 82]),
}  # fmt: skip
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
IQ2_LEVELS = np.array([8, 25, 43, 0, -8, -25, -43])


@dataclass
class Codes:
    """N rows of W, G groups of 32, R runs in a group, each with its own scale."""

    codes: np.ndarray  # [N, G, 32] int64, centred
    scale: np.ndarray  # [N, G, R] float32
    minimum: np.ndarray | None  # [N, G, R] float32

    def weights(self) -> np.ndarray:  # [N, G * 32] float32
        num_rows, groups, runs = self.scale.shape
        scaled = self.codes.reshape(num_rows, groups, runs, -1).astype(np.float32) * self.scale[..., None]
        if self.minimum is not None:
            scaled = scaled + self.minimum[..., None]
        return scaled.reshape(num_rows, -1)


def random_quants(type: str, num_columns: int, depth: int, seed: int) -> torch.Tensor:
    """Random bytes, so that every code occurs: uint8 [N, bytes of a row]."""
    rng = np.random.default_rng(seed)
    weights, num_bytes, halves = QUANTS[type]
    rows = rng.integers(0, 256, (num_columns, depth // weights, num_bytes), dtype=np.uint8)
    for at, size in zip(halves, (0.02, 0.1), strict=False):
        numbers = rng.normal(0, size if weights == 32 else size / 40, (num_columns, depth // weights, 1))
        rows[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    if type == "IQ2_WIDE":
        low, high = rng.choice([0, 1, 2, 4, 5, 6], (2, num_columns, depth // weights, 128))
        rows[..., 10:] = low | high << 4
    return torch.from_numpy(rows.reshape(num_columns, -1))


def decode(rows: np.ndarray, type: str) -> Codes:
    weights, num_bytes, halves = QUANTS[type]
    quant = rows.reshape(len(rows), -1, num_bytes)
    first, *second = [
        np.ascontiguousarray(quant[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32) for at in halves
    ]
    if weights == 256:
        return _decode_nested(quant, type, first, second[0] if second else None)
    minimum = second[0][..., None] if second else None
    if type == "Q8_0":
        return Codes(quant[..., 2:].view(np.int8).astype(np.int64), first[..., None], None)
    nibbles = quant[..., -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], -1).astype(np.int64)
    if type.startswith("Q5"):
        codes += np.unpackbits(quant[..., -20:-16], axis=-1, bitorder="little").astype(np.int64) << 4
    if type == "IQ4_NL":
        codes = IQ4_LEVELS[codes]
    elif minimum is None:
        codes -= 16 if type == "Q5_0" else 8
    return Codes(codes, first[..., None], minimum)


def _decode_nested(quant: np.ndarray, type: str, outer: np.ndarray, outer_minimum: np.ndarray | None) -> Codes:
    num_rows, num_quants = quant.shape[:2]
    groups = num_quants * 8

    def nibbles(start: int, at: int, is_high: bool) -> np.ndarray:
        return quant[..., start + at : start + at + 32].astype(np.int64) >> (4 if is_high else 0) & 15

    if type.startswith("IQ"):
        halves = quant[..., -128:].reshape(num_rows, groups, 16)
        codes = np.concatenate([halves & 15, halves >> 4], -1)
        if type == "IQ2_WIDE":
            scale = quant[..., 2:10].view(np.int8).astype(np.float32) * (outer[..., None] * np.float32(0.125))
            return Codes(IQ2_LEVELS[codes], scale.reshape(num_rows, groups, 1), None)
        top = np.ascontiguousarray(quant[..., 2:4]).view(np.uint16).astype(np.int64)
        six = [quant[..., 4 + j // 2] >> 4 * (j % 2) & 15 | (top[..., 0] >> 2 * j & 3) << 4 for j in range(8)]
        scale = (np.stack(six, -1) - 32).astype(np.float32) * outer[..., None]
        return Codes(IQ4_LEVELS[codes], scale.reshape(num_rows, groups, 1), None)
    if type == "Q2_K":
        twos = quant[..., 16:80].astype(np.int64).reshape(num_rows, num_quants, 2, 1, 32)
        codes = twos >> np.arange(0, 8, 2)[:, None] & 3
        assert outer_minimum is not None
        scale, least = (quant[..., :16] & 15) * outer[..., None], (quant[..., :16] >> 4) * outer_minimum[..., None]
        shape = (num_rows, groups, 2)
        return Codes(codes.reshape(num_rows, groups, 32), scale.reshape(shape), -least.reshape(shape))
    if type == "Q6_K":
        made = []
        for half in range(2):
            for part in range(4):
                top = quant[..., 128 + 32 * half : 160 + 32 * half].astype(np.int64) >> 2 * part & 3
                made.append((nibbles(0, 64 * half + 32 * (part % 2), part >= 2) | top << 4) - 32)
        scale = quant[..., 192:208].view(np.int8).astype(np.float32) * outer[..., None]
        return Codes(np.stack(made, 2).reshape(num_rows, groups, 32), scale.reshape(num_rows, groups, 2), None)
    start = 16 if type == "Q4_K" else 48
    made = [nibbles(start, 32 * (part // 2), part % 2 == 1) for part in range(8)]
    if type == "Q5_K":
        made = [code | (quant[..., 16:48].astype(np.int64) >> part & 1) << 4 for part, code in enumerate(made)]
    six = quant[..., 4:16].astype(np.int64)
    scales = [six[..., j] & 63 if j < 4 else six[..., j + 4] & 15 | six[..., j - 4] >> 6 << 4 for j in range(8)]
    least = [six[..., j + 4] & 63 if j < 4 else six[..., j + 4] >> 4 | six[..., j] >> 6 << 4 for j in range(8)]
    assert outer_minimum is not None
    return Codes(
        np.stack(made, 2).reshape(num_rows, groups, 32),
        (np.stack(scales, -1).astype(np.float32) * outer[..., None]).reshape(num_rows, groups, 1),
        -(np.stack(least, -1).astype(np.float32) * outer_minimum[..., None]).reshape(num_rows, groups, 1),
    )


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 fused multiply-add. The product is exact in float64. Where the sum is not, it is rounded to odd, so that the
    rounding to float32 is the only one that counts."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + away, bits).view(np.float64)
    return odd.astype(np.float32)


def product(x: np.ndarray, weight: Codes) -> np.ndarray:
    """[M, K] · [N, K]ᵀ: integers within a run, then one float32 chain over runs and minimums."""
    num_rows = len(x)
    groups = x.reshape(num_rows, -1, 32)
    largest = np.abs(groups).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > np.float32(1e-30), np.float32(127) / largest, np.float32(0)).astype(np.float32)
    codes = np.rint(groups * inverse[..., None]).astype(np.int64)
    scale = largest / np.float32(127)
    num_columns, num_groups, runs = weight.scale.shape
    scaled_sum = scale[..., None] * codes.reshape(num_rows, num_groups, runs, -1).sum(-1).astype(np.float32)
    dots = np.einsum(
        "mgrk,ngrk->grmn",
        codes.reshape(num_rows, num_groups, runs, -1),
        weight.codes.reshape(num_columns, num_groups, runs, -1),
    ).astype(np.float32)
    y = np.zeros((num_rows, num_columns), np.float32)
    for group in range(num_groups):
        for run in range(runs):
            y = fma(dots[group, run], weight.scale[:, group, run] * scale[:, group, None], y)
            if weight.minimum is not None:
                y = fma(np.broadcast_to(weight.minimum[:, group, run], y.shape), scaled_sum[:, group, run, None], y)
    return y
