"""Our models, run over whole sequences in ragged chunks of paged batches."""

import dataclasses
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.choose import choose
from octavo.layers.model import DecoderModel
from octavo.models import load_family
from octavo.parallel import Group
from octavo.stage import WHOLE, Stage
from tests.contexts import context
from tests.models.batches import Row, Store, make_batch
from tests.native import native

if TYPE_CHECKING:  # ranks import this file too, and should start fast
    from transformers import PreTrainedModel

CPU = torch.device("cpu")


def tensors(model: "PreTrainedModel") -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor.clone()) for name, tensor in model.state_dict().items())


def build(
    model: "PreTrainedModel",
    backend: str = "torch_cpu",
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
    max_len: int = 0,
) -> tuple[DecoderModel, Store]:
    """Our model with the reference's weights, and a store for it."""
    return build_from(config or model.config.to_dict(), tensors(model), backend, dtype, max_len=max_len)


def build_from(
    config: dict[str, Any],
    weights: Iterator[tuple[str, torch.Tensor]],
    backend: str = "torch_cpu",
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
    max_len: int = 0,
    stage: Stage = WHOLE,
    splits_experts: bool = False,
) -> tuple[DecoderModel, Store]:
    """`stage`: the model's layers; `weights` may hold others', too."""
    family = load_family(config["model_type"])
    spec = family.spec(config)
    group = group or Group.single()
    kernels = native() if backend == "native_cpu" else None
    attention, _ = choose(spec, CPU, dtype, dtype, backend, kernels)
    surroundings = context(group, dtype, attention=attention, native=kernels, max_len=max_len)
    surroundings = dataclasses.replace(surroundings, stage=stage, splits_experts=splits_experts)
    ours = family.Model(config, spec, surroundings)
    if stage.count > 1:
        slots = ours.weight_slots()
        weights = ((name, tensor) for name, tensor in weights if ours.hf_name(name) in slots)
    ours.load(weights)
    return ours, Store(spec, attention, dtype=dtype, tensor_parallel=group.size)


def prompts(seed: int, lengths: tuple[int, ...] = (1, 5, 16, 33, 47), vocab_size: int = 160) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def walk(ours: DecoderModel, store: Store, sequences: list[list[int]], seed: int) -> list[torch.Tensor]:
    """Logits [L, V] of each sequence, computed in chunks of random sizes, several sequences in a step."""
    rng = random.Random(seed)
    rows = [store.row(tokens) for tokens in sequences]
    found = [torch.empty(0) for _ in rows]
    with torch.inference_mode():
        while waiting := [row for row in rows if row.computed < len(row.tokens)]:
            chosen = [row for row in waiting if rng.random() < 0.8] or waiting[:1]
            steps = [(row, min(rng.choice((1, 1, 2, 7, 20)), len(row.tokens) - row.computed)) for row in chosen]
            steps.sort(key=lambda step: step[1] > 1)
            batch = make_batch(steps, store.page_size)
            logits = ours.logits(ours.forward(batch))
            for (row, _), part in zip(steps, logits.split(batch.query_lens_host), strict=True):
                at = rows.index(row)
                found[at] = torch.cat((found[at], part)) if found[at].numel() else part
    return found


def greedy(ours: DecoderModel, store: Store, sequences: list[list[int]], num_steps: int) -> list[list[int]]:
    """All sequences continued together, one token a step each."""
    rows: list[Row] = [store.row(tokens, len(tokens) + num_steps) for tokens in sequences]
    with torch.inference_mode():
        for _ in range(num_steps):
            steps = [(row, len(row.tokens) - row.computed) for row in rows]
            steps.sort(key=lambda step: step[1] > 1)
            batch = make_batch(steps, store.page_size)
            sampled = ours.logits(ours.forward(batch)[batch.sample_at]).argmax(dim=-1).tolist()
            for (row, _), token in zip(steps, sampled, strict=True):
                row.tokens.append(token)
    return [row.tokens[len(tokens) :] for row, tokens in zip(rows, sequences, strict=True)]


def reference_logits(model: "PreTrainedModel", tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def reference_greedy(
    model: "PreTrainedModel", tokens: list[int], num_steps: int, guess: list[int] | None = None
) -> list[int]:
    """`guess`, of as many tokens, saves time alone: one pass says how far it is what the model would say."""
    tokens, start = list(tokens), len(tokens)
    if guess:
        says = reference_logits(model, [*tokens, *guess])[start - 1 : -1].argmax(dim=-1).tolist()
        tokens += [token for at, token in enumerate(guess) if says[: at + 1] == guess[: at + 1]]
    while len(tokens) < start + num_steps:
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[start:]
