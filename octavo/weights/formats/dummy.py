"""Random weights for benchmarks of models whose checkpoint is not available."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from octavo.quants import Quants, Weight
from octavo.quants.writers import fp8, q4_0, q8_0

_SPREAD = 0.02  # the usual standard deviation at initialisation: activations neither vanish nor overflow 16-bit types
_Q4_0_SCALE = _SPREAD / 4.6  # codes from −8 to 7 have a standard deviation of 4.6
_Q8_0_SCALE = _SPREAD / 73.6  # codes from −127 to 127
_MXFP4_SCALE = 127 - 7  # 4-bit floats have one of 2.9, and 2.9 / 2 ** 7 is 0.023
_PROJECTIONS = re.compile(
    r"_proj(_with_mqa)?\.weight$"
)  # what quantised checkpoints pack: no embedding, head, norm or router
# Biases are zeros, as at initialisation: what all tokens have in common would send them to the same few experts, where balanced models send
# them everywhere (`benchmarks.gpu --routing`).
_BIAS = re.compile(r"(\.|_)bias$")
_STACKED_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")


class Packing(NamedTuple):
    """How random weights of these names are made packed."""

    type: str  # of Quants
    names: re.Pattern[str]
    group_size: int  # columns that share a scale; 0: all of a row


def dummy_packed_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Types of the Quants in which a configuration's weights would arrive, as far as random ones can be made."""
    packing = _packing(config)
    return frozenset() if packing is None else frozenset({packing.type})


def dummy_packing(config: Mapping[str, Any], packed_types: frozenset[str]) -> Packing | None:
    packing = _packing(config)
    return packing if packing is not None and packing.type in packed_types else None


def _packing(config: Mapping[str, Any]) -> Packing | None:
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    match settings.get("quant_method"):
        case "mxfp4":
            return Packing("MXFP4", _STACKED_EXPERTS, 32)
        case "awq" | "gptq":
            group_size = settings.get("group_size") or settings.get("q_group_size")
            return _integers(settings.get("bits") or settings.get("w_bit"), group_size)
        case "fp8" | "fbgemm_fp8":
            return Packing("FP8", _PROJECTIONS, _columns(settings.get("weight_block_size")))
        case "compressed-tensors":
            return _compressed(settings.get("config_groups"))
        case _:
            return None


def _compressed(groups: Any) -> Packing | None:
    """By the first group of compressed-tensors' config_groups that says how weights are rounded."""
    found = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    weights = next((one for one in found if isinstance(one, dict)), None)
    if weights is None:
        return None
    if weights.get("type") == "float":
        is_8_bits = weights.get("num_bits", 8) == 8
        return Packing("FP8", _PROJECTIONS, _columns(weights.get("block_structure"))) if is_8_bits else None
    return _integers(weights.get("num_bits"), weights.get("group_size") or -1)


def _integers(bits: Any, group_size: Any) -> Packing | None:
    if group_size == -1:  # a whole row
        group_size = 0
    elif not isinstance(group_size, int) or group_size < 32 or group_size % 32:
        group_size = 128
    return Packing({4: "Q4_0", 8: "Q8_0"}[bits], _PROJECTIONS, group_size) if bits in (4, 8) else None


def _columns(block: Any) -> int:
    is_block = isinstance(block, list) and len(block) == 2 and isinstance(block[1], int) and block[1] > 0
    return block[1] if is_block and block[1] % 32 == 0 else 0


def dummy_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    packing: Packing | None = None,
) -> Iterator[tuple[str, Weight]]:
    """Yield one full tensor per name, packed if `packing` names it. Its values depend only on name, shape, device, dtype and
    seed, so that all ranks get the same."""
    for name, shape in shapes.items():
        generator = torch.Generator(device=device).manual_seed(_seed_of(name, seed))
        if packing is not None and len(shape) == 2 and shape[1] % 32 == 0 and packing.names.search(name):
            yield name, _packed(packing, shape[0], shape[1], generator)
        elif _BIAS.search(name):
            yield name, torch.zeros(shape, device=device, dtype=dtype)
        else:
            yield name, torch.empty(shape, device=device, dtype=dtype).normal_(0.0, _SPREAD, generator=generator)


def _packed(packing: Packing, rows: int, width: int, generator: torch.Generator) -> Quants:
    device = generator.device
    if packing.type == "MXFP4":
        quants = torch.randint(0, 256, (rows, width // 32, 17), dtype=torch.uint8, device=device, generator=generator)
        quants[:, :, 0] = _MXFP4_SCALE
        return Quants("MXFP4", quants.flatten(1))
    group_size = packing.group_size or width
    spread = 0.5 + torch.rand((rows, -(-width // group_size)), device=device, generator=generator)

    def scales(size: float) -> torch.Tensor:
        """One for each 32 columns."""
        return (spread * size).repeat_interleave(group_size // 32, dim=1)[:, : width // 32]

    match packing.type:
        case "Q4_0":
            codes = torch.randint(0, 16, (rows, width), dtype=torch.uint8, device=device, generator=generator)
            return q4_0(scales(_Q4_0_SCALE).half(), codes)
        case "Q8_0":
            codes = torch.randint(-127, 128, (rows, width), dtype=torch.int8, device=device, generator=generator)
            return q8_0(scales(_Q8_0_SCALE).half(), codes)
        case _:
            numbers = torch.empty((rows, width), device=device, dtype=torch.bfloat16).normal_(generator=generator)
            return fp8(scales(_SPREAD), numbers.to(torch.float8_e4m3fn))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
