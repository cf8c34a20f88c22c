"""Families whose GGUF files stand otherwise than their other checkpoints: read packed they compute what they do decoded."""

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM
from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.models import gpt2, llama, load_family
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.sources.source import local
from octavo.worker.load import Loader
from tests.models import checkpoints
from tests.models.test_models_gpt_neox import METADATA as NEOX_METADATA
from tests.models.test_models_gpt_neox import gguf_weights as neox_weights
from tests.models.test_models_gpt_neox import neox
from tests.models.test_models_loading import llama_metadata
from tests.models.walk import build_from, prompts, reference_logits, tensors, walk
from tests.native import native
from tests.weights.gguf_writer import Packed, write_gguf

GPT2_METADATA: dict[str, Any] = {
    "general.architecture": "gpt2",
    "gpt2.embedding_length": 64,
    "gpt2.block_count": 3,
    "gpt2.attention.head_count": 4,
    "gpt2.feed_forward_length": 96,
    "gpt2.context_length": 128,
    "tokenizer.ggml.tokens": ["x"] * 160,
}


def tiny_gpt2() -> PreTrainedModel:
    return checkpoints.gpt2(n_embd=64, n_inner=96)


def gpt2_weights(reference: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As llama.cpp's converter writes them: its names, and products the usual way round."""
    names = {ours: theirs for theirs, ours in gpt2._GGUF_LAYER_NAMES.items()}
    top = {ours: theirs for theirs, ours in gpt2._GGUF_NAMES.items()}
    found = {}
    for name, tensor in tensors(reference):
        if name in top:
            found[top[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        is_turned = kind == "weight" and "ln_" not in module
        found[f"blk.{layer}.{names[module]}.{kind}"] = tensor.t().contiguous() if is_turned else tensor
    del found["output.weight"]  # tied
    return found


def packed(name: str, tensor: torch.Tensor) -> Packed:
    """In 8 bits, by the package of GGUF's makers; vectors as they are."""
    if tensor.dim() == 1:
        return Packed(name, tuple(tensor.shape), "F32", tensor.numpy().tobytes())
    rows = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
    return Packed(name, tuple(tensor.shape), "Q8_0", rows.tobytes())


CASES = {
    "gpt2": (tiny_gpt2, gpt2_weights, GPT2_METADATA),
    "gptneox": (neox, neox_weights, NEOX_METADATA),
}


@pytest.mark.parametrize(("make", "weights", "metadata"), CASES.values(), ids=CASES)
def test_packed_rows_are_where_decoded_ones_are(make: Any, weights: Any, metadata: Any, tmp_path: Path) -> None:
    native()
    path = write_gguf(tmp_path / "tiny.gguf", metadata, [packed(*pair) for pair in weights(make()).items()])
    checkpoint = open_checkpoint(path)
    (tokens,) = prompts(seed=3, lengths=(40,))
    found, sizes = [], []
    for keep_packed in (False, True):
        ours, store = build_from(checkpoint.config, checkpoint.tensors("cpu", torch.float32, keep_packed), "native_cpu")
        found += walk(ours, store, [tokens], seed=3)
        sizes.append(ours.weights_bytes)
    assert sizes[1] < 0.5 * sizes[0]
    # Weights of 8 bits, and then activations too: an order of rows that is wrong anywhere is off by the logits' own size.
    expected = reference_logits(make(), tokens)
    assert (found[0] - expected).norm() < 0.05 * expected.norm()
    assert (found[1] - found[0]).norm() < 0.05 * expected.norm()
    with LLM(str(path), kv_cache_memory_bytes=2**20) as llm:
        assert any("8 bits" in note for note in llm.report.notes)


def test_what_would_take_more_than_packed_weights_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native()
    weights = [packed(*pair) for pair in gpt2_weights(tiny_gpt2()).items()]
    source = local(write_gguf(tmp_path / "tiny.gguf", GPT2_METADATA, weights))

    def refusal(available: int, **options: str) -> str:
        loader = Loader(replace(Config(), dtype="float32", **options), source)
        monkeypatch.setattr(loader.device, "memory_available", lambda: available)
        with pytest.raises(ConfigError, match="the weights take") as caught:
            loader.load()
        return caught.value.message

    assert re.match(r"the weights take [\d.]+ KiB packed and ", message := refusal(60_000)), message
    assert "bfloat16" not in message
    message = refusal(300_000, quantization="none")
    assert " as float32 and " in message and "use --dtype bfloat16 (" in message


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count says that this model has experts"),
        ({"llama.attention.value_length": 6}, "llama.attention.value_length is not its key_length, 12"),
        ({"llama.rope.dimension_count": 6}, "partial_rotary_factor 0.5 is not supported"),
        ({"llama.rope.dimension_count": "all"}, "llama.rope.dimension_count is 'all'"),
    ],
)
def test_llamas_that_are_none_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family("llama").spec(llama.gguf_config(llama_metadata() | changes, {}))
    assert problem in caught.value.message and "\n" not in caught.value.message
