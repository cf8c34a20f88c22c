"""Connections are dealt out in turn, whoever is awake; a process that has ended or is full gets none."""

import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from octavo.supervisor.acceptor import Reception, raise_descriptor_limit, take_connections

SECONDS = 20.0


def add(reception: Reception) -> socket.socket:
    """The end of a process that is ready."""
    ours, theirs = reception.channel()
    reception.deal_to(ours)
    return theirs


@pytest.fixture
def reception() -> Iterator[Reception]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    reception = Reception(listener)
    yield reception
    reception.close()


def connect(reception: Reception, num: int) -> list[socket.socket]:
    return [socket.create_connection(reception._listener.getsockname(), SECONDS) for _ in range(num)]


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


def test_a_burst_is_shared_evenly(reception: Reception) -> None:
    channels = [add(reception) for _ in range(3)]
    reception.open(64)
    clients = connect(reception, 30)
    shares = [take(channel, 10) for channel in channels]
    assert [len(share) for share in shares] == [10, 10, 10]
    ports = {connection.getpeername()[1] for share in shares for connection in share}
    assert ports == {client.getsockname()[1] for client in clients}
    assert all(share[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for share in shares)
    # They are the connections themselves: what one side writes, the other reads.
    by_port = {connection.getpeername()[1]: connection for share in shares for connection in share}
    clients[7].sendall(b"hello")
    taken = by_port[clients[7].getsockname()[1]]
    taken.settimeout(SECONDS)
    assert taken.recv(5) == b"hello"
    close(clients, *shares, channels)


def test_a_process_that_ended_is_passed_over(reception: Reception) -> None:
    gone, alive = add(reception), add(reception)
    reception.open(64)
    gone.close()
    clients = connect(reception, 6)
    taken = take(alive, 6)
    assert len(taken) == 6
    close(clients, taken, [alive])


def test_with_nobody_left_a_client_waits_for_the_next(reception: Reception) -> None:
    add(reception).close()
    reception.open(64)
    clients = connect(reception, 3)
    until(lambda: not reception._channels)
    channel = add(reception)
    taken = take(channel, 3)
    assert len(taken) == 3
    close(clients, taken, [channel])


def test_what_finds_no_room_waits(reception: Reception) -> None:
    channel = add(reception)
    reception._channels[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is: a few messages
    reception.open(64)
    clients = connect(reception, 40)
    taken = take(channel, 40)
    assert len(taken) == 40
    close(clients, taken, [channel])


def test_the_end_of_the_channel_is_told(reception: Reception) -> None:
    channel = add(reception)
    channel.setblocking(False)
    assert take_connections(channel) == []
    reception._channels[0].close()
    with pytest.raises(EOFError):
        take_connections(channel)
    channel.close()


def test_closing_frees_the_port(reception: Reception) -> None:
    add(reception).close()
    reception.open(64)
    address = reception._listener.getsockname()
    reception.close()

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
