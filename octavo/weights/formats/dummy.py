"""Random weights for benchmarks of models whose checkpoint is not available."""

import hashlib
from collections.abc import Iterator, Mapping

import torch

from octavo.quants import Weight

_SPREAD = 0.02  # the usual standard deviation at initialisation: activations neither vanish nor overflow 16-bit types


def dummy_tensors(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Iterator[tuple[str, Weight]]:
    """Yield one full tensor per name, never packed. Its values depend only on name, shape, device, dtype and seed, so that
    all ranks get the same."""
    for name, shape in shapes.items():
        generator = torch.Generator(device=device).manual_seed(_seed_of(name, seed))
        yield name, torch.empty(shape, device=device, dtype=dtype).normal_(0.0, _SPREAD, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
