"""How many cores a process may use."""

from pathlib import Path

from octavo.ipc.cores import _quota, usable_cores


def test_cores_follow_the_quota_of_either_version(tmp_path: Path) -> None:
    assert usable_cores() >= 1
    assert _quota(tmp_path, 8) == 8
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert _quota(tmp_path, 8) == 8
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert _quota(tmp_path, 8) == 3
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _quota(tmp_path, 8) == 8
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert _quota(tmp_path, 8) == 2
