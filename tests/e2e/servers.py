"""A real server in processes of its own, found by the address it prints."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from tests.processes import children_of

START_LIMIT_S = 180  # a busy machine is slow; a healthy start takes seconds


class Server:
    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        module: str = "octavo.cli.main",
        python: str = sys.executable,
    ) -> None:
        self.process = subprocess.Popen(
            [python, "-m", module, "serve", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.base = ""
        if not self._is_ready.wait(START_LIMIT_S) or not self.base:
            self.__exit__()
            raise RuntimeError("the server did not start:\n" + "\n".join(self.lines))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"ready after .*(https?://\S+)/v1", line):
                self.base = found[1]
                self._is_ready.set()
        self._is_ready.set()

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self._open(urllib.request.Request(self.base + path, headers=headers))

    def post(self, path: str, body: object, **headers: str) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(
            urllib.request.Request(self.base + path, data, {"Content-Type": "application/json", **headers})
        )

    def metrics(self) -> dict[str, float]:
        status, text = self.get("/metrics")
        assert status == 200, text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def metric(self, name: str, label: str = "") -> float:
        return sum(v for k, v in self.metrics().items() if k.split("{")[0] == name and label in k)

    def in_use(self) -> tuple[float, float, float]:
        """(running, waiting, pages in use)"""
        metrics = self.metrics()

        def total(name: str, label: str = "") -> float:
            return sum(v for k, v in metrics.items() if k.split("{")[0] == name and label in k)

        return (
            total("vllm:num_requests_running"),
            total("vllm:num_requests_waiting"),
            total("octavo:kv_pages", 'state="used"'),
        )

    def wait_until_idle(self, limit_s: float = 30) -> tuple[float, float, float]:
        deadline = time.monotonic() + limit_s
        while (state := self.in_use()) != (0, 0, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        return state

    def wait_until_running(self, num_requests: int, limit_s: float = 60) -> None:
        deadline = time.monotonic() + limit_s
        while self.in_use()[0] < num_requests:
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.02)

    def children(self) -> dict[int, str]:
        """Processes it started: number → command line."""
        return children_of(self.process.pid)

    def engine(self) -> int:
        """The number of the engine's process."""
        (pid,) = (pid for pid, command in self.children().items() if command.endswith(("engine", "engine.process")))
        return pid

    def check_pages(self) -> None:
        """What a server that is well and has nothing to do says of its pages' books: nothing was ever wrong with them."""
        if not self.base.startswith("http://"):
            return  # its certificate is its own test's business
        if self.process.poll() is None and self.get("/health")[0] == 200 and self.get("/metrics")[0] == 200:
            metrics = self.metrics()
            assert not sum(v for k, v in metrics.items() if "octavo:page_audits_total" in k and "wrong" in k), (
                self.lines
            )

    def terminate(self, limit_s: float = 60) -> int:
        self.check_pages()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        self.process.stderr.close()

    def _open(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
