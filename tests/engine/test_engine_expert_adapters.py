"""Adapters of experts, as PEFT writes them: equal to the merged model by transformers, and the same bytes whatever else is in the batch."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import ConfigError
from octavo.weights.adapters.adapter_file import open_adapter
from tests.native import native

VOCABULARY, NUM_EXPERTS, HIDDEN, NUM_LAYERS, RANK = 97, 4, 64, 2, 4
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
# The inner width of the last is no multiple of a panel.
CONFIGS = {
    "mixtral": lambda: MixtralConfig(intermediate_size=96, num_local_experts=NUM_EXPERTS, **COMMON),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        intermediate_size=96, moe_intermediate_size=72, num_experts=NUM_EXPERTS, norm_topk_prob=True, **COMMON
    ),
    "gpt_oss": lambda: GptOssConfig(intermediate_size=96, num_local_experts=NUM_EXPERTS, **COMMON),
}
SINGLE = {
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
}

native()  # skips this file where there are no kernels


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file({f"base_model.model.{name}.weight": one.contiguous() for name, one in tensors.items()}, folder / "adapter_model.safetensors")  # fmt: skip
    return folder


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.2


class Fused:
    """All experts' gate_up and down in one tensor each (target_parameters), as PEFT 0.21 writes them."""

    def __init__(self, inner: int, wanted: tuple[str, ...], rank: int = RANK) -> None:
        sizes = {"gate_up_proj": (HIDDEN, 2 * inner), "down_proj": (inner, HIDDEN)}
        self.deltas: dict[tuple[int, str], Tensor] = {}  # [experts, out, in]
        self.tensors: dict[str, Tensor] = {}
        for layer in range(NUM_LAYERS):
            place = f"model.layers.{layer}.mlp.experts"
            for depth, name in enumerate(reversed([one for one in sizes if one in wanted])):
                in_features, out_features = sizes[name]
                down, up = randn(NUM_EXPERTS * rank, in_features), randn(out_features, rank * NUM_EXPERTS)
                module = place + ".base_layer" * depth
                self.tensors |= {f"{module}.lora_A": down, f"{module}.lora_B": up}
                downs, ups = down.view(NUM_EXPERTS, rank, -1), up.view(-1, rank, NUM_EXPERTS)
                self.deltas[layer, name] = 2 * torch.einsum("ore,eri->eoi", ups.double(), downs.double())


class Single:
    """Each expert's matrices by themselves, as older versions write them."""

    def __init__(self, inner: int, place: str, gate: str, up: str, down: str) -> None:
        self.deltas: dict[tuple[int, str], Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for layer in range(NUM_LAYERS):
            found: dict[str, list[Tensor]] = {gate: [], up: [], down: []}
            for expert in range(NUM_EXPERTS):
                for name, parts in found.items():
                    sizes = (HIDDEN, inner) if name == down else (inner, HIDDEN)
                    one, other = randn(RANK, sizes[1]), randn(sizes[0], RANK)
                    module = f"model.layers.{layer}.{place}.{expert}.{name}"
                    self.tensors |= {f"{module}.lora_A": one, f"{module}.lora_B": other}
                    parts.append(2 * other.double() @ one.double())
            both = [torch.cat(pair) for pair in zip(found[gate], found[up], strict=True)]
            self.deltas[layer, "gate_up_proj"] = torch.stack(both)
            self.deltas[layer, "down_proj"] = torch.stack(found[down])


def merged(folder: Path, adapter: Fused | Single) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (layer, name), delta in adapter.deltas.items():
        parameter = getattr(model.model.layers[layer].mlp.experts, name)
        is_transposed = parameter.shape[1:] != delta.shape[1:] or model.config.model_type == "gpt_oss"
        parameter.data = (parameter.double() + (delta.mT if is_transposed else delta)).float()
    return model  # type: ignore[no-any-return]


@torch.inference_mode()
def expected(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", list(CONFIGS))
def test_equal_to_merged_experts_and_the_same_bytes_in_any_mix(family: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = CONFIGS[family]()
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder = tmp_path / "model"
    base.save_pretrained(folder)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    made: list[tuple[Fused | Single, dict[str, Any]]] = [
        (Fused(inner, ("gate_up_proj", "down_proj")), {"target_parameters": names}),
        (Fused(inner, ("gate_up_proj",), 8), {"target_parameters": names[:1], "rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16}}),
        (Single(inner, *SINGLE[family]), {}) if family in SINGLE else (Fused(inner, ("down_proj",)), {"target_parameters": ["down_proj"]}),
    ]  # fmt: skip
    folders = [write(tmp_path / f"a{at}", one.tensors, **how) for at, (one, how) in enumerate(made)]
    models = [*(merged(folder, one) for one, _ in made), base]
    adapters: list[LoRARequest | None] = [*(LoRARequest(one.name, 1, str(one)) for one in folders), None]
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(3, 30))] for _ in range(8)]
    of_prompts = [adapters[at % 4] for at in range(8)]
    common: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**20, "max_num_seqs": 8}
    with LLM(str(folder), enable_lora=True, lora_memory=2**22, **common) as llm:
        mixed = [one.outputs[0] for one in llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=of_prompts)]
        for at in (0, 1, 2, 3):
            (alone,) = llm.generate(prompts[at : at + 1], PARAMS, use_tqdm=False, lora_request=of_prompts[at])
            assert (alone.outputs[0].token_ids, alone.outputs[0].logprobs) == (mixed[at].token_ids, mixed[at].logprobs)
    with LLM(str(folder), **common) as plain:
        (without,) = plain.generate(prompts[3:4], PARAMS, use_tqdm=False)
        assert without.outputs[0].logprobs == mixed[3].logprobs
    for at, (prompt, found) in enumerate(zip(prompts, mixed, strict=True)):
        of_model = expected(models[at % 4], prompt, found.token_ids)
        for step, scores in enumerate(found.logprobs or []):
            for token, score in scores.items():
                assert score.logprob == pytest.approx(float(of_model[step, token]), abs=1e-4)
        if at % 4 != 3:  # the adapter does something
            assert (of_model - expected(base, prompt, found.token_ids)).abs().max() > 0.1


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """One line that says why, before any request."""
    config = CONFIGS["mixtral"]()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    both = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    tensors = Fused(96, ("gate_up_proj", "down_proj")).tensors
    fewer = {
        name: one[: 2 * RANK] if name.endswith("_A") else one[:, : 2 * RANK].contiguous()
        for name, one in tensors.items()
    }
    refused = [
        (tensors, both | {"r": 3}, "rank 3"),
        (tensors, {"target_parameters": ["mlp.experts.down_proj"]}, "do not belong together"),
        (tensors, {"target_parameters": ["self_attn.q_proj.weight"]}, "only experts'"),
        (tensors, {"target_parameters": "mlp.experts.down_proj"}, "must be a list"),
        (fewer, both, "has 2 experts, and this model has more"),
        (Fused(80, ("gate_up_proj", "down_proj")).tensors, both, "another base"),
        (tensors | {"model.layers.0.mlp.experts.base_layer.base_layer.lora_A": randn(16, 64), "model.layers.0.mlp.experts.base_layer.base_layer.lora_B": randn(64, 16)}, both, "do not belong together"),
    ]  # fmt: skip
    with LLM(str(tmp_path / "model"), enable_lora=True, kv_cache_memory_bytes=2**20) as llm:
        adapters = llm._loop.executor._runner.adapters  # type: ignore[attr-defined]
        for number, (given, how, why) in enumerate(refused):
            folder = write(tmp_path / f"a{number}", given, **how)
            with pytest.raises(ConfigError, match=why):
                adapters.check(open_adapter(folder))
