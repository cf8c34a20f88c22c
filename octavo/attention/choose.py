"""Choose the attention backend, and give the reason for the log."""

import importlib
import importlib.util

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.encoder import EncoderAttention
from octavo.attention.groups import GroupedAttention
from octavo.errors import ConfigError
from octavo.kernels.cpu.native import Native
from octavo.spec import ModelSpec, PageLayout

# name → class, required package and device ("": any). A module is imported only if package and device are present.
# In order of preference; the last one runs everywhere.
_BACKENDS = {
    "triton": ("octavo.attention.triton:TritonAttention", "triton", "cuda"),
    "flashinfer": ("octavo.attention.flashinfer:FlashInferAttention", "flashinfer", "cuda"),
    "native_cpu": ("octavo.attention.native_cpu:NativeCpuAttention", "torch", "cpu"),
    "torch_cpu": ("octavo.attention.torch_cpu:TorchCpuAttention", "torch", "cpu"),
    "reference": ("octavo.attention.reference:ReferenceAttention", "torch", ""),
}


_NATIVE = "native_cpu"
# Replaces triton with --deterministic on a GPU: its results depend, bit for bit, only on a row's own cells.
_INVARIANT = ("octavo.attention.triton_invariant:InvariantTritonAttention", "triton", "cuda")


def choose(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    name: str = "auto",
    native: Native | None = None,
    layout: PageLayout | None = None,
    is_invariant: bool = False,
) -> tuple[AttentionBackend, str]:
    """Return a new backend and the reason for it: the backend called `name`, or the first that supports model, device and
    types. `native`: the native CPU kernels, if available. `layout`: the groups of layers that have their own page tables.
    `is_invariant`: a row's results must not depend on other rows, nor on how its tokens are split into steps."""
    if spec.is_encoder:
        if name != "auto":
            raise ConfigError(
                f"--attention-backend {name} is for models that generate, and this one is an encoder: leave it out"
            )
        return EncoderAttention(), "attention by whole (an encoder's tokens see each other)"
    if name not in ("auto", *_BACKENDS):
        raise ConfigError(f"there is no attention backend {name!r}; use auto or one of {', '.join(_BACKENDS)}")
    if is_invariant and name not in ("auto", "triton"):
        raise ConfigError(
            f"--deterministic on a GPU has attention by triton alone: leave --attention-backend {name} out"
        )
    refusals: list[str] = []
    candidates: tuple[str, ...] = ("triton",) if is_invariant else tuple(_BACKENDS) if name == "auto" else (name,)
    for candidate in candidates:
        backend, reason = _try(candidate, spec, device, dtype, kv_dtype, native, is_invariant)
        if backend is not None:
            if layout is not None and len(layout.windows) > 1:
                others = [
                    _try(candidate, spec, device, dtype, kv_dtype, native, is_invariant)[0] for _ in layout.windows[1:]
                ]
                backend = GroupedAttention([backend, *filter(None, others)], layout.group_of)
            if is_invariant:
                return backend, "attention by triton (in one order of sums for every batch)"
            why = "as asked" if name != "auto" else "; ".join(refusals) or "the first choice here"
            return backend, f"attention by {candidate} ({why})"
        refusals.append(f"{candidate}: {reason}")
    if is_invariant:
        raise ConfigError(f"--deterministic cannot run this model on a GPU ({'; '.join(refusals)}): leave it out")
    raise ConfigError(f"no attention backend can run this model here ({'; '.join(refusals)})")


def _try(
    name: str,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    native: Native | None,
    is_invariant: bool,
) -> tuple[AttentionBackend | None, str]:
    place, package, kind = _INVARIANT if is_invariant else _BACKENDS[name]
    if kind not in ("", device.type):
        return None, f"it runs on {kind}, not on {device.type}"
    if importlib.util.find_spec(package) is None:
        return None, f"the package {package} is not installed"
    if name == _NATIVE and native is None:
        return None, "the native kernels are not in use"
    module, _, attribute = place.partition(":")
    kind_of = getattr(importlib.import_module(module), attribute)
    backend: AttentionBackend = kind_of(native, kv_dtype) if name == _NATIVE else kind_of()
    reason = backend.supports(spec, device, dtype, kv_dtype)
    return (backend, "") if reason is None else (None, reason)
