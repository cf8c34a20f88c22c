"""Random weights in place of a checkpoint's, for benchmarks of models whose weights are not at hand.
Knows nothing of layers: it makes a tensor for whatever name and shape a model asks for."""

import hashlib
from collections.abc import Iterator, Mapping

import torch

from octavo.quants import Weight

_SPREAD = 0.02  # as most checkpoints are initialised: activations neither vanish nor overflow 16-bit types


def dummy_tensors(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Iterator[tuple[str, Weight]]:
    """One whole tensor per name, and never packed. Its values depend on name, shape, device, dtype and seed alone: ranks agree
    on them."""
    for name, shape in shapes.items():
        generator = torch.Generator(device=device).manual_seed(_seed_of(name, seed))
        yield name, torch.empty(shape, device=device, dtype=dtype).normal_(0.0, _SPREAD, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
