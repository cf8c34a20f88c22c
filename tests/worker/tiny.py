"""A tiny random Llama on disk, and a hand-written driver that makes plans for an executor."""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from octavo.config import Config, replace
from octavo.executor.base import Executor
from octavo.messages import NO_INPUT, Entering, PageMove, SamplingParams, StepPlan
from octavo.weights.sources.source import ModelSource, local

VOCAB_SIZE = 161  # odd: two ranks pad it
CONTEXT_LEN = 128
PAGE_SIZE = 4
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _INNER = 32, 2, 4, 2, 48


def write_tiny_llama(
    folder: Path,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = _LAYERS,
    is_tied: bool = False,
    num_heads: int = _HEADS,
) -> ModelSource:
    """Weights large enough that logits differ clearly: rounding does not decide which token is chosen."""
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)

    kv_size = _HIDDEN // num_heads * _KV_HEADS
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab_size, _HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": random_tensor(vocab_size, _HIDDEN) * 2,
    }
    if is_tied:
        del tensors["lm_head.weight"]
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": random_tensor(_HIDDEN, _HIDDEN),
            f"{name}.self_attn.k_proj.weight": random_tensor(kv_size, _HIDDEN),
            f"{name}.self_attn.v_proj.weight": random_tensor(kv_size, _HIDDEN),
            f"{name}.self_attn.o_proj.weight": random_tensor(_HIDDEN, _HIDDEN),
            f"{name}.mlp.gate_proj.weight": random_tensor(_INNER, _HIDDEN),
            f"{name}.mlp.up_proj.weight": random_tensor(_INNER, _HIDDEN),
            f"{name}.mlp.down_proj.weight": random_tensor(_HIDDEN, _INNER),
            f"{name}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
        }
    config = {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _KV_HEADS,
        "intermediate_size": _INNER,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": is_tied,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return local(folder)


def disturbed(source: ModelSource, folder: Path, noise: float) -> Path:
    """A copy of the model in which every weight is a little different."""
    shutil.copytree(source.path, folder)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor + noise * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return folder


def tiny_config(**values: object) -> Config:
    return replace(Config(), **{"page_size": PAGE_SIZE, "max_num_seqs": 8, "cpu_threads": 1, "device": "cpu"} | values)


def random_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(count)]


@dataclass
class Sequence:
    row: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    pending: int = 0  # sampled by a step that was not collected yet

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Collects what the next step must carry, then submits it; pages are handed out in random order."""

    def __init__(self, executor: Executor, num_pages: int, seed: int = 0, num_stages: int = 1) -> None:
        """`num_stages`: with several, plans bring the tokens that were sampled."""
        self.executor, self._num_stages = executor, num_stages
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)
        self.in_flight: list[list[Sequence]] = []
        self._step = 0
        self._entering: list[Entering] = []
        self._leaving: list[int] = []
        self._moves: list[PageMove] = []

    def enter(
        self, row: int, tokens: list[int], params: SamplingParams, seed: int, prompt_len: int | None = None
    ) -> Sequence:
        sequence = Sequence(row, list(tokens), prompt_len or len(tokens), params, seed)
        sequence.pages = [self.free.pop() for _ in range(-(-len(tokens) // PAGE_SIZE))]
        self._seat(sequence)
        return sequence

    def return_to(self, row: int, sequence: Sequence) -> None:
        """Seat a sequence that left, with the pages it has now."""
        sequence.row = row
        self._seat(sequence)

    def leave(self, sequence: Sequence) -> None:
        self._leaving.append(sequence.row)

    def move(self, kind: str, source: int, target: int) -> None:
        self._moves.append(PageMove(kind, source, target))  # type: ignore[arg-type]

    def submit(self, *advances: tuple[Sequence, int]) -> None:
        """Advance each sequence by that many tokens; it samples when it reaches its end."""
        plan = StepPlan(self._step, self._leaving, self._entering, self._moves, [], [], [], [], [], [], [])
        sampling = []
        for sequence, count in advances:
            end = sequence.computed + count
            while len(sequence.pages) * PAGE_SIZE < end:
                plan.page_rows.append(sequence.row)
                plan.page_entries.append(len(sequence.pages))
                plan.page_ids.append(self.free.pop())
                sequence.pages.append(plan.page_ids[-1])
            samples = end == len(sequence.tokens) + sequence.pending
            if self._num_stages > 1:
                is_known = sequence.computed >= sequence.prompt_len
                plan.inputs.append(sequence.tokens[sequence.computed] if is_known else NO_INPUT)
            plan.rows.append(sequence.row)
            plan.starts.append(sequence.computed)
            plan.counts.append(count)
            plan.samples.append(samples)
            sequence.computed = end
            if samples:
                sequence.pending += 1
                sampling.append(sequence)
        self._leaving, self._entering, self._moves = [], [], []
        self._step += 1
        self.in_flight.append(sampling)
        self.executor.submit(plan)

    def collect(self) -> None:
        result = self.executor.collect()
        assert result.step == self._step - len(self.in_flight)
        sampling = self.in_flight.pop(0)
        for sequence, token in zip(sampling, result.tokens, strict=True):
            sequence.tokens.append(token)
            sequence.pending -= 1

    def step(self, *advances: tuple[Sequence, int]) -> None:
        self.submit(*advances)
        self.collect()

    def generate(self, sequences: list[Sequence], num_tokens: int, chunk: int = 10_000) -> list[list[int]]:
        """Step all of them together until each has its tokens; prompts advance by at most `chunk` a step."""
        while running := [s for s in sequences if len(s.output) < num_tokens]:
            self.step(*((s, min(chunk, len(s.tokens) - s.computed)) for s in running))
        return [s.output for s in sequences]

    def release(self, sequence: Sequence) -> None:
        self.leave(sequence)
        self.free.extend(sequence.pages)
        sequence.pages = []

    def _seat(self, sequence: Sequence) -> None:
        self._entering.append(
            Entering(
                sequence.row,
                list(sequence.tokens),
                sequence.prompt_len,
                sequence.params,
                sequence.seed,
                [3, 5],
                [list(sequence.pages)],
            )
        )


GREEDY = SamplingParams(temperature=0.0)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, top_p=0.8, min_tokens=10),
]
