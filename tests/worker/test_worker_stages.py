"""A rank's part of a pipeline: tapes of one stage, weights and pages of its own layers, plans that bring the tokens."""

from pathlib import Path

import pytest

from octavo.executor.local import LocalExecutor
from octavo.weights.sources.source import ModelSource
from tests.worker.staged import StagedExecutor
from tests.worker.tiny import MIXED, Driver, random_prompts, tiny_config, write_tiny_llama

PROMPTS = random_prompts(6, seed=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder: Path = tmp_path_factory.mktemp("staged") / "llama"
    return write_tiny_llama(folder, seed=6, num_layers=5, is_tied=True)


def tokens_of(executor: LocalExecutor | StagedExecutor) -> list[list[int]]:
    report = executor.start()
    driver = Driver(executor, report.num_pages, num_stages=report.num_stages)
    sequences = [driver.enter(i, p, MIXED[i], i) for i, p in enumerate(PROMPTS)]
    found = driver.generate(sequences, 10, chunk=7)
    executor.close()
    return found


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["tapes", "eager"])
def test_stages_give_the_tokens_of_one_rank(source: ModelSource, num_stages: int, enforce_eager: bool) -> None:
    config = tiny_config(dtype="float32", enforce_eager=enforce_eager)
    expected = tokens_of(LocalExecutor(config, source))
    staged = StagedExecutor(config, source, num_stages)
    assert tokens_of(staged) == expected
    assert all((runner.steps is None) == enforce_eager for runner in staged.runners)


def test_a_stage_holds_its_own_layers_and_their_pages_only(source: ModelSource) -> None:
    config = tiny_config(dtype="float32")
    whole = LocalExecutor(config, source)
    report = whole.start()
    whole.close()
    staged = StagedExecutor(config, source, 5)
    found = staged.start()
    staged.close()
    assert found.num_stages == 5 and found.page_bytes == report.page_bytes
    layers = [runner.model.layer_numbers for runner in staged.runners]
    assert layers == [range(at, at + 1) for at in range(5)]
    first, *between, last = (runner.model for runner in staged.runners)
    assert first.embedding is not None and last.embedding is not None, "the table is tied"
    assert all(model.embedding is None for model in between)
    assert all(model.weights_bytes < 0.5 * report.weights_bytes for model in (first, *between, last))
    assert len({model.weights_bytes for model in between}) == 1
