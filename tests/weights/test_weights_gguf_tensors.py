"""Every packed type against a scalar decoder written from ggml's description, weight by weight, and whole files."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from octavo.weights import gguf_tensors
from octavo.weights.gguf_tensors import GGUFTensors, dequantise
from tests.weights.gguf_writer import Packed, write_gguf

# --- scalar decoders: one quant (bytes) → its weights, in the order of ggml's loops ---


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
        out += quant
    return out


def scalar(type: str, data: bytes) -> list[float]:
    decode, _, num_bytes, _ = QUANTS[type]
    return [weight for at in range(0, len(data), num_bytes) for weight in decode(data[at : at + num_bytes])]


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("type", QUANTS)
def test_each_type_decodes_as_written_down(type: str, seed: int) -> None:
    data = random_quants(type, 20, seed)
    got = dequantise(as_tensor(data), type)
    want = torch.tensor(scalar(type, data), dtype=torch.float64)
    assert got.dtype == torch.float32 and got.shape == want.shape
    # float32 rounds each product and sum; the scalar decoder computes in float64
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("type", QUANTS)
def test_every_byte_of_a_quant_matters(type: str) -> None:
    """A decoder that skips a byte, or a bit of it, agrees with itself on two files that differ."""
    _, _, num_bytes, halves = QUANTS[type]
    base = bytearray(b"\x55" * num_bytes)
    for at in halves:
        struct.pack_into("<e", base, at, 0.5)
    reference = dequantise(as_tensor(bytes(base)), type)
    for position in range(num_bytes * 8):
        changed = bytearray(base)
        changed[position // 8] ^= 1 << position % 8
        assert not torch.equal(dequantise(as_tensor(bytes(changed)), type), reference), f"bit {position}"


@pytest.mark.parametrize("type", QUANTS)
def test_decoding_in_pieces_changes_nothing(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_tensor(random_quants(type, 11, 7))
    whole = dequantise(data, type)
    monkeypatch.setattr(gguf_tensors, "_AT_ONCE_SMALL", 4 * QUANTS[type][1])
    assert torch.equal(dequantise(data, type), whole)
    monkeypatch.setattr(gguf_tensors, "_LARGE", 1)
    monkeypatch.setattr(gguf_tensors, "_AT_ONCE_LARGE", 5 * QUANTS[type][1])
    assert torch.equal(dequantise(data, type), whole)


def test_plain_types_are_read_as_they_lie() -> None:
    values = [0.0, -1.5, 2.25, 3.0e-3]
    for type, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        stored = torch.tensor(values, dtype=dtype)
        data = stored.view(torch.uint8)
        assert torch.equal(dequantise(data, type), stored)


# --- whole files, with a stand-in for a family file ---


def stand_in_family() -> ModuleType:
    family = ModuleType("stand_in")

    def gguf_name(name: str) -> str | None:
        return None if name.startswith("skip") else f"model.{name}"

    def gguf_fix(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        return tensor + config["shift"] if name == "model.shifted" else tensor

    family.gguf_name, family.gguf_fix = gguf_name, gguf_fix  # type: ignore[attr-defined]
    return family


def opened(path: Path, tensors: list[Packed]) -> GGUFTensors:
    file = GGUFFile(write_gguf(path / "m.gguf", {"general.architecture": "llama"}, tensors))
    return GGUFTensors(file, stand_in_family(), {"shift": 1.0})


def floats(name: str, *values: float) -> Packed:
    return Packed(name, (len(values),), "F32", struct.pack(f"<{len(values)}f", *values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_is_streamed_in_translated_names_shapes_and_the_asked_type(tmp_path: Path, dtype: torch.dtype) -> None:
    quants = random_quants("Q4_K", 6, 1)
    weights = opened(
        tmp_path,
        [
            floats("a", 1.0, 2.0),
            Packed("matrix", (3, 512), "Q4_K", quants),
            floats("shifted", 0.125, -3.0),
            Packed("skip_me", (256,), "IQ2_XXS", bytes(66)),
            Packed("half", (2, 2), "F16", struct.pack("<4e", 1, 2, 3, 4)),
        ],
    )
    got = dict(weights.tensors("cpu", dtype))
    assert list(got) == ["model.a", "model.matrix", "model.shifted", "model.half"]
    assert all(tensor.dtype == dtype for tensor in got.values())
    want = torch.tensor(scalar("Q4_K", quants)).view(3, 512)
    torch.testing.assert_close(got["model.matrix"].float(), want, rtol=2**-7, atol=1e-3)
    assert got["model.shifted"].tolist() == [1.125, -2.0]
    assert got["model.half"].tolist() == [[1, 2], [3, 4]]
    assert weights.num_bytes == 8 + 6 * 144 + 8 + 8
    assert dict(weights.tensors("cpu", dtype)).keys() == got.keys(), "a checkpoint can be read twice"


def test_writing_to_a_streamed_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    weights = opened(tmp_path, [floats("a", 1.0, 2.0)])
    before = (tmp_path / "m.gguf").read_bytes()
    for _, tensor in weights.tensors("cpu", torch.float32):
        tensor.zero_()
    assert (tmp_path / "m.gguf").read_bytes() == before


def test_the_stored_type_is_that_of_most_bytes(tmp_path: Path) -> None:
    assert opened(tmp_path, [floats("a", *range(100))]).stored_dtype == "float32"
    halves = Packed("h", (100,), "F16", bytes(200))
    assert opened(tmp_path, [floats("a", 1.0), halves]).stored_dtype == "float16"
    quants = Packed("q", (32, 32), "Q4_1", bytes(640))
    assert opened(tmp_path, [floats("a", 1.0), halves, quants]).stored_dtype == "bfloat16"


@pytest.mark.parametrize(("type", "num_bytes"), [("IQ2_XS", 74), ("IQ2_XXS", 66), ("Q3_K", 110), ("Q2_K", 84)])
def test_a_type_without_a_decoder_is_refused_when_the_file_is_opened(tmp_path: Path, type: str, num_bytes: int) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, [Packed("blk.0.w", (256,), type, bytes(num_bytes))])
    message = caught.value.message
    assert "blk.0.w" in message and type in message and "Q4_1" in message and "Q6_K" in message
    assert "\n" not in message
