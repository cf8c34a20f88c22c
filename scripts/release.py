"""Build a release and test it in a clean environment: `make release`.

    python -m scripts.release [--out dist] [--no-install]

Makes the source distribution, from it a wheel with the native CPU kernels (py3-none-manylinux_…) and one without (py3-none-any), checks
their contents and tags, installs the first into an environment of its own by its name, and runs it. Needs the packages
build, twine and auditwheel. Environment: CXX (the compiler), PIP_ARGS (for the installation), SOURCE_DATE_EPOCH."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTION_SETS = ("portable", "avx2", "avx512vnni")
# Runs in the clean environment: the kernels of each instruction set that this CPU has must agree with torch.
TRY_KERNELS = """
import torch
from octavo.kernels.cpu import library
torch.manual_seed(0)
weights, rows = torch.randn(64, 96), torch.randn(5, 96)
threads = library.Threads(2)
found = []
for name in {names!r}:
    if library.use_isa(name):
        packed = library.pack(threads, weights, library.Kind.FLOAT32)
        prepared = library.prepare(threads, rows, library.Kind.FLOAT32)
        product = library.product(threads, prepared, packed, torch.empty(5, 64))
        assert torch.allclose(product, rows @ weights.T, atol=1e-4), name
        found.append(name)
print(" ".join(found))
"""


class Failed(Exception):
    """A release that must not be published."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release and test it in a clean environment.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files (default: dist)")
    parser.add_argument("--no-install", action="store_true", help="do not install and run the wheel")
    arguments = parser.parse_args()
    try:
        release(arguments.out.resolve(), installs=not arguments.no_install)
    except (Failed, subprocess.CalledProcessError) as problem:
        print(f"release: {problem}", file=sys.stderr)
        return 1
    return 0


def release(out: Path, *, installs: bool) -> None:
    version = checked_version(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("octavo-*.whl"), *out.glob("octavo-*.tar.gz")]:
        old.unlink()
    say(f"building octavo {version}")
    build("--sdist", "--outdir", str(out), str(ROOT))
    source = out / f"octavo-{version}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="octavo-release-") as scratch:
        with tarfile.open(source) as archive:
            archive.extractall(scratch, filter="data")
        tree = Path(scratch) / f"octavo-{version}"
        # Both wheels come from the source distribution, so that it is known to be complete.
        build("--wheel", "--outdir", str(out), str(tree))
        build("--wheel", "--outdir", str(out), str(tree), environment={"OCTAVO_NATIVE": "0"})
    wheels = {path.name.split("-")[-1].removesuffix(".whl"): path for path in out.glob("*.whl")}
    check_contents(source, wheels)
    run([sys.executable, "-m", "twine", "check", "--strict", str(source), *map(str, wheels.values())])
    (tag,) = wheels.keys() - {"any"}
    check_tag(wheels[tag])
    if installs:
        try_installed(out, version)
    for path in sorted(out.iterdir()):
        say(f"{path.stat().st_size:>12,} bytes  {path.name}")


def checked_version(root: Path) -> str:
    """The version, which must be the same in every place that names it."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    found = re.search(r'^__version__ = "(.*)"$', (root / "octavo" / "__init__.py").read_text(), re.MULTILINE)
    if found is None or found[1] != version:
        raise Failed(f"pyproject.toml says {version}, octavo/__init__.py {found[1] if found else 'nothing'}")
    if not re.search(rf"^## \[?{re.escape(version)}\b", (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        say(f"warning: CHANGELOG.md has no heading '## [{version}]': this is a trial, do not publish it")
    return version


def check_contents(source: Path, wheels: Mapping[str, Path]) -> None:
    """The files that an installation needs are in each archive, and nothing of a checkout is."""
    if len(wheels) != 2 or "any" not in wheels or not any(tag.startswith("manylinux_") for tag in wheels):
        raise Failed(f"one manylinux wheel and one for any system were expected, not {', '.join(sorted(wheels))}")
    with tarfile.open(source) as archive:
        check_names(
            [name.partition("/")[2] for name in archive.getnames()],
            {"setup.py", "pyproject.toml", "CHANGELOG.md"},
            source,
        )
    for tag, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            check_names(names, set(), wheel)
            info = json.loads(archive.read("octavo/build_info.json"))
        num_libraries = sum(re.fullmatch(r"octavo/kernels/cpu/native-.*\.so", name) is not None for name in names)
        if num_libraries != (tag != "any"):
            raise Failed(f"{wheel.name} has {num_libraries} libraries of kernels")
        if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", info["commit"]):
            raise Failed(f"{wheel.name} does not know its commit: {info}")
        if info["commit"].endswith("-dirty"):
            say(f"warning: {wheel.name} has changes that are not committed: do not publish it")


def check_names(names: list[str], wanted: set[str], archive: Path) -> None:
    wanted = wanted | {
        "octavo/__init__.py", "octavo/build_info.json", "octavo/cli/main.py", "octavo/kernels/cpu/product.cpp",
        "octavo/kernels/cpu/product.h", "octavo/server/static/cockpit.html",
    }  # fmt: skip
    if missing := wanted - set(names):
        raise Failed(f"{archive.name} lacks {', '.join(sorted(missing))}")
    if foreign := [name for name in names if name.startswith(("tests/", "benchmarks/", ".git", "build/"))]:
        raise Failed(f"{archive.name} has {foreign[0]}")


def check_tag(wheel: Path) -> None:
    """auditwheel must find that the wheel needs no newer C library than its tag says. It names only tags of some versions, so that its
    own tag may be newer than ours; the versions that it has found count."""
    told = run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture=True)
    ours = wheel.name.split("-")[-1].removesuffix(".whl")
    named = re.findall(r'"manylinux_(\d+)_(\d+)_', " ".join(told.split()))
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", told)
    tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", ours)
    if not (named and versions and tag):
        raise Failed(f"{wheel.name}: auditwheel says {told.strip()}")
    newest = max((int(major), int(minor)) for major, minor in versions)
    if max(newest, (2, 17)) != (int(tag[1]), int(tag[2])):
        raise Failed(f"{wheel.name} needs a C library {newest[0]}.{newest[1]}, as auditwheel says")
    say(f"{ours}: as auditwheel says")


def try_installed(out: Path, version: str) -> None:
    """Install octavo by its name from the folder, and use it as a person would."""
    with tempfile.TemporaryDirectory(prefix="octavo-clean-") as scratch:
        place = Path(scratch) / "venv"
        say("installing octavo into a clean environment")
        venv.create(place, with_pip=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, *shlex.split(os.environ.get("PIP_ARGS", "")), "--find-links", str(out), f"octavo=={version}"])
        shown = run([str(place / "bin" / "octavo"), "--version"], capture=True, cwd=scratch)
        if (
            not shown.startswith(f"octavo {version}\n")
            or "wheel of commit" not in shown
            or "in the package" not in shown
        ):
            raise Failed(f"octavo --version says {shown}")
        say(shown.strip())
        code = TRY_KERNELS.format(names=INSTRUCTION_SETS)
        say("kernels tried: " + run([str(place / "bin" / "python"), "-c", code], capture=True, cwd=scratch).strip())
        run([str(place / "bin" / "octavo"), "doctor", "--port", "0"], cwd=scratch)
        command = [str(place / "bin" / "octavo"), "complete", "The capital of France is", "--max-tokens", "8"]
        text = run([*command, "--temperature", "0"], capture=True, cwd=scratch)
        if "Paris" not in text:
            raise Failed(f"the embedded model completes 'The capital of France is' by {text!r}")
        say(f"the embedded model completes: The capital of France is{text}")
        shutil.rmtree(place)


def build(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    run([sys.executable, "-m", "build", *arguments], environment=environment, cwd=tempfile.gettempdir())


def run(
    command: list[str],
    *,
    capture: bool = False,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> str:
    ran = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=True,
    )
    return ran.stdout or ""


def say(line: str) -> None:
    print(f"release: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
