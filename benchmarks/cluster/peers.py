"""Other projects' routers before Octavo servers: sglang-router and vllm-router, which proxy HTTP (pip install
sglang-router==0.3.2 vllm-router==0.1.16, in an environment of their own)."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_LIMIT_S = 60.0
PEER_MODEL = "any"  # the name under which servers behind them serve


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def peer_router(program: Path, servers: list[str]) -> Iterator[str]:
    """Run a router before these servers, with its policy for prefixes and its own defaults otherwise. Yields its URL."""
    port = free_port()
    launch = ["launch"] if "sglang" in program.name else []
    command = [str(program), *launch, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "cache_aware", "--worker-urls", *servers]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{program.name} did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    body = json.dumps({"model": PEER_MODEL, "prompt": "once", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False
