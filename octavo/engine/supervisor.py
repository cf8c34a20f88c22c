"""The supervisor: `octavo serve`. Starts one engine process and the API processes, tells what they report, stops them in order.
Knows nothing of torch, HTTP or tokens."""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from octavo.config import Config, ServerConfig
from octavo.engine.budget import budget_lines
from octavo.engine.process import EngineOrder
from octavo.engine.reception import Reception
from octavo.errors import ConfigError
from octavo.messages import Dying, EngineReport
from octavo.weights.source import ModelSource, resolve

MAX_FOLDER_LEN = 90
BACKLOG = 2048
ENGINE_MODULE = "octavo.engine.process"  # benchmarks.front names another: the same process without a model


class ServerOrder(msgspec.Struct, frozen=True):
    """What the supervisor tells an API process to be."""

    config: Config
    fd: int  # a socket, inherited, over which connections come: see octavo.engine.reception
    origin: int
    engine_address: str
    reply_address: str
    model_path: str
    model_name: str
    default_sampling: dict[str, float] = {}  # for requests that say nothing, where the model's files say nothing either


class _Stop(Exception):
    """SIGTERM or SIGINT arrived."""


def serve(config: Config) -> int:
    """Serve until told to stop. Returns the exit code: 0 stopped in order, 1 a process was lost, 2 a start-up mistake."""
    started = time.monotonic()
    check_certificates(config.server)
    listener = _listen(config.server.host, config.server.port)
    source = resolve(
        config.model.model, config.model.revision, allow_missing_weights=config.model.load_format == "dummy"
    )
    folder = _socket_folder()
    reception = Reception(listener)
    try:
        with _Processes(config, source, listener, reception, folder) as processes:
            signal.signal(signal.SIGTERM, _raise_stop)
            signal.signal(signal.SIGINT, _raise_stop)
            try:
                processes.start()
                return processes.watch(started)
            except _Stop:
                _ignore_more_signals()
                return processes.stop_in_order()
    finally:
        reception.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Processes:
    def __init__(
        self, config: Config, source: ModelSource, listener: socket.socket, reception: Reception, folder: Path
    ) -> None:
        self._config, self._source, self._folder = config, source, folder
        self._listener, self._reception = listener, reception
        self._served_name = config.model.served_model_name or source.name
        self._num_servers = config.server.num_api_processes(_num_cores())
        self._engine: subprocess.Popen[bytes] | None = None
        self._servers: list[subprocess.Popen[bytes]] = []
        self._is_serving = False

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Whatever happened, nothing stays behind."""
        for process in self._all():
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self) -> None:
        engine_address = f"ipc://{self._folder}/engine"
        order = EngineOrder(
            self._config,
            str(self._source.path),
            self._source.kind,
            self._source.name,
            self._served_name,
            engine_address,
        )
        self._engine = _spawn(ENGINE_MODULE, order)
        for origin in range(self._num_servers):
            channel = self._reception.add()
            server_order = ServerOrder(
                self._config,
                channel.fileno(),
                origin,
                engine_address,
                self._reply_address(origin),
                str(self._source.path),
                self._served_name,
                dict(self._source.default_sampling),
            )
            self._servers.append(_spawn("octavo.server.process", server_order, pass_fds=(channel.fileno(),)))
            channel.close()

    def watch(self, started: float) -> int:
        """Print what the processes report, until one of them ends. Each says one line when it is ready."""
        is_ready: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for process in self._all():
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, process)
            while True:
                for key, _ in selector.select():
                    process = key.data
                    line = process.stdout.readline()
                    if not line:
                        return self._lost(process)
                    is_ready.add(process.pid)
                    if process is self._engine:
                        self._engine_is_ready(line)
                    if len(is_ready) == len(self._all()):
                        self._is_serving = True
                        self._say(f"ready after {time.monotonic() - started:.1f} s: {self._url()}")

    def _engine_is_ready(self, line: bytes) -> None:
        # Not earlier: until now a client is refused at once. Not later: that the port was taken meanwhile is found here.
        try:
            self._reception.open(BACKLOG)
        except OSError as error:
            raise _cannot_listen(self._config.server.host, self._config.server.port, error) from None
        self._say(f"model {self._served_name} from {self._source.path}")
        for text in budget_lines(msgspec.json.decode(line, type=EngineReport)):
            self._say(text)
        self._say(f"API processes: {self._num_servers} (--api-processes {self._config.server.api_processes})")

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._config.server.ssl_certfile else "http"
        return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"

    def stop_in_order(self) -> int:
        """API processes first: they refuse what is new and finish what runs; then the engine."""
        timeout = self._config.server.shutdown_timeout
        if self._is_serving:
            self._say(f"stopping: running requests get up to {timeout:g} s; once more (Ctrl-C, SIGTERM) stops at once")
        for server in self._servers:
            server.terminate()
        deadline = time.monotonic() + timeout + 3
        unfinished = [server for server in self._servers if not _ended_by(server, deadline)]
        if self._engine is not None:
            assert self._engine.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._engine.stdin.close()
            _ended_by(self._engine, time.monotonic() + 5)
        if unfinished or any(server.returncode for server in self._servers):
            self._say("stopped; some requests were cut off")
            return 1
        self._say("stopped")
        return 0

    def _lost(self, process: subprocess.Popen[bytes]) -> int:
        """A process ended by itself: a start-up mistake (it has said so), or a failure that ends the server."""
        code = process.wait()
        if code == 2:
            return 2
        what = "the engine" if process is self._engine else "an API process"
        message = f"{what} ended unexpectedly ({_describe_exit(code)})"
        print(f"octavo: error: {message}", file=sys.stderr)
        if process is self._engine:
            self._tell_servers(message)
        self.stop_in_order()
        return 1

    def _tell_servers(self, message: str) -> None:
        """Open requests end with an error event instead of silence."""
        with zmq.Context() as context:
            for origin in range(len(self._servers)):
                with context.socket(zmq.PUSH) as push:
                    push.setsockopt(zmq.LINGER, 500)
                    push.connect(self._reply_address(origin))
                    push.send(msgspec.msgpack.encode(Dying(message)))

    def _reply_address(self, origin: int) -> str:
        return f"ipc://{self._folder}/api-{origin}"

    def _all(self) -> list[subprocess.Popen[bytes]]:
        return ([self._engine] if self._engine is not None else []) + self._servers

    def _say(self, line: str) -> None:
        print(f"octavo: {line}", file=sys.stderr, flush=True)


def _socket_folder() -> Path:
    """A folder that only this user can enter. A socket's path has room for about a hundred characters."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    if len(str(folder)) > MAX_FOLDER_LEN:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="octavo-", dir="/tmp"))
    return folder


def _num_cores() -> int:
    """Those this process may use, where the system says so: a container's share, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def check_certificates(server: ServerConfig) -> None:
    """Raises ConfigError for files that TLS cannot be spoken with: before a model is loaded, not after."""
    if not server.ssl_certfile:
        return
    import ssl  # most servers stand behind a proxy that has it

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

    def never() -> NoReturn:  # OpenSSL would ask at the terminal, once in each process
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


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host")


def _spawn(module: str, order: msgspec.Struct, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """A process of our own, in a session of its own so that Ctrl-C reaches the supervisor alone. Its standard input stays
    open for as long as this process lives: that is how it learns of our death."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.flush()
    return process


def _ended_by(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def _describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _raise_stop(number: int, frame: object) -> NoReturn:
    raise _Stop


def _ignore_more_signals() -> None:
    """A second signal while stopping means: now."""

    def stop_now(number: int, frame: object) -> None:
        print("octavo: stopped at once; running requests were cut off", file=sys.stderr)
        raise SystemExit(130)

    signal.signal(signal.SIGTERM, stop_now)
    signal.signal(signal.SIGINT, stop_now)
