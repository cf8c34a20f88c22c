"""What --deterministic means on a device: what it costs, as notes for the start report, and where it is refused."""

from octavo.errors import ConfigError
from octavo.spec import ModelSpec

# Measured: benchmarks/gpu.md, "What --deterministic costs".
COST = "the cost on an H200: 0.74 to 0.82 of the tokens/s with an 8B model, 0.5 to 0.7 with one of 0.6B, 0.26 to 0.39 if all requests share a prefix"


def about_determinism(is_asked: bool, device: str, dtype: str, spec: ModelSpec, has_native: bool) -> list[str]:
    """Notes for the start report; ConfigError where --deterministic is not supported. `device`: "cpu" or "cuda".
    `has_native`: native CPU kernels compute."""
    if not is_asked:
        return []
    if device == "cpu" and not has_native:
        return [
            "--deterministic changes nothing on a CPU; torch computes here, and octavo doctor --determinism tests whether results repeat"
        ]
    if device == "cpu":
        return ["--deterministic changes nothing on a CPU: the same request always gives the same bytes there"]
    if dtype == "float32":
        raise ConfigError("--deterministic on a GPU computes in 16 bits: use it with --dtype bfloat16 or float16")
    if spec.is_encoder:
        raise ConfigError("--deterministic on a GPU is for models that generate and this is an encoder: leave it out")
    return [f"deterministic: the same request gives the same bytes whatever else runs; {COST}"]
