"""Two ranks over gloo compute what one does; sizes that cannot be split are refused with those that can."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import load_family
from octavo.parallel import Group
from tests.models import checkpoints
from tests.models.ranks import run_ranks
from tests.models.walk import build, build_from, greedy, prompts, tensors, walk


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (checkpoints.llama, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        (checkpoints.llama, {"tie_word_embeddings": False, "vocab_size": 161}),
        (checkpoints.qwen3, {"attention_bias": True, "tie_word_embeddings": True}),
        (checkpoints.gpt2, {"vocab_size": 161}),
    ],
)
def test_two_ranks_equal_one(make: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make(**changes)
    ours, store = build(reference)
    sequences = prompts(seed=13, lengths=(1, 9, 21))
    sequences[1][4] = reference.config.vocab_size - 1  # the row next to the padding, where ranks do not divide them
    logits, tokens = walk(ours, store, sequences, seed=2), greedy(ours, store, sequences, 8)
    for rank in run_ranks(tmp_path, 2, reference.config.to_dict(), dict(tensors(reference)), sequences):
        for found, expected in zip(rank["logits"], logits, strict=True):
            assert found.shape[-1] == reference.config.vocab_size
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert rank["tokens"] == tokens
        assert rank["weights_bytes"] < 0.75 * ours.weights_bytes


@pytest.mark.parametrize(
    ("make", "size", "sizes"),
    [(checkpoints.llama, 3, "1, 2"), (checkpoints.qwen3, 4, "1, 2"), (checkpoints.gpt2, 3, "1, 2, 4")],
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(make: Any, size: int, sizes: str) -> None:
    config = make().config.to_dict()
    group = Group.single()
    group.size = size
    with pytest.raises(ConfigError, match=f"sizes that work: {sizes}$"):
        build_from(config, iter(()), group=group)


def test_spec_of_a_family_is_plain_integers() -> None:
    spec = load_family("llama").spec(checkpoints.llama(head_dim=20).config.to_dict())
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.vocab_size) == (4, 2, 20, 160)
    spec = load_family("qwen3").spec(checkpoints.qwen3().config.to_dict())
    assert (spec.family, spec.num_heads, spec.num_kv_heads, spec.head_size) == ("qwen3", 4, 2, 20)
    spec = load_family("gpt2").spec(checkpoints.gpt2().config.to_dict())
    assert (spec.num_kv_heads, spec.head_size, spec.intermediate_size, spec.context_len) == (4, 12, 192, 128)
