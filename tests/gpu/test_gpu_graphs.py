"""Graphs, shared prefixes and preemption on a GPU, through the whole engine: none of them changes a token.

Two runs are compared token by token, though values are rounded. In bfloat16 both runs use the same kernels except for the
graphs, whose steps differ only by padding: kernels compute a row the same way for a batch size and the next captured one. In
float32 they use different ones, which differ by about a millionth: that decides about one token in many thousands."""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM, SamplingParams
from octavo.messages import StepPlan
from tests.engine.exactness import check, greedy_references
from tests.worker.tiny import GREEDY, MIXED

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, PAGE_SIZE = 300, 2, 2, 64, 16
EAGER = {"enforce_eager": True}
Batch = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Weights large enough that logits differ clearly, each a bfloat16 number."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=1024,
        initializer_range=0.14,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def random_tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def batch_of(
    count: int, kinds: list[SamplingParams], seed: int, stem: list[int] | None = None, num_tokens: int = 10
) -> Batch:
    """Prompts of lengths around pages and tiles, with output lengths such that the batch shrinks row by row."""
    rng, batch = random.Random(seed), []
    for number in range(count):
        params = kinds[number % len(kinds)]
        prompt = (stem or []) + random_tokens((1, 2, 15, 16, 17, 33, 90)[(number + seed) % 7], rng)
        params = msgspec.structs.replace(
            params,
            seed=100 * seed + number,
            max_tokens=num_tokens + 2 * (number % 9),
            ignore_eos=True,
            stop_token_ids=tuple(range(20)) if params.min_tokens else (),  # banned at first, and then an end
        )
        batch.append((prompt, params))
    return batch


@dataclass
class Run:
    """The results of an engine on some batches, one after the other."""

    tokens: list[list[list[int]]]
    stats: dict[str, float]
    graphs: list[Any]  # one key for each captured step
    moves: Counter[str]  # pages swapped out to the host and in again


def run(folder: Path, batches: list[Batch], dtype: str, **options: Any) -> Run:
    common = {"device": DEVICE, "dtype": dtype, "max_num_seqs": 32, "max_model_len": 512, "page_size": PAGE_SIZE}
    with LLM(str(folder), **{**common, "kv_cache_memory_bytes": 2**26, **options}) as llm:
        executor, tokens, moves = llm._loop.executor, [], Counter[str]()
        submit = executor.submit

        def noted(plan: StepPlan) -> None:
            moves.update(move.kind for move in plan.moves)
            submit(plan)

        executor.submit = noted
        for batch in batches:
            outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch], use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
        graphs = executor._runner.graphs
        return Run(tokens, llm.engine_stats(), [] if graphs is None else list(graphs._captured), moves)


def assert_same(one: Run, other: Run) -> None:
    for number, (tokens, others) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        for request, (found, expected) in enumerate(zip(tokens, others, strict=True)):
            assert found == expected, f"request {request} of batch {number}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_change_no_token(folder: Path, dtype: str) -> None:
    sizes = (1, 3, 17)
    batches = [batch_of(size, [GREEDY], seed) for seed, size in enumerate(sizes)]
    batches += [batch_of(size, MIXED, seed) for seed, size in enumerate(sizes, start=10)]
    graphs, eager = run(folder, batches, dtype), run(folder, batches, dtype, **EAGER)
    assert not eager.graphs
    assert {(key.num_rows, key.is_greedy) for key in graphs.graphs} >= {(1, True), (4, False), (20, True), (20, False)}
    assert_same(graphs, eager)


def test_graphs_give_the_tokens_of_transformers(model: LlamaForCausalLM, folder: Path) -> None:
    rng = random.Random(3)
    prompts = [random_tokens(length, rng) for length in (1, 2, 15, 16, 17, 33, 64, 65, 130, 200)]
    references = greedy_references(model, prompts, 24)
    with LLM(str(folder), device=DEVICE, dtype="float32", kv_cache_memory_bytes=2**26, max_num_seqs=32) as llm:
        assert check(llm, references, "graphs") >= 9


@pytest.mark.parametrize(("dtype", "otherwise"), [("bfloat16", EAGER), ("float32", {"enable_prefix_caching": False})])
def test_a_shared_prefix_changes_no_token(folder: Path, dtype: str, otherwise: dict[str, bool]) -> None:
    stem = random_tokens(300, random.Random(4))
    first: Batch = [(stem, msgspec.structs.replace(GREEDY, max_tokens=1, ignore_eos=True))]
    batches = [first, batch_of(12, [GREEDY], 5, stem), batch_of(12, MIXED, 6, stem)]
    shared, other = run(folder, batches, dtype), run(folder, batches, dtype, **otherwise)
    num_shared = 300 // PAGE_SIZE * PAGE_SIZE
    assert shared.stats["prefix_hit_tokens"] >= 24 * num_shared
    assert other.stats["prefix_hit_tokens"] == (shared.stats["prefix_hit_tokens"] if otherwise is EAGER else 0)
    assert {(key.num_rows, key.is_greedy) for key in shared.graphs if key.is_shared} >= {(12, True), (12, False)}
    assert_same(shared, other)


@pytest.mark.parametrize("swap_space", [0.01, 0.0], ids=["swap", "recompute"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_preemption_changes_no_token(folder: Path, dtype: str, swap_space: float) -> None:
    """bfloat16: with and without graphs; float32: with pages for about four of twelve requests, and for all."""
    page_bytes = 2 * NUM_LAYERS * NUM_KV_HEADS * PAGE_SIZE * HEAD_SIZE * getattr(torch, dtype).itemsize
    little = {"kv_cache_memory_bytes": 28 * page_bytes, "max_model_len": 256, "swap_space": swap_space}
    batches = [batch_of(12, kinds, seed, num_tokens=70) for seed, kinds in enumerate(([GREEDY], MIXED), start=20)]
    preempted = run(folder, batches, dtype, **little)
    other = run(folder, batches, dtype, **({**little, **EAGER} if dtype == "bfloat16" else {}))
    assert preempted.stats["preemptions"] > 5
    assert (preempted.moves["out"] > 5 and preempted.moves["in"] > 5) == (swap_space > 0)
    assert other.stats["preemptions"] == (preempted.stats["preemptions"] if dtype == "bfloat16" else 0)
    assert_same(preempted, other)
