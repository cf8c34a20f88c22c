"""Runs the tests of the native CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer. `make sanitize` runs it.

The kernels are compiled again with both sanitizers, for a copy of the package, so that the ordinary library stays as it is. The
sanitizers' runtime must be loaded before everything else, which LD_PRELOAD does; tensors are then allocated with red zones."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1")
TESTS = (
    "tests/kernels/test_kernels_cpu_product.py",
    "tests/kernels/test_kernels_cpu_attention.py",
    "tests/kernels/test_kernels_cpu_elementwise.py",
    "tests/kernels/test_kernels_cpu_sampling.py",
    "tests/kernels/test_kernels_cpu_step.py",
    "tests/kernels/test_kernels_cpu_threads.py",
    "tests/kernels/test_kernels_experts.py",
)


def main() -> int:
    tests = sys.argv[1:] or [*TESTS]
    with tempfile.TemporaryDirectory(prefix="octavo-sanitize-") as folder:
        copy = Path(folder)
        ignore = shutil.ignore_patterns("native-*", "__pycache__")
        for name in ("octavo", "tests", "benchmarks", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", copy)
        runtimes = [_runtime("libasan.so"), _runtime("libubsan.so")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", "")))),
            "OCTAVO_CACHE": str(copy / "cache"),
            "CXX": " ".join(("g++", *FLAGS)),
            "LD_PRELOAD": " ".join(runtimes),
            # Python and torch keep memory until the process ends; a null pointer from a huge allocation is Python's to handle.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
        print("compiling the CPU kernels with the sanitizers (some minutes)", flush=True)
        made = subprocess.run(
            [sys.executable, "-c", "from octavo.kernels.cpu.build import library_path; print(library_path())"],
            cwd=copy,
            env=environment,
            check=False,
        )
        if made.returncode:
            return made.returncode
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


def _runtime(name: str) -> str:
    """The full path of a sanitizer's runtime. g++ prints the bare name if it has none."""
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        sys.exit(f"g++ has no {name}: install the package of its sanitizers (libasan, libubsan)")
    return found


if __name__ == "__main__":
    sys.exit(main())
