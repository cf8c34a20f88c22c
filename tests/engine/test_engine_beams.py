"""Beam search through the whole engine: transformers' answers, whatever else runs, and pages that beams share."""

import random

import pytest
import torch

from octavo import LLM, BeamSearchParams, RepetitionDetectionParams, SamplingParams
from octavo.errors import InvalidRequest
from octavo.observe.journeys.journal import EngineJournal
from octavo.observe.metrics.engine_metrics import EngineMetrics
from tests.engine.beams import Case, check_beams, our_beams, transformers_beams
from tests.small_llama import small_llama

VOCABULARY = 97


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(3)
    model = small_llama(VOCABULARY, spread=0.2)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return str(folder), model


def make_cases(model) -> list[Case]:
    """Beams end by tokens that they come to without such an end, so that many do."""
    r = random.Random(8)
    cases = []
    for width in (2, 3, 5, 8):
        for length_penalty, early_stopping in (
            (1.0, False),
            (0.0, "never"),
            (2.0, True),
            (-0.5, False),
            (1.0, "never"),
        ):
            prompt = [r.randrange(VOCABULARY) for _ in range(r.choice([1, 4, 7, 16, 33]))]
            max_tokens = r.choice([1, 12, 20, 24])
            free = transformers_beams(model, Case(prompt, width, max_tokens))
            met = sorted({token for tokens, _ in free for token in tokens})
            eos_ids = r.sample(met, min(len(met), r.choice([0, 2, 3, 4])))
            min_tokens = r.choice([0, 0, min(5, max_tokens)])
            cases.append(Case(prompt, width, max_tokens, length_penalty, early_stopping, eos_ids, min_tokens))
    return cases


@pytest.fixture(scope="module")
def known(model):
    """Searches, and what transformers finds."""
    cases = make_cases(model[1])
    found = [transformers_beams(model[1], case) for case in cases]
    # Worth something only if searches end in both ways, and before their last token.
    lens = [len(tokens) - case.max_tokens for case, beams in zip(cases, found, strict=True) for tokens, _ in beams]
    assert lens.count(0) > 20 and len(lens) - lens.count(0) > 15
    return list(zip(cases, found, strict=True))


def engine(folder: str, **options) -> LLM:
    return LLM(folder, **{"page_size": 4, "kv_cache_memory_bytes": 2**20, "max_num_seqs": 40, **options})


def check(llm: LLM, known, what: str, *, together: bool = True) -> None:
    cases = [case for case, _ in known]
    found = our_beams(llm, cases) if together else [our_beams(llm, [case])[0] for case in cases]
    for ours, (case, theirs) in zip(found, known, strict=True):
        check_beams(ours, theirs, f"{what}, {case}")
    assert llm._loop.scheduler.cache.pool.num_used == 0, "pages leaked"
    observers = {type(observer): observer for observer in llm._loop.observers}
    assert not observers[EngineJournal]._journeys, "a request is still open"
    assert not observers[EngineMetrics]._open, "a request is still open"


def test_alone_and_together(model, known):
    with engine(model[0]) as llm:
        check(llm, known, "alone", together=False)
        check(llm, known, "together")


@pytest.mark.parametrize("budget", [8, 40], ids=["budget 8", "budget 40"])
def test_in_chunks_and_preempted(model, known, budget):
    """75 pages of 4 tokens; the widest search may need 8 + 8 × 8, so that searches throw each other out."""
    pages = 75 * 4 * 2 * 2 * 2 * 8 * 4
    options = {"kv_cache_memory_bytes": pages, "max_model_len": 64, "max_num_batched_tokens": budget}
    with engine(model[0], **options, enable_prefix_caching=False) as llm:
        check(llm, known, "preempted")
        # With a small budget few searches run at once: they are cut to pieces instead.
        assert budget == 8 or llm.engine_stats()["preemptions"] > 3


def test_neighbours_are_not_disturbed(model, known):
    folder, _ = model
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, n=3, logprobs=2)
    prompts = [[5, 6, 7], [8] * 20]
    (one, its_beams), (two, _) = known[-1], known[3]
    with engine(folder, max_num_seqs=16) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False) for prompt in prompts for params in (greedy, drawn)]
        mixed = llm.generate(
            [prompts[0], one.prompt, prompts[0], two.prompt, prompts[1], prompts[1]],
            [greedy, one.params(), drawn, two.params(), greedy, drawn],
            use_tqdm=False,
        )
        ours = [(choice.token_ids, choice.cumulative_logprob / len(choice.token_ids)) for choice in mixed[1].outputs]
        check_beams(ours, its_beams, "among others")
    found = [mixed[at] for at in (0, 2, 4, 5)]
    for (apart,), beside in zip(alone, found, strict=True):
        assert [(c.token_ids, c.logprobs) for c in apart.outputs] == [(c.token_ids, c.logprobs) for c in beside.outputs]


def test_eight_choices_and_eight_beams_hold_the_prompt_once(model):
    """A prompt of 42 tokens has 10 full pages of 4 and one that is half full; 10 more tokens take 13 pages in all."""
    folder, _ = model
    prompt = [at % VOCABULARY for at in range(42)]
    for params in (
        SamplingParams(n=8, max_tokens=10, temperature=1.0, seed=1, ignore_eos=True),
        SamplingParams(n=8, max_tokens=10, use_beam_search=True, ignore_eos=True),
    ):
        with engine(folder, enable_prefix_caching=False) as llm:
            pool = llm._loop.scheduler.cache.pool
            assert pool.num_used == 0
            llm.generate([prompt], params, use_tqdm=False)
            # 10 pages that all share and at most 3 of its own for each; without sharing it would be 8 × 13 = 104.
            assert 11 <= llm.engine_stats()["pages_used_peak"] <= 10 + 8 * 3
            assert pool.num_used == 0


def test_the_python_interface_is_vllms(model):
    folder, reference = model
    case = Case([3, 1, 4, 1, 5], 3, 6)
    want = transformers_beams(reference, case)
    with engine(folder) as llm:
        (found,) = llm.beam_search([case.prompt], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    assert [sequence.tokens for sequence in found.sequences] == [case.prompt + tokens for tokens, _ in want]
    best = found.sequences[0]
    assert best.cum_logprob == pytest.approx(want[0][1] * 6, abs=1e-3) and best.finish_reason == "length"
    assert sum(next(iter(entry.values())).logprob for entry in best.logprobs) == pytest.approx(
        best.cum_logprob, abs=1e-4
    )


def test_one_beam_is_greedy(model):
    with engine(model[0]) as llm:
        params = {"max_tokens": 20, "ignore_eos": True}
        beam, greedy = (
            llm.generate([[1, 2, 3]], SamplingParams(**way, **params), use_tqdm=False)[0].outputs[0].token_ids
            for way in ({"use_beam_search": True}, {"temperature": 0.0})
        )
    assert beam == greedy


def test_the_best_of_several_are_the_likeliest(model):
    folder, _ = model
    params = {"temperature": 1.0, "seed": 7, "max_tokens": 8, "ignore_eos": True}
    with engine(folder) as llm:
        (every,) = llm.generate([[1, 2, 3]], SamplingParams(n=6, logprobs=0, **params), use_tqdm=False)
        (best,) = llm.generate([[1, 2, 3]], SamplingParams(n=2, best_of=6, **params), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda choice: -choice.cumulative_logprob)
    assert [choice.token_ids for choice in best.outputs] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.index for choice in best.outputs] == [0, 1] and not best.outputs[0].logprobs


def test_an_answer_that_loops_is_ended(model):
    folder, _ = model
    loops = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "logit_bias": {7: 100.0}}
    with engine(folder) as llm:
        (found,) = llm.generate([[1, 2, 3]], SamplingParams(repetition_detection=loops, **params), use_tqdm=False)
        (later,) = llm.generate(
            [[1, 2, 3]], SamplingParams(repetition_detection=loops, min_tokens=9, **params), use_tqdm=False
        )
    choice = found.outputs[0]
    assert (choice.token_ids, choice.finish_reason) == ([7, 7, 7], "repetition")
    assert len(later.outputs[0].token_ids) == 9


def test_a_search_that_cannot_fit_is_refused(model):
    pages = 65 * 4 * 2 * 2 * 2 * 8 * 4
    with engine(model[0], max_num_seqs=8, kv_cache_memory_bytes=pages, max_model_len=200) as llm:
        for params, named in (
            (SamplingParams(use_beam_search=True, ignore_eos=True, n=9), "n must be at most 8"),
            (
                SamplingParams(use_beam_search=True, ignore_eos=True, n=8, max_tokens=150),
                "can take 304 KV pages, but there are only",
            ),
        ):
            with pytest.raises(InvalidRequest, match=named):
                llm.generate([[1, 2]], params, use_tqdm=False)
        # Choices need not run together: those that find no row wait.
        (found,) = llm.generate([[1, 2]], SamplingParams(best_of=9, ignore_eos=True, max_tokens=2), use_tqdm=False)
        assert len(found.outputs[0].token_ids) == 2
        with pytest.raises(InvalidRequest, match="priority must be 0 here, got 3"):
            llm.generate([[1, 2]], SamplingParams(ignore_eos=True), use_tqdm=False, priority=[3])
        # A default is not a wish: it shrinks to what eight beams can have.
        wide = SamplingParams(use_beam_search=True, ignore_eos=True, n=8, max_tokens=None)
        (found,) = llm.generate([[1, 2]], wide, use_tqdm=False)
        assert len(found.outputs) == 8 and all(len(choice.token_ids) == 30 for choice in found.outputs)
