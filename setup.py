"""What pyproject.toml cannot say: the package's build compiles the native CPU kernels, if the machine can.
octavo/kernels/cpu/build.py compiles them."""

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = Path("octavo", "kernels", "cpu")  # from this file's folder, which is where a build runs


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
        self.library = recipe().provide_library(PACKAGE if self.editable_mode else self.build_lib / PACKAGE)

    def get_source_files(self) -> list[str]:
        return [str(path) for path in sorted(PACKAGE.iterdir()) if path.suffix in (".cpp", ".h")]

    def get_outputs(self) -> list[str]:
        return [str(self.build_lib / PACKAGE / self.library.name)] if self.library else []

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
        return "py3", "none", foreign or super().get_tag()[2]


def recipe() -> ModuleType:
    """build.py by itself: importing it as octavo's would need what octavo needs."""
    spec = importlib.util.spec_from_file_location("octavo_native_build", PACKAGE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup(cmdclass={"build": BuildWithNative, "build_native": BuildNative, "bdist_wheel": WheelOfPlatform})
