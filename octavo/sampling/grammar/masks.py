"""Grammar masks: the tokens that each row's grammar allows next, as bitmasks, and their application to logits.
Grammars were checked by text/grammar/build.py.

A row's mask follows only from its grammar and the tokens it has generated, so a row that was preempted, or resumed on another
engine, continues in the same state. Every rank knows the tokens and computes the masks itself: each grammar has a process of its own
(process.py), to which a step sends its tokens before or while the model computes the logits.

A step waits for masks, but not for long. A row whose mask is not there by then is late: the token sampled for it does not count,
and a later step samples the same position again, by when the mask may be there. Which rows were late is part of the step's result.
A grammar that takes too long for one mask is ended with its process, and its requests fail; no other notices."""

import logging
import queue
import select
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.errors import ConfigError, OctavoError
from octavo.messages import SamplingParams
from octavo.messages.plans import MIN_SAMPLES
from octavo.sampling.grammar.bitmask import WORD, Ints, Words
from octavo.sampling.grammar.mask_slots import MaskSlots
from octavo.sampling.grammar.processes import ForkServer, GrammarProcess
from octavo.sampling.grammar.protocol import Begin, Enter, Fill, FilledRow, Leave, RowToFill

if TYPE_CHECKING:
    from octavo.text.tokenize.vocabulary import Vocabulary

log = logging.getLogger("octavo.grammar")

_NUM_SLOTS = 64
_NUM_AHEAD = 2 * MIN_SAMPLES  # slots for masks behind drafted tokens
_LEAST_WAIT = 0.005  # seconds that any step waits for its masks; most are there earlier
_WAIT_SHARE = 0.1  # of the time: steps together wait for no longer than this, beyond the least
_WAIT_ALONE = 0.05  # seconds that a step waits if all of its rows are late already
_LONG_MASK = 0.25  # seconds without an answer after which a process has a low priority
_MOST_MOVES = 3  # processes that may end under a row, through no fault of its own
_ELSEWHERE = "on another rank, the grammar takes too long (--grammar-step-seconds), or its process has ended"
UNLIKELIEST = -1e30
"""The logit of a token that the grammar allows and a bias or ban excludes: sampled only if nothing else is left."""
IN_TIME, LATE, FAILED = range(3)  # a mask's state; where ranks differ, the highest counts

Agree = Callable[[list[int]], list[int]]
"""Takes a rank's states of masks, and returns the highest of all ranks for each."""


class Sampled(Protocol):
    """The sampled tokens [S] of a step that may still be running."""

    def is_done(self) -> bool: ...

    def counted(self) -> Container[int] | None:
        """Wait for the tokens, and return the indices of those that count; None: all do, as far as drafts go."""

    def tokens(self) -> Sequence[int]:
        """Wait for the tokens and return them."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may take on one rank. Seconds are of processor time, but for the last."""

    compile_seconds: float = 5.0
    step_seconds: float = 2.0  # for one token of a row
    memory_bytes: int = 2**30
    most_wait: float = 0.1  # that a step waits for masks


@dataclass(slots=True)
class Masks:
    """The masks of a step's rows that have a grammar."""

    at: Ints  # [G] indices of the step's samples
    copies: Words | None  # [G, ceil(V / 32)]; None: they are in `slots`, until masks are asked for again
    failures: dict[int, str]  # sample → why its grammar cannot continue; its mask allows every token
    seconds: float = 0.0  # that the step spent on them, without the wait for the previous step's tokens
    # Samples that end their rows, at or shortly before max_tokens.
    last: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)  # samples that do not count; their masks allow every token
    slots: tuple[MaskSlots, list[int]] | None = None

    @property
    def bits(self) -> Words:
        """[G, ceil(V / 32)]: bit i % 32 of word i // 32: token i is allowed."""
        if self.copies is None:
            assert self.slots is not None, "they are in one of both"
            memory, slots = self.slots
            self.copies = memory.copies(slots)
        return self.copies

    @property
    def num_words(self) -> int:
        """Of each mask."""
        if self.copies is None and self.slots is not None:
            return self.slots[0].mask_bytes // 4
        return len(self.bits[0])

    def addresses(self) -> Ints:
        """[G] where each mask begins. They hold until masks are asked for again."""
        if self.copies is None and self.slots is not None:
            memory, slots = self.slots
            return memory.addresses(slots)
        bits = self.bits
        assert bits.flags.c_contiguous and len(bits) == len(self.at)
        return bits.ctypes.data + np.arange(len(bits), dtype=np.int64) * bits.strides[0]


@dataclass(slots=True)
class _Row:
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
    num_unanswered: int = 0  # times that masks were asked for and the process has not answered
    is_ahead_asked: bool = False  # masks behind drafted tokens were asked for at this length, or may still be written
    late: int = -1  # … and was last late
    is_last: bool = False  # with the mask that is there: the token sampled now ends the row
    is_over: bool = False  # a token that ends it was sampled: later tokens do not count
    num_moves: int = 0
    failure: str = ""


@dataclass(slots=True)
class _Latest:
    """The previous step. Its tokens are read when a mask needs them."""

    rows: list[int]
    step: Sampled
    late: list[int]


@dataclass(slots=True)
class _Step:
    """The step being launched."""

    own: list[tuple[int, _Row, int]]  # sample, its row, the row's length
    # Sample behind a drafted token, its row, the length that the row has in `own`, and the place of that token in the draft.
    ahead: list[tuple[int, _Row, int, int]]
    num_others: int  # samples without a grammar
    seconds: float = 0.0  # that it has spent on masks
    # Rows of its samples, and the command with which all of its masks were asked for, if that was known before the step was planned.
    rows: list[int] = field(default_factory=list)
    asked: Fill | None = None
    process: GrammarProcess | None = None  # that was given this command

    def has(self, rows: list[int], lengths: list[int]) -> bool:
        return self.rows == rows and all(lengths[at] == length for at, _, length in self.own)


def no_vocabulary() -> "Vocabulary":
    raise ConfigError("this engine has no vocabulary: grammars are not supported")


class Grammars:
    """The grammars of one rank's rows. Call enter() and leave() as rows change, masks() in each step that samples, once its
    logits are queued, and started() for every step."""

    def __init__(
        self,
        vocab_size: int,
        vocabulary: "Callable[[], Vocabulary]",
        num_threads: int,
        num_slots: int = _NUM_SLOTS,
        limits: GrammarLimits | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`num_threads`: that one grammar may use for the masks of a step. `num_slots`: twice the rows. `agree`: None: there is one
        rank."""
        self._vocab_size = vocab_size
        self._load_vocabulary = vocabulary
        self._num_threads, self._num_slots = num_threads, num_slots
        self._limits = limits or GrammarLimits()
        self._agree = agree
        self.rows: dict[int, _Row] = {}  # rows with a grammar
        self._by_number: dict[int, _Row] = {}
        self._next_number = 0
        self._free_slots = list(range(num_slots))
        self._free_ahead = list(range(num_slots, num_slots + _NUM_AHEAD))
        self.drafts: dict[int, list[int]] = {}  # row → tokens that the step being launched verifies
        self._sampling: list[int] | None = None  # rows of the step being launched
        self._late: list[int] = []  # of its samples
        self._latest: _Latest | None = None
        self._begun: _Step | None = None
        self._expected: _Step | None = None  # that follows the previous one, if each row samples its next token
        self._early_seconds = 0.0  # spent on the masks of the step that is not planned yet
        self._credit, self._credit_at = self._limits.most_wait, time.monotonic()
        # Processes of grammars that were prepared, or that a row needs. Kept until prepare() is given them in `forgets`.
        self._processes: dict[str, GrammarProcess] = {}
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
        self.leave(row)
        inside = sorted(i for i in {*stop_ids} if 0 <= i < self._vocab_size)
        process = self._process_of(params.grammar)
        self.rows[row] = own = _Row(self._number(), params, prompt_len, list(output_ids), inside, process)
        self._by_number[own.number] = own

    def leave(self, row: int) -> None:
        self._expected = None
        own = self.rows.pop(row, None)
        if own is not None:
            self._detach(own)
        if self._latest is not None:
            # The previous step's token of this row, with a grammar or without, does not belong to its next occupant.
            self._latest.rows = [-1 if other == row else other for other in self._latest.rows]

    def started(self, step: Sampled) -> None:
        if self._sampling is not None:
            self._latest, self._sampling = _Latest(self._sampling, step, self._late), None
            if self.rows and step.is_done():
                self._ask_early(self._latest.rows)
        elif self._latest is not None:  # this step used no masks; read the tokens now, before their buffer is reused
            self._take_in()

    def begin(self, rows: Ints, lens: Ints) -> None:
        """Ask for what masks() will return, so that it is computed beside the forward pass."""
        if self.rows and len(rows):
            self._begun = self._begin_step(rows, lens)

    def begin_drafts(self, rows: Sequence[int], lens: Sequence[int]) -> None:
        """A draft model is about to propose tokens for rows that hold `lens` tokens: ask for the masks of their next ones, which were most
        likely asked for already."""
        if self.rows.keys().isdisjoint(rows):
            return
        self._take_in()
        own = [(-1, self.rows[row], length) for row, length in zip(rows, lens, strict=True) if row in self.rows]
        for process in {row.process for _, row, _ in own}:
            self._read(process)
        for _, row, _ in own:
            row.drafts = []
        self._ask_for_masks(own)

    def add_drafts(self, tokens: dict[int, int]) -> None:
        """A draft model has proposed one more token for each of these rows, by the mask that draft_masks() gave it. Ask for the masks behind
        it, so that they are computed beside the next pass."""
        asked: defaultdict[GrammarProcess, list[RowToFill]] = defaultdict(list)
        for index, token in tokens.items():
            row = self.rows.get(index)
            if row is None:
                continue
            row.drafts.append(token)
            if row.num_unanswered or row.slot < 0 or row.process.is_over:  # its process may still write to the slots
                continue
            num_there = len(row.drafts) - 1
            if not num_there:
                self._free_ahead += row.ahead_slots
                row.ahead_slots, row.num_ahead = [], 0
            if not self._free_ahead:
                continue
            row.ahead_slots.append(self._free_ahead.pop())
            row.ahead_tokens, row.is_ahead_asked, row.num_unanswered = row.drafts[:], True, 1
            asked[row.process].append(
                RowToFill(row.number, [], row.asked, row.ahead_tokens, row.ahead_slots[:], num_there)
            )
        for process, rows in asked.items():
            process.ask(Fill(rows))

    def draft_masks(self, rows: Ints, lens: Ints) -> Masks | None:
        """The masks for the next token of drafts. `lens`: tokens of rows [S] with those that were drafted. None: none of them has a grammar. A
        draft with a late mask should end: it would be verified with a late one, too."""
        if not self.rows:
            return None
        found = [
            (at, self.rows[row], length - len(self.rows[row].drafts))
            for at, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True))
            if row in self.rows
        ]
        if not found:
            return None
        # Behind a drafted token for which there was no slot no mask was asked for, and none comes.
        coming = [row for _, row, _ in found if not row.drafts or row.num_unanswered]
        self._await(_Step(found, [], 0), coming, time.monotonic() + _LEAST_WAIT)
        bits = np.full((len(found), -(-self._vocab_size // WORD)), -1, dtype=np.int32)
        masks = Masks(np.array([at for at, *_ in found], dtype=np.int64), bits, {})
        for number, (at, row, length) in enumerate(found):
            place = len(row.drafts) - 1
            if place < 0 and self._has_mask(row, length):
                bits[number] = self._slots.mask(row.slot)
            elif place >= 0 and self._state_ahead(row, length, place) == IN_TIME:
                bits[number] = self._slots.mask(row.ahead_slots[place])
            else:
                masks.late.append(at)
        return masks

    @staticmethod
    def _has_mask(row: _Row, length: int) -> bool:
        return row.filled == length and not (row.num_unanswered or row.is_over or row.failure)

    def masks(self, rows: Ints, lens: Ints) -> Masks | None:
        """The masks of the rows [S] that sample next and hold `lens` tokens. None: none of them has a grammar. Waits for the
        previous step."""
        if not self.rows:
            return None
        step, self._begun = self._begun or self._begin_step(rows, lens), None
        self._late = []
        if not step.own:
            return None
        started = time.monotonic()
        if step.process is not None:
            self._read(step.process)
        if not self._is_plain(step):
            self._wait(step)
        step.seconds += time.monotonic() - started
        if self._agree is None and self._is_plain(step):
            places = np.array([at for at, *_ in step.own], dtype=np.int64)
            return Masks(places, None, {}, step.seconds, slots=(self._slots, [row.slot for _, row, _ in step.own]))
        states = [self._state(row, length) for _, row, length in step.own]
        states += [self._state_ahead(row, length, place) for _, row, length, place in step.ahead]
        if self._agree is not None:
            states = self._agree(states)
        masks = self._masks(step, states)
        self._late = masks.late
        return masks

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._background.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.values():
            process.close()
        with self._starting:
            if self._fork_server is not None:
                self._fork_server.close()
                self._fork_server = None
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    # ── a step ──

    def _take_in(self) -> None:
        latest, self._latest = self._latest, None
        if latest is None or self.rows.keys().isdisjoint(latest.rows):
            return
        counted = latest.step.counted()
        for at, (row, token) in enumerate(zip(latest.rows, latest.step.tokens(), strict=True)):
            own = self.rows.get(row)
            if counted is not None and at not in counted:
                continue
            if own is not None and not own.is_over and at not in latest.late:
                own.is_over = token in own.stop_ids
                own.tokens.append(token)

    def _ask_early(self, rows: list[int]) -> None:
        """Ask for the next masks of rows that have just sampled, so that they are computed while the next step is planned. Which tokens are
        drafted is not known yet."""
        started = time.monotonic()
        self._take_in()
        own: list[tuple[int, _Row, int]] = []
        num_known = 0
        for at, index in enumerate(rows):
            row = self.rows.get(index)
            if row is None or (own and own[-1][1] is row):  # a row's samples are next to each other
                continue
            num_known += 1
            if not row.is_last and len(row.tokens) != row.params.max_tokens:
                row.drafts = []
                own.append((at, row, row.prompt_len + len(row.tokens)))
        asked = self._ask_for_masks(own)
        if len(asked) == 1:
            ((process, command),) = asked.items()
            if len(command.rows) == num_known and len({*rows}) == len(rows):
                self._expected = _Step(own, [], len(rows) - num_known, 0.0, rows, command, process)
        self._early_seconds = time.monotonic() - started

    def _begin_step(self, rows: Ints, lens: Ints) -> _Step:
        self._take_in()
        while not self._forgotten.empty():
            self._free_retired(self._forgotten.get())
        self._sampling = rows.tolist()
        started, lengths = time.monotonic(), lens.tolist()
        expected, self._expected = self._expected, None
        if expected is not None and not self.drafts and expected.has(self._sampling, lengths):
            expected.seconds, self._early_seconds = self._early_seconds + time.monotonic() - started, 0.0
            return expected
        own: list[tuple[int, _Row, int]] = []
        ahead: list[tuple[int, _Row, int, int]] = []
        for at, row in enumerate(self._sampling):
            if (found := self.rows.get(row)) is None:
                continue
            if (
                own and own[-1][1] is found
            ):  # a row's samples are next to each other, the first is behind its own last token
                ahead.append((at, found, own[-1][2], at - own[-1][0] - 1))
            else:
                found.drafts = self.drafts.get(row, [])
                own.append((at, found, lengths[at]))
        step = _Step(own, ahead, len(lengths) - len(own) - len(ahead))
        for process in {row.process for _, row, _ in own}:
            self._read(process)  # what was late may be there by now
        self._ask_for_masks(step.own)
        step.seconds, self._early_seconds = self._early_seconds + time.monotonic() - started, 0.0
        return step

    def _ask_for_masks(self, own: list[tuple[int, _Row, int]]) -> dict[GrammarProcess, Fill]:
        """Ask for the masks that were not asked for yet, of rows whose processes take commands. → the commands."""
        asked: defaultdict[GrammarProcess, list[RowToFill]] = defaultdict(list)
        for _, row, length in own:
            if row.filled == row.asked == length - 1 and self._goes_on(row):  # the usual case
                row.num_sent, row.asked, row.num_unanswered, row.is_ahead_asked = row.num_sent + 1, length, 1, False
                asked[row.process].append(RowToFill(row.number, row.tokens[-1:], length))
                continue
            if length < row.prompt_len + len(row.tokens):
                self._rewind(row, length)
            is_asked = row.asked == length and not row.process.is_over
            if is_asked and (row.is_ahead_asked or not row.drafts or row.is_over or row.failure):
                continue
            if not is_asked and (self._is_settled(row, length) or not self._takes_commands(row)):
                continue
            new_tokens = row.tokens[row.num_sent :]
            row.num_sent, row.asked = len(row.tokens), length
            slots = self._take_ahead(row)
            if is_asked and not slots:  # there is nothing to ask for; to ask again and again would only take time
                row.is_ahead_asked = True
                continue
            row.num_unanswered += 1
            asked[row.process].append(RowToFill(row.number, new_tokens, length, row.drafts[: len(slots)], slots))
        commands = {process: Fill(rows) for process, rows in asked.items()}
        for process, command in commands.items():
            process.ask(command)
        return commands

    @staticmethod
    def _goes_on(row: _Row) -> bool:
        """Whether nothing is to be known of a row, whose mask was there, but its next token."""
        return (
            row.num_sent == len(row.tokens) - 1
            and not (row.num_unanswered or row.drafts or row.ahead_slots or row.is_over or row.failure)
            and not row.process.is_over
        )

    def _take_ahead(self, row: _Row) -> list[int]:
        """Slots for the masks behind its drafted tokens, as many as there are. None while the process may still write to those that it has."""
        if row.is_ahead_asked and row.num_unanswered:
            return []
        self._free_ahead += row.ahead_slots
        count = min(len(row.drafts), len(self._free_ahead))
        row.ahead_slots = [self._free_ahead.pop() for _ in range(count)]
        row.ahead_tokens, row.num_ahead, row.is_ahead_asked = row.drafts[:count], 0, count > 0
        return row.ahead_slots

    def _is_settled(self, row: _Row, length: int) -> bool:
        """Whether there is no mask to wait for: it is there, or none will be used."""
        is_void = length > row.prompt_len + len(row.tokens)  # the token before was late
        is_there = row.filled == length and not row.num_unanswered
        return is_there or row.is_over or is_void or bool(row.failure)

    @staticmethod
    def _is_plain(step: _Step) -> bool:
        """Whether every mask of the step is there, as its process has said of all together."""
        return step.process is not None and step.process.plainly_filled is step.asked

    def _wait(self, step: _Step) -> None:
        """Wait for masks that are asked for the first time, as long as a step may; for others only if there is nothing else."""
        pending = [(row, length) for _, row, length in step.own if not self._is_settled(row, length)]
        if not pending:
            return
        new = [row for row, length in pending if row.late != length]
        now = time.monotonic()
        most, wait = self._limits.most_wait, _WAIT_ALONE
        self._credit = min(most, self._credit + _WAIT_SHARE * (now - self._credit_at))
        self._credit_at = now
        if new:
            wait = max(_LEAST_WAIT, self._credit)
        elif step.num_others or any(row.filled == length or row.failure for _, row, length in step.own):
            wait = 0.0
        self._await(step, new or [row for row, _ in pending], now + wait)
        if new:
            self._credit -= max(0.0, time.monotonic() - now - _LEAST_WAIT)

    def _await(self, step: _Step, rows: list[_Row], deadline: float) -> None:
        lengths = {row.number: length for _, row, length in step.own}
        while rows := [row for row in rows if not self._is_settled(row, lengths.get(row.number, -1))]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            starting = [row.process for row in rows if not row.process.started.is_set()]
            asked = {row.process for row in rows if row.process.is_ready and row.process.num_unanswered}
            if starting:
                starting[0].started.wait(min(left, 0.01) if asked else left)
            elif asked:
                self._poll(asked, left)
            else:  # a process has ended, and the reason is being found out; or there is no slot
                time.sleep(min(left, 0.001))
            for process in asked:
                self._read(process)
            self._ask_for_masks(step.own)
            lengths = {row.number: length for _, row, length in step.own}

    def _poll(self, processes: Iterable[GrammarProcess], seconds: float) -> None:
        poller = select.poll()
        for process in processes:
            process.send()
            poller.register(process, select.POLLIN | (select.POLLOUT if process.has_unsent else 0))
        poller.poll(1000 * seconds)

    def _state(self, row: _Row, length: int) -> int:
        if row.failure:
            return FAILED
        if row.is_over or row.filled == length:
            return IN_TIME
        if length == row.prompt_len + len(row.tokens):
            row.late = length
            self._check_time(row)
        return LATE

    def _state_ahead(self, row: _Row, length: int, place: int) -> int:
        is_there = (
            place < row.num_ahead
            and row.filled == length
            and not (row.is_over or row.failure)
            and row.ahead_tokens[: place + 1] == row.drafts[: place + 1]
        )
        return IN_TIME if is_there else LATE

    def _masks(self, step: _Step, states: list[int]) -> Masks:
        samples = [at for at, *_ in (*step.own, *step.ahead)]
        at = np.array(samples, dtype=np.int64)
        if not any(states) and not step.ahead and not any(row.is_over for _, row, _ in step.own):  # the usual case
            bits = self._slots.copies([row.slot for _, row, _ in step.own])
            last = [number for number, row, _ in step.own if row.is_last]
            return Masks(at, bits, {}, step.seconds, last)
        bits = np.full((len(samples), -(-self._vocab_size // WORD)), -1, dtype=np.int32)
        masks = Masks(at, bits, {})
        num_own = len(step.own)
        for number, ((sample, row, _, place), state) in enumerate(
            zip(step.ahead, states[num_own:], strict=True), num_own
        ):
            if state == IN_TIME:
                bits[number] = self._slots.mask(row.ahead_slots[place])
            else:
                masks.late.append(sample)
        for number, ((sample, row, length), state) in enumerate(zip(step.own, states[:num_own], strict=True)):
            if state == FAILED:
                masks.failures[sample] = row.failure or _ELSEWHERE
            elif state == LATE:
                masks.late.append(sample)
            elif row.filled == length and not row.is_over:
                bits[number] = self._slots.mask(row.slot)
                if row.is_last:
                    masks.last.append(sample)
        masks.seconds = step.seconds
        return masks

    # ── rows and their processes ──

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _takes_commands(self, row: _Row) -> bool:
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
            self._slots.mark(row.slot, False)
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

    def _handle_end(self, row: _Row) -> None:
        """Its process has ended, because of this row or of another, or was killed."""
        process = row.process
        if not process.error:  # the reason is being found out
            return
        is_at_fault = not process.was_ready or (
            row.slot >= 0 and self._slots.is_busy(row.slot) and not process.was_killed
        )
        if is_at_fault or row.num_moves == _MOST_MOVES:
            row.failure = process.error
            return
        row.num_moves += 1
        self._start_again(row)

    def _start_again(self, row: _Row) -> None:
        """Have a process take the row as a new one."""
        self._detach(row)
        row.number, row.process = self._number(), self._process_of(row.params.grammar)
        row.slot, row.num_sent, row.asked, row.filled = -1, 0, -1, -1
        row.ahead_slots, row.ahead_tokens, row.num_ahead = [], [], 0
        row.num_unanswered, row.is_ahead_asked = 0, False
        self._by_number[row.number] = row

    def _rewind(self, row: _Row, length: int) -> None:
        """Sample a position again that has its token, as a replay does where a mask was late in the recorded run."""
        del row.tokens[length - row.prompt_len :]
        row.is_over = False
        self._start_again(row)

    def _detach(self, row: _Row) -> None:
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

    def _read(self, process: GrammarProcess) -> None:
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
                else:
                    row.is_last, row.failure, row.num_ahead = False, "", 0
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
        for process in [*self._processes.values()]:
            if process.retired:
                self._read(process)

    def _check_time(self, row: _Row) -> None:
        """Lower the priority of a process that takes long, and end one that does not answer at all. The kernel ends one that computes
        for too long; this is for one that gets no processor time."""
        process, limits = row.process, self._limits
        if not process.is_ready or not process.num_unanswered:
            return
        most = 30 * limits.step_seconds + 0.05 * len(row.tokens)
        seconds = process.look(most / 10)
        if seconds > _LONG_MASK:
            process.lower()
        if seconds > most and not process.is_slow:
            process.is_slow = True
            self._background.submit(process.end, self._server)  # the end of its socket is read later

    def _note_ended(self, process: GrammarProcess) -> None:
        """Find out why a process has ended, in another thread, and let its rows know."""
        self._free_retired(process)
        if self._processes.get(process.grammar) is process:
            del self._processes[process.grammar]
        self._background.submit(self._find_reason, process)

    def _free_retired(self, process: GrammarProcess) -> None:
        """It has ended, and writes to no slot any more."""
        for slots, _ in process.retired.values():
            self._free(slots)
        process.retired.clear()

    def _free(self, slots: list[int]) -> None:
        self._free_slots += [slot for slot in slots if slot < self._num_slots]
        self._free_ahead += [slot for slot in slots if slot >= self._num_slots]

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
        process = self._processes.setdefault(grammar, new)
        return process, process is new

    def _prepare(self, grammar: str, forgets: list[str]) -> int:
        for other in forgets:
            process = self._processes.pop(other, None)
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
            self._processes.pop(grammar, None)
        return 0 if process.is_over else process.num_bytes

    # ── done once, takes a while ──

    def warm_later(self, seconds: float) -> None:
        """Read the vocabulary after `seconds`, so that neither the start nor the first grammar waits for it. Does not keep
        this object alive until then."""
        later = threading.Timer(seconds, _warm, [weakref.ref(self)])
        later.daemon = True
        later.start()

    def warm(self) -> None:
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
    def _slots(self) -> MaskSlots:
        assert self._memory is not None, "there is a process that was given it"
        return self._memory


def _warm(grammars: "weakref.ref[Grammars]") -> None:
    found = grammars()
    if found is not None:
        found.warm()


def apply(logits: torch.Tensor, masks: Masks) -> None:
    """Apply masks to logits [S, V] in place, in torch. A banned token gets -inf, an allowed one never does."""
    words = torch.from_numpy(masks.bits).to(logits.device)
    places = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    for number, at in enumerate(masks.at.tolist()):
        allowed = (words[number, :, None] >> places & 1).bool().view(-1)[: logits.shape[1]]
        row = logits[at].nan_to_num_(nan=UNLIKELIEST, posinf=torch.finfo(logits.dtype).max, neginf=UNLIKELIEST)
        row.clamp_(min=UNLIKELIEST).masked_fill_(~allowed, -torch.inf)
