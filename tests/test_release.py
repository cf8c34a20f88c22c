"""A wheel made from this tree, installed by its name from a folder of wheels into an environment of its own, and run there. The kernels are those
that are built already; `make release` compiles them and tests more."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from octavo.cli import version

ROOT = Path(__file__).parents[1]
VERSION = "0.1.0"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a checkout that a build reads: a build writes beside them, so that it gets a copy."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "octavo", folder / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
    ):
        shutil.copy2(ROOT / name, folder)
    (folder / "octavo" / "build_info.json").write_text(json.dumps({"commit": "abc1234"}))  # as in a source distribution
    return folder


def setup_py(tree: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments], cwd=tree, capture_output=True, text=True, timeout=300,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of this platform, or of any where no kernels are built here."""
    folder = tmp_path_factory.mktemp("wheels")
    native = {} if version.kernels()[0] else {"OCTAVO_NATIVE": "0"}
    setup_py(tree, "bdist_wheel", "--dist-dir", str(folder), **native)
    return folder


def test_pip_installs_octavo_from_a_folder_of_wheels(wheels: Path, tmp_path: Path) -> None:
    (wheel,) = wheels.glob("*.whl")
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    # What Octavo needs comes from the environment of the tests: only Octavo itself is installed.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "--disable-pip-version-check"]
    command = [
        *pip,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--ignore-installed",
        "--find-links",
        str(wheels),
        "octavo",
    ]
    clean = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("PIP_", "OCTAVO_"))
    }
    subprocess.run(command, env=clean, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    octavo = str(place / "bin" / "octavo")
    shown = subprocess.run(
        [octavo, "--version"], env=clean, cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert shown.splitlines()[0] == f"octavo {VERSION}"
    assert "wheel of commit abc1234, built 2023-11-14" in shown
    if not wheel.name.endswith("-any.whl"):
        assert ", in the package (native-" in shown
    code = "import octavo.server, sys; print(octavo.__file__)"
    imported = subprocess.run(
        [str(place / "bin" / "python"), "-c", code], env=clean, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert imported.stdout.startswith(str(packages)), "the wheel's own files run"
    assert (packages / "octavo" / "server" / "static" / "cockpit.html").exists()


def test_a_wheel_with_kernels_names_the_c_library_that_they_need(wheels: Path, tree: Path, tmp_path: Path) -> None:
    if not version.kernels()[0]:
        pytest.skip("no kernels are built here")
    (wheel,) = wheels.glob("*.whl")
    assert re.fullmatch(rf"octavo-{VERSION}-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert sum(name.endswith(".so") for name in archive.namelist()) == 1
    setup_py(tree, "bdist_wheel", "--dist-dir", str(tmp_path), "--bdist-dir", str(tmp_path / "b"), OCTAVO_NATIVE="0")
    (pure,) = tmp_path.glob("*.whl")
    assert pure.name == f"octavo-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(pure) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())


def test_a_source_distribution_has_the_kernels_sources_and_the_commit(tree: Path, tmp_path: Path) -> None:
    setup_py(tree, "sdist", "--dist-dir", str(tmp_path))
    with tarfile.open(tmp_path / f"octavo-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        info = archive.extractfile(f"octavo-{VERSION}/octavo/build_info.json")
        assert info is not None and json.load(info)["commit"] == "abc1234"
    sources = {
        f"octavo/kernels/cpu/{path.name}"
        for path in (ROOT / "octavo/kernels/cpu").glob("*.[ch]*")
        if path.suffix in (".cpp", ".h")
    }
    assert sources and sources <= names
    assert {"setup.py", "pyproject.toml", "CHANGELOG.md", "octavo/server/static/cockpit.html"} <= names
    assert not any(name.startswith("tests/") or name.endswith(".so") for name in names)


@pytest.fixture(scope="module")
def setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "tag"),
    [
        (["libc.so.6", "GLIBC_2.2.5", "libm.so.6", "GLIBC_2.29", "GLIBC_2.3.4"], "manylinux_2_29_x86_64"),
        (["libc.so.6", "GLIBC_2.4"], "manylinux_2_17_x86_64"),
        (["libc.so.6", "GLIBC_2.29", "libstdc++.so.6"], "linux_x86_64"),  # not every system has it, or as new a one
        (["libc.musl-x86_64.so.1"], "linux_x86_64"),
    ],
)
def test_the_tag_follows_from_what_a_library_needs(
    words: list[str], tag: str, setup_module: ModuleType, tmp_path: Path
) -> None:
    library = tmp_path / "native-x.so"
    library.write_bytes(b"\x7fELF\0" + b"".join(word.encode() + b"\0" for word in words))
    assert setup_module.manylinux_tag(library, "linux_x86_64") == tag


def test_a_release_needs_one_version_everywhere(tmp_path: Path) -> None:
    from scripts.release import Failed, checked_version

    assert checked_version(ROOT) == VERSION
    (tmp_path / "octavo").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "2.0"\n')
    (tmp_path / "octavo" / "__init__.py").write_text('__version__ = "1.0"\n')
    with pytest.raises(Failed, match=re.escape("pyproject.toml says 2.0, octavo/__init__.py 1.0")):
        checked_version(tmp_path)
