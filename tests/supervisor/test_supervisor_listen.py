"""Addresses to listen on: UNIX sockets that are new, left behind, in use, or no sockets at all."""

import os
import socket
from pathlib import Path

import pytest

from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.supervisor.listen import access_note, listen, remove_socket, url_of


def test_a_unix_socket_is_bound_named_and_removed(short_path: Path) -> None:
    path = str(short_path / "octavo.sock")
    listener = listen("", 0, path)
    server = replace(Config(), uds=path, host="0.0.0.0").server
    assert os.path.exists(path) and url_of(listener, server).startswith(f"unix:{path} ") and not access_note(server)
    remove_socket(listener)
    assert not os.path.exists(path)
    remove_socket(listener)  # gone already
    listener.close()
    remove_socket(listener)


def test_a_socket_that_was_left_behind_is_replaced(short_path: Path) -> None:
    path = str(short_path / "octavo.sock")
    listen("", 0, path).close()
    assert os.path.exists(path)
    listen("", 0, path).close()


def test_a_server_that_does_not_answer_yet_keeps_its_socket(short_path: Path) -> None:
    """It has bound the path, and loads its model."""
    path = str(short_path / "octavo.sock")
    with listen("", 0, path), pytest.raises(ConfigError, match="Address already in use"):
        listen("", 0, path)


def test_a_socket_in_use_and_other_files_are_left_alone(short_path: Path) -> None:
    path = short_path / "octavo.sock"
    with listen("", 0, str(path)) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on --uds .*octavo.sock \(Address already in use\)"):
            listen("", 0, str(path))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    file = short_path / "notes"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="Address already in use"):
        listen("", 0, str(file))
    assert file.read_text() == "mine"


def test_paths_that_cannot_be(short_path: Path) -> None:
    with pytest.raises(ConfigError, match="the path is too long"):
        listen("", 0, str(short_path / ("x" * 200)))
    with pytest.raises(ConfigError, match="No such file or directory"):
        listen("", 0, str(short_path / "nowhere" / "octavo.sock"))


def test_tcp_listeners_have_nothing_to_remove() -> None:
    with listen("127.0.0.1", 0) as listener:
        remove_socket(listener)
        assert url_of(listener, Config().server).startswith("http://127.0.0.1:")


def test_connections_send_without_delay() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
