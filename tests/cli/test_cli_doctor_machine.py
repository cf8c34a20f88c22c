"""`octavo doctor` without a model, on this machine and on this machine made worse: no compiler, a taken port, few files, a broken torch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.doctor import machine
from octavo.cli.main import main
from octavo.config import Config, DiskTier, replace

CHECKS = {
    "python", "processor", "compiler", "kernels", "open files", "port", "temporary", "cache", "confinement", "hub", "torch",
    "memory", "GPU",
}  # fmt: skip


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Return the exit code, the findings by check, and stderr."""
    code = main(["doctor", "--json", *arguments])
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["ready"] == (code == 0)
    return code, {each["check"]: (each["status"], each["message"]) for each in report["findings"]}, err


@pytest.fixture
def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def test_this_machine_is_ready(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("OCTAVO_PORT", str(free_port))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code, found, err = diagnose(capsys)
    assert (code, err, found.keys()) == (0, "", CHECKS)
    assert "failed" not in {status for status, _ in found.values()}
    assert found["port"] == ("ok", f"127.0.0.1:{free_port} is free")
    assert "is fetched into it at the first start" in found["cache"][1]
    assert not (tmp_path / "not").exists()  # a check makes no folders
    assert "with HF_TOKEN" in found["hub"][1] and "hf_secret" not in json.dumps(found)


def test_the_disk_of_a_tier_is_measured(tmp_path: Path) -> None:
    config = replace(Config(), kv_tier=f"disk:1M:{tmp_path / 'not' / 'yet'}", device="cpu")
    found = {finding.check: finding for finding in machine.examine(config)}["kv tier"]
    assert found.status in ("ok", "warning") and "tokens/s of the embedded model" in found.message
    assert not (tmp_path / "not").exists()
    large = machine._tier(DiskTier(2**60, str(tmp_path)))
    assert large.status == "warning" and "less than the" in large.message
    assert machine._tier(DiskTier(2**20, "/proc/nothing/here")).status == "failed"


def test_a_person_sees_marks(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    assert main(["doctor", "--port", str(free_port)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "octavo doctor" and " ✓ port " in "\n".join(lines)
    assert "octavo doctor MODEL" in lines[-1]


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found, err = diagnose(capsys, "--port", str(port))
    assert code == 2
    line = f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port or --host"
    assert found["port"] == ("failed", line)
    assert err == f"octavo: error: port: {line}\n"


def test_without_a_compiler_and_without_kernels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int, monkeypatch: Any
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OCTAVO_NATIVE", "0")
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "inside"))
    code, found, _ = diagnose(capsys, "--port", str(free_port))
    assert code == 0  # torch computes instead
    assert (
        found["compiler"][0] == "warning"
        and "no-such-compiler, which CXX names, is not on PATH" in found["compiler"][1]
    )
    assert found["kernels"] == ("warning", "none: torch computes on a CPU, several times slower")
    assert found["cache"][0] == "warning" and "set OCTAVO_CACHE to a folder that can" in found["cache"][1]


def test_a_gpu_that_is_asked_for_and_missing_fails(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        pytest.skip("this machine may have a GPU")
    code, found, _ = diagnose(capsys, "--device", "cuda", "--port", str(free_port))
    assert code == 2 and found["GPU"][0] == "failed" and "this torch sees no GPU" in found["GPU"][1]


def test_few_open_files_and_a_broken_torch(tmp_path: Path, free_port: int) -> None:
    """In a process of its own, whose limit cannot be raised again."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); "
        "from octavo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", code, "doctor", "--json", "--port", str(free_port)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 2
    assert done.stderr == "octavo: error: open files: the hard limit is 200: raise it to 4,096 (ulimit -Hn)\n"
    assert found["torch"]["status"] == "failed" and "libtorch.so" in found["torch"]["message"]
    assert (found["memory"]["status"], found["GPU"]["status"]) == ("skipped", "skipped")


@pytest.mark.parametrize(("gib", "status"), [(0.3, "failed"), (1.0, "warning"), (8.0, "ok")])
def test_memory_has_two_thresholds(gib: float, status: str) -> None:
    assert machine._memory(int(gib * 2**30)).status == status


def test_flags_of_the_machine_and_of_a_model_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "some-model", "--port", "9"]) == 2
    assert "--port is for the check of the machine" in capsys.readouterr().err
