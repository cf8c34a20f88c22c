"""Runs a command in a pseudo-terminal of a given size and reads its screen."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

HOME = "\x1b[H"


class Terminal:
    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int],
        environment: dict[str, str] | None = None,
        controls: bool = False,
    ) -> None:
        """`size`: columns and lines. `controls`: the terminal is that of the command's session, as in a window."""
        self._ours, theirs = os.openpty()
        self.resize(*size)
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli.main", *arguments],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            env={**clean, "TERM": "xterm-256color", **(environment or {})}, start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)) if controls else None,
        )  # fmt: skip
        os.close(theirs)
        self.raw = ""

    @property
    def fd(self) -> int:
        return self._ours

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, condition: Callable[[str], bool], seconds: float = 60) -> str:
        """Wait until the screen meets the condition, and return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.raw += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
                if condition(self.screen()):
                    return self.screen()
        raise AssertionError(f"the screen did not become as wanted:\n{self.screen()}")

    def screen(self) -> str:
        """The last complete screen."""
        pictures = re.findall(r"\x1b\[H(.*?)\x1b\[J", self.raw, re.S)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", pictures[-1]).replace("\r", "") if pictures else ""

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def close(self) -> tuple[int, str]:
        """Wait for the command to end. Return (exit code, stderr)."""
        assert self.process.stderr is not None
        try:
            code = self.process.wait(30)
            with self.process.stderr as stderr:
                return code, stderr.read().decode()
        finally:
            self.process.kill()
            os.close(self._ours)
