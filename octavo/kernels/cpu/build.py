"""Find or compile the shared library of this folder's C++ sources: in the package, else in the user's cache, else compile it.
The package build loads this file alone, so it imports only the standard library."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COMPILERS = ("g++", "clang++", "c++")
ENDING = ".dylib" if sys.platform == "darwin" else ".so"
# No contraction and no fast-math: every instruction set must round alike. The disabled warnings are false positives of
# GCC 12 about its own intrinsics.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-fvisibility-inlines-hidden", "-ffp-contract=off",
    "-fno-math-errno", "-pthread", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",
)  # fmt: skip
# By machine and suffix of a source file's name. Only those files may contain such instructions, and a CPU without them never
# runs them. (NEON is part of every aarch64 CPU.)
ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "_avx512vnni": (
            "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c",
        ),
        "_avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
        "_avx2": ("-mavx2", "-mfma", "-mf16c"),
    },
    "aarch64": {
        "_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
        "_dotprod": ("-march=armv8.2-a+dotprod",),
    },
}  # fmt: skip
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of machines
# Link the C++ runtime statically: one already loaded in the process (conda's, torch's) may be older than this compiler's. Only
# the used parts of it: the others may need a newer C library.
LINK_INSIDE = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
SECONDS_ALONE = 70  # to compile everything on one core
MAX_JOBS = 6  # more would not be faster, and each takes 300 MB
NUM_KEPT = 8  # libraries of other source versions kept in the cache


def machine_named(name: str) -> str:
    return MACHINES.get(name.lower(), name.lower())


THIS_MACHINE = machine_named(platform.machine())


class NoCompiler(Exception):
    """There is no library and no way to make one. Callers fall back to torch and log the reason."""


def library_path() -> Path:
    """Path of a library of exactly these sources that loads on this machine."""
    if reason := _why_disabled():
        raise NoCompiler(reason)
    if found := find_library(FOLDER):
        return found
    try:
        folder = cache_folder() / "kernels"
    except RuntimeError as error:
        raise NoCompiler("no home folder to keep the CPU kernels in: set OCTAVO_CACHE to a folder") from error
    return find_library(folder, is_ours=True) or _compile_into(folder)


def find_library(folder: Path, is_ours: bool = False, machine: str = THIS_MACHINE) -> Path | None:
    """Find a usable library in the folder. Its name holds a hash of the sources, so that edited sources never meet a stale
    library, and a checksum of its bytes. An unusable one is reported on stderr, and removed if `is_ours`."""
    for path in sorted(folder.glob(f"native-{fingerprint(FOLDER, machine)}-*{ENDING}")):
        if not (fault := _fault(path, machine)):
            return path
        _say(f"cannot use the CPU kernels in {path}: {fault}")
        if is_ours:
            with contextlib.suppress(OSError):
                path.unlink()
    return None


def provide_library(folder: Path) -> Path | None:
    """For the package build: the library in this folder, compiled if necessary, for the machine of the compiler that CXX
    names. If that fails, print a warning and return None."""
    library = None
    try:
        if reason := _why_disabled():
            raise NoCompiler(reason)
        machine = target_machine()
        library = find_library(folder, machine=machine) or make_library(folder, _show_progress, machine)
    except (NoCompiler, OSError) as error:
        _say(
            f"warning: no native CPU kernels ({error}): torch is used instead, several times slower, "
            "until a start finds a C++ compiler"
        )
    for stale in set(folder.glob(f"native-*{ENDING}")) - {library}:
        with contextlib.suppress(OSError):
            stale.unlink()
    return library


def make_library(folder: Path, on_progress: Callable[[int, int], None], machine: str = THIS_MACHINE) -> Path:
    """Compile into the folder. Other processes see the complete library or none."""
    compiler = find_compiler()
    if (made_for := machine_of(compiler)) != machine:
        raise NoCompiler(f"{compiler[0]} compiles for {made_for}, not for {machine}")
    _say(f"compiling the CPU kernels, once (about {SECONDS_ALONE // _num_jobs()} s)")
    with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        work = Path(scratch)
        # Compile a copy: if sources are edited meanwhile, the library must still match its fingerprint.
        for source in _sources(FOLDER):
            shutil.copyfile(source, work / source.name)
        made = compile_library(compiler, work, on_progress, machine)
        target = folder / f"native-{fingerprint(work, machine)}-{_checksum(made)}{ENDING}"
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{target.name}.{os.getpid()}"
        try:
            shutil.copyfile(made, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    if fault := _fault(target, machine):
        target.unlink()
        raise NoCompiler(f"the CPU kernels compiled in {folder} cannot be used: {fault}")
    return target


def compile_library(
    compiler: list[str], work: Path, on_progress: Callable[[int, int], None], machine: str = THIS_MACHINE
) -> Path:
    """Compile the sources in `work` into a library beside them. Raises NoCompiler with the compiler's message on failure."""
    flags = {path: isa_flags(path, machine) for path in _sources(work) if path.suffix == ".cpp"}
    # Sources for every CPU come first: if files share an inline function, the linker keeps the code of the first.
    sources = sorted(flags, key=lambda path: bool(flags[path]))
    objects = [str(source.with_suffix(".o")) for source in sources]
    with ThreadPoolExecutor(_num_jobs()) as pool:
        jobs = [
            pool.submit(_run, [*compiler, *FLAGS, *flags[source], "-c", str(source), "-o", made])
            for source, made in reversed(list(zip(sources, objects, strict=True)))  # the slow ones first
        ]
        try:
            for num_done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                on_progress(num_done, len(jobs))
        except NoCompiler:
            pool.shutdown(cancel_futures=True)
            raise
    library = work / f"library{ENDING}"
    link = [*compiler, "-shared", "-pthread", *objects, "-o", str(library)]
    try:
        _run([*link, *LINK_INSIDE] if sys.platform == "linux" else link)
    except NoCompiler:  # some systems have the C++ runtime only as a shared library
        _run(link)
    return library


def find_compiler() -> list[str]:
    """The first words of a compile command: CXX may hold several."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    wanted = f"{named[0]}, which CXX names, is not" if named else f"none of {', '.join(COMPILERS)} is"
    raise NoCompiler(f"no C++ compiler: {wanted} on PATH")


def machine_of(compiler: list[str]) -> str:
    """The machine that a compiler compiles for, if kernels have instruction sets for it; else this machine."""
    try:
        ran = subprocess.run(
            [*compiler, "-dumpmachine"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise NoCompiler(f"cannot run {compiler[0]}: {error.strerror or error}") from error
    named = machine_named(ran.stdout.strip().partition("-")[0])
    # Others are not told apart: some machines have one name for the system and another for compilers.
    return named if named in ISA_FLAGS else THIS_MACHINE


def target_machine() -> str:
    """The machine that a package is built for: that of the compiler that CXX names, else this one."""
    return machine_of(find_compiler()) if os.environ.get("CXX") else THIS_MACHINE


def foreign_platform(library: Path) -> str | None:
    """The platform of a wheel with a library for another machine: manylinux with the newest C library whose functions it
    uses. None: a library for this machine, whose platform Python knows."""
    machine = target_machine()
    if machine == THIS_MACHINE:
        return None
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)\0", library.read_bytes())
    major, minor = max((int(major), int(minor)) for major, minor in [*versions, (b"2", b"17")])
    return f"manylinux_{major}_{minor}_{machine}"


def isa_flags(source: Path, machine: str = THIS_MACHINE) -> tuple[str, ...]:
    return next((flags for end, flags in ISA_FLAGS.get(machine, {}).items() if source.stem.endswith(end)), ())


def cache_folder() -> Path:
    """$OCTAVO_CACHE, else octavo/ in $XDG_CACHE_HOME, else octavo/ in ~/.cache, as in weights/sources/default_model.py."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "octavo"


def fingerprint(folder: Path, machine: str = THIS_MACHINE) -> str:
    """Hash of everything a library depends on except the compiler, which may no longer be installed: any compiler gives the
    same numbers."""
    about = (FLAGS, ISA_FLAGS, LINK_INSIDE, sys.platform, machine)
    digest = hashlib.sha256(repr(about).encode())
    for source in _sources(folder):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _why_disabled() -> str | None:
    value = os.environ.get("OCTAVO_NATIVE", "")
    return f"OCTAVO_NATIVE={value}" if value.lower() in ("0", "false", "no", "off") else None


def _compile_into(folder: Path) -> Path:
    """Compile into the cache. Of processes that start together one compiles, and the others wait for it."""
    find_compiler()  # before anything is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / "native.lock"):
            if made := find_library(folder, is_ours=True):
                return made
            made = make_library(folder, lambda num_done, num_all: None)
            _tidy(folder, made)
            return made
    except OSError as error:
        raise NoCompiler(
            f"cannot keep the CPU kernels in {folder} ({error.strerror or error}): "
            "set OCTAVO_CACHE to a folder that can be written"
        ) from error


def _tidy(folder: Path, made: Path) -> None:
    others = set(folder.glob(f"native-*{ENDING}")) - {made}
    with contextlib.suppress(OSError):  # removed by another process meanwhile
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[:-NUM_KEPT]:
            old.unlink()


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    import fcntl  # not at module level: Windows lacks it, and the package must still build there

    # The lock file stays: removing it would let a third process lock a new file beside a waiting second one.
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that is compiling the CPU kernels")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: several processes compile, and the last library stays
            pass
        yield


def _fault(path: Path, machine: str) -> str | None:
    """Why a library cannot be used, or None. The checksum comes first: loading a truncated file can kill the process. A
    library for another machine is not loaded."""
    try:
        if path.stem.rpartition("-")[2] != _checksum(path):
            return "it is damaged"
        if machine == THIS_MACHINE:
            ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    return None


def _checksum(path: Path) -> str:
    return f"{zlib.crc32(path.read_bytes()):08x}"


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def _num_jobs() -> int:
    num_cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(num_cpus, MAX_JOBS)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
    except OSError as error:
        raise NoCompiler(f"cannot run {command[0]}: {error.strerror or error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise NoCompiler(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}")


def _show_progress(num_done: int, num_all: int) -> None:
    if sys.stderr.isatty():
        line = f"  {num_done} of {num_all} files" if num_done < num_all else ""
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(f"octavo: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":  # the package build without pip, which would hide the progress
    provide_library(FOLDER)
