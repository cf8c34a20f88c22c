"""Granite and OLMo 2 against transformers: every trait over ragged batches, two ranks, the engine, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, Olmo2Config, Olmo2ForCausalLM, PreTrainedModel

from octavo.errors import ConfigError
from octavo.models import load_family
from tests.models import checkpoints
from tests.models.family_checks import check_engine, check_gguf, check_greedy, check_logits, check_ranks
from tests.models.test_models_loading import gguf_llama_weights, llama_metadata
from tests.models.walk import build, prompts, reference_logits, tensors, walk

SIZES: dict[str, Any] = checkpoints.LLAMA | {"pad_token_id": 0}
MULTIPLIERS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.15, "residual_multiplier": 0.22}
MULTIPLIERS |= {"logits_scaling": 3.0}


def granite(**changes: Any) -> PreTrainedModel:
    # An epsilon that shows: it is not the same before and after the factor is taken out of the residual stream.
    settings = SIZES | MULTIPLIERS | {"rms_norm_eps": 0.05, "initializer_range": 0.1} | changes
    return checkpoints._randomised(GraniteForCausalLM(GraniteConfig(**settings)))


def olmo2(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(Olmo2ForCausalLM(Olmo2Config(**(SIZES | {"rms_norm_eps": 0.05} | changes))))


CASES: list[Any] = [
    pytest.param(granite, {}, None, id="granite"),
    pytest.param(
        granite, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, None, id="granite tied"
    ),
    pytest.param(
        granite,
        dict.fromkeys(MULTIPLIERS, 1.0) | {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
        {"rope_theta": 700.0, "rope_parameters": ...} | dict.fromkeys(MULTIPLIERS, ...),
        id="granite not given",
    ),
    pytest.param(olmo2, {}, None, id="olmo2"),
    pytest.param(
        olmo2, {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}, None, id="olmo2 tied"
    ),
    pytest.param(
        olmo2, {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}, {"rms_norm_eps": ...}, id="olmo2 epsilon not given"
    ),
]


@pytest.mark.parametrize(("make", "changes", "written"), CASES)
def test_logits_equal_the_reference(
    make: Any, changes: dict[str, Any], written: dict[str, Any] | None, tmp_path: Path
) -> None:
    check_logits(make(**changes), tmp_path, written)


@pytest.mark.parametrize("make", [granite, olmo2])
def test_greedy_steps_equal_the_reference(make: Any, tmp_path: Path) -> None:
    check_greedy(make(), tmp_path)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """A norm over all heads is one over all ranks. Granite's ranks are a Llama's."""
    check_ranks(olmo2(vocab_size=161), tmp_path)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("make", [granite, olmo2])
def test_the_engine_equals_the_reference(
    make: Any, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "operation by operation" not in check_engine(make(), tmp_path, monkeypatch, is_native)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [granite, olmo2])
def test_16_bit_logits_are_near(make: Any, dtype: torch.dtype) -> None:
    reference = make()
    ours, store = build(reference, "torch_cpu", dtype)
    sequences = prompts(seed=9)
    for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=4), strict=True):
        expected = reference_logits(reference, tokens)
        near = (0.05 if dtype == torch.bfloat16 else 0.01) * expected.std()
        assert (logits.float() - expected).abs().mean() < near


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def metadata_of(architecture: str, **more: Any) -> dict[str, Any]:
    metadata = llama_metadata(architecture) | {"general.architecture": architecture}
    more["attention__layer_norm_rms_epsilon"] = 0.05
    return metadata | {f"{architecture}.{key.replace('__', '.')}": value for key, value in more.items()}


def test_a_gguf_file_of_granite_equals_the_reference(tmp_path: Path) -> None:
    reference = granite()
    more = {"embedding_scale": 12.0, "attention__scale": 0.15, "residual_scale": 0.22, "logit_scale": 3.0}
    weights = gguf_llama_weights(dict(tensors(reference)))
    check_gguf(reference, weights, metadata_of("granite", **more), tmp_path)


def test_a_gguf_file_of_olmo2_equals_the_reference(tmp_path: Path) -> None:
    reference = olmo2()
    names = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    weights = dict(tensors(reference))
    norms = {n: weights.pop(n) for n in list(weights) if n.split(".")[-2] in names}
    found = gguf_llama_weights(weights, is_permuted=False)
    found |= {f"blk.{n.split('.')[2]}.{names[n.split('.')[3]]}.weight": t for n, t in norms.items()}
    check_gguf(reference, found, metadata_of("olmo2"), tmp_path)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0"),
        ("granite", {"logits_scaling": -8}, "logits_scaling is -8"),
        ("granite", {"embedding_multiplier": "12"}, "embedding_multiplier is '12'"),
        ("granite", {"attention_multiplier": [1]}, "attention_multiplier is a list"),
        ("olmo2", {"num_key_value_heads": 3}, "num_attention_heads is 4, which is no multiple"),
        ("olmo2", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ],
)
def test_a_configuration_that_does_not_hold_is_refused(family: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family(family).spec(SIZES | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message
