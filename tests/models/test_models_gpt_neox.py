"""GPT-NeoX against transformers: both kinds of residual, parts of heads rotated, its old names, GGUF files, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from octavo.errors import ConfigError
from octavo.models import gpt_neox, load_family
from octavo.quants import Quants
from octavo.weights.formats.checkpoint import open_checkpoint
from tests.models import checkpoints
from tests.models.family_checks import check_engine, check_greedy, check_logits, check_ranks
from tests.models.walk import build_from, prompts, reference_logits, tensors, walk
from tests.weights.gguf_writer import Packed, write_gguf

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


def neox(**changes: Any) -> PreTrainedModel:
    return checkpoints.telling(GPTNeoXForCausalLM(GPTNeoXConfig(**(SIZES | changes))))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, None),
    "one after the other": ({"use_parallel_residual": False, "hidden_act": "gelu_fast"}, None),
    "no biases, tied": ({"attention_bias": False, "tie_word_embeddings": True}, None),
    "old names": ({"rotary_pct": 0.5, "rotary_emb_base": 500.0}, {"rope_parameters": ...}),
    "whole heads": ({"rotary_pct": 1.0}, None),
    "old names not given": ({}, {"rope_parameters": ..., "rotary_pct": ..., "rotary_emb_base": ...}),
    "stretched part": ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, None),
}


@pytest.mark.parametrize(("changes", "written"), CASES.values(), ids=CASES)
def test_logits_equal_the_reference(changes: dict[str, Any], written: dict[str, Any] | None, tmp_path: Path) -> None:
    names = ("rotary_pct", "rotary_emb_base")
    settings = {name: changes[name] for name in names if name in changes} if written else {}
    check_logits(neox(**changes), tmp_path, (written or {}) | settings)


def test_greedy_steps_equal_the_reference(tmp_path: Path) -> None:
    check_greedy(neox(), tmp_path, num_varied=2)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    check_ranks(neox(vocab_size=161), tmp_path)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_the_engine_equals_the_reference(is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "operation by operation" not in check_engine(neox(), tmp_path, monkeypatch, is_native)


def test_what_published_checkpoints_bring_along_is_ignored() -> None:
    """The head has another name there than in transformers 5."""
    reference = neox()
    weights = dict(tensors(reference))
    weights["embed_out.weight"] = weights.pop("lm_head.weight")
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 128, 128)
    weights["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    weights["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.zeros(2)
    ours, store = build_from(reference.config.to_dict(), iter(weights.items()))
    (tokens,) = prompts(seed=2, lengths=(30,))
    (logits,) = walk(ours, store, [tokens], seed=2)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def gguf_weights(reference: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As llama.cpp's converter writes them: its names, and all queries before all keys before all values."""
    names = {ours: theirs for theirs, ours in gpt_neox._GGUF_LAYER_NAMES.items()}
    top = {ours: theirs for theirs, ours in gpt_neox._GGUF_NAMES.items()} | {"lm_head.weight": "output.weight"}
    found = {}
    for name, tensor in tensors(reference):
        if name in top:
            found[top[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        if module == "attention.query_key_value":
            rows = tensor.view(4, 3, 16, -1)
            tensor = torch.cat([rows[:, part].reshape(64, -1) for part in range(3)]).view(tensor.shape)
        found[f"blk.{layer}.{names[module]}.{kind}"] = tensor
    return found


METADATA: dict[str, Any] = {
    "general.architecture": "gptneox",
    "gptneox.embedding_length": 64,
    "gptneox.block_count": 3,
    "gptneox.attention.head_count": 4,
    "gptneox.feed_forward_length": 96,
    "gptneox.context_length": 128,
    "gptneox.rope.dimension_count": 4,
    "gptneox.attention.layer_norm_epsilon": 1e-5,
    "gptneox.use_parallel_residual": True,
    "tokenizer.ggml.tokens": ["x"] * 160,
}


def test_gguf_equals_the_reference(tmp_path: Path) -> None:
    reference = neox()
    packed = [
        Packed(name, tuple(tensor.shape), "F32", tensor.numpy().tobytes())
        for name, tensor in gguf_weights(reference).items()
    ]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", METADATA, packed))
    assert checkpoint.config["model_type"] == "gpt_neox" and checkpoint.config["tie_word_embeddings"] is False
    ours, store = build_from(checkpoint.config, checkpoint.tensors("cpu", torch.float32))
    (tokens,) = prompts(seed=3, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=3)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_gguf_rows_that_are_packed_go_where_plain_ones_go() -> None:
    rows = torch.arange(192 * 2 * 34).remainder(113).to(torch.uint8)  # so small that every float16 in it is a number
    packed = Quants("Q8_0", rows.view(192, 2 * 34))
    config = gpt_neox.gguf_config(METADATA, {})
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    fixed = gpt_neox.gguf_fix(name, packed, config)
    assert torch.equal(fixed.dequantise(), gpt_neox.gguf_fix(name, packed.dequantise(), config))
    apart = gpt_neox.apart_by_kind(fixed, 16)
    assert torch.equal(apart.dequantise(), gpt_neox.apart_by_kind(fixed.dequantise(), 16))
    assert apart.order is None, "what the converter did is undone, and costs nothing"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"hidden_size": 66}, "hidden_size is 66, which is no multiple of num_attention_heads, 4"),
        ({"rotary_pct": 0.1}, "partial_rotary_factor is '0.1': it must select an even number of the 16"),
        ({"rotary_pct": "some"}, "partial_rotary_factor is 'some'"),
        ({"rotary_emb_base": "big"}, "rope_theta is 'big'"),
        ({"layer_norm_eps": -1}, "layer_norm_eps is -1"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
    ],
)
def test_a_configuration_that_does_not_hold_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family("gpt_neox").spec(SIZES | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message
