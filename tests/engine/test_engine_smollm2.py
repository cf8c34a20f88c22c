"""The embedded model, in float32, against transformers with the same weights: 20 varied prompts, 64 greedy tokens each."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM, SamplingParams
from octavo.text import load_text
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.sources.source import resolve
from tests.engine.beams import Case, check_beams, our_beams, transformers_beams
from tests.engine.exactness import assert_same, check, greedy_references, scores
from tests.native import native

pytestmark = pytest.mark.model

COMPLETIONS = [
    "The history of the bicycle begins in",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "La capitale de la France est",
    "SELECT name, age FROM people WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "日本の首都は",
    "The quick brown fox 🦊 jumps over",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n-",
    "<html>\n<head>\n<title>",
    "In 1969, Neil Armstrong",
    "Q: What is photosynthesis?\nA:",
    "The three laws of thermodynamics are: first,",
    " \t \n leading whitespace and then",
    "It was the best of times, it was the worst of times, " * 12,
]
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain recursion to a child.",
    "Translate 'good morning' to Spanish.",
]


@pytest.fixture(scope="module")
def prompts():
    text = load_text(resolve("").path)
    chats = [text.encode_chat([{"role": "user", "content": chat}]) for chat in CHATS]
    return [text.encode(prompt) for prompt in COMPLETIONS] + chats


@pytest.fixture(scope="module")
def model():
    checkpoint = open_checkpoint(resolve(""))
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval().float()
    missing, unexpected = model.load_state_dict(
        {name: tensor.clone() for name, tensor in checkpoint.tensors(torch.device("cpu"), torch.float32)},
        strict=False,
    )
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def plain():
    with LLM(dtype="float32", kv_cache_memory_bytes=2**29, max_num_seqs=48) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(plain, prompts):
    """Our tokens, prompt by prompt."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    return [plain.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]


@pytest.fixture(scope="module")
def references(model, prompts, alone):
    return greedy_references(model, prompts, 64, guesses=alone)


def test_alone_among_31_others_and_with_prefix_hits(plain, alone, references):
    equal = [assert_same(ours, theirs, "alone") for ours, theirs in zip(alone, references, strict=True)]
    crowd = references + references[:12]
    among = check(plain, crowd, "among 31 others, with prefix hits")
    # Every prompt ran before: all of its full pages are found again, but for the page of its last token.
    hits = sum((len(reference.prompt) - 1) // 16 * 16 for reference in crowd)
    assert hits > 0 and plain.engine_stats()["prefix_hit_tokens"] >= hits
    plain.reset_prefix_cache()
    check(plain, crowd, "among 31 others")
    print(f"equal to the last token: {sum(equal)} of {len(references)} alone, {among} of {len(crowd)} in a crowd")
    assert sum(equal) >= 18


def test_decoding_where_weights_are_used_is_decoding_them_beforehand(plain, references):
    native()
    assert any("decoded where they are used" in note for note in plain.report.notes), plain.report.notes
    with LLM(dtype="float32", quantization="none", kv_cache_memory_bytes=2**29) as decoded:
        assert decoded.report.weights_bytes > 4 * plain.report.weights_bytes
        assert scores(decoded, references) == scores(plain, references)


@pytest.mark.parametrize("budget", [7, 64])
def test_chunks(references, budget):
    with LLM(
        dtype="float32", kv_cache_memory_bytes=2**29, max_num_batched_tokens=budget, enable_prefix_caching=False
    ) as llm:
        check(llm, references, f"chunks of {budget}")


@pytest.mark.parametrize("swap_space", [0.0, 0.5], ids=["recompute", "swap"])
def test_preempted(references, swap_space):
    # 1,024 tokens of room: the twenty need about 1,900.
    pages = 64 * 16 * 2 * 30 * 3 * 64 * 4
    with LLM(dtype="float32", kv_cache_memory_bytes=pages, max_model_len=1024, swap_space=swap_space) as llm:
        check(llm, references, "preempted")
        assert llm.engine_stats()["preemptions"] > 0


def test_packed_weights_give_the_same_tokens_in_any_company(references):
    """As the file holds them, without an excuse for near ties: the arithmetic is the same to the last bit."""
    native()  # without the kernels weights are decoded
    prompts = [reference.prompt for reference in references]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

    def tokens(llm, prompts):
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    with LLM(kv_cache_memory_bytes=2**29) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in prompts]
        assert tokens(llm, prompts + prompts[:12]) == alone + alone[:12]
    # They are a rounding away from float32: most of the way the tokens are the same.
    same = [sum(a == b for a, b in zip(t, r.tokens, strict=False)) for t, r in zip(alone, references, strict=True)]
    assert sum(same) > 0.5 * 48 * len(prompts)
    with LLM(kv_cache_memory_bytes=2**29, max_num_batched_tokens=7, cpu_threads=1, enable_prefix_caching=False) as llm:
        assert tokens(llm, prompts) == alone
    pages = (
        40 * 16 * 2 * 30 * 3 * 64 * 2
    )  # 640 tokens of room, in pages of 16 bits: the prompts alone need about as many
    with LLM(kv_cache_memory_bytes=pages, max_model_len=640, swap_space=0.5) as llm:
        assert tokens(llm, prompts) == alone
        assert llm.engine_stats()["preemptions"] > 0


def test_beam_search(plain, model, prompts):
    """All at once, so that searches share steps and pages with each other; <|im_end|> ends a beam."""
    ways = [(2, 1.0, False), (4, 1.0, True), (4, 0.0, "never"), (8, 2.0, False), (3, -1.0, False), (8, 1.0, False)]
    chats = prompts[len(COMPLETIONS) :]
    asked = [chats[0], chats[3], *prompts[:2], chats[0], chats[1]]
    cases = [Case(prompt, *way[:1], 20, *way[1:], [2]) for prompt, way in zip(asked, ways, strict=True)]
    want = [transformers_beams(model, case) for case in cases]
    assert sum(len(tokens) < 20 for beams in want for tokens, _ in beams) > 5, "some must end by themselves"
    for number, (ours, theirs) in enumerate(zip(our_beams(plain, cases), want, strict=True)):
        check_beams(ours, theirs, f"case {number} ({cases[number]})")
    assert plain._loop.scheduler.cache.pool.num_used == 0
