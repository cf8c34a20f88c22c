"""RowProcesses: the rows of one rank that have a grammar, the processes that compute their masks, and the slots in which these leave them."""

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, OctavoError
from octavo.messages import SamplingParams
from octavo.messages.plans import MIN_SAMPLES
from octavo.sampling.grammar.mask_slots import MaskSlots
from octavo.sampling.grammar.processes import ForkServer, GrammarProcess
from octavo.sampling.grammar.protocol import Begin, Enter, FilledRow, Leave

if TYPE_CHECKING:
    from octavo.text.tokenize.vocabulary import Vocabulary

log = logging.getLogger("octavo.grammar")

NUM_SLOTS = 64
_NUM_AHEAD = 2 * MIN_SAMPLES  # slots for masks behind drafted tokens
_LONG_MASK = 0.25  # seconds without an answer after which a process has a low priority
_STANDSTILL = 30  # times the limit of processor time: seconds without an answer after which a process is ended
_MOST_MOVES = 3  # processes that may end under a row, through no fault of its own


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may take on one rank. Seconds of processor time, except most_wait, which is wall time."""

    compile_seconds: float = 5.0
    step_seconds: float = 2.0  # for one token of a row
    memory_bytes: int = 2**30
    most_wait: float = 0.1  # that a step waits for masks
    num_forced: int = 0  # tokens of a forced stretch that are drafted at most; 0: none are


@dataclass(slots=True)
class GrammarRow:
    number: int  # by which its process knows it
    params: SamplingParams
    prompt_len: int
    tokens: list[int]  # of the output, without those that do not count
    stop_ids: list[int]  # tokens that end the row
    process: GrammarProcess
    slot: int = -1  # where its process leaves its masks; −1: the process does not know it yet
    num_sent: int = 0  # of the tokens: those that the process knows
    asked: int = -1  # length of the row at which a mask was last asked for, …
    filled: int = -1  # … and was last there
    drafts: list[int] = field(default_factory=list)  # tokens that the step verifies behind its last one
    ahead_slots: list[int] = field(default_factory=list)  # where its process leaves the masks behind …
    ahead_tokens: list[int] = field(default_factory=list)  # … these tokens
    num_ahead: int = 0  # of these masks: those that are there
    forced: list[int] = field(default_factory=list)  # tokens that the grammar forces behind `filled` ones
    forced_asked: int = -(10**9)  # length of the row at which a plan last wanted those
    num_unanswered: int = 0  # times that masks were asked for and the process has not answered
    is_ahead_asked: bool = False  # masks behind drafted tokens were asked for at this length, or may still be written
    late: int = -1  # … and was last late
    is_last: bool = False  # with the mask that is there: the token sampled now ends the row
    is_over: bool = False  # a token that ends it was sampled: later tokens do not count
    num_moves: int = 0
    failure: str = ""


def no_vocabulary() -> "Vocabulary":
    raise ConfigError("this engine has no vocabulary: grammars are not supported")


class RowProcesses:
    """A process computes the masks of all rows that have its grammar. One that ends fails the row that it worked for; its other rows move to
    a new process. Its users read what processes have answered (read) and give them commands (GrammarProcess.ask)."""

    def __init__(
        self,
        vocab_size: int,
        vocabulary: "Callable[[], Vocabulary]",
        num_threads: int,
        num_slots: int,
        limits: GrammarLimits,
    ) -> None:
        self._vocab_size = vocab_size
        self._load_vocabulary = vocabulary
        self._num_threads, self._num_slots, self._limits = num_threads, num_slots, limits
        self.rows: dict[int, GrammarRow] = {}  # rows with a grammar
        self._by_number: dict[int, GrammarRow] = {}
        self._next_number = 0
        self._free_slots = list(range(num_slots))
        self.free_ahead = list(range(num_slots, num_slots + _NUM_AHEAD))
        # Processes of grammars that were prepared, or that a row needs. Kept until prepare() is given them in `forgets`.
        self._by_grammar: dict[str, GrammarProcess] = {}
        self._forgotten: queue.SimpleQueue[GrammarProcess] = queue.SimpleQueue()  # ended; their slots are to be freed
        self._starting = threading.Lock()
        self._fork_server: ForkServer | None = None
        self._memory: MaskSlots | None = None  # since the first fork server
        # Threads that wait for processes. Two compile at a time, as many as the scheduler asks for: one that takes all the time it may
        # does not hold up the next. `_background` is for what the scheduler does not ask for.
        self._pool = ThreadPoolExecutor(2, "octavo-grammar")
        self._background = ThreadPoolExecutor(2, "octavo-grammar-background")

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        """Compile `grammar` (empty: none) in its own process and drop those in `forgets`. `done` is called in another thread, also
        on failure, with the bytes that the process takes."""
        job = self._pool.submit(self._prepare, grammar, forgets)
        job.add_done_callback(lambda future: done(0 if future.exception() else future.result()))

    def enter(
        self, row: int, params: SamplingParams, prompt_len: int, output_ids: Sequence[int], stop_ids: Sequence[int]
    ) -> None:
        """Set the row's new occupant, which has generated `output_ids` so far."""
        inside = sorted(i for i in {*stop_ids} if 0 <= i < self._vocab_size)
        process = self._process_of(params.grammar)
        self.rows[row] = own = GrammarRow(self._number(), params, prompt_len, list(output_ids), inside, process)
        self._by_number[own.number] = own

    def leave(self, row: int) -> None:
        own = self.rows.pop(row, None)
        if own is not None:
            self._detach(own)

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._background.shutdown(wait=False, cancel_futures=True)
        for process in self._by_grammar.values():
            process.close()
        with self._starting:
            if self._fork_server is not None:
                self._fork_server.close()
                self._fork_server = None
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    def free_forgotten(self) -> None:
        """Free the slots of processes that have been ended."""
        while not self._forgotten.empty():
            self._free_retired(self._forgotten.get())

    def take_ahead(self, row: GrammarRow) -> list[int]:
        """Slots for the masks behind its drafted tokens, as many as there are. None while the process may still write to those that it has."""
        if row.is_ahead_asked and row.num_unanswered:
            return []
        self.free_ahead += row.ahead_slots
        count = min(len(row.drafts), len(self.free_ahead))
        row.ahead_slots = [self.free_ahead.pop() for _ in range(count)]
        row.ahead_tokens, row.num_ahead, row.is_ahead_asked = row.drafts[:count], 0, count > 0
        return row.ahead_slots

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def takes_commands(self, row: GrammarRow) -> bool:
        """Whether the row's process is ready and knows the row. If the process has ended, the row fails or moves to another."""
        process = row.process
        if not process.started.is_set():
            return False
        if process.is_over:
            self._handle_end(row)
            return False
        if row.slot < 0:
            if not self._free_slots:
                self._read_retired()
            if not self._free_slots:
                return False
            row.slot = self._free_slots.pop()
            self.slots.mark(row.slot, False)
            params = row.params
            process.queue(
                Enter(
                    row.number,
                    row.slot,
                    row.stop_ids,
                    row.prompt_len,
                    params.min_tokens,
                    params.max_tokens or 0,
                    params.ignore_eos,
                    not params.stop_token_ids,
                )
            )
        return True

    def _handle_end(self, row: GrammarRow) -> None:
        """Its process has ended, because of this row or of another, or was killed."""
        process = row.process
        if not process.error:  # the reason is being found out
            return
        is_at_fault = not process.was_ready or (
            row.slot >= 0 and self.slots.is_busy(row.slot) and not process.was_killed
        )
        if is_at_fault or row.num_moves == _MOST_MOVES:
            row.failure = process.error
            return
        row.num_moves += 1
        self._start_again(row)

    def _start_again(self, row: GrammarRow) -> None:
        """Have a process take the row as a new one."""
        self._detach(row)
        row.number, row.process = self._number(), self._process_of(row.params.grammar)
        row.slot, row.num_sent, row.asked, row.filled = -1, 0, -1, -1
        row.ahead_slots, row.ahead_tokens, row.num_ahead = [], [], 0
        row.num_unanswered, row.is_ahead_asked = 0, False
        self._by_number[row.number] = row

    def rewind(self, row: GrammarRow, length: int) -> None:
        """Sample a position again that has its token, as a replay does where a mask was late in the recorded run."""
        del row.tokens[length - row.prompt_len :]
        row.is_over = False
        self._start_again(row)

    def _detach(self, row: GrammarRow) -> None:
        """Its process forgets the row. The slot is free once the process does not write to it any more."""
        del self._by_number[row.number]
        if row.slot < 0:
            return
        slots = [row.slot, *row.ahead_slots]
        if row.process.is_over:
            self._free(slots)
            return
        if row.num_unanswered:
            row.process.retired[row.number] = (slots, row.num_unanswered)
        else:
            self._free(slots)
        row.process.queue(Leave(row.number))
        row.process.send()

    def read(self, process: GrammarProcess) -> None:
        """Take in what a process has answered."""
        if not process.started.is_set() or process.is_over:
            return
        for asked, filled in process.results():
            for result in filled.rows or asked.rows:
                row = self._by_number.get(result.number)
                if row is None:
                    self._note_left(process, result.number)
                    continue
                row.num_unanswered -= 1
                row.filled = result.length
                if isinstance(result, FilledRow):
                    row.is_last, row.failure, row.num_ahead = result.is_last, result.failure, result.num_ahead
                    row.forced = result.forced
                else:
                    row.is_last, row.failure, row.num_ahead, row.forced = False, "", 0, []
        process.send()
        if process.is_over:
            self._note_ended(process)

    def _note_left(self, process: GrammarProcess, number: int) -> None:
        """A process has answered for a row that has left. After the last answer it writes no more to the row's slots."""
        slots, num_unanswered = process.retired.pop(number)
        if num_unanswered == 1:
            self._free(slots)
        else:
            process.retired[number] = (slots, num_unanswered - 1)

    def _read_retired(self) -> None:
        """Take in what processes have answered for rows that have left: a grammar without rows is not read otherwise."""
        for process in [*self._by_grammar.values()]:
            if process.retired:
                self.read(process)

    def check_time(self, row: GrammarRow) -> None:
        """Lower the priority of a process that takes long, and end one that does not answer at all. The kernel ends one that computes
        for too long; this is for one that gets no processor time."""
        process, limits = row.process, self._limits
        if not process.is_ready or not process.num_unanswered:
            return
        most = _STANDSTILL * limits.step_seconds + 0.05 * len(row.tokens)
        seconds = process.add_wait(most / 10)
        if seconds > _LONG_MASK:
            process.lower()
        if seconds > most and not process.is_slow:
            process.is_slow = True
            self._background.submit(process.end, self._server)  # the end of its socket is read later

    def _note_ended(self, process: GrammarProcess) -> None:
        """Find out why a process has ended, in another thread, and let its rows know."""
        self._free_retired(process)
        if self._by_grammar.get(process.grammar) is process:
            del self._by_grammar[process.grammar]
        self._background.submit(self._find_reason, process)

    def _free_retired(self, process: GrammarProcess) -> None:
        """It has ended, and writes to no slot any more."""
        for slots, _ in process.retired.values():
            self._free(slots)
        process.retired.clear()

    def _free(self, slots: list[int]) -> None:
        self._free_slots += [slot for slot in slots if slot < self._num_slots]
        self.free_ahead += [slot for slot in slots if slot >= self._num_slots]

    def _find_reason(self, process: GrammarProcess) -> None:
        process.end(self._server)
        error = f"the grammar cannot go on: {process.end_words}"
        if process.is_slow:
            limit = f"more than {self._limits.step_seconds:g} s of processor time for one token"
            error = f"the grammar takes too long: {limit} (--grammar-step-seconds)"
        process.fail(error)
        log.warning("a grammar of %d characters: %s", len(process.grammar), process.error)

    def _process_of(self, grammar: str) -> GrammarProcess:
        """The process that was prepared. If there is none, one is started, and rows are late until it is ready."""
        process, is_new = self._claim(grammar)
        if is_new:
            self._background.submit(process.compile, self._server, self._limits.compile_seconds)
        return process

    def _claim(self, grammar: str) -> tuple[GrammarProcess, bool]:
        """The grammar's process, and whether the caller is to start it."""
        new = GrammarProcess(grammar)
        process = self._by_grammar.setdefault(grammar, new)
        return process, process is new

    def _prepare(self, grammar: str, forgets: list[str]) -> int:
        for other in forgets:
            process = self._by_grammar.pop(other, None)
            if process is not None:  # it has no rows, but may still compute for one that has left
                process.end(self._server)
                process.close()
                self._forgotten.put(process)
        if not grammar:
            return 0
        process, is_new = self._claim(grammar)
        if is_new:
            process.compile(self._server, self._limits.compile_seconds)
        process.started.wait()
        if process.was_killed:  # by no fault of the grammar: the row that needs it starts another
            self._by_grammar.pop(grammar, None)
        return 0 if process.is_over else process.num_bytes

    # ── done once, takes a while ──

    def warm_later(self, seconds: float) -> None:
        """Read the vocabulary after `seconds`, so that neither the start nor the first grammar waits for it. Does not keep
        this object alive until then."""
        later = threading.Timer(seconds, _warm, [weakref.ref(self)])
        later.daemon = True
        later.start()

    def warm(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile: the threads take nothing more
            self._pool.submit(self._start_server)

    def _start_server(self) -> None:
        try:
            self._server()
        except OctavoError as error:
            log.info("requests with a grammar are refused: %s", error)

    def _server(self) -> ForkServer:
        """The fork server, started if there is none, or if it has ended. Raises OctavoError if there can be none."""
        with self._starting:
            if self._fork_server is not None and self._fork_server.has_ended:
                self._fork_server.close()
                self._fork_server = None
            if self._fork_server is None:
                vocabulary, limits = self._load_vocabulary(), self._limits
                begin = Begin(
                    [vocabulary.spell(token) for token in range(min(vocabulary.size, self._vocab_size))],
                    tuple(sorted(i for i in vocabulary.special_ids if i < self._vocab_size)),
                    vocabulary.eos_ids,
                    self._vocab_size,
                    self._num_slots + _NUM_AHEAD,
                    self._num_threads,
                    limits.compile_seconds,
                    limits.step_seconds,
                    limits.memory_bytes,
                )
                self._memory = self._memory or MaskSlots(self._vocab_size, self._num_slots + _NUM_AHEAD)
                self._fork_server = ForkServer(begin, self._memory.fd)
            return self._fork_server

    @property
    def slots(self) -> MaskSlots:
        assert self._memory is not None, "there is a process that was given it"
        return self._memory


def _warm(found: "weakref.ref[RowProcesses]") -> None:
    processes = found()
    if processes is not None:
        processes.warm()
