"""Requests of every kind through the whole engine, with speculation and without: the same tokens, logprobs, texts and ends, to the bit.
`python -m benchmarks.speculation identity` is the same in thousands."""

import json

import msgspec
import pytest

from benchmarks.speculation.identity import Campaign
from octavo import LLM, SamplingParams
from octavo.messages import GenerateRequest
from tests.doubles import write_byte_tokenizer
from tests.worker.tiny import disturbed, write_tiny_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    source = write_tiny_llama(folder, vocab_size=258)
    write_byte_tokenizer(folder)
    # Near an answer's limit masks are not computed ahead: there must be room before it.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 320}))
    return source


def test_drafts_change_nothing(source, tmp_path):
    campaign = Campaign(source, {"kv_cache_memory_bytes": 3 * 2**16, "max_model_len": 320, "cpu_threads": 1}, tmp_path)
    campaign.check(2, 40, ["ngram", "suffix", "recent"])
    seen = campaign.seen
    assert not seen.different, seen.different[0]
    assert seen.drafted > 300 and seen.accepted > 100 and seen.drafted - seen.accepted > 100, seen
    assert seen.preemptions > 5 and seen.deaths > 0 and seen.replayed_steps > 300, seen


def test_drafts_of_a_model_change_nothing(source, tmp_path):
    """By a model that is nearly the same: it is right now and then, and wrong now and then."""
    draft = disturbed(source, tmp_path / "draft", 0.01)
    options = {"kv_cache_memory_bytes": 3 * 2**16, "max_model_len": 320, "cpu_threads": 1}
    campaign = Campaign(source, options, tmp_path, str(draft))
    for seed in (3, 4):
        campaign.check(seed, 40, ["draft_model"])
    seen = campaign.seen
    assert not seen.different, seen.different[0]
    assert seen.drafted > 300 and seen.accepted > 100 and seen.drafted - seen.accepted > 100, seen
    assert seen.preemptions > 5 and seen.deaths > 0 and seen.replayed_steps > 300, seen


SCHEMA = {
    "type": "object",
    "properties": {
        "the_first_member": {"enum": ["yes", "no", "perhaps"]},
        "the_second_member": {"type": "boolean"},
        "the_third_member": {"type": "string", "maxLength": 4},
    },
    "required": ["the_first_member", "the_second_member", "the_third_member"],
    "additionalProperties": False,
}


def test_a_grammar_drafts_what_it_forces(source):
    """The names of members and the punctuation, which no text before has: the same tokens in fewer steps."""
    options = {"max_num_seqs": 4, "kv_cache_memory_bytes": 2**18, "cpu_threads": 1, "max_model_len": 320}
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=310, structured_outputs={"json": SCHEMA}, logprobs=1)
    outputs, num_steps = [], []
    for config in (
        '{"method": "ngram", "adaptive": false}',
        '{"method": "ngram", "adaptive": false, "grammar": false}',
    ):
        with LLM(str(source.path), speculative_config=config, **options) as llm:
            for seed in range(3):
                steps = llm._loop.scheduler.num_steps
                one = msgspec.structs.replace(params, seed=seed)
                outputs.append(llm.generate([[1, 2, 3]], one, use_tqdm=False)[0].outputs[0])
                num_steps.append(llm._loop.scheduler.num_steps - steps)
    for ours, plain in zip(outputs[:3], outputs[3:], strict=True):
        assert ours.token_ids == plain.token_ids and ours.logprobs == plain.logprobs and ours.text == plain.text
        assert set(json.loads(ours.text)) == set(SCHEMA["properties"])
    assert sum(num_steps[:3]) < 0.7 * sum(num_steps[3:]), num_steps


@pytest.mark.parametrize("max_num_seqs", [1, 16, 40])
def test_every_position_of_a_draft(source, max_num_seqs):
    """A prediction that is right up to any place, or all the way: the same tokens, in fewer steps."""
    prompt = [1, 2, 3, 4, 5]
    options = {"max_num_seqs": max_num_seqs, "page_size": 4, "kv_cache_memory_bytes": 2**18, "cpu_threads": 1}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=17, ignore_eos=True, logprobs=1)
    config = '{"method": "ngram", "num_speculative_tokens": 15, "adaptive": false}'
    with LLM(str(source.path), speculative_config=config, **options) as llm:
        plain = llm.generate([prompt], _with(params, ()), use_tqdm=False)[0].outputs[0]
        num_steps = []
        for right in range(17):
            prediction = (*plain.token_ids[:right], 7, *plain.token_ids[right + 1 :])
            steps = llm._loop.scheduler.num_steps
            ours = llm.generate([prompt], _with(params, prediction), use_tqdm=False)[0].outputs[0]
            num_steps.append(llm._loop.scheduler.num_steps - steps)
            assert ours.token_ids == plain.token_ids and ours.logprobs == plain.logprobs
    assert num_steps[16] == 2, "the prompt, and one step with a draft of 15"
    assert max(num_steps) <= 7, "after a mistake, the prediction is found again"


def test_a_request_is_drafted_from_recent_outputs_of_its_key(source):
    """The second time, the whole answer is known. Not to another key or salt, nor if the first one did not speculate; and not without the
    setting. Tokens are the same."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    options = {"page_size": 4, "kv_cache_memory_bytes": 2**18, "cpu_threads": 1}

    def accepted(loop, number: int, owner: bytes = b"a", **changes) -> tuple[int, list[int]]:
        changed = msgspec.structs.replace(params, **changes)
        loop.add(GenerateRequest(f"r{number}", [1, 2, 3, 4, 5], changed, [], owner=owner))
        tokens: list[int] = []
        while True:
            for delta in loop.step():
                tokens += delta.token_ids
                if delta.finish is not None:
                    return delta.finish.num_accepted_tokens, tokens

    def engine(**settings) -> LLM:
        config = {"method": "suffix", "num_speculative_tokens": 8, "adaptive": False, **settings}
        return LLM(str(source.path), speculative_config=json.dumps(config), **options)

    with engine(suffix_decoding_max_cached_requests=10) as llm:
        loop = llm._loop
        plain, tokens = accepted(loop, 0)
        assert accepted(loop, 1, b"b") == (plain, tokens), "of another key"
        assert accepted(loop, 2, prefix_salt="salt") == (plain, tokens), "with another salt"
        again, same = accepted(loop, 3)
        assert same == tokens and again > plain + 20
        assert accepted(loop, 4, prefix_salt="salt") == (again, tokens)
        assert accepted(loop, 5, b"c", use_speculation=False) == (0, tokens)
        assert accepted(loop, 6, b"c") == (plain, tokens), "the one before did not want it"
    with engine() as llm:
        assert [accepted(llm._loop, number) for number in range(2)] == [(plain, tokens)] * 2


def _with(params, prediction):
    return msgspec.structs.replace(params, prediction_ids=tuple(prediction), use_speculation=bool(prediction))
