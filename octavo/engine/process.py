"""The engine process: one thread steps, one thread receives. Started by the supervisor with one JSON line on standard input.
Knows nothing of HTTP or of what a request says.

Standard input stays open for as long as the supervisor lives: its end is the order to stop, also when that was killed.
On standard output goes one JSON line, the EngineReport, once the engine is ready. Logs go to standard error."""

import gc
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from octavo.config import Config
from octavo.engine.build import start_engine
from octavo.engine.driver import Driver, Inbox
from octavo.errors import ConfigError
from octavo.messages import FromEngine, Hello, ToEngine
from octavo.weights.source import ModelSource


class EngineOrder(msgspec.Struct, frozen=True):
    """What the supervisor tells an engine process to be."""

    config: Config
    model_path: str
    model_kind: Literal["folder", "gguf"]
    model_name: str  # the model's own
    served_name: str  # what clients call it
    address: str  # where to listen for API processes


class ZmqOutbox:
    """One PUSH socket per API process. Used by the stepping thread alone; sending never waits for the receiver."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
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
        for socket in self._sockets.values():
            socket.close(linger=500)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOrder)
    inbox: Inbox = queue.SimpleQueue()
    is_stepping = threading.Event()
    threading.Thread(target=_watch_supervisor, args=(inbox, is_stepping), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    threading.Thread(target=_receive, args=(context, order.address, inbox), daemon=True).start()
    source = ModelSource(path=Path(order.model_path), name=order.model_name, kind=order.model_kind)
    try:
        engine = start_engine(order.config, source, order.served_name)
    except ConfigError as error:
        print(f"octavo: error: {error.message}", file=sys.stderr)
        return 2
    # What is alive now stays alive: the collector need not look at it again, nor look often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.stdout.buffer.write(msgspec.json.encode(engine.report) + b"\n")
    sys.stdout.buffer.flush()
    outbox = ZmqOutbox(context)
    is_stepping.set()
    try:
        Driver(engine, inbox, outbox).run()
    finally:
        engine.loop.close()
        outbox.close()
    return 0


def _receive(context: "zmq.Context[zmq.Socket[bytes]]", address: str, inbox: Inbox) -> None:
    decoder = msgspec.msgpack.Decoder(ToEngine)
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.bind(address)
    while True:
        inbox.put(decoder.decode(socket.recv()))


def _watch_supervisor(inbox: Inbox, is_stepping: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    if not is_stepping.is_set():  # still loading: nothing to put in order
        os._exit(0)
    inbox.put(None)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that wait on sockets are not worth waiting for
