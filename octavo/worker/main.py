"""A rank's process: it receives its RankStart, loads, allocates, then runs every plan that arrives on its pipe.

Started as `python -m octavo.worker.main PIPE SIDE LIFELINE PARENT_SIGNAL`: three inherited file descriptors, and 1 if the
kernel may kill this process when the thread that started it ends. SIDE carries messages that must not wait for a step.

Or, by a launcher and perhaps on another machine, as `python -m octavo.worker.main --connect HOST:PORT RANK`, with the engine's secret in
OCTAVO_RANK_SECRET: then the three are connections to the executor. With a further argument, the kernel kills it when its parent ends."""

import contextlib
import gc
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

import octavo
from octavo.errors import ConfigError
from octavo.ipc.lazy_torch import can_be_lazy, lazy_torch
from octavo.ipc.secure_channel import Refused, SecureConnection, connect, interface_of
from octavo.ipc.subprocesses import signal_at_parents_end
from octavo.messages import Allocate, RankFailed, RankHello, RankStart, StepPlan
from octavo.observe import logs
from octavo.weights.sources.source import ModelSource

OK = b"\x00"
FAILED = b"\x01"


def main(arguments: list[str]) -> None:
    # Ctrl-C and a service manager's SIGTERM reach every process of the group. Only the parent reacts to them, since it may
    # have requests to finish. A worker stops when the lifeline is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    connection: Connection | SecureConnection
    side: Connection | SecureConnection
    if arguments[0] == "--connect":
        if len(arguments) > 3:
            signal_at_parents_end(signal.SIGKILL)
        connection, side, lifeline, meeting = _join(arguments[1], int(arguments[2]))
    else:
        pipe, side_pipe, lifeline, parent_signal = map(int, arguments)
        if parent_signal:
            signal_at_parents_end(signal.SIGKILL)
        connection, side, meeting = Connection(pipe), Connection(side_pipe), None
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    try:
        _serve(connection, side, meeting)
    except EOFError:
        code = 0  # the parent closed the pipe
    except ConfigError as error:
        code = _last_words(connection, RankFailed(True, error.message))
    except BaseException:
        code = _last_words(connection, RankFailed(False, traceback.format_exc()))
    logging.shutdown()
    # Not sys.exit: tearing down a process group may wait for ranks that have exited.
    os._exit(code)


def _join(address: str, rank: int) -> "tuple[SecureConnection, SecureConnection, int, socket.socket | None]":
    """Connect to the executor. → the connections, the lifeline's descriptor, and for rank 0 the socket on which the ranks will meet."""
    secret = bytes.fromhex(os.environ.pop("OCTAVO_RANK_SECRET"))
    host, _, port = address.rpartition(":")
    lines: dict[str, SecureConnection] = {}
    meeting: socket.socket | None = None
    try:
        for channel in ("lifeline", "side", "steps"):  # the last says that this rank is here
            hello = RankHello(rank, channel)
            if channel == "steps":
                here = lines["side"].local_address
                if rank == 0:
                    meeting = socket.create_server((here, 0))
                meeting_port = 0 if meeting is None else meeting.getsockname()[1]
                torch_version = importlib.metadata.version("torch")
                hello = RankHello(rank, channel, octavo.__version__, torch_version, here, meeting_port)
            lines[channel] = connect((host, int(port)), secret, msgspec.msgpack.encode(hello))
    except (Refused, OSError) as error:
        sys.exit(f"rank {rank} cannot join its engine at {address}: {error}")
    # Collectives must use the network that leads to the executor; gloo would look up the host's name instead.
    if interface := interface_of(lines["side"].local_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    _joined.append(lines["lifeline"])
    return lines["steps"], lines["side"], lines["lifeline"].fileno(), meeting


_joined: list[SecureConnection] = []  # kept open until this process ends


def _serve(
    connection: Connection | SecureConnection, side: Connection | SecureConnection, meeting: socket.socket | None
) -> None:
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=RankStart)
    logs.install(logging.WARNING, start.config.server.log_format)
    sys.stdout = sys.stderr
    gc.disable()  # a start makes two hundred thousand objects that stay: collecting meanwhile would find nothing
    # Imported here, so that a failing import is reported to the parent like any other error.
    with lazy_torch() if can_be_lazy(start.config) else contextlib.nullcontext():
        from octavo.device import pick
        from octavo.parallel import init_ranks
        from octavo.worker.load import Loader
        from octavo.worker.side import FinishedPlans, SideWork
        from octavo.worker.step import LaunchedStep

    parallel = start.config.parallel
    device = pick(start.config.model.device, start.local_rank).torch_device
    ranks = init_ranks(
        start.rank,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        start.rendezvous,
        device,
        is_deterministic=start.config.model.deterministic,
        meeting=meeting,
    )
    source = ModelSource(Path(start.model_path), start.model_name, start.model_kind)
    loader = Loader(start.config, source, ranks, start.local_rank, start.num_local_ranks)
    encoder = msgspec.msgpack.Encoder()
    connection.send_bytes(OK + encoder.encode(loader.load()))
    allocate = msgspec.msgpack.decode(connection.recv_bytes(), type=Allocate)
    runner, _ = loader.allocate(allocate.num_pages, allocate.num_host_pages)
    connection.send_bytes(OK + encoder.encode(loader.time_steps()))
    gc.freeze()
    gc.enable()
    finished = FinishedPlans()
    threading.Thread(target=SideWork(side, runner, finished).serve, daemon=True).start()
    plans = msgspec.msgpack.Decoder(StepPlan)
    steps: deque[LaunchedStep] = deque()
    while True:
        # Send finished steps first; then start a plan that has arrived before waiting for an earlier step.
        if not steps or (not steps[0].is_done() and connection.poll()):
            steps.append(runner.launch(plans.decode(connection.recv_bytes())))
        else:
            result = steps.popleft().result()
            if start.rank == parallel.result_rank:
                connection.send_bytes(OK + encoder.encode(result))
            finished.add()


def _last_words(connection: Connection | SecureConnection, failed: RankFailed) -> int:
    try:
        connection.send_bytes(FAILED + msgspec.msgpack.encode(failed))
    except OSError:  # the parent has closed the pipe
        # A configuration error is the same on every rank, and the parent has closed because another rank has reported it.
        if not failed.is_config:
            logging.getLogger("octavo.worker").error("a rank ends: %s", failed.message)
    return 1


def _end_with_parent(lifeline: int) -> None:
    """Exit with the parent, even in the middle of a step: only it holds the other end, and the read returns when that closes."""
    with contextlib.suppress(OSError):  # a connection may be reset
        os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
