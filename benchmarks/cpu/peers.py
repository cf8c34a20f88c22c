"""The servers compared: Octavo, and the peers that are installed, each with the command that serves the same model.
Files converted from the model's file are kept in the cache folder."""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu import hf_folder
from benchmarks.cpu.loads import MODEL_NAME, Load
from benchmarks.cpu.servers import PORT, Server
from benchmarks.cpu.targets import OCTAVO, OCTAVO_FLOAT32
from octavo.errors import ConfigError
from octavo.weights.sources.default_model import cache_folder
from octavo.weights.sources.source import ModelSource

LLAMA = "llama.cpp"
NAMES = (OCTAVO, OCTAVO_FLOAT32, LLAMA, f"{LLAMA}-q8_0", f"{LLAMA}-f32", "vllm-float32")
_ROOT = Path(__file__).resolve().parents[2]
_LLAMA_SIDE = str(Path(__file__).with_name("llama_side.py"))
_VLLM_KV_GIB = 4
_VLLM_START_S = 600.0  # it compiles: usually two minutes, longer the first time


class Skipped(Exception):
    """Raised with the reason why a server takes no part."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The inputs of all commands."""

    source: ModelSource
    loads: Sequence[Load]
    cores: tuple[int, ...]
    llama_server: str  # a binary; empty: none
    llama_python: str  # an interpreter with llama_cpp; empty: none
    vllm_python: str
    cache: Path  # where files converted from the model's file are kept

    @property
    def threads(self) -> str:
        return str(len(self.cores))

    @property
    def num_streams(self) -> int:
        return max(load.num_streams for load in self.loads)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with room for words of two tokens."""
        return max(load.longest for load in self.loads) + 128


def setting(arguments: argparse.Namespace, source: ModelSource, loads: Sequence[Load]) -> Setting:
    """Check the given paths and look for those that were not given."""
    return Setting(
        source,
        loads,
        tuple(sorted(os.sched_getaffinity(0))),
        _program("--llama-server", arguments.llama_server) or shutil.which("llama-server") or "",
        _interpreter("--llama-python", arguments.llama_python, "llama_cpp"),
        _interpreter("--vllm-python", arguments.vllm_python, "vllm"),
        cache_folder() / "benchmarks",
    )


def _program(flag: str, path: str) -> str:
    if path and not shutil.which(path):
        raise ConfigError(f"{flag} {path} is not a program: give the path of an executable")
    return shutil.which(path) or "" if path else ""


def _interpreter(flag: str, path: str, package: str) -> str:
    """Return an interpreter that has the package; empty: none was named, and this one lacks it."""
    if not path:
        return sys.executable if importlib.util.find_spec(package) else ""
    # Not resolved: the interpreter of a virtual environment is a link, and which one it is depends on the link's place.
    program = _program(flag, path)
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([program, "-c", look], capture_output=True, check=False).returncode:
        raise ConfigError(f"{flag} {path} has no {package}: give an interpreter that has it, or leave the flag out")
    return os.path.abspath(program)


def servers(wanted: Sequence[str], given: Setting) -> tuple[list[Server], dict[str, str]]:
    """Return the servers that take part, and why each of the others does not."""
    found, skipped = [], {}
    for name in wanted:
        try:
            found.append(_MAKERS[name](name, given))
        except Skipped as reason:
            skipped[name] = str(reason)
    return found, skipped


def _octavo(name: str, given: Setting) -> Server:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(given.source.path), "--port", PORT]
    command += ["--served-model-name", MODEL_NAME]
    if name == OCTAVO_FLOAT32:
        command += ["--dtype", "float32"]
    return Server(name, tuple(command), is_peer=False, is_float32=name == OCTAVO_FLOAT32)


# ── llama.cpp ───────────────────────────────────────────────────────────────────────────────────────


def _llama(name: str, given: Setting) -> Server:
    if not given.llama_server and not given.llama_python:
        raise Skipped("not installed (--llama-server, --llama-python)")
    if given.source.kind != "gguf":
        raise Skipped(f"{given.source.path} is not a GGUF file")
    kind = name.removeprefix(LLAMA).lstrip("-")
    file = llama_file(kind, given) if kind else given.source.path
    make = _llama_binary if given.llama_server else _llama_package
    return make(name, file, given)


def llama_file(kind: str, given: Setting) -> Path:
    """Return the model's file with its weights as `kind`, converted once by llama.cpp itself."""
    target = _kept(given, f"{kind}.gguf")
    if not target.exists():
        if not given.llama_python:
            raise Skipped("converting the file needs llama-cpp-python, which is not installed (--llama-python)")
        code = ask_llama(given.llama_python, "convert", str(given.source.path), str(target), kind, given.threads)
        if code:
            raise Skipped(f"llama.cpp could not convert the file (code {code})")
    return target


def ask_llama(python: str, *arguments: str, stdin: str | None = None) -> Any:
    command = [python, _LLAMA_SIDE, *arguments]
    # A plain environment: that interpreter must not import our modules, such as the peers.py beside the script.
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=_plain_environment(), check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise Skipped(f"llama.cpp failed: {lines[-1].strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1"}


def _llama_binary(name: str, file: Path, given: Setting) -> Server:
    command = [given.llama_server, "--model", str(file), "--alias", MODEL_NAME, "--host", "127.0.0.1", "--port", PORT]
    command += ["--threads", given.threads, "--threads-batch", given.threads]
    # Every stream has a slot, and every slot has room for the longest request.
    command += ["--parallel", str(given.num_streams), "--ctx-size", str(given.num_streams * given.longest)]
    return Server(name, tuple(command), is_float32=name.endswith("f32"), remark="llama-server")


def _llama_package(name: str, file: Path, given: Setting) -> Server:
    python = given.llama_python
    command = [python, "-m", "llama_cpp.server", "--model", str(file), "--model_alias", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", PORT, "--n_ctx", str(given.longest)]
    command += ["--n_threads", given.threads, "--n_threads_batch", given.threads]
    # Left on, these would cost it the logits of every prompt token, and a stream would end when the next request arrives.
    command += ["--logits_all", "False", "--interrupt_requests", "False"]
    ends = ask_llama(python, "ends", str(file))
    return Server(
        name,
        tuple(command),
        environment={"PYTHONSAFEPATH": "1"},
        fields={"logit_bias": {str(token): -100.0 for token in ends}},  # it has no ignore_eos
        is_float32=name.endswith("f32"),
        remark=f"llama-cpp-python {ask_llama(python, 'version')}: serves one request at a time",
    )


# ── vLLM ────────────────────────────────────────────────────────────────────────────────────────────


def _vllm(name: str, given: Setting) -> Server:
    if not given.vllm_python:
        raise Skipped("not installed (--vllm-python)")
    # Not `vllm serve`: it asks for the version of a package named vllm, and the CPU build has another name.
    command = [given.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder_of(given))]
    command += ["--host", "127.0.0.1", "--port", PORT, "--served-model-name", MODEL_NAME, "--dtype", "float32"]
    command += ["--max-model-len", str(given.longest)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, given.cores)),
        "OMP_NUM_THREADS": given.threads,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
    }
    return Server(
        name, tuple(command), environment, start_limit_s=_VLLM_START_S, is_float32=True, remark="vLLM's OpenAI server"
    )


def folder_of(given: Setting) -> Path:
    """Return the model in Hugging Face's layout, converted once from a GGUF file."""
    source = given.source
    if source.kind == "folder":
        return source.path
    if why := hf_folder.check(source.path):
        raise Skipped(why)
    folder = _kept(given, "hf")
    if not folder.exists():
        command = [sys.executable, "-m", "benchmarks.cpu.hf_folder", str(source.path), str(folder)]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Skipped(f"the folder could not be written: {(done.stderr.splitlines() or ['?'])[-1]}")
    return folder


def _kept(given: Setting, ending: str) -> Path:
    """Return a path by the file's name and size, so that another file of that name is not taken for it."""
    file = given.source.path
    given.cache.mkdir(parents=True, exist_ok=True)
    return given.cache / f"{file.stem}-{file.stat().st_size}.{ending}"


_MAKERS: dict[str, Callable[[str, Setting], Server]] = {
    name: _octavo if name.startswith(OCTAVO) else _llama if name.startswith(LLAMA) else _vllm for name in NAMES
}
