"""Grammar masks: the tokens that each row's grammar allows next, as bitmasks, and their application to logits.
Grammars were checked by text/grammar/build.py.

A row's mask follows only from its grammar and the tokens it has generated, so a row that was preempted, or resumed on another
engine, continues in the same state. Every rank knows the tokens and computes the masks itself. Compiling and filling masks
release the GIL and run in other threads. prepare() compiles a grammar before a row that needs it enters, so that no step
waits for it."""

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from octavo.errors import ConfigError, OctavoError
from octavo.messages import SamplingParams
from octavo.sampling.grammar.bitmask import WORD, Ints, Words, any_set, clear_bits, set_bits
from octavo.sampling.grammar.budgeted_end import BudgetedEnd, Ends
from octavo.sampling.grammar.shortest_completion import ShortestCompletion

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from octavo.text.tokenize.vocabulary import Vocabulary

log = logging.getLogger("octavo.grammar")

_MAX_USED = 32  # used matchers kept per grammar for later rows
_WORDS = {"NoExtensionBias": "no token of the vocabulary can follow"}
_GOOD_ENDS = ("NoExtension", "EndOfSentence")
UNLIKELIEST = -1e30
"""The logit of a token that the grammar allows and a bias or ban excludes: sampled only if nothing else is left."""


class Sampled(Protocol):
    """The sampled tokens [S] of a step that may still be running."""

    def tokens(self) -> Sequence[int]:
        """Wait for the tokens and return them."""


@dataclass(slots=True)
class Masks:
    """The masks of a step's rows that have a grammar."""

    at: Ints  # [G] indices of the step's samples
    bits: Words  # [G, ceil(V / 32)]: bit i % 32 of word i // 32: token i is allowed
    failures: dict[int, str]  # sample → why its grammar cannot continue; its mask allows every token
    seconds: float = 0.0  # time to compute the masks, without the wait for the previous step's tokens
    # Samples that end their rows, at or shortly before max_tokens.
    last: list[int] = field(default_factory=list)


class _Compiled(NamedTuple):
    matcher: "LLMatcher"
    shortest: ShortestCompletion | None  # if even the shortest answer is long


@dataclass(slots=True)
class _Row:
    compiled: Future[_Compiled] | _Compiled
    tokens: list[int]  # of the output
    num_taken: int  # of the tokens: those that the matcher has consumed
    grammar: str
    ends: frozenset[int]  # tokens that end the row
    stop_ids: Ints  # the same tokens as an array
    prompt_len: int
    min_len: int  # tokens of prompt and output below which it may not end
    max_len: int  # tokens of prompt and output at which it is cut
    ignores_eos: bool  # it ends only if its grammar allows nothing else
    ends_by_eos: bool  # the request names no stop tokens of its own
    num_past: int  # of the tokens: those sampled before this row or its matcher existed
    ending: BudgetedEnd = field(default_factory=BudgetedEnd)
    may_be_used: bool = True  # its matcher may have served other rows before
    ready: "LLMatcher | None" = None  # once it is compiled
    is_over: bool = False  # a token that ends it was sampled: later tokens do not count
    failure: str = ""


@dataclass(slots=True)
class _Latest:
    """The previous step. Its tokens are read when a mask needs them."""

    rows: list[int]
    step: Sampled


def no_vocabulary() -> "Vocabulary":
    raise ConfigError("this engine has no vocabulary: grammars are not supported")


class Grammars:
    """The grammars of one rank's rows. Call enter() and leave() as rows change, masks() in each step that samples, once its
    logits are queued, and started() for every step."""

    def __init__(self, vocab_size: int, vocabulary: "Callable[[], Vocabulary]", num_threads: int) -> None:
        self._vocab_size = vocab_size
        self._open = vocabulary
        self._num_threads = num_threads
        self.rows: dict[int, _Row] = {}  # rows with a grammar
        self._sampling: list[int] | None = None  # rows of the step being launched
        self._latest: _Latest | None = None
        self._begun: Future[Masks | None] | None = None
        self._pool = ThreadPoolExecutor(1, "octavo-grammar")
        # Prepared grammars, or the error. Kept until prepare() is given them in `forgets`.
        self._compiled: dict[str, _Compiled | ValueError] = {}
        self._used: dict[str, list[LLMatcher]] = {}

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[], None]) -> None:
        """Compile `grammar` in another thread and drop those in `forgets`. `done` is called in another thread, also on
        failure."""
        self._pool.submit(self._prepare, grammar, forgets).add_done_callback(lambda future: done())

    def enter(
        self, row: int, params: SamplingParams, prompt_len: int, output_ids: Sequence[int], stop_ids: Sequence[int]
    ) -> None:
        """Set the row's new occupant, which has generated `output_ids` so far."""
        self.leave(row)
        inside = np.array(sorted(i for i in {*stop_ids} if 0 <= i < self._vocab_size), dtype=np.int64)
        self.rows[row] = _Row(
            self._fresh(params.grammar),
            list(output_ids),
            0,
            params.grammar,
            frozenset(inside.tolist()),
            inside,
            prompt_len,
            prompt_len + params.min_tokens,
            prompt_len + (params.max_tokens or 0),
            params.ignore_eos,
            not params.stop_token_ids,
            len(output_ids),
        )

    def leave(self, row: int) -> None:
        own = self.rows.pop(row, None)
        if own is not None and own.ready is not None and not own.failure:
            self._pool.submit(self._keep, own.grammar, own.ready)
        if self._latest is not None:
            # The previous step's token of this row, with a grammar or without, does not belong to its next occupant.
            self._latest.rows = [-1 if other == row else other for other in self._latest.rows]

    def started(self, step: Sampled) -> None:
        if self._sampling is not None:
            self._latest, self._sampling = _Latest(self._sampling, step), None
        elif self._latest is not None:  # this step used no masks; read the tokens now, before their buffer is reused
            self._take_in()

    def begin(self, rows: Ints, lens: Ints) -> None:
        """Start computing the result of masks() in another thread."""
        if self.rows and len(rows):
            self._begun = self._beside.submit(self._masks, rows, lens)

    def masks(self, rows: Ints, lens: Ints) -> Masks | None:
        """The masks of the rows [S] that sample next and hold `lens` tokens. None: none of them has a grammar. Waits for the
        previous step."""
        if not self.rows:
            return None
        begun, self._begun = self._begun, None
        return self._masks(rows, lens) if begun is None else begun.result()

    def _masks(self, rows: Ints, lens: Ints) -> Masks | None:
        self._take_in()
        self._sampling = rows.tolist()
        own = [(at, self.rows[row]) for at, row in enumerate(rows.tolist()) if row in self.rows]
        if not own:
            return None
        started = time.perf_counter()
        bits = np.full((len(own), -(-self._vocab_size // WORD)), -1, dtype=np.int32)
        ready = self._advance([row for _, row in own])
        self._fill(ready, bits)
        last = []
        for matcher, number in ready:
            sample, row = own[number]
            if self._settle(row, matcher, bits[number], int(lens[sample])):
                last.append(sample)
        for number, (sample, row) in enumerate(own):
            if row.failure and row.may_be_used and self._start_afresh(row, bits[number], int(lens[sample])):
                last.append(sample)
        failures = {at: row.failure for at, row in own if row.failure}
        at = np.array([at for at, _ in own], dtype=np.int64)
        return Masks(at, bits, failures, time.perf_counter() - started, last)

    def _take_in(self) -> None:
        latest, self._latest = self._latest, None
        if latest is None or self.rows.keys().isdisjoint(latest.rows):
            return
        for row, token in zip(latest.rows, latest.step.tokens(), strict=True):
            own = self.rows.get(row)
            if own is not None and not own.is_over:
                own.is_over = token in own.ends
                own.tokens.append(token)

    def _advance(self, rows: list[_Row]) -> "list[tuple[LLMatcher, int]]":
        """The rows' matchers, advanced by all tokens, each with its index in `rows`. Rows that are over or failed are left
        out."""
        ready: list[tuple[LLMatcher, int]] = []
        for number, row in enumerate(rows):
            if row.is_over or row.failure:
                continue
            matcher = row.ready or self._compiled_for(row)
            if matcher is None:
                continue
            is_restored = self._recalls(row, matcher)
            new = row.tokens[row.num_taken :]
            if not is_restored or (new and not matcher.consume_tokens(new)):
                row.failure = _error_of(matcher)
                continue
            row.num_taken = len(row.tokens)
            ready.append((matcher, number))
        return ready

    def _recalls(self, row: _Row, matcher: "LLMatcher") -> bool:
        """Advance the matcher and the budgeted end by the tokens that the row had generated before. False: one is rejected."""
        past, row.num_past = row.tokens[: row.num_past], 0
        if not past:
            return True
        row.num_taken = len(past)
        return self._ends.recall(row.ending, matcher, past, row.max_len - row.prompt_len)

    def _start_afresh(self, row: _Row, bits: Words, row_len: int) -> bool:
        """Retry a failed row with a new matcher: a used one may have reached its lexer limits. Returns the result of
        _settle()."""
        row.failure, row.may_be_used, row.num_taken, row.num_past = "", False, 0, len(row.tokens)
        row.compiled, row.ready = self._fresh(row.grammar, False), None
        for matcher, _ in self._advance([row]):
            self._fill([(matcher, 0)], bits[None])
            return self._settle(row, matcher, bits, row_len)
        return False

    def _compiled_for(self, row: _Row) -> "LLMatcher | None":
        try:
            row.ready, shortest = row.compiled.result() if isinstance(row.compiled, Future) else row.compiled
            row.ending = BudgetedEnd.of(shortest)
        except Exception as error:
            row.failure = f"the grammar could not be compiled: {error}"
        return row.ready

    def _fill(self, matchers: "list[tuple[LLMatcher, int]]", bits: Words) -> None:
        if len(matchers) == 1 or self._num_threads == 1:
            for matcher, number in matchers:
                matcher.unsafe_compute_mask_ptr(bits[number].ctypes.data, bits.shape[1] * bits.itemsize)
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits))

    def _settle(self, row: _Row, matcher: "LLMatcher", bits: Words, row_len: int) -> bool:
        """Apply the row's own limits to its mask. True: the token sampled now is the row's last, because of max_tokens."""
        self._settle_ends(row, matcher, bits, row_len)
        return not row.failure and self._ends.restrict(row.ending, matcher, bits, row.max_len - row_len)

    def _settle_ends(self, row: _Row, matcher: "LLMatcher", bits: Words, row_len: int) -> None:
        """Apply min_tokens, ignore_eos and stop tokens to the mask."""
        if matcher.is_stopped() and matcher.stop_reason() not in _GOOD_ENDS:
            row.failure = _error_of(matcher)
            bits[:] = -1
            return
        banned = row.stop_ids if row_len < row.min_len else self._eos_ids if row.ignores_eos else None
        if banned is None and row.ends_by_eos:
            return  # the usual case: the grammar's bits are right
        if not row.ends_by_eos and any_set(bits, self._eos_ids):
            # A control token among the stop tokens is meant as an end: allow it where the grammar may end.
            set_bits(bits, row.stop_ids[np.isin(row.stop_ids, self._special_ids)])
        if banned is None or not any_set(bits, banned):
            return
        before = bits.copy()
        clear_bits(bits, banned)
        if not bits.any():  # the grammar allows only its end: the answer ends, whatever was asked
            bits[:] = before

    # ── done once, takes a while ──

    def warm_later(self, seconds: float) -> None:
        """Read the vocabulary after `seconds`, so that neither the start nor the first grammar waits for it. Does not keep
        this object alive until then."""
        later = threading.Timer(seconds, _warm, [weakref.ref(self)])
        later.daemon = True
        later.start()

    def warm(self) -> None:
        self._pool.submit(self._read)

    def _read(self) -> None:
        try:
            self._tokenizer, self._ends  # noqa: B018
        except ImportError:
            log.info("llguidance is not installed: requests with a grammar are refused")
        except OctavoError as error:
            log.info("grammars are not available: %s", error)

    @functools.cached_property
    def _beside(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "octavo-masks")

    @functools.cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(self._num_threads)

    @functools.cached_property
    def _vocabulary(self) -> "Vocabulary":
        return self._open()

    @functools.cached_property
    def _eos_ids(self) -> Ints:
        return np.array([i for i in self._vocabulary.eos_ids if i < self._vocab_size], dtype=np.int64)

    @functools.cached_property
    def _special_ids(self) -> Ints:
        return np.array(sorted(self._vocabulary.special_ids), dtype=np.int64)

    @functools.cached_property
    def _tokenizer(self) -> "LLTokenizer":
        return self._vocabulary.tokenizer(self._vocab_size)

    @functools.cached_property
    def _ends(self) -> Ends:
        return Ends(self._vocabulary, self._vocab_size)

    def _keep(self, grammar: str, matcher: "LLMatcher") -> None:
        """Keep a used matcher for the next row: its lexer has cached states."""
        if grammar not in self._compiled:
            return
        used = self._used.setdefault(grammar, [])
        if len(used) < _MAX_USED and matcher.reset():
            used.append(matcher)

    def _fresh(self, grammar: str, may_be_used: bool = True) -> Future[_Compiled] | _Compiled:
        """A matcher at the grammar's beginning: at once if it was prepared, else compiled for this row, and the step that needs
        it waits."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            return self._pool.submit(self._compile, grammar)
        if isinstance(compiled, ValueError):
            failed: Future[_Compiled] = Future()
            failed.set_exception(compiled)
            return failed
        used = self._used.get(grammar) if may_be_used else None
        return _Compiled(used.pop() if used else compiled.matcher.deep_copy(), compiled.shortest)

    def _prepare(self, grammar: str, forgets: list[str]) -> None:
        for other in forgets:
            self._compiled.pop(other, None)
            self._used.pop(other, None)
        try:
            self._compiled[grammar] = self._compile(grammar)
        except ValueError as error:
            self._compiled[grammar] = error

    def _compile(self, grammar: str) -> _Compiled:
        """Compile in the single thread of the pool."""
        from llguidance import LLMatcher, LLParserLimits

        ends = self._ends  # constructed here on first use, not in the middle of a step
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if compiled.is_error():
            raise ValueError(_error_of(compiled))
        return _Compiled(compiled, ends.shortest(compiled))


def _warm(grammars: "weakref.ref[Grammars]") -> None:
    found = grammars()
    if found is not None:
        found.warm()


def _error_of(matcher: "LLMatcher") -> str:
    words = " ".join(matcher.get_error().partition("<")[0].split())[:300]
    return f"the grammar cannot go on: {_WORDS.get(words, words) or 'for an unknown reason'}"


def apply(logits: torch.Tensor, masks: Masks) -> None:
    """Apply masks to logits [S, V] in place, in torch. A banned token gets -inf, an allowed one never does."""
    words = torch.from_numpy(masks.bits).to(logits.device)
    places = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    for number, at in enumerate(masks.at.tolist()):
        allowed = (words[number, :, None] >> places & 1).bool().view(-1)[: logits.shape[1]]
        row = logits[at].nan_to_num_(nan=UNLIKELIEST, posinf=torch.finfo(logits.dtype).max, neginf=UNLIKELIEST)
        row.clamp_(min=UNLIKELIEST).masked_fill_(~allowed, -torch.inf)
