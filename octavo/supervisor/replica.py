"""Replica: one place for an engine in a server: its current engine, what became of the ones before, and the shared memory that they
write to. A server without a fleet has one."""

import os
import time
from typing import Literal

from octavo.config import Config
from octavo.ipc.heartbeat import Heartbeat
from octavo.messages import ReplicaState, ReplicaStatus
from octavo.observe.history import history_memory
from octavo.recording.crash_files import CrashFiles
from octavo.supervisor.launcher import EngineProcess
from octavo.supervisor.shares import Share
from octavo.supervisor.watchdog import PulseWatch, Restarts, Watch


class Replica:
    def __init__(self, number: int, config: Config, heartbeat_fd: int, share: Share | None) -> None:
        """`share`: of the machine; None: all of it."""
        self.number, self.share = number, share
        self.heartbeat = Heartbeat(heartbeat_fd, number)
        self.history_fd = history_memory()
        self.crash_files = CrashFiles(config.recorder)
        self.restarts = Restarts(config.server.max_engine_restarts)
        self.watch = Watch(self.heartbeat, config.server.step_timeout)
        self.pulse = PulseWatch(self.heartbeat, config.fleet.replica_timeout)
        self.engine: EngineProcess | None = None
        self.epoch = 0  # number of its current engine among all of the server's
        self.started = 0.0
        self.is_ready = False
        self.ready_at = 0.0
        self.was_ready = False  # the current engine or an earlier one
        self.num_restarts = 0
        self.restart_at: float | None = None  # None: no start is due
        self.kill_reason = ""  # why we killed the engine; empty: we did not
        self.has_failed = False  # it is not started again
        self.joined_origins: set[int] = set()  # API processes that are connected to the current engine
        # While it drains: what follows, and the API processes whose requests are still there.
        self.after_drain: Literal["", "stop", "restart"] = ""
        self.busy_origins: set[int] = set()
        self.is_stopping = False  # its engine was asked to end, after it was drained
        self.stop_until = 0.0  # then it is killed

    def begin(self, engine: EngineProcess, epoch: int) -> None:
        self.engine, self.epoch = engine, epoch
        self.restart_at, self.is_ready, self.kill_reason = None, False, ""
        self.after_drain, self.is_stopping = "", False
        self.busy_origins.clear()
        self.joined_origins.clear()
        self.started = time.monotonic()

    @property
    def runs(self) -> bool:
        return self.engine is not None and self.engine.poll() is None

    @property
    def status(self) -> ReplicaStatus:
        if self.has_failed:
            return "failed"
        if self.after_drain:
            return "draining"
        return "ready" if self.is_ready else "restarting" if self.was_ready else "starting"

    @property
    def state(self) -> ReplicaState:
        place = "" if self.share is None else self.share.words
        if self.engine is not None and self.engine.place:
            place = self.engine.place
        pid = self.heartbeat.pid if self.is_ready else 0
        return ReplicaState(self.number, self.status, self.epoch, self.num_restarts, place, pid)

    def close(self) -> None:
        """Release the shared memory and the recording."""
        self.heartbeat.close()
        os.close(self.history_fd)
        self.crash_files.close(self.epoch)
