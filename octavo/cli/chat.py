"""The models that `octavo chat`, `octavo run` and `octavo complete` talk to: in this process, or at an OpenAI-compatible URL."""

import http.client
import json
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from octavo.errors import ConfigError, EngineUnavailable, InvalidRequest, RequestFailed

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "max_tokens")
"""Sampling parameters with the same name as a flag, in SamplingParams and in a request's body."""

Message = dict[str, str]


class TalkModel(Protocol):
    def check_chat(self) -> None:
        """Raise ConfigError if the model is known not to support chat."""

    def chat(self, messages: list[Message]) -> Iterator[str]:
        """Yield the answer in pieces as they arrive."""

    def complete(self, prompt: str) -> Iterator[str]:
        """Yield the continuation in pieces as they arrive."""


class LocalModel:
    """A model in this process."""

    def __init__(self, options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        import msgspec

        from octavo import LLM, SamplingParams

        # Checked before the weights are loaded, so that a bad temperature fails at once.
        try:
            SamplingParams(**sampling)
        except InvalidRequest as error:
            raise ConfigError(f"--{error.message.replace('_', '-')}") from None
        if sys.stderr.isatty():
            print(f"octavo: loading {options.get('model') or 'the embedded model'} …", file=sys.stderr)
        self._llm = LLM(**options)
        self._params = msgspec.structs.replace(self._llm.default_params(), **sampling)

    def check_chat(self) -> None:
        """Raise ConfigError for a model without a chat template, before the first question."""
        if not self._llm.text.has_chat_template:
            raise ConfigError(
                f"{self._llm.model_name} has no chat template: use octavo complete, or give one with --chat-template FILE"
            )

    def chat(self, messages: list[Message]) -> Iterator[str]:
        return self._pieces(self._llm.stream_chat(messages, self._params))

    def complete(self, prompt: str) -> Iterator[str]:
        return self._pieces(self._llm.stream(prompt, self._params))

    def _pieces(self, deltas: Iterator[Any]) -> Iterator[str]:
        return (delta.text for delta in deltas)


class Remote:
    """A client of the server at a URL, with only the standard library. Every failure has a one-line message."""

    def __init__(self, url: str, api_key: str, timeout: float | None = None) -> None:
        """`timeout`: seconds without a byte after which a request fails. None: no limit."""
        self.status = 0  # HTTP status of the last response; 0: there was none
        self._timeout = timeout
        parts, host = _split(url)
        path = urllib.parse.quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~")
        self._base = f"{parts.scheme}://{parts.netloc}{path}/v1"
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {_header_text(api_key)}"} if api_key else {}
        )
        loopback = host in ("localhost", "::1") or host.startswith("127.")
        # Do not use a proxy for a server on this machine.
        proxies = [urllib.request.ProxyHandler({})] if loopback else []
        self._opener = urllib.request.build_opener(*proxies)

    def events(self, path: str, body: bytes | None = None) -> Iterator[dict[str, Any]]:
        """Yield the JSON of each event until [DONE]."""
        with self._open(path, body) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield self._chunk(data)
            except (OSError, http.client.HTTPException) as error:
                raise self._ended_early(error) from None
        raise self._ended_early()

    def read(self, path: str) -> dict[str, Any]:
        """The JSON object at a path."""
        with self._open(path, None) as response:
            try:
                return self._chunk(response.read())
            except (OSError, http.client.HTTPException) as error:
                raise self._ended_early(error) from None

    def send(self, path: str, body: bytes) -> dict[str, Any]:
        """POST a JSON object, and return the one that comes back."""
        with self._open(path, body) as response:
            try:
                return self._chunk(response.read())
            except (OSError, http.client.HTTPException) as error:
                raise self._ended_early(error) from None

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise RequestFailed(f"{self._base} sent an event that is not a JSON object: {data[:100]!r}")
        if "error" in chunk:
            raise RequestFailed(_error_text(chunk))
        return chunk

    def _open(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self._base + path, body, self._headers)
        try:
            self.status = 0
            response = self._opener.open(request, timeout=self._timeout)
            self.status = response.status
            return response
        except urllib.error.HTTPError as error:
            self.status = error.code
            raise RequestFailed(f"{self._base}{path} answered {error.code}: {_refusal(error)}") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise EngineUnavailable(
                    f"{self._base} has a certificate that is not trusted here ({reason.verify_message}): name its file in SSL_CERT_FILE"
                ) from None
            raise EngineUnavailable(
                f"cannot reach {self._base}: {reason}; is the server running?{_others(reason)}"
            ) from None
        except http.client.HTTPException as error:
            raise EngineUnavailable(f"{self._base} does not speak HTTP: {_one_line(error)}") from None

    def _ended_early(self, error: Exception | None = None) -> RequestFailed:
        return RequestFailed(f"{self._base} ended the response early{f': {_one_line(error)}' if error else ''}")


def _others(reason: object) -> str:
    """The servers of this user that run on this machine, where none listens at the address that was given."""
    if not isinstance(reason, ConnectionRefusedError):
        return ""
    from octavo.supervisor.runtime_dir import running_servers

    urls = [server.url for server in running_servers() if server.url.startswith("http")]  # not UNIX sockets
    return f" octavo ps lists {', '.join(urls[:3])}: give it as --url" if urls else ""


class RemoteModel(Remote):
    """A model at an OpenAI-compatible URL."""

    def __init__(self, url: str, model: str, api_key: str, sampling: Mapping[str, Any]) -> None:
        super().__init__(url, api_key)
        self._sampling = dict(sampling)
        self._model = model or self._first_model()

    def sample_by_default(self, defaults: Mapping[str, Any]) -> None:
        """Use these values for what neither the caller nor the model says, where the server tells what the model says."""
        for model in self.read("/models").get("data") or []:
            if model.get("id") == self._model and isinstance(advice := model.get("default_sampling"), dict):
                unsaid = {name: value for name, value in defaults.items() if name not in advice}
                self._sampling = unsaid | self._sampling

    def check_chat(self) -> None:
        """Do nothing: the server reports it."""

    def chat(self, messages: list[Message]) -> Iterator[str]:
        for chunk in self._events("/chat/completions", {"messages": messages}):
            for choice in chunk.get("choices") or []:
                yield (choice.get("delta") or {}).get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        for chunk in self._events("/completions", {"prompt": prompt}):
            for choice in chunk.get("choices") or []:
                yield choice.get("text") or ""

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            try:
                models = json.load(response)["data"]
                if models:
                    return str(models[0]["id"])
            except (OSError, http.client.HTTPException) as error:
                raise self._ended_early(error) from None
            except (ValueError, KeyError, TypeError):
                raise RequestFailed(
                    f"{self._base}/models lists no model: is this an OpenAI-compatible server?"
                ) from None
        raise RequestFailed(f"{self._base} serves no model")

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {"model": self._model, "stream": True} | self._sampling | body
        return self.events(path, json.dumps(body).encode())


def _split(url: str) -> tuple[urllib.parse.SplitResult, str]:
    """Split a base URL into its parts and its host, or raise ConfigError."""
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and not any(c.isspace() for c in parts.netloc)
        parts.port  # noqa: B018 it raises ValueError if the port is no number
    except ValueError:
        usable = False
    if not usable or not parts.hostname:
        raise ConfigError(f"--url {url!r} is not a URL: give http://HOST:PORT")
    return parts, parts.hostname


def _header_text(api_key: str) -> str:
    """Encode the key so that http.client, which writes headers in Latin-1, sends its UTF-8 bytes."""
    if any(ord(character) < 32 or ord(character) == 127 for character in api_key):
        raise ConfigError(
            "the API key holds a line break or another control character: check --api-key and OCTAVO_API_KEY"
        )
    return api_key.encode(errors="surrogateescape").decode("latin-1")


def _refusal(error: urllib.error.HTTPError) -> str:
    text = ""
    with error, suppress(OSError, http.client.HTTPException):
        text = error.read().decode(errors="replace")
    with suppress(ValueError):
        text = _error_text(json.loads(text))
    return text[:500] or str(error.reason)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _error_text(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
