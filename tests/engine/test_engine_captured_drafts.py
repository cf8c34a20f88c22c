"""Drafts where steps are captured, as on a GPU: a step that verifies them is one of more rows, and so are a draft model's passes. The graphs
are computed operation by operation here, on a CPU, where no bit depends on how tokens are divided into steps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.speculation.identity import Campaign
from octavo import LLM, SamplingParams
from octavo.engine.build import Engine
from octavo.messages import most_samples
from octavo.schedule.step_costs import VERIFY_TOKENS
from octavo.weights.sources.source import local
from octavo.worker.draft_head import HeadDrafter
from octavo.worker.trial_steps import TrialSteps
from tests.doubles import write_byte_tokenizer
from tests.draft_heads import DraftsMade, Eagle3Reference, MTPReference, few_tokens_of, write_eagle3, write_mtp
from tests.worker.eager_graphs import EagerGraphs
from tests.worker.tiny import disturbed, write_tiny_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    source = write_tiny_llama(folder, vocab_size=258)
    write_byte_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 320}))
    return source


def capture(loop: Any, max_rows: int) -> list[EagerGraphs]:
    """Have the engine's steps, and the passes of its draft model, run as if they were captured."""
    runner = loop.executor._runner
    loop.executor._thread.shutdown()
    loop.executor._thread = None  # steps are launched as on a GPU
    loop.executor.overlap = True  # and the next plan is made while one is in flight
    draft, most = runner.draft, most_samples(max_rows)
    given = (draft._features, draft._vocab_size) if isinstance(draft, HeadDrafter) else ()
    runner.graphs = EagerGraphs(runner.rows, runner.model, runner.staging, most, *given)
    found = [runner.graphs]
    if draft is not None:
        draft.graphs = EagerGraphs(runner.rows, draft.model, runner.staging, most, *given)
        found.append(draft.graphs)
    return found


class Captured(Campaign):
    """With engines that replay."""

    num_replays = 0

    def _start(self, speculative: str, with_tokens: bool) -> tuple[Engine, Path]:
        engine, folder = super()._start(speculative, with_tokens)
        self.graphs = capture(engine.loop, self.options["max_num_seqs"])
        return engine, folder

    def _end(self, engine: Engine, folder: Path) -> None:
        self.num_replays += sum(len(each.sizes) for each in self.graphs)
        super()._end(engine, folder)


OPTIONS = {"kv_cache_memory_bytes": 3 * 2**16, "max_model_len": 320, "cpu_threads": 1, "enforce_eager": True}


def test_drafts_change_nothing(source, tmp_path):
    campaign = Captured(source, OPTIONS, tmp_path)
    campaign.check(2, 24, ["ngram", "suffix"])
    seen = campaign.seen
    assert not seen.different, seen.different[0]
    assert seen.drafted > 300 and seen.accepted > 100 and seen.drafted - seen.accepted > 100, seen
    assert seen.preemptions > 5 and seen.deaths > 0 and campaign.num_replays > 500, seen


def test_drafts_of_a_model_change_nothing(source, tmp_path):
    draft = disturbed(source, tmp_path / "draft", 0.01)
    campaign = Captured(source, OPTIONS, tmp_path, str(draft))
    campaign.check(3, 40, ["draft_model"])
    seen = campaign.seen
    assert not seen.different, seen.different[0]
    assert seen.drafted > 300 and seen.accepted > 100 and seen.drafted - seen.accepted > 100, seen
    assert seen.preemptions > 5 and seen.deaths > 0 and campaign.num_replays > 500, seen


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_the_model_drafts_for_itself_is_always_right(source, temperature):
    model = str(source.path)
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": 4, "adaptive": False}
    options = {
        "page_size": 4,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 2**18,
        "cpu_threads": 1,
        "enforce_eager": True,
    }
    with LLM(model, speculative_config=json.dumps(config), **options) as llm:
        graphs, drafting = capture(llm._loop, 4)
        results = []
        collect = llm._loop.executor.collect
        llm._loop.executor.collect = lambda: results.append(collect()) or results[-1]
        params = [SamplingParams(temperature=temperature, seed=at, max_tokens=30, ignore_eos=True) for at in range(3)]
        llm.generate([[1, 2, 3], [4] * 9, [5, 6] * 12], params, use_tqdm=False)
    runs = [run for result in results for run in result.runs]
    assert runs == [1 + count for result in results for count in result.drafted], "a wrong key or value was read"
    assert runs.count(5) > 10
    assert 15 in graphs.sizes, "three rows that verify four tokens"
    assert 6 in drafting.sizes, "three rows that lack a token, and their own last one"


@pytest.fixture(scope="module")
def heads(source, tmp_path_factory):
    """For each kind of draft head: the model, the head's folder, what it must say, and two of its tokens."""
    folder = tmp_path_factory.mktemp("heads")
    write_mtp(folder / "deepseek")
    write_byte_tokenizer(folder / "deepseek")
    eagle3 = write_eagle3(folder / "eagle3", source.path, tapped=[0, 1, 2])
    return {
        "eagle3": (source, str(eagle3), Eagle3Reference(source.path, eagle3), few_tokens_of(eagle3)),
        "mtp": (local(folder / "deepseek"), "", MTPReference(folder / "deepseek"), [7, 100]),
    }


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_a_head_drafts_is_what_its_reference_drafts(heads, kind):
    """Features are written by captured steps, read by captured passes, and the head's own are chained in them."""
    model, head, reference, two = heads[kind]
    config = {"method": kind, "num_speculative_tokens": 4, "adaptive": False} | ({"model": head} if head else {})
    options = {"page_size": 4, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**21, "cpu_threads": 1}
    with LLM(str(model.path), speculative_config=json.dumps(config), enforce_eager=True, **options) as llm:
        graphs, drafting = capture(llm._loop, 4)
        made = DraftsMade(llm._loop.executor._runner.draft)
        prompts = [[1, 2, 3], [4] * 9, [5, 6] * 12, [7]]
        # With two tokens alone, a random head is right half the time, and then lacks the tokens that it was right about.
        for among in ((), two):
            bias = dict.fromkeys(among, 90.0) or None
            params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=bias)
            llm.generate(prompts, params, use_tqdm=False)
            assert sum(len(tokens) == 4 for _, tokens in made.found) > 30
            assert not made.different(reference, among)
            made.found.clear()
    assert max(drafting.sizes) > 5, "rows that lack tokens"
    assert max(graphs.sizes) > 12, "rows that verify tokens"


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_drafts_of_a_head_change_nothing(heads, tmp_path, kind):
    model, head, _, two = heads[kind]
    memory = {"eagle3": 3 * 2**16, "mtp": 3 * 2**17}[kind]
    options = OPTIONS | {"kv_cache_memory_bytes": memory}
    campaign = Captured(model, options, tmp_path, eagle3=head, has_mtp=kind == "mtp")
    campaign.leaning = two
    campaign.check(3, 40, [kind])
    seen = campaign.seen
    assert not seen.different, seen.different[0]
    assert seen.drafted > 300 and seen.accepted > 25 and seen.drafted - seen.accepted > 100, seen
    assert seen.preemptions > 2 and seen.deaths > 0 and campaign.num_replays > 500, seen


def test_steps_and_passes_are_timed_as_they_are_replayed(source):
    model = str(source.path)
    config = {"method": "draft_model", "model": model}
    with LLM(model, speculative_config=json.dumps(config), max_num_seqs=4, enforce_eager=True, cpu_threads=1) as llm:
        graphs, drafting = capture(llm._loop, 4)
        runner = llm._loop.executor._runner
        limits = SimpleNamespace(max_model_len=128, max_num_batched_tokens=64)
        trials = TrialSteps(runner, None, limits)
        with torch.inference_mode():
            assert min(trials.time_one_row(), trials.time_verification(), trials.time_draft()) > 0
        assert set(graphs.sizes) == {1, VERIFY_TOKENS} and set(drafting.sizes) == {1}
        assert not runner.rows.tokens.any(), "what they have sampled is no request's"
        [answer] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) > 1


def test_a_step_with_drafts_is_computed_while_tokens_are_handed_on(source):
    """It is in flight between two calls of the loop's step(), and taken in before the next plan."""
    config = '{"method": "ngram", "num_speculative_tokens": 5, "adaptive": false}'
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(source.path), speculative_config=config, max_num_seqs=4, enforce_eager=True, cpu_threads=1) as llm:
        loop: Any = llm._loop
        capture(loop, 4)
        [answer] = llm.generate([[1, 2, 3]], plain, use_tqdm=False)
        tokens = answer.outputs[0].token_ids
        between: list[bool] = []
        step, submit = loop.step, loop.executor.submit

        def stepped():
            deltas = step()
            between.extend(bool(plan.drafts) for plan in loop._in_flight)
            return deltas

        def submitted(plan):
            assert not any(other.drafts for other in loop._in_flight), "its tokens are not known"
            submit(plan)

        loop.step, loop.executor.submit = stepped, submitted
        predicted = msgspec.structs.replace(plain, prediction_ids=tuple(tokens))
        [again] = llm.generate([[1, 2, 3]], predicted, use_tqdm=False)
        assert again.outputs[0].token_ids == tokens
        assert sum(between) > 5 and not loop.has_work
