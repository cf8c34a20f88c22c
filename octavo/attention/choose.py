"""Choose the attention backend, and give the reason for the log."""

import importlib
import importlib.util
from collections.abc import Callable

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.encoder import EncoderAttention
from octavo.attention.groups import GroupedAttention
from octavo.config import ATTENTION_BACKENDS
from octavo.errors import ConfigError
from octavo.kernels.cpu.native import Native
from octavo.spec import ModelSpec, PageLayout

_NATIVE = "native_cpu"
# Replaces triton with --deterministic on a GPU: its results depend, bit for bit, only on a row's own cells.
_INVARIANT = "triton_invariant"


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
        return EncoderAttention(), "attention by encoder (all tokens of a row see each other)"
    if name not in ("auto", *ATTENTION_BACKENDS):
        raise ConfigError(f"there is no attention backend {name!r}; use auto or one of {', '.join(ATTENTION_BACKENDS)}")
    if is_invariant and name not in ("auto", "triton"):
        raise ConfigError(
            f"--deterministic on a GPU supports only triton attention: leave --attention-backend {name} out"
        )
    refusals: list[str] = []
    candidates = ("triton",) if is_invariant else tuple(ATTENTION_BACKENDS) if name == "auto" else (name,)
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
    package, needed = ATTENTION_BACKENDS[name]
    if needed not in ("", device.type):
        return None, f"it runs on {needed}, not on {device.type}"
    if importlib.util.find_spec(package) is None:
        return None, f"the package {package} is not installed"
    if name == _NATIVE and native is None:
        return None, "the native kernels are not in use"
    kind = backend_class(_INVARIANT if is_invariant else name)
    backend = kind(native, kv_dtype) if name == _NATIVE else kind()
    reason = backend.supports(spec, device, dtype, kv_dtype)
    return (backend, "") if reason is None else (None, reason)


def backend_class(name: str) -> Callable[..., AttentionBackend]:
    """The backend class in octavo/attention/<name>.py: the one class defined there that has a kv_shape()."""
    module = importlib.import_module(f"octavo.attention.{name}")
    (found,) = (
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, "kv_shape")
    )
    return found
