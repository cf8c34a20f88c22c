"""Masks over logits: torch's, the CPU's native kernels' and the GPU's choose the same tokens, and follow the rows' own state."""

import ctypes
import itertools
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from octavo.messages import SamplingParams
from octavo.sampling.grammar import masks as masks_module
from octavo.sampling.grammar import row_processes
from octavo.sampling.grammar.masks import FAILED, IN_TIME, LATE, UNLIKELIEST, Grammars, Masks, apply
from octavo.sampling.grammar.row_processes import GrammarLimits
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState
from tests.interpreter import mend
from tests.native import native
from tests.processes import is_alive
from tests.walks import CALL, EOS, SIZE, VOCABULARY

# The interpreter computes with numpy, which warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB_SIZE = 1000  # not a multiple of 32


def random_masks(num_rows: int, at: list[int], seed: int) -> Masks:
    rng = np.random.default_rng(seed)
    bits = rng.integers(-(2**31), 2**31, (len(at), -(-VOCAB_SIZE // 32)), dtype=np.int64).astype(np.int32)
    bits &= rng.integers(-1, 1, bits.shape, dtype=np.int64).astype(np.int32)  # whole words without any token
    bits[0] = 0
    bits[0, 5] = 2  # a single token
    return Masks(np.array(at, dtype=np.int64), bits, {})


def allowed(masks: Masks) -> np.ndarray:
    return np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE].astype(bool)


def test_torch_leaves_what_the_mask_leaves():
    logits = torch.randn(4, VOCAB_SIZE)
    logits[1, :500] = -torch.inf
    logits[3, 7] = torch.nan
    before, masks = logits.clone(), random_masks(4, [1, 3], 1)
    apply(logits, masks)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    kept = torch.from_numpy(allowed(masks))
    assert (logits[[1, 3]][~kept] == -torch.inf).all() and (logits[[1, 3]][kept] >= UNLIKELIEST).all()
    same = kept & before[[1, 3]].isfinite()
    assert torch.equal(logits[[1, 3]][same], before[[1, 3]][same])


def state_of(params: list[SamplingParams]) -> SamplingState:
    state = SamplingState(len(params), VOCAB_SIZE)
    for row, own in enumerate(params):
        state.enter(row, own, row, 2, [])
    return state


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, top_k=12),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=0.8, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=0.0, frequency_penalty=1.0),
]


@pytest.mark.parametrize("way", ["native", "kernels"])
def test_all_ways_choose_the_same(way, device, monkeypatch):
    mend(monkeypatch)
    cpu = native() if way == "native" else None
    torch.manual_seed(2)
    logits = torch.randn(len(PARAMS), VOCAB_SIZE) * 3
    logits[2, 40:] = -torch.inf
    tokens = torch.randint(0, VOCAB_SIZE, (len(PARAMS), 12), dtype=torch.int32)
    state, rows = state_of(PARAMS), np.arange(len(PARAMS))
    masks = random_masks(len(PARAMS), [0, 2, 3, 4, 5], 3)
    for length in (3, 9):
        lens = np.full(len(PARAMS), length)
        expected = sample(logits.clone(), tokens, state, rows, lens, by_kernels=False, masks=masks)
        if cpu is not None:
            found = sample(logits.clone(), tokens, state, rows, lens, by_kernels=False, native=cpu, masks=masks)
        else:
            there = (logits.clone().to(device), tokens.to(device))
            found = sample(*there, state, rows, lens, by_kernels=True, masks=masks).cpu()
        assert found.tolist() == expected.tolist()
        for number, at in enumerate(masks.at.tolist()):
            assert allowed(masks)[number, found[at]]


class Done:
    """A step whose tokens have arrived."""

    def __init__(self, *tokens: int, counted: set[int] | None = None) -> None:
        self._tokens, self._counted = tokens, counted

    def is_done(self) -> bool:
        return True

    def tokens(self) -> tuple[int, ...]:
        return self._tokens

    def counted(self) -> set[int] | None:
        return self._counted


class Running(Done):
    """A step whose tokens arrive when they are asked for, as on a GPU."""

    def is_done(self) -> bool:
        return False


def left(masks: Masks | None, number: int = 0) -> set[str | int]:
    assert masks is not None and not masks.failures
    bits = np.unpackbits(masks.bits[number].view(np.uint8), bitorder="little")[:SIZE]
    return {chr(token) if token < 256 else int(token) for token in np.flatnonzero(bits)}


ENDS: set[str | int] = {EOS, EOS + 1}
HEAD = '%llguidance {"no_forcing": true}\n'
ABC = HEAD + 'start: "a" "b"* "c"?'


PATIENT = GrammarLimits(most_wait=60.0)  # a busy machine may take long to start a process


@pytest.fixture
def make_grammars() -> Iterator[Callable[..., Grammars]]:
    made = []

    def make(num_threads: int = 2, **values) -> Grammars:
        made.append(Grammars(SIZE, lambda: VOCABULARY, num_threads, **{"limits": PATIENT, **values}))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def found(make_grammars) -> Grammars:
    return make_grammars()


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def params(grammar: str = ABC, **values) -> SamplingParams:
    return SamplingParams(grammar=grammar, **values)


@pytest.mark.parametrize("step", [Done, Running])
def test_masks_follow_the_tokens_of_the_step_before(found, step):
    assert found.masks(rows(0, 1), rows(5, 5)) is None
    found.enter(4, params(), 3, [], [*ENDS])
    masks = found.masks(rows(2, 4), rows(5, 3))
    assert masks is not None and masks.at.tolist() == [1] and left(masks) == {"a"}
    found.started(step(99, ord("a")))
    assert left(found.masks(rows(4), rows(4))) == {"b", "c", *ENDS}
    found.started(step(ord("b")))
    assert found.masks(rows(2), rows(6)) is None  # a step without the row: the row's state is kept
    found.started(step(7))
    assert left(found.masks(rows(4), rows(5))) == {"b", "c", *ENDS}
    found.started(step(ord("c")))
    assert left(found.masks(rows(4), rows(6))) == ENDS
    found.started(step(EOS))
    assert len(left(found.masks(rows(4), rows(7)))) == SIZE  # the answer is over: tokens sampled now are discarded
    found.leave(4)
    assert found.masks(rows(4), rows(7)) is None


@pytest.mark.parametrize("step", [Done, Running])
def test_masks_behind_a_draft_are_those_of_steps_of_one_token(found, step):
    """As far as the grammar allows the draft; what lies behind counts as late, and the row goes on from what was sampled."""
    wanted = params(max_tokens=1000)
    found.enter(0, wanted, 3, [], [*ENDS])
    found.enter(1, wanted, 3, [*b"ab"], [*ENDS])
    found.drafts = {0: [*b"abb"], 1: [*b"xb"]}
    masks = found.masks(rows(0, 0, 0, 0, 1, 1, 1, 2), rows(3, 4, 5, 6, 5, 6, 7, 9))
    assert masks is not None and masks.at.tolist() == [0, 4, 1, 2, 3, 5, 6] and masks.late == [5, 6]
    more = {"b", "c", *ENDS}
    assert [left(masks, number) for number in range(5)] == [{"a"}, more, more, more, more]
    found.started(step(*b"abcbbxx", 9, counted={0, 1, 2, 4, 7}))  # the third sample of row 0 was not what was drafted
    found.drafts = {1: [*b"bb"]}
    masks = found.masks(rows(1, 1, 1), rows(6, 7, 8))
    assert [left(masks, number) for number in range(3)] == [more] * 3 and not masks.late
    found.started(step(*b"bbx", counted={0, 1}))
    found.drafts = {}
    masks = found.masks(rows(0, 1), rows(6, 8))
    assert left(masks, 0) == ENDS and left(masks, 1) == more and not masks.late
    assert len(found._processes.free_ahead) == len({*found._processes.free_ahead}), "slots are free once"


def test_masks_of_a_draft_that_grows_token_by_token(found, monkeypatch):
    """They are those of the whole draft, asked for once: the step that verifies it uses the same ones."""
    monkeypatch.setattr(masks_module, "_LEAST_WAIT", 60.0)
    found.enter(0, params(max_tokens=1000), 3, [], [*ENDS])
    found.enter(1, params(HEAD + 'start: "x" "y"+ "z"', max_tokens=1000), 3, [*b"x"], [*ENDS])
    b, y, num_free = {"b", "c", *ENDS}, {"y", "z"}, len(found._processes.free_ahead)
    rounds = [(3, 4, b"abb", b"yyy", [{"a"}, b, b, b], [{"y"}, y, y, y]), (5, 6, b"bbb", b"yyy", [b] * 4, [y] * 4)]
    for first, second, drafts, others, left_first, left_second in rounds:
        found.begin_drafts([0, 1, 2], [first, second, 9])
        for place in range(3):
            masks = found.draft_masks(rows(0, 2, 1), rows(first + place, 9, second + place))
            assert masks is not None and masks.at.tolist() == [0, 2] and not masks.late
            assert left(masks, 0) == left_first[place] and left(masks, 1) == left_second[place]
            found.add_drafts({0: drafts[place], 1: others[place], 2: 7})
        assert len(found._processes.free_ahead) == num_free - 6
        found.drafts = {0: [*drafts], 1: [*others]}
        places = np.arange(4)
        masks = found.masks(np.repeat(rows(0, 1), 4), np.concatenate([first + places, second + places]))
        assert masks is not None and not masks.late and masks.at.tolist() == [0, 4, 1, 2, 3, 5, 6, 7]
        of_masks = [left(masks, number) for number in range(8)]
        assert [of_masks[0], *of_masks[2:5]] == left_first and [of_masks[1], *of_masks[5:]] == left_second
        found.started(Done(*drafts, ord("b"), *b"yyyy", counted={0, 1, 4, 5}))
    found.drafts = {}
    masks = found.masks(rows(0, 1), rows(7, 8))
    assert left(masks, 0) == b and left(masks, 1) == y and not masks.late
    assert len(found._processes.free_ahead) == num_free == len({*found._processes.free_ahead}), "slots are free once"


def test_a_draft_ends_where_its_grammar_has_no_mask(make_grammars, monkeypatch):
    """Behind a token that it does not allow, at an end, near the limit, and where there is no slot. A step never uses the masks of another
    draft."""
    monkeypatch.setattr(masks_module, "_LEAST_WAIT", 60.0)
    found = make_grammars()
    for row, max_tokens in enumerate((1000, 1000, 3)):
        found.enter(row, params(max_tokens=max_tokens), 3, [*b"a"], [*ENDS])
    found.begin_drafts([0, 1, 2], [4, 4, 4])
    assert found.draft_masks(rows(0, 1, 2), rows(4, 4, 4)).late == []
    found.add_drafts({0: ord("x"), 1: EOS, 2: ord("b")})
    assert found.draft_masks(rows(0, 1, 2), rows(5, 5, 5)).late == [0, 1, 2]
    found.drafts = {0: [ord("b")], 1: [EOS]}
    masks = found.masks(rows(0, 0, 1, 1, 2), rows(4, 5, 4, 5, 4))
    assert masks is not None and masks.late == [1, 3], "the masks that were asked for are of other tokens"
    found.started(Done(*b"bbbbb", counted={0, 2, 4}))
    found.drafts = {}
    found.begin_drafts([0, 1], [5, 5])
    assert found.draft_masks(rows(0, 1), rows(5, 5)).late == []
    del found._processes.free_ahead[1:]
    found.add_drafts({0: ord("b"), 1: ord("b")})
    assert found.draft_masks(rows(0, 1), rows(6, 6)).late == [1]
    found.drafts = {0: [*b"b"], 1: [*b"b"]}
    masks = found.masks(rows(0, 0, 1, 1), rows(5, 6, 5, 6))
    assert masks is not None and masks.late == [3] and left(masks, 2) == {"b", "c", *ENDS}


def test_no_masks_behind_an_end_or_near_the_limit(found):
    found.enter(0, params(max_tokens=1000), 3, [*b"ab"], [*ENDS])
    found.enter(1, params(max_tokens=5), 3, [*b"ab"], [*ENDS])
    found.drafts = {0: [ord("c"), EOS, ord("b")], 1: [ord("b")]}
    masks = found.masks(rows(0, 0, 0, 0, 1, 1), rows(5, 6, 7, 8, 5, 6))
    assert masks is not None and masks.at.tolist() == [0, 4, 1, 2, 3, 5]
    assert masks.late == [1, 2, 3, 5]


def test_masks_are_asked_for_as_soon_as_a_step_is_done(found):
    """So that they are computed while the next step is planned. A row that leaves meanwhile gives its slots back, once each."""
    found.enter(0, params(max_tokens=9), 3, [], [*ENDS])
    found.enter(1, params(max_tokens=1), 3, [], [*ENDS])
    found.masks(rows(0, 1), rows(3, 3))
    found.started(Done(*b"aa"))
    assert [row.asked for row in found.rows.values()] == [4, 3], "the second has no token left"
    assert found.rows[0].process.num_unanswered == 1
    found.leave(0)
    found.enter(0, params(max_tokens=9), 3, [*b"ab"], [*ENDS])
    assert left(found.masks(rows(0), rows(5))) == {"b", "c", *ENDS}
    assert found.rows[0].process.num_unanswered == 0 and not found.rows[0].process.retired
    assert len(found._processes._free_slots) == len({*found._processes._free_slots})


def at_addresses(masks: Masks) -> list[list[int]]:
    num_words = masks.num_words
    return [[*(ctypes.c_int32 * num_words).from_address(address)] for address in masks.addresses().tolist()]


def test_a_step_in_which_every_row_goes_on_reads_masks_where_they_were_written(found):
    """Any other step gets copies, of the same masks."""
    more = {"b", "c", *ENDS}
    for row, max_tokens in enumerate((50, 50, 4)):
        found.enter(row, params(max_tokens=max_tokens), 3, [], [*ENDS])
    first = found.masks(rows(0, 1, 2), rows(3, 3, 3))
    assert first.copies is not None and at_addresses(first) == first.bits.tolist()
    found.started(Done(*b"aaa"))
    masks = found.masks(rows(0, 1, 2), rows(4, 4, 4))
    assert masks.copies is None and masks.at.tolist() == [0, 1, 2]
    written = at_addresses(masks)
    assert [left(masks, number) for number in range(3)] == [more] * 3 and written == masks.bits.tolist()
    found.started(Done(*b"bcb"))
    masks = found.masks(rows(1, 0), rows(5, 5))  # one sits out
    assert masks.copies is not None and left(masks, 0) == ENDS and left(masks, 1) == more
    found.started(Done(EOS, *b"b"))
    masks = found.masks(rows(0, 2, 7), rows(6, 5, 9))  # one without a grammar comes in
    assert masks.copies is not None and masks.at.tolist() == [0, 1] and left(masks, 0) == left(masks, 1) == more
    found.started(Done(*b"bb", 9))
    assert found.masks(rows(0, 2, 7), rows(7, 6, 10)).copies is None
    found.started(Done(*b"bb", 9))  # one comes to its limit
    assert found.masks(rows(0, 7), rows(8, 11)).copies is not None
    found.started(Done(*b"b", 9))
    assert found.masks(rows(0, 7), rows(9, 12)).copies is None
    found.started(Done(*b"b", 9))
    found.enter(0, params(HEAD + 'start: "x"+', max_tokens=50), 3, [], [*ENDS])
    masks = found.masks(rows(0, 7), rows(3, 13))
    assert left(masks) == {"x"}


def test_a_process_that_ends_between_two_steps_changes_no_mask(found):
    for row in range(2):
        found.enter(row, params(max_tokens=50), 3, [], [*ENDS])
    found.masks(rows(0, 1), rows(3, 3))
    found.started(Done(*b"aa"))
    assert found.masks(rows(0, 1), rows(4, 4)).copies is None
    os.kill(found.rows[0].process.pid, signal.SIGKILL)
    found.started(Done(*b"bc"))
    for _ in range(2000):  # rows are late until another process has taken them in
        masks = found.masks(rows(0, 1), rows(5, 5))
        if not masks.late:
            break
    assert left(masks, 0) == {"b", "c", *ENDS} and left(masks, 1) == ENDS


def test_slots_come_back_from_a_grammar_without_rows(make_grammars):
    found = make_grammars(num_slots=1)
    for grammar in (ABC, HEAD + 'start: "x"+', ABC):
        found.enter(0, params(grammar, max_tokens=9), 3, [], [*ENDS])
        first = left(found.masks(rows(0), rows(3)))
        assert len(first) == 1
        found.started(Done(ord(str(*first))))  # the next mask is asked for, and the row leaves
        found.leave(0)


def test_who_comes_into_a_row_does_not_hear_of_who_left_it(found):
    found.enter(0, params(), 3, [], [EOS])
    found.masks(rows(0), rows(3))
    found.started(Done(ord("a")))
    found.leave(0)
    found.enter(0, params(), 3, [], [EOS])
    assert left(found.masks(rows(0), rows(3))) == {"a"}
    found.started(Done(ord("a")))
    found.enter(0, params(), 3, [*b"abb"], [EOS])  # enters again with its output, as after a preemption
    assert left(found.masks(rows(0), rows(6))) == {"b", "c", *ENDS}
    found.masks(rows(0, 1), rows(6, 9))
    found.started(Done(ord("b"), 99))
    found.leave(1)  # the row had no grammar
    found.enter(1, params(), 3, [], [EOS])
    assert left(found.masks(rows(0, 1), rows(7, 3)), 1) == {"a"}


def test_ends_are_settled_by_the_row(found):
    found.enter(0, params(min_tokens=2), 3, [ord("a")], [*ENDS])
    assert left(found.masks(rows(0), rows(4))) == {"b", "c"}
    found.enter(1, params(ignore_eos=True), 3, [ord("a")], [*ENDS])
    assert left(found.masks(rows(1), rows(4))) == {"b", "c"}
    found.enter(2, params(min_tokens=9), 3, [*b"ac"], [*ENDS])
    assert left(found.masks(rows(2), rows(5))) == ENDS  # only the ends are left
    found.enter(5, params(min_tokens=3, stop_token_ids=[ord("b")]), 3, [ord("a")], [*ENDS, ord("b")])
    assert left(found.masks(rows(5), rows(4))) == {"c"}  # a stop token that is text is banned, too
    found.enter(3, params(stop_token_ids=[CALL, ord("z")]), 3, [ord("a")], [EOS, CALL, ord("z")])
    assert left(found.masks(rows(3), rows(4))) == {
        "b",
        "c",
        *ENDS,
        CALL,
    }  # a control token ends the answer where it may end
    found.enter(4, params(stop_token_ids=[CALL]), 3, [], [EOS, CALL])
    assert left(found.masks(rows(4), rows(3))) == {"a"}


def test_what_goes_wrong_goes_wrong_for_its_row_alone(found):
    found.enter(0, params(), 3, [ord("x")], [EOS])  # an output that the grammar does not allow
    found.enter(1, params("start: /[/"), 3, [], [EOS])
    found.enter(2, params(), 3, [], [EOS])
    masks = found.masks(rows(0, 1, 2), rows(4, 3, 3))
    assert masks is not None and masks.failures.keys() == {0, 1} and "compiled" in masks.failures[1]
    assert (masks.bits[:2] == -1).all() and masks.bits[2].any() and not (masks.bits[2] == -1).all()


def prepared(own: Grammars, grammar: str, forgets: Sequence[str] = ()) -> int:
    """Returns the bytes that it takes."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    own.prepare(grammar, list(forgets), done.put)
    return done.get(timeout=120)


def pid_of(own: Grammars, grammar: str) -> int:
    return own._processes._by_grammar[grammar].pid


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "not within a minute"
        time.sleep(0.01)


def until_in_time(own: Grammars, row: int, length: int, token: int = 0) -> Masks:
    """Sample the same position again until its mask is not late; then `token` is sampled."""
    for number in itertools.count(1):
        masks = own.masks(rows(row), rows(length))
        assert masks is not None and number < 10_000
        own.started(Done(SPOILED if masks.late else token))
        if not masks.late:
            return masks
        time.sleep(0.005)
    raise AssertionError


SPOILED = 7  # a token that must not count
SLOW = HEAD + "start: " + " | ".join(['"a"'] * 12_000)  # its first mask takes about 0.2 s


def test_what_was_prepared_is_at_hand_until_it_may_go(make_grammars):
    own = make_grammars()
    first, second = (HEAD + f'start: "a" "{word}"' for word in ("one", "two"))
    prepared(own, first)
    prepared(own, "start: /[/")  # also reported as ready: a request that enters with it fails by itself
    own.enter(0, params(first), 0, [], [])
    own.enter(1, params("start: /[/"), 0, [], [])
    masks = own.masks(rows(0, 1), rows(0, 0))
    assert masks is not None and masks.failures.keys() == {1} and not masks.late
    own.leave(0)
    pid = pid_of(own, first)
    prepared(own, second, [first])
    wait_until(lambda: not is_alive(pid))
    assert first not in own._processes._by_grammar and is_alive(pid_of(own, second))
    pid = pid_of(own, second)
    prepared(own, "", [second])  # nothing is compiled, and one goes
    wait_until(lambda: not is_alive(pid))
    assert not own._processes._by_grammar.keys() & {"", second}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say it")
def test_a_compiled_grammar_says_how_much_memory_it_takes(make_grammars):
    own = make_grammars()
    small, large = prepared(own, ABC), prepared(own, SLOW)
    assert 2**19 < small < 2**24 and large > small + 2**20
    adjusted = Path(f"/proc/{pid_of(own, ABC)}/oom_score_adj").read_text()
    assert int(adjusted) == 1000, "without memory the kernel ends it, and not the engine"
    assert prepared(own, "start: /[/") == 0, "it has no process"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_process_computes_what_the_library_does(make_grammars, num_threads):
    """Five rows of one grammar, at different places, with one thread and with several."""
    own, text = make_grammars(num_threads), b"abbbbc"
    for row in range(5):
        own.enter(row, params(max_tokens=400), 3, [*text[:row]], [*ENDS])
    for number in range(2):
        lens = rows(*range(3 + number, 8 + number))
        masks = own.masks(rows(*range(5)), lens)
        for row in range(5):
            matcher = LLMatcher(VOCABULARY.tokenizer(SIZE), ABC, log_level=0)
            assert matcher.consume_tokens([*text[: row + number]])
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")[:SIZE]
            assert left(masks, row) == {chr(token) if token < 256 else int(token) for token in np.flatnonzero(bits)}
        own.started(Done(*text[number : 5 + number]))


def test_a_late_mask_is_there_later_and_others_are_in_time(make_grammars):
    own = make_grammars(limits=GrammarLimits(most_wait=0.0))
    prepared(own, SLOW)
    prepared(own, ABC)
    assert pid_of(own, SLOW) != pid_of(own, ABC)
    os.kill(pid_of(own, SLOW), signal.SIGSTOP)  # a busy machine may take longer for the other mask than this one takes
    own.enter(0, params(SLOW, max_tokens=1000), 3, [], [*ENDS])
    own.enter(1, params(max_tokens=1000), 3, [], [*ENDS])
    assert left(until_in_time(own, 1, 3, ord("a"))) == {"a"}
    masks = own.masks(rows(0, 2), rows(3, 9))
    assert masks is not None and masks.late == [0]
    own.started(Done(SPOILED, 1))
    # A step that was planned before: for the late row, its position follows a token that does not count.
    masks = own.masks(rows(0), rows(4))
    assert masks is not None and masks.late == [0]
    own.started(Done(SPOILED))
    assert left(until_in_time(own, 1, 4)) == {"b", "c", *ENDS}
    os.kill(pid_of(own, SLOW), signal.SIGCONT)
    assert left(until_in_time(own, 0, 3, ord("a"))) == {"a"}
    until_in_time(own, 1, 5)
    assert own.rows[0].tokens == [ord("a")], "and nothing that was sampled before"


def test_a_grammar_that_takes_too_long_fails_alone(make_grammars):
    own = make_grammars(limits=GrammarLimits(60.0, step_seconds=0.05, most_wait=0.05))
    slower = HEAD + "start: " + " | ".join(['"a"'] * 20_000)  # half a second for its first mask
    prepared(own, slower)
    prepared(own, ABC)
    assert own._processes._by_grammar[slower].was_ready, "it is compiled in less than the limit"
    own.enter(0, params(slower, max_tokens=1000), 3, [], [*ENDS])
    own.enter(1, params(max_tokens=1000), 3, [], [*ENDS])
    pid, text = pid_of(own, slower), itertools.chain(b"a", itertools.repeat(ord("b")))
    for length, token in enumerate(text, 3):
        masks = own.masks(rows(0), rows(3))
        assert masks is not None
        own.started(Done(SPOILED))
        if masks.failures:
            break
        assert masks.late == [0]
        assert left(until_in_time(own, 1, length, token)) == ({"a"} if length == 3 else {"b", "c", *ENDS})
    assert masks.failures.keys() == {0} and "takes too long" in masks.failures[0]
    assert "--grammar-step-seconds" in masks.failures[0] and length > 3
    wait_until(lambda: not is_alive(pid))
    own.leave(0)
    own.enter(0, params(max_tokens=1000), 3, [], [*ENDS])
    assert left(until_in_time(own, 0, 3)) == {"a"}


@pytest.mark.parametrize("is_server_stopped", [True, False])
def test_only_a_process_that_alone_stands_still_is_ended(make_grammars, monkeypatch, is_server_stopped):
    monkeypatch.setattr(row_processes, "_STANDSTILL", 0.15)  # 0.3 s until a process is ended
    own = make_grammars(limits=GrammarLimits(most_wait=0.0))
    prepared(own, ABC)
    process = own._processes._by_grammar[ABC]
    os.kill(process.pid, signal.SIGSTOP)
    own.enter(0, params(max_tokens=1000), 3, [], [*ENDS])
    for pause in (0, 0.6, 0) if is_server_stopped else itertools.repeat(0.02, 1000):  # between two steps
        time.sleep(pause)
        masks = own.masks(rows(0), rows(3))
        assert masks is not None and masks.late == [0] and not masks.failures
        own.started(Done(SPOILED))
        if process.is_slow:
            break
    assert process.is_slow is not is_server_stopped
    if is_server_stopped:
        os.kill(process.pid, signal.SIGCONT)
    assert left(until_in_time(own, 0, 3)) == {"a"}, "if the process was ended, by another"


def test_an_engine_that_is_closed_at_once_starts_no_process_later():
    """The timer of warm_later() may run out after close()."""
    own = Grammars(SIZE, lambda: VOCABULARY, 1, limits=PATIENT)
    own.close()
    own._processes.warm()
    assert own._processes._fork_server is None


def left_of(masks: Masks, number: int) -> set[str | int]:
    return left(Masks(masks.at, masks.bits, {}), number)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: R0\n" + "".join(f"R{n}: R{n + 1}\n" for n in range(10_000)) + 'R10000: "x"\n',
        "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(10_000)) + 'r10000: "x"\n',
        "start: %json "
        + json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(6000)} | {"d6000": {"const": "x"}},
            }
        ),
    ],
    ids=["terminals", "rules", "references"],
)
def test_chains_have_room_on_the_stack(found, grammar):
    found.enter(0, params(HEAD + grammar, max_tokens=1000), 3, [], [*ENDS])
    masks = found.masks(rows(0), rows(3))
    assert left(masks) in ({"x"}, {'"'})


def test_what_needs_too_much_memory_fails_alone(make_grammars):
    own = make_grammars(limits=GrammarLimits(most_wait=60.0, memory_bytes=2**21))
    large = HEAD + "start: " + " | ".join(f'"{n}"' for n in range(30_000))
    own.enter(0, params(large, max_tokens=1000), 3, [], [*ENDS])
    own.enter(1, params(max_tokens=1000), 3, [], [*ENDS])
    masks = own.masks(rows(0, 1), rows(3, 3))
    assert masks is not None and masks.failures.keys() == {0} and "SIGABRT" in masks.failures[0]
    assert left_of(masks, 1) == {"a"}


def test_a_row_goes_on_where_its_process_was_killed(found):
    found.enter(0, params(max_tokens=1000), 3, [], [*ENDS])
    assert left(found.masks(rows(0), rows(3))) == {"a"}
    found.started(Done(ord("a")))
    os.kill(pid_of(found, ABC), signal.SIGKILL)
    assert left(until_in_time(found, 0, 4, ord("c"))) == {"b", "c", *ENDS}
    # Its fork server is killed, and all processes with it.
    server = found._processes._fork_server._process
    server.kill()
    server.wait()
    assert left(until_in_time(found, 0, 5)) == ENDS
    found.enter(1, params(max_tokens=1000), 3, [ord("a")], [*ENDS])
    assert left(until_in_time(found, 1, 4)) == {"b", "c", *ENDS}


def test_a_row_that_ends_its_process_fails_and_its_siblings_go_on(make_grammars):
    """Two rows of one grammar. The process dies while it works on the first: that one is at fault."""
    own = make_grammars(limits=GrammarLimits(most_wait=0.0, step_seconds=30.0))
    prepared(own, SLOW)
    own.enter(0, params(SLOW, max_tokens=1000), 3, [], [*ENDS])
    assert own.masks(rows(0), rows(3)).late == [0]
    wait_until(lambda: own._processes.slots.is_busy(own.rows[0].slot))
    os.kill(pid_of(own, SLOW), signal.SIGSEGV)
    own.enter(1, params(SLOW, max_tokens=1000), 3, [], [*ENDS])
    wait_until(lambda: own.masks(rows(0, 1), rows(3, 3)).failures)
    assert own.masks(rows(0, 1), rows(3, 3)).failures.keys() == {0} and "SIGSEGV" in own.rows[0].failure
    assert left(until_in_time(own, 1, 3)) == {"a"}


def test_a_position_can_be_sampled_again(found):
    """A replay does so where a mask was late when it was recorded."""
    found.enter(0, params(max_tokens=1000), 3, [], [*ENDS])
    for length, token in ((3, "a"), (4, "b"), (5, "c")):
        found.masks(rows(0), rows(length))
        found.started(Done(ord(token)))
    assert left(found.masks(rows(0), rows(4))) == {"b", "c", *ENDS}
    found.started(Done(ord("c")))
    assert left(found.masks(rows(0), rows(5))) == ENDS


def test_ranks_agree_on_what_is_late(make_grammars):
    said: list[list[int]] = []
    own = make_grammars(agree=lambda states: said.append(states) or [*map(max, states, worst)])
    for row in range(3):
        own.enter(row, params(max_tokens=1000), 3, [], [*ENDS])
    worst = [IN_TIME, LATE, FAILED]
    masks = own.masks(rows(0, 1, 2), rows(3, 3, 3))
    assert masks is not None and masks.late == [1] and masks.failures.keys() == {2} and said == [[IN_TIME] * 3]
    own.started(Done(ord("a"), SPOILED, SPOILED))
    worst = [IN_TIME]
    assert left(own.masks(rows(1), rows(3))) == {"a"}  # it was there, and is used now
    own.started(Done(ord("a")))
    assert left(own.masks(rows(1), rows(4))) == {"b", "c", *ENDS}
    assert own.masks(rows(9), rows(4)) is None and len(said) == 3, "ranks are asked only where there is a grammar"
