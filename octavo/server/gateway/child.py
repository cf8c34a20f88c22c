"""One model's server, as a child process of the gateway. It reads its configuration from standard input, and drains when that is closed: the
gateway has ended."""

import os
import signal
import sys
import threading

import msgspec

from octavo.config import Config
from octavo.errors import ConfigError
from octavo.ipc.stderr import say
from octavo.supervisor.supervisor import serve


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    threading.Thread(target=_watch_gateway, daemon=True).start()
    try:
        return serve(config, is_inner=True)
    except ConfigError as error:
        say(f"error: {' '.join(error.message.split())}")
        return 2


def _watch_gateway() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
