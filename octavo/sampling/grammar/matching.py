"""Matching: the rows of one grammar and the tokens that it allows them next. Runs in the grammar's own process (process.py), so no
call here needs to be short: the process is ended if one takes too long."""

import functools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.sampling.grammar.bitmask import Words, any_set, clear_bits, is_set, keep_only, set_bits, tokens_of
from octavo.sampling.grammar.budgeted_end import BudgetedEnd, Ends
from octavo.sampling.grammar.forced import MAX_TOKENS, MOST_SECONDS, Forced, Spacing
from octavo.sampling.grammar.growth import growth_of_grammar
from octavo.sampling.grammar.guarded_matcher import GuardedMatcher, TokenKinds, compiled_part, guarded
from octavo.sampling.grammar.mask_slots import MaskSlots
from octavo.sampling.grammar.matcher import Matcher
from octavo.sampling.grammar.proposals import Proposals
from octavo.sampling.grammar.protocol import Begin, Compiled, Enter, Fill, Filled, FilledRow, RowToFill
from octavo.sampling.grammar.schema_places import Framed, framed_schema
from octavo.sampling.grammar.shortest_completion import ShortestCompletion
from octavo.sampling.grammar.shortest_text import has_clear_values, shortest_text
from octavo.text.grammar.limits import parser_limits
from octavo.text.tokenize.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor

_MAX_USED = 32  # used matchers that are kept for later rows
_MAX_THREADS = 8
_MAX_AHEAD = 0.005  # seconds for the masks behind a row's drafts
_LONGEST_TEXT = 16_384  # bytes of a shortest answer; one that takes more is not known
_MANY_TOKENS = 64  # that may follow: an answer is not at the end of a frame
_LARGE = 16_384  # characters of a grammar that is read beside its compilation
_MANY = 4  # rows whose masks are worth several threads
# A row may use `step_seconds` of processor time for one token, and on average this part of it.
_SHARE = 1 / 40
# Parts of `step_seconds`. A limit may have been set so long before the work that it is for. And work that takes no longer counts as
# processor time, whether it was or not. Setting a limit and reading the processor time for each row takes as long as a mask.
_OLD, _BRIEF = 1 / 80, 1 / 3200
_WORDS = {"NoExtensionBias": "no token of the vocabulary can follow"}
_GOOD_ENDS = ("NoExtension", "EndOfSentence")
_NO_TOKENS: list[int] = []
_FORCED_PAUSE = 64  # tokens


class SharedVocabulary:
    """What the processes of all grammars share, made once and inherited: the vocabulary as a trie, and the ranks of its tokens."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        tokens = begin.tokens
        spell = lambda token_id: tokens[token_id] if 0 <= token_id < len(tokens) else b""  # noqa: E731
        vocabulary = Vocabulary(len(tokens), spell, frozenset(begin.special_ids), tuple(begin.eos_ids))
        self.tokenizer = vocabulary.tokenizer(begin.vocab_size)
        self.kinds = TokenKinds(vocabulary, begin.vocab_size)
        self.ends = Ends(vocabulary, begin.vocab_size, self.kinds.speller)
        self.eos_ids = [i for i in begin.eos_ids if i < begin.vocab_size]
        self.special_ids = frozenset(begin.special_ids)
        self.forced = Forced(self.kinds, self.eos_ids)


@dataclass(slots=True)
class _Row:
    slot: int
    bits: Words  # its mask, in its slot
    stop_ids: list[int]  # tokens that end the row
    prompt_len: int
    min_len: int  # tokens of prompt and output below which it may not end
    max_len: int  # tokens of prompt and output at which it is cut
    ignores_eos: bool  # it ends only if its grammar allows nothing else
    ends_by_eos: bool
    credit: float  # seconds of processor time that it may use
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)  # of the output, as far as the matcher has consumed it
    ending: BudgetedEnd = field(default_factory=BudgetedEnd)
    may_be_used: bool = True  # its matcher may have served other rows before
    failure: str = ""
    filled_len: int = -1  # tokens of prompt and output with which its mask was last computed
    is_last: bool = False  # … and whether the token sampled with that mask is its last, because of max_tokens
    spacing: Spacing = field(default_factory=Spacing)  # of its output, …
    num_spaced: int = 0  # … as far as its first `num_spaced` tokens
    forced_from: int = 0  # tokens of its output from which on it may look for a forced stretch again


class Matching:
    """One grammar. `limit(seconds)` has the kernel end this process after that much more processor time; 0: no limit."""

    def __init__(self, shared: SharedVocabulary, slots: MaskSlots, limit: Callable[[float], None]) -> None:
        self._shared, self._slots, self._limit = shared, slots, limit
        self._step_seconds = shared.begin.step_seconds
        self._num_threads = min(shared.begin.num_threads, _MAX_THREADS)
        self._ends = shared.ends
        self._rows: dict[int, _Row] = {}
        self._limited_at = -math.inf  # when the limit on this process was last set
        self._cpu_at = 0.0  # processor time when it was last read, …
        self._charged = 0.0  # … and what rows were charged since
        self._used: list[Matcher] = []
        self._compiled: Matcher | None = None
        self._shortest: ShortestCompletion | None = None  # of its answers
        self._proposals: Proposals | None = None
        self._growth = 0  # tokens that a part of it may take
        self._is_regular = False
        self._is_json = False  # its answers are values of one schema, if need be in frames
        self._can_repeat = False  # … of which several may follow each other

    def compile(self, grammar: str) -> Compiled:
        from llguidance import LLMatcher

        self._limit(self._shared.begin.compile_seconds)
        kinds = self._shared.kinds
        # The compiler does not hold Python's lock: a large grammar is read meanwhile.
        reading: Future[_Reading] = Future()
        read = functools.partial(_read, reading, grammar, kinds)
        beside = threading.Thread(target=read) if len(grammar) >= _LARGE else None
        if beside is not None:
            beside.start()
        compiled = LLMatcher(self._shared.tokenizer, grammar, log_level=0, limits=parser_limits())
        if compiled.is_error():
            return Compiled(error_of(compiled), 0)
        if beside is None:
            read()
        found = reading.result()
        self._growth, self._is_json = found.growth, found.framed is not None
        self._can_repeat = self._is_json and "\nstart: part+" in grammar
        self._proposals = self._ends.proposals(grammar, kinds.fewest_tokens)
        self._compiled = guarded(compiled, grammar, kinds)
        self._shortest = _verified_answer(self._ends, kinds, self._compiled, found, self._proposals)
        self._is_regular = not isinstance(self._compiled, GuardedMatcher) and found.has_clear_values
        self._limit(0)
        return Compiled("", BudgetedEnd.of(self._shortest, growth=self._growth).looks_at)

    def enter(self, command: Enter) -> None:
        row = self._rows[command.number] = _Row(
            command.slot,
            self._slots.mask(command.slot),
            command.stop_ids,
            command.prompt_len,
            command.prompt_len + command.min_tokens,
            command.prompt_len + command.max_tokens,
            command.ignores_eos,
            command.ends_by_eos,
            self._step_seconds,
        )
        if self._is_json and self._shortest is not None and command.max_tokens < len(self._shortest.tokens):
            row.failure = (
                f"max_tokens has no room for an answer: the shortest one that the grammar allows takes {len(self._shortest.tokens)} "
                f"tokens, and max_tokens is {command.max_tokens}"
            )
            row.may_be_used = False  # a new matcher would not help

    def leave(self, number: int) -> None:
        """Forget a row. Its matcher is kept for the next one: its lexer has cached states."""
        row = self._rows.pop(number)
        if row.matcher is not None and not row.failure and len(self._used) < _MAX_USED:
            self._limit(self._step_seconds)
            if row.matcher.reset():
                self._used.append(row.matcher)
            self._limit(0)

    def fill(self, command: Fill) -> Filled:
        pairs = [(self._rows[asked.number], asked) for asked in command.rows]
        self._cpu_at, self._charged = time.thread_time(), 0.0
        if self._num_threads > 1 and len(pairs) >= _MANY:
            results = self._fill_together(pairs)
        else:
            results = []
            for row, asked in pairs:
                started = self._begin_work(row)
                if self._advance(row, asked):
                    self._mask(row)
                results.append(self._settled(row, asked))
                self._end_work(row, started)
        self._limit(0)
        self._limited_at = -math.inf
        is_plain = not any(result.is_last or result.failure or result.num_ahead or result.forced for result in results)
        return Filled() if is_plain else Filled(results)

    def _fill_together(self, pairs: list[tuple[_Row, RowToFill]]) -> list[FilledRow]:
        ready = []
        for row, asked in pairs:
            started = self._begin_work(row)
            if self._advance(row, asked):
                ready.append(row)
            self._end_work(row, started)
        if ready:
            self._fill_all(ready)
        results = []
        for row, asked in pairs:
            started = self._begin_work(row)
            results.append(self._settled(row, asked))
            self._end_work(row, started)
        return results

    def _fill_all(self, rows: list[_Row]) -> None:
        """Compute the masks of several rows with several threads."""
        self._limit(self._step_seconds * len(rows))
        self._limited_at = -math.inf  # for one row it is to be set again
        for row in rows:
            self._slots.mark(row.slot, True)
        # The slots are not next to each other.
        bits = np.empty((len(rows), self._slots.mask_bytes // 4), dtype=np.int32)
        matchers = [(compiled_part(row.matcher), at) for at, row in enumerate(rows) if row.matcher is not None]
        started = time.process_time()
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, self._slots.mask_bytes, len(bits))
        seconds = (time.process_time() - started) / len(rows)
        for at, row in enumerate(rows):
            if isinstance(row.matcher, GuardedMatcher):
                row.matcher.narrow(bits[at])
            row.bits[:] = bits[at]
            row.credit -= seconds
        self._cpu_at, self._charged = time.thread_time(), 0.0

    def _settled(self, row: _Row, asked: RowToFill) -> FilledRow:
        """Apply the row's own limits to its mask. If its matcher has failed and served others before, try again with a new one: a
        used one may have reached its lexer limits."""
        if row.filled_len != asked.length:
            is_last = self._settle(row, asked.length)
            if row.failure and row.may_be_used and self._compiled is not None:
                past, row.tokens, row.matcher, row.failure, row.may_be_used = row.tokens, [], None, "", False
                if self._restore(row, past):
                    self._mask(row)
                    is_last = self._settle(row, asked.length)
            if row.credit < 0 and not row.failure:
                row.failure = (
                    f"the grammar takes too long: more than {1000 * _SHARE * self._step_seconds:.0f} ms of processor time per token "
                    "on average (--grammar-step-seconds)"
                )
            row.filled_len, row.is_last = asked.length, is_last and not row.failure
        num_ahead, forced = 0, _NO_TOKENS
        if not (row.is_last or row.failure):
            if asked.drafts:
                num_ahead = self._look_ahead(row, asked)
            elif asked.num_forced:
                forced = self._forced(row, asked)
        return FilledRow(asked.number, asked.length, row.is_last, row.failure, num_ahead, forced)

    def _forced(self, row: _Row, asked: RowToFill) -> list[int]:
        """The stretch that the grammar forces behind the row's tokens. Not near the row's limit, where its end decides what may follow, nor
        beside items that must differ. The time is not the row's: without drafts it would not have been spent."""
        from llguidance import LLMatcher

        matcher = row.matcher
        if not isinstance(matcher, LLMatcher) or row.ending.end:
            return _NO_TOKENS
        if row.max_len - asked.length - asked.num_forced <= row.ending.looks_at:
            return _NO_TOKENS
        if not row.forced_from <= len(row.tokens) <= MAX_TOKENS:
            return _NO_TOKENS
        started = time.thread_time()
        spell = self._shared.kinds.spell
        for token in row.tokens[row.num_spaced :]:
            row.spacing.add(spell(token))
        row.num_spaced = len(row.tokens)
        found = self._shared.forced.tokens(matcher, row.bits, row.spacing, asked.num_forced)
        if found is None:
            found, row.matcher = _NO_TOKENS, None
            self._restore(row, row.tokens)
        seconds = time.thread_time() - started
        row.credit += min(seconds, MOST_SECONDS)
        if seconds > MOST_SECONDS:  # a long text is forced, and to ask for it takes as long as what is left of it
            row.forced_from = len(row.tokens) + _FORCED_PAUSE
        return found

    def _look_ahead(self, row: _Row, asked: RowToFill) -> int:
        """Compute masks behind drafted tokens, as if they had been sampled, and go back. → how many. It stops where a token would not be
        allowed, where the answer might end, and where its limit comes into sight: those positions are for a step of their own. The
        time is not the row's: without drafts it would not have been spent."""
        from llguidance import LLMatcher

        matcher, bits, num_consumed, num_ahead = row.matcher, row.bits, 0, 0
        if not isinstance(matcher, LLMatcher):  # a GuardedMatcher cannot go back
            return 0
        started = time.thread_time()
        for place, (token, slot) in enumerate(zip(asked.drafts, asked.slots, strict=True)):
            length = asked.length + place + 1
            if row.ending.end or row.max_len - length <= row.ending.looks_at:
                break
            if not 0 <= token < self._shared.begin.vocab_size or not is_set(bits, token) or token in row.stop_ids:
                break
            if time.thread_time() - started > _MAX_AHEAD or matcher.try_consume_tokens([token]) != 1:
                break
            num_consumed = place + 1
            if place < asked.num_there:
                bits, num_ahead = self._slots.mask(slot), place + 1
                continue
            matcher.unsafe_compute_mask_ptr(self._slots.address(slot), self._slots.mask_bytes)
            if matcher.is_error() or matcher.is_stopped():
                break
            bits = self._slots.mask(slot)
            self._settle_ends(row, matcher, bits, length)
            num_ahead = place + 1
        if num_consumed and (matcher.is_error() or not matcher.rollback(num_consumed)):
            num_ahead, row.matcher = 0, None
            self._restore(row, row.tokens)
        row.credit += time.thread_time() - started
        return num_ahead

    def _begin_work(self, row: _Row) -> float:
        """Limit the time for the row, and note which row it is in case this process is ended. → when it began. No context manager: one
        would take a tenth of a mask's time."""
        started = time.perf_counter()
        if started - self._limited_at > _OLD * self._step_seconds:
            self._limit(self._step_seconds)
            self._limited_at = started
        self._slots.mark(row.slot, True)
        return started

    def _end_work(self, row: _Row, started: float) -> None:
        seconds = time.perf_counter() - started
        if seconds < _BRIEF * self._step_seconds:
            self._charged += seconds
        else:
            now = time.thread_time()
            seconds = max(0.0, now - self._cpu_at - self._charged)
            self._cpu_at, self._charged = now, 0.0
        row.credit -= seconds
        self._slots.mark(row.slot, False)

    # ── a row's state ──

    def _advance(self, row: _Row, asked: RowToFill) -> bool:
        """Advance the row's matcher by its new tokens. False: there is no mask to compute: it has failed, or its mask is there, and only
        those behind drafted tokens are wanted."""
        if row.filled_len == asked.length:
            return False
        row.credit = min(self._step_seconds, row.credit + _SHARE * self._step_seconds)
        if row.failure:
            return False
        if row.matcher is None:
            started = time.thread_time()
            is_restored = self._restore(row, asked.new_tokens)
            row.credit += time.thread_time() - started  # the time for these tokens was counted when they were generated
            return is_restored
        return self._consume(row, row.matcher, asked.new_tokens)

    def _restore(self, row: _Row, past: list[int]) -> bool:
        """Give the row a matcher, and advance it and the budgeted end by tokens that were generated earlier."""
        assert self._compiled is not None, "compiled first"
        matcher = self._used.pop() if self._used and row.may_be_used else self._compiled.deep_copy()
        row.matcher = matcher
        row.ending = BudgetedEnd.of(self._shortest, self._proposals, self._growth, is_regular=self._is_regular)
        for number, token in enumerate(past):
            self._limit(self._step_seconds)  # each token had as much
            if not self._ends.recall(row.ending, matcher, [token], row.max_len - row.prompt_len - number):
                row.tokens = list(past)
                row.failure = error_of(matcher)
                return False
        row.tokens = list(past)
        return True

    def _consume(self, row: _Row, matcher: Matcher, tokens: list[int]) -> bool:
        row.tokens += tokens
        if tokens and not matcher.consume_tokens(tokens):
            row.failure = error_of(matcher)
            return False
        row.ending.last = tokens[-1] if len(tokens) == 1 else -1
        return True

    def _mask(self, row: _Row) -> None:
        assert row.matcher is not None
        row.matcher.unsafe_compute_mask_ptr(self._slots.address(row.slot), self._slots.mask_bytes)

    def _settle(self, row: _Row, row_len: int) -> bool:
        """True: the token sampled now is the row's last, because of max_tokens."""
        if row.failure:
            return False
        assert row.matcher is not None
        self._settle_ends(row, row.matcher, row.bits, row_len)
        num_left = row.max_len - row_len
        if self._can_repeat and self._shortest is not None and num_left <= len(self._shortest.tokens):
            end_repetition(self._shared.kinds, row.matcher, row.bits, self._shared.eos_ids)
        return not row.failure and self._ends.restrict(row.ending, row.matcher, row.bits, num_left)

    def _settle_ends(self, row: _Row, matcher: Matcher, bits: Words, row_len: int) -> None:
        """Apply min_tokens, ignore_eos and stop tokens to the mask."""
        if matcher.is_stopped() and matcher.stop_reason() not in _GOOD_ENDS:
            row.failure = error_of(matcher)
            return
        eos_ids = self._shared.eos_ids
        banned = row.stop_ids if row_len < row.min_len else eos_ids if row.ignores_eos else None
        if banned is None and row.ends_by_eos:
            return  # the usual case: the grammar's bits are right
        if not row.ends_by_eos and any_set(bits, eos_ids):
            # A control token among the stop tokens is meant as an end: allow it where the grammar may end.
            set_bits(bits, np.array([*self._shared.special_ids.intersection(row.stop_ids)], dtype=np.int64))
        if banned is None or not any_set(bits, banned):
            return
        before = bits.copy()
        clear_bits(bits, np.array(banned, dtype=np.int64))
        if not bits.any():  # the grammar allows only its end: the answer ends, whatever was asked
            bits[:] = before

    @functools.cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(self._num_threads)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the text of a grammar says about its answers."""

    growth: int  # tokens that a part of it may take
    framed: Framed | None  # its schema and what stands around it; None: its answers are not values of one schema
    has_clear_values: bool
    shortest: ShortestCompletion | None  # the shortest answer by the schema; to be verified


def _reading(grammar: str, kinds: TokenKinds) -> _Reading:
    framed = framed_schema(grammar)
    return _Reading(
        growth_of_grammar(grammar, kinds.fewest_tokens),
        framed,
        has_clear_values(grammar),
        _proposed_answer(kinds, framed, is_guess=False),
    )


def _read(reading: "Future[_Reading]", grammar: str, kinds: TokenKinds) -> None:
    try:
        found = _reading(grammar, kinds)
    except BaseException as error:
        reading.set_exception(error)
    else:
        reading.set_result(found)


def shortest_answer(
    ends: Ends, kinds: TokenKinds, matcher: Matcher, grammar: str, proposals: Proposals
) -> ShortestCompletion | None:
    """The shortest answer of a grammar, as far as one was found. The one of its schema is made first, then one of what is known of the
    schema; if the grammar accepts neither, an end is searched for."""
    return _verified_answer(ends, kinds, matcher, _reading(grammar, kinds), proposals)


def _proposed_answer(kinds: TokenKinds, framed: Framed | None, is_guess: bool) -> ShortestCompletion | None:
    text = None if framed is None else shortest_text(framed.schema, kinds.num_tokens, is_guess=is_guess)
    if framed is None or text is None or len(text) > _LONGEST_TEXT:
        return None
    found = _completion(kinds, framed, text)
    return found if found.tokens else None


def _verified_answer(
    ends: Ends, kinds: TokenKinds, matcher: Matcher, reading: _Reading, proposals: Proposals
) -> ShortestCompletion | None:
    if reading.shortest is not None and ends.is_end(reading.shortest.tokens, matcher):
        return reading.shortest
    guess = _proposed_answer(kinds, reading.framed, is_guess=True)
    if guess is not None and ends.is_end(guess.tokens, matcher):
        return guess
    return ends.shortest(matcher, proposals)


def _completion(kinds: TokenKinds, framed: Framed, text: str) -> ShortestCompletion:
    """A text of the schema, with what stands before and after it."""
    if not framed.before and not framed.after:
        return ShortestCompletion([], kinds.speller, text.encode())
    tokens: list[int] = []
    begun = ""
    for part in (*framed.before, text, *framed.after):
        if isinstance(part, str):
            begun += part
        else:
            tokens += [*kinds.fewest_tokens(begun.encode()), part]
            begun = ""
    return ShortestCompletion([*tokens, *kinds.fewest_tokens(begun.encode())])


def end_repetition(kinds: TokenKinds, matcher: Matcher, bits: Words, eos_ids: list[int]) -> None:
    """Remove from a mask the tokens that begin another frame: there is no room for a whole one."""
    if matcher.is_accepting():
        if any_set(bits, eos_ids):
            keep_only(bits, [token for token in eos_ids if is_set(bits, token)])
        return
    tokens = tokens_of(bits, kinds.vocab_size)
    if len(tokens) > _MANY_TOKENS:
        return  # not at the end of a frame
    banned = [token for token in tokens.tolist() if _crosses(kinds, matcher, token)]
    if 0 < len(banned) < len(tokens):
        clear_bits(bits, np.array(banned, dtype=np.int64))


def _crosses(kinds: TokenKinds, matcher: Matcher, token: int) -> bool:
    """Whether a token ends a frame and goes on behind it."""
    singles = [kinds.single.get(byte, -1) for byte in kinds.spell(token)[:-1]]
    if not singles or -1 in singles or matcher.validate_tokens(singles) < len(singles):
        return False
    after = matcher.deep_copy()
    return any(after.consume_token(single) and after.is_accepting() for single in singles)


def error_of(matcher: Matcher) -> str:
    words = " ".join(matcher.get_error().partition("<")[0].split())[:300]
    return f"the grammar cannot go on: {_WORDS.get(words, words) or 'for an unknown reason'}"
