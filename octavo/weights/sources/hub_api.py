"""A hub over HTTP, with only the standard library: the files of a repository, and their bytes from any offset on.

Reads HF_ENDPOINT, HF_TOKEN (or the token file of HF_TOKEN_PATH, HF_HOME) and HF_HUB_OFFLINE, as the hub's own library does."""

import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from octavo.errors import ConfigError
from octavo.weights.sources.names import how_named

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 30.0  # without a byte
MAX_LISTING_BYTES = 32 * 2**20
MAX_FILES = 100_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-fA-F]{4,64}")


class HubTrouble(ConfigError):
    """The hub cannot be reached, or fails: trying again may help."""


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str  # its path in the repository
    num_bytes: int
    sha256: str  # empty: the hub has none for a small file


@dataclass(frozen=True, slots=True)
class Repository:
    hub_id: str
    commit: str
    files: tuple[HubFile, ...]


class Hub:
    def __init__(self, environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT_SECONDS) -> None:
        self.endpoint = (environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if urllib.parse.urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise ConfigError(f"HF_ENDPOINT {self.endpoint!r} is not a URL: give https://HOST")
        self._token = _token(environ)
        self._is_offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
        self._timeout = timeout
        self._opener = urllib.request.build_opener(_Redirects())

    def list_files(self, hub_id: str, revision: str = "") -> Repository:
        """Raises ConfigError if there is no such repository or revision, HubTrouble if the hub does not answer."""
        path = f"/api/models/{hub_id}/revision/{urllib.parse.quote(revision or 'main', safe='')}?blobs=true"
        with self._open(path, hub_id, revision, {}) as response:
            try:
                text = response.read(MAX_LISTING_BYTES + 1)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(hub_id, error) from None
        if len(text) > MAX_LISTING_BYTES:
            raise ConfigError(f"{self.endpoint} lists more than {MAX_LISTING_BYTES} bytes for {hub_id}")
        return _repository(hub_id, text, self.endpoint)

    def open_file(self, repository: Repository, file: HubFile, start: int = 0) -> tuple[IO[bytes], int]:
        """The file's bytes and the offset at which they begin: `start`, or 0 if the hub does not resume downloads."""
        name = urllib.parse.quote(file.name)
        path = f"/{repository.hub_id}/resolve/{urllib.parse.quote(repository.commit)}/{name}"
        headers = {"Range": f"bytes={start}-"} if start else {}
        response = self._open(path, repository.hub_id, repository.commit, headers)
        if start and response.status == 206:
            begins = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            if begins is None or int(begins[1]) != start:
                response.close()
                raise HubTrouble(f"{self.endpoint} answered another range of {file.name} than was asked for")
            return response, start
        return response, 0

    def _open(self, path: str, hub_id: str, revision: str, headers: dict[str, str]) -> Any:
        if self._is_offline:
            raise ConfigError(
                f"{hub_id} is not on this machine, and HF_HUB_OFFLINE is set: unset it once to download the model"
            )
        request = urllib.request.Request(self.endpoint + path, headers={"User-Agent": "octavo", **headers})
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            return self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error, hub_id, revision) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(hub_id, error) from None

    def _refusal(self, error: urllib.error.HTTPError, hub_id: str, revision: str) -> ConfigError:
        code = error.headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            return ConfigError(
                f"{hub_id} is gated: accept its terms at {self.endpoint}/{hub_id} and set HF_TOKEN to a token that may read it"
            )
        if code == "RevisionNotFound":
            return ConfigError(f"{hub_id} has no revision {revision!r} at {self.endpoint}: change --revision")
        if error.code == 401 and self._token:
            return ConfigError(f"{self.endpoint} does not accept the token in HF_TOKEN, or it may not read {hub_id}")
        if error.code in (401, 403, 404):
            return ConfigError(
                f"there is no model {hub_id} at {self.endpoint}: {how_named(hub_id)} (a private model needs HF_TOKEN)"
            )
        if error.code == 416:  # the file became shorter: begin again
            return HubTrouble(f"{self.endpoint} has fewer bytes of a file of {hub_id} than were fetched before")
        return HubTrouble(f"{self.endpoint} answered {error.code} for {hub_id}: try again later")

    def _unreachable(self, hub_id: str, error: Exception) -> HubTrouble:
        reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        return HubTrouble(
            f"cannot fetch {hub_id}: {self.endpoint} cannot be reached ({reason[:200]}): check the network connection, the proxy "
            "or HF_ENDPOINT, or copy the model here and pass its path"
            + ("" if "/" in hub_id else f"; {how_named(hub_id)}")
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and gives the token to no other host: large files lie on other servers, with signed addresses."""

    def redirect_request(
        self, request: urllib.request.Request, fp: Any, code: int, message: str, headers: Any, url: str
    ) -> urllib.request.Request | None:
        after = super().redirect_request(request, fp, code, message, headers, url)
        if after is not None:
            old, new = urllib.parse.urlsplit(request.full_url), urllib.parse.urlsplit(after.full_url)
            if (old.scheme, old.netloc) != (new.scheme, new.netloc):
                after.remove_header("Authorization")
        return after


def _token(environ: Mapping[str, str]) -> str:
    if token := environ.get("HF_TOKEN", "").strip():
        return token
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    path = Path(environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        return path.expanduser().read_text().strip()[:1000]
    return ""


def _repository(hub_id: str, text: bytes, endpoint: str) -> Repository:
    wrong = ConfigError(f"{endpoint} did not answer as a hub does about {hub_id}: check HF_ENDPOINT")
    try:
        listing = json.loads(text)
        commit, entries = listing["sha"], listing["siblings"]
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or len(entries) > MAX_FILES:
            raise wrong
        return Repository(hub_id, commit, tuple(map(_file, entries)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise wrong from None


def _file(entry: Any) -> HubFile:
    name, size, lfs = entry["rfilename"], entry.get("size"), entry.get("lfs") or {}
    size = lfs.get("size", size)
    sha256 = lfs.get("sha256", "")
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        raise ValueError
    return HubFile(name, size, sha256 if _SHA256.fullmatch(sha256) else "")
