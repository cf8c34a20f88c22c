"""How weights get in: what a checkpoint may leave out or bring along, what is refused, and GGUF's other conventions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import families, gpt2, llama, load_family, qwen3
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.methods.onednn import PackedRows, can_pack, pack
from tests.models import checkpoints
from tests.models.walk import build_from, prompts, reference_logits, tensors, walk
from tests.weights.gguf_writer import Packed, write_gguf

Weights = dict[str, torch.Tensor]


def drop(weights: Weights) -> None:
    del weights["model.layers.1.self_attn.k_proj.weight"]


def reshape(weights: Weights) -> None:
    weights["model.norm.weight"] = torch.zeros(49)


def add(weights: Weights) -> None:
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"lacks tensor model\.layers\.1\.self_attn\.k_proj\.weight"),
        (reshape, r"model\.norm\.weight has shape \[49\], its config asks for \[48\]"),
        (add, r"holds tensor model\.layers\.7\.mlp\.up_proj\.weight, which"),
        (Weights.clear, r"lacks tensors model\.embed_tokens\.weight, .* and \d+ more"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(damage: Callable[[Weights], None], message: str) -> None:
    reference = checkpoints.llama()
    weights = dict(tensors(reference))
    damage(weights)
    with pytest.raises(ConfigError, match=message) as refusal:
        build_from(reference.config.to_dict(), iter(weights.items()))
    assert "\n" not in str(refusal.value)


def test_what_old_checkpoints_bring_along_is_ignored() -> None:
    reference = checkpoints.gpt2()
    weights = {name.removeprefix("transformer."): tensor for name, tensor in tensors(reference)}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    ours, store = build_from(reference.config.to_dict(), iter(weights.items()))
    (tokens,) = prompts(seed=2, lengths=(30,))
    (logits,) = walk(ours, store, [tokens], seed=2)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)

    reference = checkpoints.llama(tie_word_embeddings=True)
    weights = dict(tensors(reference))
    weights["lm_head.weight"] = torch.zeros(160, 48)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    ours, store = build_from(reference.config.to_dict(), iter(weights.items()))
    (logits,) = walk(ours, store, [tokens], seed=2)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_a_checkpoint_that_was_saved_without_its_head_lacks_the_prefix() -> None:
    """As those are that were made for embeddings."""
    reference = checkpoints.qwen3(tie_word_embeddings=True)
    weights = {n.removeprefix("model."): t for n, t in tensors(reference) if n != "lm_head.weight"}
    ours, store = build_from(reference.config.to_dict(), iter(weights.items()))
    (tokens,) = prompts(seed=2, lengths=(30,))
    (logits,) = walk(ours, store, [tokens], seed=2)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_an_activation_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation \['silu'\] is not supported"):
        build_from(checkpoints.llama().config.to_dict() | {"hidden_act": ["silu"]}, iter(()))


def test_rope_factors_that_would_divide_by_zero_are_refused() -> None:
    reference = checkpoints.llama()
    weights = dict(tensors(reference)) | {"model.rope_factors": torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 1.0])}
    with pytest.raises(ConfigError, match="rope factors must all be above 0"):
        build_from(reference.config.to_dict(), iter(weights.items()))


def test_a_tied_embedding_is_held_once() -> None:
    sizes = {}
    for is_tied in (True, False):
        # Large enough, and of a width, that padding to the packed layout's blocks does not count.
        reference = checkpoints.llama(tie_word_embeddings=is_tied, hidden_size=64, vocab_size=1024)
        ours, _ = build_from(reference.config.to_dict(), tensors(reference))
        sizes[is_tied] = ours.weights_bytes
    # On a CPU whose packed layout is none of the known ones, the embedding keeps a copy of its own beside the head's.
    weight = torch.randn(1024, 64)
    is_read_from_head = not can_pack(weight.device, weight.dtype) or PackedRows.of(pack(weight), weight) is not None
    assert sizes[False] - sizes[True] == (1024 * 64 * 4 if is_read_from_head else 0)


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    assert {"llama", "gpt2", "qwen3"} <= set(families())
    with pytest.raises(ConfigError, match=r"'lama' is not supported; .*gpt2.*llama.*did you mean llama\?"):
        load_family("lama")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "spiral"}}, "rope type 'spiral' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of 6 numbers above 0"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 5 + [0]}},
            "long_factor must be a list of 6 numbers above 0",
        ),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported"),
    ],
)
def test_unsupported_traits_are_refused(changes: dict[str, Any], message: str) -> None:
    config = checkpoints.llama().config.to_dict()
    del config["rope_parameters"]
    with pytest.raises(ConfigError, match=message):
        build_from(config | changes, iter(()))


def test_unsupported_gpt2_traits_are_refused() -> None:
    config = checkpoints.gpt2().config.to_dict()
    for changes in ({"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            gpt2.spec(config | changes)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def gguf_llama_weights(weights: Weights, is_permuted: bool = True) -> Weights:
    """As llama.cpp's converter writes them: its names, and q and k permuted head by head for Llama itself."""
    names = {ours: theirs for theirs, ours in llama._GGUF_LAYER_NAMES.items()}
    names |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    top = {ours: theirs for theirs, ours in llama._GGUF_NAMES.items()}
    found = {}
    for name, tensor in weights.items():
        if name in top:
            found[top[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        if is_permuted and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = tensor.shape[0] // 12
            tensor = tensor.reshape(heads, 2, 6, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        found[f"blk.{layer}.{names[module]}.{kind}"] = tensor
    return found


def llama_metadata(architecture: str = "llama") -> dict[str, Any]:
    sizes = {
        "embedding_length": 48,
        "block_count": 3,
        "feed_forward_length": 80,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 128,
    }
    return {f"{architecture}.{key}": value for key, value in sizes.items()} | {"tokenizer.ggml.tokens": ["x"] * 160}


@pytest.mark.parametrize("is_tied", [True, False])
def test_gguf_llama_equals_the_reference(is_tied: bool) -> None:
    reference = checkpoints.llama(tie_word_embeddings=is_tied, attention_bias=True)
    weights = gguf_llama_weights({n: t for n, t in tensors(reference) if not (is_tied and n == "lm_head.weight")})
    config = llama.gguf_config(llama_metadata(), weights)
    assert config["tie_word_embeddings"] is is_tied
    fixed = ((llama.gguf_name(name), tensor) for name, tensor in weights.items())
    ours, store = build_from(config, ((n, llama.gguf_fix(n, t, config)) for n, t in fixed if n is not None))
    (tokens,) = prompts(seed=3, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=3)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_gguf_qwen3_equals_the_reference(is_tied: bool, tmp_path: Path) -> None:
    """From a file, as it is opened when a model is served."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    reference = checkpoints.qwen3(tie_word_embeddings=is_tied, rope_parameters=yarn)
    weights = {n: t for n, t in tensors(reference) if not (is_tied and n == "lm_head.weight")}
    packed = [
        Packed(name, tuple(tensor.shape), "F32", tensor.numpy().tobytes())
        for name, tensor in gguf_llama_weights(weights, is_permuted=False).items()
    ]
    metadata = llama_metadata("qwen3") | {"general.architecture": "qwen3", "qwen3.attention.key_length": 20}
    metadata |= {"qwen3.rope.freq_base": 1e6, "qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0}
    metadata |= {"qwen3.rope.scaling.original_context_length": 32}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", metadata, packed))
    assert checkpoint.config["tie_word_embeddings"] is is_tied
    assert qwen3.gguf_name("blk.0.attn_q_norm.bias") is None
    ours, store = build_from(checkpoint.config, checkpoint.tensors("cpu", torch.float32))
    (tokens,) = prompts(seed=3, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=3)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_gguf_rope_factors_divide_the_frequencies() -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    reference = checkpoints.llama(rope_parameters=scaling)
    weights = gguf_llama_weights(dict(tensors(reference)))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 12, 2) / 12)
    weights["rope_freqs.weight"] = plain / reference.model.rotary_emb.inv_freq
    config = llama.gguf_config(llama_metadata(), weights)
    fixed = ((llama.gguf_name(name), tensor) for name, tensor in weights.items())
    ours, store = build_from(config, ((n, llama.gguf_fix(n, t, config)) for n, t in fixed if n is not None))
    (tokens,) = prompts(seed=4, lengths=(47,))
    (logits,) = walk(ours, store, [tokens], seed=4)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_gguf_gpt2_equals_the_reference() -> None:
    reference = checkpoints.gpt2()
    names = {ours: theirs for theirs, ours in gpt2._GGUF_LAYER_NAMES.items()}
    top = {ours: theirs for theirs, ours in gpt2._GGUF_NAMES.items()}
    weights = {}
    for name, tensor in tensors(reference):
        if name == "lm_head.weight":
            continue
        if name in top:
            weights[top[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        is_transposed = kind == "weight" and "ln_" not in module
        weights[f"blk.{layer}.{names[module]}.{kind}"] = tensor.t().contiguous() if is_transposed else tensor
    metadata = {
        "gpt2.embedding_length": 48,
        "gpt2.block_count": 3,
        "gpt2.attention.head_count": 4,
        "gpt2.feed_forward_length": 192,
        "gpt2.context_length": 128,
        "tokenizer.ggml.tokens": ["x"] * 160,
    }
    config = gpt2.gguf_config(metadata, weights)
    fixed = ((gpt2.gguf_name(name), tensor) for name, tensor in weights.items())
    ours, store = build_from(config, ((n, gpt2.gguf_fix(n, t, config)) for n, t in fixed if n is not None))
    (tokens,) = prompts(seed=3, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=3)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_gguf_metadata_that_is_not_a_plain_llama_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"llama\.attention\.head_count is a list"):
        llama.gguf_config(llama_metadata() | {"llama.attention.head_count": [4, 4, 2]}, {})
    assert llama.gguf_name("blk.0.ffn_gate_inp.weight") is None
    scaled = llama.gguf_config(
        llama_metadata() | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, {}
    )
    assert scaled["rope_parameters"]["rope_type"] == "linear" and scaled["rope_parameters"]["factor"] == 2.0
