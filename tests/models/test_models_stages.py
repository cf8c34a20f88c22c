"""A model in stages: every family's stages, one after the other, compute what the whole model does, to the bit, and hold only their own
weights."""

from typing import Any

import pytest
import torch

from octavo.batch import Batch
from octavo.layers.model import DecoderModel
from octavo.stage import stage_of
from tests.models import checkpoints
from tests.models.test_models_gemma import gemma3
from tests.models.test_models_gpt_neox import neox
from tests.models.test_models_llama_kin import smollm3
from tests.models.test_models_opt import opt
from tests.models.walk import build, build_from, greedy, prompts, tensors, walk


class Chain:
    """Stages in one process: each gets the hidden states of the one before."""

    def __init__(self, stages: list[DecoderModel]) -> None:
        self.stages = stages

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = None
        for stage in self.stages:
            hidden = stage.forward(batch, hidden)
        assert hidden is not None
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.stages[-1].logits(hidden)


FAMILIES = [
    (checkpoints.llama, {"tie_word_embeddings": True}),
    (checkpoints.llama, {"tie_word_embeddings": False}),
    (checkpoints.qwen3, {}),
    (checkpoints.gpt2, {}),
    (gemma3, {}),  # a rotation for each kind of layer
    (smollm3, {}),  # layers without one
    (opt, {}),
    (neox, {}),
]


@pytest.mark.parametrize(("make", "changes"), FAMILIES)
def test_stages_equal_the_whole_model(make: Any, changes: dict[str, Any]) -> None:
    reference = make(**changes)
    config = reference.config.to_dict()
    whole, store = build(reference, "reference")
    num_layers = whole.num_layers
    assert num_layers >= 2
    sequences = prompts(seed=3, lengths=(1, 9, 21))
    logits, tokens = walk(whole, store, sequences, seed=2), greedy(whole, store, sequences, 6)
    starts = [0, 1] if num_layers < 3 else [0, 1, num_layers - 1]
    stages = [
        build_from(config, tensors(reference), "reference", stage=stage_of(index, starts, num_layers))
        for index in range(len(starts))
    ]
    for found, expected in zip(walk(Chain([stage for stage, _ in stages]), store, sequences, 2), logits, strict=True):
        assert torch.equal(found, expected)
    assert greedy(Chain([stage for stage, _ in stages]), store, sequences, 6) == tokens
    slots = [set(stage.weight_slots()) for stage, _ in stages]
    assert set().union(*slots) == set(whole.weight_slots())
    assert all(stage.weights_bytes < whole.weights_bytes for stage, _ in stages)
    names = whole.names  # type: ignore[attr-defined]
    shared = set.intersection(*slots) - {f"{names.embedding}.weight"}
    assert all(whole.weight_slots()[name].is_optional for name in shared), "a layer is in two stages"
