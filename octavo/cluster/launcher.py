"""RayLauncher: starts engines on the nodes of a Ray cluster, each behind a relay on this machine, and the placer that finds nodes for them."""

import contextlib
import logging
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from octavo.cluster.messages import (
    ClusterFailed,
    ClusterReport,
    EngineEnd,
    EnginePlace,
    FromPlacer,
    FromRelay,
    PlacerLaunch,
)
from octavo.cluster.relay import PLACER
from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.ipc.launch import EngineLaunch
from octavo.ipc.readable import is_readable
from octavo.ipc.subprocesses import describe_exit, spawn
from octavo.messages import EngineReport
from octavo.supervisor.launcher import LocalEngine
from octavo.supervisor.shares import Share

log = logging.getLogger("octavo.supervisor")

PLACER_MODULE = "octavo.cluster.placer"  # tests replace it by one that has places on this machine only
_CONNECT_S = 120.0  # that the placer has to reach the cluster
_STOP_S = 10.0


class RayEngine(LocalEngine):
    """An engine on a node. Its relay's lines say where it is, and how it ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process)
        self._end: EngineEnd | None = None

    def read_lines(self) -> list[bytes] | None:
        lines = super().read_lines()
        if lines is None:
            return None
        reports = []
        for line in lines:
            match msgspec.json.decode(line, type=FromRelay):
                case EngineReport():
                    reports.append(line)
                case EnginePlace() as place:
                    self.place, self.is_waiting = place.words, place.is_waiting
                    if not place.is_waiting:
                        self.placed = time.monotonic()
                case EngineEnd() as end:
                    self._end = end
        return reports

    def wait(self) -> int:
        code = super().wait()
        return code if self._end is None else self._end.code

    def describe(self, code: int) -> str:
        return describe_exit(code) if self._end is None or not self._end.words else self._end.words


class RayLauncher:
    is_remote = True

    def __init__(self, config: Config, folder: Path) -> None:
        """Connects to the cluster. Raises ConfigError if Ray is not installed, or there is no cluster."""
        fleet = config.fleet
        most = max(fleet.first_replicas, fleet.max_replicas)
        self._launch = PlacerLaunch(fleet.ray_address, str(folder / PLACER), most, config.server.log_format)
        self._is_elastic = fleet.max_replicas > 0
        self._first = fleet.first_replicas
        self._placer = self._start_placer()
        try:
            self.words = self._connect().words
        except BaseException:
            self.close()
            raise

    def start(
        self, module: str, launch: EngineLaunch, fds: tuple[int, ...], environment: Mapping[str, str]
    ) -> RayEngine:
        """A replica of the first start that has no room is an error; one that is started again, or added, waits for a node."""
        if self._placer.poll() is not None:
            log.error("the process that speaks with Ray has ended (%s); starting another", self._placer.returncode)
            self._placer = self._start_placer()
        launch = msgspec.structs.replace(launch, is_patient=self._is_elastic or launch.number > self._first)
        return RayEngine(spawn("octavo.cluster.relay", launch, fds))

    def share(self, config: Config, replica: int, num_replicas: int) -> Share:
        """Ray finds a place; which cores of its node it uses is left to the kernel."""
        return Share([], {}, config, "")

    def recording(self, config: Config) -> Config:
        """Engines record on their nodes."""
        return replace(config, record_bytes=0)

    def close(self) -> None:
        """End all actors, and the cluster if it was started here."""
        assert self._placer.stdin is not None and self._placer.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._placer.stdin.close()
        try:
            self._placer.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._placer.kill()  # Ray ends the actors of a process that has died
            self._placer.wait()
        self._placer.stdout.close()

    def _start_placer(self) -> subprocess.Popen[bytes]:
        return spawn(PLACER_MODULE, self._launch)

    def _connect(self) -> ClusterReport:
        assert self._placer.stdout is not None
        if not is_readable(self._placer.stdout.fileno(), _CONNECT_S):
            raise ConfigError(f"the Ray cluster does not answer within {_CONNECT_S:.0f} s")
        line = self._placer.stdout.readline()
        if not line:
            raise ConfigError("the process that speaks with Ray has ended: the log above says why")
        message: FromPlacer = msgspec.json.decode(line, type=FromPlacer)
        if isinstance(message, ClusterFailed):
            raise ConfigError(message.message)
        return message
