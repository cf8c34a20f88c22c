"""Rotary position embedding with its scalings, as one complex product over queries and keys together.
Reads the rope settings of an HF config in their old and new spelling.

Checkpoints hold a head's pairs as (i, i + D/2). `interleave` reorders the rows of q and k to (2i, 2i + 1) at load, so
that a pair is one complex number in memory. Scores are sums over the head, so the order does not show anywhere else.

Where only the first part of a head is rotated, the other pairs have the frequency 0: they stay as they are."""

import math
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.kernels.device_ops import DeviceOps, Waves
from octavo.quants import Quants, SameWeight

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_NEEDED = {
    "dynamic": "max_position_embeddings",
    "llama3": "original_max_position_embeddings",
    "yarn": "original_max_position_embeddings",
    "longrope": "max_position_embeddings",
}


def rope_settings(
    config: dict[str, Any], default_theta: float = 10000.0, *, can_be_partial: bool = False
) -> dict[str, Any]:
    """One flat dict with rope_type and rope_theta, from `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta`.
    `can_be_partial`: for families that may rotate a part of each head, rotated_size() of it."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = settings.get("rope_type", settings.get("type")) or "default"
    if kind not in _TYPES:
        raise ConfigError(f"rope type {kind!r} is not supported; the supported ones are {', '.join(_TYPES)}")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    partial = 1.0 if partial is None else partial
    if partial != 1.0 and not can_be_partial:
        raise ConfigError(f"partial_rotary_factor {partial} is not supported: only whole heads are rotated")
    settings["partial_rotary_factor"] = partial
    settings["rope_type"] = kind
    settings["rope_theta"] = settings.get("rope_theta") or config.get("rope_theta") or default_theta
    if not settings.get("original_max_position_embeddings"):
        original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        settings["original_max_position_embeddings"] = original
    settings["max_position_embeddings"] = config.get("max_position_embeddings")
    if kind in ("linear", "dynamic", "llama3", "yarn") and not settings.get("factor"):
        raise ConfigError(f"rope type {kind!r} needs a factor in rope_scaling of config.json")
    needed = _NEEDED.get(kind)
    if needed and not settings[needed]:
        raise ConfigError(f"rope type {kind!r} needs {needed} in config.json")
    if kind == "llama3" and _value(settings, "low_freq_factor", 1.0) >= _value(settings, "high_freq_factor", 4.0):
        raise ConfigError("rope type 'llama3' needs a high_freq_factor above its low_freq_factor")
    if kind == "longrope" and settings["original_max_position_embeddings"] <= 1:
        raise ConfigError("rope type 'longrope' needs an original_max_position_embeddings above 1")
    if settings["rope_theta"] <= 1 and kind == "yarn":
        raise ConfigError(f"rope_theta is {settings['rope_theta']}: rope type 'yarn' needs a value above 1")
    return settings


def _value(settings: dict[str, Any], name: str, default: float) -> float:
    """The setting as a number; null counts as missing."""
    return float(default if settings.get(name) is None else settings[name])


def rotated_size(settings: dict[str, Any], head_size: int) -> int:
    """How many of a head's numbers are rotated, the first ones: an even count."""
    partial = settings["partial_rotary_factor"]
    is_number = isinstance(partial, int | float) and not isinstance(partial, bool) and 0 < partial <= 1
    size = int(head_size * partial) if is_number else 0
    if not size or size % 2:
        raise ConfigError(
            f"partial_rotary_factor is {str(partial)[:40]!r}: it must select an even number of the {head_size} elements of a head"
        )
    return size


class Rope:
    """`max_len`: tokens that a request can have at most (0: as many as the model was trained for). A scaling that treats
    long requests otherwise goes by it: not by the request, whose first keys were written before it was long."""

    def __init__(
        self,
        settings: dict[str, Any],
        head_size: int,
        device: torch.device,
        ops: DeviceOps,
        max_len: int = 0,
    ) -> None:
        rotating, self.amplitude = frequencies(settings, rotated_size(settings, head_size), max_len)
        still = torch.zeros(head_size // 2 - len(rotating))
        self.frequencies = torch.cat((rotating, still)).to(device)  # [D/2] radians per position
        amplitudes = torch.cat((torch.full_like(rotating, self.amplitude), torch.ones_like(still)))
        self._waves = Waves(self.frequencies, self.amplitude, amplitudes[None].to(device))
        self._ops = ops

    def rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] → [T, 1, D/2] complex: what every head of every layer is multiplied with in this step."""
        return self._ops.rotation(positions, self._waves)

    def divide_frequencies(self, factors: torch.Tensor) -> None:
        """Some GGUF files bring their scaling as one divisor for each frequency."""
        if not factors.is_meta and not bool((factors > 0).all()):
            raise ConfigError("the checkpoint's rope factors must all be above 0: its file is damaged, fetch it again")
        self.frequencies.div_(factors.to(self.frequencies))


def interleave(weight: SameWeight, head_size: int, rotated: int = 0) -> SameWeight:
    """Rows of a q or k projection (or its bias), reordered within each head from (i, i + D/2) to (2i, 2i + 1).
    `rotated`: how many rows of a head are reordered, the first ones (0: all)."""
    if isinstance(weight, Quants):
        return weight.rearranged(lambda rows: interleave(rows, head_size, rotated))
    return _reordered(weight, head_size, rotated, (2, -1))


def split_halves(weight: SameWeight, head_size: int, rotated: int = 0) -> SameWeight:
    """The inverse of `interleave`."""
    if isinstance(weight, Quants):
        return weight.rearranged(lambda rows: split_halves(rows, head_size, rotated))
    return _reordered(weight, head_size, rotated, (-1, 2))


def _reordered(weight: torch.Tensor, head_size: int, rotated: int, pairs: tuple[int, int]) -> torch.Tensor:
    heads = weight.reshape(-1, head_size, *weight.shape[1:])
    rotated = rotated or head_size
    interleaved = heads[:, :rotated].reshape(len(heads), *pairs, *weight.shape[1:]).transpose(1, 2).flatten(1, 2)
    joined = interleaved if rotated == head_size else torch.cat((interleaved, heads[:, rotated:]), dim=1)
    return joined.reshape(weight.shape)


def frequencies(settings: dict[str, Any], head_size: int, max_len: int = 0) -> tuple[torch.Tensor, float]:
    """Radians per position for each pair, and the factor by which rotated vectors are stretched."""
    theta = float(settings["rope_theta"])
    unscaled = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    match settings["rope_type"]:
        case "linear":
            return unscaled / float(settings["factor"]), 1.0
        case "llama3":
            return _llama3(unscaled, settings), 1.0
        case "yarn":
            return _yarn(unscaled, settings, head_size), _yarn_amplitude(settings)
        case "longrope":
            return unscaled / _long_factors(settings, head_size // 2, max_len), _long_amplitude(settings)
        case "dynamic":
            return _dynamic(unscaled, settings, head_size, max_len), 1.0
        case _:
            return unscaled, 1.0


def longest_len(settings: dict[str, Any]) -> int:
    """Tokens up to which a scaling can be stretched beyond max_position_embeddings where that is asked for; 0: not at all."""
    if settings["rope_type"] != "dynamic":
        return 0
    return int(settings["max_position_embeddings"] * float(settings["factor"]))


def _dynamic(unscaled: torch.Tensor, settings: dict[str, Any], head_size: int, max_len: int) -> torch.Tensor:
    """Dynamic NTK scaling: the frequencies of a sequence of `max_len` tokens, if that is longer than the model was trained for.

    Transformers uses the current sequence's length, and does not rotate earlier keys again when it grows, so its results depend
    on how a prompt is cut into chunks. Here requests of all lengths share pages, and a key is rotated once, so a server has
    one set of frequencies: the model's own by default, and with a --max-model-len beyond max_position_embeddings those that
    transformers uses for a sequence of that length."""
    trained, factor = int(settings["max_position_embeddings"]), float(settings["factor"])
    if max_len <= trained:
        return unscaled
    # The exponent of the first pair is 0, of the last (D − 2) / D: that one is stretched by just this much.
    stretch = factor * max_len / trained - (factor - 1)
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / max(head_size - 2, 1)
    return unscaled / stretch**exponents


def _llama3(unscaled: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Low frequencies are divided by `factor`, high ones kept, and those between blended."""
    original = float(settings["original_max_position_embeddings"])
    low, high = _value(settings, "low_freq_factor", 1.0), _value(settings, "high_freq_factor", 4.0)
    rotations = original * unscaled / (2 * math.pi)  # how often each pair turns within the original context
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return unscaled * kept + unscaled / float(settings["factor"]) * (1.0 - kept)


def _yarn(unscaled: torch.Tensor, settings: dict[str, Any], head_size: int) -> torch.Tensor:
    """Pairs that turn more than beta_fast times in the original context are kept, those under beta_slow stretched."""
    original, theta = float(settings["original_max_position_embeddings"]), float(settings["rope_theta"])

    def pair_rotating(times: float) -> float:
        return head_size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_rotating(float(settings.get("beta_fast") or 32))
    high = pair_rotating(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    span = high - low or 0.001
    stretched = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return unscaled / float(settings["factor"]) * stretched + unscaled * (1.0 - stretched)


def _yarn_amplitude(settings: dict[str, Any]) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor = float(settings["factor"])

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)


def _long_factors(settings: dict[str, Any], num_pairs: int, max_len: int) -> torch.Tensor:
    """A divisor for each pair: one list for requests within the original context, one for those that may go beyond."""
    short, long = (_numbers(settings, name, num_pairs) for name in ("short_factor", "long_factor"))
    longest = max_len or settings["max_position_embeddings"]
    return torch.tensor(short if longest <= settings["original_max_position_embeddings"] else long, dtype=torch.float32)


def _numbers(settings: dict[str, Any], name: str, count: int) -> list[float]:
    numbers = settings.get(name)
    if isinstance(numbers, list) and len(numbers) == count and all(type(n) in (int, float) and n > 0 for n in numbers):
        return numbers
    raise ConfigError(f"{name} must be a list of {count} numbers above 0, one for each rotated pair of a head")


def _long_amplitude(settings: dict[str, Any]) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    original = float(settings["original_max_position_embeddings"])
    factor = float(settings.get("factor") or settings["max_position_embeddings"] / original)
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
