"""What pyproject.toml cannot say: the package's build compiles the native CPU kernels, if the machine can, names the oldest C library that
the wheel works with, and notes what it was built from. octavo/kernels/cpu/build.py compiles them."""

import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.sdist import sdist

PACKAGE = Path("octavo", "kernels", "cpu")  # from this file's folder, which is where a build runs
BUILD_INFO = Path("octavo", "build_info.json")
# Libraries that every system of a manylinux tag has (PEP 600), as far as the kernels need any.
ON_EVERY_SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


class BuildWithNative(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012  # as setuptools declares it


class BuildNative(Command):
    description = "compile the native CPU kernels"
    user_options = []  # noqa: RUF012
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.library: Path | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        assert self.build_lib is not None
        if self.editable_mode:
            self.library = recipe().provide_library(PACKAGE)
            return
        folder = Path(self.build_lib) / PACKAGE
        brought = bring_library(folder)
        self.library = recipe().provide_library(folder)
        compiler = compiler_version() if self.library and self.library.name not in brought else ""
        machine = recipe().target_machine() if self.library else platform.machine()
        (Path(self.build_lib) / BUILD_INFO).write_text(json.dumps(build_info(compiler, machine), indent=2) + "\n")

    def get_source_files(self) -> list[str]:
        return [str(path) for path in sorted(PACKAGE.iterdir()) if path.suffix in (".cpp", ".h")]

    def get_outputs(self) -> list[str]:
        made = [Path(self.build_lib) / PACKAGE / self.library.name] if self.library else []
        return [str(path) for path in made + ([] if self.editable_mode else [Path(self.build_lib) / BUILD_INFO])]

    def get_output_mapping(self) -> dict[str, str]:
        return {made: str(self.library) for made in self.get_outputs()} if self.editable_mode else {}


class WheelOfPlatform(bdist_wheel):
    """py3-none-<platform> with the library, which is plain C to Python; py3-none-any without."""

    def run(self) -> None:
        self.run_command("build")
        if self.get_finalized_command("build_native").library:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # else the files would be installed as pure ones
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        library = self.get_finalized_command("build_native").library
        foreign = recipe().foreign_platform(library) if library else None  # CXX names a compiler for another machine
        platform_tag = foreign or super().get_tag()[2]
        if library and platform_tag.startswith("linux_"):
            platform_tag = manylinux_tag(library, platform_tag)
        return "py3", "none", platform_tag


class SdistWithCommit(sdist):
    """A source distribution knows the commit that it was made of, so that a wheel built from it does too."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / BUILD_INFO).write_text(json.dumps(build_info("", platform.machine()), indent=2) + "\n")


def bring_library(folder: Path) -> set[str]:
    """Copy libraries that are built in the checkout already; one is used if its name fits the sources. Returns their names."""
    made = list(PACKAGE.glob("native-*.so"))
    folder.mkdir(parents=True, exist_ok=True)
    for library in made:
        shutil.copy2(library, folder)
    return {library.name for library in made}


def manylinux_tag(library: Path, otherwise: str) -> str:
    """The tag of the oldest C library that has every symbol version that the library needs. `otherwise`: it needs more than a C library,
    or this system has another one (musl)."""
    data = library.read_bytes()
    needed = {name.decode() for name in re.findall(rb"(?<=\0)(?:lib|ld-)[\w.+-]*\.so(?:\.\d+)*(?=\0)", data)}
    versions = re.findall(rb"(?<=\0)GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", data)
    if not versions or needed - ON_EVERY_SYSTEM - LOADERS:
        return otherwise
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    machine = otherwise.removeprefix("linux_")
    return f"manylinux_{major}_{max(minor, 17)}_{machine}"  # 2.17 is the oldest that the tag has for these machines


def build_info(compiler: str, machine: str) -> dict[str, str]:
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    now = (
        datetime.datetime.fromtimestamp(int(seconds), datetime.UTC) if seconds else datetime.datetime.now(datetime.UTC)
    )
    return {"commit": commit(), "date": now.date().isoformat(), "compiler": compiler, "machine": machine}


def commit() -> str:
    """The checkout's commit; in an unpacked source distribution, the one that it was made of."""
    if Path(".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
    try:
        return str(json.loads(BUILD_INFO.read_text())["commit"])
    except (OSError, ValueError, KeyError):
        return "unknown"


def compiler_version() -> str:
    kernels = recipe()
    try:
        ran = subprocess.run([*kernels.find_compiler(), "--version"], capture_output=True, text=True, check=True)
    except (OSError, kernels.NoCompiler, subprocess.CalledProcessError):
        return ""
    return ran.stdout.splitlines()[0].strip() if ran.stdout else ""


def recipe() -> ModuleType:
    """build.py by itself: importing it as octavo's would need what octavo needs."""
    spec = importlib.util.spec_from_file_location("octavo_native_build", PACKAGE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    setup(
        cmdclass={
            "build": BuildWithNative,
            "build_native": BuildNative,
            "bdist_wheel": WheelOfPlatform,
            "sdist": SdistWithCommit,
        }
    )
