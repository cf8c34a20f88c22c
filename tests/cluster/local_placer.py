"""A cluster without Ray: a placer whose places are all on this machine. Everything else of a cluster is the real thing: relays, agents, engines
(which pause while a test asks for it).

`python -m tests.cluster.local_placer serve …` serves; without arguments this is the placer. The file that CLUSTER_TEST_ROOM names says how many
replicas have room; without one all do."""

import contextlib
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Listener
from pathlib import Path

import msgspec

from octavo.cli import main
from octavo.cluster import launcher
from octavo.cluster.messages import (
    AgentEnded,
    ClusterReport,
    HostPlace,
    NoRoomYet,
    Placed,
    PlacerLaunch,
    RunAgent,
    ToPlacer,
)

ROOM = "CLUSTER_TEST_ROOM"
AGENT, CALM_AGENT = "octavo.cluster.agent", "tests.cluster.calm_agent"


class Lease:
    def __init__(self, connection) -> None:
        self._connection = connection
        self._agents: list[subprocess.Popen] = []

    def serve(self) -> None:
        try:
            want = msgspec.msgpack.decode(self._connection.recv_bytes(), type=ToPlacer)
            self._wait_for_room(want.replica)
            count = want.num_ranks
            # Every rank has a node of its own.
            places = [HostPlace(f"{want.replica:04d}{rank:04d}", "127.0.0.1", "here", 0, 1) for rank in range(count)]
            self._send(Placed("127.0.0.1", places, 1))
            while True:
                self._run(msgspec.msgpack.decode(self._connection.recv_bytes(), type=ToPlacer))
        except (EOFError, OSError):
            pass
        for agent in self._agents:
            agent.kill()
            agent.wait()

    def _wait_for_room(self, replica: int) -> None:
        name = os.environ.get(ROOM, "")
        has_said = False
        while name and replica >= int(Path(name).read_text()):
            if not has_said:
                self._send(NoRoomYet("a replica needs 1 core, and there is none"))
            has_said = True
            if self._connection.poll(0.05):
                raise EOFError

    def _run(self, command: RunAgent) -> None:
        arguments = [CALM_AGENT if each == AGENT else each for each in command.arguments]
        agent = subprocess.Popen([sys.executable, *arguments], env=os.environ | command.environment)
        self._agents.append(agent)

        def wait() -> None:
            code = agent.wait()
            with contextlib.suppress(OSError):
                self._send(AgentEnded(command.rank, f"its agent ended with code {code}"))

        threading.Thread(target=wait, daemon=True).start()

    def _send(self, message) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))


def serve() -> None:
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlacerLaunch)
    Path(launch.listen).unlink(missing_ok=True)
    listener = Listener(launch.listen, "AF_UNIX", backlog=16)

    def accept() -> None:
        while True:
            # The kernel ends agents with the thread that started them, and this one lives as long as its lease.
            threading.Thread(target=Lease(listener.accept()).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdout.buffer.write(msgspec.json.encode(ClusterReport("a cluster on this machine")) + b"\n")
    sys.stdout.buffer.flush()
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:]:
        launcher.PLACER_MODULE = "tests.cluster.local_placer"
        sys.exit(main.main(sys.argv[1:]))
    serve()
