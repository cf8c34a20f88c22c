"""How the native library is found, built and refused, with real compilers on a source file of one line; the real kernels
compile, too."""

import ctypes
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from octavo.kernels.cpu import build
from tests.native import ISAS

ROOT = Path(build.__file__).parents[3]
KERNEL = 'extern "C" int octavo_answer() {{ return {}; }}\n'


def missing_compiler() -> str:
    try:
        build.find_compiler()
    except build.NoCompiler as missing:
        return str(missing)
    return ""


needs_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
ARM_COMPILER = "aarch64-linux-gnu-g++"
is_foreign = shutil.which(ARM_COMPILER) is not None and build.THIS_MACHINE != "aarch64"
needs_foreign_compiler = pytest.mark.skipif(not is_foreign, reason=f"no {ARM_COMPILER}, or it is no foreign one")


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    monkeypatch.delenv("OCTAVO_NATIVE", raising=False)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def package(tmp_path, surroundings):
    """The real build.py beside a small source."""
    folder = tmp_path / "package"
    folder.mkdir()
    shutil.copy(build.__file__, folder)
    write_kernel(folder, 42)
    return load(folder)


def load(folder: Path):
    spec = importlib.util.spec_from_file_location("recipe", folder / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hide_compilers(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")


def write_kernel(folder: Path, answer: int) -> None:
    (folder / "kernel.cpp").write_text(KERNEL.format(answer))


def answer_of(path: Path) -> int:
    return ctypes.CDLL(str(path)).octavo_answer()


def counting_compiler(folder: Path) -> tuple[Path, Path]:
    """Return a compiler that writes a line for each source it compiles, and the file with those lines."""
    script, journal = folder / "compiler", folder / "journal"
    compiler = shlex.join(build.find_compiler())
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> "{journal}";; esac\nexec {compiler} "$@"\n')
    script.chmod(0o755)
    return script, journal


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@needs_compiler
def test_the_real_kernels_compile(monkeypatch):
    # Uses the user's own cache, or the package: the other tests of kernels need the library too.
    monkeypatch.delenv("OCTAVO_NATIVE", raising=False)
    loaded = ctypes.CDLL(str(build.library_path()))
    loaded.octavo_isa.restype = ctypes.c_char_p
    assert loaded.octavo_isa().decode() in ISAS


@needs_compiler
def test_compiles_once_into_the_cache(package, tmp_path, monkeypatch, capfd):
    made = package.library_path()
    assert made.parent == tmp_path / "cache" / "kernels" and answer_of(made) == 42
    [line] = lines(capfd.readouterr().err)
    assert line.startswith("octavo: compiling the CPU kernels, once (about ")

    hide_compilers(monkeypatch)
    assert package.library_path() == made
    assert capfd.readouterr() == ("", "")


@needs_compiler
def test_the_packages_own_library_needs_neither_compiler_nor_cache(package, tmp_path, monkeypatch, capfd):
    made = package.provide_library(package.FOLDER)
    capfd.readouterr()
    hide_compilers(monkeypatch)
    assert package.library_path() == made and made.parent == package.FOLDER and answer_of(made) == 42
    assert package.provide_library(package.FOLDER) == made
    assert not (tmp_path / "cache").exists()
    assert capfd.readouterr() == ("", "")


@needs_compiler
@pytest.mark.parametrize("edit", ["source", "header", "flags"])
def test_edited_sources_never_meet_the_old_library(package, monkeypatch, edit):
    old = package.provide_library(package.FOLDER)
    match edit:
        case "source":
            write_kernel(package.FOLDER, 43)
        case "header":
            (package.FOLDER / "kernel.h").write_text("// new\n")
        case "flags":
            monkeypatch.setattr(package, "FLAGS", (*package.FLAGS, "-DNEW"))
    with monkeypatch.context() as hidden, pytest.raises(package.NoCompiler, match="no C"):
        hide_compilers(hidden)
        package.library_path()
    new = package.library_path()
    assert new != old and answer_of(new) == (43 if edit == "source" else 42)
    renewed = package.provide_library(package.FOLDER)
    assert renewed.name == new.name and not old.exists()


def test_says_what_is_missing(package, tmp_path, monkeypatch, capfd):
    hide_compilers(monkeypatch)
    with pytest.raises(package.NoCompiler, match=r"^no C\+\+ compiler: none of g\+\+, clang\+\+, c\+\+ is on PATH$"):
        package.library_path()
    monkeypatch.setenv("CXX", "colossal-compiler -m64")
    with pytest.raises(package.NoCompiler, match=r"colossal-compiler, which CXX names, is not on PATH$"):
        package.library_path()
    assert package.provide_library(package.FOLDER) is None
    [line] = lines(capfd.readouterr().err)
    assert line.startswith("octavo: warning: no native CPU kernels (no C++ compiler: colossal-compiler")
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_the_compilers_words_in_one_line(package):
    (package.FOLDER / "kernel.cpp").write_text("int f() { return nowhere; }\n")
    with pytest.raises(package.NoCompiler, match=r"kernel\.cpp:1.*error.*nowhere.*$") as refused:
        package.library_path()
    assert "\n" not in str(refused.value)
    assert package.provide_library(package.FOLDER) is None


@needs_compiler
def test_cxx_may_have_several_words(package, monkeypatch):
    monkeypatch.setenv("CXX", f"{shlex.join(package.find_compiler())} -DANSWER=44")
    (package.FOLDER / "kernel.cpp").write_text(KERNEL.format("ANSWER"))
    assert answer_of(package.library_path()) == 44


@needs_compiler
@pytest.mark.parametrize("value", ["0", "off"])
def test_can_be_turned_off(package, monkeypatch, value):
    made = package.provide_library(package.FOLDER)
    monkeypatch.setenv("OCTAVO_NATIVE", value)
    with pytest.raises(package.NoCompiler, match=f"^OCTAVO_NATIVE={value}$"):
        package.library_path()
    monkeypatch.setenv("OCTAVO_NATIVE", "1")
    assert package.library_path() == made


def rewritten(path: Path, content: bytes) -> Path:
    """Replace the file by a new one: this process has the old one mapped into its memory."""
    new = path.with_name("new")
    new.write_bytes(content)
    return new.replace(path)


def cut_short(path: Path) -> Path:
    return rewritten(path, path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    return rewritten(path, bytes(content))


def foreign(path: Path) -> Path:
    """Write a complete library that this machine cannot load."""
    rewritten(path, b"\xcf\xfa\xed\xfe of another machine")
    return path.rename(path.with_name(f"{path.stem.rpartition('-')[0]}-{build._checksum(path)}{path.suffix}"))


@needs_compiler
@pytest.mark.parametrize("harm", [cut_short, flipped, foreign])
@pytest.mark.parametrize("place", ["package", "cache"])
def test_a_useless_library_is_named_and_made_again(package, capfd, harm, place):
    useless = harm(package.provide_library(package.FOLDER) if place == "package" else package.library_path())
    capfd.readouterr()
    made = package.library_path()
    assert answer_of(made) == 42 and made.parent == package.cache_folder() / "kernels"
    named, compiling = lines(capfd.readouterr().err)
    assert named.startswith(f"octavo: cannot use the CPU kernels in {useless}: ")
    assert compiling.startswith("octavo: compiling")
    assert useless.exists() == (place == "package" or useless == made)  # the package is not modified at run time


@needs_compiler
def test_processes_that_start_together_compile_once(package, tmp_path):
    compiler, journal = counting_compiler(tmp_path)
    code = "import build; print(build.library_path())"
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=package.FOLDER,
            env={**os.environ, "CXX": str(compiler)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    answers = [start.communicate(timeout=60)[0].strip() for start in starts]
    assert [start.returncode for start in starts] == [0] * 4
    assert set(answers) == {str(package.library_path())}
    assert len(lines(journal.read_text())) == 1


@needs_compiler
def test_the_cache_keeps_a_few_old_libraries(package):
    for answer in range(package.NUM_KEPT + 3):
        write_kernel(package.FOLDER, answer)
        made = package.library_path()
    kept = set(made.parent.glob("native-*.*o*")) - {made.parent / "native.lock"}
    assert made in kept and len(kept) == package.NUM_KEPT + 1


@needs_compiler
def test_a_cache_that_cannot_be_written(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(package.NoCompiler, match=r"^cannot keep the CPU kernels in .*: set OCTAVO_CACHE to a folder"):
        package.library_path()


# ── the package's own build ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def project(tmp_path, surroundings):
    """The real build files of the whole package around a small source."""
    pytest.importorskip("setuptools")
    folder = tmp_path / "project"
    kernels = folder / "octavo" / "kernels" / "cpu"
    kernels.mkdir(parents=True)
    for package in (kernels, kernels.parent, kernels.parent.parent):
        (package / "__init__.py").write_text("")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(build.__file__, kernels)
    write_kernel(kernels, 42)
    (kernels / "kernel.h").write_text("")
    return folder


def built(project: Path, what: str, **environment: str) -> tuple[Path, str]:
    """Return the file that pip would get, and stderr."""
    code = f"from setuptools import build_meta; print('made', build_meta.build_{what}('made'))"
    (project / "made").mkdir(exist_ok=True)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return project / "made" / ran.stdout.split()[-1], ran.stderr


@needs_compiler
def test_a_wheel_for_this_platform(project, tmp_path, monkeypatch):
    stale = project / "build" / "lib" / "octavo" / "kernels" / "cpu" / f"native-of-yesterday{build.ENDING}"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    wheel, _ = built(project, "wheel")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    kernels = unpacked / "octavo" / "kernels" / "cpu"
    assert {"kernel.cpp", "kernel.h", "build.py"} < {path.name for path in kernels.iterdir()}
    assert "Root-Is-Purelib: false" in next(unpacked.glob("*.dist-info/WHEEL")).read_text()
    [library] = kernels.glob("native-*")
    hide_compilers(monkeypatch)
    assert load(kernels).library_path() == library and answer_of(library) == 42


@pytest.mark.arm
@needs_foreign_compiler
def test_a_wheel_for_another_machine(project, tmp_path):
    wheel, _ = built(project, "wheel", CXX=ARM_COMPILER)
    platform = re.search(r"-(py3-none-manylinux_2_\d+_aarch64)\.whl$", wheel.name)
    assert platform, wheel.name
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    kernels = unpacked / "octavo" / "kernels" / "cpu"
    [library] = kernels.glob("native-*")
    assert library.name.startswith(f"native-{load(kernels).fingerprint(kernels, 'aarch64')}-")
    assert library.read_bytes()[18:20] == (183).to_bytes(2, "little")  # the machine in an ELF header: aarch64
    about = next(unpacked.glob("*.dist-info/WHEEL")).read_text()
    assert "Root-Is-Purelib: false" in about and f"Tag: {platform[1]}" in about
    assert json.loads((unpacked / "octavo" / "build_info.json").read_text())["machine"] == "aarch64"


@pytest.mark.arm
@needs_foreign_compiler
def test_a_start_refuses_a_compiler_for_another_machine(package, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", ARM_COMPILER)
    with pytest.raises(package.NoCompiler, match=f"compiles for aarch64, not for {build.THIS_MACHINE}$"):
        package.library_path()
    assert not list((tmp_path / "cache" / "kernels").glob("native-*.so"))


@pytest.mark.parametrize("environment", [{"PATH": "", "CXX": ""}, {"OCTAVO_NATIVE": "0"}])
def test_a_wheel_without_a_compiler_is_pure(project, environment):
    wheel, errors = built(project, "wheel", **environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist()}
    assert {"kernel.cpp", "kernel.h"} < names and not [name for name in names if name.startswith("native-")]
    [_warning] = [line for line in lines(errors) if line.startswith("octavo: warning: no native CPU kernels (")]


@needs_compiler
def test_an_editable_install_compiles_in_place(project):
    built(project, "editable")
    kernels = project / "octavo" / "kernels" / "cpu"
    [library] = kernels.glob("native-*")
    assert load(kernels).library_path() == library


def test_a_source_archive_has_what_a_wheel_is_made_of(project):
    archive, _ = built(project, "sdist")
    with tarfile.open(archive) as members:
        names = {Path(name).name for name in members.getnames()}
    assert {"setup.py", "pyproject.toml", "build.py", "kernel.cpp", "kernel.h"} <= names
    assert not [name for name in names if name.startswith("native-")]
