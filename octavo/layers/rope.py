"""Rotary position embedding with its scalings, as one complex product over queries and keys together.
Knows nothing of any family; it reads the rope settings of an HF config in their old and new spelling.

Checkpoints hold a head's pairs as (i, i + D/2). `interleave` reorders the rows of q and k to (2i, 2i + 1) at load, so
that a pair is one complex number in memory. Scores are sums over the head, so the order does not show anywhere else."""

import math
from types import ModuleType
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.kernels.cpu.native import Native
from octavo.quants import Quants, SameWeight

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_settings(config: dict[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """One flat dict with rope_type and rope_theta, from `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta`."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = settings.get("rope_type", settings.get("type")) or "default"
    if kind not in _TYPES:
        raise ConfigError(f"rope type {kind!r} is not supported; the supported ones are {', '.join(_TYPES)}")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor {partial} is not supported: only whole heads are rotated")
    settings["rope_type"] = kind
    settings["rope_theta"] = settings.get("rope_theta") or config.get("rope_theta") or default_theta
    if not settings.get("original_max_position_embeddings"):
        settings["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", config.get("max_position_embeddings")
        )
    if kind in ("linear", "llama3", "yarn") and not settings.get("factor"):
        raise ConfigError(f"rope type {kind!r} needs a factor in rope_scaling of config.json")
    return settings


class Rope:
    def __init__(
        self,
        settings: dict[str, Any],
        head_size: int,
        device: torch.device,
        kernels: ModuleType | None = None,
        native: Native | None = None,
    ) -> None:
        self.frequencies, self.amplitude = _frequencies(settings, head_size)  # [D/2] radians per position
        self.frequencies = self.frequencies.to(device)
        self._kernels = kernels
        self._native = native
        self._amplitudes = torch.full((1, 1), self.amplitude, device=device)

    def rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] → [T, 1, D/2] complex: what every head of every layer is multiplied with in this step."""
        if self._kernels is not None:
            factors = self._kernels.rotation(positions, self.frequencies, self.amplitude)
            return torch.view_as_complex(factors).unsqueeze(1)
        if self._native is not None:
            factors = self._native.rotation(positions, self.frequencies, self.amplitude)
            return torch.view_as_complex(factors.view(len(factors), 1, -1, 2))
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.polar(self._amplitudes.expand_as(angles), angles).unsqueeze(1)

    def divide_frequencies(self, factors: torch.Tensor) -> None:
        """Some GGUF files bring their scaling as one divisor for each frequency."""
        self.frequencies.div_(factors.to(self.frequencies))


def interleave(weight: SameWeight, head_size: int) -> SameWeight:
    """Rows of a q or k projection (or its bias), reordered within each head from (i, i + D/2) to (2i, 2i + 1)."""
    if isinstance(weight, Quants):
        return weight.rearranged(lambda rows: interleave(rows, head_size))
    pairs = weight.reshape(-1, 2, head_size // 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def split_halves(weight: SameWeight, head_size: int) -> SameWeight:
    """The inverse of `interleave`."""
    if isinstance(weight, Quants):
        return weight.rearranged(lambda rows: split_halves(rows, head_size))
    pairs = weight.reshape(-1, head_size // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _frequencies(settings: dict[str, Any], head_size: int) -> tuple[torch.Tensor, float]:
    """Radians per position for each pair, and the factor by which rotated vectors are stretched."""
    theta = float(settings["rope_theta"])
    plain = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    match settings["rope_type"]:
        case "linear":
            return plain / float(settings["factor"]), 1.0
        case "llama3":
            return _llama3(plain, settings), 1.0
        case "yarn":
            return _yarn(plain, settings, head_size), _yarn_amplitude(settings)
        case _:
            # "dynamic" changes nothing up to max_position_embeddings, and the context never exceeds that.
            return plain, 1.0


def _llama3(plain: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Long waves are stretched by factor, short ones kept, those between blended."""
    original = float(settings["original_max_position_embeddings"])
    low, high = float(settings.get("low_freq_factor", 1.0)), float(settings.get("high_freq_factor", 4.0))
    turns = original * plain / (2 * math.pi)  # how often each pair turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * kept + plain / float(settings["factor"]) * (1.0 - kept)


def _yarn(plain: torch.Tensor, settings: dict[str, Any], head_size: int) -> torch.Tensor:
    """Pairs that turn more than beta_fast times in the original context are kept, those under beta_slow stretched."""
    original, theta = float(settings["original_max_position_embeddings"]), float(settings["rope_theta"])

    def pair_turning(times: float) -> float:
        return head_size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(float(settings.get("beta_fast") or 32))
    high = pair_turning(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    span = high - low or 0.001
    stretched = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / float(settings["factor"]) * stretched + plain * (1.0 - stretched)


def _yarn_amplitude(settings: dict[str, Any]) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor = float(settings["factor"])

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)
