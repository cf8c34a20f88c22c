"""The engine process: one thread steps, one thread receives. The supervisor starts it with one line of JSON on standard input.

Standard input stays open for as long as the supervisor lives: end of file means stop, also if the supervisor was killed. The
process writes one line of JSON to standard output, the EngineReport, once it is ready. Logs go to standard error."""

import contextlib
import dataclasses
import gc
import logging
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import zmq

from octavo import __version__
from octavo.admission.queue_limit import QueueLimit
from octavo.engine.build import Engine, start_engine
from octavo.engine.driver import Driver, Inbox
from octavo.engine.pin_files import PinFiles
from octavo.errors import ConfigError
from octavo.ipc.heartbeat import PULSE_SECONDS, Heartbeat
from octavo.ipc.launch import EngineLaunch
from octavo.ipc.lazy_torch import can_be_lazy, lazy_torch
from octavo.ipc.memory_trim import drop_library_pages, keep_one_heap
from octavo.ipc.subprocesses import signal_at_parents_end
from octavo.messages import FromEngine, Hello, ToEngine
from octavo.observe import logs
from octavo.observe.history import History
from octavo.recording.format import FORMAT, Header
from octavo.recording.recorder import Recorder, Segments
from octavo.recording.ring import RecordingRing
from octavo.weights.sources.source import ModelSource

log = logging.getLogger("octavo.engine")

RECORDED = ("model", "cache", "scheduler", "parallel")
"""Sections of the configuration that a recording contains: never the server's, which has the API keys."""


class ZmqOutbox:
    """One PUSH socket per API process. Used only by the stepping thread; sending never waits for the receiver."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def connect(self, hello: Hello) -> None:
        if (old := self._sockets.pop(hello.origin, None)) is not None:
            old.close(linger=0)
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(hello.reply_to)
        self._sockets[hello.origin] = socket

    def send(self, origin: int, message: FromEngine) -> None:
        if (socket := self._sockets.get(origin)) is not None:
            socket.send(self._encoder.encode(message))

    def send_all(self, message: FromEngine) -> None:
        for origin in self._sockets:
            self.send(origin, message)

    def close(self) -> None:
        """Wait, at most half a second, until all messages are sent."""
        for socket in self._sockets.values():
            socket.close(linger=500)
        self._context.term()


def main() -> int:
    gc.disable()  # a start makes two hundred thousand objects that stay: collecting meanwhile would find nothing
    keep_one_heap()
    # The supervisor decides when to stop. A signal to the whole group must not end requests that API processes are draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGKILL)  # a step may hang for ever
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineLaunch)
    # Temporary files go to a folder that the supervisor removes, in case this process is killed.
    tempfile.tempdir = str(_folder(launch.address))
    if launch.member is not None and launch.member.cores:
        os.sched_setaffinity(0, launch.member.cores)
    report_pipe = _claim_stdout()
    logs.install(logging.WARNING, launch.config.server.log_format)
    sys.stdout = sys.stderr
    limits = launch.config.scheduler
    queue_limit = QueueLimit(limits.max_waiting_requests, limits.max_waiting_tokens)
    heartbeat = Heartbeat(launch.heartbeat_fd, 0 if launch.member is None else launch.member.replica)
    heartbeat.reset()
    if launch.member is not None:
        threading.Thread(target=_pulse, args=(heartbeat,), daemon=True).start()
    inbox: Inbox = queue.SimpleQueue()
    is_stepping = threading.Event()
    threading.Thread(target=_watch_supervisor, args=(inbox, is_stepping, launch.address), daemon=True).start()
    threading.Thread(target=_receive, args=(launch.address, inbox), daemon=True).start()
    source = ModelSource(path=Path(launch.model_path), name=launch.model_name, kind=launch.model_kind)
    try:
        with lazy_torch() if can_be_lazy(launch.config) else contextlib.nullcontext():
            history = History(launch.history_fd)
            engine = start_engine(
                launch.config,
                source,
                launch.served_name,
                heartbeat,
                queue_limit,
                history,
                launch.member,
                launch.number,
                launch.ranks,
                PinFiles(_folder(launch.address) / f"pins-{0 if launch.member is None else launch.member.replica}"),
            )
    except ConfigError as error:
        log.error("%s", error.message)
        return 2
    if launch.record_to:
        engine.loop.record(start_recorder(launch, engine))
    os.write(report_pipe, msgspec.json.encode(engine.report) + b"\n")
    # The objects alive now stay alive: exempt them from collection, and collect rarely.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
    if engine.report.memory is None:  # not with a GPU: its libraries are many, and its host has enough memory
        drop_library_pages()
    outbox = ZmqOutbox()
    is_stepping.set()
    try:
        Driver(engine, inbox, outbox, launch.num_servers).run()
    finally:
        engine.loop.close()
        outbox.close()
    return 0


def start_recorder(launch: EngineLaunch, engine: Engine) -> Recorder:
    config, with_tokens = launch.config.recorder, launch.config.recorder.record_tokens
    header = Header(
        format=FORMAT,
        version=__version__,
        wall=time.time(),
        clock=time.monotonic(),
        engine=str(launch.number),
        with_tokens=with_tokens,
        model=launch.model_name,
        model_path=launch.model_path,
        model_kind=launch.model_kind,
        options={section: dataclasses.asdict(getattr(launch.config, section)) for section in RECORDED},
        report=engine.report,
        root=engine.loop.scheduler.cache.root if with_tokens else b"",
    )
    segments = Segments(Path(launch.record_to), f"{launch.number:03d}", int(config.record_bytes))
    return Recorder(segments, header, RecordingRing(launch.ring_fd))


def _folder(address: str) -> Path:
    return Path(address.removeprefix("ipc://")).parent


def _claim_stdout() -> int:
    """Return a descriptor for the report, and redirect standard output to standard error for everything else."""
    report_pipe = os.dup(1)
    os.set_inheritable(report_pipe, False)
    os.dup2(2, 1)
    return report_pipe


def _pulse(heartbeat: Heartbeat) -> None:
    while True:
        heartbeat.pulse()
        time.sleep(PULSE_SECONDS)


def _receive(address: str, inbox: Inbox) -> None:
    decoder = msgspec.msgpack.Decoder(ToEngine)
    socket = zmq.Context().socket(zmq.PULL)
    socket.set_hwm(0)
    socket.bind(address)
    while True:
        try:
            inbox.put(decoder.decode(socket.recv()))
        except Exception:
            # An API process sent a message that we cannot decode. An engine that no longer receives is worse than one that
            # ends: the supervisor restarts the latter.
            log.critical("a message of an API process cannot be decoded", exc_info=True)
            logging.shutdown()
            os._exit(1)


def _watch_supervisor(inbox: Inbox, is_stepping: threading.Event, address: str) -> None:
    was_asked = False
    while os.read(sys.stdin.fileno(), 4096):
        was_asked = True  # to stop: the supervisor goes on
    # The supervisor removes the sockets' folder when it stops; if it was killed, this process has to.
    if not was_asked:
        shutil.rmtree(_folder(address), ignore_errors=True)
    if not is_stepping.is_set():  # still loading: there is nothing to close
        os._exit(0)
    inbox.put(None)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        log.critical("the engine ends", exc_info=True)
        code = 1
    logging.shutdown()
    with contextlib.suppress(OSError, AttributeError):  # a full disk, or no standard error at all
        sys.stderr.flush()
    os._exit(code)  # without waiting for the threads that block on sockets
