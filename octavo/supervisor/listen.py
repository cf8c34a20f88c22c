"""The address that a server listens on and its TLS certificates: bound and checked before a model is loaded."""

import os
import socket
from typing import NoReturn

from octavo.config import ServerConfig
from octavo.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from None
    return listener


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
    if server.api_keys or server.host in ("127.0.0.1", "::1", "localhost"):
        return ""
    note = f"no API key (--api-key-file, OCTAVO_API_KEY): everyone who can reach {server.host} may use this server"
    return note if server.allowed_hosts else f"{note}, by its IP address; other names need --allowed-hosts"


def url_of(listener: socket.socket, server: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"
