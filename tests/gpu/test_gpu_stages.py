"""Stages of a pipeline on a GPU, both on the one that is here: graphs of one stage, with hidden states in and out."""

from pathlib import Path

import pytest

from octavo.executor.local import LocalExecutor
from tests.worker.staged import StagedExecutor
from tests.worker.tiny import GREEDY, Driver, random_prompts, tiny_config, write_tiny_llama

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts(6, seed=2)


def tokens_of(executor: LocalExecutor | StagedExecutor) -> list[list[int]]:
    report = executor.start()
    driver = Driver(executor, report.num_pages, num_stages=report.num_stages)
    found = driver.generate([driver.enter(i, p, GREEDY, i) for i, p in enumerate(PROMPTS)], 12)
    executor.close()
    return found


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_two_stages_give_the_tokens_of_one_rank(tmp_path: Path, enforce_eager: bool) -> None:
    source = write_tiny_llama(tmp_path / "llama", seed=6, num_layers=4, num_heads=2)  # graphs need heads of 16 numbers
    config = tiny_config(device="cuda", dtype="float32", enforce_eager=enforce_eager, gpu_memory_utilization=0.3)
    expected = tokens_of(LocalExecutor(config, source))
    staged = StagedExecutor(config, source, 2)
    assert tokens_of(staged) == expected
    for runner in staged.runners:
        assert (runner.graphs is None) == enforce_eager
        if runner.graphs is not None:
            assert runner.graphs.num_captured
