"""Families with experts against transformers: their traits over ragged batches from sharded files, two ranks, what is refused.
The products themselves are tested in tests/layers/test_layers_experts.py."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo import LLM
from octavo.attention.choose import choose
from octavo.config import ModelConfig
from octavo.device import device_of
from octavo.errors import ConfigError
from octavo.kernels.cpu.build import NoCompiler
from octavo.kernels.cpu.library import Kind
from octavo.models import load_family
from octavo.parallel import Group
from octavo.weights.formats.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.methods.registry import Methods
from octavo.worker.cpu_steps import CpuSteps, record
from octavo.worker.weights import RankWeights
from tests.contexts import context
from tests.engine.exactness import check, greedy_references, scores
from tests.models import checkpoints
from tests.models.batches import Store
from tests.models.ranks import run_ranks
from tests.models.test_models_loading import gguf_llama_weights, llama_metadata
from tests.models.walk import CPU, build_from, greedy, prompts, reference_greedy, reference_logits, walk
from tests.native import native
from tests.weights.gguf_writer import Packed, write_gguf
from tests.worker.test_worker_cpu_steps import MAX_ROWS, MAX_TOKENS, last_logits

SIZES = checkpoints.LLAMA
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN3_MOE: dict[str, Any] = SIZES | EXPERTS | {"head_dim": 20, "decoder_sparse_step": 1}
MIXTRAL: dict[str, Any] = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS: dict[str, Any] = SIZES | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 20, "num_hidden_layers": 2}
GPT_OSS |= {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6, "swiglu_limit": 0.7}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(Qwen3MoeForCausalLM(Qwen3MoeConfig(**(QWEN3_MOE | changes))))


def mixtral(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(MixtralForCausalLM(MixtralConfig(**(MIXTRAL | changes))))


def gpt_oss(**changes: Any) -> PreTrainedModel:
    model = checkpoints._randomised(GptOssForCausalLM(GptOssConfig(**(GPT_OSS | changes))))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.mul_(8)  # from nothing to all of a head's weight
    return model


CASES: list[Any] = [
    pytest.param(qwen3_moe, {}, id="qwen3_moe plain"),
    pytest.param(
        qwen3_moe, {"norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True}, id="qwen3_moe mixed"
    ),
    pytest.param(
        qwen3_moe, {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6}, id="qwen3_moe window"
    ),
    pytest.param(mixtral, {}, id="mixtral plain"),
    pytest.param(mixtral, {"sliding_window": 6, "num_local_experts": 3, "num_experts_per_tok": 3}, id="mixtral window"),
    pytest.param(gpt_oss, {"rope_parameters": YARN}, id="gpt_oss"),
    pytest.param(gpt_oss, {"layer_types": ["full_attention"] * 2, "head_dim": 16}, id="gpt_oss no window"),
]


def saved(reference: PreTrainedModel, folder: Path) -> Checkpoint:
    """As transformers stores it, in several files."""
    reference.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return open_checkpoint(folder)


def weights_of(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor.clone()) for name, tensor in checkpoint.tensors("cpu", torch.float32))  # type: ignore[union-attr]


@pytest.mark.parametrize(("make", "changes"), CASES)
def test_logits_equal_the_reference(make: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make(**changes)
    checkpoint = saved(reference, tmp_path)
    sequences = prompts(seed=7)
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    has_window = load_family(checkpoint.config["model_type"]).spec(checkpoint.config).has_window
    for backend in ("reference" if has_window else "torch_cpu", "native_cpu"):
        ours, store = build_from(checkpoint.config, weights_of(checkpoint), backend)
        for found, logits in zip(walk(ours, store, sequences, seed=3), expected, strict=True):
            assert logits.std() > 0.1, "logits too flat to tell anything"
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [qwen3_moe, mixtral, gpt_oss])
def test_greedy_steps_equal_the_reference(make: Any, tmp_path: Path) -> None:
    reference = make()
    checkpoint = saved(reference, tmp_path)
    ours, store = build_from(checkpoint.config, weights_of(checkpoint), "native_cpu")
    sequences = prompts(seed=5, lengths=(3, 18, 30))
    found = greedy(ours, store, sequences, 64)
    guesses = zip(sequences, found, strict=True)
    assert found == [reference_greedy(reference, tokens, 64, guess) for tokens, guess in guesses]


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Of the family that has most to share out: heads with sinks, experts with biases."""
    checkpoint = saved(gpt_oss(layer_types=["full_attention"] * 2), tmp_path)
    weights = dict(weights_of(checkpoint))
    ours, store = build_from(checkpoint.config, iter(weights.items()))
    sequences = prompts(seed=13, lengths=(1, 9, 21))
    logits, tokens = walk(ours, store, sequences, seed=2), greedy(ours, store, sequences, 8)
    for rank in run_ranks(tmp_path, 2, checkpoint.config, weights, sequences):
        for found, expected in zip(rank["logits"], logits, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert rank["tokens"] == tokens
        assert rank["weights_bytes"] < 0.75 * ours.weights_bytes


@pytest.mark.parametrize("backend", ["reference", "native_cpu"])
@pytest.mark.parametrize("make", [qwen3_moe, mixtral, gpt_oss])
def test_two_ranks_with_different_experts_equal_one(make: Any, backend: str, tmp_path: Path) -> None:
    """Experts are not split: a width that ranks do not divide is no obstacle, and each rank holds half of them."""
    checkpoint = saved(make(**({"num_local_experts": 6} if make is gpt_oss else {})), tmp_path)
    weights = dict(weights_of(checkpoint))
    ours, store = build_from(checkpoint.config, iter(weights.items()), backend)
    sequences = prompts(seed=13, lengths=(1, 9, 21))
    logits, tokens = walk(ours, store, sequences, seed=2), greedy(ours, store, sequences, 8)
    for rank in run_ranks(tmp_path, 2, checkpoint.config, weights, sequences, backend, splits_experts=True):
        for found, expected in zip(rank["logits"], logits, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert rank["tokens"] == tokens
        assert rank["weights_bytes"] < 0.75 * ours.weights_bytes


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(make: Any, tmp_path: Path) -> None:
    """Rope, epsilon and, where the family has them, windows, biases and the gate."""
    left_out = ("rope_parameters", "rms_norm_eps", "layer_types", "attention_bias", "swiglu_alpha", "sliding_window")
    family = make.__name__
    config = {key: value for key, value in (MIXTRAL if make is mixtral else GPT_OSS).items() if key not in left_out}
    reference = make(**{"sliding_window": 128} if make is gpt_oss else {})
    checkpoint = saved(reference, tmp_path)
    ours, store = build_from(config | {"model_type": family}, weights_of(checkpoint), "native_cpu")
    (tokens,) = prompts(seed=3, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=3)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


# ── weights of four bits ────────────────────────────────────────────────────────────────────────────


def pack_experts(reference: PreTrainedModel, folder: Path, seed: int = 3) -> Path:
    """Give the reference random experts of four bits, decoded by transformers; the folder gets them as they are published."""
    reference.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for index, layer in enumerate(reference.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            place = f"model.layers.{index}.mlp.experts.{name}"
            count, width, rows = tensors.pop(place).shape
            shape = (count, rows, width // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 125, shape[:-1], dtype=torch.uint8, generator=generator)
            tensors |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
            decoded = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
            with torch.no_grad():
                getattr(layer.mlp.experts, name).copy_(decoded)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_experts_of_four_bits_equal_the_reference_decoded_and_kept(tmp_path: Path) -> None:
    reference = gpt_oss()
    checkpoint = open_checkpoint(pack_experts(reference, tmp_path))
    sequences = prompts(seed=7, lengths=(1, 9, 33))
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    for backend in ("reference", "native_cpu"):
        ours, store = build_from(checkpoint.config, weights_of(checkpoint), backend)
        for found, logits in zip(walk(ours, store, sequences, seed=3), expected, strict=True):
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    # Kept packed, the weights are the same numbers: only activations are rounded, to 8 bits.
    ours, store = build_from(
        checkpoint.config, checkpoint.tensors("cpu", torch.float32, keep_packed=True), "native_cpu"
    )
    for found, logits in zip(walk(ours, store, sequences, seed=3), expected, strict=True):
        assert 0 < (found - logits).abs().mean() < 0.02 * logits.std()
    (first, *_) = ours.layers  # type: ignore[misc]
    kinds = first.mlp.experts.weights.gate_up[0].bytes_of_kinds
    assert set(kinds) == {Kind.CODES5}


def test_a_scale_that_no_kernel_holds_makes_a_layer_decode_its_experts(tmp_path: Path) -> None:
    """One of gpt-oss's many scales is enough; the rest of the layer goes with it, other layers stay packed."""
    reference = gpt_oss()
    folder = pack_experts(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5, 1] = 20  # 2 ** -107: float16 ends at −24
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    packed = checkpoint.tensors("cpu", torch.float32, keep_packed=True)
    ours, store = build_from(checkpoint.config, packed, "native_cpu")  # type: ignore[arg-type]
    (logits,) = walk(ours, store, prompts(seed=7, lengths=(9,)), seed=3)
    assert logits.isfinite().all()
    kinds = [{kind for down in layer.mlp.experts.weights.down for kind in down.bytes_of_kinds} for layer in ours.layers]  # type: ignore[union-attr]
    assert kinds == [{Kind.FLOAT32}, {Kind.CODES5}]


def test_halves_of_a_packed_weight_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = pack_experts(gpt_oss(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks scales of model\.layers\.0\.mlp\.experts\.down_proj"):
        open_checkpoint(folder)
    save_file(tensors | {name: tensors[name][:, :3].clone()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"parts of .*down_proj do not fit each other \(blocks U8 .*, scales U8"):
        open_checkpoint(folder)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def write_moe_gguf(reference: PreTrainedModel, folder: Path) -> Path:
    """As llama.cpp's converter writes a Qwen3-MoE, experts stacked; those of 8 bits where a row is whole quants."""
    weights = dict(weights_of(saved(reference, folder)))
    dense = {name: tensor for name, tensor in weights.items() if "experts" not in name and "mlp.gate." not in name}
    tensors = gguf_llama_weights(dense, is_permuted=False)
    for layer in range(reference.config.num_hidden_layers):
        place = f"model.layers.{layer}.mlp"
        if f"{place}.gate.weight" in weights:
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = weights[f"{place}.gate.weight"]
            for part in ("gate", "up", "down"):
                stack = [weights[f"{place}.experts.{index}.{part}_proj.weight"] for index in range(6)]
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = torch.stack(stack)
    packed = []
    for name, tensor in tensors.items():
        is_rounded = "_exps" in name and tensor.shape[-1] % 32 == 0
        data = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0) if is_rounded else tensor.numpy()
        packed.append(Packed(name, tuple(tensor.shape), "Q8_0" if is_rounded else "F32", data.tobytes()))
    sizes = {"expert_count": 6, "expert_used_count": 3, "attention.key_length": 20, "attention.value_length": 20}
    sizes |= {"expert_feed_forward_length": reference.config.moe_intermediate_size}
    sizes |= {"embedding_length": reference.config.hidden_size, "rope.freq_base": 10000.0}
    metadata = {"general.architecture": "qwen3moe"} | llama_metadata("qwen3moe")
    return write_gguf(folder / "tiny.gguf", metadata | {f"qwen3moe.{k}": v for k, v in sizes.items()}, packed)


def test_a_gguf_file_equals_the_reference(tmp_path: Path) -> None:
    reference = qwen3_moe(norm_topk_prob=True, mlp_only_layers=[1])
    checkpoint = open_checkpoint(write_moe_gguf(reference, tmp_path))
    (tokens,) = prompts(seed=3, lengths=(40,))
    for backend in ("torch_cpu", "native_cpu"):
        ours, store = build_from(checkpoint.config, checkpoint.tensors("cpu", torch.float32), backend)  # type: ignore[arg-type]
        (logits,) = walk(ours, store, [tokens], seed=3)
        torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_a_gguf_file_is_kept_packed(tmp_path: Path) -> None:
    reference = qwen3_moe(norm_topk_prob=True, hidden_size=64, moe_intermediate_size=32)
    checkpoint = open_checkpoint(write_moe_gguf(reference, tmp_path))
    packed = checkpoint.tensors("cpu", torch.float32, keep_packed=True)
    ours, store = build_from(checkpoint.config, packed, "native_cpu")  # type: ignore[arg-type]
    (tokens,) = prompts(seed=3, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=3)
    expected = reference_logits(reference, tokens)
    assert 0 < (logits - expected).abs().mean() < 0.03 * expected.std()
    (first, *_) = ours.layers  # type: ignore[misc]
    assert set(first.mlp.experts.weights.gate_up[0].bytes_of_kinds) == {Kind.CODES8}


# ── through the engine ──────────────────────────────────────────────────────────────────────────────


def no_kernels(num_threads: int, first_cpu: int) -> None:
    raise NoCompiler("turned off")


@pytest.mark.parametrize("make", [qwen3_moe, mixtral, gpt_oss])
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_the_engine_gives_the_reference_tokens(
    make: Any, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr("octavo.worker.cpu_steps.Native", no_kernels)
    reference = make()
    reference.save_pretrained(tmp_path)
    references = greedy_references(reference, prompts(seed=5, lengths=(3, 18, 30, 7)), 24)
    with LLM(str(tmp_path), page_size=4, kv_cache_memory_bytes=2**20, max_num_batched_tokens=16) as llm:
        notes = " ".join(llm.report.notes)
        assert ("native CPU kernels (" in notes) is is_native
        assert "operation by operation" not in notes
        assert check(llm, references, "together") >= 3


@pytest.mark.parametrize(("make", "quantization"), [(qwen3_moe, ""), (gpt_oss, "int8")])
def test_whole_steps_give_a_request_the_same_bits_in_any_company(make: Any, quantization: str, tmp_path: Path) -> None:
    checkpoint = saved(make(), tmp_path)
    prompted = prompts(seed=8, lengths=(2, 40, 17, 1, 33))
    found = []
    for num_threads in (1, 3):
        kernels, family = native(num_threads), load_family(checkpoint.config["model_type"])
        spec = family.spec(checkpoint.config)
        attention, _ = choose(spec, CPU, torch.float32, torch.float32, "native_cpu", kernels)
        surroundings = context(attention=attention, quantization=quantization, native=kernels)
        model = family.Model(checkpoint.config, spec, surroundings)
        model.load(weights_of(checkpoint))
        store = Store(spec, attention)
        with torch.inference_mode():
            steps = record(model, kernels, MAX_TOKENS, MAX_ROWS)
        assert isinstance(steps, CpuSteps), steps
        found.append([last_logits(steps, store, [tokens], [MAX_TOKENS])[0] for tokens in prompted])
        found.append(last_logits(steps, store, prompted, [7, 1, 30]))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)


def test_the_engine_says_what_decoding_experts_of_four_bits_costs(tmp_path: Path) -> None:
    reference = gpt_oss(num_local_experts=16)
    folder = pack_experts(reference, tmp_path)
    references = greedy_references(reference, prompts(seed=5, lengths=(3, 18, 30)), 16)
    exact = {"dtype": "float32", "page_size": 4, "kv_cache_memory_bytes": 2**20}
    with LLM(str(folder), **exact, quantization="none") as llm:
        assert any("in the checkpoint (MXFP4)" in note for note in llm.report.notes)
        assert check(llm, references, "decoded") >= 2
        decoded = scores(llm, references)
    with LLM(str(folder), **exact) as llm:
        assert any("decoded where they are used" in note for note in llm.report.notes), llm.report.notes
        assert scores(llm, references) == decoded
    with LLM(str(folder), page_size=4, kv_cache_memory_bytes=2**20) as llm:
        assert any("5 bits" in note for note in llm.report.notes), llm.report.notes


def test_the_estimate_counts_experts_of_four_bits_as_a_gpu_holds_them(tmp_path: Path) -> None:
    """17 bytes for 32 of them, and not the 22 of native CPU kernels. A dry run, which holds nothing so, counts the same."""
    pytest.importorskip("triton")
    checkpoint = open_checkpoint(pack_experts(gpt_oss(num_local_experts=16), tmp_path))
    family = load_family("gpt_oss")
    spec = family.spec(checkpoint.config)

    def needed_and_held(methods: Methods) -> tuple[int, int]:
        model = family.Model(checkpoint.config, spec, dataclasses.replace(context(), methods=methods))
        weights = RankWeights(model, ModelConfig(), torch.bfloat16, device_of("cpu"), 1, methods)
        model.load(checkpoint.tensors(methods.settings.device, torch.bfloat16, keep_packed=True))
        return weights.needed(checkpoint), model.weights_bytes

    settings = context(dtype=torch.bfloat16, packed_types=frozenset({"MXFP4"}), has_triton=True).methods.settings
    without = dataclasses.replace(settings, has_triton=False)
    packed, decoded = needed_and_held(Methods(settings)), needed_and_held(Methods(without))
    assert decoded[0] - packed[0] == decoded[1] - packed[1] == 16 * 2 * 3 * 64 * 64 * (2 - 17 / 32)
    outline = dataclasses.replace(without, device=torch.device("meta"))
    assert needed_and_held(Methods(outline, settings))[0] == packed[0]


# ── what is read of a configuration, and what is refused ────────────────────────────────────────────


def test_which_layers_have_experts() -> None:
    has_experts = load_family("qwen3_moe").has_experts
    assert has_experts({}, 3) == [True, True, True]
    assert has_experts({"decoder_sparse_step": 2}, 4) == [False, True, False, True]
    assert has_experts({"mlp_only_layers": [0, 2]}, 3) == [False, True, False]


def test_windows_alternate_by_default() -> None:
    windows = load_family("gpt_oss").windows
    assert windows({}, 4) == (128, 0, 128, 0)
    assert windows({"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}, 2) == (0, 5)


REFUSED = [
    ("mixtral", MIXTRAL, {"num_local_experts": None}, "num_local_experts is missing"),
    ("mixtral", MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than num_local_experts, 4"),
    ("mixtral", MIXTRAL, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("mixtral", MIXTRAL, {"sliding_window": "wide"}, "sliding_window is 'wide'"),
    ("qwen3_moe", QWEN3_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ("qwen3_moe", QWEN3_MOE, {"mlp_only_layers": [3]}, "mlp_only_layers must be a list of layers"),
    ("qwen3_moe", QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("gpt_oss", GPT_OSS, {"layer_types": ["chunked"] * 2}, "layer_types must be a list of 2 names"),
    ("gpt_oss", GPT_OSS, {"swiglu_limit": "seven"}, "swiglu_limit is 'seven'"),
    ("gpt_oss", GPT_OSS, {"num_experts_per_tok": None}, "experts_per_token is missing"),
]


@pytest.mark.parametrize(("family", "config", "changes", "problem"), REFUSED)
def test_a_configuration_that_does_not_hold_is_refused(
    family: str, config: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family(family).spec(config | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    checkpoint = saved(mixtral(), tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    weights = {n: t for n, t in weights_of(checkpoint) if n != name}
    with pytest.raises(ConfigError, match=rf"lacks tensor {name}"):
        build_from(checkpoint.config, iter(weights.items()))


def test_ranks_that_do_not_divide_an_expert_are_refused() -> None:
    group = Group.single()
    group.size = 2
    config = QWEN3_MOE | {"model_type": "qwen3_moe", "moe_intermediate_size": 21, "intermediate_size": 81}
    with pytest.raises(
        ConfigError, match=r"does not divide this model's moe_intermediate_size 21; sizes that work: 1$"
    ):
        build_from(config, iter(()), group=group)
