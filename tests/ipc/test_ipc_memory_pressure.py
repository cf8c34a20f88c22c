"""Readings of available memory: the machine's, and those of control groups of both versions."""

from pathlib import Path

from octavo.ipc.memory_pressure import MemoryReading, read_memory

MiB = 2**20


def write(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "groups"


MACHINE = {"proc/meminfo": "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 524288 kB\n"}


def test_the_machine_alone(tmp_path):
    assert read_memory(*write(tmp_path, MACHINE)) == MemoryReading(512 * MiB, 1024 * MiB, 0.0)
    assert read_memory(tmp_path / "none", tmp_path) is None


def test_a_group_of_version_2_and_its_parent(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "proc/pressure/memory": "some avg10=1.50 avg60=0.00 avg300=0.00 total=0\nfull avg10=9.0 total=0\n",
        "groups/a/memory.max": str(256 * MiB),
        "groups/a/memory.current": str(200 * MiB),
        "groups/a/memory.stat": f"anon 5\ninactive_file {16 * MiB}\n",
        "groups/a/b/memory.max": "max\n",
        "groups/a/b/memory.current": str(100 * MiB),
        "groups/a/b/memory.stat": "anon 5\n",
        "groups/a/b/memory.pressure": "some avg10=23.00 avg60=0.00 avg300=0.00 total=0\n",
    }
    assert read_memory(*write(tmp_path, MACHINE | files)) == MemoryReading(72 * MiB, 256 * MiB, 23.0)


def test_a_group_of_version_1_and_damaged_files(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/c\n9:name=systemd:/\nnonsense\n",
        "proc/pressure/memory": "nonsense\n",
        "groups/memory/c/memory.limit_in_bytes": str(64 * MiB),
        "groups/memory/c/memory.usage_in_bytes": str(70 * MiB),
        "groups/memory/c/memory.stat": "total_inactive_file 0\n",
        "groups/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "groups/memory/memory.usage_in_bytes": "x",
    }
    assert read_memory(*write(tmp_path, MACHINE | files)) == MemoryReading(0, 64 * MiB, 0.0)
