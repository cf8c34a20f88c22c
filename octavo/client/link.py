"""EngineLink: the sockets between an API process and one engine. Requests go out on one, everything the engine sends comes in on the
other. Each engine has its own addresses, so a closed link is a fence: nothing of its engine arrives any more."""

import asyncio
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from octavo.messages import FromEngine, Hello, ToEngine


def listen(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


class EngineLink:
    """To be made on the event loop that uses it. Messages may be sent before the engine has loaded."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        engine_address: str,
        reply_address: str,
        receive: Callable[[FromEngine], None],
        on_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`receive`: is called with each message. `on_end`: is called when the link is closed, or its reader has raised."""
        self.reply_address = reply_address
        self._receive = receive
        self._encoder = msgspec.msgpack.Encoder()
        self._from_engine = listen(zmq.asyncio.Context(context), reply_address)
        self._to_engine = context.socket(zmq.PUSH)
        self._to_engine.set_hwm(0)  # InflightLimit bounds what is sent
        self._to_engine.connect(engine_address)
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(on_end)

    def send(self, message: ToEngine | Hello) -> None:
        self._to_engine.send(self._encoder.encode(message))

    def close(self, linger: int = 0) -> None:
        """Drop the connection and what is still in it. `linger`: milliseconds that sent messages have to leave."""
        self._reader.cancel()
        self._from_engine.close(linger=linger)
        self._to_engine.close(linger=linger)

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            self._receive(decoder.decode(await self._from_engine.recv()))
