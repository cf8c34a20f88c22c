"""The placer: the one process of a server that speaks with Ray. Relays connect to its socket and ask for a place for their replica; it
makes a placement group and an actor for each rank, and frees them when the connection closes. It is no part of any request's way: if Ray's head is
gone, replicas serve on, and new places have to wait.

The supervisor starts it with one line of JSON on standard input, and its answer is one line on standard output. End of file means stop."""

import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import msgspec

from octavo.cluster.host import Host, versions
from octavo.cluster.messages import (
    AgentEnded,
    ClusterFailed,
    ClusterReport,
    HostPlace,
    NoRoomYet,
    Placed,
    PlaceFailed,
    PlacerLaunch,
    RunAgent,
    ToPlacer,
    ToRelay,
    WantPlace,
)
from octavo.cluster.room import NodeRoom, Wish, best_node, could_fit, neighbours, ranks_on, shortage, wish_of
from octavo.errors import ConfigError
from octavo.ipc.subprocesses import signal_at_parents_end
from octavo.observe import logs

log = logging.getLogger("octavo.cluster")

MISSING = "--distributed-executor-backend ray needs Ray, which is not installed: pip install 'octavo[ray]'"
ROOM_SECONDS = 10.0
"""That a replica which need not wait for a larger cluster waits for room: that of a replica which has just ended is free soon."""
_POLL_S = 0.5
_NODES_S = 2.0
_START_S = 120.0  # that an actor has to start
_HEAD_PORT = 6379
_HEAD_START_S = 60.0
_PROBE_S = 0.5  # that a node has
_ANSWER_S = 5.0  # that a Ray head has to accept a connection
# A dead node is noticed in 1.5 s instead of 14, and nodes wait for a head that is gone for an hour instead of a minute.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 3600,
}


def load_ray() -> Any:
    """Raises ConfigError if Ray is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(MISSING) from None


class RayCluster:
    """A connection to Ray. Its methods may be called by several threads."""

    def __init__(self, address: str, num_replicas: int, may_start: bool = True) -> None:
        """`address`: empty: the cluster of this machine, or, if it `may_start` one, a new one. Raises ConfigError if there is none, or it
        refuses us."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._num_replicas = num_replicas
        self._head: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}  # node → replicas that were placed there
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(MISSING)
        if address:
            _check_answers(address)
        elif not (address := _running_here()):
            if not may_start:
                raise ConfigError("no Ray cluster runs here: octavo serve would start one")
            self._head, address = _start_head()
        # Not earlier: Ray reads how it authenticates when it is loaded.
        self._ray = ray = load_ray()
        try:
            ray.init(address, log_to_driver=False, configure_logging=False, namespace="octavo", logging_level="ERROR")
        except Exception as error:
            self.close()
            raise ConfigError(
                f"the Ray cluster at {address} cannot be joined: {_brief(error)}. If it asks for a token, RAY_AUTH_MODE=token and the same "
                "token are needed here"
            ) from None
        self.address = address
        self.is_ours = self._head is not None
        self.host = str(ray.util.get_node_ip_address())
        self._actor = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(Host)
        self._strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        self._groups = importlib.import_module("ray.util.placement_group")
        self._free = importlib.import_module("ray._private.state").available_resources_per_node

    @property
    def words(self) -> str:
        nodes = self.nodes()
        cores, gpus = (int(sum(node.total.get(name, 0) for node in nodes)) for name in ("CPU", "GPU"))
        counts = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {cores} cores and {gpus} GPUs"
        how = ""
        if self.is_ours:
            how = (
                f"; started here. On other machines, with this machine's ~/.ray/auth_token: RAY_AUTH_MODE=token ray start "
                f"--address={self.address}"
            )
        elif not self.is_authenticated:
            how = "; it does not ask for a token, so any machine that can connect to its ports can run programs there; set RAY_AUTH_MODE=token"
        return f"Ray cluster at {self.address}: {counts}{how}"

    @property
    def is_authenticated(self) -> bool:
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"

    def nodes(self) -> list[NodeRoom]:
        free = self._free()
        return [
            NodeRoom(
                each["NodeID"],
                each["NodeManagerAddress"],
                each["Resources"],
                free.get(each["NodeID"], {}),
                each["NodeManagerPort"],
            )
            for each in self._ray.nodes()
            if each["Alive"]
        ]

    def wish(self, want: WantPlace) -> Wish:
        return wish_of(want.num_ranks, want.device, want.cpu_threads, self._num_replicas, self.nodes())

    def neighbours(self, want: WantPlace) -> int:
        return neighbours(want.num_ranks, self._num_replicas, self.nodes())

    def reserve(self, wish: Wish) -> tuple[Any, set[str]]:
        """Ask Ray for a placement group: all ranks on one node where they fit, else on as few as possible; replicas on different nodes. → the
        group, and the node that was chosen and is counted, if one was."""
        bundles = [{wish.resource: wish.amount} for _ in range(wish.num_ranks)]
        with self._lock:
            # Ray takes seconds to notice that a node is gone, and until then what was used there seems free.
            able = self.nodes()
            while (target := best_node(wish, able, self._used)) is not None and not _answers(target):
                able.remove(target)
            if target is None:
                return self._groups.placement_group(bundles, strategy="PACK"), set()
            self._used[target.id] = self._used.get(target.id, 0) + 1
            group = self._groups.placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=target.id)
        return group, {target.id}

    def count(self, nodes: set[str], step: int) -> None:
        """Note where a replica is, or was."""
        with self._lock:
            for node in nodes:
                self._used[node] = self._used.get(node, 0) + step

    def start_hosts(self, group: Any, wish: Wish) -> list[tuple[Any, dict[str, Any]]]:
        """An actor in each bundle of a group that is ready, and what it says of its node. Ranks of one node come one after the other."""
        options = {"num_gpus": wish.amount} if wish.resource == "GPU" else {"num_cpus": wish.amount}
        actors = [
            self._actor.options(scheduling_strategy=self._strategy(group, number), **options).remote()
            for number in range(wish.num_ranks)
        ]
        try:
            facts = self._ray.get([actor.about.remote() for actor in actors], timeout=_START_S)
        except Exception as error:
            raise ConfigError(
                f"a node cannot run Octavo: {_brief(error)} (the same octavo[ray] must be installed on every node)"
            ) from None
        first = next(iter(each["node"] for each in facts))
        return sorted(zip(actors, facts, strict=True), key=lambda each: (each[1]["node"] != first, each[1]["node"]))

    def run(self, actor: Any, command: RunAgent) -> Any:
        return actor.run.remote(command.arguments, command.environment)

    def ending(self, ref: Any, timeout: float) -> str | None:
        """How a process has ended. None: it runs, for all we know."""
        done, _ = self._ray.wait([ref], timeout=timeout)
        if not done:
            return None
        try:
            return str(self._ray.get(ref))
        except Exception as error:
            return _brief(error)

    def free(self, group: Any, actors: list[Any]) -> None:
        for actor in actors:
            with contextlib.suppress(Exception):  # it is gone, or the cluster is
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            self._groups.remove_placement_group(group)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.shutdown()
        if self._head is not None:
            self._head.terminate()
            try:
                self._head.wait(10)
            except subprocess.TimeoutExpired:
                self._head.kill()
                self._head.wait()


class _Lease:
    """One relay's connection: its replica's places, for as long as it is open."""

    def __init__(self, cluster: RayCluster, connection: "Connection[Any, Any]") -> None:
        self._cluster, self._connection = cluster, connection
        self._sending = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(ToPlacer)
        self._group: Any = None
        self._actors: list[Any] = []
        self._nodes: set[str] = set()  # that this replica is counted at
        self._is_over = False

    def serve(self) -> None:
        try:
            want = self._decoder.decode(self._connection.recv_bytes())
            assert isinstance(want, WantPlace)
            try:
                self._find_place(want)
            except ConfigError as error:
                self._send(PlaceFailed(error.message))
            while True:
                command = self._decoder.decode(self._connection.recv_bytes())
                assert isinstance(command, RunAgent)
                ref = self._cluster.run(self._actors[command.rank], command)
                threading.Thread(target=self._watch, args=(command.rank, ref), daemon=True).start()
        except (EOFError, OSError):
            pass  # the relay has ended
        except Exception as error:
            log.error("a place for a replica cannot be found: %s", _brief(error))
            with contextlib.suppress(OSError):
                self._send(PlaceFailed(f"Ray does not answer: {_brief(error)}"))
        finally:
            self._is_over = True
            self._give_back()
            self._connection.close()

    def _find_place(self, want: WantPlace) -> None:
        """Where a replica may wait, also for a head that is gone."""
        said = ""
        while True:
            try:
                return self._place(want)
            except (ConfigError, EOFError, OSError):
                raise
            except Exception as error:
                if not want.is_patient:
                    raise
                if (words := f"Ray does not answer: {_brief(error)}") != said:
                    said = words
                    self._send(NoRoomYet(words))
                self._give_back()
                if self._connection.poll(_NODES_S):
                    raise EOFError from None

    def _give_back(self) -> None:
        """Free the places, if there are any."""
        if self._group is not None:
            self._cluster.free(self._group, self._actors)
        self._cluster.count(self._nodes, -1)
        self._group, self._actors, self._nodes = None, [], set()

    def _place(self, want: WantPlace) -> None:
        cluster = self._cluster
        wish = cluster.wish(want)
        is_patient = want.is_patient or cluster.is_ours
        if not is_patient and not could_fit(wish, cluster.nodes()):
            raise ConfigError(f"the Ray cluster is too small: {shortage(wish, cluster.nodes())}")
        self._group, self._nodes = cluster.reserve(wish)
        began, said = time.monotonic(), ""
        while not self._group.wait(_POLL_S):
            if self._connection.poll():
                raise EOFError  # the relay says nothing before it has its place, so it has ended
            nodes = cluster.nodes()
            words = shortage(wish, nodes)
            waited = time.monotonic() - began
            if not is_patient and waited > ROOM_SECONDS:
                raise ConfigError(f"the Ray cluster has no room after {waited:.0f} s: {words}")
            if (
                words != said
                and waited > 2 * _POLL_S
                and sum(ranks_on(wish, each.free) for each in nodes) < wish.num_ranks
            ):
                said = words
                self._send(NoRoomYet(words))
        found = cluster.start_hosts(self._group, wish)
        self._actors = [actor for actor, _ in found]
        facts = [each for _, each in found]
        _check_versions(facts)
        places = places_of(facts)
        cluster.count(self._nodes, -1)
        self._nodes = {place.node for place in places}
        cluster.count(self._nodes, 1)
        cpu_threads = wish.amount if wish.resource == "CPU" else 0
        self._send(Placed(cluster.host, places, cpu_threads, cluster.neighbours(want)))

    def _watch(self, rank: int, ref: Any) -> None:
        while not self._is_over:
            try:
                words = self._cluster.ending(ref, 5.0)
            except Exception as error:  # the cluster is gone
                words = _brief(error)
            if words is not None:
                with contextlib.suppress(OSError):
                    self._send(AgentEnded(rank, words))
                return

    def _send(self, message: ToRelay) -> None:
        with self._sending:
            self._connection.send_bytes(msgspec.msgpack.encode(message))


def _answers(node: NodeRoom) -> bool:
    try:
        socket.create_connection((node.address, node.port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def places_of(facts: list[dict[str, Any]]) -> list[HostPlace]:
    """The places of ranks, in their order. A rank sees the GPUs of all its replica's ranks on the node, and uses that of its local number."""
    gpus: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for each in facts:
        gpus.setdefault(each["node"], []).extend(each["gpus"])
        counts[each["node"]] = counts.get(each["node"], 0) + 1
    seen: dict[str, int] = {}
    places = []
    for each in facts:
        node = each["node"]
        local = seen[node] = seen.get(node, -1) + 1
        places.append(HostPlace(node, each["address"], each["name"], local, counts[node], gpus[node]))
    return places


def _check_versions(facts: list[dict[str, Any]]) -> None:
    here = versions()
    for each in facts:
        for name, version in here.items():
            if each["versions"][name] != version:
                raise ConfigError(
                    f"node {each['name']} ({each['address']}) has {name} {each['versions'][name]}, and here is {name} {version}: "
                    "install the same versions on every node"
                )


_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # and no warning about it
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(SYSTEM_CONFIG["gcs_rpc_server_reconnect_timeout_s"]),
}


def _check_answers(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--ray-address {address!r} is not HOST:PORT of a Ray head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address} (--ray-address): {error}") from None


def _running_here() -> str:
    """The address of a cluster of which this machine is a node; empty: none. Ray leaves it in a file, which may outlive the cluster."""
    found = os.environ.get("RAY_ADDRESS", "")
    if not found:
        with contextlib.suppress(OSError):
            found = (Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster").read_text().strip()
    try:
        _check_answers(found)
    except ConfigError:
        return ""
    return found


def _start_head() -> tuple[subprocess.Popen[bytes], str]:
    """Start the head of a new cluster on this machine. It ends with this process."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        # Does nothing if there is one.
        subprocess.run([*ray, "get-auth-token", "--generate"], stdin=subprocess.DEVNULL, capture_output=True)
    host = _own_address()
    command = [*ray, "start", "--head", "--block", f"--port={_HEAD_PORT}", f"--node-ip-address={host}"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    command.append(f"--system-config={msgspec.json.encode(SYSTEM_CONFIG).decode()}")
    with tempfile.TemporaryFile() as said:
        head = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal_at_parents_end(signal.SIGTERM),
        )
        deadline, address = time.monotonic() + _HEAD_START_S, f"{host}:{_HEAD_PORT}"
        while _running_here() != address:
            if head.poll() is not None or time.monotonic() > deadline:
                head.kill()
                head.wait()
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines() or ["it did not say why"]
                raise ConfigError(
                    f"no Ray cluster runs here, and none could be started at {address}: {lines[-1][:500]}"
                )
            time.sleep(0.2)
    return head, address


def _own_address() -> str:
    """This machine's address on the network that leads to others. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:  # no network
            return "127.0.0.1"


def _brief(error: BaseException) -> str:
    """The first sentence of Ray's many lines, and the last one of a traceback inside."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    causes = [line for line in lines[1:] if line.split(":")[0].endswith(("Error", "Exception"))]
    return lines[0][:500] if not causes else f"{lines[0][:300]} {causes[-1][:300]}"


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlacerLaunch)
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    os.dup2(2, 1)
    logs.install(logging.WARNING, launch.log_format)
    log.setLevel(logging.INFO)

    def answer(message: ClusterReport | ClusterFailed) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(answers, msgspec.json.encode(message) + b"\n")

    try:
        cluster = RayCluster(launch.address, launch.num_replicas)
    except ConfigError as error:
        answer(ClusterFailed(error.message))
        return 2
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has set a handler
    Path(launch.listen).unlink(missing_ok=True)  # of a placer before this one
    listener = Listener(launch.listen, "AF_UNIX", backlog=64)
    threading.Thread(target=_accept, args=(listener, cluster), daemon=True).start()
    is_closing = threading.Event()
    threading.Thread(target=_watch_nodes, args=(cluster, is_closing), daemon=True).start()
    answer(ClusterReport(cluster.words))
    while os.read(0, 4096):
        pass
    is_closing.set()
    cluster.close()
    return 0


def _accept(listener: Listener, cluster: RayCluster) -> None:
    while True:
        lease = _Lease(cluster, listener.accept())
        threading.Thread(target=lease.serve, daemon=True).start()


def _watch_nodes(cluster: RayCluster, is_closing: threading.Event) -> None:
    """Log nodes that come and go, and a head that does not answer."""
    known: dict[str, NodeRoom] | None = None
    is_lost = False
    while True:
        try:
            found = {node.id: node for node in cluster.nodes()}
            if is_lost:
                log.info("Ray's head answers again")
            is_lost = False
        except Exception as error:
            if is_closing.is_set():
                return
            if not is_lost:
                log.warning("Ray's head does not answer; replicas serve on, new ones have to wait: %s", _brief(error))
            is_lost = True
            time.sleep(_NODES_S)
            continue
        for node in () if known is None else (known[each] for each in known.keys() - found.keys()):
            log.warning("node %s (%s) has left the Ray cluster", node.address, node.id[:8])
        for node in () if known is None else (found[each] for each in found.keys() - known.keys()):
            log.info("node %s (%s) has joined the Ray cluster", node.address, node.id[:8])
        known = found
        time.sleep(_NODES_S)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        log.critical("the placer ends", exc_info=True)
        code = 1
    logging.shutdown()
    os._exit(code)  # without waiting for threads
