"""ProcessExecutor: every rank is a process: a child of this one, or wherever a launcher starts it. The same plan bytes
go to each, and the first rank of the last stage returns the result."""

import os
import selectors
import shutil
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

import octavo
from octavo.config import Config, KVTiers
from octavo.errors import ConfigError, EngineDead
from octavo.executor.base import TierMover
from octavo.executor.remote import Gathering, RankLauncher, RemoteRank
from octavo.executor.side_requests import SideRequests
from octavo.messages import (
    AdapterLoaded,
    AdapterRef,
    Allocate,
    EngineReport,
    LoadReport,
    RankFailed,
    RankStart,
    StepPlan,
    StepResult,
    TrialSeconds,
)
from octavo.messages.side import (
    CheckAdapter,
    ForgetAdapters,
    PrepareGrammar,
    ReadAdapter,
    SideMessage,
    SideReply,
    SleepRank,
    WakeRank,
)
from octavo.messages.speculation import speculation_of
from octavo.weights.sources.source import ModelSource, resolve
from octavo.worker.main import FAILED
from octavo.worker.memory.page_count import settle, with_trials

_GATHER_S = 120.0  # that launched ranks have to connect
_GRACE = 5.0  # seconds that a rank has to exit by itself
_STDERR = 2  # ranks print there: this process's stdout may carry a protocol


class ProcessExecutor:
    overlap = True  # a submitted plan waits in the ranks' pipes

    def __init__(self, config: Config, source: ModelSource, launcher: RankLauncher | None = None) -> None:
        """`launcher`: starts the ranks; None: they are children of this process."""
        self._config = config
        self._source = source
        self._launcher = launcher
        self._gathering: Gathering | None = None
        self._ranks: list[_Rank | RemoteRank] = []
        self._folder = ""
        self._selector = selectors.DefaultSelector()
        self._encoder = msgspec.msgpack.Encoder()
        self._results = msgspec.msgpack.Decoder(StepResult)
        self._is_closed = False
        self._side: SideRequests | None = None  # made with the first
        self._adapter_itemsize = 0
        self._num_plans = 0  # that every rank was sent

    def start(self) -> EngineReport:
        try:
            if self._launcher is None:
                _fetch_draft(self._config)
            self._spawn()
            reports = [msgspec.msgpack.decode(reply, type=LoadReport) for reply in self._replies()]
            report = settle(self._config.cache, reports)
            self._adapter_itemsize = reports[0].adapter_itemsize
            self._send(msgspec.msgpack.encode(Allocate(report.num_pages, report.num_host_pages)))
            trials = self._replies()[self._config.parallel.result_rank]
            return with_trials(report, msgspec.msgpack.decode(trials, type=TrialSeconds))
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> None:
        self._send(self._encoder.encode(plan))
        self._num_plans += 1

    def collect(self) -> StepResult:
        return self._results.decode(self._next_reply()[1])

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        """Where a rank has ended it is done at once: the next step reports that."""
        sampling = range(self._config.parallel.result_rank, len(self._ranks))  # the last stage's
        self._asking().ask(
            sampling,
            lambda number: PrepareGrammar(number, grammar, forgets),
            lambda replies: done(max((reply.num_bytes for reply in replies or ()), default=0)),
        )

    def adapter_itemsize(self) -> int:
        return self._adapter_itemsize

    def check_adapter(self, ref: AdapterRef) -> int:
        replies = self._ask_all(lambda number: CheckAdapter(number, ref))
        for reply in replies:
            if reply.error:
                raise ConfigError(reply.error)
        return _size_on(replies)

    def load_adapter(self, ref: AdapterRef, done: Callable[[AdapterLoaded | str | EngineDead], None]) -> None:
        def answered(replies: list[SideReply] | None) -> None:
            if replies is None:
                done(EngineDead(self._describe_end(self._ranks[0])))
                return
            why = next((f"{reply.error}{self._ranks[at].where}" for at, reply in enumerate(replies) if reply.error), "")
            has_room = all(reply.id for reply in replies)
            if not why and has_room and len({reply.id for reply in replies}) > 1:
                why = f"adapter {ref.name}: the files at {ref.path} differ between hosts, or were written while they were read"
            if not why and has_room:
                done(AdapterLoaded(replies[0].id, _size_on(replies)))
                return
            for at, reply in enumerate(replies):
                if reply.id:
                    self._forget([at], [reply.id])
            done(why or AdapterLoaded("", 0))

        self._asking().ask(range(len(self._ranks)), lambda number: ReadAdapter(number, ref), answered)

    def forget_adapters(self, ids: list[str]) -> None:
        self._forget(range(len(self._ranks)), ids)

    def _forget(self, ranks: Sequence[int], ids: list[str]) -> None:
        self._asking().ask(ranks, lambda number: ForgetAdapters(number, ids))

    def _asking(self) -> SideRequests:
        if self._side is None:
            self._side = SideRequests([rank.side for rank in self._ranks])
        return self._side

    def give_back(self, pages: list[int]) -> None:
        """Ranks keep the memory of their pages: idle prefixes stop growing, and that is all."""

    def sleep(self, pages: list[int], keeps_pages: bool, moved: Callable[[], None]) -> None:
        self._ask_all(lambda number: SleepRank(number, pages, keeps_pages, self._num_plans), moved)

    def wake_up(self, moved: Callable[[], None]) -> None:
        self._ask_all(WakeRank, moved)

    def _ask_all(
        self, message: Callable[[int], SideMessage], on_part: Callable[[], None] = lambda: None
    ) -> list[SideReply]:
        """Have every rank do something beside its steps, and wait until all have. Raises EngineDead."""
        box: SimpleQueue[list[SideReply] | None] = SimpleQueue()
        self._asking().ask(range(len(self._ranks)), message, box.put, on_part)
        if (replies := box.get()) is None:
            raise EngineDead(self._describe_end(self._ranks[0]))
        return replies

    def open_tier(self, tiers: KVTiers, layout: str) -> TierMover:
        raise ConfigError("--kv-tier needs one rank (--tensor-parallel-size 1): pages of several ranks are not stored")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # Where one has ended, the others wait for it in a collective, and streams wait for the next engine.
        grace = 0.0 if any(rank.ending(0.0) is not None for rank in self._ranks) else _GRACE
        for rank in self._ranks:
            rank.close_pipes()
        deadline = time.monotonic() + grace
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
        if self._gathering is not None:
            self._gathering.close()
        self._selector.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self) -> None:
        num_ranks = self._config.parallel.num_ranks
        if self._launcher is None:
            # Ranks meet through a file: a port could be taken between choosing and using it.
            self._folder = tempfile.mkdtemp(prefix="octavo-")
            rendezvous = f"file://{self._folder}/rendezvous"
            places = [(number, num_ranks) for number in range(num_ranks)]
            for number in range(num_ranks):
                self._ranks.append(_Rank(number))
        else:
            self._gathering = Gathering(self._launcher, num_ranks)
            self._ranks.extend(self._gathering.ranks)
            rendezvous = self._gathering.wait(_GATHER_S)
            places = [(rank.place.local_rank, rank.place.num_local_ranks) for rank in self._gathering.ranks]
        for rank in self._ranks:
            self._selector.register(rank.connection, selectors.EVENT_READ, rank)
        for rank, (local_rank, num_local_ranks) in zip(self._ranks, places, strict=True):
            start = RankStart(
                self._config,
                str(self._source.path),
                self._source.name,
                self._source.kind,
                rank.number,
                num_ranks,
                rendezvous,
                local_rank,
                num_local_ranks,
            )
            self._send_to(rank, msgspec.msgpack.encode(start))

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            self._send_to(rank, message)

    def _send_to(self, rank: "_Rank | RemoteRank", message: bytes) -> None:
        try:
            rank.connection.send_bytes(message)
        except OSError as error:
            # The rank's last message may still be unread: it says why.
            self._replies()
            raise EngineDead(self._describe_end(rank)) from error

    def _replies(self) -> list[bytes]:
        """Wait for one reply from each rank and return them in rank order."""
        replies: dict[int, bytes] = {}
        while len(replies) < len(self._ranks):
            number, reply = self._next_reply()
            replies[number] = reply
        return [replies[number] for number in sorted(replies)]

    def _next_reply(self) -> tuple[int, bytes]:
        """Wait for a message from any rank: (rank number, message). If a rank fails or ends, the executor is dead."""
        if self._is_closed:
            raise EngineDead("the executor is closed")
        key, _ = self._selector.select()[0]
        rank: _Rank | RemoteRank = key.data
        try:
            reply = rank.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise EngineDead(self._describe_end(rank)) from error
        if reply[:1] != FAILED:
            return rank.number, reply[1:]
        failed = msgspec.msgpack.decode(reply[1:], type=RankFailed)
        if failed.is_config:
            raise ConfigError(failed.message)
        raise EngineDead(f"{self._describe_end(rank)}: {failed.message}")

    def _describe_end(self, first: "_Rank | RemoteRank") -> str:
        """Describe which rank ended, and how. When one rank is killed the others fail too: name the killed one, not the one that
        was noticed first."""
        endings = [(rank, rank.ending(0.0)) for rank in (first, *self._ranks)]
        killed = [(rank, code) for rank, code in endings if code is not None and code < 0]
        if not killed:
            deadline = time.monotonic() + 0.5
            endings = [(rank, rank.ending(max(0.0, deadline - time.monotonic()))) for rank in (first, *self._ranks)]
            killed = [(rank, code) for rank, code in endings if code is not None and code < 0]
        rank, code = killed[0] if killed else endings[0]
        if code is None:
            return f"rank {rank.number}{rank.where} failed"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {rank.number}{rank.where} {how}"


def _size_on(replies: list[SideReply]) -> int:
    """Bytes of an adapter on all ranks, as if each had as much of it as the one that has most: that one's memory is full first."""
    return max(reply.num_bytes for reply in replies) * len(replies)


def _fetch_draft(config: Config) -> None:
    """Fetch what the ranks will draft with, if it comes from a hub: of several that pull it at once, one would succeed."""
    settings = speculation_of(config.scheduler.speculative_config, is_gpu=False)
    if settings is not None and settings.model:
        resolve(settings.model, allow_missing_weights=config.model.load_format == "dummy", is_draft_head=True)


class _Rank:
    """One rank's process, the pipes to it, and a pipe whose closing tells it that this process is gone."""

    where = ""  # on this machine

    def __init__(self, number: int) -> None:
        self.number = number
        self.connection: Connection[Any, Any]
        self.side: Connection[Any, Any]
        self.connection, theirs = Pipe()
        self.side, their_side = Pipe()
        read_end, self._lifeline = os.pipe()
        # The kernel's parent-death signal is tied to the thread that started the child, not to the process. Only the main
        # thread lives as long as the process.
        from_main = threading.current_thread() is threading.main_thread()
        fds = (theirs.fileno(), their_side.fileno(), read_end)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.worker.main", *map(str, fds), str(int(from_main))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                env=_environment(),
            )
        finally:
            theirs.close()
            their_side.close()
            os.close(read_end)

    def ending(self, timeout: float) -> int | None:
        """Return the exit code (negative: a signal's number), or None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close_pipes(self) -> None:
        self.connection.close()
        os.close(self._lifeline)

    def end(self, timeout: float) -> None:
        if self.ending(timeout) is None:
            self._process.kill()
            self._process.wait()
        self.side.close()  # not before: SideRequests reads from it until the rank's end closes it


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    root = str(Path(octavo.__file__).parent.parent)
    if root not in site.getsitepackages():  # run from a checkout: the child must find the same code
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    # All ranks are on this machine. By default gloo looks up the machine's host name, which often does not resolve.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    return environment
