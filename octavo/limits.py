"""resolve(): the values of the `auto`s in the configuration that decide how a model is loaded, for one model on one kind of device.
Nothing is measured here: the context may still be shortened when memory is."""

import dataclasses
from dataclasses import dataclass

from octavo.config import AUTO, Config, or_else
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """The resolved values. If max_model_len was `auto`, it may still shrink when memory is measured."""

    dtype: str
    keeps_packed: (
        bool  # weights that are packed in the checkpoint stay packed if there are kernels that multiply by them
    )
    decodes_packed: bool  # … and the kernels decode them to float32 as they multiply
    max_model_len: int
    max_model_len_is_auto: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    cpu_threads: int


def resolve(
    config: Config,
    *,
    device: str,
    stored_dtype: str,
    context_len: int,
    num_cores: int,
    longest_len: int = 0,
    num_local_ranks: int = 0,
) -> Limits:
    """Resolve the limits. `device` is "cpu" or "cuda"; `stored_dtype` is the checkpoint's dtype ("float32", "bfloat16" or
    "float16"). `longest_len`: a context beyond the model's own that --max-model-len may ask for; 0: none. `num_local_ranks`: ranks on
    this machine; 0: all."""
    on_cpu = device == "cpu"
    wanted = config.model.max_model_len
    if isinstance(wanted, int) and wanted > max(context_len, longest_len):
        stretched = f", which can be extended to {longest_len}" if longest_len > context_len else ""
        raise ConfigError(
            f"--max-model-len {wanted} is beyond the model's context of {context_len}{stretched}; lower it"
        )
    (_check_on_cpu if on_cpu else _check_on_gpu)(config)
    rows = or_else(config.scheduler.max_num_seqs, 64 if on_cpu else 512)
    is_exact = on_cpu and config.model.dtype == "float32"
    return Limits(
        # 16-bit arithmetic is emulated, and slower than float32, on most CPUs.
        dtype=_or_text(config.model.dtype, "float32" if on_cpu else stored_dtype),
        # A named dtype asks for that arithmetic; kernels that also round activations are used only if both dtype and
        # quantization are auto. With --dtype float32 the CPU kernels compute from packed weights with float32's exact bits.
        keeps_packed=config.model.quantization in (AUTO, "packed") and (config.model.dtype == AUTO or is_exact),
        decodes_packed=config.model.quantization in (AUTO, "packed") and is_exact,
        max_model_len=or_else(wanted, context_len),
        max_model_len_is_auto=wanted == AUTO,
        max_num_seqs=rows,
        max_num_batched_tokens=or_else(config.scheduler.max_num_batched_tokens, max(rows, 512 if on_cpu else 8192)),
        cpu_threads=or_else(
            config.parallel.cpu_threads, max(1, num_cores // (num_local_ranks or config.parallel.num_ranks))
        ),
    )


def hold_whole_prompts(limits: Limits, config: Config) -> Limits:
    """Adjust the limits for a model that computes a prompt in one step: no prompt may be longer than a step."""
    longest, tokens = limits.max_model_len, limits.max_num_batched_tokens
    if longest <= tokens:
        return limits
    if config.scheduler.max_num_batched_tokens == AUTO:
        return dataclasses.replace(limits, max_num_batched_tokens=longest)
    if limits.max_model_len_is_auto:
        return dataclasses.replace(limits, max_model_len=tokens)
    raise ConfigError(
        f"--max-model-len {longest} is beyond --max-num-batched-tokens {tokens}, and this model computes a prompt in one step: "
        "lower the first or raise the second"
    )


def _check_on_cpu(config: Config) -> None:
    how, dtype = config.model.quantization, config.model.dtype
    if how in ("int8", "int4") and dtype not in (AUTO, "float32"):
        raise ConfigError(f"--quantization {how} computes in float32, --dtype asks for {dtype}: leave one of them out")
    if config.cache.kv_cache_dtype == "fp8":
        # Only the plain reference attention reads such pages on a CPU, at about 150 ms a token.
        raise ConfigError(
            "--kv-cache-dtype fp8 is for GPUs, and this model runs on a CPU: use int8 there, which takes about the same memory"
        )


def _check_on_gpu(config: Config) -> None:
    page_size, how = config.cache.page_size, config.model.quantization
    if page_size & (page_size - 1):
        raise ConfigError(f"--block-size must be a power of two on a GPU, got {page_size}")
    if how in ("int8", "int4") and config.model.dtype == "float32":
        raise ConfigError(
            f"--quantization {how} works with 16-bit arithmetic on a GPU: use it with --dtype bfloat16 or float16"
        )
    kind = config.cache.kv_cache_dtype
    if kind in ("int8", "float16", "float32"):
        raise ConfigError(
            f"--kv-cache-dtype {kind} is for CPUs, and this model runs on a GPU: use fp8 there, or --device cpu"
        )


def _or_text(value: str, otherwise: str) -> str:
    return otherwise if value == AUTO else value
