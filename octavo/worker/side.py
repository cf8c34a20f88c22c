"""What a rank does beside its steps: it compiles grammars, and reads and frees adapters, while plans go on (messages/side.py)."""

import contextlib
import functools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.ipc.secure_channel import SecureConnection
from octavo.messages import AdapterRef
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
from octavo.worker.adapters import RankAdapters
from octavo.worker.priority import LOADING, yield_to_steps
from octavo.worker.runner import Runner

log = logging.getLogger("octavo.worker")


class FinishedPlans:
    """Counts the plans that a rank has carried out, so that another thread can wait for them."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count)


class SideWork:
    def __init__(
        self, line: "Connection[Any, Any] | SecureConnection", runner: Runner, finished: FinishedPlans
    ) -> None:
        self._line, self._runner, self._finished = line, runner, finished
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # of senders
        # A grammar does not wait for files, nor does a check, for which the engine waits, for an adapter that is being read.
        self._reading = ThreadPoolExecutor(1, "octavo-adapters", yield_to_steps, (LOADING,))
        self._checking = ThreadPoolExecutor(1, "octavo-adapter-checks")

    def serve(self) -> None:
        """Do what the executor asks for, until it has closed the line. A failure closes it: the executor would wait for the reply."""
        decoder: msgspec.msgpack.Decoder[SideMessage] = msgspec.msgpack.Decoder(SideMessage)
        while True:
            try:
                message = self._line.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                self._do(decoder.decode(message))
            except Exception:
                log.exception("a rank has failed beside its steps")
                self._line.close()
                return

    def _do(self, message: SideMessage) -> None:
        match message:
            case PrepareGrammar(number, grammar, forgets):
                self._runner.rows.sampling.grammars.prepare(
                    grammar, forgets, lambda num_bytes: self._reply(SideReply(number, num_bytes=num_bytes))
                )
            case CheckAdapter(number, adapter):
                self._checking.submit(self._check, number, adapter)
            case ReadAdapter(number, adapter):
                self._reading.submit(self._read, number, adapter)
            case ForgetAdapters(number, ids):
                self._adapters.forget(ids)
                self._reply(SideReply(number))
            case SleepRank(number, pages, keeps_pages, num_plans):
                self._finished.wait_for(num_plans)
                self._runner.device.use()
                self._runner.give_back(pages)
                self._runner.sleep(keeps_pages, functools.partial(self._reply, SideReply(number, is_over=False)))
                self._reply(SideReply(number))
            case WakeRank(number):
                self._runner.device.use()
                self._runner.wake_up(functools.partial(self._reply, SideReply(number, is_over=False)))
                self._reply(SideReply(number))

    @property
    def _adapters(self) -> RankAdapters:
        assert self._runner.adapters is not None, "without --enable-lora"
        return self._runner.adapters

    def _check(self, number: int, adapter: AdapterRef) -> None:
        try:
            reply = SideReply(number, num_bytes=self._adapters.check_files(adapter))
        except ConfigError as error:
            reply = SideReply(number, str(error))
        except Exception as error:  # a damaged file: the server goes on
            reply = SideReply(number, f"adapter {adapter.name} cannot be checked: {type(error).__name__}: {error}")
        self._reply(reply)

    def _read(self, number: int, adapter: AdapterRef) -> None:
        loaded = self._adapters.load_or_say_why(adapter)
        if isinstance(loaded, str):
            self._reply(SideReply(number, loaded))
        else:
            self._reply(SideReply(number, id=loaded.id, num_bytes=loaded.num_bytes))

    def _reply(self, reply: SideReply) -> None:
        with contextlib.suppress(OSError), self._lock:  # the executor has ended, and this process will
            self._line.send_bytes(self._encoder.encode(reply))
