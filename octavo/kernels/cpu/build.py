"""The native kernels of this folder → one shared library, compiled once per machine and kept in the user's cache folder.
Knows nothing of what the kernels do."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
# No contraction and no fast-math: every instruction set must round alike. The warnings left out are false ones that GCC 12
# gives about its own intrinsics.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-ffp-contract=off", "-fno-math-errno", "-pthread",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option",
)  # fmt: skip
# By the end of a source file's name; only those files may contain such instructions, and a CPU without them never enters.
ISA_FLAGS = {
    "_avx512vnni": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
    "_avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
    "_avx2": ("-mavx2", "-mfma", "-mf16c"),
}


class NoCompiler(Exception):
    """Neither a library nor a way to make one: the caller has another path, and says so."""


def library_path() -> Path:
    """Of the library for these sources, compiled now if it has not been. Safe against others doing the same."""
    compiler = find_compiler()
    target = cache_folder() / "kernels" / f"cpu-{_fingerprint(compiler)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = compile_library(compiler, Path(scratch))
            os.replace(made, target)  # whole or not at all, for whoever looks meanwhile
    return target


def find_compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise NoCompiler(f"no C++ compiler ({named or ', '.join(COMPILERS)}) on PATH")


def compile_library(compiler: str, scratch: Path) -> Path:
    """Raises NoCompiler, with the compiler's words, where it fails."""
    sources = _sources(".cpp")
    objects = [scratch / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *FLAGS, *isa_flags(source), "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(_run, commands))
    library = scratch / "library.so"
    _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])
    return library


def isa_flags(source: Path) -> tuple[str, ...]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    return next((flags for end, flags in ISA_FLAGS.items() if source.stem.endswith(end)), ())


def cache_folder() -> Path:
    """$OCTAVO_CACHE, else octavo/ in $XDG_CACHE_HOME, else in ~/.cache: as weights/embedded.py has it."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "octavo"


def _sources(*endings: str) -> list[Path]:
    return sorted(path for path in FOLDER.iterdir() if path.suffix in endings)


def _fingerprint(compiler: str) -> str:
    """Of everything the library depends on. The compiler counts by file, size and date: asking its version costs a start."""
    about = os.stat(os.path.realpath(compiler))
    digest = hashlib.sha256(
        repr(
            (FLAGS, ISA_FLAGS, platform.machine(), os.path.realpath(compiler), about.st_size, about.st_mtime_ns)
        ).encode()
    )
    for source in _sources(".cpp", ".h"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"{command[0]} failed: {done.stderr.strip()[:2000]}")
