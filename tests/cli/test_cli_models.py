"""`octavo pull`, `list`, `rm`, `ps` and `run`: models by name, with a small hub over HTTP and servers of this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli import main, models
from octavo.errors import ConfigError
from octavo.supervisor import runtime_dir
from octavo.supervisor.runtime_dir import RuntimeDir, ServerRecord, running_servers, write_record
from tests.registry import Registry, registry

DATA = b"GGUF" + b"x" * 100_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    with registry() as opened:
        opened.repositories["org/tiny-GGUF"] = {"tiny-Q4_K_M.gguf": DATA, "tiny-Q8_0.gguf": DATA * 2}
        for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", opened.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
        yield opened


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers' folders are made and looked for."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(runtime_dir.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(runtime_dir, "SHARED_TEMPORARY", folder)
    return folder


def test_pull_list_rm(hub: Registry, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "octavo pull NAME" in err
    assert main.main(["pull", "hf.co/org/tiny-GGUF:q8_0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("org/tiny-GGUF:Q8_0 (200 kB) is in ") and "octavo: success\n" in err
    assert main.main(["pull", "org/tiny-GGUF"]) == 0
    capsys.readouterr()
    assert main.main(["list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["NAME", "SIZE", "PULLED"],
        ["org/tiny-GGUF:Q4_K_M", "100", "kB", "just", "now"],
        ["org/tiny-GGUF:Q8_0", "200", "kB", "just", "now"],
    ]
    assert main.main(["list", "--json"]) == 0
    assert [Path(one["path"]).read_bytes() for one in json.loads(capsys.readouterr().out)] == [DATA, DATA * 2]
    assert main.main(["rm", "org/tiny-GGUF:Q8_0", "org/tiny-GGUF:Q2_K"]) == 2
    assert "no model org/tiny-GGUF:Q2_K was pulled" in capsys.readouterr().err
    assert main.main(["rm", "org/tiny-GGUF:Q8_0", "org/tiny-GGUF:Q4_K_M"]) == 0
    assert not list((Path(os.environ["OCTAVO_CACHE"]) / "models").iterdir()), "nothing is left"


@pytest.mark.parametrize("name", ["", "a/b/c", "./x", "org/x:../y", "-", "x" * 300])
def test_names_that_are_none(hub: Registry, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["pull", "--", name]) == 2
    assert "is not the name of a model" in capsys.readouterr().err


def test_without_a_network(hub: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert main.main(["pull", "org/tiny-GGUF"]) == 2
    err = capsys.readouterr().err
    assert "cannot be reached" in err and "check the network connection" in err


def test_ps_lists_living_servers_only(hub: Registry, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert running_servers() == []
    first, second = RuntimeDir(), RuntimeDir()
    assert running_servers() == [], "they do not take requests yet"
    write_record(first.path, ServerRecord(11, "http://127.0.0.1:1/v1", "org/tiny-GGUF:Q4_K_M", 1.0))
    write_record(second.path, ServerRecord(22, "http://127.0.0.1:2/v1", "SmolLM2", 2.0))
    assert main.main(["ps"]) == 0
    head, one, two = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODEL", "URL", "PID", "STARTED"]
    assert one.split()[:3] == ["org/tiny-GGUF:Q4_K_M", "http://127.0.0.1:1/v1", "11"] and "22" in two
    assert main.main(["ps", "--json"]) == 0
    assert [one["pid"] for one in json.loads(capsys.readouterr().out)] == [11, 22]
    found = models.find_server("hf.co/org/tiny-gguf:q4_k_m")
    assert found is not None and found.pid == 11 and models.find_server("other") is None
    main.main(["pull", "org/tiny-GGUF:Q4_K_M"])
    assert main.main(["rm", "org/tiny-GGUF:Q4_K_M"]) == 2
    assert "is served at http://127.0.0.1:1/v1 (process 11)" in capsys.readouterr().err
    inner = RuntimeDir()
    write_record(inner.path, ServerRecord(33, "unix:/tmp/x.sock", "org/tiny-GGUF:Q8_0", 3.0, is_inner=True))
    assert [one.pid for one in running_servers()] == [11, 22], "a gateway is listed, and not each of its models"
    main.main(["pull", "org/tiny-GGUF:Q8_0"])
    assert main.main(["rm", "org/tiny-GGUF:Q8_0"]) == 2
    assert "is served at unix:/tmp/x.sock (process 33)" in capsys.readouterr().err
    inner.close()
    os.close(second._lock)  # as if its supervisor was killed: the folder stays, and is not locked
    second._lock = os.open(os.devnull, os.O_RDONLY)
    (second.path / "junk").touch()
    assert [one.pid for one in running_servers()] == [11]
    (first.path / "server.json").write_text("{")
    assert running_servers() == []
    first.close()
    second.close()


def test_a_server_that_is_not_there_is_told_from_those_that_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["top", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.endswith("is the server running?\n")
    folder, socket = RuntimeDir(), RuntimeDir()
    write_record(folder.path, ServerRecord(11, "http://127.0.0.1:2/v1", "SmolLM2", 1.0))
    write_record(socket.path, ServerRecord(12, "unix:/tmp/x.sock", "SmolLM2", 1.0))
    assert main.main(["top", "--url", "http://127.0.0.1:1"]) == 1
    told = "is the server running? octavo ps lists http://127.0.0.1:2/v1: give it as --url\n"
    assert capsys.readouterr().err.endswith(told)
    folder.close()
    socket.close()


@pytest.mark.parametrize("command", ["run", "pull", "doctor"])
def test_a_name_of_ollamas_library(
    hub: Registry, place: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([command, "llama3.2"]) == 2
    assert "models are named owner/name, not as in Ollama's library" in capsys.readouterr().err


def test_run_takes_flags_of_ollama_and_llama_cpp(
    hub: Registry, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["run", "no/such/x.gguf", "hi", "--verbose", "--keepalive", "5m", "--temp", "0.5", "-n", "9"]) == 2
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("octavo: --verbose has no effect: ") and second.startswith(
        "octavo: --keepalive has no effect: "
    )
    assert "no such file or folder: no/such/x.gguf" in last


def test_run_says_why_a_server_does_not_start(hub: Registry, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "no/such/file.gguf"]) == 2
    assert "no such file or folder: no/such/file.gguf" in capsys.readouterr().err
    broken = place / "broken.gguf"
    broken.write_bytes(DATA)
    with pytest.raises(ConfigError, match="GGUF version"):
        models.StartedServer(str(broken))
    assert main.main(["run", str(broken), " "]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
