"""Reception: accepts connections and hands each to the next API process in turn, as a descriptor over a UNIX socket.
Knows nothing of HTTP, and never reads from a connection.

Processes that all accept from one socket share unevenly: whoever is awake takes a burst, and then works for the others."""

import contextlib
import resource
import socket
import threading
import time

_PATIENCE_SECONDS = 1.0
_MAX_DESCRIPTORS = 2**20  # more than anybody needs: some systems allow a thousand times that
RETRY_SECONDS = 0.01  # while no API process has room for one more connection, or this one for one more descriptor


class Acceptor:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._channels: list[socket.socket] = []
        self._turn = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-reception", daemon=True)

    def channel(self) -> tuple[socket.socket, socket.socket]:
        """Our end, and the one that an API process is to inherit; the caller closes that then, and deals to ours once the process
        can answer."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        return ours, theirs

    def deal_to(self, ours: socket.socket) -> None:
        self._channels.append(ours)

    def open(self, backlog: int) -> None:
        """Raises OSError where the port was taken meanwhile."""
        self._listener.listen(backlog)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # never opened
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone would not
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE_SECONDS)  # where that wakes nobody, it ends with the process
        for each in (self._listener, *self._channels):
            each.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(RETRY_SECONDS)  # a client that left already, or no descriptors for now
                continue
            with connection:
                with contextlib.suppress(OSError):  # some systems refuse it where the client has left already
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Without any API process it waits for the next one; whoever comes after it waits in the backlog.
                while not self._is_closed and not self._hand_over(connection):
                    time.sleep(RETRY_SECONDS)

    def _hand_over(self, connection: socket.socket) -> bool:
        """To the next process that takes it. One that has ended is not asked again."""
        for _ in range(len(self._channels)):
            self._turn = (self._turn + 1) % len(self._channels)
            channel = self._channels[self._turn]
            try:
                socket.send_fds(channel, [b"c"], [connection.fileno()])
                return True
            except (BrokenPipeError, ConnectionResetError):
                self._channels.remove(channel)
                channel.close()
                if not self._channels:
                    break
            except OSError:  # it has no room
                continue
        return False


def raise_descriptor_limit() -> None:
    """Of this process and of those it starts, to what it may be: most systems grant 1024 to who does not ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # a system with a limit besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def take_connections(channel: socket.socket, full_from: int = _MAX_DESCRIPTORS) -> list[socket.socket]:
    """The API process's side: what has been handed over since, up to one whose number is `full_from` or more: the kernel closes
    those for which there is no descriptor, without a word. Raises EOFError when there will be no more."""
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
