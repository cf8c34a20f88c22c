"""What --deterministic means on a device: what it costs, in words for the start-up print, and where it is refused.
Knows nothing of kernels: it says which of them a rank is built with."""

from octavo.errors import ConfigError
from octavo.spec import ModelSpec

COST = "steps are slower than without it (benchmarks/gpu.md has the figures)"


def about_determinism(is_asked: bool, device: str, dtype: str, spec: ModelSpec) -> list[str]:
    """Lines for people. `device` is "cpu" or "cuda". ConfigError where it cannot be had."""
    if not is_asked:
        return []
    if device == "cpu":
        return ["--deterministic changes nothing on a CPU: the same request gives the same bytes there in any case"]
    if dtype == "float32":
        raise ConfigError("--deterministic on a GPU computes in 16 bits: use it with --dtype bfloat16 or float16")
    if spec.is_encoder:
        raise ConfigError(
            "--deterministic on a GPU is for models that generate, and this one is an encoder: leave it out"
        )
    return [f"deterministic: the same request gives the same bytes whatever else runs; {COST}"]
