"""The three Gemmas against transformers: every trait over ragged batches, two ranks, the engine, GGUF files, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    PreTrainedModel,
)

from octavo.errors import ConfigError
from octavo.models import load_family
from tests.models import checkpoints
from tests.models.family_checks import (
    check_engine,
    check_gguf,
    check_greedy,
    check_logits,
    check_ranks,
    saved,
    weights_of,
)
from tests.models.test_models_loading import gguf_llama_weights, llama_metadata
from tests.models.walk import build, build_from, prompts, reference_logits, tensors, walk

# A width that fills whole panels of the native kernels, as those of real models do: then a step can be recorded.
SIZES: dict[str, Any] = checkpoints.LLAMA | {"head_dim": 20, "intermediate_size": 96, "query_pre_attn_scalar": 11}
SIZES |= {"sliding_window": 6, "pad_token_id": 0}
CAPS = {"attn_logit_softcapping": 2.5, "final_logit_softcapping": 4.0}  # so low that they show
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
SIX = {"num_hidden_layers": 6}  # so that the last of every six layers is there


def gemma(**changes: Any) -> PreTrainedModel:
    return _centred(GemmaForCausalLM(GemmaConfig(**(SIZES | changes))))


def gemma2(**changes: Any) -> PreTrainedModel:
    return _centred(Gemma2ForCausalLM(Gemma2Config(**(SIZES | CAPS | changes))))


def gemma3(**changes: Any) -> PreTrainedModel:
    return _centred(Gemma3ForCausalLM(Gemma3TextConfig(**(SIZES | SIX | changes))))


def _centred(model: PreTrainedModel) -> PreTrainedModel:
    """Norm weights around 0, as they are stored. Their embeddings are tied and multiplied: smaller ones keep logits apart."""
    checkpoints._randomised(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.sub_(1)
    return model


CASES: list[Any] = [
    pytest.param(gemma, {"num_key_value_heads": 1}, {"hidden_act": "gelu", "tie_word_embeddings": ...}, id="gemma"),
    pytest.param(gemma2, {}, None, id="gemma2"),
    pytest.param(gemma2, {}, {"layer_types": ..., "head_dim": 20, "tie_word_embeddings": ...}, id="gemma2 not given"),
    pytest.param(
        gemma2,
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": ["full_attention"] * 3},
        None,
        id="gemma2 plain",
    ),
    pytest.param(gemma2, {"attention_bias": True, "tie_word_embeddings": False}, None, id="gemma2 biases, untied"),
    pytest.param(gemma3, {}, None, id="gemma3"),
    pytest.param(
        gemma3,
        {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            }
        },
        None,
        id="gemma3 ropes",
    ),
    pytest.param(
        gemma3,
        {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            }
        },
        {
            "rope_parameters": ...,
            "layer_types": ...,
            "rope_theta": 5000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            "rope_local_base_freq": 90.0,
            "sliding_window_pattern": 6,
        },
        id="gemma3 as published before transformers 5",
    ),
    pytest.param(
        gemma3,
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "final_logit_softcapping": 3.0},
        None,
        id="gemma3 given",
    ),
]


@pytest.mark.parametrize(("make", "changes", "written"), CASES)
def test_logits_equal_the_reference(
    make: Any, changes: dict[str, Any], written: dict[str, Any] | None, tmp_path: Path
) -> None:
    check_logits(make(**changes), tmp_path, written)


@pytest.mark.parametrize("make", [gemma, gemma2, gemma3])
def test_greedy_steps_equal_the_reference(make: Any, tmp_path: Path) -> None:
    check_greedy(make(), tmp_path)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    check_ranks(gemma3(vocab_size=161, final_logit_softcapping=3.0, num_hidden_layers=3), tmp_path)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("make", [gemma2, gemma3])
def test_the_engine_equals_the_reference(
    make: Any, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "operation by operation" not in check_engine(make(), tmp_path, monkeypatch, is_native)


def test_a_width_that_fills_no_panels_is_computed_operation_by_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate's gelu is torch's then, which no tape can hold, and the start says so."""
    notes = check_engine(gemma2(intermediate_size=84), tmp_path, monkeypatch, is_native=True)
    assert "steps run operation by operation: torch computes" in notes


@pytest.mark.parametrize("make", [gemma2, gemma3])
def test_16_bit_logits_are_near(make: Any) -> None:
    reference = make()
    ours, store = build(reference, "reference", torch.bfloat16)
    sequences = prompts(seed=9)
    for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=4), strict=True):
        expected = reference_logits(reference, tokens)
        assert (logits.float() - expected).abs().mean() < 0.05 * expected.std()


# ── with eyes ───────────────────────────────────────────────────────────────────────────────────────

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}


@pytest.mark.parametrize("is_old", [False, True])
def test_the_text_part_of_a_model_with_eyes(is_old: bool, tmp_path: Path) -> None:
    config = Gemma3Config(text_config=SIZES | SIX, vision_config=VISION, mm_tokens_per_image=1)
    reference = _centred(Gemma3ForConditionalGeneration(config))
    checkpoint = saved(reference, tmp_path)
    assert checkpoint.config["model_type"] == "gemma3"
    assert any("vision_tower" in name for name, _ in checkpoint.tensors("cpu", torch.float32))
    weights = dict(weights_of(checkpoint))
    if is_old:
        weights = {name.replace("model.language_model.", "language_model.model."): t for name, t in weights.items()}
        weights = {
            name.replace("model.vision", "vision").replace("model.multi", "multi"): t for name, t in weights.items()
        }
    ours, store = build_from(checkpoint.config, iter(weights.items()), "native_cpu")
    (tokens,) = prompts(seed=3, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=3)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_what_the_text_part_of_a_model_with_eyes_may_leave_out() -> None:
    published = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    published["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    expected = Gemma3TextConfig(**published)
    found = load_family("gemma3").spec({"text_config": published, "vision_config": {}})
    assert (found.num_heads, found.num_kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert (found.head_size, found.vocab_size) == (expected.head_dim, expected.vocab_size)
    assert found.context_len == expected.max_position_embeddings
    assert [bool(window) for window in found.windows] == [kind == "sliding_attention" for kind in expected.layer_types]
    with pytest.raises(ConfigError, match="text_config is missing"):
        load_family("gemma3").spec({"model_type": "gemma3"})


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def gguf_weights(reference: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As llama.cpp's converter writes them: its names, and 1 added to the norms' weights."""
    names = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
    names |= {"post_feedforward_layernorm": "post_ffw_norm"}
    weights = {n: t + 1 if n.endswith("norm.weight") else t for n, t in tensors(reference) if n != "lm_head.weight"}
    if type(reference) is GemmaForCausalLM:
        names = {}  # its norms are called as a Llama's
    norms = {n: t for n, t in weights.items() if n.split(".")[-2] in names}
    found = gguf_llama_weights({n: t for n, t in weights.items() if n not in norms}, is_permuted=False)
    return found | {f"blk.{n.split('.')[2]}.{names[n.split('.')[3]]}.weight": t for n, t in norms.items()}


def metadata_of(architecture: str, **more: Any) -> dict[str, Any]:
    settings = {"attention.key_length": 20, "feed_forward_length": 96, "attention.sliding_window": 6} | more
    metadata = llama_metadata(architecture) | {"general.architecture": architecture}
    return metadata | {f"{architecture}.{key.replace('__', '.')}": value for key, value in settings.items()}


def test_a_gguf_file_of_gemma_equals_the_reference(tmp_path: Path) -> None:
    reference = gemma()
    check_gguf(reference, gguf_weights(reference), metadata_of("gemma"), tmp_path)


def test_a_gguf_file_of_gemma2_equals_the_reference(tmp_path: Path) -> None:
    metadata = metadata_of("gemma2", attn_logit_softcapping=2.5, final_logit_softcapping=4.0)
    reference = gemma2(query_pre_attn_scalar=20)
    check_gguf(reference, gguf_weights(reference), metadata, tmp_path)


def test_a_gguf_file_of_gemma3_equals_the_reference(tmp_path: Path) -> None:
    rope = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    reference = gemma3(query_pre_attn_scalar=20, rope_parameters=rope)
    metadata = metadata_of("gemma3", block_count=6, rope__freq_base=5000.0)
    metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 3.0}
    check_gguf(reference, gguf_weights(reference), metadata, tmp_path)


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_divide_scores_by_another_number(architecture: str, num_layers: int) -> None:
    """As no GGUF file says: 4608 / 32 in Gemma 2's 27B, 5376 / 32 in Gemma 3's, whose heads have 128."""
    config_of = load_family(architecture).gguf_config
    assert config_of(metadata_of(architecture, block_count=num_layers), {})["query_pre_attn_scalar"] == 12
    assert config_of(metadata_of(architecture, block_count=num_layers - 1), {})["query_pre_attn_scalar"] == 20


# ── what is read of a configuration, and what is refused ────────────────────────────────────────────


def test_specs_are_as_transformers_has_them() -> None:
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    sizes["num_hidden_layers"] = 12
    plain = load_family("gemma").spec(sizes | {"num_key_value_heads": 4})
    assert (plain.head_size, plain.context_len, plain.has_window) == (256, GemmaConfig().max_position_embeddings, False)
    for family, kind in (("gemma2", Gemma2Config), ("gemma3_text", Gemma3TextConfig)):
        expected, found = kind(**sizes), load_family(family).spec(sizes | {"num_key_value_heads": 4})
        assert (found.family, found.head_size, found.context_len) == (family, 256, expected.max_position_embeddings)
        assert found.windows == tuple(4096 * (kind == "sliding_attention") for kind in expected.layer_types)
        assert found.has_softcap is (family == "gemma2")


REFUSED: list[Any] = [
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma2", {"query_pre_attn_scalar": "big"}, "query_pre_attn_scalar is 'big'"),
    ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
    ("gemma2", {"final_logit_softcapping": "x"}, "final_logit_softcapping is 'x'"),
    ("gemma2", {"sliding_window": 0}, "sliding_window is 0"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 3 names"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("gemma3_text", {"rope_parameters": "x"}, "rope_parameters must be an object with full_attention"),
    ("gemma3_text", {"rope_parameters": {"full_attention": "x"}}, "rope_scaling is 'x'"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
    ("gemma3_text", {"rope_local_base_freq": "x"}, "rope_local_base_freq is 'x'"),
    ("gemma3_text", {"hidden_size": None}, "hidden_size is missing"),
]


@pytest.mark.parametrize(("family", "changes", "problem"), REFUSED)
def test_a_configuration_that_does_not_hold_is_refused(family: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family(family).spec(SIZES | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message
