"""What requests draft from recent outputs of their key: what stands there, the longest of it, within bounds, and again after a restart from
a recorded state."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import GenerateRequest, SamplingParams
from octavo.messages.speculation import SpeculationSettings
from octavo.schedule.drafts import outputs as outputs_file
from octavo.schedule.drafts.base import Offer
from octavo.schedule.drafts.lengths import CostSpeculation
from octavo.schedule.drafts.outputs import CONTEXT, INDEXED_AT_ONCE, LEAST_OUTPUT, RecentOutputs, RecentState
from octavo.schedule.drafts.recent import Follower, FollowerState, RecentDrafter
from octavo.schedule.drafts.suffix import SuffixDrafter
from octavo.schedule.request import Request
from octavo.schedule.step_costs import StepShape

KEY = (b"key", "")
texts = st.lists(st.integers(0, 2), min_size=LEAST_OUTPUT, max_size=40)


def longest_end(tokens: list[int], kept: list[list[int]]) -> int:
    """Length of the longest end of `tokens` that stands in one of the outputs."""
    most = max(map(len, kept), default=0)
    for length in range(min(most, len(tokens)), 0, -1):
        end = tokens[-length:]
        if any(output[at : at + length] == end for output in kept for at in range(len(output) - length + 1)):
            return length
    return 0


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, max_size=5), st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_the_longest_match_is_followed(kept, text, most):
    """The best that there is, as brute force finds it, at every token; and what is drafted stands behind it."""
    outputs = RecentOutputs(2 * len(kept) + 2)
    for output in kept:
        outputs.add(KEY, output, 0)
    outputs.index([KEY])
    follower = Follower(outputs, KEY, 0)
    for length in range(1, len(text) + 1):
        follower.learn(text[:length])
        assert follower.match == longest_end(text[:length], kept)
        draft = follower.drafts(most).tokens
        end = text[length - follower.match : length] + draft
        assert len(draft) <= most
        assert not draft or any(
            output[at : at + len(end)] == end for output in kept for at in range(len(output) - len(end) + 1)
        )


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, max_size=8), texts, st.integers(1, 5), st.randoms(use_true_random=False))
def test_outputs_that_come_while_a_text_is_followed(kept, text, most, r):
    """What is followed always stands there, in outputs that are not forgotten, however far these are indexed. A state that was written and
    read in between changes nothing."""
    outputs, again = RecentOutputs(most), RecentOutputs(most)
    prompt_len = r.randrange(1, len(text))
    follower, other = (Follower(each, KEY, prompt_len) for each in (outputs, again))
    waiting = list(kept)
    for length in range(prompt_len, len(text) + 1):
        if waiting and r.random() < 0.3:
            output = waiting.pop()
            for each in (outputs, again):
                each.add(KEY, output, 0)
        count = r.randrange(30)
        for each in (outputs, again):
            each.index([KEY], count)
        if r.random() < 0.8:
            follower.learn(text[:length])
            other.learn(text[:length])
            parts, part, place, match = outputs.parts(KEY), follower._part, follower._place, follower.match
            assert part is None or (part in parts and match > 0)
            assert part is None or part.text[place - match : place].tolist() == text[length - match : length]
            assert other.drafts(9) == follower.drafts(9) and other.match == match
        if r.random() < 0.3:
            encoded = msgspec.msgpack.encode((again.state(), other.state()))
            recent, followed = msgspec.msgpack.decode(encoded, type=tuple[RecentState, FollowerState])
            again = RecentOutputs(most)
            again.restore(recent)
            other = Follower(again, KEY, prompt_len)
            other.restore(followed)
            assert again.state() == outputs.state()


def output_of(number: int, length: int = 20) -> list[int]:
    """Unlike all others."""
    return [*range(1000 * number, 1000 * number + length)]


def kept_of(outputs: RecentOutputs, numbers: range, key: tuple[bytes, str] = KEY) -> list[int]:
    text = [token for part in outputs.parts(key) for token in part.text]
    return [number for number in numbers if 1000 * number in text]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 100])
def test_the_last_outputs_are_kept(most):
    outputs = RecentOutputs(most)
    for number in range(50):
        outputs.add(KEY, output_of(number), 0)
        kept = kept_of(outputs, range(50))
        assert kept == list(range(number + 1))[-len(kept) :]
        assert min(number + 1, max(1, most // 2)) <= len(kept) <= most
        assert outputs.num_tokens == len(kept) * 21


def test_outputs_take_no_more_than_they_may(monkeypatch):
    monkeypatch.setattr(outputs_file, "MAX_TOKENS", 200)
    monkeypatch.setattr(outputs_file, "MAX_TOKENS_OF_ALL", 1000)
    monkeypatch.setattr(outputs_file, "MAX_KEYS", 12)
    outputs, r = RecentOutputs(1000), random.Random(0)
    used: list[tuple[bytes, str]] = []
    for number in range(600):
        key = (b"%d" % r.randrange(20 if number < 300 else 500), "")
        length = r.choice([8, 8, 20, 90, 99, 100, 300])
        outputs.add(key, output_of(number, length), 0)
        used = [each for each in used if each != key] + [key]
        sizes = [sum(len(part.text) for part in parts) for parts in outputs._parts.values()]
        assert outputs.num_tokens == sum(sizes) <= 1000 and max(sizes) <= 200 and len(sizes) <= 12
        assert list(outputs._parts) == used[-len(sizes) :], "the longest unused are forgotten"
        assert outputs.parts(key)[-1].text.tolist()[:-1][-min(length, 99) :] == output_of(number, length)[-99:]


def test_short_outputs_are_not_kept_and_the_end_of_the_prompt_is():
    outputs = RecentOutputs(10)
    outputs.add(KEY, [1] * 50 + [2] * (LEAST_OUTPUT - 1), 50)
    assert not outputs.parts(KEY) and not outputs.num_tokens
    outputs.add(KEY, [1] * 50 + [2] * LEAST_OUTPUT, 50)
    assert outputs.parts(KEY)[0].text.tolist() == [1] * CONTEXT + [2] * LEAST_OUTPUT + [-3]
    outputs.index([KEY])
    follower = Follower(outputs, KEY, 30)
    follower.learn([7] * 10 + [1] * 20)
    assert follower.match == CONTEXT and follower.drafts(4).tokens == [2] * 4, "before its first token"


def test_what_is_kept_is_indexed_a_little_at_a_time():
    outputs = RecentOutputs(10)
    outputs.add(KEY, output_of(1, 3 * INDEXED_AT_ONCE), 0)
    outputs.add((b"other", ""), output_of(2, 3 * INDEXED_AT_ONCE), 0)
    (part,), (other,) = outputs.parts(KEY), outputs.parts((b"other", ""))
    assert part.num_indexed == 0, "only when it is asked for"
    for at in range(1, 5):
        outputs.index([KEY])
        assert part.num_indexed == min(at * INDEXED_AT_ONCE, len(part.text))
    assert other.num_indexed == 0
    outputs.index([KEY, (b"other", "")], 10)
    assert other.num_indexed == 10


class Told(SuffixDrafter):
    def __init__(self, match: int, chance: float, count: int = 1) -> None:
        self.match, self._offer = match, Offer([1] * count, [chance] * count)

    def learn(self, tokens):
        pass

    def drafts(self, most):
        return self._offer


@pytest.mark.parametrize(
    ("own", "recent", "is_recent"),
    [
        ((5, 0.6), (9, 0.8), True),
        ((9, 0.8), (5, 0.6), False),
        ((9, 0.5), (5, 0.6), True),  # the longer one was wrong more often
        ((5, 0.6), (6, 0.6), True),
        ((6, 0.6), (6, 0.6), False),
        ((6, 0.9, 0), (6, 0.1), True),
        ((6, 0.1), (6, 0.9, 0), False),
    ],
)
def test_the_likelier_source_is_drafted_from(own, recent, is_recent):
    own, recent = Told(*own), Told(*recent)
    assert (RecentDrafter(own, recent).drafts(4) is recent.drafts(4)) == is_recent


def request_of(number: int, tokens: list[int], prompt_len: int, owner: bytes = b"", **params) -> Request:
    params = SamplingParams(seed=0, max_tokens=100, **params)
    request = Request(number, GenerateRequest(f"r{number}", tokens[:prompt_len], params, [], owner=owner), 0)
    request.tokens = tokens
    return request


def test_both_sources_learn_what_they_are_worth():
    """The recent output goes on differently each time; what the request itself repeats is right."""
    speculation = CostSpeculation(SpeculationSettings("suffix", 8, is_adaptive=False, max_cached_requests=4))
    r = random.Random(0)
    unit = [*range(100, 112)]
    first = request_of(0, [1, 2, 3] + [token for _ in range(30) for token in (*unit, r.randrange(200, 900))], 3)
    speculation.attach(first)
    speculation.finished(first)
    text = [1, 2, 3] + [token for _ in range(30) for token in (*unit, 50, 51)]
    second = request_of(1, text[:4], 3)
    speculation.attach(second)
    num_right = []
    for length in range(4, len(text) - 8):
        second.tokens = text[:length]
        drafts = speculation.choose([(0, second)], StepShape(1, 0, length, 0), None, 8)
        tokens = [token for draft in drafts for token in draft.tokens]
        num_right.append(next((at for at, (a, b) in enumerate(zip(tokens, text[length:], strict=False)) if a != b), 8))
    assert sum(num_right[:12]) > 30, "the first time, from the recent output"
    assert sum(num_right[-140:]) > 8 * 130, "then from its own text"


def test_keys_salts_and_wishes_are_kept_apart():
    text = [1, 2, 3, *output_of(7)]

    def drafted(**second) -> bool:
        speculation = CostSpeculation(SpeculationSettings("suffix", 8, is_adaptive=False, max_cached_requests=4))
        first = request_of(0, text, 3, owner=b"a", **second.pop("first", {}))
        speculation.attach(first)
        if first.drafter is not None:
            speculation.finished(first)
        request = request_of(1, text[:10], 3, **{"owner": b"a", **second})
        speculation.attach(request)
        return bool(request.drafter is not None and speculation.choose([(0, request)], StepShape(1, 0, 10, 0), None, 8))

    assert drafted()
    assert drafted(prefix_salt="x", first={"prefix_salt": "x"})
    assert not drafted(owner=b"b") and not drafted(owner=b"")
    assert not drafted(prefix_salt="x") and not drafted(first={"prefix_salt": "x"})
    assert not drafted(adapter="x") and not drafted(first={"adapter": "x"})
    assert not drafted(first={"use_speculation": False}) and not drafted(use_speculation=False)
    assert CostSpeculation(SpeculationSettings("suffix"))._recent is None, "off by default"


def test_outputs_are_forgotten_with_cached_prefixes():
    speculation = CostSpeculation(SpeculationSettings("suffix", 8, is_adaptive=False, max_cached_requests=4))
    text = [1, 2, 3, *output_of(7)]
    first, second = request_of(0, text, 3), request_of(1, text[:10], 3)
    for request in (first, second):
        speculation.attach(request)
    speculation.finished(first)
    assert speculation.choose([(0, second)], StepShape(1, 0, 10, 0), None, 8)
    speculation.forget()
    assert not speculation.choose([(0, second)], StepShape(1, 0, 10, 0), None, 8)
    assert speculation.state() is not None and not speculation.state().recent.keys
