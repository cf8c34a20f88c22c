"""A rank's process: told who it is, it loads, allocates, then runs every plan that comes down the pipe.
Knows nothing of what the plans are for, nor of the other ranks' pipes.

Started as `python -m octavo.worker.main PIPE SIDE LIFELINE PARENT_SIGNAL`: three inherited file descriptors, and 1 where the
kernel may tie this process to the thread that started it. What must not wait for a step comes in at the side."""

import contextlib
import ctypes
import functools
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
from octavo.weights.sources.source import ModelSource

if TYPE_CHECKING:
    from octavo.sampling.grammar.masks import Grammars

OK = b"\x00"
FAILED = b"\x01"

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    pipe, side, lifeline, parent_signal = map(int, arguments)
    # Ctrl-C and a service manager's SIGTERM reach every process of the group; what they mean is for the parent to say,
    # which may still have requests to finish. The order to stop is the lifeline's end.
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
    # Not sys.exit: tearing down a process group whose other ranks are gone may wait for them.
    os._exit(code)


def _serve(connection: Connection, side: Connection) -> None:
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=RankStart)
    # Imported here, so that a failing import is reported to the parent like everything else.
    from octavo.device import pick
    from octavo.parallel import init_group
    from octavo.worker.load import Loader
    from octavo.worker.step import Step

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
    steps: deque[Step] = deque()
    while True:
        # What is done goes home first; then a plan that is already here starts before an earlier one is waited for.
        if not steps or (not steps[0].is_done() and connection.poll()):
            steps.append(runner.launch(plans.decode(connection.recv_bytes())))
        else:
            result = steps.popleft().result()
            if start.rank == 0:
                connection.send_bytes(OK + encoder.encode(result))


def _prepare(side: Connection, grammars: "Grammars") -> None:
    orders = msgspec.msgpack.Decoder(PrepareGrammar)
    with contextlib.suppress(EOFError, OSError):  # the parent's end is noticed elsewhere
        while True:
            order = orders.decode(side.recv_bytes())
            said = str(order.number).encode()
            grammars.prepare(order.grammar, order.forgets, functools.partial(side.send_bytes, said))


def _last_words(connection: Connection, failed: RankFailed) -> int:
    try:
        connection.send_bytes(FAILED + msgspec.msgpack.encode(failed))
    except OSError:  # nobody listens any more
        sys.stderr.write(failed.message)
    return 1


def _end_with_parent(lifeline: int) -> None:
    """Only the parent holds the other end: when it closes it, or dies, the read returns, even in the middle of a step."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
