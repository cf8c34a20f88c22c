"""What every family must show, from a checkpoint that transformers saved in several files: logits, greedy tokens, two ranks, the engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM
from octavo.kernels.cpu.build import NoCompiler
from octavo.models import load_family
from octavo.weights.formats.checkpoint import Checkpoint, open_checkpoint
from tests.contexts import context
from tests.engine.exactness import check, greedy_references
from tests.models.ranks import run_ranks
from tests.models.walk import build_from, greedy, prompts, reference_greedy, reference_logits, walk
from tests.native import native
from tests.weights.gguf_writer import Packed, write_gguf


def saved(reference: PreTrainedModel, folder: Path) -> Checkpoint:
    reference.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return open_checkpoint(folder)


def weights_of(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in checkpoint.tensors("cpu", torch.float32):
        assert isinstance(tensor, torch.Tensor)
        yield name, tensor.clone()


def torch_backend(config: dict[str, Any]) -> str:
    """Which of the backends written in torch takes the model: the fast one has neither windows nor soft caps."""
    spec = load_family(config["model_type"]).spec(config)
    return "reference" if spec.has_window or spec.has_softcap else "torch_cpu"


def check_logits(
    reference: PreTrainedModel, folder: Path, changes: dict[str, Any] | None = None, max_len: int = 0
) -> None:
    """By torch and by the native kernels. `changes`: what config.json says otherwise than transformers writes it.
    `max_len`: that of a server, where it is not the model's."""
    checkpoint = saved(reference, folder)
    config = {key: value for key, value in (checkpoint.config | (changes or {})).items() if value is not ...}
    sequences = prompts(seed=7)
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    check_outline(checkpoint, config)
    for backend in (torch_backend(config), "native_cpu"):
        ours, store = build_from(config, weights_of(checkpoint), backend, max_len=max_len)
        for found, logits in zip(walk(ours, store, sequences, seed=3), expected, strict=True):
            assert logits.std() > 0.1, "logits too flat to tell anything"
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)


def check_outline(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """The model can be built and filled where tensors have shapes and no numbers, as `octavo doctor` does it."""
    family, place = load_family(config["model_type"]), torch.device("meta")
    spec = family.spec(config)
    family.Model(config, spec, context(device=place)).load(checkpoint.tensors(place, torch.float32))


def check_gguf(
    reference: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    folder: Path,
    max_len: int = 0,
) -> dict[str, Any]:
    """A file of these weights, by their GGUF names, gives the reference's logits. → the configuration that is read from it."""
    packed = [Packed(name, tuple(t.shape), "F32", t.numpy().tobytes()) for name, t in weights.items()]
    checkpoint = open_checkpoint(write_gguf(folder / "tiny.gguf", metadata, packed))
    (tokens,) = prompts(seed=3, lengths=(40,))
    expected = reference_logits(reference, tokens)
    for backend in (torch_backend(checkpoint.config), "native_cpu"):
        ours, store = build_from(checkpoint.config, weights_of(checkpoint), backend, max_len=max_len)
        (logits,) = walk(ours, store, [tokens], seed=3)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    return checkpoint.config


def check_greedy(reference: PreTrainedModel, folder: Path, num_steps: int = 64, num_varied: int = 0) -> None:
    """`num_varied`: of the three answers so many must be of more than a few tokens, or the test would tell little."""
    checkpoint = saved(reference, folder)
    sequences = prompts(seed=5, lengths=(3, 18, 30))
    found = []
    for backend in ("reference", "native_cpu"):
        ours, store = build_from(checkpoint.config, weights_of(checkpoint), backend)
        found.append(greedy(ours, store, sequences, num_steps))
    guesses = zip(sequences, found[0], strict=True)
    expected = [reference_greedy(reference, tokens, num_steps, guess) for tokens, guess in guesses]
    varied = [tokens for tokens in expected if len(set(tokens)) > 5]
    assert len(varied) >= num_varied, "a token that goes on for ever tells nothing of the others"
    assert found == [expected, expected]


def check_ranks(reference: PreTrainedModel, folder: Path) -> None:
    """Two ranks compute what one does, and hold little more than half of the weights each."""
    checkpoint = saved(reference, folder)
    weights = dict(weights_of(checkpoint))
    backend = torch_backend(checkpoint.config)
    ours, store = build_from(checkpoint.config, iter(weights.items()), backend)
    sequences = prompts(seed=13, lengths=(1, 9, 21))
    logits, tokens = walk(ours, store, sequences, seed=2), greedy(ours, store, sequences, 8)
    for rank in run_ranks(folder, 2, checkpoint.config, weights, sequences, backend):
        for found, expected in zip(rank["logits"], logits, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert rank["tokens"] == tokens
        assert rank["weights_bytes"] < 0.75 * ours.weights_bytes


def check_engine(reference: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, is_native: bool) -> str:
    """Prompts side by side in small chunks through the engine, by native kernels or by torch. → what the start said."""
    if is_native:
        native()
    else:

        def no_kernels(*_: object) -> None:
            raise NoCompiler("none here")

        monkeypatch.setattr("octavo.worker.cpu_steps.Native", no_kernels)
    saved(reference, folder)
    references = greedy_references(reference, prompts(seed=5, lengths=(3, 18, 30, 7)), 24)
    with LLM(str(folder), page_size=4, kv_cache_memory_bytes=2**20, max_num_batched_tokens=16) as llm:
        notes = " ".join(llm.report.notes)
        assert ("native CPU kernels (" in notes) is is_native
        assert check(llm, references, "together") >= 3
    return notes
