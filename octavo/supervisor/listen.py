"""The address that a server listens on and its TLS certificates: bound and checked before a model is loaded."""

import contextlib
import hashlib
import os
import socket
import stat
import sys
import weakref
from typing import NoReturn

from octavo.config import ServerConfig
from octavo.errors import ConfigError

_MAX_PATH = 107  # bytes of a UNIX socket's path, without the final zero


def listen(host: str, port: int, uds: str = "") -> socket.socket:
    """Bind, without listening yet. `uds`: the path of a UNIX socket instead."""
    if uds:
        return _bind_path(uds)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without it an event waits up to 40 ms for the client's acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from None
    return listener


def _bind_path(path: str) -> socket.socket:
    """Bind a UNIX socket. A socket that an ended server left behind is replaced; one that is in use, or another file, is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        weakref.finalize(listener, _claim(path).close)
        with contextlib.suppress(OSError):  # there is none, or it cannot be removed: binding says so
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
                os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        why = "the path is too long" if len(os.fsencode(path)) > _MAX_PATH else error.strerror or str(error)
        raise ConfigError(f"cannot listen on --uds {path} ({why}); choose another path") from None
    return listener


def _claim(path: str) -> socket.socket:
    """Keep other servers of ours off a path, until the socket that this returns is closed. A server that has bound its path and loads
    its model does not answer yet. The name is in Linux's abstract space, which leaves no file behind."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
        try:
            claim.bind(f"\0octavo-uds-{name}")
        except OSError:
            claim.close()
            raise
    return claim


def _is_answered(path: str) -> bool:
    """Whether a process listens on a UNIX socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


def remove_socket(listener: socket.socket) -> None:
    """Remove the file of a UNIX socket that was bound by listen(). Does nothing for others, or once it is closed."""
    if listener.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            os.unlink(listener.getsockname())


def check_certificates(server: ServerConfig) -> None:
    """Raise ConfigError for certificate files that do not work, before a model is loaded."""
    if not server.ssl_certfile:
        return
    import ssl  # not at start: most servers run behind a proxy that does TLS

    for flag, path in (
        ("--ssl-certfile", server.ssl_certfile),
        ("--ssl-keyfile", server.ssl_keyfile),
        ("--ssl-ca-certs", server.ssl_ca_certs),
    ):
        try:
            with open(path or os.devnull, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read ({error.strerror}): give a PEM file") from None

    def never() -> NoReturn:  # OpenSSL would ask for the passphrase at the terminal, once in each process
        raise ConfigError("the TLS key has a passphrase: give --ssl-keyfile a key without one")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile or None, never)
    except ssl.SSLError as error:
        raise ConfigError(
            f"--ssl-certfile {server.ssl_certfile} and its key do not work ({error.reason or error}): give a certificate and "
            "the private key that belongs to it, both PEM"
        ) from None
    try:
        if server.ssl_ca_certs:
            context.load_verify_locations(server.ssl_ca_certs)
    except ssl.SSLError as error:
        raise ConfigError(
            f"--ssl-ca-certs {server.ssl_ca_certs} holds no certificates ({error.reason or error}): give a PEM file"
        ) from None


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host")


def access_note(server: ServerConfig) -> str:
    """A warning for the log if other machines can use this server without a key. Empty: they cannot."""
    if server.api_keys or server.uds or server.host in ("127.0.0.1", "::1", "localhost"):
        return ""
    note = f"no API key (--api-key-file, OCTAVO_API_KEY): everyone who can reach {server.host} may use this server"
    return note if server.allowed_hosts else f"{note}, by its IP address; other names need --allowed-hosts"


def url_of(listener: socket.socket, server: ServerConfig) -> str:
    if server.uds:
        return f"unix:{os.path.abspath(server.uds)} (curl --unix-socket {server.uds} http://localhost/v1/models)"
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"


def pages_line(url: str) -> str:
    """Where a browser finds the pages. `url`: the API's."""
    base = url.removesuffix("v1")
    for anywhere in ("//0.0.0.0:", "//[::]:"):  # addresses to listen on, which no browser can open
        base = base.replace(anywhere, "//localhost:")
    return f"in a browser: chat {base}play, cockpit {base}"
