"""Lines of batches that end their process: found, failed alone, and remembered; with real processes that are really killed."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.server.batch.batches import Batch, BatchStore
from octavo.server.batch.crash_memory import CONTROL_SECONDS, CrashMemory
from octavo.server.batch.files import FileStore
from octavo.server.batch.runner import ENDED_PROCESSES
from tests.server.batch.mortal_runner import DEADLY

CHAT = "/v1/completions"
LIMIT_SECONDS = 120


def run_to_the_end(folder: Path, most_deaths: int) -> int:
    """Run all batches, in one process after another. → how many processes were ended by a request"""
    command = [sys.executable, "-m", "tests.server.batch.mortal_runner", str(folder), str(most_deaths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def stores(folder: Path) -> tuple[FileStore, BatchStore]:
    return FileStore(folder, 10**9, 10**9, 100), BatchStore(folder)


def make(folder: Path, prompts: dict[str, str] | bytes) -> str:
    """A batch with a line for each prompt, or of these bytes. → its id"""
    files, batches = stores(folder)
    upload = files.begin()
    if isinstance(prompts, bytes):
        upload.write(prompts)
    else:
        for name, prompt in prompts.items():
            line = {"custom_id": name, "method": "POST", "url": CHAT, "body": {"prompt": prompt}}
            upload.write(json.dumps(line).encode() + b"\n")
    file = upload.finish("in.jsonl", "batch", None)
    return batches.create(files, CHAT, file.id, "24h", 86400, None, None).id


def outcome(folder: Path, batch_id: str) -> tuple[Batch, set[str], dict[str, str]]:
    """→ the batch, custom_ids that were answered, custom_id → error code"""
    files, batches = stores(folder)
    batch = batches.get(batch_id)

    def records(file_id: str | None) -> list[dict]:
        if file_id is None:
            return []
        with files.open(file_id) as file:
            return [json.loads(text) for text in file]

    answered = {record["custom_id"] for record in records(batch.output_file_id)}
    return batch, answered, {record["custom_id"]: record["error"]["code"] for record in records(batch.error_file_id)}


@pytest.mark.parametrize(
    ("num_lines", "deadly", "most_deaths"),
    [
        (1, {0}, 2),  # alone from the first
        (12, {5}, 3),  # one end with its neighbours, two alone
        (12, {0, 11}, 6),
    ],
)
def test_a_line_that_ends_processes_is_failed_alone(
    tmp_path: Path, num_lines: int, deadly: set[int], most_deaths: int
) -> None:
    batch_id = make(tmp_path, {f"r{n}": DEADLY if n in deadly else f"prompt {n}" for n in range(num_lines)})
    run_to_the_end(tmp_path, most_deaths)
    batch, answered, failed = outcome(tmp_path, batch_id)
    assert batch.status == "completed"
    assert failed == dict.fromkeys((f"r{n}" for n in deadly), ENDED_PROCESSES)
    assert answered == {f"r{n}" for n in range(num_lines) if n not in deadly}
    assert batch.request_counts.failed == len(deadly)
    assert json.loads((tmp_path / "suspects.json").read_bytes())["strikes"] == {}, "nothing is left of them"


def test_neighbours_in_other_batches_are_answered(tmp_path: Path) -> None:
    bad = make(tmp_path, {"bad": DEADLY})
    others = [make(tmp_path, {f"r{n}": f"prompt {n}" for n in range(6)}) for _ in range(3)]
    run_to_the_end(tmp_path, 3)
    assert outcome(tmp_path, bad)[2] == {"bad": ENDED_PROCESSES}
    for other in others:
        _, answered, failed = outcome(tmp_path, other)
        assert len(answered) == 6 and not failed


def test_a_file_whose_validation_ends_processes_is_failed(tmp_path: Path) -> None:
    bad, good = make(tmp_path, b'{"deadly file'), make(tmp_path, {"a": "prompt"})
    run_to_the_end(tmp_path, 3)
    batch, _, _ = outcome(tmp_path, bad)
    assert batch.status == "failed" and batch.errors is not None
    assert [error.code for error in batch.errors.data] == [ENDED_PROCESSES]
    assert outcome(tmp_path, good)[1] == {"a"}


class TestMemory:
    BATCH = "batch_" + "0" * 32

    def ended(self, folder: Path, *lines: int) -> CrashMemory:
        """The memory of the next process, after one that ended with these lines in flight."""
        memory = CrashMemory(folder, 8)
        memory.open()
        with contextlib.ExitStack() as stack:
            for line in lines:
                stack.enter_context(memory.trying(self.BATCH, line))
            content = (folder / "lines-in-flight").read_bytes()
        (folder / "counted").write_bytes(content)
        (folder / "lines-in-flight").write_bytes(content)  # as if the process had ended there
        after = CrashMemory(folder, 8)
        after.open()
        after.close()  # in order, so that its end is not one more
        return after

    def test_only_a_line_that_was_alone_gets_a_strike(self, tmp_path: Path) -> None:
        for _ in range(5):
            memory = self.ended(tmp_path, 3, 4)
        assert memory.suspects(self.BATCH) == {3, 4} and not memory.is_guilty(self.BATCH, 3)
        memory = self.ended(tmp_path, 4)
        assert not memory.is_guilty(self.BATCH, 4)
        memory = self.ended(tmp_path, 4)
        assert memory.is_guilty(self.BATCH, 4) and not memory.is_guilty(self.BATCH, 3)

    def test_an_end_is_counted_once(self, tmp_path: Path) -> None:
        """Also where the process that counts it ends before it has begun its own record."""
        memory = self.ended(tmp_path, 3)
        for _ in range(3):
            (tmp_path / "lines-in-flight").write_bytes((tmp_path / "counted").read_bytes())
            memory = CrashMemory(tmp_path, 8)
            memory.open()
            memory.close()
        assert memory.suspects(self.BATCH) == {3} and not memory.is_guilty(self.BATCH, 3)

    def test_an_end_before_suspects_are_tried_clears_them(self, tmp_path: Path) -> None:
        """Something else ends processes. Suspects stay suspects: they are tried alone, and wait until the process proves sound."""
        assert self.ended(tmp_path, 3).seconds_until_trial(self.BATCH, 3) > CONTROL_SECONDS
        memory = self.ended(tmp_path)
        assert 0 < memory.seconds_until_trial(self.BATCH, 3) <= CONTROL_SECONDS
        memory = self.ended(tmp_path, 3)
        assert memory.suspects(self.BATCH) == {3} and not memory.is_guilty(self.BATCH, 3)

    def test_an_engine_that_is_lost_for_good_counts_as_an_end(self, tmp_path: Path) -> None:
        for num_seated, is_guilty in ((4, False), (1, False), (1, True)):
            memory = CrashMemory(tmp_path, 8, lambda: True, lambda num_seated=num_seated: num_seated)
            memory.open()
            with memory.trying(self.BATCH, 3):
                pass  # the runner is cancelled
            memory.close()
            after = CrashMemory(tmp_path, 8)
            after.open()
            assert after.suspects(self.BATCH) == {3} and after.is_guilty(self.BATCH, 3) == is_guilty
            after.close()

    @pytest.mark.parametrize("content", [b"", b"x", b"\0" * 500, b"octavo 1", b"octavo 1" + b"\xff" * 301])
    def test_damaged_files_are_begun_anew(self, tmp_path: Path, content: bytes) -> None:
        for name in ("lines-in-flight", "suspects.json"):
            (tmp_path / name).write_bytes(content)
        memory = CrashMemory(tmp_path, 8)
        memory.open()
        with memory.trying(self.BATCH, 1):
            pass
        memory.close()
        assert (tmp_path / "lines-in-flight").stat().st_mode & 0o777 == 0o600
