"""ModelShape: what a step of a model reads and computes, from its configuration alone. Nothing is loaded, and torch is not needed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.weights.sources.facts import read_facts
from octavo.weights.sources.folder import read_config
from octavo.weights.sources.source import resolve

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "none": 2.0, "fp8": 1.0, "int8": 1.0625, "int4": 0.625}
_SHARE_OF_FILE = 0.2  # a checkpoint with so many bytes less than 16 bits a parameter is packed


class ModelShape(msgspec.Struct, frozen=True):
    name: str
    num_parameters: int
    active_parameters: int  # that a token is multiplied by: of a mixture's experts only those it is sent to
    expert_parameters: int  # of `num_parameters`: those of experts
    num_experts: int  # 0: it is no mixture
    experts_per_token: int
    num_layers: int
    hidden_size: int
    num_heads: int
    head_size: int
    kv_numbers: int  # of one token, over all layers: keys and values
    vocab_size: int
    context_len: int
    weights_bytes: int  # as they are stored

    def bytes_read(self, num_tokens: int, weights_bytes: int) -> float:
        """Weights that a step with so many tokens reads, of `weights_bytes`: of experts, those that some token is sent to, if every one is
        as likely."""
        if not self.num_experts:
            return float(weights_bytes)
        share = self.expert_parameters / self.num_parameters
        reached = 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return weights_bytes * (1 - share + share * reached)

    @property
    def num_kv_heads(self) -> int:
        """As far as its KV numbers tell: 0 for a latent cache, which every rank holds."""
        heads, rest = divmod(self.kv_numbers, 2 * self.num_layers * self.head_size)
        return 0 if rest else heads

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError where the heads cannot be divided among so many ranks, as `octavo serve` would."""
        heads = {"attention heads": self.num_heads, "KV heads": self.num_kv_heads}
        bad = [f"{count} {name}" for name, count in heads.items() if count % ranks]
        if bad:
            good = [n for n in range(1, self.num_heads + 1) if not any(count % n for count in heads.values())]
            raise ConfigError(
                f"--tensor-parallel-size {ranks} does not divide this model's {' and '.join(bad)}; sizes that work: {', '.join(map(str, good))}"
            )

    @property
    def token_flops(self) -> float:
        """Of the products of one token."""
        return 2.0 * self.active_parameters

    @property
    def pair_flops(self) -> float:
        """Of attention, for a token and one position that it sees."""
        return 4.0 * self.num_layers * self.num_heads * self.head_size

    def held_bytes(self, quantization: str, dtype: str, is_cpu: bool) -> int:
        """Bytes of the weights in memory."""
        if quantization in ("fp8", "int8", "int4"):
            return int(self.num_parameters * _BYTES[quantization])
        is_packed = self.weights_bytes < (2 - _SHARE_OF_FILE) * self.num_parameters
        if is_packed and quantization in ("auto", "packed"):
            return self.weights_bytes
        if dtype == "auto":
            return self.num_parameters * (4 if is_cpu else 2)
        return int(self.num_parameters * _BYTES[dtype])


def read_shape(model: str) -> ModelShape:
    """`model`: a folder, a .gguf file, a pulled model; empty: the embedded one. A folder may have a config.json alone. Raises ConfigError."""
    source = resolve(model, allow_missing_weights=True)
    path = Path(source.path)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return _from_config(source.name, read_config(path), 0, 0)
    facts = read_facts(path)
    if facts.format == "gguf":
        return _from_gguf(source.name, facts.metadata, facts.num_parameters, facts.num_bytes)
    return _from_config(source.name, read_config(path), facts.num_parameters, facts.num_bytes)


def _number(values: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = values.get(name)
        if type(value) is int and 0 <= value < 2**53:
            return value
    if default is None:
        raise ConfigError(f"the model's configuration has no {names[0]}: its steps cannot be estimated")
    return default


def _from_config(name: str, config: Mapping[str, Any], num_parameters: int, num_bytes: int) -> ModelShape:
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, dict) else dict(config)
    hidden = _number(values, "hidden_size", "n_embd", "d_model")
    layers = _number(values, "num_hidden_layers", "n_layer")
    heads = _number(values, "num_attention_heads", "n_head")
    kv_heads = _number(values, "num_key_value_heads", default=heads)
    head_size = _number(values, "head_dim", default=max(1, hidden // max(1, heads)))
    latent = _number(values, "kv_lora_rank", default=0)
    kv_numbers = layers * (
        (latent + _number(values, "qk_rope_head_dim", default=0)) if latent else 2 * kv_heads * head_size
    )
    inner = _number(values, "intermediate_size", "n_inner", default=4 * hidden)
    experts = _number(values, "num_experts", "num_local_experts", "n_routed_experts", default=0)
    each = _number(values, "num_experts_per_tok", "num_experts_per_token", default=min(2, experts))
    expert_inner = _number(values, "moe_intermediate_size", default=inner)
    vocab = _number(values, "vocab_size")
    tables = vocab * hidden * (1 if values.get("tie_word_embeddings") else 2)
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    of_experts = 3 * layers * hidden * expert_inner * experts
    total = tables + layers * attention + (of_experts or 3 * layers * hidden * inner)
    num_parameters = num_parameters if num_parameters > total / 2 else total  # packed files count packed numbers
    active = num_parameters - (vocab * hidden if not values.get("tie_word_embeddings") else 0)
    if experts:
        active -= round(of_experts * (1 - each / experts))
    return ModelShape(
        name, num_parameters, active, of_experts, experts, each, layers, hidden, heads, head_size, kv_numbers, vocab,
        _number(values, "max_position_embeddings", "n_positions", default=2048), num_bytes or 2 * num_parameters,
    )  # fmt: skip


def _from_gguf(name: str, metadata: Mapping[str, Any], num_parameters: int, num_bytes: int) -> ModelShape:
    prefix = f"{metadata.get('general.architecture', '')}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    hidden, layers = _number(values, "embedding_length"), _number(values, "block_count")
    heads = _number(values, "attention.head_count")
    kv_heads = _number(values, "attention.head_count_kv", default=heads)
    head_size = _number(values, "attention.key_length", default=max(1, hidden // max(1, heads)))
    experts, each = _number(values, "expert_count", default=0), _number(values, "expert_used_count", default=0)
    inner = _number(values, "expert_feed_forward_length", "feed_forward_length", default=4 * hidden)
    of_experts = 3 * layers * hidden * inner * experts
    vocab = _number(values, "vocab_size", default=32_000)
    active = num_parameters - (round(of_experts * (1 - each / experts)) if experts else 0)
    return ModelShape(
        name, num_parameters, active, of_experts, experts, each, layers, hidden, heads, head_size, 2 * layers * kv_heads * head_size,
        vocab, _number(values, "context_length", default=2048), num_bytes,
    )  # fmt: skip


def longest_of(shape: ModelShape, num_pages: int, page_size: int) -> int:
    """The longest request that the model and its pages allow."""
    return max(1, min(shape.context_len, num_pages * page_size))


def in_gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{math.ceil(num_bytes / 2**20)} MiB"
