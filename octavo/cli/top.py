"""`octavo top`: shows a running server in the terminal: rows, queue, pages, and what requests wait for. It follows the server's
live feed and reconnects when that breaks off."""

import os
import select
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from octavo.cli.chat import Remote
from octavo.cli.top_screen import Screen
from octavo.errors import EngineUnavailable, OctavoError, RequestFailed

ROUTE, HISTORY = "/live", "/live/history?seconds=300"  # below the server's /v1
ONCE_SECONDS = 1.0
"""For one look the feed is followed for this long: rates are differences."""
RETRY_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A feed that sends nothing for this long is lost: it sends four times a second."""
FIRM = (400, 401, 403, 404)
"""Statuses for which a retry is pointless."""
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # alternate screen without a cursor; and back


def run(url: str, api_key: str, once: bool = False) -> int:
    server = Remote(url, api_key, timeout=SILENCE_SECONDS)
    screen = Screen()
    if once or not sys.stdout.isatty():
        return _lines(server, screen, once)
    with _terminal(), suppress(KeyboardInterrupt):
        _follow(server, screen)
    return 0


def _lines(server: Remote, screen: Screen, once: bool) -> int:
    """Print one line for each state, for a file or a pipe. `once`: print the whole screen after ONCE_SECONDS, and end."""
    with suppress(KeyboardInterrupt):
        if once:
            screen.remember(_history(server))
        for state in server.events(ROUTE):
            screen.take(state)
            if not once:
                print(screen.summary(), flush=True)
            elif screen.seconds_seen >= ONCE_SECONDS:
                print("\n".join(screen.draw(*_size(), name="octavo top")))
                break
    return 0


def _history(server: Remote) -> dict[str, Any]:
    """The last minutes; empty where the server does not tell."""
    with suppress(RequestFailed, EngineUnavailable):
        return server.read(HISTORY)
    return {}


def _follow(server: Remote, screen: Screen) -> None:
    """Show the feed until the user quits. Raises the error if there never was a feed, or if a retry is pointless."""
    with _Feed(server) as feed:
        while True:
            has_key = feed.wait()
            for news in feed.take():
                match news:
                    case OctavoError():
                        if screen.is_empty or server.status in FIRM:
                            raise news
                        screen.lose(_short(news), time.strftime("%H:%M:%S"))
                    case "history", past:
                        screen.remember(past)
                    case _, state:
                        screen.take(state)
            if not screen.is_empty:
                _show(screen)
            if has_key and _is_quit():
                return


class _Feed:
    """Reads the feed in a thread, so that a key is heard at once also while the server is silent."""

    def __init__(self, server: Remote) -> None:
        self._server = server
        self._news: deque[tuple[str, dict[str, Any]] | OctavoError] = deque(maxlen=100)
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Feed":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the thread to the end of the process: it may wait for the server."""

    def wait(self) -> bool:
        """Wait for news or a key, at most RETRY_SECONDS. Returns whether a key was pressed."""
        keys = [sys.stdin] if sys.stdin.isatty() else []
        ready, _, _ = select.select([self._reader, *keys], [], [], RETRY_SECONDS)
        if self._reader in ready:
            os.read(self._reader, 4096)
        return sys.stdin in ready

    def take(self) -> Iterator[tuple[str, dict[str, Any]] | OctavoError]:
        while self._news:
            yield self._news.popleft()

    def _run(self) -> None:
        while True:
            try:
                self._tell(("history", _history(self._server)))
                for state in self._server.events(ROUTE):
                    self._tell(("state", state))
            except (RequestFailed, EngineUnavailable) as error:
                self._tell(error)
            time.sleep(RETRY_SECONDS)

    def _tell(self, news: tuple[str, dict[str, Any]] | OctavoError) -> None:
        self._news.append(news)
        os.write(self._writer, b".")


def _show(screen: Screen) -> None:
    is_coloured = "NO_COLOR" not in os.environ and os.environ.get("TERM", "") not in ("", "dumb")
    lines = [line + CLEAR_LINE for line in screen.draw(*_size(), is_coloured)]
    print(HOME + "\r\n".join(lines) + CLEAR_BELOW, end="", flush=True)


def _short(error: OctavoError) -> str:
    return " ".join(error.message.split())


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size((100, 40))
    return size.columns, size.lines


def _is_quit() -> bool:
    """Whether the keys that were pressed include q, or Ctrl-D. The end of the input counts, too."""
    keys = os.read(sys.stdin.fileno(), 64).lower()
    return not keys or b"q" in keys or b"\x04" in keys


@contextmanager
def _terminal() -> Iterator[None]:
    """Switch to the alternate screen and to unbuffered keys, and restore both at the end."""
    before: list[Any] | None = None
    if sys.stdin.isatty():
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
    print(ENTER, end="", flush=True)
    try:
        yield
    finally:
        print(LEAVE, end="", flush=True)
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
