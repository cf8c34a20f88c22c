"""A channel between two processes on a network that others can reach: both sides prove that they know a secret, and every message is
signed. Messages are not encrypted.

The handshake: the listener sends a nonce; the connecting side sends its own, what it says of itself, and a signature over all of it; the
listener answers with a signature of its own. Signatures of later messages use keys made from the secret and both nonces, one for each
direction, and count the messages: none can be forged, repeated, left out or sent back. Nothing that arrives is unpickled."""

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from octavo.ipc.readable import is_readable

log = logging.getLogger("octavo.ipc")

_NONCE, _SIGNATURE, _TAG = 32, 32, 16  # bytes
_HEADER = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_MAX_HELLO = 4096  # bytes that a stranger may send
_MAX_MESSAGE = 1 << 30
_HANDSHAKE_S = 5.0
_MAX_HANDSHAKES = 64  # at the same time: each has a thread
_CONNECT, _ACCEPT = b"octavo channel 1, connecting", b"octavo channel 1, accepting"
# A peer whose machine is gone is noticed after about this long, even if there is nothing to send.
_SILENCE_S = 6


class Refused(Exception):
    """The other side does not know the secret, or does not speak this protocol; str() says which."""


class SecureConnection:
    """An authenticated connection, with the methods of multiprocessing's Connection that Octavo uses."""

    def __init__(self, sock: socket.socket, key_out: bytes, key_in: bytes) -> None:
        sock.settimeout(None)
        keep_watch(sock)
        self._sock = sock
        self._keys = (key_out, key_in)
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()  # for senders

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    @property
    def local_address(self) -> str:
        """The address of this side, which the other can reach."""
        return str(self._sock.getsockname()[0])

    @property
    def peer_address(self) -> str:
        return str(self._sock.getpeername()[0])

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_bytes(self, message: bytes) -> None:
        """Raises OSError if the connection is lost."""
        with self._lock:
            tag = _tag(self._keys[0], self._num_sent, message)
            self._num_sent += 1
            self._sock.sendall(_HEADER.pack(len(message)) + tag + message)

    def recv_bytes(self) -> bytes:
        """Wait for the next message. Raises EOFError if the other side has closed, OSError if the connection is lost or a message was
        tampered with."""
        header = self._read(_HEADER.size + _TAG)
        (length,) = _HEADER.unpack_from(header)
        if length > _MAX_MESSAGE:
            raise OSError(f"a message of {length} bytes is announced, more than {_MAX_MESSAGE}")
        message = self._read(length)
        if not hmac.compare_digest(header[_HEADER.size :], _tag(self._keys[1], self._num_received, message)):
            self.close()
            raise OSError("a message has a wrong signature: the connection is closed")
        self._num_received += 1
        return message

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether recv_bytes() would not wait for a message to begin."""
        return is_readable(self._sock.fileno(), timeout)

    def close(self) -> None:
        self._sock.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def keep_watch(sock: socket.socket) -> None:
    """Have the kernel notice that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENCE_S // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _SILENCE_S // 2),
        ("TCP_USER_TIMEOUT", _SILENCE_S * 1000),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(address: tuple[str, int], secret: bytes, hello: bytes, timeout: float = 30.0) -> SecureConnection:
    """Connect and say `hello`. Raises Refused, or OSError if nothing answers."""
    sock = socket.create_connection(address, timeout)
    try:
        sock.settimeout(_HANDSHAKE_S)
        theirs, mine = _exactly(sock, _NONCE), os.urandom(_NONCE)
        signed = theirs + mine + hello
        sock.sendall(mine + _HEADER.pack(len(hello)) + hello + _signature(secret, _CONNECT + signed))
        if not hmac.compare_digest(_exactly(sock, _SIGNATURE), _signature(secret, _ACCEPT + signed)):
            raise Refused("the other side does not know the secret")
        return SecureConnection(sock, *_keys(secret, signed))
    except TimeoutError:
        sock.close()
        raise Refused("the other side does not answer") from None
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, secret: bytes) -> tuple[SecureConnection, bytes]:
    """Let a connecting side prove itself. → the connection, and what it says of itself. Raises Refused or OSError."""
    sock.settimeout(_HANDSHAKE_S)
    mine = os.urandom(_NONCE)
    sock.sendall(mine)
    theirs = _exactly(sock, _NONCE)
    (length,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    if length > _MAX_HELLO:
        raise Refused("it does not speak the ranks' protocol")
    hello = _exactly(sock, length)
    signed = mine + theirs + hello
    if not hmac.compare_digest(_exactly(sock, _SIGNATURE), _signature(secret, _CONNECT + signed)):
        raise Refused("it does not know the secret")
    sock.sendall(_signature(secret, _ACCEPT + signed))
    key_in, key_out = _keys(secret, signed)
    return SecureConnection(sock, key_out, key_in), hello


class SecureListener:
    """Listens for connections and hands over those that prove to know the secret. All others are closed and logged; they delay none."""

    def __init__(self, host: str, secret: bytes, joined: Callable[[SecureConnection, bytes], None]) -> None:
        """`joined`: called by any thread with a connection and its hello."""
        self._secret, self._joined = secret, joined
        self._socket = socket.create_server((host, 0), backlog=_MAX_HANDSHAKES)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self._free = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._num_refused = 0
        threading.Thread(target=self._listen, name="octavo-listen", daemon=True).start()

    def close(self) -> None:
        # shutdown() wakes accept(), which close() alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:  # closed
                return
            if not self._free.acquire(blocking=False):
                sock.close()
                self._log(peer[0], "too many connections are being checked")
                continue
            threading.Thread(target=self._check, args=(sock, peer[0]), name="octavo-handshake", daemon=True).start()

    def _check(self, sock: socket.socket, peer: str) -> None:
        try:
            # One that sends a byte now and then must not hold its place for longer than the handshake may take.
            timer = threading.Timer(2 * _HANDSHAKE_S, sock.close)
            timer.daemon = True
            timer.start()
            try:
                connection, hello = accept(sock, self._secret)
            finally:
                timer.cancel()
            self._joined(connection, hello)
        except (Refused, OSError, EOFError) as error:
            sock.close()
            self._log(peer, str(error) or "it closed the connection")
        finally:
            self._free.release()

    def _log(self, peer: str, why: str) -> None:
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            log.warning(
                "a connection from %s to the ranks' port was dropped: %s (%d so far)", peer, why, self._num_refused
            )


def interface_of(address: str) -> str:
    """The name of this machine's network interface with that IPv4 address; "" if none is found. Collectives must not use another."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts, deadline = bytearray(), time.monotonic() + _HANDSHAKE_S
    while len(parts) < count:
        if time.monotonic() > deadline:
            raise Refused("it takes too long to prove itself")
        part = sock.recv(count - len(parts))
        if not part:
            raise Refused("it closed the connection before it proved itself")
        parts += part
    return bytes(parts)


def _signature(secret: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, content, "sha256")


def _keys(secret: bytes, signed: bytes) -> tuple[bytes, bytes]:
    """(for messages of the connecting side, for those of the listening side)."""
    return _signature(secret, b"from connecting" + signed), _signature(secret, b"from accepting" + signed)


def _tag(key: bytes, number: int, message: bytes) -> bytes:
    return hashlib.blake2b(_COUNT.pack(number) + message, key=key, digest_size=_TAG).digest()
