"""Octavo's decoders of packed weights against scalar ones, weight by weight; and weights that stay packed."""

import struct

import pytest
import torch

from octavo import quants
from octavo.kernels.cpu.library import GGUF_KINDS
from octavo.quants import PACKED_TYPES, Quants, dequantise
from octavo.quants.exact import HELD_AS, held_bytes, held_exactly
from tests.scalar_quants import QUANTS, as_tensor, package_decoded, random_quants, scalar


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


def bits(weights: torch.Tensor) -> torch.Tensor:
    return weights.contiguous().view(torch.int32)


@pytest.mark.parametrize("type", QUANTS)
def test_every_bit_is_the_gguf_packages(type: str) -> None:
    """Zeros' signs included; enough quants that torch takes its vector loops, and their remainders."""
    data = random_quants(type, 4099 if QUANTS[type][1] == 32 else 515, 5)
    assert torch.equal(bits(dequantise(as_tensor(data), type)), bits(package_decoded(type, data)))


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_plain_types_are_the_gguf_packages(type: str) -> None:
    data = torch.randn(1000).to(quants.PLAIN_TYPES[type]).view(torch.uint8)
    assert torch.equal(dequantise(data, type).float(), package_decoded(type, data.numpy().tobytes()).float())


def test_every_power_of_two_that_scales_4_bit_floats() -> None:
    """The two lowest are subnormal numbers of float32; above these the weights overflow."""
    data = b"".join(bytes([exponent]) + bytes(range(0, 256, 16)) for exponent in range(252))
    assert torch.equal(bits(dequantise(as_tensor(data), "MXFP4")), bits(package_decoded("MXFP4", data)))


def test_plain_types_are_read_as_they_lie() -> None:
    values = [0.0, -1.5, 2.25, 3.0e-3]
    for type, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        stored = torch.tensor(values, dtype=dtype)
        data = stored.view(torch.uint8)
        assert torch.equal(dequantise(data, type), stored)


# --- weights that stay packed ---


def packed_weight(type: str, num_rows: int, quants_in_a_row: int, seed: int = 0) -> Quants:
    data = as_tensor(random_quants(type, num_rows * quants_in_a_row, seed))
    return Quants(type, data.view(num_rows, -1))


def test_every_type_that_can_be_read_is_tested_here() -> None:
    assert set(PACKED_TYPES) == set(QUANTS)


@pytest.mark.parametrize("type", QUANTS)
def test_a_packed_weight_has_the_shape_and_the_values_of_what_it_decodes_to(type: str) -> None:
    weight = packed_weight(type, 5, 3)
    decoded = weight.dequantise()
    assert weight.shape == decoded.shape == (5, 3 * QUANTS[type][1])
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded.view(-1), dequantise(weight.rows.view(-1), type))


@pytest.mark.parametrize("type", QUANTS)
def test_cutting_and_decoding_may_change_places(type: str) -> None:
    weight, width = packed_weight(type, 6, 4), QUANTS[type][1]
    decoded = weight.dequantise()
    for first, count in ((0, 6), (2, 3), (5, 1), (6, 0)):
        assert torch.equal(weight.narrow_rows(first, count).dequantise(), decoded[first : first + count])
    for first, count in ((0, 4), (1, 2), (3, 1), (4, 0)):
        cut = weight.narrow_columns(first * width, count * width)
        assert cut is not None and cut.shape == (6, count * width)
        assert torch.equal(cut.dequantise(), decoded[:, first * width : (first + count) * width])
    both = weight.narrow_rows(1, 4).narrow_columns(width, 2 * width)
    assert both is not None and torch.equal(both.dequantise(), decoded[1:5, width : 3 * width])


@pytest.mark.parametrize("type", QUANTS)
def test_a_cut_shares_the_bytes_it_is_cut_from(type: str) -> None:
    weight = packed_weight(type, 4, 2)
    cut = weight.narrow_rows(1, 2).narrow_columns(QUANTS[type][1], QUANTS[type][1])
    assert cut is not None and cut.rows.untyped_storage().data_ptr() == weight.rows.untyped_storage().data_ptr()


@pytest.mark.parametrize("type", QUANTS)
def test_no_cut_goes_through_a_quant(type: str) -> None:
    weight, width = packed_weight(type, 2, 4), QUANTS[type][1]
    for first, count in ((0, width // 2), (width // 2, width), (width, width + 16), (1, width), (0, 3 * width - 1)):
        assert weight.narrow_columns(first, count) is None


@pytest.mark.parametrize("type", QUANTS)
def test_reordering_rows_and_decoding_may_change_places(type: str) -> None:
    weight, order = packed_weight(type, 7, 2), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert torch.equal(weight.rearranged(lambda rows: rows[order]).dequantise(), weight.dequantise()[order])


def test_what_cannot_be_rows_of_quants_is_our_own_mistake() -> None:
    weight = packed_weight("Q4_1", 4, 2)
    with pytest.raises(AssertionError):
        weight.rearranged(lambda rows: rows[:3])
    for type, rows in (
        ("Q4_1", weight.rows[:, :39]),
        ("Q4_1", weight.rows.view(-1)),
        ("Q4_1", weight.rows.view(torch.int8)),
        ("F16", weight.rows),
        ("IQ2_XS", torch.zeros(1, 74, dtype=torch.uint8)),
    ):
        with pytest.raises(AssertionError):
            Quants(type, rows)


# --- the same numbers in a type that kernels have ---


OTHERS = [type for type, held in HELD_AS.items() if held != type]


@pytest.mark.parametrize("type", OTHERS)
def test_what_is_held_in_another_type_is_the_same_to_the_last_bit(type: str) -> None:
    weight = packed_weight(type, 5, 3).rearranged(lambda rows: rows.flip(0))
    held = held_exactly(weight)
    assert held is not None and held.type == HELD_AS[type]
    # A zero times a negative scale may lose its sign, which changes no product.
    assert torch.equal(held.dequantise(), weight.dequantise())


def test_what_cannot_be_held_exactly_is_not() -> None:
    for exponent in (0, 103, 144, 254):
        assert held_exactly(Quants("MXFP4", torch.full((1, 17), exponent, dtype=torch.uint8))) is None


def test_what_kernels_take_is_held_as_it_is_and_others_as_what_they_take() -> None:
    assert {type for type, held in HELD_AS.items() if held == type} == set(GGUF_KINDS) == set(HELD_AS.values())
    weight = packed_weight("Q4_1", 2, 1)
    assert held_exactly(weight) is weight
    assert set(HELD_AS) - set(PACKED_TYPES) == {"IQ2_WIDE"}  # which no file contains


@pytest.mark.parametrize("type", QUANTS)
def test_the_memory_it_takes_is_known_before(type: str) -> None:
    weight = packed_weight(type, 4, 2)
    held = held_exactly(weight)
    taken = 4 * weight.dequantise().numel() if held is None else held.rows.nbytes
    more = 4 * 2 * 16 if type == "Q2_K" else 0  # kernels hold 16 scales and minimums of 4 bits as bytes
    assert held_bytes(type, 4 * 2 * QUANTS[type][1], 4) == taken + more
