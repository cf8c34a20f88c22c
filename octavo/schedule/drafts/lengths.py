"""CostSpeculation: how many drafted tokens a step verifies, by what they cost and how likely they are (decision 048)."""

import heapq
from collections.abc import Sequence

import msgspec

from octavo.messages import FROM_GRAMMAR, FROM_MODEL, Draft
from octavo.messages.speculation import SpeculationSettings
from octavo.schedule.drafts.base import Drafter, Offer
from octavo.schedule.drafts.grammar import GrammarDrafter
from octavo.schedule.drafts.model import ModelDrafter
from octavo.schedule.drafts.ngram import NGramDrafter
from octavo.schedule.drafts.outputs import RecentOutputs, RecentState
from octavo.schedule.drafts.recent import Follower, RecentDrafter, recent_of
from octavo.schedule.drafts.suffix import SuffixDrafter
from octavo.schedule.request import Request
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.step_costs import StepCosts, StepShape

MARGIN = 1.1
"""A drafted token must bring so many times the tokens per second that the step has without it: chances and costs are estimates."""
LEAST_GAIN = 1.03
"""Least ratio of the tokens per second of a step with drafts, host time included, to those without."""
PROBED_ROWS = 16
"""Number of rows that are asked first where there are many, because asking takes time. If drafts of none of them pay, the others are not asked."""
FEW_ROWS = 8
MANY_ROWS = 32
"""With more rows, drafts are looked for less often after each time when none paid: every DRAIN_EVERY · 2, · 4, … steps. With fewer, looking
takes little, and prompts, beside which nothing is drafted, end most stretches of drafting."""
LEAST_COST = 0.02
"""A drafted token costs at least this share of a step's constant part, whatever was measured."""
SHARED_BY = 32
"""Steps that share what it costs a draft model to catch up with a row, if the row has as many left."""
DRAIN_EVERY = 16
"""A plan with drafts is committed before the next one is made, and so is a plan whose rows have drafts that would pay by the tokens known while a
step is in flight. With more than FEW_ROWS rows, or with a draft model, this is checked once in this number of steps."""


def speculation(settings: SpeculationSettings | None) -> "CostSpeculation | None":
    return None if settings is None else CostSpeculation(settings)


class SpeculationState(msgspec.Struct, array_like=True, gc=False):
    num_in_vain: int
    recent: RecentState


class CostSpeculation:
    def __init__(self, settings: SpeculationSettings) -> None:
        self.settings = settings
        self._recent = RecentOutputs(settings.max_cached_requests) if settings.max_cached_requests else None
        self._num_in_vain = 0  # times in succession that no draft was found that pays; only decides when to look again

    def attach(self, request: Request) -> None:
        params = request.params
        if request.pooling is None and not params.use_beam_search and params.use_speculation:
            drafter = self._drafter(request)
            if params.grammar and self.settings.asks_grammars and not isinstance(drafter, ModelDrafter):
                drafter = GrammarDrafter(drafter)
            request.drafter = drafter

    def finished(self, request: Request) -> None:
        recent = recent_of(request.drafter)
        if recent is not None:
            recent.follower.keep(request.tokens, request.prompt_len)

    def forget(self) -> None:
        if self._recent is not None:
            self._recent.forget()

    def state(self) -> SpeculationState | None:
        """What drafts depend on beside the tokens of requests and what is kept with these. None: nothing."""
        return None if self._recent is None else SpeculationState(self._num_in_vain, self._recent.state())

    def restore(self, state: SpeculationState) -> None:
        assert self._recent is not None
        self._num_in_vain = state.num_in_vain
        self._recent.restore(state.recent)

    def _drafter(self, request: Request) -> Drafter:
        settings, prompt_len, prediction = self.settings, request.prompt_len, request.params.prediction_ids
        if settings.is_by_model and not prediction:  # which says more than a model can
            return ModelDrafter()
        if settings.method == "suffix":
            own = SuffixDrafter(prompt_len, prediction)
            if self._recent is None:
                return own
            key = (request.owner, request.params.prefix_space)
            return RecentDrafter(own, Follower(self._recent, key, prompt_len))
        return NGramDrafter(prompt_len, prediction, settings.prompt_lookup_min, settings.prompt_lookup_max)

    def choose(
        self,
        rows: Sequence[tuple[int, Request]],
        shape: StepShape,
        costs: StepCosts | None,
        room: int,
        limit: StallLimit | None = None,
    ) -> list[Draft]:
        if self._recent is not None:
            drafters = (recent_of(request.drafter) for _, request in rows)
            self._recent.index(dict.fromkeys(each.follower.key for each in drafters if each is not None))
        if not self.settings.is_adaptive:
            offers = self._offers(rows, room, has_grammars=True)
            _take_all(offers, room)
            return _drafts(offers)
        if costs is None or not _could_pay(shape, costs):
            return []
        if limit is not None:
            room = min(room, limit.drafts_within(costs, shape))
        stride = len(rows) // PROBED_ROWS
        if stride > 1:
            start = len(rows[0][1].tokens) % stride  # others than the last time
            probed = rows[start::stride]
            if not self._paying(probed, shape, costs, max(1, room * len(probed) // len(rows)), 0.0):
                self._num_in_vain += 1
                return []
        found = self._paying(rows, shape, costs, room, costs.host_seconds(shape.rows), has_grammars=True)
        self._num_in_vain = 0 if found else self._num_in_vain + 1
        return found

    def _paying(
        self,
        rows: Sequence[tuple[int, Request]],
        shape: StepShape,
        costs: StepCosts,
        room: int,
        host_seconds: float,
        has_grammars: bool = False,
    ) -> list[Draft]:
        """Drafts of these rows as far as they pay. `host_seconds`: that the step takes longer if there are any. `has_grammars`: grammars may
        be asked."""
        offers = self._offers(rows, room, has_grammars)
        if not offers:
            return []
        step = _Step(costs, float(shape.rows), costs.decode_seconds(shape), room)
        step.add_text([each for each in offers if each.offer.tokens[0] != FROM_MODEL])
        step.add_passes([each for each in offers if each.offer.tokens[0] == FROM_MODEL])
        return [] if host_seconds and not step.pays_with(host_seconds) else _drafts(offers)

    def _offers(self, rows: Sequence[tuple[int, Request]], room: int, has_grammars: bool = False) -> list["_Offered"]:
        """`has_grammars`: also of what grammars may force. Whether one does is known only in the worker, so no plan waits for that."""
        offers: list[_Offered] = []
        for at, request in rows:
            assert request.drafter is not None
            request.drafter.learn(request.tokens)
            num_tokens = len(request.tokens)
            most = min(room, self.settings.most, request.max_len - num_tokens - 1)
            if self.settings.max_len and isinstance(request.drafter, ModelDrafter):
                most = min(most, max(0, self.settings.max_len - num_tokens))
            offer = request.drafter.drafts(most)
            share = 1.0
            if has_grammars and isinstance(request.drafter, GrammarDrafter):
                offer = request.drafter.forced(most, num_tokens, offer)
                if offer.tokens and offer.tokens[0] == FROM_GRAMMAR:
                    share = request.drafter.share
            if offer.tokens:
                offers.append(_Offered(at, request, offer, share))
        return offers

    def wants_drain(
        self, num_steps: int, requests: Sequence[Request], shape: StepShape, costs: StepCosts | None
    ) -> bool:
        is_adaptive, is_by_model = self.settings.is_adaptive, self.settings.is_by_model
        if not is_adaptive and is_by_model:
            return True
        if shape.rows > FEW_ROWS or is_by_model:
            often = 0
            if shape.rows > MANY_ROWS:
                often = min(self._num_in_vain, (shape.rows - 1).bit_length() - FEW_ROWS.bit_length() + 1, 4)
            if num_steps % (DRAIN_EVERY << often):
                return False
        if is_adaptive and costs is None:
            return False
        if not is_by_model:
            return self._would_pay(requests, shape, costs if is_adaptive else None)
        assert costs is not None
        # A pass for all rows, and a token of each that is certain to count.
        seconds, position = costs.decode_seconds(shape), shape.context // max(shape.rows, 1)
        share = costs.draft_low or costs.draft
        return share > 0 and seconds > MARGIN * (share * costs.seconds(shape) + shape.rows * _cost(costs, position))

    def _would_pay(self, requests: Sequence[Request], shape: StepShape, costs: StepCosts | None) -> bool:
        """Whether some of these rows would have drafts that pay if they continued what is known of them. Asked while a step is on its way, whose
        tokens are not known yet: so looking takes no time from the device, and nothing waits where nothing would be drafted. `costs`: None: any
        draft pays."""
        if costs is not None and not _could_pay(shape, costs):
            return False
        stride = max(1, len(requests) // PROBED_ROWS)
        start = len(requests[0].tokens) % stride  # others than the last time
        rows = [(at, requests[at]) for at in range(start, len(requests), stride) if requests[at].drafter is not None]
        room = len(rows) * self.settings.most
        if costs is None:
            return bool(self._offers(rows, room))
        if self._paying(rows, shape, costs, room, 0.0):
            return True
        self._num_in_vain += 1
        return False


class _Offered:
    """What was offered for a row, and how much of it is verified."""

    __slots__ = ("at", "length", "offer", "request", "share")

    def __init__(self, at: int, request: Request, offer: Offer, share: float = 1.0) -> None:
        """`share`: of the times that it is chosen at which there is such a draft; else it costs nothing, and brings nothing."""
        self.at, self.request, self.offer, self.length, self.share = at, request, offer, 0, share


class _Step:
    """A step as drafts are added to it: tokens that it is expected to bring, the seconds that it takes, and room for drafted tokens."""

    def __init__(self, costs: StepCosts, tokens: float, seconds: float, room: int) -> None:
        self._costs, self._tokens, self._seconds, self._room = costs, tokens, seconds, room
        self._without = tokens / seconds  # tokens per second

    @property
    def _least(self) -> float:
        """Tokens per second that anything that is added must bring."""
        return MARGIN * self._tokens / self._seconds

    def pays_with(self, host_seconds: float) -> bool:
        """Whether what was added pays if it also takes this time."""
        return self._tokens > LEAST_GAIN * self._without * (self._seconds + host_seconds)

    def _add(self, gain: float, cost: float, count: int) -> None:
        self._tokens, self._seconds, self._room = self._tokens + gain, self._seconds + cost, self._room - count

    def add_text(self, offers: Sequence[_Offered]) -> None:
        """As much of each offer as pays: tokens are added, the best for its cost first, while each brings more per second than the step
        has."""
        costs = self._costs
        # (−expected tokens per second, number of the offer, chance that it and all before it count, its cost)
        heap: list[tuple[float, int, float, float]] = []
        for number, offered in enumerate(offers):
            chance, cost = offered.offer.chances[0], _cost(costs, offered.request.computed)
            heap.append((-chance / cost, number, chance, cost))
        heapq.heapify(heap)
        while heap and self._room:
            worth, number, chance, cost = heap[0]
            if -worth <= self._least:
                break
            offered = offers[number]
            self._add(chance * offered.share, cost * offered.share, 1)
            offered.length += 1
            if offered.length == len(offered.offer.tokens):
                heapq.heappop(heap)
                continue
            chance *= offered.offer.chances[offered.length]
            cost = _cost(costs, offered.request.computed + offered.length)
            heapq.heapreplace(heap, (-chance / cost, number, chance, cost))

    def add_passes(self, offers: Sequence[_Offered]) -> None:
        """As much as a draft model should propose. Where that is nothing, because its passes were too dear, they are measured again after a
        while: by one token of the row that it has least to catch up with. Catching up with all rows would cost more than is gained before
        it turns out that nothing has changed."""
        costs = self._costs
        if not costs.draft:  # what a pass costs is not known
            return
        self._add_passes(offers, costs.draft)
        if 0 < costs.draft_low < costs.draft and not any(offered.length for offered in offers):
            self._add_passes(offers, costs.draft_low)
            worth = [offered for offered in offers if offered.length]
            for offered in worth:
                offered.length = 0
            if worth:
                min(worth, key=lambda each: _behind(each.request, costs, costs.draft)).length = 1

    def _add_passes(self, offers: Sequence[_Offered], share: float) -> None:
        """It goes on pass by pass, each of which costs something for itself: a pass is added if all the rows that are worth it bring more per
        second, with its cost, than the step has. `share`: what a pass costs of a step with as many tokens."""
        costs = self._costs
        going = [(1.0, offered) for offered in offers]  # and the chance that all of its tokens so far count
        while going and self._room:
            found: list[tuple[float, float, _Offered]] = []  # (chance, cost, offer)
            for so_far, offered in going:
                depth, offer, request = offered.length, offered.offer, offered.request
                if depth == len(offer.tokens):
                    continue
                chance, position = so_far * offer.chances[depth], request.computed + depth
                cost = _cost(costs, position) + share * (costs.row + costs.context * position)
                if not depth:
                    cost += _behind(request, costs, share)
                if chance > self._least * cost:
                    found.append((chance, cost, offered))
            found.sort(key=lambda each: -each[0] / each[1])
            del found[self._room :]
            gain, cost = sum(each[0] for each in found), share * costs.step + sum(each[1] for each in found)
            if gain <= self._least * cost:
                return
            self._add(gain, cost, len(found))
            for _, _, offered in found:
                offered.length += 1
            going = [(chance, offered) for chance, _, offered in found]


def _drafts(offers: Sequence[_Offered]) -> list[Draft]:
    return [Draft(each.at, each.offer.tokens[: each.length]) for each in offers if each.length]


def _could_pay(shape: StepShape, costs: StepCosts) -> bool:
    """Whether a token for each row that is certain to count, and costs nothing to propose, would pay, at the average length of the rows."""
    if not costs.step and not costs.row:  # fitted to disturbed steps: that says nothing of what a drafted token costs
        return False
    position = shape.context // max(shape.rows, 1)
    seconds, added = costs.decode_seconds(shape), shape.rows * _cost(costs, position)
    return seconds > MARGIN * added and 2 * seconds > LEAST_GAIN * (seconds + added + costs.host_seconds(shape.rows))


def _cost(costs: StepCosts, position: int) -> float:
    """Seconds of a drafted token: those of a row."""
    return max(costs.row + costs.context * position, LEAST_COST * costs.step)


def _behind(request: Request, costs: StepCosts, share: float) -> float:
    """Seconds of what the draft model has not computed of a row, for each of the drafts that will share them. What came from the prefix
    cache the model has most likely computed, too."""
    assert isinstance(request.drafter, ModelDrafter)
    start = max(request.drafter.num_followed, request.num_cached, 0)
    count = request.computed - 1 - start  # before the row's own token, which every draft computes
    if count <= 1:
        return 0.0
    num_steps = max(1, min(SHARED_BY, request.max_len - len(request.tokens)))
    return share * costs.chunk_seconds(start, count) / num_steps


def _take_all(offers: Sequence[_Offered], room: int) -> None:
    for offered in offers:
        offered.length = min(len(offered.offer.tokens), room)
        room -= offered.length
