"""Layers over several stages, experts over ranks, and both with tensor parallelism: whatever is asked for, the tokens of one rank."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.config import Config, ParallelConfig, replace
from octavo.errors import ConfigError, EngineDead
from octavo.offline.outputs import RequestOutput
from octavo.spec import ModelSpec
from octavo.weights.sources.source import local
from octavo.worker.load import Loader, check_parallel
from tests.doubles import write_byte_tokenizer
from tests.processes import is_alive
from tests.worker.tiny import write_tiny_llama

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "cpu_threads": 1,
    "kv_cache_memory_bytes": 2**20,
    "swap_space": 0.001,
}
VOCAB = 262
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staged") / "model"
    write_tiny_llama(folder, seed=4, vocab_size=VOCAB, num_layers=LAYERS, is_tied=True)
    write_byte_tokenizer(folder)
    return folder


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Every kind of request, more of them than there are rows; prompts longer than a step."""
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=9, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=5, max_tokens=14, presence_penalty=0.8, frequency_penalty=0.4),
        SamplingParams(temperature=0.8, seed=6, n=3, max_tokens=10, repetition_penalty=1.3, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[ab]{4,9}c")),
        SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=7, logit_bias={5: 4.0}, min_tokens=5),
    ]
    return [([(7 * at + 3 * i) % 250 for i in range(1 + 5 * at % 40)], kinds[at % len(kinds)]) for at in range(21)]


def plain(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [
            (choice.token_ids, choice.finish_reason, _scores(choice.logprobs), _scores(output.prompt_logprobs))
            for choice in output.outputs
        ]
        for output in outputs
    ]


def _scores(logprobs: Any) -> Any:
    if not logprobs:
        return None
    return [
        None if at is None else {token: round(float(score.logprob), 3) for token, score in at.items()}
        for at in logprobs
    ]


def answers(llm: LLM) -> tuple[list[Any], list[list[float]]]:
    prompts, params = zip(*asked(), strict=True)
    found = plain(llm.generate(list(prompts), list(params), use_tqdm=False))
    vectors = [output.embedding for output in llm.embed(list(prompts[:3]), pooling="mean", use_tqdm=False)]
    return found, [[round(number, 4) for number in vector] for vector in vectors]


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Any, Any]:
    with LLM(str(folder), **OPTIONS) as llm:
        return answers(llm), llm.report


@pytest.fixture(scope="module")
def staged(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, pipeline_parallel_size=2) as llm:
        yield llm


def test_two_stages_give_one_ranks_answers(staged: LLM, alone: tuple[Any, Any]) -> None:
    expected, report = alone
    assert answers(staged) == expected
    found = staged.report
    assert (found.num_stages, report.num_stages) == (2, 1)
    assert found.fingerprint == report.fingerprint, "no bit depends on the stages"
    # The memory of both ranks is counted: all layers once, the tied table in both.
    assert found.page_bytes == report.page_bytes and found.num_pages == report.num_pages
    assert found.weights_bytes == pytest.approx(report.weights_bytes + VOCAB * 32 * 4, rel=0.1)
    notes = "\n".join(found.notes)
    assert "2 pipeline stages of" in notes and "rank 0 (stage 0)" in notes and "rank 1 (stage 1)" in notes


def test_several_plans_are_in_flight(staged: LLM) -> None:
    loop = staged._loop
    most = 0
    submit = loop.executor.submit

    def count(plan: Any) -> None:
        nonlocal most
        submit(plan)
        most = max(most, 1 + len(loop._in_flight))

    loop.executor.submit = count  # type: ignore[method-assign]
    try:
        staged.generate([[at] for at in range(8)], SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
    finally:
        loop.executor.submit = submit  # type: ignore[method-assign]
    assert most == 3


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline_parallel_size": 4, "pipeline_layer_split": "1,1,1,1"},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "enforce_eager": True},
    ],
    ids=["four stages", "two by two", "without tapes"],
)
def test_other_ways_to_divide_it_give_the_same_tokens(
    folder: Path, alone: tuple[Any, Any], sizes: dict[str, Any]
) -> None:
    with LLM(str(folder), **OPTIONS, **sizes) as llm:
        found = answers(llm)[0]
    tokens = [[(choice[0], choice[1]) for choice in output] for output in found]
    assert tokens == [[(choice[0], choice[1]) for choice in output] for output in alone[0][0]]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_stage_is_the_engines_death_at_once(folder: Path, victim: int) -> None:
    llm = LLM(str(folder), **OPTIONS, pipeline_parallel_size=2)
    pids = [rank._process.pid for rank in llm._loop.executor._ranks]  # type: ignore[attr-defined]
    try:
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(EngineDead, match=f"rank {victim} was killed by signal 9"):
            llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=50), use_tqdm=False)
    finally:
        llm.close()
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"pipeline_parallel_size": 5}, "--pipeline-parallel-size 5 is more than this model's 4 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_split": "3,2"}, "must have 2 numbers above 0"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "a llama model has none: leave it out"),
    ],
)
def test_what_does_not_divide_is_refused_in_one_line(folder: Path, sizes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        Loader(replace(Config(), device="cpu", **sizes), local(folder)).open()
    assert "\n" not in refused.value.message


def test_an_encoder_is_not_divided_into_stages(tmp_path: Path) -> None:
    described = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    described |= {"intermediate_size": 32, "vocab_size": VOCAB, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = replace(Config(), device="cpu", load_format="dummy", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="an encoder such as bert is not divided into stages"):
        Loader(config, local(tmp_path, allow_missing_weights=True)).open()


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    spec = ModelSpec("mixtral", 2, 16, 2, 2, 8, 32, 100, 64, num_experts=6)
    check_parallel(spec, ParallelConfig(tensor_parallel_size=3, enable_expert_parallel=True))
    with pytest.raises(
        ConfigError, match=r"4 ranks .* do not divide this model's 6 experts; sizes that do: 1, 2, 3, 6$"
    ):
        check_parallel(spec, ParallelConfig(tensor_parallel_size=4, enable_expert_parallel=True))
