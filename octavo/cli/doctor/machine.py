"""`octavo doctor` without a model: checks whether this machine is ready to serve one. It prints one line per check, and changes nothing
but a temporary file."""

import importlib
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.cli import version
from octavo.cli.doctor.findings import Finding, printer, size
from octavo.config import Config, DiskTier, read_tiers
from octavo.errors import ConfigError
from octavo.ipc.cores import usable_cores
from octavo.kernels.cpu import build
from octavo.kv_tier import disk_pace
from octavo.supervisor.listen import cannot_listen, listen
from octavo.weights.sources.default_model import SMOLLM2

PYTHONS = ((3, 11), (3, 13))  # the first and the last that are supported
_LITTLE_MEMORY = 2 * 2**30  # torch and the processes take most of one
_TOO_LITTLE_MEMORY = 2**29
_LITTLE_DISK = 2**29  # the embedded model, kernels and recordings
_FEW_FILES = 4096  # a connection takes one
_TOO_FEW_FILES = 256  # the processes' own sockets and libraries
_LITTLE_SHARED_MEMORY = 2**28  # several GPUs exchange tensors through it; containers get 64 MiB by default
_TOKEN_BYTES = 23_040  # keys and values of a token of the embedded model
_SLOW_TIER = 4000  # tokens a second: two cores compute about half as many
_SECONDS = 20.0  # for a helper process
_CLUSTER_SECONDS = 120.0  # for one that asks a cluster


def run(config: Config, *, as_json: bool) -> int:
    """Print the report. Raises ConfigError with the first reason why nothing could be served here."""
    findings = []
    show = None if as_json else printer("")
    for finding in examine(config):
        findings.append(finding)
        if show is not None:
            show(finding)
    failure = next((finding for finding in findings if finding.status == "failed"), None)
    if as_json:
        report = {"ready": failure is None, "findings": [finding.as_json() for finding in findings]}
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        print("\n   octavo doctor MODEL checks whether a model can be served here, and how much memory it needs")
    if failure is not None:
        raise ConfigError(f"{failure.check}: {failure.message}")
    return 0


def examine(config: Config) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. The checks with torch come last: importing it takes seconds."""
    yield _python()
    yield _processor()
    yield from _kernels()
    yield _open_files()
    yield _port(config.server.host, config.server.port)
    yield _folder("temporary", Path(tempfile.gettempdir()), "TMPDIR", is_needed=True)
    yield _cache()
    if (tier := read_tiers(config.cache.kv_tier).disk) is not None:
        yield _tier(tier)
    if config.parallel.uses_ray:
        yield _cluster(config.fleet.ray_address)
    yield _confinement()
    yield _hub()
    yield from _with_torch(config)


# ── the system ──────────────────────────────────────────────────────────────────────────────────────


def _python() -> Finding:
    text = f"{platform.python_version()}, {version.details()['python'].split(', ', 1)[1]}"
    (first, last), found = PYTHONS, sys.version_info[:2]
    if not first <= found <= last:
        return Finding("python", "failed", f"{text}: Octavo needs 3.{first[1]} to 3.{last[1]}")
    if sys.platform != "linux":
        return Finding("python", "warning", f"{text}: Octavo is tested on Linux only")
    return Finding("python", "ok", text)


def _processor() -> Finding:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    cores = usable_cores()
    all_cores = os.cpu_count() or cores
    share = f" of {all_cores} (affinity or a container's quota)" if cores < all_cores else ""
    return Finding("processor", "ok", f"{name}, {cores} core{'s' if cores != 1 else ''}{share}")


def _kernels() -> Iterator[Finding]:
    has_kernels, text = version.kernels()
    try:
        command = build.find_compiler()
        compiler, why = _first_line([*command, "--version"]) or command[0], ""
    except build.NoCompiler as error:
        compiler, why = "", str(error)
    if compiler:
        yield Finding("compiler", "ok", compiler)
    elif has_kernels:
        yield Finding("compiler", "ok", f"{why}; none is needed, the kernels are built")
    else:
        yield Finding("compiler", "warning", f"{why}: install g++, or a wheel with the kernels")
    if has_kernels:
        yield Finding("kernels", "ok", text)
    elif compiler and "OCTAVO_NATIVE" not in text:
        yield Finding("kernels", "ok", f"{text}, in about a minute")
    else:
        yield Finding(
            "kernels", "warning", f"{text if compiler else 'none'}: torch computes on a CPU, several times slower"
        )


def _first_line(command: list[str]) -> str:
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.splitlines()[0] if ran.returncode == 0 and ran.stdout else ""


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    raised = f"; the soft limit of {soft:,} is raised at the start" if soft < hard else ""
    if hard < _TOO_FEW_FILES:
        return Finding("open files", "failed", f"the hard limit is {hard:,}: raise it to {_FEW_FILES:,} (ulimit -Hn)")
    if hard < _FEW_FILES:
        advice = "each connection takes one: raise it (ulimit -Hn, LimitNOFILE=)"
        return Finding("open files", "warning", f"the hard limit is {hard:,}, {advice}{raised}")
    return Finding("open files", "ok", f"{hard:,}{raised}")


def _port(host: str, port: int) -> Finding:
    try:
        listener = listen(host, port)
    except ConfigError as error:
        return Finding("port", "failed", error.message)
    try:
        listener.listen(1)
    except OSError as error:
        return Finding("port", "failed", cannot_listen(host, port, error).message)
    finally:
        listener.close()
    return Finding("port", "ok", f"{host}:{port} is free")


# ── disk ────────────────────────────────────────────────────────────────────────────────────────────


def _cache() -> Finding:
    try:
        folder = build.cache_folder()
    except RuntimeError:
        return Finding("cache", "warning", "no home folder to keep models and kernels in: set OCTAVO_CACHE to a folder")
    finding = _folder("cache", folder, "OCTAVO_CACHE", is_needed=False)
    model = folder / SMOLLM2.file_name
    has_model = model.exists() and model.stat().st_size == SMOLLM2.num_bytes
    about = "the embedded model is there" if has_model else "the embedded model is fetched into it at the first start"
    return Finding(
        "cache", finding.status, f"{finding.message}; {about}" if finding.status == "ok" else finding.message
    )


def _folder(check: str, folder: Path, variable: str, *, is_needed: bool) -> Finding:
    """Whether a folder, or the nearest one above it that exists, can be written, and its free space."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    try:
        with tempfile.TemporaryFile(dir=at) as file:
            file.write(b"octavo")
        free = shutil.disk_usage(at).free
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror or error}): set {variable} to a folder that can"
        return Finding(check, "failed" if is_needed else "warning", text)
    if free < _LITTLE_DISK:
        return Finding(check, "warning", f"{folder} has only {size(free)} free: set {variable} to another folder")
    return Finding(check, "ok", f"{folder}, {size(free)} free")


def _tier(tier: DiskTier) -> Finding:
    """Whether the disk of --kv-tier is fast enough to help."""
    folder = Path(tier.folder)
    try:
        pace, free = disk_pace.measure(folder), shutil.disk_usage(_existing(folder)).free
    except OSError as error:
        return Finding(
            "kv tier",
            "failed",
            f"{folder} cannot be written ({error.strerror or error}): give --kv-tier another folder",
        )
    tokens = pace.read / _TOKEN_BYTES
    text = f"{folder} reads {size(int(pace.read))}/s and writes {size(int(pace.write))}/s: {tokens:,.0f} tokens/s of the embedded model"
    if free < tier.max_bytes:
        return Finding(
            "kv tier", "warning", f"{text}; {size(free)} is free, less than the {size(tier.max_bytes)} of --kv-tier"
        )
    if tokens < _SLOW_TIER:
        return Finding("kv tier", "warning", f"{text}: computing may be faster, and then nothing is loaded")
    return Finding("kv tier", "ok", text)


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _hub() -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    home = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME") or "~/.cache/huggingface"
    parts = [
        "HF_HUB_OFFLINE: downloaded models only"
        if offline
        else f"at {os.environ.get('HF_ENDPOINT') or 'its default address'}",
        f"models in {home}",
        "with HF_TOKEN" if os.environ.get("HF_TOKEN") else "without HF_TOKEN: gated models cannot be fetched",
    ]
    return Finding("hub", "skipped", f"not asked; {', '.join(parts)}")


def _cluster(address: str) -> Finding:
    """Ask Ray in a process of its own: it may end the one that it is loaded into."""
    path = os.pathsep.join(filter(None, (str(version.PACKAGE.parent), os.environ.get("PYTHONPATH", ""))))
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "octavo.cluster.survey", *([address] if address else [])],
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CLUSTER_SECONDS,
            check=False,
        )  # fmt: skip
        found = json.loads(ran.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return Finding("cluster", "failed", f"Ray could not be asked: {error}")
    if "message" not in found:
        return Finding("cluster", "ok", found["words"])
    is_none = not address and "would start one" in found["message"]
    return Finding("cluster", "warning" if is_none else "failed", found["message"])


def _confinement() -> Finding:
    """Whether the processes that compile requests' grammars and templates can be cut off from files and the network."""
    code = "import sys; from octavo.sandbox.seccomp import restrict_system_calls as on; sys.exit(not on())"
    path = os.pathsep.join(filter(None, (str(version.PACKAGE.parent), os.environ.get("PYTHONPATH", ""))))
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("confinement", "warning", f"could not be tried: {error}")
    if ran.returncode == 0:
        return Finding(
            "confinement", "ok", "grammars and templates of requests are compiled without access to the system"
        )
    why = "no seccomp filter here: grammars and templates of requests are compiled under limits of time and memory only"
    return Finding("confinement", "warning", why)


# ── torch, memory, GPUs ─────────────────────────────────────────────────────────────────────────────


def _with_torch(config: Config) -> Iterator[Finding]:
    try:
        device = importlib.import_module("octavo.device")
    except Exception as error:  # a broken installation fails in many ways, also in ImportError's relatives
        yield Finding("torch", "failed", f"cannot be imported ({error}): install Octavo again")
        yield Finding("memory", "skipped", "not checked, because torch failed")
        yield Finding("GPU", "skipped", "not checked, because torch failed")
        return
    torch, cuda = device.torch_build()
    yield Finding("torch", "ok", f"{torch}, {f'built for CUDA {cuda}' if cuda else 'a CPU build'}")
    yield _memory(device.Device("cpu").memory_available())
    yield _gpu(config, device, cuda, len(_gpus_of_system()))


def _memory(available: int) -> Finding:
    text = f"{size(available)} available"
    if available < _TOO_LITTLE_MEMORY:
        return Finding(
            "memory", "failed", f"{text}: even the embedded model needs more than {size(_TOO_LITTLE_MEMORY)}"
        )
    if available < _LITTLE_MEMORY:
        return Finding("memory", "warning", f"{text}: enough for the embedded model, little for others")
    return Finding("memory", "ok", text)


def _gpus_of_system() -> list[Path]:
    return sorted(Path("/proc/driver/nvidia/gpus").glob("*"))


def _gpu(config: Config, device: Any, cuda: str, num_in_system: int) -> Finding:
    found = device.gpus()
    if not found:
        try:
            device.pick(config.model.device)
        except ConfigError as error:
            return Finding("GPU", "failed", error.message)
        if num_in_system and not cuda:
            text = f"this machine has {num_in_system}, but this torch is a CPU build: install a CUDA build of torch"
            return Finding("GPU", "warning", text)
        if num_in_system:
            text = f"this machine has {num_in_system}, but torch sees none: check CUDA_VISIBLE_DEVICES and the driver (for CUDA {cuda})"
            return Finding("GPU", "warning", text)
        return Finding("GPU", "ok", "none: models run on the CPU")
    text = ", ".join(
        f"{gpu.name} (capability {gpu.capability[0]}.{gpu.capability[1]}, {size(gpu.free)} of {size(gpu.total)} free)"
        for gpu in found
    )
    problem = _about_triton() or (_about_shared_memory() if len(found) > 1 else "")
    if problem:
        return Finding("GPU", "warning", f"{text}: {problem}")
    return Finding("GPU", "ok", text)


def _about_triton() -> str:
    """Triton compiles a small C file against Python's headers the first time that it runs."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed, so that torch computes in place of the kernels"
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))):
        return "no C compiler, which Triton needs: install gcc"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return f"no Python.h, which Triton needs: install python3.{sys.version_info[1]}-dev"
    return ""


def _about_shared_memory() -> str:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return "no /dev/shm, which several GPUs need"
    if free < _LITTLE_SHARED_MEMORY:
        return f"/dev/shm has {size(free)} free, and several GPUs need {size(_LITTLE_SHARED_MEMORY)} (docker: --shm-size 1g)"
    return ""
