"""Drafts on a GPU: steps that verify them are replayed, and so are a draft model's passes. With --deterministic no bit depends on it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.speculation.identity import ON_GPU, Campaign, write_small_model
from octavo import LLM, SamplingParams
from octavo.messages import StepResult
from octavo.weights.sources.source import ModelSource
from tests.worker.tiny import disturbed

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {**ON_GPU, "device": "cuda", "kv_cache_memory_bytes": 2**21}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return write_small_model(tmp_path_factory.mktemp("models") / "model")


def drafting_itself(source: ModelSource) -> str:
    config = {"method": "draft_model", "model": str(source.path), "num_speculative_tokens": 5, "adaptive": False}
    return json.dumps(config)


def test_requests_of_every_kind_are_the_same_to_the_bit(source: ModelSource, tmp_path: Path) -> None:
    draft = disturbed(source, tmp_path / "draft", 0.01)
    campaign = Campaign(source, {**OPTIONS, "deterministic": True}, tmp_path, str(draft))  # stored in float32
    campaign.deaths = 0.001
    campaign.check(1, 60, ["ngram", "suffix", "draft_model"])
    seen = campaign.seen
    assert not seen.different, seen.different[0]
    assert seen.accepted > 300 and seen.drafted - seen.accepted > 300 and seen.captured_steps > 10, seen


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_what_a_model_drafts_for_itself_is_always_right(source: ModelSource, params: SamplingParams) -> None:
    results: list[StepResult] = []
    with LLM(str(source.path), deterministic=True, speculative_config=drafting_itself(source), **OPTIONS) as llm:
        executor: Any = llm._loop.executor
        collect = executor.collect
        executor.collect = lambda: results.append(collect()) or results[-1]  # type: ignore[func-returns-value]
        llm.generate([[1, 2, 3], [4] * 40, [5, 6] * 60], [params] * 3, use_tqdm=False)
        sizes = {key.num_rows for key in executor._runner.draft.graphs._captured}
    runs = [run for result in results for run in result.runs]
    assert runs == [1 + count for result in results for count in result.drafted], "a wrong key or value was read"
    assert runs.count(6) > 10 and len(sizes) > 1


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
def test_a_prediction_takes_fewer_steps_for_the_same_tokens(source: ModelSource, is_greedy: bool) -> None:
    """Wherever it is wrong, with captured steps and without."""
    plain_params = GREEDY if is_greedy else SEEDED
    config = '{"method": "ngram", "num_speculative_tokens": 7, "adaptive": false}'
    for is_eager in (False, True):
        with LLM(
            str(source.path), deterministic=True, speculative_config=config, enforce_eager=is_eager, **OPTIONS
        ) as llm:
            prompt = list(range(7, 30))
            [plain] = llm.generate([prompt], _with(plain_params, ()), use_tqdm=False)
            answer = plain.outputs[0]
            for right in (0, 1, 5, 17, 39):
                prediction = (*answer.token_ids[:right], 7, *answer.token_ids[right + 1 :])
                steps = llm._loop.scheduler.num_steps
                [ours] = llm.generate([prompt], _with(plain_params, prediction), use_tqdm=False)
                assert ours.outputs[0].token_ids == answer.token_ids
                assert ours.outputs[0].logprobs == answer.logprobs
                assert llm._loop.scheduler.num_steps - steps < 20


def test_costs_are_known_from_the_start(source: ModelSource) -> None:
    config = json.dumps({"method": "draft_model", "model": str(source.path)})
    with LLM(str(source.path), speculative_config=config, **OPTIONS) as llm:
        report = llm.report
        assert 0 < report.one_row_seconds < 0.1 and 0 < report.verify_seconds < 0.1 and 0 < report.draft_seconds < 0.1


def _with(params: SamplingParams, prediction: tuple[int, ...]) -> SamplingParams:
    return msgspec.structs.replace(params, prediction_ids=prediction, use_speculation=bool(prediction))
