"""Which attention backend runs here.
Knows nothing of how any of them works: it asks."""

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.errors import ConfigError
from octavo.spec import ModelSpec

# In order of preference; the last one runs everywhere.
_BACKENDS: tuple[type[AttentionBackend], ...] = (TorchCpuAttention, ReferenceAttention)


def choose(spec: ModelSpec, device: torch.device, dtype: torch.dtype, name: str = "auto") -> AttentionBackend:
    """A fresh backend: the one called `name`, or the first that supports model, device and dtype."""
    backends = [backend() for backend in _BACKENDS]
    if name != "auto":
        backends = [backend for backend in backends if backend.name == name]
        if not backends:
            known = ", ".join(backend.name for backend in _BACKENDS)
            raise ConfigError(f"there is no attention backend {name!r}; use auto or one of {known}")
    refusals = []
    for backend in backends:
        reason = backend.supports(spec, device, dtype)
        if reason is None:
            return backend
        refusals.append(f"{backend.name}: {reason}")
    raise ConfigError(f"no attention backend can run this model here ({'; '.join(refusals)})")
