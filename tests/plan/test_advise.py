"""What other limits would have done for a recorded load: rows that were too few, and limits that held nothing up."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from octavo.cli.main import main
from octavo.cli.planning.traces import anonymous_names
from octavo.errors import EngineUnavailable, NotFound
from octavo.plan.advise import Hint, advise
from octavo.recording.format import read
from octavo.server.endpoints.live import LiveHint
from octavo.server.state import hints
from octavo.server.state.hints import Hints
from tests.plan.test_recorded import recorded


def hints_of(tmp_path: Path, seeds: range) -> list[Hint]:
    found = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        recorded(folder, seed, True)
        found.append(advise(read(folder), anonymous_names()))
    return found


def test_outcomes_begin_with_what_is_and_change_one_flag_each(tmp_path):
    hints = [hint for hint in hints_of(tmp_path, range(12)) if hint.text]
    assert len(hints) >= 3
    for hint in hints:
        now, *others = hint.outcomes
        assert now.flag == "" and {each.flag for each in others} <= {
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--max-inter-token-ms",
        }
        best = min(each.ttft_p99 for each in others)
        is_better = best <= 0.8 * now.ttft_p99 and now.ttft_p99 - best >= 0.05
        assert ("instead of" in hint.text) == is_better and f"{hint.num_requests} requests" in hint.text
        assert ("requests, which came within a second:" in hint.text) == (hint.seconds < 1)
        assert "the last 0 s" not in hint.text


def test_the_command_prints_the_hint_as_json(tmp_path, capsys):
    recorded(tmp_path, 3, False)
    assert main(["plan", "advise", str(tmp_path), "--json"]) == 0
    msgspec.json.decode(capsys.readouterr().out, type=Hint)


async def test_a_server_asks_a_process_at_low_priority_and_keeps_its_answer(tmp_path, monkeypatch):
    folder = tmp_path / "live"
    folder.mkdir()
    recorded(folder, 3, False)
    live = Hints()
    with pytest.raises(NotFound, match="record-bytes"):
        await live.get()
    live.recording = str(folder)
    both = await asyncio.gather(live.get(), live.get())
    assert both[0] is both[1] and msgspec.json.decode(both[0], type=LiveHint).num_requests >= 0
    shutil.rmtree(folder)
    assert await live.get() is both[0]
    gone = Hints()
    gone.recording = str(folder)
    with pytest.raises(EngineUnavailable, match=r"the process failed \(exit code 2\); try again later"):
        await gone.get()
    monkeypatch.setattr(
        asyncio, "create_subprocess_exec", None
    )  # a client that asks in a loop starts no more processes
    with pytest.raises(EngineUnavailable, match="try again later"):
        await gone.get()


async def test_the_process_has_a_limit_of_memory(tmp_path, monkeypatch):
    recorded(tmp_path, 3, False)
    monkeypatch.setattr(hints, "MEMORY_BYTES", 0)
    small = Hints()
    small.recording = str(tmp_path)
    with pytest.raises(EngineUnavailable, match="that takes more than 0 MiB of memory; try again later"):
        await small.get()


def test_the_command_names_what_is_missing(tmp_path, capsys):
    assert main(["plan", "advise"]) == 2 and "octavo plan advise RECORDING" in capsys.readouterr().err
    assert main(["plan", "advise", str(tmp_path / "none")]) == 2
