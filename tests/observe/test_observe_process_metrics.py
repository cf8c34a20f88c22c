"""process_* metrics, read from a /proc that is written here, and from this process's own."""

import os
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.observe.metrics.process_metrics import process_metrics

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def samples_of(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels["process"], sample.labels["pid"]] = sample.value
    return found


class FakeProc:
    """A folder that looks like /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "stat").write_text("cpu 1 2 3\nbtime 1700000000\nprocesses 9\n")

    def add(self, pid: int, parent: int, command: str, children: str = "", num_fds: int = 3) -> None:
        of = self.folder / str(pid)
        (of / "task" / str(pid)).mkdir(parents=True)
        (of / "task" / str(pid) / "children").write_text(children)
        (of / "fd").mkdir()
        for number in range(num_fds):
            (of / "fd" / str(number)).touch()
        (of / "cmdline").write_text("\0".join(command.split()) + "\0")
        (of / "limits").write_text(
            "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024  4096  files\n"
        )
        fields = ["S", parent, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5 * TICKS, 2 * TICKS, 0, 0, 20, 0, 4, 0, 7 * TICKS, 10**9, 50]
        (of / "stat").write_text(f"{pid} (a ) name) " + " ".join(map(str, fields)))


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_every_lasting_process_is_listed(proc: FakeProc) -> None:
    proc.add(10, 1, "python -m octavo serve", children="11 12 ")
    proc.add(11, 10, "python -m octavo.server.process", children="15 ", num_fds=7)
    proc.add(12, 10, "python -m octavo.engine.process", children="13 14 ")
    proc.add(13, 12, "python -m octavo.worker.main")
    proc.add(14, 12, "python -c one-grammar")
    proc.add(15, 11, "python -m octavo.sandbox.fork_server")
    found = samples_of(process_metrics(proc.folder, 11))
    roles = {("supervisor", "10"), ("api", "11"), ("engine", "12"), ("worker", "13")}
    assert all(samples.keys() == roles for samples in found.values())
    one = {name: samples["api", "11"] for name, samples in found.items()}
    assert one == {
        "process_cpu_seconds_total": 7.0, "process_start_time_seconds": 1_700_000_007.0, "process_virtual_memory_bytes": 1e9,
        "process_resident_memory_bytes": 50.0 * PAGE, "process_open_fds": 7.0, "process_max_fds": 1024.0,
    }  # fmt: skip


def test_a_process_that_ends_while_it_is_read_is_left_out(proc: FakeProc) -> None:
    proc.add(10, 1, "python -m octavo serve", children="11 12")
    proc.add(11, 10, "python -m octavo.server.process")
    proc.add(12, 10, "python -m octavo.engine.process")
    (proc.folder / "12" / "stat").unlink()
    assert samples_of(process_metrics(proc.folder, 11))["process_open_fds"].keys() == {
        ("supervisor", "10"),
        ("api", "11"),
    }


def test_without_proc_there_is_nothing(tmp_path: Path) -> None:
    assert process_metrics(tmp_path, 11) == ""


def test_this_process() -> None:
    found = {name: samples["api", str(os.getpid())] for name, samples in samples_of(process_metrics()).items()}
    assert found["process_resident_memory_bytes"] > 10 * 2**20 and found["process_open_fds"] >= 3
    assert 0 < time.time() - found["process_start_time_seconds"] < 86_400
    assert found["process_cpu_seconds_total"] == pytest.approx(time.process_time(), abs=5)
