"""Logprobs, of answers and of prompts, against transformers' log_softmax: any batch, any chunks, cached prefixes, n choices."""

from collections.abc import Sequence

import pytest
import torch

from octavo import LLM, Logprob, SamplingParams
from octavo.errors import InvalidRequest
from tests.doubles import write_byte_tokenizer
from tests.small_llama import small_llama

VOCAB = 300
OPTIONS = {"kv_cache_memory_bytes": 2**21, "max_num_seqs": 8, "page_size": 16, "dtype": "float32"}
PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(length)] for i, length in enumerate((1, 2, 5, 33, 70))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(3)
    return small_llama(VOCAB, spread=0.2, bos_token_id=None, eos_token_id=None)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return str(folder)


@pytest.fixture(params=["1", "0"], ids=["native", "torch"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("OCTAVO_NATIVE", request.param)


@torch.inference_mode()
def reference(model, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] float32: of what follows each token."""
    return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def check(found: dict[int, Logprob], row: torch.Tensor, token: int, count: int) -> None:
    assert next(iter(found)) == token and len(found) in (
        max(1, count),
        count + 1,
    )  # the chosen one may be among the best
    for other, entry in found.items():
        assert abs(entry.logprob - float(row[other])) < 1e-4
        assert entry.rank == int((row > row[other]).sum()) + 1
    best = row.topk(count).values if count else row[:0]
    ranked = sorted((entry for entry in found.values() if entry.rank <= count), key=lambda entry: entry.rank)
    assert torch.allclose(torch.tensor([entry.logprob for entry in ranked]), best, atol=1e-4)


def check_output(model, output, params: SamplingParams) -> None:
    prompt = output.prompt_token_ids
    for choice in output.outputs:
        rows = reference(model, [*prompt, *choice.token_ids])
        if params.logprobs is None:
            assert choice.logprobs is None
        else:
            assert len(choice.logprobs) == len(choice.token_ids)
            for at, (entry, token) in enumerate(zip(choice.logprobs, choice.token_ids, strict=True)):
                check(entry, rows[len(prompt) - 1 + at], token, params.logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        first, *others = output.prompt_logprobs
        assert first is None and len(others) == len(prompt) - 1
        rows = reference(model, prompt)
        for at, entry in enumerate(others):
            check(entry, rows[at], prompt[at + 1], params.prompt_logprobs)


def test_a_batch_of_unlike_requests(kernels, model, folder):
    """Prompts in chunks of 24 tokens; the model's own logprobs, whatever changes what is sampled."""
    plain = {"max_tokens": 6, "ignore_eos": True}
    every = [
        SamplingParams(temperature=0, logprobs=0, prompt_logprobs=3, **plain),
        SamplingParams(temperature=0, **plain),
        SamplingParams(temperature=2.0, seed=1, logprobs=5, logit_bias={7: 20.0, 9: -100.0}, **plain),
        SamplingParams(temperature=0.7, seed=2, prompt_logprobs=0, frequency_penalty=1.0, n=3, logprobs=20, **plain),
        SamplingParams(seed=4, logprobs=2, prompt_logprobs=20, allowed_token_ids=[5, 6, 250], n=2, **plain),
    ]
    with LLM(folder, max_num_batched_tokens=24, **OPTIONS) as llm:
        together = llm.generate(PROMPTS, every, use_tqdm=False)
        for output, params in zip(together, every, strict=True):
            check_output(model, output, params)
        assert {7} == set(together[2].outputs[0].token_ids)
        assert all(set(choice.token_ids) <= {5, 6, 250} for choice in together[4].outputs)
        alone = llm.generate(PROMPTS[3], every[3], use_tqdm=False)[0]
        assert [choice.token_ids for choice in alone.outputs] == [c.token_ids for c in together[3].outputs]


def test_a_prompt_that_is_cached_is_computed_again(model, folder):
    prompt = PROMPTS[4]
    with LLM(folder, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
        llm.generate(prompt, params, use_tqdm=False)
        assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens >= 64
        scored = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
        (output,) = llm.generate(prompt, scored, use_tqdm=False)
        assert output.num_cached_tokens == 0
        check_output(model, output, scored)


def test_preempted_in_the_middle_of_a_prompt(model, folder):
    """Too few pages for all: some leave, are computed again, and nobody gets a logprob twice."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts = [[(11 * i + j) % VOCAB for j in range(70)] for i in range(4)]
    page = 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, head size, bytes
    with LLM(folder, max_num_batched_tokens=40, **OPTIONS | {"kv_cache_memory_bytes": 24 * page}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine_stats()["preemptions"] > 0
        for output in outputs:
            check_output(model, output, params)


def test_bad_words(kernels, folder):
    """Bytes are tokens here: what greedy says without a ban tells which words to ban."""
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "allowed_token_ids": [97, 98, 99, 32]}
    with LLM(folder, **OPTIONS) as llm:
        (free,) = llm.generate("abc abc", SamplingParams(**params), use_tqdm=False)
        said = free.outputs[0].text
        assert set(said) <= set("abc ") and len(said) == 12
        words = [said[3:5], said[6:9]] if said[3] != " " and said[6] != " " else [said[4:6]]
        (banned,) = llm.generate("abc abc", SamplingParams(bad_words=words, **params), use_tqdm=False)
        assert not any(word.lstrip() in banned.outputs[0].text for word in words)
        (other, again) = llm.generate(
            ["abc abc"] * 2, [SamplingParams(bad_words=words, **params), SamplingParams(**params)], use_tqdm=False
        )
        assert (other.outputs[0].text, again.outputs[0].text) == (banned.outputs[0].text, said)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"logprobs": -1}, "logprobs", "between 0 and 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        ({"logit_bias": {5: 101.0}}, "logit_bias.5", "between -100 and 100"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias.5", "between -100 and 100"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "token ids"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias.{VOCAB}", "0 to 299"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", "1024"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids[1]", "0 to 299"),
        ({"bad_words": [" "]}, "bad_words[0]", "256 characters"),
        ({"bad_words": ["a"] * 257}, "bad_words", "at most 256"),
        ({"bad_words": "a"}, "bad_words", "list of strings"),
    ],
)
def test_mistakes_are_named(refusing, fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as error:
        refusing.generate("abc", SamplingParams(max_tokens=2, **fields), use_tqdm=False)
    assert error.value.param == param


@pytest.fixture(scope="module")
def refusing(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def test_tokens_by_id_instead_of_the_likeliest(kernels, model, folder):
    """Beside requests that want none, or the likeliest."""
    asked = [0, 299, 7, 7]
    plain = {"max_tokens": 5, "ignore_eos": True, "seed": 3}
    every = [
        SamplingParams(logprobs=0, logprob_token_ids=asked, prompt_logprobs=1, **plain),
        SamplingParams(logprobs=3, **plain),
        SamplingParams(logprobs=0, logprob_token_ids=[9], n=2, **plain),
        SamplingParams(temperature=0, **plain),
    ]
    with LLM(folder, **OPTIONS) as llm:
        found = llm.generate(PROMPTS[:4], every, use_tqdm=False)
    check_output(model, found[1], every[1])
    for output, ids in ((found[0], asked), (found[2], [9])):
        for choice in output.outputs:
            rows = reference(model, [*output.prompt_token_ids, *choice.token_ids])
            for at, (entry, token) in enumerate(zip(choice.logprobs, choice.token_ids, strict=True)):
                row = rows[len(output.prompt_token_ids) - 1 + at]
                assert entry.keys() == {token, *ids} and entry[token].rank == int((row > row[token]).sum()) + 1
                for other, score in entry.items():
                    assert abs(score.logprob - float(row[other])) < 1e-4
                    assert other == token or score.rank is None
    assert len(found[0].prompt_logprobs) == len(found[0].prompt_token_ids)
