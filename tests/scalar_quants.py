"""Every packed type decoded weight by weight: one quant (bytes) → its weights, in the order of ggml's loops.
Written from ggml's description, the rarer types by the gguf package, independently of Octavo's own decoders."""

import random
import struct
from collections.abc import Callable

import gguf
import numpy
import torch


def half(data: bytes, at: int) -> float:
    value: float = struct.unpack_from("<e", data, at)[0]
    return value


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def scalar_q4_0(data: bytes) -> list[float]:
    scale, qs = half(data, 0), data[2:18]
    return [((qs[i % 16] >> (4 * (i // 16))) % 16 - 8) * scale for i in range(32)]


def scalar_q4_1(data: bytes) -> list[float]:
    scale, least, qs = half(data, 0), half(data, 2), data[4:20]
    return [(qs[i % 16] >> (4 * (i // 16))) % 16 * scale + least for i in range(32)]


def scalar_q5_0(data: bytes) -> list[float]:
    scale, bits, qs = half(data, 0), struct.unpack_from("<I", data, 2)[0], data[6:22]
    return [((qs[i % 16] >> (4 * (i // 16))) % 16 + 16 * (bits >> i & 1) - 16) * scale for i in range(32)]


def scalar_q5_1(data: bytes) -> list[float]:
    scale, least, bits, qs = half(data, 0), half(data, 2), struct.unpack_from("<I", data, 4)[0], data[8:24]
    return [((qs[i % 16] >> (4 * (i // 16))) % 16 + 16 * (bits >> i & 1)) * scale + least for i in range(32)]


def scalar_q8_0(data: bytes) -> list[float]:
    return [signed(byte) * half(data, 0) for byte in data[2:34]]


def scale_and_least(twelve: bytes, part: int) -> tuple[int, int]:
    """ggml's get_scale_min_k4."""
    if part < 4:
        return twelve[part] & 63, twelve[part + 4] & 63
    scale = (twelve[part + 4] & 0xF) | ((twelve[part - 4] >> 6) << 4)
    least = (twelve[part + 4] >> 4) | ((twelve[part] >> 6) << 4)
    return scale, least


def scalar_q4_k(data: bytes) -> list[float]:
    scale, least, qs = half(data, 0), half(data, 2), data[16:144]
    out = []
    for part in range(8):
        sub_scale, sub_least = scale_and_least(data[4:16], part)
        for i in range(32):
            nibble = qs[32 * (part // 2) + i] >> (4 * (part % 2)) & 15
            out.append(scale * sub_scale * nibble - least * sub_least)
    return out


def scalar_q5_k(data: bytes) -> list[float]:
    scale, least, fifth, qs = half(data, 0), half(data, 2), data[16:48], data[48:176]
    out = []
    for part in range(8):
        sub_scale, sub_least = scale_and_least(data[4:16], part)
        for i in range(32):
            value = (qs[32 * (part // 2) + i] >> (4 * (part % 2)) & 15) + (16 if fifth[i] & (1 << part) else 0)
            out.append(scale * sub_scale * value - least * sub_least)
    return out


def scalar_q6_k(data: bytes) -> list[float]:
    low, high, scales, scale = data[0:128], data[128:192], data[192:208], half(data, 208)
    out = [0.0] * 256
    for n in range(2):  # as dequantize_row_q6_K walks: 128 weights a turn
        ql, qh, sc = low[64 * n : 64 * n + 64], high[32 * n : 32 * n + 32], scales[8 * n : 8 * n + 8]
        for i in range(32):
            turn = i // 16
            values = (
                (ql[i] & 15 | (qh[i] >> 0 & 3) << 4) - 32,
                (ql[i + 32] & 15 | (qh[i] >> 2 & 3) << 4) - 32,
                (ql[i] >> 4 | (qh[i] >> 4 & 3) << 4) - 32,
                (ql[i + 32] >> 4 | (qh[i] >> 6 & 3) << 4) - 32,
            )
            for part, value in enumerate(values):
                out[128 * n + 32 * part + i] = scale * signed(sc[turn + 2 * part]) * value
    return out


def by_package(type: str) -> Callable[[bytes], list[float]]:
    def decode(data: bytes) -> list[float]:
        return package_decoded(type, data).tolist()

    return decode


def package_decoded(type: str, data: bytes) -> torch.Tensor:
    """float32 [weights]."""
    kind = gguf.GGMLQuantizationType[type]
    return torch.from_numpy(gguf.dequantize(numpy.frombuffer(data, numpy.uint8).copy()[None], kind)[0])


# type → (scalar decoder, weights and bytes of a quant, where its float16 numbers lie)
QUANTS: dict[str, tuple[Callable[[bytes], list[float]], int, int, tuple[int, ...]]] = {
    "Q4_0": (scalar_q4_0, 32, 18, (0,)),
    "Q4_1": (scalar_q4_1, 32, 20, (0, 2)),
    "Q5_0": (scalar_q5_0, 32, 22, (0,)),
    "Q5_1": (scalar_q5_1, 32, 24, (0, 2)),
    "Q8_0": (scalar_q8_0, 32, 34, (0,)),
    "Q4_K": (scalar_q4_k, 256, 144, (0, 2)),
    "Q5_K": (scalar_q5_k, 256, 176, (0, 2)),
    "Q6_K": (scalar_q6_k, 256, 210, (208,)),
    "Q2_K": (by_package("Q2_K"), 256, 84, (80, 82)),
    "Q3_K": (by_package("Q3_K"), 256, 110, (108,)),
    "IQ4_NL": (by_package("IQ4_NL"), 32, 18, (0,)),
    "IQ4_XS": (by_package("IQ4_XS"), 256, 136, (0,)),
    "IQ2_XXS": (by_package("IQ2_XXS"), 256, 66, (0,)),
    "MXFP4": (by_package("MXFP4"), 32, 17, ()),
}


def random_quants(type: str, count: int, seed: int) -> bytes:
    """Random bytes, with finite float16 numbers of both signs where the type keeps them."""
    _, _, num_bytes, halves = QUANTS[type]
    rng = random.Random(f"{type}{seed}")
    out = b""
    for _ in range(count):
        quant = bytearray(rng.randbytes(num_bytes))
        for at in halves:
            struct.pack_into("<e", quant, at, rng.uniform(-2, 2))
        if type == "MXFP4":
            quant[0] = rng.randrange(104, 144)  # its scale: a power of two
        out += quant
    return out


def scalar(type: str, data: bytes) -> list[float]:
    decode, _, num_bytes, _ = QUANTS[type]
    return [weight for at in range(0, len(data), num_bytes) for weight in decode(data[at : at + num_bytes])]


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
