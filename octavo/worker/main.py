"""A rank's process: it receives its RankStart, loads, allocates, then runs every plan that arrives on its pipe.

Started as `python -m octavo.worker.main PIPE SIDE LIFELINE PARENT_SIGNAL`: three inherited file descriptors, and 1 if the
kernel may kill this process when the thread that started it ends. SIDE carries messages that must not wait for a step."""

import contextlib
import ctypes
import functools
import logging
import os
import signal
import sys
import threading
import traceback
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import ConfigError
from octavo.messages import Allocate, PrepareGrammar, RankFailed, RankStart, StepPlan
from octavo.observe import logs
from octavo.weights.sources.source import ModelSource

if TYPE_CHECKING:
    from octavo.sampling.grammar.masks import Grammars

OK = b"\x00"
FAILED = b"\x01"

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    pipe, side, lifeline, parent_signal = map(int, arguments)
    # Ctrl-C and a service manager's SIGTERM reach every process of the group. Only the parent reacts to them, since it may
    # have requests to finish. A worker stops when the lifeline is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if parent_signal and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    connection = Connection(pipe)
    try:
        _serve(connection, Connection(side))
    except EOFError:
        code = 0  # the parent closed the pipe
    except ConfigError as error:
        code = _last_words(connection, RankFailed(True, error.message))
    except BaseException:
        code = _last_words(connection, RankFailed(False, traceback.format_exc()))
    logging.shutdown()
    # Not sys.exit: tearing down a process group may wait for ranks that have exited.
    os._exit(code)


def _serve(connection: Connection, side: Connection) -> None:
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=RankStart)
    logs.install(logging.WARNING, start.config.server.log_format)
    sys.stdout = sys.stderr
    # Imported here, so that a failing import is reported to the parent like any other error.
    from octavo.device import pick
    from octavo.parallel import init_group
    from octavo.worker.load import Loader
    from octavo.worker.step import LaunchedStep

    device = pick(start.config.model.device, start.rank).torch_device
    group = init_group(
        start.rank, start.num_ranks, start.rendezvous, device, is_deterministic=start.config.model.deterministic
    )
    source = ModelSource(Path(start.model_path), start.model_name, start.model_kind)
    loader = Loader(start.config, source, start.rank, group)
    encoder = msgspec.msgpack.Encoder()
    connection.send_bytes(OK + encoder.encode(loader.load()))
    allocate = msgspec.msgpack.decode(connection.recv_bytes(), type=Allocate)
    runner, _ = loader.allocate(allocate.num_pages, allocate.num_host_pages)
    connection.send_bytes(OK)
    threading.Thread(target=_prepare, args=(side, runner.rows.sampling.grammars), daemon=True).start()
    plans = msgspec.msgpack.Decoder(StepPlan)
    steps: deque[LaunchedStep] = deque()
    while True:
        # Send finished steps first; then start a plan that has arrived before waiting for an earlier step.
        if not steps or (not steps[0].is_done() and connection.poll()):
            steps.append(runner.launch(plans.decode(connection.recv_bytes())))
        else:
            result = steps.popleft().result()
            if start.rank == 0:
                connection.send_bytes(OK + encoder.encode(result))


def _prepare(side: Connection, grammars: "Grammars") -> None:
    decoder = msgspec.msgpack.Decoder(PrepareGrammar)
    with contextlib.suppress(EOFError, OSError):  # _end_with_parent handles the parent's exit
        while True:
            message = decoder.decode(side.recv_bytes())
            said = str(message.number).encode()
            grammars.prepare(message.grammar, message.forgets, functools.partial(side.send_bytes, said))


def _last_words(connection: Connection, failed: RankFailed) -> int:
    try:
        connection.send_bytes(FAILED + msgspec.msgpack.encode(failed))
    except OSError:  # the parent has closed the pipe
        logging.getLogger("octavo.worker").error("a rank ends: %s", failed.message)
    return 1


def _end_with_parent(lifeline: int) -> None:
    """Exit with the parent, even in the middle of a step: only it holds the other end, and the read returns when that closes."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
