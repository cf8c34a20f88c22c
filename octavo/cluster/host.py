"""Host: the Ray actor in which a rank's agent runs. It does nothing but start one process on its node, and wait for its end."""

import importlib
import importlib.metadata
import os
import platform
import site
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import octavo

_MAX_SAID = 2000  # characters of what the process wrote, for the log


class Host:
    """Ray ends the actor with the placer, or with its placement group; the kernel then ends the process, as its parent's end."""

    def about(self) -> dict[str, Any]:
        """Facts about the node."""
        ray: Any = importlib.import_module("ray")
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "name": socket.gethostname(),
            "gpus": [str(each) for each in ray.get_gpu_ids()],
            "versions": versions(),
        }

    def run(self, arguments: list[str], environment: dict[str, str]) -> str:
        """Run python with these arguments. → how it ended."""
        # Ray limits the threads of libraries in its workers; ranks are told how many they have.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        root = str(Path(octavo.__file__).parent.parent)
        if root not in site.getsitepackages():  # a checkout: the process must find the same code
            inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited.get("PYTHONPATH"), root)))
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**inherited, **environment},
        )
        said = process.communicate()[0].decode(errors="replace").strip()
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"its agent {how}{f': {said[-_MAX_SAID:]}' if said else ''}"


def versions() -> dict[str, str]:
    """Of what must be equal on all machines."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {"octavo": octavo.__version__, "torch": torch, "python": ".".join(platform.python_version_tuple()[:2])}
