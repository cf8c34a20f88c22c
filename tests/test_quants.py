"""Octavo's decoders of packed weights against scalar ones, weight by weight.
Knows nothing of files."""

import struct

import pytest
import torch

from octavo import quants
from octavo.quants import dequantise
from tests.scalar_quants import QUANTS, as_tensor, random_quants, scalar


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
    monkeypatch.setattr(quants, "_AT_ONCE_SMALL", 4 * QUANTS[type][1])
    assert torch.equal(dequantise(data, type), whole)
    monkeypatch.setattr(quants, "_LARGE", 1)
    monkeypatch.setattr(quants, "_AT_ONCE_LARGE", 5 * QUANTS[type][1])
    assert torch.equal(dequantise(data, type), whole)


def test_plain_types_are_read_as_they_lie() -> None:
    values = [0.0, -1.5, 2.25, 3.0e-3]
    for type, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        stored = torch.tensor(values, dtype=dtype)
        data = stored.view(torch.uint8)
        assert torch.equal(dequantise(data, type), stored)
