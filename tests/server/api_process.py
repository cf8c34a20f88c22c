"""A real API process on a real socket, before a ZMQ endpoint that plays a script."""

import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from octavo.ipc.launch import ApiLaunch, Patience
from octavo.messages import Abort, Finish, GenerateRequest, Hello, Ping, Reply, StepDeltas, ToEngine, TokenDelta
from octavo.supervisor.acceptor import Acceptor
from tests.doubles import EOS, REPORT, config, write_byte_tokenizer

SECONDS = 20
NUM_LETTERS = 400_000  # of an answer that fills every buffer on its way


class WireEngine(threading.Thread):
    """Answers each Hello, then sends one token per request every few milliseconds; "!" prompts end on a signal, "#" prompts with much at once."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.aborted = threading.Event()
        self.release = threading.Event()
        self.ending = threading.Event()
        self.report = threading.Event()  # held back until set

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind(self.address)
        decoder = msgspec.msgpack.Decoder(ToEngine)
        send = lambda message: push.send(msgspec.msgpack.encode(message))  # noqa: E731
        running: dict[str, GenerateRequest] = {}
        hello = None
        while not self.ending.is_set():
            if hello is not None and self.report.is_set():
                send(REPORT)
                hello = None
            for request in list(running.values()):
                if request.prompt_ids[0] == ord("!") and not self.release.is_set():
                    send(StepDeltas([TokenDelta(request.id, 0, [ord("a")])]))
                else:
                    said = b"a" * NUM_LETTERS if request.prompt_ids[0] == ord("#") else b"ok"
                    send(StepDeltas([TokenDelta(request.id, 0, [*said, EOS], Finish("stop", EOS))]))
                    del running[request.id]
            if not pull.poll(5):
                continue
            match decoder.decode(pull.recv()):
                case Hello() as hello:
                    push.connect(hello.reply_to)
                case GenerateRequest() as request:
                    running[request.id] = request
                case Abort(request_id=request_id):
                    running.pop(request_id, None)
                    self.aborted.set()
                case Ping(call=call):
                    send(Reply(call, "pong"))
        pull.close(0)
        push.close(0)
        context.term()


class Server:
    def __init__(
        self, folder: Path, patience: Patience | None = None, num_descriptors: int = 0, **options: object
    ) -> None:
        write_byte_tokenizer(folder)
        self.connections: list[http.client.HTTPConnection] = []
        self.streams: list[http.client.HTTPResponse] = []
        self.sockets: list[socket.socket] = []
        self.engine = WireEngine(f"ipc://{folder}/engine")
        self.engine.start()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # for its connections, too
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.acceptor = Acceptor(listener)
        ours, channel = self.acceptor.channel()
        self.acceptor.add_channel(ours)
        order = ApiLaunch(
            config(**options), channel.fileno(), 0, self.engine.address, f"ipc://{folder}/api", str(folder), "m",
            patience=patience or Patience(),
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.server.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(channel.fileno(),),
            start_new_session=True,
        )
        channel.close()
        if num_descriptors:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))
        self.acceptor.open(128)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.stdin.write(msgspec.json.encode(order) + b"\n")
        self.stdin.flush()

    def ready(self) -> "Server":
        self.engine.report.set()
        assert self.stdout.readline() == b'{"type":"ServerReady"}\n', self.stderr()
        return self

    def ask(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        self.connections.append(connection)
        connection.request(method, path, json.dumps(body) if body is not None else None)
        return connection.getresponse()

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        """`receive_bytes`: that the kernel takes for a client that does not read, or a little more."""
        connection = socket.socket()
        self.sockets.append(connection)
        connection.settimeout(SECONDS)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def stream(self) -> http.client.HTTPResponse:
        """A stream that has begun and will not end by itself."""
        body = {"prompt": "!", "stream": True, "max_tokens": 200}
        response = self.ask("POST", "/v1/completions", body)
        assert response.readline().startswith(b"data: ")
        self.streams.append(response)
        return response

    def exit_code(self) -> int:
        return self.process.wait(SECONDS)

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        self.process.kill()
        self.complaints = self.stderr()
        for connection in [*self.streams, *self.connections, *self.sockets]:
            connection.close()
        self.process.wait()
        for pipe in (self.stdin, self.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        self.engine.ending.set()
        self.engine.join()
        self.acceptor.close()
