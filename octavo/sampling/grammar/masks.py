"""Grammar masks: the tokens that each row's grammar allows next, as bitmasks, and their application to logits.
Grammars were checked by text/grammar/build.py.

A row's mask follows only from its grammar and the tokens it has generated, so a row that was preempted, or resumed on another
engine, continues in the same state. Every rank knows the tokens and computes the masks itself: each grammar has a process of its own
(process.py), to which a step sends its tokens before or while the model computes the logits.

A step waits for masks, but not for long. A row whose mask is not there by then is late: the token sampled for it does not count,
and a later step samples the same position again, by when the mask may be there. Which rows were late is part of the step's result.
A grammar that takes too long for one mask is ended with its process, and its requests fail; no other notices."""

import select
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.messages import SamplingParams
from octavo.sampling.grammar.bitmask import WORD, Ints, Words
from octavo.sampling.grammar.mask_slots import MaskSlots
from octavo.sampling.grammar.processes import GrammarProcess
from octavo.sampling.grammar.protocol import Fill, RowToFill
from octavo.sampling.grammar.row_processes import NUM_SLOTS, GrammarLimits, GrammarRow, RowProcesses

if TYPE_CHECKING:
    from octavo.text.tokenize.vocabulary import Vocabulary

_LEAST_WAIT = 0.005  # seconds that any step waits for its masks; most are there earlier
_FORCED_WAIT = 0.001  # seconds that a step waits for what a grammar forces, before it is computed
_ASKED_LATELY = (
    16  # tokens since a plan wanted what a row's grammar forces; more than the pauses between such questions
)
_WAIT_SHARE = 0.1  # of the time: steps together wait for no longer than this, beyond the least
_WAIT_ALONE = 0.05  # seconds that a step waits if all of its rows are late already
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
class _Latest:
    """The previous step. Its tokens are read when a mask needs them."""

    rows: list[int]
    step: Sampled
    late: list[int]


@dataclass(slots=True)
class _Step:
    """The step being launched."""

    own: list[tuple[int, GrammarRow, int]]  # sample, its row, the row's length
    # Sample behind a drafted token, its row, the length that the row has in `own`, and the place of that token in the draft.
    ahead: list[tuple[int, GrammarRow, int, int]]
    num_others: int  # samples without a grammar
    seconds: float = 0.0  # that it has spent on masks
    # Rows of its samples, and the command with which all of its masks were asked for, if that was known before the step was planned.
    rows: list[int] = field(default_factory=list)
    asked: Fill | None = None
    process: GrammarProcess | None = None  # that was given this command

    def has(self, rows: list[int], lengths: list[int]) -> bool:
        return self.rows == rows and all(lengths[at] == length for at, _, length in self.own)


class Grammars:
    """The grammars of one rank's rows. Call enter() and leave() as rows change, masks() in each step that samples, once its
    logits are queued, and started() for every step."""

    def __init__(
        self,
        vocab_size: int,
        vocabulary: "Callable[[], Vocabulary]",
        num_threads: int,
        num_slots: int = NUM_SLOTS,
        limits: GrammarLimits | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`num_threads`: that one grammar may use for the masks of a step. `num_slots`: twice the rows. `agree`: None: there is one
        rank."""
        self._vocab_size = vocab_size
        self._limits = limits or GrammarLimits()
        self._agree = agree
        self._processes = RowProcesses(vocab_size, vocabulary, num_threads, num_slots, self._limits)
        self.rows = self._processes.rows  # rows with a grammar
        self.drafts: dict[int, list[int]] = {}  # row → tokens that the step being launched verifies
        self._sampling: list[int] | None = None  # rows of the step being launched
        self._late: list[int] = []  # of its samples
        self._latest: _Latest | None = None
        self._begun: _Step | None = None
        self._expected: _Step | None = None  # that follows the previous one, if each row samples its next token
        self._early_seconds = 0.0  # spent on the masks of the step that is not planned yet
        self._credit, self._credit_at = self._limits.most_wait, time.monotonic()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        """Compile `grammar` (empty: none) in its own process and drop those in `forgets`. `done` is called in another thread, also
        on failure, with the bytes that the process takes."""
        self._processes.prepare(grammar, forgets, done)

    def enter(
        self, row: int, params: SamplingParams, prompt_len: int, output_ids: Sequence[int], stop_ids: Sequence[int]
    ) -> None:
        """Set the row's new occupant, which has generated `output_ids` so far."""
        self.leave(row)
        self._processes.enter(row, params, prompt_len, output_ids, stop_ids)

    def leave(self, row: int) -> None:
        self._expected = None
        self._processes.leave(row)
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
            self._processes.read(process)
        for _, row, _ in own:
            row.drafts = []
        self._ask_for_masks(own)

    def forced(self, rows: Sequence[int], lens: Sequence[int]) -> list[list[int]]:
        """For each of these rows, which hold `lens` tokens: those that its grammar forces next; none if it leaves a choice, or if its mask does
        not come within a moment."""
        self.begin_drafts(rows, lens)
        found = [(-1, self.rows[row], length) for row, length in zip(rows, lens, strict=True) if row in self.rows]
        self._await(_Step(found, [], 0), [row for _, row, _ in found], time.monotonic() + _FORCED_WAIT)
        drafts: list[list[int]] = []
        for _, row, length in found:
            row.forced_asked = length
            drafts.append(row.forced if self._draft_state(row, length) == IN_TIME else [])
        if self._agree is not None and drafts:
            drafts = self._agreed(drafts, self._agree)
        forced = {row.number: draft for (_, row, _), draft in zip(found, drafts, strict=True)}
        return [forced[self.rows[row].number] if row in self.rows else [] for row in rows]

    def _agreed(self, drafts: list[list[int]], agree: Agree) -> list[list[int]]:
        """As much of these drafts as all ranks have: the processes of each look for what is forced in their own time."""
        most = self._limits.num_forced
        own = [token for draft in drafts for token in (*draft[:most], *[-1] * (most - len(draft)))]
        highest = agree([*own, *(-token for token in own)])
        lowest = [-token for token in highest[len(own) :]]
        same = [token if token == least else -1 for token, least in zip(highest, lowest, strict=False)]
        parts = [same[at : at + most] for at in range(0, len(same), most)]
        return [part[: part.index(-1)] if -1 in part else part for part in parts]

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
                self._processes.free_ahead += row.ahead_slots
                row.ahead_slots, row.num_ahead = [], 0
            if not self._processes.free_ahead:
                continue
            row.ahead_slots.append(self._processes.free_ahead.pop())
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
        states = [self._draft_state(row, length) for _, row, length in found]
        if self._agree is not None:  # a draft ends on all ranks, or on none
            states = self._agree(states)
        bits = np.full((len(found), -(-self._vocab_size // WORD)), -1, dtype=np.int32)
        masks = Masks(np.array([at for at, *_ in found], dtype=np.int64), bits, {})
        for number, ((at, row, _), state) in enumerate(zip(found, states, strict=True)):
            if state == IN_TIME:
                slot = row.ahead_slots[len(row.drafts) - 1] if row.drafts else row.slot
                bits[number] = self._processes.slots.mask(slot)
            else:
                masks.late.append(at)
        return masks

    def _draft_state(self, row: GrammarRow, length: int) -> int:
        """Of the mask for the token behind those that were drafted. `length`: of the row, without them."""
        if row.drafts:
            return self._state_ahead(row, length, len(row.drafts) - 1)
        is_there = row.filled == length and not (row.num_unanswered or row.is_over or row.failure)
        return IN_TIME if is_there else LATE

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
            self._processes.read(step.process)
        if not self._is_plain(step):
            self._wait(step)
        step.seconds += time.monotonic() - started
        if self._agree is None and self._is_plain(step):
            places = np.array([at for at, *_ in step.own], dtype=np.int64)
            return Masks(
                places, None, {}, step.seconds, slots=(self._processes.slots, [row.slot for _, row, _ in step.own])
            )
        states = [self._state(row, length) for _, row, length in step.own]
        states += [self._state_ahead(row, length, place) for _, row, length, place in step.ahead]
        if self._agree is not None:
            states = self._agree(states)
        masks = self._masks(step, states)
        self._late = masks.late
        return masks

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    def warm_later(self, seconds: float) -> None:
        """Read the vocabulary after `seconds`, so that neither the start nor the first grammar waits for it."""
        self._processes.warm_later(seconds)

    def warm(self) -> None:
        self._processes.warm()

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
        own: list[tuple[int, GrammarRow, int]] = []
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
        self._processes.free_forgotten()
        self._sampling = rows.tolist()
        started, lengths = time.monotonic(), lens.tolist()
        expected, self._expected = self._expected, None
        if expected is not None and not self.drafts and expected.has(self._sampling, lengths):
            expected.seconds, self._early_seconds = self._early_seconds + time.monotonic() - started, 0.0
            return expected
        own: list[tuple[int, GrammarRow, int]] = []
        ahead: list[tuple[int, GrammarRow, int, int]] = []
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
            self._processes.read(process)  # what was late may be there by now
        self._ask_for_masks(step.own)
        step.seconds, self._early_seconds = self._early_seconds + time.monotonic() - started, 0.0
        return step

    def _ask_for_masks(self, own: list[tuple[int, GrammarRow, int]]) -> dict[GrammarProcess, Fill]:
        """Ask for the masks that were not asked for yet, of rows whose processes take commands. → the commands."""
        asked: defaultdict[GrammarProcess, list[RowToFill]] = defaultdict(list)
        for _, row, length in own:
            if row.filled == row.asked == length - 1 and self._goes_on(row):  # the usual case
                row.num_sent, row.asked, row.num_unanswered, row.is_ahead_asked = row.num_sent + 1, length, 1, False
                num_forced = self._num_forced(row, length)
                asked[row.process].append(RowToFill(row.number, row.tokens[-1:], length, num_forced=num_forced))
                continue
            if length < row.prompt_len + len(row.tokens):
                self._processes.rewind(row, length)
            is_asked = row.asked == length and not row.process.is_over
            if is_asked and (row.is_ahead_asked or not row.drafts or row.is_over or row.failure):
                continue
            if not is_asked and (self._is_settled(row, length) or not self._processes.takes_commands(row)):
                continue
            new_tokens = row.tokens[row.num_sent :]
            row.num_sent, row.asked = len(row.tokens), length
            slots = self._processes.take_ahead(row)
            if is_asked and not slots:  # there is nothing to ask for; to ask again and again would only take time
                row.is_ahead_asked = True
                continue
            row.num_unanswered += 1
            num_forced = 0 if slots else self._num_forced(row, length)
            drafts = row.drafts[: len(slots)]
            asked[row.process].append(RowToFill(row.number, new_tokens, length, drafts, slots, num_forced=num_forced))
        commands = {process: Fill(rows) for process, rows in asked.items()}
        for process, command in commands.items():
            process.ask(command)
        return commands

    def _num_forced(self, row: GrammarRow, length: int) -> int:
        """Tokens of a forced stretch to ask for with a mask: none where no plan has wanted one lately."""
        return self._limits.num_forced if length - row.forced_asked <= _ASKED_LATELY else 0

    @staticmethod
    def _goes_on(row: GrammarRow) -> bool:
        """Whether nothing is to be known of a row, whose mask was there, but its next token."""
        return (
            row.num_sent == len(row.tokens) - 1
            and not (row.num_unanswered or row.drafts or row.ahead_slots or row.is_over or row.failure)
            and not row.process.is_over
        )

    def _is_settled(self, row: GrammarRow, length: int) -> bool:
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

    def _await(self, step: _Step, rows: list[GrammarRow], deadline: float) -> None:
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
                self._processes.read(process)
            self._ask_for_masks(step.own)
            lengths = {row.number: length for _, row, length in step.own}

    def _poll(self, processes: Iterable[GrammarProcess], seconds: float) -> None:
        poller = select.poll()
        for process in processes:
            process.send()
            poller.register(process, select.POLLIN | (select.POLLOUT if process.has_unsent else 0))
        poller.poll(1000 * seconds)

    def _state(self, row: GrammarRow, length: int) -> int:
        if row.failure:
            return FAILED
        if row.is_over or row.filled == length:
            return IN_TIME
        if length == row.prompt_len + len(row.tokens):
            row.late = length
            self._processes.check_time(row)
        return LATE

    def _state_ahead(self, row: GrammarRow, length: int, place: int) -> int:
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
            bits = self._processes.slots.copies([row.slot for _, row, _ in step.own])
            last = [number for number, row, _ in step.own if row.is_last]
            return Masks(at, bits, {}, step.seconds, last)
        bits = np.full((len(samples), -(-self._vocab_size // WORD)), -1, dtype=np.int32)
        masks = Masks(at, bits, {})
        num_own = len(step.own)
        for number, ((sample, row, _, place), state) in enumerate(
            zip(step.ahead, states[num_own:], strict=True), num_own
        ):
            if state == IN_TIME:
                bits[number] = self._processes.slots.mask(row.ahead_slots[place])
            else:
                masks.late.append(sample)
        for number, ((sample, row, length), state) in enumerate(zip(step.own, states[:num_own], strict=True)):
            if state == FAILED:
                masks.failures[sample] = row.failure or _ELSEWHERE
            elif state == LATE:
                masks.late.append(sample)
            elif row.filled == length and not row.is_over:
                bits[number] = self._processes.slots.mask(row.slot)
                if row.is_last:
                    masks.last.append(sample)
        masks.seconds = step.seconds
        return masks


def apply(logits: torch.Tensor, masks: Masks) -> None:
    """Apply masks to logits [S, V] in place, in torch. A banned token gets -inf, an allowed one never does."""
    words = torch.from_numpy(masks.bits).to(logits.device)
    places = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    for number, at in enumerate(masks.at.tolist()):
        allowed = (words[number, :, None] >> places & 1).bool().view(-1)[: logits.shape[1]]
        row = logits[at].nan_to_num_(nan=UNLIKELIEST, posinf=torch.finfo(logits.dtype).max, neginf=UNLIKELIEST)
        row.clamp_(min=UNLIKELIEST).masked_fill_(~allowed, -torch.inf)
