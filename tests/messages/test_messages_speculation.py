"""--speculative-config: what it becomes, and what is refused."""

import json

import pytest

from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.messages.speculation import SpeculationSettings, speculation_of


def settings(*given, **options):
    """With grammars that draft, as a command has it that does not say otherwise."""
    return SpeculationSettings(*given, asks_grammars=True, **options)


def test_auto_is_for_cpus():
    assert speculation_of("", is_gpu=False) == settings("ngram")
    assert speculation_of('{"method": "auto", "num_speculative_tokens": 3}', is_gpu=False) == settings("ngram", 3)
    assert speculation_of("", is_gpu=True) is None
    assert speculation_of("", is_gpu=False, is_exact=False) is None
    assert speculation_of('{"method": "ngram"}', is_gpu=False, is_exact=False) == settings("ngram")
    assert speculation_of('{"method": "suffix"}', is_gpu=True) == settings("suffix")
    assert speculation_of('{"method": "none"}', is_gpu=False) is None
    assert speculation_of('{"method": "ngram", "grammar": false}', is_gpu=False) == SpeculationSettings("ngram")


def test_vllms_names():
    given = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 3}'
    assert speculation_of(given, is_gpu=False) == settings("ngram", 5, 3, 3)
    for earlier in ({"model": "[ngram]"}, {"model": "ngram"}, {"method": "ngram", "model": "ngram"}):
        assert speculation_of(json.dumps(earlier), is_gpu=True) == settings("ngram")
    by_model = SpeculationSettings("draft_model", 5, model="path")
    assert (
        speculation_of('{"model": "path", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}', is_gpu=False)
        == by_model
    )
    assert speculation_of('{"model": "path", "num_speculative_tokens": 5}', is_gpu=False) == by_model
    assert speculation_of('{"method": "draft_model", "model": "path"}', is_gpu=True) == SpeculationSettings(
        "draft_model", model="path"
    )
    head = SpeculationSettings("eagle3", 3, model="path")
    assert speculation_of('{"method": "eagle3", "model": "path", "num_speculative_tokens": 3}', is_gpu=False) == head
    for name in ("mtp", "deepseek_mtp"):
        assert speculation_of(json.dumps({"method": name}), is_gpu=False) == SpeculationSettings("mtp")
        assert speculation_of(json.dumps({"method": name}), is_gpu=True) == SpeculationSettings("mtp")
    assert [SpeculationSettings(method).is_by_model for method in ("suffix", "mtp", "eagle3")] == [False, True, True]
    recent = '{"method": "suffix", "suffix_decoding_max_cached_requests": 10000}'
    assert speculation_of(recent, is_gpu=True) == settings("suffix", max_cached_requests=10000)
    assert speculation_of(recent.replace("10000", "0"), is_gpu=False) == settings("suffix")
    one_sided = '{"method": "ngram", "prompt_lookup_max": 1}'
    assert speculation_of(one_sided, is_gpu=False) == settings("ngram", 8, 1, 1)
    assert replace(Config(), speculative_config={"method": "none"}).scheduler.speculative_config == '{"method": "none"}'


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ('{"grammar": 1}', "grammar must be true or false, got 1"),
        (
            '{"method": "medusa"}',
            "the method 'medusa' is not supported: use auto, ngram, suffix, draft_model, eagle3, mtp or none",
        ),
        ('{"method": "eagle3"}', "the method eagle3 needs an EAGLE-3 head: name it with `model`"),
        ('{"method": "mtp", "model": "x"}', "model is for the methods draft_model and eagle3, not for 'mtp'"),
        ('{"method": []}', r"the method \[\] is not supported"),
        ('{"method": 3}', "the method 3 is not supported"),
        ('{"method": "draft_model"}', "the method draft_model needs a draft model: name it with `model`"),
        ('{"method": "ngram", "model": "x"}', "model is for the methods draft_model and eagle3, not for 'ngram'"),
        ('{"model": 3}', "model must be a text, the name of the draft model, got 3"),
        ('{"num_tokens": 3}', "'num_tokens' is not known; known are method, model, num_speculative_tokens"),
        ('{"num_speculative_tokens": 16}', "num_speculative_tokens must be a whole number from 1 to 15, got 16"),
        ('{"num_speculative_tokens": 2.5}', "num_speculative_tokens must be a whole number"),
        (
            '{"prompt_lookup_min": 5, "prompt_lookup_max": 4}',
            r"prompt_lookup_min \(5\) is more than prompt_lookup_max \(4\)",
        ),
        ('{"method": "suffix", "model": "ngram"}', "model is for the methods draft_model and eagle3, not for 'suffix'"),
        (
            '{"model": "x", "draft_tensor_parallel_size": 0}',
            "draft_tensor_parallel_size must be a whole number from 1 to 1024, got 0",
        ),
        (
            '{"suffix_decoding_max_cached_requests": 10}',
            "suffix_decoding_max_cached_requests is for the method suffix, not for 'auto': leave one of them out",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_cached_requests": -1}',
            "suffix_decoding_max_cached_requests must be a whole number from 0 to 1000000, got -1",
        ),
        ('{"adaptive": 1}', "adaptive must be true or false, got 1"),
        ("[]", "must be a JSON object"),
    ],
)
def test_mistakes_are_named(given, problem):
    with pytest.raises(ConfigError, match=problem):
        speculation_of(given, is_gpu=False)
