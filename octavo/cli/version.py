"""`octavo --version`: the version, and what this installation was built from and runs on. Does not import torch."""

import ctypes
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

from octavo import __version__
from octavo.kernels.cpu import build

PACKAGE = Path(__file__).resolve().parents[1]
BUILD_FILE = "build_info.json"
"""Written into a wheel by setup.py: the commit, the date and the compiler."""
_GIT_SECONDS = 2.0


def version_lines() -> list[str]:
    """The version alone in the first line, for scripts."""
    return [f"octavo {__version__}", *(f"  {name:<8} {text}" for name, text in details().items())]


def details() -> dict[str, str]:
    libc = " ".join(platform.libc_ver()).strip()
    machine = f"{platform.system()} {platform.machine()}" + (f", {libc}" if libc else "")
    return {
        "source": source(),
        "python": f"{platform.python_version()}, {machine}",
        "torch": _version_of("torch"),
        "triton": _version_of("triton"),
        "kernels": kernels()[1],
    }


def source(package: Path = PACKAGE) -> str:
    """Where this installation came from: a wheel with its commit, or a checkout."""
    try:
        made = json.loads((package / BUILD_FILE).read_text(encoding="utf-8"))
        return f"wheel of commit {made['commit']}, built {made['date']}" + (
            f" with {made['compiler']}" if made["compiler"] else ""
        )
    except OSError:
        pass
    except (ValueError, KeyError, TypeError):
        return f"a package whose {BUILD_FILE} is damaged"
    if (package.parent / ".git").exists():
        return f"checkout {package.parent}{_commit(package.parent)}"
    return f"files in {package}"


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f", commit {ran.stdout.strip()}" if ran.returncode == 0 else ""


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def kernels() -> tuple[bool, str]:
    """(whether the native CPU kernels are there, where and for which instructions). Compiles nothing."""
    if os.environ.get("OCTAVO_NATIVE", "").lower() in ("0", "false", "no", "off"):
        return False, f"switched off by OCTAVO_NATIVE={os.environ['OCTAVO_NATIVE']}"
    path, where = build.find_library(PACKAGE / "kernels" / "cpu"), "in the package"
    if path is None:
        try:
            path, where = build.find_library(build.cache_folder() / "kernels"), "in the cache folder"
        except (RuntimeError, OSError):
            path = None
    if path is None:
        return False, "none yet: the first start compiles them"
    library = ctypes.CDLL(str(path))
    library.octavo_isa.restype = ctypes.c_char_p
    return True, f"{library.octavo_isa().decode()}, {where} ({path.name})"
