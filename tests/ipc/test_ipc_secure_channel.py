"""Channels between hosts: both sides must know the secret, and no message can be changed, repeated or left out."""

import contextlib
import logging
import queue
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from octavo.ipc import secure_channel
from octavo.ipc.secure_channel import Refused, SecureConnection, SecureListener, connect, interface_of
from tests.descriptors import many_descriptors

SECRET = b"s" * 32
Joined = queue.Queue[tuple[SecureConnection, bytes]]


@pytest.fixture
def joined() -> Joined:
    return queue.Queue()


@pytest.fixture
def listener(joined: Joined) -> Iterator[SecureListener]:
    listener = SecureListener("127.0.0.1", SECRET, lambda connection, hello: joined.put((connection, hello)))
    yield listener
    listener.close()


def test_messages_arrive_as_they_were_sent(listener: SecureListener, joined: Joined) -> None:
    rank = connect(listener.address, SECRET, b"rank 3")
    executor, hello = joined.get(timeout=10)
    assert hello == b"rank 3" and executor.peer_address == rank.local_address == "127.0.0.1"
    assert not executor.poll()
    for message in (b"", b"plan", bytes(300_000)):
        sender = threading.Thread(target=rank.send_bytes, args=(message,))  # more than the kernel buffers
        sender.start()
        assert executor.recv_bytes() == message
        sender.join()
        executor.send_bytes(message[:100])
        assert rank.poll(10) and rank.recv_bytes() == message[:100]
    rank.close()
    assert rank.closed
    with pytest.raises(EOFError):
        executor.recv_bytes()
    executor.close()


def test_a_channel_may_have_a_descriptor_above_1023(listener: SecureListener, joined: Joined) -> None:
    with many_descriptors(), contextlib.closing(connect(listener.address, SECRET, b"rank 3")) as rank:
        executor, _ = joined.get(timeout=10)
        assert not executor.poll(0.001)
        rank.send_bytes(b"result")
        assert executor.poll(10) and executor.recv_bytes() == b"result"
        executor.close()


def test_a_stranger_is_dropped_and_logged(
    listener: SecureListener, joined: Joined, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(Refused):
        connect(listener.address, b"x" * 32, b"rank 0")
    with caplog.at_level(logging.WARNING), socket.create_connection(listener.address) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 100)
        assert web.recv(32)  # a nonce, and then nothing more
        web.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read
            while web.recv(4096):
                pass
    friend = connect(listener.address, SECRET, b"rank 0")  # strangers are no obstacle
    connection, _ = joined.get(timeout=10)
    assert joined.empty()
    assert "was dropped: it does not know the secret" in caplog.text
    assert "was dropped: it does not speak the ranks' protocol" in caplog.text
    friend.close()
    connection.close()


def test_a_listener_without_the_secret_is_not_believed(joined: Joined) -> None:
    other = SecureListener("127.0.0.1", b"x" * 32, lambda connection, hello: joined.put((connection, hello)))
    try:
        with pytest.raises(Refused):
            connect(other.address, SECRET, b"rank 0")
        assert joined.empty()
    finally:
        other.close()


def frame(connection: SecureConnection, number: int, message: bytes) -> bytes:
    tag = secure_channel._tag(connection._keys[0], number, message)
    return struct.pack("<I", len(message)) + tag + message


@pytest.mark.parametrize("fault", ["changed", "repeated", "left out", "sent back", "too long"])
def test_what_was_tampered_with_is_refused(listener: SecureListener, joined: Joined, fault: str) -> None:
    rank = connect(listener.address, SECRET, b"")
    executor, _ = joined.get(timeout=10)
    rank._sock.sendall(frame(rank, 0, b"first"))
    assert executor.recv_bytes() == b"first"
    bad = {
        "changed": frame(rank, 1, b"second")[:-1] + b"D",
        "repeated": frame(rank, 0, b"first"),
        "left out": frame(rank, 2, b"third"),
        "sent back": frame(executor, 1, b"second"),
        "too long": struct.pack("<I", 2**32 - 1) + bytes(16),
    }[fault]
    rank._sock.sendall(bad)
    with pytest.raises(OSError, match=r"signature|announced"):
        executor.recv_bytes()
    rank.close()
    executor.close()


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
