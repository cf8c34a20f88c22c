"""The fingerprint: the parts on which the bits of an answer depend. Engines with equal fingerprints give equal bits.

Threads, batches, pages and processes are not among the parts: no bit depends on them."""

import hashlib
import importlib.metadata

import torch

from octavo.config import AUTO, ModelConfig
from octavo.kernels.cpu.library import isa
from octavo.layers.context import BuildContext
from octavo.layers.model import DecoderModel
from octavo.spec import ModelSpec
from octavo.weights.sources.identity import weights_identity, words_identity
from octavo.weights.sources.source import ModelSource

NUMERICS = {"cpu": "2", "cuda": "3"}
"""By device: incremented with every change after which the same model, request and machine may give different bits."""


def fingerprint_of(
    context: BuildContext,
    config: ModelConfig,
    source: ModelSource,
    spec: ModelSpec,
    model: DecoderModel,
    kv_dtype: str,
    chip: str,
) -> dict[str, str]:
    """The parts by name. `model`: with its weights loaded. `kv_dtype`: of the KV pages. `chip`: the GPU's name."""
    parts = {
        "numerics": NUMERICS[context.device.type],
        "model": weights_identity(source, config.load_format == "dummy"),
        "words": words_identity(source, config.tokenizer, config.chat_template),
        "weights": _held(context, model),
        "arithmetic": _name(context.dtype),
        "kernels": _kernels(context, chip),
        "attention": context.attention.name,
        "kv": kv_dtype,
        "tensor_parallel": str(context.group.size),
        "deterministic": "yes" if context.ops.is_invariant or context.ops.kernels == "native" else "no",
    }
    if context.splits_experts:  # sums are over experts, not over parts of each
        parts["expert_parallel"] = "yes"
    settings = [config.hf_overrides, config.generation_config, config.override_generation_config]
    if config.default_chat_template_kwargs:
        settings.append(config.default_chat_template_kwargs)
    if settings != ["", AUTO, ""]:
        parts["settings"] = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:16]
    if spec.longest_len > spec.context_len:  # an extended context changes the rotation
        parts["context"] = str(context.max_len)
    return parts


def _held(context: BuildContext, model: DecoderModel) -> str:
    """The forms in which weights are held, as their methods name them."""
    named = {name for held in model.held() for name in held.numerics}
    if context.ops.kernels == "native":
        return "+".join(sorted(named))
    # --quantization, the packed types of the checkpoint and the model's type have always been named, and in this order, whether or
    # not a weight is held so: gpt-oss on 4 or 8 ranks says mxfp4, though its experts are decoded there. Leaving out what
    # no method holds would change fingerprints where no bit changes.
    settings = context.methods.settings
    rounded = [settings.quantization] if settings.quantization else []
    packed = sorted(type.lower() for type in settings.packed_types)
    dtype = _name(settings.weight_dtype)
    return "+".join([*rounded, *packed, *sorted(named - {*rounded, *packed, dtype}), dtype])


def _kernels(context: BuildContext, chip: str) -> str:
    if context.ops.kernels == "native":
        return f"native {isa()} torch {torch.__version__}"  # torch computes rotations and logprobs
    if context.device.type != "cuda":
        # torch's own products: their order of summation depends on the CPU, and may depend on the number of threads.
        capability = torch.backends.cpu.get_cpu_capability()
        return f"torch {torch.__version__} {capability} {torch.get_num_threads()} threads"
    triton = f"triton {importlib.metadata.version('triton')} " if context.ops.kernels == "triton" else ""
    return f"{triton}torch {torch.__version__} {chip}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
