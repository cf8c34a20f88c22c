"""DeepSeek-V2 and V3 against transformers: attention over latents, groups of experts, shared ones, two ranks, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

from octavo.errors import ConfigError
from octavo.models import load_family
from octavo.quants.writers import q8_0
from tests.models import checkpoints
from tests.models.family_checks import check_engine, check_greedy, check_logits, check_ranks, saved, weights_of
from tests.models.walk import build_from, prompts, reference_logits, walk

SIZES: dict[str, Any] = {key: value for key, value in checkpoints.LLAMA.items() if key != "num_key_value_heads"}
SIZES |= {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
SIZES |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.9}
GROUPS = {"n_group": 4, "topk_group": 2}


def v2(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(DeepseekV2ForCausalLM(DeepseekV2Config(**(SIZES | changes))))


def v3(**changes: Any) -> PreTrainedModel:
    config = DeepseekV3Config(**(SIZES | GROUPS | {"n_shared_experts": 1} | changes))
    model = checkpoints._randomised(DeepseekV3ForCausalLM(config))
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # it must show in which experts are chosen
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model


CASES: list[Any] = [
    pytest.param(v2, {}, id="v2"),
    pytest.param(v2, {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True}, id="v2 lite"),
    pytest.param(v2, GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}, id="v2 groups"),
    pytest.param(v2, {"rope_parameters": YARN}, id="v2 yarn"),
    pytest.param(v3, {}, id="v3"),
    pytest.param(v3, {"norm_topk_prob": False, "rope_parameters": YARN, "q_lora_rank": None}, id="v3 yarn"),
    pytest.param(v3, {"rope_interleave": False, "attention_bias": True}, id="v3 halves"),
]


@pytest.mark.parametrize(("make", "changes"), CASES)
def test_logits_equal_the_reference(make: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    check_logits(make(**changes), tmp_path)


@pytest.mark.parametrize("make", [v2, v3])
def test_greedy_steps_equal_the_reference(make: Any, tmp_path: Path) -> None:
    check_greedy(make(), tmp_path, num_varied=2)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Latents are whole on both: only one rank's pages would be too few for the other's heads."""
    check_ranks(v3(), tmp_path)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("latent", [16, 256], ids=["small", "wide"])  # wide: beyond what native attention takes
def test_the_engine_equals_the_reference(
    latent: int, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = check_engine(v2(kv_lora_rank=latent), tmp_path, monkeypatch, is_native)
    assert ("operation by operation" in notes) is is_native
    assert ("attention by native_cpu" in notes) is (is_native and latent == 16)


def test_a_page_holds_latents_whatever_the_number_of_heads() -> None:
    few, many = (load_family("deepseek_v2").spec(SIZES | {"num_attention_heads": heads}) for heads in (4, 64))
    assert (many.num_kv_heads, many.head_size) == (1, 16 + 8)
    assert few.kv_bytes_per_token(2) == many.kv_bytes_per_token(2) == 2 * 3 * 24 * 2
    assert many.kv_bytes_per_token(2, tensor_parallel=8) == many.kv_bytes_per_token(2)


@pytest.mark.parametrize("name", ["model.layers.3.embed_tokens.weight", "model.layers.61.self_attn.o_proj.weight"])
def test_layers_that_guess_further_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    checkpoint = saved(v3(), tmp_path)
    build_from(checkpoint.config, iter([*weights_of(checkpoint), (name, torch.ones(2))]))
    with pytest.raises(ConfigError, match="which its config does not account for"):
        build_from(checkpoint.config, iter([*weights_of(checkpoint), ("model.layers.2.odd.weight", torch.ones(2))]))


def test_weights_that_come_packed_are_taken(tmp_path: Path) -> None:
    """As AWQ, GPTQ and compressed-tensors checkpoints of the family have them, and in either order of rotated rows."""
    reference = v3(hidden_size=64, kv_lora_rank=32, q_lora_rank=32, rope_interleave=False)
    packed: dict[str, Any] = dict(weights_of(saved(reference, tmp_path)))
    for name, tensor in packed.items():
        if name.endswith(("_a_proj.weight", "_b_proj.weight", "_with_mqa.weight")):
            scales = torch.full((len(tensor), tensor.shape[1] // 32), 0.01, dtype=torch.float16)
            packed[name] = q8_0(scales, (tensor / 0.01).round().clamp(-127, 127).to(torch.int8))
            with torch.no_grad():
                reference.get_parameter(name).copy_(packed[name].dequantise())
    config = reference.config.to_dict()
    (tokens,) = prompts(seed=3, lengths=(30,))
    expected = reference_logits(reference, tokens)
    ours, store = build_from(config, iter(packed.items()), "native_cpu")
    (found,) = walk(ours, store, [tokens], seed=3)
    assert (found - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("deepseek_v2", {"kv_lora_rank": 15}, "kv_lora_rank is 15: it must be even"),
        ("deepseek_v2", {"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
        ("deepseek_v2", {"q_lora_rank": "wide"}, "q_lora_rank is 'wide'"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("deepseek_v2", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than the 8 experts"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': greedy and group_limited_greedy"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group is missing"),
        ("deepseek_v2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is 'True': only False is supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': only 'softmax' is supported"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is '2': only 1 is supported"),
        ("deepseek_v3", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq is '[0, 1, 1]'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sigmoid' is supported"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy': only 'noaux_tc' is supported"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "n_group is 8: groups go by their two best experts"),
        ("deepseek_v3", {"n_group": 3}, "n_routed_experts 8 must split into n_group 3"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 5}, "topk_group 5 are chosen"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 1}, "more than the 2 experts to choose from"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn"}}, "needs a factor"),
    ],
)
def test_a_configuration_that_does_not_hold_is_refused(family: str, changes: dict[str, Any], problem: str) -> None:
    base = SIZES | (GROUPS if family == "deepseek_v3" and "n_group" not in changes else {})
    with pytest.raises(ConfigError) as caught:
        load_family(family).spec(base | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message
