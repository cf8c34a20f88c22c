"""Random weights in place of a checkpoint's, for benchmarks of models whose weights are not at hand.
Knows nothing of names or shapes: it fills whatever parameters a model has."""

import hashlib

import torch
from torch import nn

_SPREAD = 0.02  # as most checkpoints are initialised: activations neither vanish nor overflow 16-bit types


def init_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill every floating-point parameter in place. A parameter's values depend on its name, shape, device and the seed alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                generator = torch.Generator(device=parameter.device).manual_seed(_seed_of(name, seed))
                parameter.normal_(0.0, _SPREAD, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
