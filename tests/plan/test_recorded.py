"""Recordings as traces, and the steps that a StepModel is fitted to."""

from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.cli.planning.traces import load_trace, recorded_trace
from octavo.plan.fleet import simulate
from octavo.plan.recorded import Measured
from octavo.plan.settings import FleetSettings, ReplicaSettings
from octavo.plan.step_model import StepModel, fit_model
from octavo.recording.format import read
from tests.recording.recorded import Recorded
from tests.schedule.workload import Workload

MODEL = StepModel([1, 8], [0.005, 0.006], 1e-4, 3e-7, 2e-7)


def recorded(folder: Path, seed: int, with_tokens: bool, **kinds: bool) -> Workload:
    load = Workload(seed, **kinds)
    run = Recorded(load, folder, with_tokens, aborts=False)
    arrivals = [source for _, source in load.arrivals]
    run.run()
    run.loop.close()
    load.arrivals = [(0, source) for source in arrivals]
    return load


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_recording_becomes_a_trace_without_text(tmp_path, with_tokens):
    found_shared = 0
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        load = recorded(folder, seed, with_tokens)
        trace = recorded_trace(folder)
        generating = [source for _, source in load.arrivals if source.pooling is None]
        assert len(trace.requests) == sum(source.params.n for source in generating)
        prompts = sorted(len(source.prompt_ids) for source in generating for _ in range(source.params.n))
        assert sorted(each.prompt_len for each in trace.requests) == prompts
        assert all(1 <= each.output_len <= 20 for each in trace.requests) and trace.block_size == load.page_size
        firsts = [each.prefix[0] for each in trace.requests if each.prefix]
        found_shared += len(firsts) - len(set(firsts))
    assert found_shared > 5, "prompts with equal beginnings keep that"


def test_equal_prefixes_are_equal_and_others_are_not(tmp_path):
    """With caching and tokens, the number of different first blocks is the number of different first pages."""
    checked = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        load = recorded(folder, seed, True)
        trace = recorded_trace(folder)
        size = load.page_size
        sources = [source for _, source in load.arrivals if source.pooling is None and len(source.prompt_ids) > size]
        pages = {tuple(source.prompt_ids[:size]) for source in sources}
        assert len({each.prefix[0] for each in trace.requests if each.prefix}) == len(pages)
        checked += len(sources)
    assert checked > 30


def test_the_command_writes_a_file_that_can_be_planned_with(tmp_path, capsys):
    folder = tmp_path / "live-1"
    folder.mkdir()
    recorded(folder, 3, False)
    path = tmp_path / "trace.jsonl"
    assert main(["plan", "record", str(folder), "--output", str(path)]) == 0
    assert "no text" in capsys.readouterr().err
    trace = load_trace(str(path))
    replica = ReplicaSettings(4, 64, 100, 100, page_size=4)
    assert simulate(trace, FleetSettings(1, replica, MODEL)).num_done == len(trace.requests)


def test_steps_of_a_recording_have_their_times(tmp_path):
    """The oracle's clock: 20 µs for each row, and 10 µs for each further token."""
    samples = []
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        recorded(folder, seed, False, has_limit=True)
        samples += Measured(read(folder)).samples()
    assert len(samples) > 200
    assert sum(sample.wakes for sample in samples) > 30 and any(sample.after_first == 0.25 for sample in samples)
    found = fit_model(samples)
    assert found.median_error < 0.05
    for rows, more in ((1, 0), (4, 0), (2, 20)):
        seconds = found.model.products(rows + more) + found.model.row * rows
        assert abs(seconds / (2e-5 * rows + 1e-5 * more) - 1) < 0.1, (rows, more)


def test_a_recording_says_from_how_many_rows_on_plans_are_made_ahead(tmp_path):
    found = set()
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        recorded(folder, seed, False)
        recording = read(folder)
        learned = Measured(recording).learned
        assert (learned.overlap_rows > 0) == (
            learned.depth > 0
        ) and learned.overlap_rows <= recording.header.report.max_num_seqs
        found.add(learned.overlap_rows)
    assert 0 in found and 1 in found
