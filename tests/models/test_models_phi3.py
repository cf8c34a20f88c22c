"""Phi-3 and Phi-4 against transformers: fused weights, both lists of rope factors, partial rotation, windows, ranks, GGUF, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel

from octavo.errors import ConfigError
from octavo.models import load_family
from octavo.quants import Quants
from octavo.weights.formats.checkpoint import open_checkpoint
from tests.models import checkpoints
from tests.models.family_checks import check_engine, check_gguf, check_greedy, check_logits, check_ranks
from tests.models.test_models_loading import gguf_llama_weights, llama_metadata
from tests.models.walk import build_from, prompts, reference_logits, tensors, walk
from tests.weights.gguf_writer import Packed, write_gguf

SIZES: dict[str, Any] = checkpoints.LLAMA | {"hidden_size": 64, "pad_token_id": 0}  # heads of 16
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [1.5 + 0.7 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": SHORT, "long_factor": LONG}
PARTIAL = LONGROPE | {"short_factor": SHORT[:6], "long_factor": LONG[:6], "partial_rotary_factor": 0.75}
# Prompts of up to 47 tokens are within the first context, and not within the second.
WIDE, NARROW = {"original_max_position_embeddings": 64}, {"original_max_position_embeddings": 8}


def phi3(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(Phi3ForCausalLM(Phi3Config(**(SIZES | changes))))


def longrope(rope: dict[str, Any], original: dict[str, Any], **changes: Any) -> PreTrainedModel:
    return phi3(rope_parameters=dict(rope) | original, **original, **changes)


def as_published(rope: dict[str, Any]) -> dict[str, Any]:
    """The same settings as config.json files have them: in their old places, by their old name."""
    scaling = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    partial = {"partial_rotary_factor": rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {}
    return {"rope_parameters": ..., "rope_scaling": scaling, "rope_theta": rope["rope_theta"]} | partial


CASES: list[Any] = [
    pytest.param(phi3(), None, 0, id="plain"),
    pytest.param(phi3(num_key_value_heads=None, tie_word_embeddings=True), None, 0, id="no groups, tied"),
    pytest.param(phi3(sliding_window=6), None, 0, id="window"),
    pytest.param(longrope(LONGROPE, WIDE), None, 64, id="short factors"),
    pytest.param(longrope(LONGROPE, WIDE), as_published(LONGROPE), 64, id="short factors, as published"),
    pytest.param(longrope(PARTIAL, WIDE), as_published(PARTIAL), 64, id="partial, as published"),
    pytest.param(longrope(PARTIAL | {"attention_factor": 1.3}, WIDE), None, 64, id="partial, given factor"),
    pytest.param(
        phi3(rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}),
        None,
        0,
        id="half",
    ),
]


@pytest.mark.parametrize(("reference", "written", "max_len"), CASES)
def test_logits_equal_the_reference(
    reference: PreTrainedModel, written: dict[str, Any] | None, max_len: int, tmp_path: Path
) -> None:
    check_logits(reference, tmp_path, written, max_len)


@pytest.mark.parametrize("rope", [LONGROPE, PARTIAL], ids=["whole", "partial"])
@pytest.mark.parametrize("max_len", [0, 100])
def test_a_server_of_long_requests_has_the_long_factors(rope: dict[str, Any], max_len: int) -> None:
    """For every request: transformers has them for those that are beyond the original context, as these are."""
    reference = longrope(rope, NARROW)
    sequences = prompts(seed=7, lengths=(9, 16, 33, 47))
    config = reference.config.to_dict()
    for backend in ("torch_cpu", "native_cpu"):
        ours, store = build_from(config, tensors(reference), backend, max_len=max_len)
        for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=3), strict=True):
            torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_greedy_steps_equal_the_reference(tmp_path: Path) -> None:
    check_greedy(phi3(), tmp_path)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    check_ranks(
        phi3(rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}), tmp_path
    )


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_the_engine_equals_the_reference(is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = longrope(PARTIAL, {"original_max_position_embeddings": 128})  # all that there is: the short ones
    assert "operation by operation" not in check_engine(reference, tmp_path, monkeypatch, is_native)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def gguf_weights(reference: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By their GGUF names, fused as they are."""
    names = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
    weights, fused = dict(tensors(reference)), {}
    for name in list(weights):
        if (place := name.removesuffix(".weight").split(".", 3)[-1]) in names:
            fused[f"blk.{name.split('.')[2]}.{names[place]}.weight"] = weights.pop(name)
    return gguf_llama_weights(weights, is_permuted=False) | fused


def gguf_metadata(**more: Any) -> dict[str, Any]:
    settings = {
        "embedding_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 262144,
    } | more
    metadata = llama_metadata("phi3") | {"general.architecture": "phi3"}
    return metadata | {f"phi3.{key.replace('__', '.')}": value for key, value in settings.items()}


@pytest.mark.parametrize(("original", "max_len"), [(WIDE, 64), (NARROW, 0)], ids=["short", "long"])
def test_a_gguf_file_equals_the_reference(original: dict[str, Any], max_len: int, tmp_path: Path) -> None:
    reference = longrope(PARTIAL, original)
    found = gguf_weights(reference)
    found |= {f"rope_factors_{kind}.weight": torch.tensor(PARTIAL[f"{kind}_factor"]) for kind in ("short", "long")}
    metadata = gguf_metadata(
        rope__dimension_count=12,
        rope__freq_base=1000.0,
        rope__scaling__original_context_length=original["original_max_position_embeddings"],
        rope__scaling__attn_factor=reference.model.rotary_emb.attention_scaling,
    )
    config = check_gguf(reference, found, metadata, tmp_path, max_len)
    assert not load_family("phi3").spec(config).has_window


def test_fused_weights_that_stay_packed_are_cut_into_their_parts(tmp_path: Path) -> None:
    packed = []
    for name, tensor in gguf_weights(phi3()).items():
        is_fused = name.endswith(("attn_qkv.weight", "ffn_up.weight"))
        data = q8_0(tensor) if is_fused else tensor.numpy().tobytes()
        packed.append(Packed(name, tuple(tensor.shape), "Q8_0" if is_fused else "F32", data))
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", gguf_metadata(), packed))
    (tokens,) = prompts(seed=3, lengths=(40,))
    logits = []
    for keep_packed in (False, True):
        weights = checkpoint.tensors("cpu", torch.float32, keep_packed)
        assert any(isinstance(weight, Quants) for _, weight in weights) is keep_packed
        weights = checkpoint.tensors("cpu", torch.float32, keep_packed)
        ours, store = build_from(checkpoint.config, weights, "native_cpu")  # type: ignore[arg-type]
        logits += walk(ours, store, [tokens], seed=3)
    decoded, kept = logits
    assert (
        0 < (kept - decoded).abs().mean() < 0.02 * decoded.std()
    )  # products with packed ones round activations to 8 bits


def q8_0(weight: torch.Tensor) -> bytes:
    """Quants of 32: a scale of 16 bits, then a byte for each number."""
    groups = weight.reshape(-1, 32)
    scales = (groups.abs().amax(dim=1, keepdim=True) / 127).half()
    codes = (groups / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.int8), codes), dim=1).numpy().tobytes()


# ── what is read of a configuration, and what is refused ────────────────────────────────────────────


def test_a_window_as_long_as_the_context_is_none() -> None:
    spec = load_family("phi3").spec
    assert spec(SIZES | {"sliding_window": 127}).windows == (127,) * 3
    assert not spec(SIZES | {"sliding_window": 262144}).has_window
    left_out = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    assert spec(left_out).context_len == Phi3Config(**left_out).max_position_embeddings


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_scaling": {"type": "longrope", "short_factor": SHORT}}, "long_factor must be a list of 8 numbers"),
        ({"rope_scaling": {"type": "su", "long_factor": LONG[1:]}}, "short_factor must be a list of 8 numbers"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [0] * 8}}, "short_factor must be a list of 8 numbers"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope type 'llama3' is not supported here"),
        ({"rope_scaling": "su"}, "rope_scaling is 'su'"),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor is '0.7': it must select an even number of the 16"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is '2'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_a_configuration_that_does_not_hold_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family("phi3").spec(SIZES | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message
