"""Acceptor: accepts connections and passes each to the next API process, round robin, as a descriptor over a UNIX socket.
It never reads from a connection.

Processes that all accept from one socket share the load unevenly: the process that is awake takes the whole burst."""

import contextlib
import resource
import socket
import threading
import time

_JOIN_SECONDS = 1.0
_MAX_DESCRIPTORS = 2**20  # more than a server needs; some systems allow a thousand times that
RETRY_SECONDS = 0.01  # when no API process has room for a connection, or this process has no free descriptor


class Acceptor:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._channels: list[socket.socket] = []
        self._last = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-acceptor", daemon=True)

    def channel(self) -> tuple[socket.socket, socket.socket]:
        """Make a socket pair: (our end, the end that an API process inherits). The caller closes the second after the spawn, and
        passes the first to `add_channel` once the process can answer."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        return ours, theirs

    def add_channel(self, ours: socket.socket) -> None:
        self._channels.append(ours)

    def open(self, backlog: int) -> None:
        """Listen and start accepting. Raises OSError if the port was taken since it was bound."""
        self._listener.listen(backlog)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # never opened
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone would not
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)  # if shutdown() does not wake accept(), the daemon thread ends with us
        for each in (self._listener, *self._channels):
            each.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(RETRY_SECONDS)  # the client has left already, or there are no free descriptors now
                continue
            with connection:
                with contextlib.suppress(OSError):  # some systems refuse this when the client has left already
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Without an API process the connection waits for the next one; later ones wait in the listen backlog.
                while not self._is_closed and not self._pass_on(connection):
                    time.sleep(RETRY_SECONDS)

    def _pass_on(self, connection: socket.socket) -> bool:
        """Pass the connection to the next process that has room; False if none has. Drops the channels of ended processes."""
        for _ in range(len(self._channels)):
            self._last = (self._last + 1) % len(self._channels)
            channel = self._channels[self._last]
            try:
                socket.send_fds(channel, [b"c"], [connection.fileno()])
                return True
            except (BrokenPipeError, ConnectionResetError):
                self._channels.remove(channel)
                channel.close()
                if not self._channels:
                    break
            except OSError:  # its socket buffer is full
                continue
        return False


def raise_descriptor_limit() -> None:
    """Raise RLIMIT_NOFILE to the hard limit for this process and its children (the soft default is usually 1024)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # some systems have another limit besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def take_connections(channel: socket.socket, full_from: int = _MAX_DESCRIPTORS) -> list[socket.socket]:
    """Receive, in the API process, the connections passed since the last call. Stops after a descriptor number of `full_from` or
    more, because the kernel silently closes connections that get no descriptor. Raises EOFError once the channel is closed."""
    taken: list[socket.socket] = []
    while not taken or taken[-1].fileno() < full_from:
        try:
            word, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        except BlockingIOError:
            return taken
        taken += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if not word:
            if taken:
                return taken
            raise EOFError
    return taken
