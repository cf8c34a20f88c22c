"""Models with sliding windows through the whole engine: transformers' tokens, in no more pages than the windows need."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from octavo import LLM, SamplingParams
from octavo.kernels.cpu.library import library
from octavo.messages import StepPlan
from tests.engine.exactness import Reference, check, greedy_references

NUM_LONG = 14  # of the prompts: the others are much shorter than the window
VOCABULARY, WINDOW, PAGE_SIZE, CHUNK = 97, 20, 4, 16
KINDS = {
    # 4 layers with a window, 2 without: page tables for two, two and two of them.
    "some layers": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "all layers": ["sliding_attention"] * 6,
}
WINDOWS = {"some layers": (0, WINDOW, WINDOW), "all layers": (WINDOW,)}
Model = tuple[str, list[Reference], str]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(12)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,  # far from uniform: near ties are rare
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=KINDS[request.param],
    )
    model = Qwen2ForCausalLM(config).eval().float()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    rng = random.Random(6)
    stem = [rng.randrange(VOCABULARY) for _ in range(120)]
    prompts = [
        stem[: rng.randrange(0, 120)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))]
        for _ in range(NUM_LONG)
    ]
    prompts += [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, 9))] for _ in range(12)]
    return str(folder), greedy_references(model, prompts, 32), request.param


def engine(folder: str, **options: Any) -> LLM:
    common = {"page_size": PAGE_SIZE, "kv_cache_memory_bytes": 2**21, "max_num_seqs": 16, "device": "cpu"}
    return LLM(folder, **{**common, "max_num_batched_tokens": CHUNK, **options})


@contextmanager
def no_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("OCTAVO_NATIVE", "0")
        library.cache_clear()
        yield
    library.cache_clear()


def test_recorded_steps_give_the_tokens_of_transformers(model: Model) -> None:
    folder, references, kind = model
    with engine(folder, max_num_batched_tokens=512) as llm:
        assert llm.report.windows == WINDOWS[kind]
        assert not any("operation by operation" in note for note in llm.report.notes)
        assert any(f"window ({WINDOW} tokens)" in note for note in llm.report.notes)
        assert check(llm, references, "among others") >= 23


@pytest.mark.parametrize("chunk", [1, 7, CHUNK])
def test_single_operations_and_chunks_give_the_tokens_of_transformers(model: Model, chunk: int) -> None:
    folder, references, _ = model
    with engine(folder, enforce_eager=True, max_num_batched_tokens=chunk) as llm:
        assert check(llm, references[:4], f"chunks of {chunk}") >= 3


def test_torch_gives_the_tokens_of_transformers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, references, _ = model
    with no_native(monkeypatch), engine(folder) as llm:
        assert any("OCTAVO_NATIVE=0" in note for note in llm.report.notes)
        assert check(llm, references[:6], "torch") >= 5


def test_two_ranks_and_a_step_ahead_give_the_tokens_of_one(model: Model) -> None:
    folder, references, kind = model
    if kind == "some layers":  # one kind is enough: ranks take seconds to start
        with engine(folder, tensor_parallel_size=2) as llm:
            assert check(llm, references, "two ranks") >= 23


def test_a_sequence_holds_the_pages_of_its_window_and_no_more(model: Model) -> None:
    folder, references, kind = model
    longest = max(references, key=lambda reference: len(reference.prompt))
    length = len(longest.prompt) + len(longest.tokens)
    with engine(folder) as llm:
        cache, submit = llm._loop.scheduler.cache, llm._loop.executor.submit
        held: list[list[int]] = []

        def noted(plan: StepPlan) -> None:
            ((*tables,),) = cache.tables.values()
            held.append([len(table.pages) for table in tables])
            submit(plan)

        llm._loop.executor.submit = noted  # type: ignore[method-assign]
        assert cache.pool.num_used == 0, "before"
        check(llm, [longest], "alone")
        assert cache.pool.num_used == 0, "after"
        for window, *counts in zip(WINDOWS[kind], *held, strict=True):
            if window:
                assert max(counts) <= -(-(window + CHUNK) // PAGE_SIZE) + 1, "during"
                assert counts[-1] <= -(-window // PAGE_SIZE) + 1, "once it decodes"
            else:
                assert max(counts) == -(-(length - 1) // PAGE_SIZE), "the last token is never computed"
        places = 6 // len(WINDOWS[kind])
        assert llm.report.page_bytes == 2 * places * 2 * 8 * 4 * PAGE_SIZE  # K and V, layers, heads, head size, float32
        # Of one page table for all, with 3 times as large pages: every layer would keep every page.
        assert llm.engine_stats()["pages_used_peak"] * places < 0.7 * 6 * length / PAGE_SIZE


def test_prefixes_are_found_though_their_beginning_was_let_go(model: Model) -> None:
    folder, references, kind = model
    with engine(folder) as llm:
        check(llm, references, "first")
        before = llm.engine_stats()["prefix_hit_tokens"]
        check(llm, references, "again")
        found = llm.engine_stats()["prefix_hit_tokens"] - before
        most = sum((len(reference.prompt) - 1) // PAGE_SIZE * PAGE_SIZE for reference in references)
        assert found == most, "there is room for all of it"
        pool = llm._loop.scheduler.cache.pool
        assert (pool.num_used, len(pool.cached) > 0) == (0, True)
        if kind == "some layers":  # without the pages of one group the others' are of no use
            for page in [page for key, page in pool.index.items() if key.endswith(b"\x02") and len(key) == 17]:
                assert page in pool.cached
                del pool.index[pool.keys[page]]
                pool.keys[page] = None
                del pool.cached[page]
                pool.blank.append(page)
            before = llm.engine_stats()["prefix_hit_tokens"]
            check(llm, references[:1], "with a hole")
            assert llm.engine_stats()["prefix_hit_tokens"] == before


@pytest.mark.parametrize("swap_space", [0.0, 0.01], ids=["recompute", "swap"])
def test_preempted(model: Model, swap_space: float) -> None:
    """Short prompts, which grow until their windows are full, in pages for about two at their full length."""
    folder, references, kind = model
    places, pages = 6 // len(WINDOWS[kind]), {"some layers": 48, "all layers": 16}[kind]
    little = {"kv_cache_memory_bytes": pages * places * 128 * PAGE_SIZE, "max_model_len": 64}
    with engine(folder, **little, max_num_batched_tokens=8, swap_space=swap_space) as llm:
        assert llm.report.num_pages == pages
        assert check(llm, references[NUM_LONG:], "preempted") >= 10
        assert llm.engine_stats()["preemptions"] > 5


def test_choices_of_one_prompt_share_it(model: Model) -> None:
    folder, references, _ = model
    with engine(folder) as llm:
        greedy = SamplingParams(temperature=0, n=3, max_tokens=32, ignore_eos=True)
        (output,) = llm.generate([references[1].prompt], greedy, use_tqdm=False)
        assert all(choice.token_ids == references[1].tokens for choice in output.outputs)


def test_a_window_as_long_as_the_context_is_none(model: Model) -> None:
    folder, _, _ = model
    with engine(folder, max_model_len=WINDOW) as llm:
        assert llm.report.windows == (0,)
