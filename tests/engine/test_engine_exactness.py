"""A tiny random model through the whole engine: every way of getting to a token gives transformers' token."""

import random

import msgspec
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from octavo import LLM, SamplingParams
from octavo.messages import TokenDelta
from octavo.schedule.step_costs import StepCosts
from tests.engine.exactness import Reference, assert_same, check, greedy_references
from tests.small_llama import small_llama

VOCABULARY = 97


def tiny_gpt2():
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.4)
    return GPT2LMHeadModel(config)


@pytest.fixture(scope="module", params=[small_llama, tiny_gpt2], ids=["llama", "gpt2"])
def model(request, tmp_path_factory):
    torch.manual_seed(11)
    model = request.param().eval().float()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    rng = random.Random(5)
    stem = [rng.randrange(VOCABULARY) for _ in range(40)]
    prompts = [
        stem[: rng.randrange(0, 40)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))]
        for _ in range(32)
    ]
    return str(folder), greedy_references(model, prompts, 24)


def engine(folder: str, **options) -> LLM:
    return LLM(folder, **{"page_size": 4, "kv_cache_memory_bytes": 2**20, "max_num_seqs": 40, **options})


def test_alone_and_among_31_others(model):
    folder, references = model
    with engine(folder) as llm:
        alone = check(llm, references, "alone", together=False)
        among = check(llm, references, "among 31 others")
    assert alone >= 30 and among >= 30


@pytest.mark.parametrize("budget", [*range(1, 81), 512])  # the longest prompt has fewer than 80 tokens
def test_every_chunk_size(model, budget):
    folder, references = model
    assert max(len(reference.prompt) for reference in references) < 80
    with engine(folder, max_num_batched_tokens=budget) as llm:
        check(llm, references[:8], f"chunks of {budget}")


def test_prompts_cut_for_streams(model):
    """However much of prompts a step may compute beside streams, and however that changes: the same tokens and the same logprobs, to
    the bit."""
    folder, references = model
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)

    def run(limit_ms: float, seed: int) -> tuple[dict[str, list[TokenDelta]], int]:
        r, num_capped, boxes = random.Random(seed), 0, []
        with engine(folder, max_inter_token_ms=limit_ms) as llm:
            scheduler = llm._loop.scheduler
            waiting = [llm._request(reference.prompt, params) for reference in references]
            while waiting or llm._loop.has_work:
                if waiting and r.random() < 0.3:
                    boxes.append((waiting[0].id, []))
                    llm._submit(waiting.pop(0), boxes[-1][1])
                # As if steps had taken any time.
                scheduler.learn(StepCosts(*(r.choice([0.0, 1e-6, 1e-3]) for _ in range(5))))
                if llm._loop.has_work:
                    llm._step()
                    allowance = scheduler._allowance
                    num_capped += allowance is not None and allowance.capped is not None
        return dict(boxes), num_capped

    whole, num_capped = run(0, 1)
    assert num_capped == 0
    for limit_ms, seed in ((0.001, 2), (3.0, 3), (20.0, 4)):
        cut, num_capped = run(limit_ms, seed)
        assert num_capped > 3, limit_ms
        assert {name: _said(box) for name, box in cut.items()} == {name: _said(box) for name, box in whole.items()}
    for reference, box in zip(references, whole.values(), strict=False):
        assert_same([token for delta in box for token in delta.token_ids], reference, "whole")


def _said(box: list[TokenDelta]) -> list[object]:
    """Tokens and their logprobs, one by one: how many a step gives depends on drafts."""
    return [pair for delta in box for pair in zip(delta.token_ids, delta.logprobs, strict=True)]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_prefix_hits(model, enable_prefix_caching):
    folder, references = model
    with engine(folder, enable_prefix_caching=enable_prefix_caching) as llm:
        check(llm, references, "first")
        hits = llm.engine_stats()["prefix_hit_tokens"]
        check(llm, references, "again")
        assert (llm.engine_stats()["prefix_hit_tokens"] > hits) == enable_prefix_caching


@pytest.mark.parametrize("swap_space", [0.0, 0.01], ids=["recompute", "swap"])
def test_preempted(model, swap_space):
    folder, references = model
    # Room for about four of the thirty-two at their full length.
    with engine(folder, max_model_len=128, kv_cache_memory_bytes=2**16 * 3, swap_space=swap_space) as llm:
        check(llm, references, "preempted")
        assert llm.engine_stats()["preemptions"] > 5


@pytest.mark.parametrize("swap_space", [0.0, 0.01], ids=["recompute", "swap"])
@pytest.mark.parametrize("kib", [192, 1024], ids=["few pages", "few rows"])
def test_what_gave_way_to_others_goes_on_as_if_it_had_not(model, swap_space, kib):
    """Prompts of one response in all rows; one request after the other takes rows and pages from them."""
    folder, references = model
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    limits = {"max_num_seqs": 6, "max_model_len": 128, "kv_cache_memory_bytes": kib * 2**10, "swap_space": swap_space}
    with engine(folder, **limits) as llm:
        box: list[TokenDelta] = []
        large = [llm._request(reference.prompt, params) for reference in references[:12]]
        for part, request in enumerate(large):
            llm._submit(msgspec.structs.replace(request, response_id="large", part=part), box)
        for prompt, tokens, margins in ((each.prompt, each.tokens, each.margins) for each in references[12:24]):
            llm._step()
            check(llm, [Reference(prompt, tokens[:2], margins[:2])], "in the place of another")
        assert llm.engine_stats()["preemptions"] > 5
        while any(llm._loop.scheduler.has(request.id) for request in large):
            llm._step()
        for request, reference in zip(large, references, strict=False):
            tokens = [token for delta in box if delta.request_id == request.id for token in delta.token_ids]
            assert_same(tokens, reference, "gave way")


def test_choices_of_one_prompt_share_it_and_equal_single_requests(model):
    folder, references = model
    with engine(folder) as llm:
        params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=16, ignore_eos=True)
        (output,) = llm.generate([references[0].prompt], params, use_tqdm=False)
        assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
        (single,) = llm.generate(
            [references[0].prompt],
            SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True),
            use_tqdm=False,
        )
        assert single.outputs[0].token_ids == output.outputs[0].token_ids
        greedy = SamplingParams(temperature=0, n=3, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate([references[1].prompt], greedy, use_tqdm=False)
        assert all(choice.token_ids == references[1].tokens for choice in output.outputs)


@pytest.mark.parametrize(("rows", "caches"), [(1, True), (3, True), (3, False)])
def test_more_choices_than_rows_are_the_choices_that_many_rows_give(model, rows, caches):
    folder, references = model
    params = SamplingParams(temperature=1.0, seed=3, n=8, max_tokens=16, ignore_eos=True, prompt_logprobs=1)
    found = []
    for max_num_seqs in (8, rows):
        with engine(folder, max_num_seqs=max_num_seqs, enable_prefix_caching=caches) as llm:
            output, other = llm.generate([references[0].prompt, references[1].prompt], params, use_tqdm=False)
            tokens = [choice.token_ids for choice in (*output.outputs, *other.outputs)]
            scores = [list(entry) for entry in output.prompt_logprobs[1:]]
            found.append((tokens, scores, output.num_cached_tokens))
    assert found[0] == found[1] and len(found[0][0]) == 16


def test_a_seeded_request_gives_the_same_tokens_whatever_runs_beside_it(model):
    folder, references = model
    seeded = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1234, max_tokens=24, ignore_eos=True)
    with engine(folder) as llm:
        alone = llm.generate([references[0].prompt], seeded, use_tqdm=False)[0].outputs[0].token_ids
        others = [
            SamplingParams(temperature=1.3, seed=i, max_tokens=5 + i, presence_penalty=0.5, ignore_eos=True)
            for i in range(31)
        ]
        prompts = [reference.prompt for reference in references]
        beside = llm.generate([*prompts[1:], prompts[0]], [*others, seeded], use_tqdm=False)[-1].outputs[0].token_ids
    assert beside == alone


def test_tensor_parallel_two_gives_the_tokens_of_one(model):
    folder, references = model
    with engine(folder, tensor_parallel_size=2, device="cpu") as llm:
        assert check(llm, references, "two ranks") >= 30
