"""Connections go to the API processes round robin; a process that has ended or is full gets none."""

import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from octavo.supervisor.acceptor import Acceptor, raise_descriptor_limit, take_connections

SECONDS = 20.0


def add(acceptor: Acceptor) -> socket.socket:
    """Register a ready process and return its end of the channel."""
    ours, theirs = acceptor.channel()
    acceptor.add_channel(ours)
    return theirs


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    acceptor = Acceptor(listener)
    yield acceptor
    acceptor.close()


def connect(acceptor: Acceptor, num: int) -> list[socket.socket]:
    return [socket.create_connection(acceptor._listener.getsockname(), SECONDS) for _ in range(num)]


def take(channel: socket.socket, num: int) -> list[socket.socket]:
    channel.setblocking(False)
    taken: list[socket.socket] = []
    deadline = time.monotonic() + SECONDS
    while len(taken) < num and time.monotonic() < deadline:
        taken += take_connections(channel)
    return taken


def close(*groups: list[socket.socket]) -> None:
    for group in groups:
        for each in group:
            each.close()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_burst_is_shared_evenly(acceptor: Acceptor) -> None:
    channels = [add(acceptor) for _ in range(3)]
    acceptor.open(64)
    clients = connect(acceptor, 30)
    shares = [take(channel, 10) for channel in channels]
    assert [len(share) for share in shares] == [10, 10, 10]
    ports = {connection.getpeername()[1] for share in shares for connection in share}
    assert ports == {client.getsockname()[1] for client in clients}
    assert all(share[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for share in shares)
    # The passed sockets are the same connections: one end reads what the other writes.
    by_port = {connection.getpeername()[1]: connection for share in shares for connection in share}
    clients[7].sendall(b"hello")
    taken = by_port[clients[7].getsockname()[1]]
    taken.settimeout(SECONDS)
    assert taken.recv(5) == b"hello"
    close(clients, *shares, channels)


def test_a_process_that_ended_is_passed_over(acceptor: Acceptor) -> None:
    gone, alive = add(acceptor), add(acceptor)
    acceptor.open(64)
    gone.close()
    clients = connect(acceptor, 6)
    taken = take(alive, 6)
    assert len(taken) == 6
    close(clients, taken, [alive])


def test_with_nobody_left_a_client_waits_for_the_next(acceptor: Acceptor) -> None:
    add(acceptor).close()
    acceptor.open(64)
    clients = connect(acceptor, 3)
    until(lambda: not acceptor._channels)
    channel = add(acceptor)
    taken = take(channel, 3)
    assert len(taken) == 3
    close(clients, taken, [channel])


def test_what_finds_no_room_waits(acceptor: Acceptor) -> None:
    channel = add(acceptor)
    acceptor._channels[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the smallest buffer: a few messages
    acceptor.open(64)
    clients = connect(acceptor, 40)
    taken = take(channel, 40)
    assert len(taken) == 40
    close(clients, taken, [channel])


def test_the_end_of_the_channel_is_reported(acceptor: Acceptor) -> None:
    channel = add(acceptor)
    channel.setblocking(False)
    assert take_connections(channel) == []
    acceptor._channels[0].close()
    with pytest.raises(EOFError):
        take_connections(channel)
    channel.close()


def test_closing_frees_the_port(acceptor: Acceptor) -> None:
    add(acceptor).close()
    acceptor.open(64)
    address = acceptor._listener.getsockname()
    acceptor.close()

    def is_free() -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen()
            except OSError:
                return False
            return True

    until(is_free)


def test_as_many_descriptors_as_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        raise_descriptor_limit()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised[1] == hard and raised[0] in (hard, 2**20, soft - 1) and raised[0] >= min(soft, 2**20)
