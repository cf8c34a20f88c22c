"""Masks over logits: torch's, the CPU's native kernels' and the GPU's choose the same tokens, and follow the rows' own state."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from octavo.messages import SamplingParams
from octavo.sampling.grammar.masks import UNLIKELIEST, Grammars, Masks, apply
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState
from tests.interpreter import mend
from tests.native import native
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

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def tokens(self) -> tuple[int, ...]:
        return self._tokens


def left(masks: Masks | None, number: int = 0) -> set[str | int]:
    assert masks is not None and not masks.failures
    bits = np.unpackbits(masks.bits[number].view(np.uint8), bitorder="little")[:SIZE]
    return {chr(token) if token < 256 else int(token) for token in np.flatnonzero(bits)}


ENDS: set[str | int] = {EOS, EOS + 1}
HEAD = '%llguidance {"no_forcing": true}\n'
ABC = HEAD + 'start: "a" "b"* "c"?'


def grammars() -> Grammars:
    return Grammars(SIZE, lambda: VOCABULARY, 2)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def params(grammar: str = ABC, **values) -> SamplingParams:
    return SamplingParams(grammar=grammar, **values)


def test_masks_follow_the_tokens_of_the_step_before():
    found = grammars()
    assert found.masks(rows(0, 1), rows(5, 5)) is None
    found.enter(4, params(), 3, [], [*ENDS])
    masks = found.masks(rows(2, 4), rows(5, 3))
    assert masks is not None and masks.at.tolist() == [1] and left(masks) == {"a"}
    found.started(Done(99, ord("a")))
    assert left(found.masks(rows(4), rows(4))) == {"b", "c", *ENDS}
    found.started(Done(ord("b")))
    assert found.masks(rows(2), rows(6)) is None  # a step without the row: the row's state is kept
    found.started(Done(7))
    assert left(found.masks(rows(4), rows(5))) == {"b", "c", *ENDS}
    found.started(Done(ord("c")))
    assert left(found.masks(rows(4), rows(6))) == ENDS
    found.started(Done(EOS))
    assert len(left(found.masks(rows(4), rows(7)))) == SIZE  # the answer is over: tokens sampled now are discarded
    found.leave(4)
    assert found.masks(rows(4), rows(7)) is None


def test_who_comes_into_a_row_does_not_hear_of_who_left_it():
    found = grammars()
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


def test_ends_are_settled_by_the_row():
    found = grammars()
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


def test_what_goes_wrong_goes_wrong_for_its_row_alone():
    found = grammars()
    found.enter(0, params(), 3, [ord("x")], [EOS])  # an output that the grammar does not allow
    found.enter(1, params("start: /[/"), 3, [], [EOS])
    found.enter(2, params(), 3, [], [EOS])
    masks = found.masks(rows(0, 1, 2), rows(4, 3, 3))
    assert masks is not None and masks.failures.keys() == {0, 1} and "compiled" in masks.failures[1]
    assert (masks.bits[:2] == -1).all() and masks.bits[2].any() and not (masks.bits[2] == -1).all()


def test_what_was_prepared_is_at_hand_until_it_may_go():
    own, told = grammars(), []
    first, second = (HEAD + f'start: "a" "{word}"' for word in ("one", "two"))
    own.prepare(first, [], lambda: told.append(1))
    own.prepare(
        "start: /[/", [], lambda: told.append(2)
    )  # also reported as ready: a request that enters with it fails by itself
    own._pool.submit(lambda: None).result()
    assert told == [1, 2]
    own.enter(0, params(first), 0, [], [])
    own.enter(1, params("start: /[/"), 0, [], [])
    assert not isinstance(own.rows[0].compiled, Future), "no thread is asked for it"
    masks = own.masks(rows(0, 1), rows(0, 0))
    assert masks is not None and masks.failures.keys() == {1}
    own.leave(0)
    own._pool.submit(lambda: None).result()
    assert own._used.keys() == {first}
    own.prepare(second, [first], lambda: told.append(3))
    own._pool.submit(lambda: None).result()
    assert not own._used and first not in own._compiled and told == [1, 2, 3]
