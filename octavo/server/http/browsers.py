"""Rules against web pages that would use this server from their visitor's browser: which Host a request may name, and from which
origin a browser may send it (decision 030).

A page of another site can send requests to 127.0.0.1, and a site whose name suddenly resolves to 127.0.0.1 (DNS rebinding) can read
the answers, too. An API key that the client sends stops both; these rules hold where a request carries none."""

import ipaddress
import re
import socket
from collections.abc import Collection
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from octavo.config import ServerConfig, split_list
from octavo.errors import Forbidden, InvalidRequest

ANY = "*"
BROWSER_TYPES = ("application/json", "multipart/form-data")
"""Content types that a browser may post. A form of another site's page can send the second: its origin is checked before."""
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{0,5}))?", re.ASCII)
_HOSTS_FILE = Path("/etc/hosts")


class HostRule:
    """Which names requests may use for this server. IP addresses, localhost and the machine's own names always are among them: no
    other site has them."""

    def __init__(self, server: ServerConfig, machine: Collection[str]) -> None:
        """`machine`: the names of this machine (`machine_names`)."""
        allowed = [name.lower().rstrip(".") for name in split_list(server.allowed_hosts)]
        self._is_any = ANY in allowed or (bool(server.api_keys) and not allowed)
        self._names = frozenset(["localhost", *machine, *allowed])
        self._suffixes = (".localhost", *(name[1:] for name in allowed if name.startswith("*.")))

    def check(self, scope: Scope, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise InvalidRequest("the request has several Host headers")
        if not hosts:
            if scope["http_version"] == "1.0":
                return  # older than the header; browsers do not speak it
            raise InvalidRequest("the request has no Host header")
        host = split_host(hosts[0])
        if host is None:
            raise InvalidRequest("the Host header is not a host name or an IP address with an optional port")
        if not self._is_any and not self._is_known(host[0]):
            raise Forbidden(
                f"this server is not known as {host[0][:100]!r}: use its IP address or localhost, or name it with --allowed-hosts",
                "host",
            )

    def _is_known(self, name: str) -> bool:
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)


class OriginRule:
    """From which origins browsers may send requests: this server's own, and those of --allowed-origins."""

    def __init__(self, server: ServerConfig) -> None:
        self._allowed = frozenset(split_list(server.allowed_origins))

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise Forbidden for a request that a browser sends for another origin's page, or as a form. Other clients send neither of
        these headers, and pass."""
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site")
        if not origins and site is None:
            return
        if not self._is_allowed(origins) and not _is_own(scope, headers, origins, site):
            whence = f"the origin {origins[0][:100]!r}" if origins else "another origin (Sec-Fetch-Site)"
            raise Forbidden(
                f"a browser sent this for a page of {whence}: only this server's own pages may, and those of --allowed-origins",
                "origin",
            )
        if scope["method"] == "POST" and _has_body(headers):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in BROWSER_TYPES:
                raise Forbidden(
                    f"a browser must post as {' or '.join(BROWSER_TYPES)}, not as {kind[:100] or 'nothing'!r}",
                    "content_type",
                )

    def _is_allowed(self, origins: list[str]) -> bool:
        return ANY in self._allowed or (bool(origins) and self._allowed.issuperset(origins))


def _is_own(scope: Scope, headers: Headers, origins: list[str], site: str | None) -> bool:
    if site is not None:  # the browser's own comparison, which a proxy that rewrites Host does not disturb
        return site in ("same-origin", "none") or _is_navigation(scope, headers)
    # Over plain HTTP, browsers send Sec-Fetch-Site to this machine only.
    return all(_is_own_origin(scope, headers, origin) for origin in origins)


def _is_navigation(scope: Scope, headers: Headers) -> bool:
    """Whether someone follows a link. The page with the link does not see the answer, and GET changes nothing."""
    is_top = headers.get("sec-fetch-dest", "document") == "document"
    return scope["method"] in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate" and is_top


def _is_own_origin(scope: Scope, headers: Headers, origin: str) -> bool:
    """Whether an origin is this server's address, as the client sees it or as a proxy reports it. A page cannot set the proxy's
    headers in a request to another origin."""
    scheme, separator, address = origin.partition("://")
    host = split_host(address)
    if not separator or host is None or scheme not in _PORTS:
        return False
    schemes = {scope["scheme"], _first(headers.get("x-forwarded-proto", ""))}
    hosts = [split_host(_first(headers.get(name, ""))) for name in ("host", "x-forwarded-host")]
    return scheme in schemes and _with_port(host, scheme) in [_with_port(own, scheme) for own in hosts if own]


def _with_port(host: tuple[str, int | None], scheme: str) -> tuple[str, int]:
    return host[0], _PORTS[scheme] if host[1] is None else host[1]


def _first(text: str) -> str:
    """What the first of several proxies reported."""
    return text.partition(",")[0].strip()


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def split_host(text: str) -> tuple[str, int | None] | None:
    """The name and the port of a Host header. The name is in lower case, without the brackets of an address and the dot of a full
    name. None: it is not valid."""
    found = _HOST.fullmatch(text.strip())
    if found is None:
        return None
    name, port = found[1].lower(), found[2]
    if name.startswith("["):
        name = name[1:-1]
        if not _is_address(name):
            return None
    return name.removesuffix("."), int(port) if port else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def machine_names(hosts_file: Path = _HOSTS_FILE) -> set[str]:
    """The names of this machine: its host name, with and without a domain, in multicast DNS, and as /etc/hosts has it. DNS is not
    asked: it may be slow, and its operator could add names."""
    full = socket.gethostname().lower().rstrip(".")
    short = full.partition(".")[0]
    names = {full, short, f"{short}.local"} - {"", ".local"}
    try:
        text = hosts_file.read_text(errors="replace")
    except OSError:
        return names
    for line in text.splitlines():
        aliases = {name.lower().rstrip(".") for name in line.partition("#")[0].split()[1:]}
        if aliases & {full, short}:
            names |= aliases
    return names
