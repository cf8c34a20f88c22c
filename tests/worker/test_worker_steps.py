"""A step's tokens do not depend on batch mates, chunks, page numbers, swaps or preemptions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.executor.local import LocalExecutor
from octavo.messages import EngineReport, SamplingParams
from tests.worker.tiny import GREEDY, MIXED, PAGE_SIZE, Driver, random_prompts, tiny_config, write_tiny_llama

NUM_TOKENS = 24
PROMPTS = random_prompts(6, seed=11)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalExecutor, EngineReport]]:
    source = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    executor = LocalExecutor(tiny_config(swap_space=0.001), source)
    yield executor, executor.start()
    executor.close()


@pytest.fixture
def driver(started: tuple[LocalExecutor, EngineReport]) -> Driver:
    executor, report = started
    return Driver(executor, report.num_pages, seed=1)


@pytest.fixture(scope="module")
def expected(started: tuple[LocalExecutor, EngineReport]) -> list[list[int]]:
    """Every prompt alone, its prompt in one piece."""
    driver = Driver(started[0], started[1].num_pages)
    outputs = []
    for i, prompt in enumerate(PROMPTS):
        sequence = driver.enter(2, prompt, MIXED[i], seed=100 + i)
        outputs += driver.generate([sequence], NUM_TOKENS)
        driver.release(sequence)
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    assert all(len(set(output)) > 3 for output in outputs), "a model that repeats itself would hide mistakes"
    return outputs


def test_report_says_what_there_is(started: tuple[LocalExecutor, EngineReport]) -> None:
    report = started[1]
    assert (report.device, report.dtype, report.vocab_size) == ("cpu (1 thread)", "float32", 161)
    assert (report.max_model_len, report.max_num_seqs, report.page_size) == (128, 8, PAGE_SIZE)
    assert report.page_bytes == 2 * 2 * 2 * 8 * 4 * PAGE_SIZE  # layers, K and V, heads, head size, float32
    assert report.num_pages == 8 * 128 // PAGE_SIZE
    assert report.num_host_pages == int(0.001 * 2**30) // report.page_bytes
    assert report.weights_bytes > 0
    assert report.notes


def test_batched_equals_one_by_one(driver: Driver, expected: list[list[int]]) -> None:
    rows = [5, 0, 7, 2, 1, 3]
    together = [driver.enter(rows[i], prompt, MIXED[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
    assert driver.generate(together, NUM_TOKENS) == expected


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunked_equals_whole(driver: Driver, expected: list[list[int]], chunk: int) -> None:
    together = [driver.enter(i, prompt, MIXED[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
    assert driver.generate(together, NUM_TOKENS, chunk) == expected


def test_late_comers_and_reused_rows_change_nothing(driver: Driver, expected: list[list[int]]) -> None:
    first = driver.enter(4, PROMPTS[0], MIXED[0], 100)
    driver.generate([first], 5)
    second = driver.enter(0, PROMPTS[1], MIXED[1], 101)
    driver.generate([first, second], 10)
    driver.release(second)
    third = driver.enter(0, PROMPTS[2], MIXED[2], 102)  # the row and some of the pages of the one that left
    assert driver.generate([first, third], NUM_TOKENS) == [expected[0], expected[2]]


def test_entering_with_history_equals_never_having_left(driver: Driver, expected: list[list[int]]) -> None:
    for i, prompt in enumerate(PROMPTS):
        sequence = driver.enter(1, prompt, MIXED[i], 100 + i)
        driver.generate([sequence], 9)
        driver.release(sequence)
        again = driver.enter(6, sequence.tokens, MIXED[i], 100 + i, prompt_len=len(prompt))
        assert driver.generate([again], NUM_TOKENS, chunk=5) == [expected[i]]
        driver.release(again)


def test_swapped_out_and_in_equals_never_having_left(driver: Driver, expected: list[list[int]]) -> None:
    swapped = driver.enter(1, PROMPTS[2], MIXED[2], 102)
    other = driver.enter(3, PROMPTS[3], MIXED[3], 103)
    driver.generate([swapped, other], 7)
    for host, page in enumerate(swapped.pages):
        driver.move("out", page, 10 + host)
    left = swapped.pages
    driver.release(swapped)
    # In the very step that swaps it out, another takes its pages (the last freed) and overwrites them.
    intruder = driver.enter(1, PROMPTS[4] * 3, GREEDY, 0)
    assert set(intruder.pages) & set(left)
    driver.generate([other, intruder], 12)
    swapped.pages = [driver.free.pop(0) for _ in left]
    for host, page in enumerate(swapped.pages):
        driver.move("in", 10 + host, page)
    driver.return_to(5, swapped)
    assert driver.generate([swapped, other], NUM_TOKENS) == [expected[2], expected[3]]


def test_copied_pages_serve_a_fork(driver: Driver, expected: list[list[int]]) -> None:
    """Two rows share a prompt's full pages; the page in which they part is copied before either writes to it."""
    parent = driver.enter(0, PROMPTS[0], MIXED[0], 100)
    driver.generate([parent], 1)
    child = driver.enter(1, PROMPTS[0], MIXED[0], 100)
    shared = (len(PROMPTS[0]) - 1) // PAGE_SIZE
    copied = child.pages[shared]
    child.pages[:shared] = parent.pages[:shared]
    driver._entering[-1].pages[0][:] = child.pages
    driver.move("copy", parent.pages[shared], copied)
    child.computed = len(PROMPTS[0]) - 1
    assert driver.generate([parent, child], NUM_TOKENS) == [expected[0], expected[0]]


def test_a_step_ahead_feeds_tokens_that_the_host_has_not_seen(driver: Driver, expected: list[list[int]]) -> None:
    both = [driver.enter(i, PROMPTS[i], MIXED[i], 100 + i) for i in range(2)]
    driver.submit(*((sequence, len(sequence.tokens)) for sequence in both))
    for _ in range(NUM_TOKENS - 1):
        driver.submit(*((sequence, 1) for sequence in both))
        driver.collect()
    driver.collect()
    assert [sequence.output for sequence in both] == expected[:2]


def test_a_step_may_move_pages_and_advance_nobody(driver: Driver) -> None:
    driver.move("copy", 0, 1)
    driver.step()
    sequence = driver.enter(0, [1, 2, 3, 4, 5], GREEDY, 0)
    driver.step((sequence, 2))  # advances, samples nothing
    assert sequence.output == []


def test_the_last_position_of_the_context_can_be_sampled(driver: Driver) -> None:
    sequence = driver.enter(7, list(range(100)), SamplingParams(temperature=1.0), 7)
    (output,) = driver.generate([sequence], 28)
    assert len(output) == 28
    # A step planned before the end was known reaches one further: of the last row, beyond a table without room for it.
    driver.step((sequence, 1))
    assert len(sequence.output) == 29


def test_dummy_weights_need_none_on_disk(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "llama")
    (tmp_path / "llama" / "model.safetensors").unlink()
    outputs = []
    for _ in range(2):
        executor = LocalExecutor(tiny_config(load_format="dummy"), source)
        driver = Driver(executor, executor.start().num_pages)
        outputs += driver.generate([driver.enter(0, PROMPTS[0], GREEDY, 0)], 5)
        executor.close()
    assert outputs[0] == outputs[1]
